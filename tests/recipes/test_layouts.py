"""Runs have the same bits with any layout of workers, and whichever of them die."""

import os
import signal
from contextlib import closing
from functools import partial

import pytest

from raffia.distributed import ChaosEngine, RoleError
from raffia.recipes import resume, train
from raffia.recipes.population_config import PopulationConfig
from raffia.recipes.scale_config import EvaluatorsConfig
from raffia.train import Checkpoints, TrainingSession
from tests.recipes.ilql_settings import make_bases
from tests.recipes.killing import KillingEngine
from tests.recipes.layouts import (
    ILQL_EVALUATED,
    PARTS,
    RUNS,
    SMOKE,
    WORDLE,
    experiment,
    layout,
    results_of,
    stopped,
    trained,
    with_engine,
)
from tests.recipes.runs import Quiet, rows
from tests.recipes.test_settings import BASES, with_all


def row(*values, fast=False):
    """A row of a table; slow by default."""

    def describe(value):
        if isinstance(value, dict):
            return ",".join(f"{k.replace('__', '.')}={v}" for k, v in value.items()) or "here"
        return getattr(value, "__name__", str(value))

    names = [describe(v) for v in values if not hasattr(v, "seed")]  # a config is too long
    marks = [] if fast else [pytest.mark.slow, pytest.mark.timeout(600)]
    return pytest.param(*values, id="-".join(names)[:150], marks=marks)


def case(*values, fast=False, **settings):
    """A row with the settings of its layout."""
    return row(*values, settings, fast=fast)


LAYOUTS = [
    case("act", **layout(actors=2)),
    # 60 updates, of which actors are 8 ahead.
    *(case("all ahead", **layout(actors=num, reanalyzers=2)) for num in (1, 4)),
    *(
        case("all ahead", **layout(engine, actors=2, reanalyzers=1, evaluators=1, cpus=0.5))
        for engine in ("process", "ray")
    ),
    case("act ahead", **layout("process", actors=2)),
    case("batches", **layout(reanalyzers=2)),
    case("batches ahead", **layout(reanalyzers=3)),
    case("shards", **layout(reanalyzers=2)),
    *(case("shards ahead", **layout(reanalyzers=num)) for num in (1, 4)),
    case("four shards", **layout(reanalyzers=2)),
    case("shards", replay__on_disk=True),
    case("shards ahead", **layout("process", reanalyzers=2, actors=2, evaluators=1)),
    case("evaluate", fast=True, **layout(evaluators=1)),
    case("evaluate later", **layout(evaluators=2)),
    case("two halves", fast=True, **layout(learners=2)),
    case("two halves", **layout("ray", learners=2)),
    case("three thirds", learners__sums="ordered", **layout(learners=3)),
    case("halves of shards", **layout(learners=2, reanalyzers=2)),
    case("members", **layout(members=2)),
    case("ilql halves", num_micro_batches=1, **layout(learners=2)),
    case("ilql thirds", num_micro_batches=1, learners__sums="ordered", **layout(learners=3)),
    *(case("ilql members", **layout(engine, members=2)) for engine in ("inline", "ray")),
    case("ilql evaluate", **layout(evaluators=1)),
    case("ilql evaluate later", **layout("process", evaluators=2)),
]


@pytest.mark.parametrize(("name", "settings"), LAYOUTS)
def test_a_run_is_the_same_in_any_layout(name, settings, in_one_process, tmp_path):
    assert trained(RUNS[name], tmp_path / "run", **settings) == in_one_process(name)


@pytest.mark.slow
def test_other_settings_give_other_runs(in_one_process):
    """Shows that the comparisons above can fail."""
    names = ("act", "act ahead", "batches", "shards", "two halves")
    assert len({in_one_process(name).code for name in names}) == len(names)


def chaos(lost):
    def make(seed):
        return ChaosEngine(seed, lost=lost, wasted=lost)

    make.__name__ = f"chaos {lost}"
    return make


def kills(at, every, most=1_000_000, signal_number=signal.SIGKILL):
    """Processes that are killed; the seed gives the number of spares."""

    def make(seed):
        engine = KillingEngine(at, every, most, signal_number)
        engine.spares = seed % 4
        return engine

    make.__name__ = f"{'killed' if signal_number == signal.SIGKILL else 'hangs'} at {at} {every}"
    return make


