"""A run's workers: their settings, their metrics, and their failures."""

import json
import re
import sys
from contextlib import closing
from functools import partial
from itertools import pairwise

import pytest
import torch

from raffia import TensorDict
from raffia.algorithms.efficientzero import Planner, make_model
from raffia.data import ReplayShards
from raffia.distributed import ChaosEngine, InlineEngine, Needs, RoleError
from raffia.envs import Discrete, EnvSpec, GymEnv
from raffia.lazy import imported
from raffia.recipes import resume
from raffia.recipes.efficientzero import actors, evaluation, reanalyzers
from raffia.recipes.efficientzero import experiment as run_module
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.ilql import train
from raffia.recipes.ilql.evaluators import EvaluateRole, process_config
from raffia.recipes.scale_config import EngineConfig, EvaluatorsConfig
from raffia.recipes.workers import make_engine
from raffia.report import write_report
from raffia.report.folder import read_run
from raffia.report.plots import spent
from raffia.search import UnfitOutputError
from raffia.train import Checkpoints, NonFiniteError, RunError, TrainingSession, checkpoint
from raffia.train.record import EpisodeRecorder
from tests.recipes.ilql_settings import make_bases
from tests.recipes.layouts import (
    AHEAD,
    ALL,
    BATCHES,
    ILQL_EVALUATED,
    ILQL_MEMBERS,
    PARTS,
    RUNS,
    SHARDS,
    SMOKE,
    WORDLE,
    experiment,
    layout,
    results_of,
    stopped,
    trained,
    with_engine,
)
from tests.recipes.runs import Quiet, changed, refused, rows, with_all
from tests.recipes.test_ilql_own_environment import ENV

LATE, OPEN = RUNS["evaluate later"], RUNS["shards ahead"]
QUICK = {"loss__unroll_steps": 1, "search__num_simulations": 2}  # a third of the time

# ------------------------------------------------------------------- settings of workers

PATIENT = {"engine__max_restarts": 7, "engine__patience_seconds": 9.0}


def room(kind):
    return {f"{kind}__num": 2, f"{kind}__cpus": 0.5, f"{kind}__gpus": 0.25, **PATIENT}


# For each kind: the run, its changed settings, the attribute with their effect, and its values.
POOL = {"num_workers": 2, "max_restarts": 7, "patience": 9.0, "needs.cpus": 0.5, "needs.gpus": 0.25}
FOLLOWERS = {"num": 1, "max_restarts": 7, "patience": 9.0, "_engine.spares": 1}
LEARNERS = {"learners__num": 2, "engine__spares": 1, **PATIENT}
EARLY, MEMBERS = {"join_after": 3}, {"num_workers": 2, "max_restarts": 7, "patience": 9.0}
POOL_SETTINGS = {
    "actors": (SMOKE, room("actors"), "collector.pool", POOL),
    "reanalyzers": (BATCHES, room("reanalyzers"), "ahead.pool", POOL),
    "reanalyzers ahead": (BATCHES, {"reanalyzers__ahead": 7}, "ahead", {"ahead": 7}),
    "evaluators": (SMOKE, room("evaluators"), "evaluations.pool", POOL),
    "joined": (SMOKE, {"evaluators__join_after": 3}, "evaluations", EARLY),
    "learners": (PARTS, LEARNERS, "followers", FOLLOWERS),
    "ilql evaluators": (ILQL_EVALUATED, room("evaluators"), "evaluations.pool", POOL),
    "ilql joined": (ILQL_EVALUATED, {"evaluators__join_after": 3}, "evaluations", EARLY),
    "ilql learners": (WORDLE, LEARNERS, "followers", FOLLOWERS),
    "ilql members": (ILQL_MEMBERS, {"population__workers": 2, **PATIENT}, "across.pool", MEMBERS),
}


def attribute(value, names):
    for name in names.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("name", POOL_SETTINGS)
def test_the_settings_of_workers_take_effect(name, tmp_path):
    config, changes, path, expected = POOL_SETTINGS[name]
    with experiment(config, tmp_path / "run", **changes) as run:
        found = attribute(run, path)
        assert {entry: attribute(found, entry) for entry in expected} == expected


