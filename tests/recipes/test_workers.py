"""What a run asks of its workers, what it tells of them, and what becomes of their mistakes."""

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
from raffia.distributed import ChaosEngine, InlineEngine, RoleError
from raffia.envs import Discrete, EnvSpec, GymEnv
from raffia.lazy import imported
from raffia.recipes import resume_run, train_run
from raffia.recipes.efficientzero import actors, evaluation, reanalyzers
from raffia.recipes.efficientzero import experiment as run_module
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.ilql import train
from raffia.recipes.ilql.evaluators import EvaluateRole, evaluator_config
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
    EFFICIENTZERO,
    PARTS,
    RUNS,
    SHARDS,
    SMOKE,
    SPEAKERS,
    SPOKEN,
    WORDLE,
    experiment,
    left,
    on,
    stopped,
    trained,
    with_engine,
)
from tests.recipes.runs import Quiet, changed, rows, with_all
from tests.recipes.test_ilql_own_environment import ENV

LATE, OPEN = RUNS["evaluate later"], RUNS["shards ahead"]

# ------------------------------------------------------------------------- settings get there

PATIENT = {"engine__max_restarts": 7, "engine__patience_seconds": 9.0}


def room(kind):
    return {f"{kind}__num": 2, f"{kind}__cpus": 0.5, f"{kind}__gpus": 0.25, **PATIENT}


# Of each setting of workers: of which run, where what came of it is seen, and what it came to.
POOL = {"num_workers": 2, "max_restarts": 7, "patience": 9.0, "needs.cpus": 0.5, "needs.gpus": 0.25}
FOLLOWERS = {"num": 1, "max_restarts": 7, "patience": 9.0, "_engine.spares": 1}
LEARNERS = {"learners__num": 2, "engine__spares": 1, **PATIENT}
EARLY, MEMBERS = {"join_after": 3}, {"num_workers": 2, "max_restarts": 7, "patience": 9.0}
ARRIVED = {
    "actors": (SMOKE, room("actors"), "collector.pool", POOL),
    "reanalyzers": (BATCHES, room("reanalyzers"), "ahead.pool", POOL),
    "reanalyzers ahead": (BATCHES, {"reanalyzers__ahead": 7}, "ahead", {"ahead": 7}),
    "evaluators": (SMOKE, room("evaluators"), "evaluations.pool", POOL),
    "joined": (SMOKE, {"evaluators__join_after": 3}, "evaluations", EARLY),
    "learners": (PARTS, LEARNERS, "followers", FOLLOWERS),
    "ilql evaluators": (SPOKEN, room("evaluators"), "evaluations.pool", POOL),
    "ilql joined": (SPOKEN, {"evaluators__join_after": 3}, "evaluations", EARLY),
    "ilql learners": (WORDLE, LEARNERS, "followers", FOLLOWERS),
    "ilql members": (SPEAKERS, {"population__workers": 2, **PATIENT}, "across.pool", MEMBERS),
}


def inner(thing, names):
    for name in names.split("."):
        thing = getattr(thing, name)
    return thing


@pytest.mark.parametrize("name", ARRIVED)
def test_the_settings_of_workers_get_there(name, tmp_path):
    config, changes, place, wanted = ARRIVED[name]
    with experiment(config, tmp_path / "run", **changes) as run:
        found = inner(run, place)
        assert {entry: inner(found, entry) for entry in wanted} == wanted


def test_the_settings_of_the_engine_get_there(monkeypatch):
    with closing(make_engine(EngineConfig(name="process", spares=2))) as engine:
        assert engine.spares == 2
    given = []
    monkeypatch.setattr("raffia.distributed.ray.RayEngine", lambda *a, **kw: given.append((a, kw)))
    make_engine(EngineConfig(name="ray", address="auto", spares=3))
    assert given == [(("auto",), {"spares": 3, "message": None})]


def test_evaluators_compute_on_their_device(tmp_path):
    config = with_all(SPOKEN, evaluators__num=1, evaluators__device="meta")
    role = EvaluateRole(evaluator_config(config, tmp_path, None), 0)
    assert {one.device.type for one in role.networks.model.parameters()} == {"meta"}