MANY = {"engine__max_restarts": 50}
ACTORS, PLANNERS, JUDGES = layout(actors=2), layout(reanalyzers=2), layout(evaluators=2)
EACH = ACTORS | PLANNERS | JUDGES
DEATHS = [  # the run, the engine by a seed, the seeds, and the least number of deaths
    # 20 seeds of chaos, and 50 kills
    *(case("all ahead", chaos(0.05), range(k, k + 5), 25, **EACH, **MANY)
      for k in (0, 5, 10, 15)),
    *(case("act ahead", kills("take", 9), range(k, k + 4), 25, **ACTORS) for k in (0, 4)),
    case("act ahead", kills("take", 40, 1, signal.SIGSTOP), [0], 1, **ACTORS, **MANY,
         engine__patience_seconds=8.0),
    case("batches ahead, soon over", chaos(0.15), [0], 2, fast=True, **PLANNERS, **MANY),
    case("batches ahead", chaos(0.15), [0], 4, **PLANNERS, **MANY),
    case("shards ahead", chaos(0.15), [0, 1], 8, **layout(reanalyzers=4), **MANY),
    case("shards ahead", kills("ask", 11), [0], 2, **PLANNERS, **MANY),
    case("evaluate later", chaos(0.3), [0, 1], 1, **JUDGES, **MANY),
    case("evaluate later", kills("ask", 1, most=2), [0], 2, **layout(evaluators=1)),
    case("members", kills("take", 20, most=2), [0], 2, **layout(members=2)),
    *(case(name, chaos(0.15), [3], 4, **PLANNERS, **MANY)
      for name in ("pair", "pair with replays")),
    case("ilql evaluate later", kills("ask", 1, most=2), [0], 2, **layout(evaluators=1)),
    case("ilql members", kills("ask", 5), [0], 4, **layout(members=2)),
    case("ilql members", kills("take", 4, most=1), [0], 1, **layout(members=2)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "make", "seeds", "least", "settings"), DEATHS)
def test_a_run_is_the_same_whichever_workers_die(
    name, make, seeds, least, settings, in_one_process, tmp_path, monkeypatch
):
    num_died = 0
    for seed in seeds:
        engine = make(seed)
        with_engine(monkeypatch, engine)
        assert trained(RUNS[name], tmp_path / f"{seed}", **settings) == in_one_process(name)
        num_died += engine.num_lost if isinstance(engine, ChaosEngine) else engine.num_killed
        assert not getattr(engine, "_idle", None)  # spares have left, too
    assert num_died >= least


def test_a_worker_that_always_dies_ends_the_run(tmp_path, monkeypatch):
    with_engine(monkeypatch, KillingEngine("ask", every=1))
    message = r"ReanalyzeRole was lost 2 times at task 0, .*SIGKILL"
    with pytest.raises(RoleError, match=message):
        trained(RUNS["batches ahead"], tmp_path, **layout(reanalyzers=1), engine__max_restarts=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config", "kills_at", "stop_at", "num_broadcasts"),
    [("two halves", PARTS, (2, 9), 12, None), ("ilql halves", WORDLE, (2,), 3, 2)],
)
def test_learners_that_are_killed_change_nothing(
    name, config, kills_at, stop_at, num_broadcasts, in_one_process, tmp_path
):
    folder = tmp_path / "run"
    with (
        experiment(config, folder, learners__num=2) as run,
        closing(TrainingSession(run)) as session,
    ):
        calls = []

        def stop():
            calls.append(0)
            if len(calls) in kills_at:
                os.kill(run.followers.workers[0].pid, signal.SIGKILL)
            return len(calls) > stop_at

        assert session.run(stop).reason == "stopped"
        assert run.followers.num_restarts == len(kills_at)
        metrics = run.extra_metrics(0)
        assert metrics["waited_for_learners_seconds"] > 0
        assert metrics["learner_restarts"] == len(kills_at)
        assert num_broadcasts in (None, run.followers.num_broadcasts)
    assert resume(folder, view=Quiet()).reason == "finished"
    assert results_of(folder) == in_one_process(name)


# ----------------------------------------------------------------------------------- resumes