def test_the_settings_of_the_engine_take_effect(monkeypatch):
    with closing(make_engine(EngineConfig(name="process", spares=2))) as engine:
        assert engine.spares == 2
    calls = []
    monkeypatch.setattr("raffia.distributed.ray.RayEngine", lambda *a, **kw: calls.append((a, kw)))
    make_engine(EngineConfig(name="ray", address="auto", spares=3))
    assert calls == [(("auto",), {"spares": 3, "message": None})]


def test_evaluators_compute_on_their_device(tmp_path):
    config = with_all(ILQL_EVALUATED, evaluators__num=1, evaluators__device="meta")
    role = EvaluateRole(process_config(config, tmp_path), 0)
    assert {parameter.device.type for parameter in role.evaluator.networks.model.parameters()} == {
        "meta"
    }


def test_tasks_without_workers_run_in_the_leader_s_process(tmp_path):
    """Also when other kinds have workers in other processes."""
    settings = dict(actors__num=1, engine__name="process")
    with experiment(ALL, tmp_path / "run", **settings) as run:
        pools = [run.collector.pool, run.ahead.pool, run.evaluations.pool]
        engines = [type(pool.engine).__name__ for pool in pools]
        assert engines == ["ProcessEngine", "InlineEngine", "InlineEngine"]
        assert any("1 actor in processes of this" in line for line in run.view.messages)
        assert any("1 reanalyzer in this process" in line for line in run.view.messages)


def test_room_is_required_for_all_workers_together(tmp_path, monkeypatch):
    required = []

    class Small(InlineEngine):
        def require(self, workers):
            required.extend((group.num, group.needs.cpus, group.needs.gpus) for group in workers)
            raise ValueError("no room")

    with_engine(monkeypatch, Small())
    settings = layout(reanalyzers=2, actors=1, evaluators=1)
    with pytest.raises(ValueError, match="no room"):
        more = dict(reanalyzers__cpus=2.0, reanalyzers__gpus=0.25)
        trained(BATCHES, tmp_path / "run", **settings, **more)
    assert required == [(1, 1.0, 0.0), (2, 2.0, 0.25), (1, 1.0, 0.0)]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_learners_on_ray_are_workers_of_its_engine(tmp_path, monkeypatch):
    required = []

    class Full(InlineEngine):
        def require(self, workers):
            required.extend((one.role, one.num, one.needs) for one in workers)
            raise ValueError("no room")

    with_engine(monkeypatch, Full())
    for engine in ("ray", "process"):
        settings = dict(learners__num=3, learners__gpus=0.5, engine__name=engine)
        with pytest.raises(ValueError, match="no room") as error:
            trained(PARTS, tmp_path / engine, evaluators__num=1, **settings)
        (note,) = error.value.__notes__
        assert note.startswith("Settings: evaluators.num, evaluators.cpus, evaluators.gpus")
        assert note.endswith("; learners.num, num_threads, learners.gpus") == (engine == "ray")
    (_, _, _), learners, (_, _, _) = required
    assert learners == ("raffia.distributed.follow:Follower", 2, Needs(cpus=1.0, gpus=0.5))


# ----------------------------------------------------------------------------------- refusals

CARTPOLE = EnvSpec(observation_shape=(4,), action=Discrete(2))


@pytest.mark.parametrize("kind", ["actors", "learners"])
@pytest.mark.parametrize("argument", ["make_env", "networks"])
def test_custom_envs_and_networks_cannot_run_in_workers(argument, kind, tmp_path):
    custom = {"make_env": lambda *args, **options: run_module.MAKE_ENV(*args, **options)}
    custom["networks"] = lambda: make_model(CARTPOLE, PARTS.model)
    with pytest.raises(ValueError, match=f"{kind} are built from the config alone"):
        config = with_all(PARTS, **{f"{kind}__num": 2})
        EfficientZeroExperiment(config, tmp_path, Quiet(), **{argument: custom[argument]})


@pytest.mark.parametrize("kind", ["actors", "reanalyzers", "evaluators"])
def test_unavailable_devices_and_engines_leave_no_folder(kind, tmp_path, monkeypatch):
    config = with_all(SMOKE, **{f"{kind}__num": 1, f"{kind}__device": "gpu"})
    refused(config, tmp_path, rf"{kind}.device='gpu' cannot be used: no device")
    monkeypatch.setitem(sys.modules, "ray", None)
    on_ray = with_all(SMOKE, **{f"{kind}__num": 1, "engine__name": "ray"})
    refused(on_ray, tmp_path, r"pip install 'raffia\[scale\]'", ModuleNotFoundError)


