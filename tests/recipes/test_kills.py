"""Whole runs, killed at random moments and resumed by the command line: nothing is lost by it."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from raffia.recipes.efficientzero import resume, train
from raffia.recipes.efficientzero.evaluation import Evaluator
from raffia.recipes.efficientzero.presets import PRESETS
from raffia.train.checkpoint import Checkpoints
from raffia.train.config import to_json
from raffia.train.replay_log import ReplayLog
from tests.recipes.runs import Quiet, last_state, same, short, terminate
from tests.train.kills import run_with_kills
from tests.train.test_events import points

ROOT = Path(__file__).parents[2]
PROGRAM = "import sys; from raffia.cli import main; sys.exit(main())"


def plain(num_env_steps, every_updates):
    """Priorities, reanalyze, a stack of frames, evaluations."""
    config = short(num_env_steps)
    return replace(
        config,
        checkpoint=replace(config.checkpoint, every_updates=every_updates),
        evaluate=replace(config.evaluate, every_env_steps=max(40, num_env_steps // 8)),
    )


def in_workers(*size):
    config = plain(*size)
    return replace(config, env=replace(config.env, num_workers=2))


def on_disk(*size):
    """A ring that comes round more than once."""
    config = plain(*size)
    return replace(config, replay=replace(config.replay, on_disk=True, capacity=60))


def of_two_players(*size):
    config, game = plain(*size), PRESETS["tictactoe"]
    return replace(
        config,
        env=replace(game.env, num_envs=4),
        targets=replace(config.targets, discount=1.0, n_step=9, correct_horizon=False),
        evaluate=replace(config.evaluate, num_episodes=4, max_steps=9),
    )


def with_sampled_actions(*size):
    config, swing = plain(*size), PRESETS["pendulum"]
    return replace(
        config,
        env=replace(swing.env, num_envs=4, frame_stack=2),
        search=replace(swing.search, num_simulations=4, num_sampled_actions=5),
    )


def killed_and_resumed(config, home, *, num_kills, seed, at_work_seconds):
    """Train with kills; gives the folder and what came of it, each kill's leavings checked."""
    folder, settings = home / "killed", home / "settings.json"
    settings.write_text(json.dumps(to_json(config)))
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    raffia = [sys.executable, "-c", PROGRAM]

    def can_resume():
        if not (folder / "config.json").exists():
            return False
        said = []
        log = ReplayLog(folder / "replay")
        Checkpoints(folder / "checkpoints").newest(said.append, check=log.check)
        assert said == []  # whatever counts as a checkpoint is whole
        return True

    report = run_with_kills(
        [*raffia, "train", "efficientzero", "--config", settings, "--run", folder],
        [*raffia, "resume", folder],
        num_kills=num_kills,
        seed=seed,
        env={"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        watched=lambda: newest_update(folder / "checkpoints"),
        can_resume=can_resume,
        at_work_seconds=at_work_seconds,
        limit_seconds=100.0,
    )
    return folder, report


def newest_update(checkpoints):
    names = os.listdir(checkpoints) if checkpoints.exists() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)


def assert_same_run(straight, killed):
    (left, one), (right, other) = last_state(straight), last_state(killed)
    assert left.update == right.update
    for part in one:
        assert same(one[part], other[part]), part
    assert rows(straight) == rows(killed)
    updates = [row["update"] for row in rows(killed) if row["kind"] == "train"]
    assert updates == sorted(set(updates))
    assert scalars(straight) == scalars(killed)
    said = []
    assert Checkpoints(killed / "checkpoints").newest(said.append) and said == []
    assert [path.name for path in (killed / "trees").iterdir()]
    for path in (straight / "trees").iterdir():
        assert path.read_bytes() == (killed / "trees" / path.name).read_bytes()