RESUMES = [  # the run, its first layout, its second one, and the update where it stops
    row("act ahead", layout("process", actors=2), layout(actors=4), 17),
    row("all ahead", layout("process", actors=2), layout("ray", actors=4, cpus=0.25), 13),
    row("all ahead", layout(actors=2, reanalyzers=2, evaluators=1), {}, 13),
    *(row("batches ahead", layout(reanalyzers=2), {}, at) for at in (3, 40)),
    *(row("shards ahead", layout(reanalyzers=2), {}, at) for at in (19, 40)),
    row("shards ahead", {}, layout(reanalyzers=2), 40),
    row("shards ahead", layout(reanalyzers=4), layout(reanalyzers=1), 19),
    row("shards", {}, {}, 19),
    row("evaluate later", layout(evaluators=2), {}, 17),
    row("pair ahead", {}, layout(reanalyzers=2), 11),
    row("members", layout(members=2), layout(members=4), 9),
    row("ilql members", layout(members=2), layout(members=4), 7),
    row("ilql evaluate later", layout(evaluators=2), {}, 5),
]


def open_batches_of(found):
    """The open batches of a checkpoint by update; True for those stored completely."""
    drawn = found.tensors("stream")["ahead", "drawn"]
    segments = {int(name): drawn[name, "task", "segments"].keys() for name in drawn.keys()}
    assert not any("frame_rows" in keys for keys in segments.values())
    return {update: "observation" in keys for update, keys in segments.items()}


@pytest.mark.parametrize(("name", "first", "second", "stop_at"), RESUMES)
def test_a_resume_in_another_layout_is_the_same_run(
    name, first, second, stop_at, in_one_process, tmp_path
):
    """Open batches are requested again, with the weights and values of their draw."""
    config, folder = RUNS[name], tmp_path / "run"
    found = stopped(config, folder, stop_at, **first)
    if name in ("batches ahead", "shards ahead"):
        drawn, last = open_batches_of(found), min(config.num_updates, found.update + 7)
        assert sorted(drawn) == [*range(found.update, last)]
        assert any(drawn.values()) == (stop_at >= 40)  # batches whose rows were overwritten since
    result = resume(folder, config=with_all(config, **second), view=Quiet())
    assert result.reason == "finished" and results_of(folder) == in_one_process(name)


@pytest.mark.parametrize(
    ("name", "at"), [pytest.param("", 17, marks=pytest.mark.slow), ("ilql ", 5)]
)
def test_a_resume_without_evaluators_joins_open_evaluations(name, at, in_one_process, tmp_path):
    folder, config = tmp_path / "run", RUNS[f"{name}evaluate later"]
    with experiment(config, folder, evaluators__num=2) as run:
        with closing(TrainingSession(run)) as session:
            assert session.run(partial(next, iter([False] * at), True)).reason == "stopped"
            assert len(session.evaluate.open) > 1
    without = with_all(config, evaluators=EvaluatorsConfig())
    assert resume(folder, config=without, view=Quiet()).reason == "finished"
    expected = in_one_process(f"{name}evaluate")
    assert rows(folder, "evaluate") == expected.rows and results_of(folder).code == expected.code


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 5])
def test_a_longer_run_is_the_same_with_any_number_of_actors(ahead, tmp_path):
    """The weights for the first new rollouts were never published."""
    found = []
    for num in (1, 2):
        folder, config = tmp_path / f"{num}", with_all(SMOKE, actors__num=num, actors__ahead=ahead)
        trained(config, folder)
        longer = with_all(config, collect__num_env_steps=320)
        assert resume(folder, config=longer, view=Quiet()).reason == "finished"
        found.append(results_of(folder))
    assert found[0] == found[1]


# --------------------------------------------------------------------------- any environment

TWO_SHARDS = {"env__num_envs": 2, "replay__shards": 2, "reanalyzers__ahead": 3}
KINDS = {  # changed settings, and the layout
    "actors": ({}, layout(actors=0)),
    "batches ahead": ({"reanalyzers__ahead": 3}, layout(reanalyzers=2)),
    "shards": (TWO_SHARDS, layout(reanalyzers=2)),
    "evaluators": ({"evaluate__record": "gif"}, layout(evaluators=1)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "kind"),
    [
        *(("box", "actors"), ("box", "batches ahead"), ("box", "shards")),
        *(("board", "actors"), ("board", "batches ahead"), ("board", "evaluators")),
        *(("gumbel", "batches ahead"), ("stack", "shards"), ("stack", "evaluators")),
    ],
)
def test_every_kind_of_environment_runs_in_workers(base, kind, tmp_path):
    """Also resumed from open batches, and without priorities."""
    changes, settings = KINDS[kind]
    changes = {"replay__alpha": 0.0 if base == "box" else 0.6, **changes}
    config = with_all(BASES[base], evaluate__num_episodes=2, checkpoint__keep=1, **changes)
    if kind == "actors":
        settings = layout(actors=config.env.num_envs)
    expected = trained(config, tmp_path / "here")
    assert trained(config, tmp_path / "there", **settings) == expected
    endings = {name.rpartition(".")[2] for name in expected.files}
    assert kind != "evaluators" or endings >= {"gif", "svg"}
    if config.reanalyzers.ahead:
        found = stopped(config, tmp_path / "run", 2)
        assert sorted(open_batches_of(found)) == [*range(found.update, found.update + 3)]
        changed = with_all(config, **settings)
        assert resume(tmp_path / "run", config=changed, view=Quiet()).reason == "finished"
        assert results_of(tmp_path / "run") == expected