def test_compiled_runs_without_a_compiler_leave_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    refused(with_all(SMOKE, compile=True), tmp_path, "needs a C.. compiler, and .*g.. is not found")


def test_actors_of_environments_that_need_no_processes_are_refused_at_the_start(tmp_path):
    config = with_all(SMOKE, env={"id": "minatar/breakout", "num_workers": 2}, actors__ahead=1)
    refused(config, tmp_path, "steps all its environments together", ValueError)


def test_settings_of_open_batches_cannot_change_at_a_resume(tmp_path):
    """The lead of batches and the number of shards."""
    stopped(OPEN, tmp_path / "run", 5)
    for name, value in (("reanalyzers.ahead", 0), ("replay.shards", 1)):
        other = changed(OPEN, name, value)
        message = f"{name} cannot be changed: .* was started with other values"
        with pytest.raises(RunError, match=message):
            resume(tmp_path / "run", config=other, view=Quiet())


def test_environments_that_workers_cannot_import_are_refused(tmp_path):
    (tmp_path / "echo.py").write_text(ENV)
    config = with_all(make_bases(tmp_path)["file"], evaluators__num=1)
    found = imported(f"{tmp_path / 'echo.py'}:Echo")
    words = "environment that workers can import, not .*<lambda>"
    refused(config, tmp_path, words, ValueError, make_env=lambda: found())
    for module in ("__main__", "of_no_file"):
        kind = type("Made", (), {"__module__": module})
        with pytest.raises(ValueError, match="workers can import, not __main__:Made"):
            process_config(ILQL_EVALUATED, tmp_path, kind)


@pytest.mark.slow
def test_a_custom_environment_is_evaluated_in_workers(tmp_path, monkeypatch):
    (tmp_path / "echo.py").write_text(ENV)
    file = tmp_path / "echo.py"
    monkeypatch.chdir(tmp_path)
    config = with_all(make_bases(tmp_path)["file"], evaluators__num=1)
    train(with_all(config, engine__name="process"), "there", view=Quiet(), make_env="echo.py:Echo")
    without_workers = with_all(config, evaluators=EvaluatorsConfig())
    train(without_workers, "here", view=Quiet(), make_env=f"{file}:Echo")
    assert results_of(tmp_path / "there") == results_of(tmp_path / "here")
    role_config = process_config(config, tmp_path, imported(f"{file}:Echo"))
    assert json.loads(role_config)["env"] == f"{file}:Echo"
    assert len(rows(tmp_path / "here", "evaluate")[0]["returns"]) == 4


# ---------------------------------------------------------------------------------- reports


def test_the_row_of_a_resume_has_the_changed_settings(tmp_path):
    folder = tmp_path / "run"

    stop = partial(next, iter([False, False, True]), True)
    stopped(AHEAD, folder, 3)
    changes = dict(actors__num=2, engine__max_restarts=5, evaluators__join_after=9)
    resume(folder, config=with_all(AHEAD, **changes), view=Quiet(), stop=stop)
    resume(folder, view=Quiet(), stop=stop)
    first, second = rows(folder, "resume")
    expected = {name.replace("__", "."): value for name, value in changes.items()}
    assert first["changed"] == expected and "changed" not in second


def test_waiting_is_not_counted_twice(tmp_path):
    """It is part of "collect" and "targets" already, so the report must not add it."""
    changes = dict(QUICK, collect__num_env_steps=120)
    trained(AHEAD, tmp_path / "run", actors__num=2, reanalyzers__ahead=3, **changes)
    run = read_run(tmp_path / "run")
    assert {"waited_for_actors_seconds", "waited_for_batches_seconds"} <= {*run.of("train")[-1]}
    assert spent(run) and not any("waited" in name for name in spent(run))


