"""Runs that are stopped, interrupted or killed are resumed as exactly the same run."""

import json
import os
import random
from dataclasses import replace

import pytest

from raffia.evolution.population import Traced
from raffia.recipes import efficientzero, ilql
from raffia.recipes.efficientzero import PRESETS, EfficientZeroRun
from raffia.recipes.efficientzero import evaluation as played_evaluation
from raffia.recipes.ilql import evaluation as spoken_evaluation
from raffia.train import Checkpoints, ReplayLog
from raffia.train.config import to_json
from tests.marks import slow_among
from tests.processes import RAFFIA, environment
from tests.recipes.ilql_runs import brief
from tests.recipes.runs import Quiet, last_state, of_time, rows, same, short, terminate, with_all
from tests.recipes.test_population_runs import (
    RUN,
    SIZES,
    efficientzero_config,
    efficientzero_forms,
    ilql_forms,
)
from tests.train.kills import run_with_kills
from tests.train.test_events import points


def scalars(folder):
    (path,) = folder.glob("events.out.tfevents.*")
    found = [(*name.split("/"), step, value) for name, step, value, _ in points(path)]
    return [row for row in found if row[0] not in ("start", "resume") and not of_time(row[1])]


def assert_same_run(expected, other, *kinds):
    """Compare checkpoints, rows (of these kinds, if given) and files of two runs."""
    (first, first_parts), (second, second_parts) = last_state(expected), last_state(other)
    assert first.update == second.update and first_parts.keys() == second_parts.keys()
    assert first.extras.get("data") == second.extras.get("data")
    for part in first_parts:
        assert same(first_parts[part], second_parts[part]), part
    assert rows(expected, *kinds) == rows(other, *kinds)
    updates = [row["update"] for row in rows(other, "train")]
    assert updates == sorted(set(updates))  # neither doubled nor missing
    assert kinds or scalars(expected) == scalars(other)
    warnings = []
    assert Checkpoints(other / "checkpoints").newest(warnings.append) and warnings == []
    for path in [*expected.glob("trees/*"), *expected.glob("dialogues/*")]:
        assert path.read_bytes() == (other / path.parent.name / path.name).read_bytes()