def test_the_loop_does_the_tasks_of_kinds_without_workers(tmp_path):
    """Though they are tasks, and others have workers in other processes."""
    there = dict(actors__num=1, engine__name="process")
    with experiment(ALL, tmp_path / "run", **there) as run:
        pools = [run.collector.pool, run.ahead.pool, run.evaluations.pool]
        engines = [type(pool.engine).__name__ for pool in pools]
        assert engines == ["ProcessEngine", "InlineEngine", "InlineEngine"]
        assert any("1 actor in processes of this" in line for line in run.view.said)
        assert any("1 reanalyzer in this process" in line for line in run.view.said)


def test_workers_find_room_together(tmp_path, monkeypatch):
    asked = []

    class Small(InlineEngine):
        def require(self, workers):
            asked.extend((one.num, one.needs.cpus, one.needs.gpus) for one in workers)
            raise ValueError("no room")

    with_engine(monkeypatch, Small())
    there = on(reanalyzers=2, actors=1, evaluators=1)
    with pytest.raises(ValueError, match="no room"):
        more = dict(reanalyzers__cpus=2.0, reanalyzers__gpus=0.25)
        trained(BATCHES, tmp_path / "run", **there, **more)
    assert asked == [(1, 1.0, 0.0), (2, 2.0, 0.25), (1, 1.0, 0.0)]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# ----------------------------------------------------------------------------------- refusals

CARTPOLE = EnvSpec(observation_shape=(4,), action=Discrete(2))


@pytest.mark.parametrize("kind", ["actors", "learners"])
@pytest.mark.parametrize("given", ["make_env", "networks"])
def test_what_a_config_can_not_name_can_not_run_elsewhere(given, kind, tmp_path):
    own = {"make_env": lambda *args, **options: run_module.MAKE_ENV(*args, **options)}
    own["networks"] = lambda: make_model(CARTPOLE, PARTS.model)
    with pytest.raises(ValueError, match=f"{kind} are built from the config alone"):
        config = with_all(PARTS, **{f"{kind}__num": 2})
        EfficientZeroExperiment(config, tmp_path, Quiet(), **{given: own[given]})


@pytest.mark.parametrize("kind", ["actors", "reanalyzers", "evaluators"])
def test_devices_and_engines_that_are_not_there_leave_no_folder(kind, tmp_path, monkeypatch):
    config = with_all(SMOKE, **{f"{kind}__num": 1, f"{kind}__device": "gpu"})
    with pytest.raises(RunError, match=rf"{kind}.device='gpu' cannot be used: no device"):
        trained(config, tmp_path / "run")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'raffia\[scale\]'"):
        trained(SMOKE, tmp_path / "run", **{f"{kind}__num": 1, "engine__name": "ray"})
    assert not (tmp_path / "run").exists()


def test_what_was_drawn_by_can_not_change_at_a_resume(tmp_path):
    """Settings that shaped what was drawn."""
    stopped(OPEN, tmp_path / "run", 5)
    for name, value in (("reanalyzers.ahead", 0), ("replay.shards", 1)):
        other = changed(OPEN, name, value)
        words = f"{name} cannot be changed: .* was started with other values"
        with pytest.raises(RunError, match=words):
            resume_run(tmp_path / "run", config=other, view=Quiet())


def test_what_workers_can_not_import_is_refused(tmp_path):
    (tmp_path / "echo.py").write_text(ENV)
    config = with_all(make_bases(tmp_path)["file"], evaluators__num=1)
    found = imported(f"{tmp_path / 'echo.py'}:Echo")
    with pytest.raises(ValueError, match="environment that workers can import, not .*<lambda>"):
        train(config, tmp_path / "run", view=Quiet(), make_env=lambda: found())
    assert not (tmp_path / "run").exists()
    for home in ("__main__", "of_no_file"):
        made = type("Made", (), {"__module__": home})
        with pytest.raises(ValueError, match="workers can import, not __main__:Made"):
            evaluator_config(SPOKEN, tmp_path, made)