@pytest.mark.slow
def test_waiting_and_restarts_are_shown_and_reported(tmp_path, monkeypatch):
    class Watching(Quiet):
        def show(self, status):
            self.latest = status

    with_engine(monkeypatch, ChaosEngine(2, lost=0.3))
    config = with_all(AHEAD, actors__num=2, engine__max_restarts=50)
    view = Watching()
    train(config, tmp_path / "run", view=view)
    assert 0 < view.latest.waiting <= 1 and view.latest.staleness >= AHEAD.actors.ahead
    row = read_run(tmp_path / "run").of("train")[-1]
    assert view.latest.worker_restarts == row["actor_restarts"] > 0
    page = write_report([tmp_path / "run"]).read_text()
    assert "waited for actors" in page and f">{row['actor_restarts']:.0f}</td>" in page


def test_train_rows_have_metrics_of_the_members_workers(tmp_path):
    trained(ILQL_MEMBERS, tmp_path / "run", population__workers=2, num_updates=1)
    row = read_run(tmp_path / "run").of("train")[-1]
    assert row["member_restarts"] == 0 and row["waited_for_members_seconds"] > 0


def test_simulations_in_workers_are_counted(tmp_path):
    counts = []
    for num in (0, 2):
        with experiment(BATCHES, tmp_path / f"{num}", reanalyzers__num=num, **QUICK) as run:
            with closing(TrainingSession(run)) as session:
                session.run(partial(next, iter([False] * 5), True))
            counts.append(run.counters()["simulations"])
    assert counts[0] == counts[1] > 0


def test_a_resume_knows_how_old_the_last_rollout_s_weights_were(tmp_path):
    stopped(AHEAD, tmp_path / "run", 12, **QUICK)
    with (
        experiment(AHEAD, tmp_path / "run", **QUICK) as run,
        closing(TrainingSession(run)) as session,
    ):
        session.start()
        assert run.collector.staleness >= AHEAD.actors.ahead


def test_a_summary_of_a_run_does_not_go_back(tmp_path):
    """The update is that of the train row, not of the evaluation after it."""
    folder = tmp_path / "run"
    stopped(LATE, folder, 32, **QUICK)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    cut = len(kinds) - kinds[::-1].index("evaluate")
    (folder / "metrics.jsonl").write_text("\n".join(lines[:cut]) + "\n")
    assert read_run(folder).update == 30


# ------------------------------------------------------------------------------ failures


def test_the_error_of_an_environment_in_an_actor_has_a_note_that_reproduces_it(
    tmp_path, monkeypatch
):
    step_row, calls = GymEnv.step_row, []

    def hot(env, *arguments):
        calls.append(env)
        if len(calls) == 70:
            raise RuntimeError("the motor is hot")
        step_row(env, *arguments)

    monkeypatch.setattr(GymEnv, "step_row", hot)
    with pytest.raises(RoleError) as caught:
        trained(AHEAD, tmp_path / "run", actors__num=2)
    assert re.search(
        r"(?s)^ActorRole [01], task \d+: RuntimeError: the motor is hot\n"
        r"the run's environment [01], after \d+ actions since the reset with seed \d+\n.*"
        r"test_workers.py\", line \d+, in hot",
        str(caught.value),
    )
    row = read_run(tmp_path / "run").of("error")[-1]
    assert "the motor is hot" in row["error"] and "since the reset with seed" in row["error"]
    assert caught.value.__notes__ and "raffia resume" in caught.value.__notes__[-1]


FAILING = {  # the role, the task, and the kind of its failure
    "soon": (reanalyzers.ReanalyzeRole, ("update", 8), "raises"),
    "actors": (actors.ActorRole, ("num_env_steps", 208), "raises"),
    # Task of update 8, before which a rollout arrived that makes an evaluation due.
    "reanalyzers": (reanalyzers.ReanalyzeRole, ("update", 8), "raises"),
    # ... before which an episode ended.
    "reanalyzers later": (reanalyzers.ReanalyzeRole, ("update", 14), "raises"),
    "evaluators": (evaluation.EvaluateRole, ("count", 240), "raises"),
    "lost": (reanalyzers.ReanalyzeRole, ("update", 33), "is lost"),
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "soon")) for kind in FAILING],
)
def test_a_failed_task_saves_the_last_update_for_a_resume(
    kind, in_one_process, tmp_path, monkeypatch
):
    folder, (role, (key, number), failure) = tmp_path / "run", FAILING[kind]
    name = "all ahead, soon over" if kind == "soon" else "all ahead"
    settings = dict(
        **layout(actors=2, reanalyzers=2, evaluators=1), checkpoint__every_updates=1_000
    )
    engine, do = ChaosEngine(0, lost=0.0, wasted=0.0), role.do

    def failing(self, task, weights):
        if int(task[key]) == number:
            if failure == "raises":
                raise ValueError("no such task")
            engine.lost = 1.0
        return do(self, task, weights)

    with monkeypatch.context() as patch:
        patch.setattr(role, "do", failing)
        with_engine(patch, engine)
        message = "no such task" if failure == "raises" else "was lost 4 times at task"
        with pytest.raises(RoleError, match=message) as caught:
            trained(RUNS[name], folder, **settings)
    row = read_run(folder).of("error")[-1]
    saved = Checkpoints(folder / "checkpoints").newest(print).update
    assert saved == row["update"] > 5 and saved % ALL.checkpoint.every_updates
    assert f"The last checkpoint is of update {saved}:" in caught.value.__notes__[-1]
    assert resume(folder, config=RUNS[name], view=Quiet()).reason == "finished"
    assert results_of(folder) == in_one_process(name)