PAIR = PopulationConfig(size=2, ranges=("learning_rate=1e-4..1",))
TWO = with_all(SMOKE, population=PAIR, collect__num_env_steps=160)
TWICE = [  # runs in two layouts, none of which is one process
    row("members play", TWO, {}, layout(actors=4)),
    row("replays", RUNS["members with replays"], layout(members=1), layout(members=2, actors=2)),
    row("batches", RUNS["pair ahead"], layout(members=1), layout(members=2, reanalyzers=2)),
    row("means of statistics", with_all(SMOKE, learners__num=2), {}, {}),
]


@pytest.mark.parametrize(("_", "config", "first", "second"), TWICE)
def test_two_layouts_are_the_same_run(_, config, first, second, tmp_path):
    expected = trained(config, tmp_path / "one", **first)
    assert trained(config, tmp_path / "other", **second) == expected


# -------------------------------------------------------------------- rows, language models


HALVES = {"batch_size": 4, "num_micro_batches": 2}
OF_TWO = {"population": PopulationConfig(size=2, spread=3.0)}
LANGUAGE = [
    case("lora", HALVES, num_micro_batches=1, **layout(learners=2)),
    case("lora", HALVES | OF_TWO, fast=True, **layout(members=2)),
    case("lora", {"evaluate__num_episodes": 4}, **layout("process", evaluators=1)),
]


@pytest.mark.parametrize(("base", "changes", "settings"), LANGUAGE)
def test_frozen_weights_are_read_from_the_run_s_folder(base, changes, settings, tmp_path):
    config = with_all(make_bases(tmp_path)[base], **changes)
    expected = trained(config, tmp_path / "here")
    assert trained(config, tmp_path / "there", **settings) == expected and expected.rows


@pytest.mark.slow
def test_a_sharded_state_is_gathered_for_evaluations(tmp_path):
    shared = dict(learners__num=2, learners__state="sharded", num_updates=4)
    expected = trained(ILQL_EVALUATED, tmp_path / "here", **shared)
    assert trained(ILQL_EVALUATED, tmp_path / "there", **shared, evaluators__num=1) == expected


def test_evaluations_joined_later_belong_to_the_evaluated_update(in_one_process):
    """Rows and the best checkpoint, also where a score arrives later."""
    now, late = in_one_process("evaluate"), in_one_process("evaluate later")
    assert len(now.rows) > 2 and now.rows == late.rows
    largest = [max(filter(None, found.scores.values())) for found in (now, late)]
    scores = {(v, u) for found in (now, late) for u, v in found.scores.items()}
    best = {score for score in scores if score[0] in largest}
    by_update = {row["update"]: row["mean_return"] for row in late.rows}
    assert best == {(max(by_update.values()), min(by_update))}
    assert len({*by_update.values()}) == len(by_update)
    now, late = in_one_process("ilql evaluate"), in_one_process("ilql evaluate later")
    assert len(now.rows) == len(now.files) == 4
    assert (now.rows, now.files, now.code) == (late.rows, late.files, late.code)


def test_a_target_ends_the_run_when_it_is_joined(in_one_process, tmp_path):
    first = in_one_process("evaluate").rows[0]
    config = with_all(RUNS["evaluate later"], evaluate__target_return=first["mean_return"])
    result = train(config, tmp_path / "run", view=Quiet())
    assert (result.reason, result.update) == ("target", first["update"] + 20)
    best = Checkpoints(tmp_path / "run" / "checkpoints").best()
    assert (best.update, best.score) == (first["update"], first["mean_return"])