@pytest.mark.slow
def test_an_environment_of_one_s_own_is_played_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "echo.py").write_text(ENV)
    file = tmp_path / "echo.py"
    monkeypatch.chdir(tmp_path)
    config = with_all(make_bases(tmp_path)["file"], evaluators__num=1)
    train(with_all(config, engine__name="process"), "there", view=Quiet(), make_env="echo.py:Echo")
    here = with_all(config, evaluators=EvaluatorsConfig())
    train(here, "here", view=Quiet(), make_env=f"{file}:Echo")
    assert left(tmp_path / "there") == left(tmp_path / "here")
    told = evaluator_config(config, tmp_path, imported(f"{file}:Echo"))
    assert json.loads(told)["env"] == f"{file}:Echo"
    assert len(rows(tmp_path / "here", "evaluate")[0]["returns"]) == 4


# ---------------------------------------------------------------------------------- what is told


def test_a_resume_elsewhere_says_so_in_its_row(tmp_path):
    folder = tmp_path / "run"

    stop = partial(next, iter([False, False, True]), True)
    stopped(AHEAD, folder, 3)
    changes = dict(actors__num=2, engine__max_restarts=5, evaluators__join_after=9)
    resume_run(folder, config=with_all(AHEAD, **changes), view=Quiet(), stop=stop)
    resume_run(folder, view=Quiet(), stop=stop)
    first, second = rows(folder, "resume")
    wanted = {name.replace("__", "."): value for name, value in changes.items()}
    assert first["changed"] == wanted and "changed" not in second


def test_waiting_is_no_activity_beside_those_that_wait(tmp_path):
    """It is within "collect" and "targets" already, so the report must not add it to them."""
    trained(AHEAD, tmp_path / "run", actors__num=2, reanalyzers__ahead=3)
    run = read_run(tmp_path / "run")
    assert {"waited_for_actors_seconds", "waited_for_batches_seconds"} <= {*run.of("train")[-1]}
    assert spent(run) and not any("waited" in name for name in spent(run))


@pytest.mark.slow
def test_what_workers_cost_is_shown_and_reported(tmp_path, monkeypatch):
    class Watching(Quiet):
        def show(self, status):
            self.latest = status

    with_engine(monkeypatch, ChaosEngine(2, lost=0.3))
    config = with_all(AHEAD, actors__num=2, engine__max_restarts=50)
    view = Watching()
    train_run(EFFICIENTZERO, config, tmp_path / "run", view=view)
    assert 0 < view.latest.waiting <= 1 and view.latest.staleness >= AHEAD.actors.ahead
    row = read_run(tmp_path / "run").of("train")[-1]
    assert view.latest.worker_restarts == row["actor_restarts"] > 0
    page = write_report([tmp_path / "run"]).read_text()
    assert "waited for actors" in page and f">{row['actor_restarts']:.0f}</td>" in page


def test_rows_of_means_tell_of_the_workers_of_members(tmp_path):
    trained(SPEAKERS, tmp_path / "run", population__workers=2, num_updates=2)
    row = read_run(tmp_path / "run").of("train")[-1]
    assert row["member_restarts"] == 0 and row["waited_for_members_seconds"] > 0


def test_simulations_are_counted_wherever_they_are(tmp_path):
    counts = []
    for num in (0, 2):
        with experiment(BATCHES, tmp_path / f"{num}", reanalyzers__num=num) as run:
            with closing(TrainingSession(run)) as session:
                session.run(partial(next, iter([False] * 5), True))
            counts.append(run.counters()["simulations"])
    assert counts[0] == counts[1] > 0


def test_a_summary_of_a_run_does_not_go_back(tmp_path):
    """Of the row of means, not of the evaluation behind it."""
    folder = tmp_path / "run"
    stopped(LATE, folder, 32)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    cut = len(kinds) - kinds[::-1].index("evaluate")
    (folder / "metrics.jsonl").write_text("\n".join(lines[:cut]) + "\n")
    assert read_run(folder).update == 30


# ------------------------------------------------------------------------------ what goes wrong