def test_a_failed_task_and_a_failed_save_are_both_reported(tmp_path, monkeypatch):
    def failing(self, *task):
        if int(task[0]["update"]) == 5:
            raise ValueError("no such task")
        return do(self, *task)

    do = reanalyzers.ReanalyzeRole.do
    monkeypatch.setattr(reanalyzers.ReanalyzeRole, "do", failing)
    monkeypatch.setattr(checkpoint.Checkpoints, "save", full)
    with pytest.raises(RoleError, match="no such task") as caught:
        trained(BATCHES, tmp_path / "run", reanalyzers__num=1)
    assert "could not be saved: OSError" in caught.value.__notes__[0]
    assert "before its first checkpoint" in caught.value.__notes__[1]


SEARCHES = {  # the run, the number of workers, and the searching function
    "actors": (SMOKE, 1, (Planner, "plan")),
    "evaluators": (SMOKE, 1, (evaluation.Evaluator, "play")),
    "reanalyzers": (OPEN, 2, (reanalyzers, "make_batch")),
}


@pytest.mark.parametrize("kind", SEARCHES)
def test_nan_in_a_worker_s_search_is_dumped_as_in_the_leader_s(kind, tmp_path, monkeypatch):
    """The dump has the frames."""
    config, most, target = SEARCHES[kind]

    def broken(*arguments, **options):
        raise UnfitOutputError("root.value is NaN")

    monkeypatch.setattr(*target, broken)
    dumps = []
    for num in (0, most):
        folder = tmp_path / str(num)
        with pytest.raises(NonFiniteError, match="is not finite: root.value is NaN"):
            trained(config, folder, **{f"{kind}__num": num})
        (dump,) = (folder / "nan_dump").iterdir()
        dumps.append((dump.name, TensorDict.load(dump / "batch.safetensors")["observation"]))
    assert dumps[0][0] == dumps[1][0] and torch.equal(dumps[0][1], dumps[1][1])


def test_nan_in_an_evaluation_is_dumped_under_its_update(tmp_path, monkeypatch):
    play = evaluation.Evaluator.play

    def with_nan(self, planner, *, check, **settings):
        check(TensorDict(reward=torch.tensor([1.0, float("nan")]), batch_size=[2]))
        return play(self, planner, check=check, **settings)

    monkeypatch.setattr(evaluation.Evaluator, "play", with_nan)
    with pytest.raises(NonFiniteError, match=r"update 1 is not finite: batch reward: nan"):
        trained(LATE, tmp_path / "run", evaluators__num=1)
    assert (tmp_path / "run" / "nan_dump" / "000000001").is_dir()


def test_weights_that_are_not_finite_end_the_run_before_they_are_saved_or_sent(tmp_path):
    settings, folder = dict(evaluators__num=1, optimizer__learning_rate=1e38), tmp_path / "run"
    with pytest.raises(NonFiniteError, match="is not finite: .*Nothing of this update was saved"):
        trained(ILQL_EVALUATED, folder, **settings)
    assert (folder / "nan_dump").exists()
    assert Checkpoints(folder / "checkpoints").newest(print) is None


def full(*arguments, **options):
    raise OSError(28, "No space left on device")