def rows(folder):
    """What was written down, without the sessions and without times."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if not of_time(name)}
        for row in found
        if row["kind"] not in ("start", "resume")
    ]


def of_time(name):
    return name.startswith("seconds") or name.endswith("_per_second")


def scalars(folder):
    (path,) = folder.glob("events.out.tfevents.*")
    told = [(*name.split("/"), step, value) for name, step, value, _ in points(path)]
    return [row for row in told if row[0] not in ("start", "resume") and not of_time(row[1])]


@pytest.mark.slow
@pytest.mark.timeout(600)  # nine processes, on whatever machine
@pytest.mark.parametrize(
    ("make", "num_env_steps", "every_updates", "num_kills"),
    [
        (plain, 240, 1, 8),  # about every other kill is in the middle of a save
        (plain, 240, 7, 4),
        (in_workers, 120, 2, 4),
        (on_disk, 120, 2, 4),
        (of_two_players, 120, 2, 4),
        (with_sampled_actions, 120, 2, 4),
    ],
)
def test_kills_change_nothing(make, num_env_steps, every_updates, num_kills, tmp_path):
    config = make(num_env_steps, every_updates)
    train(config, tmp_path / "straight", view=Quiet())
    folder, report = killed_and_resumed(
        config, tmp_path, num_kills=num_kills, seed=num_env_steps, at_work_seconds=0.1
    )
    assert len(report.kills) == num_kills, "the run ended before: make it longer"
    assert report.num_at_work >= num_kills // 2
    assert_same_run(tmp_path / "straight", folder)


# -- at moments that are chosen


def brief():
    """12 updates, evaluated after 3 and at the end, saved after 7 and at the end."""
    config = short(num_env_steps=88)
    return replace(
        config,
        loss=replace(config.loss, unroll_steps=5),
        targets=replace(config.targets, n_step=5),
        collect=replace(config.collect, updates_per_env_step=0.25, rollout_length=1),
    )


def stopping_in_evaluation(monkeypatch, number):
    """SIGTERM comes while this evaluation, counted from 1, is going on."""
    play, calls = Evaluator.play, []

    def stopped(self, *args, **kwargs):
        calls.append(0)
        if len(calls) == number:
            terminate()
        return play(self, *args, **kwargs)

    monkeypatch.setattr(Evaluator, "play", stopped)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight") / "run"
    train(brief(), folder, view=Quiet())
    return folder


@pytest.mark.parametrize(("number", "update"), [(1, 3), (2, 12)])
def test_an_evaluation_that_is_broken_off_is_made_up_for(
    number, update, straight, tmp_path, monkeypatch
):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        stopping_in_evaluation(patch, number)
        result = train(brief(), folder, view=Quiet())
    assert (result.reason, result.update, result.signal) == ("stopped", update, "SIGTERM")
    assert resume(folder, view=Quiet()).reason == "finished"
    assert played(folder) == played(straight)
    best = [Checkpoints(run / "checkpoints").best() for run in (straight, folder)]
    assert best[0].update == best[1].update and best[0].score == best[1].score


def played(folder):
    return [row for row in rows(folder) if row["kind"] in ("train", "episode", "evaluate")]


def test_a_target_that_the_evaluation_broken_off_reaches_ends_the_resumed_run(
    tmp_path, monkeypatch
):
    config = brief()
    config = replace(config, evaluate=replace(config.evaluate, target_return=1.0))
    with monkeypatch.context() as patch:
        stopping_in_evaluation(patch, 1)
        train(config, tmp_path / "run", view=Quiet())
    result = resume(tmp_path / "run", view=Quiet())
    assert (result.reason, result.update) == ("target", 3)


def test_a_target_may_be_reached_at_the_end(tmp_path):
    config = brief()
    late = replace(config.evaluate, target_return=1.0, every_env_steps=10_000)
    result = train(replace(config, evaluate=late), tmp_path / "run", view=Quiet())
    assert (result.reason, result.update) == ("target", 12)
    assert rows(tmp_path / "run")[-1]["reason"] == "target"


def test_a_run_that_dies_at_its_last_save_has_not_ended(straight, tmp_path, monkeypatch):
    save = Checkpoints.save

    def dies(self, update, *args, **kwargs):
        if update == 12:
            raise MemoryError("killed")
        return save(self, update, *args, **kwargs)

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", dies)
        with pytest.raises(MemoryError):
            train(brief(), folder, view=Quiet())
    assert rows(folder)[-1]["kind"] != "end"
    assert resume(folder, view=Quiet()).reason == "finished"
    assert_same_run(straight, folder)


def test_evaluations_may_become_rarer_or_more_frequent(tmp_path):
    folder, config = tmp_path / "run", brief()
    train(config, folder, view=Quiet({5: terminate}))
    often = replace(config, evaluate=replace(config.evaluate, every_env_steps=4))
    resume(folder, config=often, view=Quiet({8: terminate}))
    rare = replace(config, evaluate=replace(config.evaluate, every_env_steps=40))
    resume(folder, config=rare, view=Quiet())
    assert [row["env_step"] for row in rows(folder) if row["kind"] == "evaluate"] == [
        *(52, 60, 64, 68),  # at 72 it was broken off, and is not due any more
        *(80, 88),
    ]