def test_an_environment_that_raises_in_an_actor_is_told_with_what_gives_it_again(
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


FAILING = {  # whose task fails, which one, and how
    "actors": (actors.ActorRole, ("num_env_steps", 208), "raises"),
    # Of update 8, before which a turn was taken in that makes an evaluation due after it.
    "reanalyzers": (reanalyzers.ReanalyzeRole, ("update", 8), "raises"),
    # ... before which an episode ended.
    "reanalyzers later": (reanalyzers.ReanalyzeRole, ("update", 14), "raises"),
    "evaluators": (evaluation.EvaluateRole, ("count", 240), "raises"),
    "lost": (reanalyzers.ReanalyzeRole, ("update", 33), "is lost"),
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "reanalyzers")) for kind in FAILING],
)
def test_a_task_that_fails_saves_the_last_update_and_a_resume_goes_on_from_there(
    kind, in_one_process, tmp_path, monkeypatch
):
    folder, (role, (key, number), how) = tmp_path / "run", FAILING[kind]
    there = dict(**on(actors=2, reanalyzers=2, evaluators=1), checkpoint__every_updates=1_000)
    engine, do = ChaosEngine(0, lost=0.0, wasted=0.0), role.do

    def failing(self, task, weights):
        if int(task[key]) == number:
            if how == "raises":
                raise ValueError("no such task")
            engine.lost = 1.0
        return do(self, task, weights)

    with monkeypatch.context() as patch:
        patch.setattr(role, "do", failing)
        with_engine(patch, engine)
        words = "no such task" if how == "raises" else "was lost 4 times at task"
        with pytest.raises(RoleError, match=words) as caught:
            trained(ALL, folder, **there)
    row = read_run(folder).of("error")[-1]
    saved = Checkpoints(folder / "checkpoints").newest(print).update
    assert saved == row["update"] > 5 and saved % ALL.checkpoint.every_updates
    assert f"The last checkpoint is of update {saved}:" in caught.value.__notes__[-1]
    assert resume_run(folder, config=ALL, view=Quiet()).reason == "finished"
    assert left(folder) == in_one_process("all ahead")


def test_a_task_that_fails_and_a_save_that_fails_are_both_told(tmp_path, monkeypatch):
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


SEARCHES = {  # of which run, who searches there, and by what
    "actors": (SMOKE, 1, (Planner, "plan")),
    "evaluators": (SMOKE, 1, (evaluation.Evaluator, "play")),
    "reanalyzers": (OPEN, 2, (reanalyzers, "make_batch")),
}


@pytest.mark.parametrize("kind", SEARCHES)
def test_nan_in_a_worker_s_search_is_dumped_as_in_the_loop(kind, tmp_path, monkeypatch):
    """With its frames."""
    config, most, where = SEARCHES[kind]

    def broken(*arguments, **options):
        raise UnfitOutputError("root.value is NaN")

    monkeypatch.setattr(*where, broken)
    dumps = []
    for num in (0, most):
        folder = tmp_path / str(num)
        with pytest.raises(NonFiniteError, match="is not finite: root.value is NaN"):
            trained(config, folder, **{f"{kind}__num": num})
        (dump,) = (folder / "nan_dump").iterdir()
        dumps.append((dump.name, TensorDict.load(dump / "batch.safetensors")["observation"]))
    assert dumps[0][0] == dumps[1][0] and torch.equal(dumps[0][1], dumps[1][1])


def test_nan_in_an_evaluation_is_dumped_by_the_update_whose_evaluation_met_it(
    tmp_path, monkeypatch
):
    play = evaluation.Evaluator.play

    def with_nan(self, planner, *, check, **settings):
        check(TensorDict(reward=torch.tensor([1.0, float("nan")]), batch_size=[2]))
        return play(self, planner, check=check, **settings)

    monkeypatch.setattr(evaluation.Evaluator, "play", with_nan)
    with pytest.raises(NonFiniteError, match=r"update 1 is not finite: batch reward: nan"):
        trained(LATE, tmp_path / "run", evaluators__num=1)
    assert (tmp_path / "run" / "nan_dump" / "000000001").is_dir()


def test_weights_that_are_not_finite_end_the_run_before_they_are_sent(tmp_path):
    with pytest.raises(NonFiniteError):
        trained(SPOKEN, tmp_path / "run", evaluators__num=1, optimizer__learning_rate=1e38)


def full(*arguments, **options):
    raise OSError(28, "No space left on device")