def test_a_video_that_cannot_be_written_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(EpisodeRecorder, "save", full)
    view = Quiet()
    changes = dict(QUICK, collect__num_env_steps=100)
    config = with_all(RUNS["evaluate"], evaluate__record="gif", evaluators__num=1, **changes)
    assert train(config, tmp_path / "run", view=view).reason == "finished"
    assert any("an episode was not recorded" in text for text in view.messages)


@pytest.mark.slow
def test_a_score_that_could_not_be_written_is_written_later(in_one_process, tmp_path, monkeypatch):
    replace_extras, failures = checkpoint.replace_extras, iter([full])

    def full_at_first(*arguments):
        return next(failures, replace_extras)(*arguments)

    monkeypatch.setattr(checkpoint, "replace_extras", full_at_first)
    assert trained(LATE, tmp_path / "late") == in_one_process("evaluate later")


# -------------------------------------------------------------------------------------- shards


def test_shards_divide_capacity_and_environments_and_have_their_own_generators(tmp_path):
    with experiment(SHARDS, tmp_path / "run", replay__capacity=141) as run:
        assert type(run.replay) is ReplayShards and run.replay.reuse_memory
        assert [shard.storage.max_size for shard in run.replay.shards] == [71 + 4] * 2
        assert list(run.replays) == ["replay.0", "replay.1"]
        states = [shard.state_dict()["buffer"]["generator"]["state"] for shard in run.replay.shards]
        assert not torch.equal(*states)


def test_each_part_of_each_batch_has_its_own_generator(tmp_path, monkeypatch):
    seeds, make_batch = [], reanalyzers.make_batch

    def recording(*arguments, generator, **options):
        seeds.append(generator.initial_seed())
        return make_batch(*arguments, generator=generator, **options)

    monkeypatch.setattr(reanalyzers, "make_batch", recording)
    config = with_all(SHARDS, replay__on_disk=True, collect__num_env_steps=120, **QUICK)
    trained(config, tmp_path / "run")
    assert len(seeds) == len(set(seeds)) == 2 * config.num_updates > 10
    assert sorted(path.name for path in (tmp_path / "run/replay").iterdir()) == ["0", "1"]


def test_workers_are_sent_row_numbers_and_new_steps(tmp_path, monkeypatch):
    """No task has the frames of segments; each row is sent once to each worker."""
    tasks, sent = [], []

    class Recording(InlineEngine):
        def start(self, *arguments):
            worker = super().start(*arguments)
            ask, load = worker.ask, worker.load

            def recording_ask(task, weights):
                tasks.append(set(task["segments"].keys()))
                sent.extend((arguments[2], name, new) for name, new in task["rows"].items())
                ask(task, weights)

            def recording_load(state):
                sent.extend((arguments[2], name, new) for name, new in state["rows"].items())
                load(state)

            worker.ask, worker.load = recording_ask, recording_load
            return worker

    with_engine(monkeypatch, Recording())
    trained(OPEN, tmp_path / "run", reanalyzers__num=2, **QUICK)
    assert len(tasks) == 80 and all("frame_rows" in names for names in tasks)
    assert not any("observation" in names for names in tasks)
    for worker in range(2):
        new = [new for index, name, new in sent if (index, name) == (worker, str(worker))]
        spans = [(int(each["first"]), int(each["first"]) + len(each["rows"])) for each in new]
        assert all(stop == first for (_, stop), (first, _) in pairwise(spans))
        assert len({index for index, name, _ in sent if name == str(worker)}) == 1
        assert spans[-1][1] > 75  # more than the ring has


def test_little_is_stored_for_workers_that_may_die(tmp_path):
    with experiment(OPEN, tmp_path / "run", reanalyzers__num=2, **QUICK) as run:
        with closing(TrainingSession(run)) as session:
            stop, stored = iter([False] * 35), []

            def stop_and_record():
                stored.append(run.ahead.metrics()["mib_kept_for_reanalyzers"] * 2**20)
                return next(stop, True)

            session.run(stop_and_record)
        # Of 7 updates' steps, 4 numbers each, no more; rounded as metrics are.
        rows = [feed.num_bytes_stored / 16 for feed in run.ahead._making.feeds]
        assert 0 < max(rows) <= 7 * 2 * 2 + 16
        assert max(stored) <= 2**20 * 0.01