def collecting(num_env_steps, every_updates):
    """Priorities, reanalyze, a stack of frames, evaluations."""
    evaluations = dict(evaluate__every_env_steps=max(40, num_env_steps // 8))
    return with_all(short(num_env_steps), checkpoint__every_updates=every_updates, **evaluations)


def twelve():
    """12 updates, evaluated after 3 and at the end, saved after 7 and at the end."""
    config = with_all(short(num_env_steps=88), loss__unroll_steps=5, targets__n_step=5)
    return with_all(config, collect__updates_per_env_step=0.25, collect__rollout_length=1)


def sizes(run, **changes):
    return with_all(run, population=replace(run.population, **SIZES), **changes)


CONFIGS = {
    "efficientzero": short,
    "efficientzero twelve": twelve,
    "efficientzero in members": efficientzero_config,
    "efficientzero in members with replays": lambda: efficientzero_config(replay="own"),
    "efficientzero in members of sizes with replays": lambda: sizes(
        efficientzero_config(replay="own"), replay__batch_size=8
    ),
    "efficientzero in members of forms": efficientzero_forms,
    "ilql": brief,
    "ilql in members": lambda: RUN,
    "ilql in members of sizes": lambda: sizes(RUN, batch_size=8),
    "ilql in members of forms of trunks": lambda: ilql_forms(target="trunk"),
}


def functions_of(config):
    return efficientzero if isinstance(config, EfficientZeroRun) else ilql


def train(config, folder, **options):
    return functions_of(config).train(config, folder, view=Quiet(), **options)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Folders of uninterrupted runs; each run is made once."""
    found = {}

    def find(name):
        if name not in found:
            found[name] = tmp_path_factory.mktemp("uninterrupted") / "run"
            assert train(CONFIGS[name](), found[name]).reason == "finished"
        return found[name]

    return find


STOPS = [  # after which updates it is stopped
    ("ilql", [4, 9, 12]),
    ("efficientzero", [1, 6, 7, 20, 29]),
    ("efficientzero in members", [9, 14]),
    ("efficientzero in members with replays", [14]),
    ("efficientzero in members of sizes with replays", [9]),
    ("efficientzero in members of forms", [14]),
    ("ilql", [1, 4, 5, 11]),
    ("ilql in members", [6, 8]),
    ("ilql in members of sizes", [6]),
    ("ilql in members of forms of trunks", [7]),
]


@pytest.mark.parametrize(("name", "stops"), slow_among(STOPS, *STOPS[1:]))
def test_a_stopped_and_resumed_run_is_the_same_run(name, stops, uninterrupted, tmp_path):
    config, folder = CONFIGS[name](), tmp_path / "run"
    functions = functions_of(config)
    result = functions.train(config, folder, view=Quiet({stops[0]: terminate}))
    assert (result.reason, result.update, result.signal) == ("stopped", stops[0], "SIGTERM")
    for update in stops[1:]:
        assert functions.resume(folder, view=Quiet({update: terminate})).update == update
    assert functions.resume(folder, view=Quiet()).reason == "finished"
    assert_same_run(uninterrupted(name), folder, "train", "evaluate", "episode", "generation")
    assert "members" not in name or rows(folder, "generation")


def die():
    raise MemoryError("killed")


DEATHS = [("efficientzero", 7, 30), ("ilql", 5, 12)]


@pytest.mark.parametrize(("name", "every", "num_updates"), slow_among(DEATHS, DEATHS[0]))
def test_a_run_that_dies_resumes_from_its_last_checkpoint(
    name, every, num_updates, uninterrupted, tmp_path
):
    folder, draw, config = tmp_path / "run", random.Random(0), CONFIGS[name]()
    functions, view = functions_of(config), Quiet()
    with pytest.raises(MemoryError):
        functions.train(config, folder, view=Quiet({draw.randint(every, num_updates): die}))
    for _ in range(2):
        first = last_state(folder)[0].update + 1
        with pytest.raises(MemoryError):
            functions.resume(folder, view=Quiet({draw.randint(first, num_updates): die}))
    assert functions.resume(folder, view=view).reason == "finished"
    assert any("resuming after update" in line for line in view.messages)
    assert_same_run(uninterrupted(name), folder)


@pytest.mark.slow
def test_a_resume_is_exact_with_traced_updates(uninterrupted, tmp_path, monkeypatch):
    """Tracing starts at other steps in the resumed run."""
    traces, folder = [], tmp_path / "run"

    def trace_soon(function):
        traces.append(Traced(function, after=2))
        return traces[-1]

    monkeypatch.setattr("raffia.evolution.population.Traced", trace_soon)
    efficientzero.train(efficientzero_config(), folder, view=Quiet({14: terminate}))
    efficientzero.resume(folder, view=Quiet())
    assert [traced.num_recorded for traced in traces] == [1, 1]
    assert_same_run(uninterrupted("efficientzero in members"), folder, "generation")


# ------------------------------------------------------------------------ at random moments


def in_workers(*size):
    return with_all(collecting(*size), env__num_workers=2)


def on_disk(*size):
    """A ring buffer that is overwritten more than once."""
    return with_all(collecting(*size), replay__on_disk=True, replay__capacity=60)


def of_two_players(*size):
    board = with_all(collecting(*size), env=replace(PRESETS["tictactoe"].env, num_envs=4))
    board = with_all(board, evaluate__num_episodes=4, evaluate__max_steps=9)
    return with_all(board, targets=dict(discount=1.0, n_step=9, correct_horizon=False))


def with_sampled_actions(*size):
    swing = PRESETS["pendulum"]
    search = replace(swing.search, num_simulations=4, num_sampled_actions=5)
    env = replace(swing.env, num_envs=4, frame_stack=2)
    return with_all(collecting(*size), env=env, search=search)


def on_dialogues(num_updates, every_updates):
    changes = dict(checkpoint__every_updates=every_updates, evaluate__every_updates=9)
    return with_all(brief(num_updates=num_updates), **changes)


def newest_update(checkpoints):
    names = os.listdir(checkpoints) if checkpoints.exists() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)


KILLED = [
    (collecting, 240, 1, 6, 0.1),  # about every other kill is in the middle of a save
    (in_workers, 120, 2, 2, 0.1),
    (on_disk, 120, 2, 3, 0.1),
    (of_two_players, 120, 2, 2, 0.1),
    (with_sampled_actions, 120, 2, 2, 0.1),
    (on_dialogues, 120, 2, 3, 0.4),
]


@pytest.mark.slow
@pytest.mark.timeout(600)  # up to seven processes, on whatever machine
@pytest.mark.parametrize(("make", "size", "every_updates", "num_kills", "at_work_seconds"), KILLED)
def test_kills_change_nothing(make, size, every_updates, num_kills, at_work_seconds, tmp_path):
    """Killed and resumed by the command line; all available checkpoints are complete."""
    config, folder = make(size, every_updates), tmp_path / "killed"
    train(config, tmp_path / "uninterrupted")
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps(to_json(config)))
    name = "efficientzero" if functions_of(config) is efficientzero else "ilql"

    def can_resume():
        if not (folder / "config.json").exists():
            return False
        warnings, log = [], ReplayLog(folder / "replay")
        check = {"check": log.check} if name == "efficientzero" else {}
        Checkpoints(folder / "checkpoints").newest(warnings.append, **check)
        assert warnings == []
        return True

    kills = run_with_kills(
        [*RAFFIA, "train", name, "--config", settings, "--run", folder],
        [*RAFFIA, "resume", folder],
        num_kills=num_kills,
        seed=size,
        env=environment(),
        progress=lambda: newest_update(folder / "checkpoints"),
        can_resume=can_resume,
        at_work_seconds=at_work_seconds,
        limit_seconds=100.0,
    )
    assert len(kills) == num_kills, "the run ended before: make it longer"
    assert sum(made > 0 for made in kills) >= num_kills // 2
    assert_same_run(tmp_path / "uninterrupted", folder)


# -------------------------------------------------------------------- at chosen moments


def stopping_in_evaluation(patch, number):
    """Send SIGTERM during this evaluation of either agent, counted from 1."""
    calls = []

    def stopping(play):
        def stopped(*args, **kwargs):
            calls.append(0)
            if len(calls) == number:
                terminate()
            return play(*args, **kwargs)

        return stopped

    evaluator = played_evaluation.Evaluator
    patch.setattr(evaluator, "play", stopping(evaluator.play))
    patch.setattr(spoken_evaluation, "play", stopping(spoken_evaluation.play))


EVALUATIONS = [("efficientzero twelve", 1, 3), ("efficientzero twelve", 2, 12), ("ilql", 3, 8)]


@pytest.mark.parametrize(("name", "number", "update"), slow_among(EVALUATIONS, EVALUATIONS[1]))
def test_an_interrupted_evaluation_is_made_after_the_resume(
    name, number, update, uninterrupted, tmp_path, monkeypatch
):
    """In ILQL the third is the first decoding after update 8."""
    folder, config = tmp_path / "run", CONFIGS[name]()
    with monkeypatch.context() as patch:
        stopping_in_evaluation(patch, number)
        result = train(config, folder)
    assert (result.reason, result.update, result.signal) == ("stopped", update, "SIGTERM")
    assert all(row["update"] < update for row in rows(folder, "evaluate"))
    assert functions_of(config).resume(folder, view=Quiet()).reason == "finished"
    assert_same_run(uninterrupted(name), folder, "train", "episode", "evaluate")
    best = [Checkpoints(run / "checkpoints").best() for run in (uninterrupted(name), folder)]
    assert best[0].update == best[1].update and best[0].score == best[1].score


def test_a_target_reached_by_the_interrupted_evaluation_ends_the_resumed_run(tmp_path, monkeypatch):
    config = with_all(twelve(), evaluate__target_return=1.0)
    with monkeypatch.context() as patch:
        stopping_in_evaluation(patch, 1)
        train(config, tmp_path / "run")
    result = efficientzero.resume(tmp_path / "run", view=Quiet())
    assert (result.reason, result.update) == ("target", 3)


TARGETS = [
    (with_all(twelve(), evaluate__target_return=1.0), 3),
    (with_all(twelve(), evaluate__target_return=1.0, evaluate__every_env_steps=10_000), 12),
    (with_all(brief(), evaluate__target_return=-6.0), 4),
]


@pytest.mark.parametrize(("config", "update"), TARGETS)
def test_a_run_ends_at_its_target(config, update, tmp_path):
    """Also if it is reached at the end of the run, and if it is resumed after that."""
    for run in (train, lambda _, folder: functions_of(config).resume(folder, view=Quiet())):
        result = run(config, tmp_path / "run")
        assert (result.reason, result.update) == ("target", update)
    assert rows(tmp_path / "run")[-1]["reason"] == "target"


def test_a_run_that_dies_at_its_last_save_is_not_finished(uninterrupted, tmp_path, monkeypatch):
    save, folder = Checkpoints.save, tmp_path / "run"

    def dies(self, update, *args, **kwargs):
        if update == 12:
            die()
        return save(self, update, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", dies)
        with pytest.raises(MemoryError):
            train(twelve(), folder)
    assert rows(folder)[-1]["kind"] != "end"
    assert efficientzero.resume(folder, view=Quiet()).reason == "finished"
    assert_same_run(uninterrupted("efficientzero twelve"), folder)


def test_evaluations_may_become_rarer_or_more_frequent(tmp_path):
    folder, config = tmp_path / "run", twelve()
    efficientzero.train(config, folder, view=Quiet({5: terminate}))
    often = with_all(config, evaluate__every_env_steps=4)
    efficientzero.resume(folder, config=often, view=Quiet({8: terminate}))
    rare = with_all(config, evaluate__every_env_steps=40)
    efficientzero.resume(folder, config=rare, view=Quiet())
    # The one at 72 was interrupted, and is not due any more.
    assert [row["env_step"] for row in rows(folder, "evaluate")] == [52, 60, 64, 68, 80, 88]