def test_a_film_without_room_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(EpisodeRecorder, "save", full)
    view = Quiet()
    config = with_all(RUNS["evaluate"], evaluate__record="gif", evaluators__num=1)
    assert train_run(EFFICIENTZERO, config, tmp_path / "run", view=view).reason == "finished"
    assert any("an episode was not recorded" in text for text in view.said)


@pytest.mark.slow
def test_a_score_that_found_no_room_is_written_later(in_one_process, tmp_path, monkeypatch):
    replace_extras, failures = checkpoint.replace_extras, iter([full])

    def full_at_first(*arguments):
        return next(failures, replace_extras)(*arguments)

    monkeypatch.setattr(checkpoint, "replace_extras", full_at_first)
    assert trained(LATE, tmp_path / "late") == in_one_process("evaluate later")


# -------------------------------------------------------------------------------------- shards


def test_shards_divide_capacity_and_environments_and_draw_by_generators_of_their_own(tmp_path):
    with experiment(SHARDS, tmp_path / "run", replay__capacity=141) as run:
        assert type(run.replay) is ReplayShards and run.replay.reuse_memory
        assert [shard.storage.max_size for shard in run.replay.shards] == [71 + 4] * 2
        assert list(run.replays) == ["replay.0", "replay.1"]
        states = [shard.state_dict()["buffer"]["generator"]["state"] for shard in run.replay.shards]
        assert not torch.equal(*states)


def test_each_part_of_each_batch_is_made_with_a_generator_of_its_own(tmp_path, monkeypatch):
    seeds, make_batch = [], reanalyzers.make_batch

    def seen(*arguments, generator, **options):
        seeds.append(generator.initial_seed())
        return make_batch(*arguments, generator=generator, **options)

    monkeypatch.setattr(reanalyzers, "make_batch", seen)
    trained(SHARDS, tmp_path / "run", replay__on_disk=True)
    assert len(seeds) == len(set(seeds)) == 2 * SHARDS.num_updates
    assert sorted(path.name for path in (tmp_path / "run/replay").iterdir()) == ["0", "1"]


def test_workers_are_sent_numbers_of_rows_and_new_steps(tmp_path, monkeypatch):
    """No task has the frames of segments; each row is sent once to each worker."""
    tasks, sent = [], []

    class Seen(InlineEngine):
        def start(self, *arguments):
            worker = super().start(*arguments)
            ask, load = worker.ask, worker.load

            def seen(task, weights):
                tasks.append(set(task["segments"].keys()))
                sent.extend((arguments[2], name, new) for name, new in task["rows"].items())
                ask(task, weights)

            def loaded(state):
                sent.extend((arguments[2], name, new) for name, new in state["rows"].items())
                load(state)

            worker.ask, worker.load = seen, loaded
            return worker

    with_engine(monkeypatch, Seen())
    trained(OPEN, tmp_path / "run", reanalyzers__num=2)
    assert len(tasks) == 80 and all("frame_rows" in names for names in tasks)
    assert not any("observation" in names for names in tasks)
    for worker in range(2):
        spans = [
            (int(new["first"]), int(new["first"]) + len(new["rows"]))
            for index, name, new in sent
            if (index, name) == (worker, str(worker))
        ]
        assert all(stop == first for (_, stop), (first, _) in pairwise(spans))
        assert len({index for index, name, _ in sent if name == str(worker)}) == 1
        assert spans[-1][1] > 75  # more than the ring has


def test_little_is_kept_for_workers_that_may_die(tmp_path):
    with experiment(OPEN, tmp_path / "run", reanalyzers__num=2) as run:
        with closing(TrainingSession(run)) as session:
            stop, kept = iter([False] * 35), []

            def stops():
                kept.append(run.ahead.metrics()["mib_kept_for_reanalyzers"] * 2**20)
                return next(stop, True)

            session.run(stops)
        # Of 7 updates' steps, 4 numbers each, no more; rounded as metrics are.
        rows = [feed.num_bytes_stored / 16 for feed in run.ahead._making.feeds]
        assert 0 < max(rows) <= 7 * 2 * 2 + 16
        assert max(kept) <= 2**20 * 0.01
