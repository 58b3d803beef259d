"""The commands as a user calls them: whole, on tiny runs."""

import errno
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from raffia.cli import main
from raffia.recipes.efficientzero.presets import PRESETS
from raffia.train.checkpoint import Checkpoints
from raffia.train.config import to_json
from tests.recipes.runs import last_state, rows, same, short

ROOT = Path(__file__).parents[2]
PROGRAM = "import sys; from raffia.cli import main; sys.exit(main())"


def tiny(num_env_steps=80, *, every_updates=5, **changes):
    config = short(num_env_steps, **changes)
    return replace(
        config,
        loss=replace(config.loss, unroll_steps=5),
        targets=replace(config.targets, n_step=5),
        collect=replace(config.collect, updates_per_env_step=0.25, rollout_length=1),
        checkpoint=replace(config.checkpoint, every_updates=every_updates),
        evaluate=replace(config.evaluate, every_env_steps=60),
    )


def game():
    board = PRESETS["tictactoe"]
    config = tiny(env=replace(board.env, num_envs=4))
    return replace(
        config,
        targets=replace(config.targets, discount=1.0, n_step=9, correct_horizon=False),
        evaluate=replace(config.evaluate, max_steps=9),
    )


def settings(config, folder):
    path = folder / "settings.json"
    path.write_text(json.dumps(to_json(config)))
    return path


def trained(config, home, name):
    words = ["--config", str(settings(config, home)), "--run", str(home / name)]
    assert main(["train", "efficientzero", *words]) == 0
    return home / name


@pytest.fixture(scope="module")
def pole(tmp_path_factory):
    return trained(tiny(), tmp_path_factory.mktemp("runs"), "pole")


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    return trained(game(), tmp_path_factory.mktemp("runs"), "board")


def lines(capsys):
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out and "\033" not in said.out
    assert all(line == line.rstrip() for line in said.out.splitlines())
    return said.out.splitlines()


@pytest.mark.slow
def test_an_evaluation_is_told_filmed_and_shown_by_the_report(pole, capsys):
    assert main(["evaluate", str(pole), "--episodes", "4", "--record"]) == 0
    said = lines(capsys)
    assert said[0] == f"{pole}, checkpoint best (update 10): 4 episodes"
    path = pole / "evaluations" / "update-10-4-episodes-seed-0.json"
    record = json.loads(path.read_text())
    assert (record["checkpoint"], record["update"]) == ("best", 10)
    assert len(record["returns"]) == 4 and record["opponent"] is None
    films = [f"episodes/update-10-seed0-00{i}.gif" for i in range(3)]
    assert record["files"] == films  # in the order of the returns
    assert [line for line in said if "wrote" in line][1:] == [f"wrote {pole / f}" for f in films]
    assert main(["report", str(pole)]) == 0
    assert lines(capsys) == [f"wrote {pole / 'report.html'}"]
    page = (pole / "report.html").read_text()
    assert "Missing or damaged" not in page
    assert page.count("<svg") >= 4 and "data:image/gif" in page
    assert "update-10-4-episodes-seed-0" in page


@pytest.mark.slow
def test_a_game_is_evaluated_against_an_opponent(board, capsys):
    assert main(["evaluate", str(board), "--episodes", "4", "--opponent", "random"]) == 0
    said = lines(capsys)
    update = json.loads(next((board / "evaluations").glob("*.json")).read_text())["update"]
    assert (
        said[0]
        == f"{board}, checkpoint best (update {update}): 4 episodes against the random player"
    )
    assert said[1].split() == ["as", "wins", "draws", "losses"]
    assert main(["evaluate", str(board), "--episodes", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["opponent"] == "perfect" and found["as_first"] == [True, False]


@pytest.mark.slow
def test_a_run_is_trained_and_resumed_longer(tmp_path, capsys):
    run = trained(tiny(), tmp_path, "run")
    said = lines(capsys)
    [end] = [i for i, line in enumerate(said) if line.startswith(f"{run} finished")]
    assert "80 environment steps, 10 updates" in said[end] and "best mean return" in said[end]
    assert said[end + 1] == "next" and said[end + 2].startswith(f"  raffia evaluate {run}")
    assert "update 10/10" in said[end - 1] and "env step 80/80" in said[end - 1]
    assert main(["resume", str(run)]) == 0
    assert "there is nothing left to do" in capsys.readouterr().out
    assert main(["resume", str(run), "--collect.num_env_steps", "100"]) == 0
    said = lines(capsys)
    assert said[0].startswith("EfficientZero on CartPole-v1, seed 0") and "resumed" in said[0]
    assert "resuming after update 10" in said[1]
    assert any("finished: 100 environment steps, 15 updates" in line for line in said)


def test_a_person_plays(board, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("b2\nb2\nzz\nundo\na1\nquit\n"))
    assert main(["play", str(board), "--num-simulations", "3"]) == 0
    said = capsys.readouterr().out
    for text in ("you begin", "The agent plays", "is taken", "is not a move", "Goodbye."):
        assert text in said
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["play", str(board), "--second", "--num-simulations", "3"]) == 0
    assert "the agent begins" in capsys.readouterr().out


def test_the_demo_goes_through(tmp_path, capsys, monkeypatch):
    import raffia.cli.demo as demo

    def config(seed):
        made = tiny(seed=seed)
        return replace(made, evaluate=replace(made.evaluate, target_return=1.0))

    monkeypatch.setattr(demo, "demo_config", config)
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 0
    said = lines(capsys)
    ends = f"{tmp_path / 'demo'} reached its target return: "
    assert any(line.startswith(ends) for line in said)
    assert f"report: {tmp_path / 'demo' / 'report.html'}" in said
    assert "<svg" in (tmp_path / "demo" / "report.html").read_text()


# -- what goes wrong while it runs


class Broken(gymnasium.Env):
    """Its 12th step has NaN."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, where):
        self.where = where

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.time += 1
        broken = math.nan if self.time == 12 else 0.5
        seen = np.array([0.0, broken if self.where == "observation" else 0.5, 0.0], np.float32)
        return seen, broken if self.where == "reward" else 1.0, False, False, {}


def stopped_by_nan(config, home, capsys):
    run = home / "run"
    words = ["--config", str(settings(config, home)), "--run", str(run)]
    assert main(["train", "efficientzero", *words]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 2 and "The run failed after update" in err, err
    error = err.strip()
    assert error.startswith("error: update ") and "Traceback" not in error and len(error) < 1500
    (dump,) = (run / "nan_dump").iterdir()
    assert str(dump) in error
    assert {path.name for path in dump.iterdir()} == {"batch.safetensors", "report.json"}
    said = []
    assert Checkpoints(run / "checkpoints").newest(said.append) and said == []
    return run, error


@pytest.fixture
def register():
    before = set(gymnasium.registry)
    yield gymnasium.register
    for name in set(gymnasium.registry) - before:
        del gymnasium.registry[name]


@pytest.mark.parametrize("where", ["observation", "reward"])
def test_nan_in_an_environment_is_told(where, register, tmp_path, capsys):
    name = f"Broken{where}-v0"
    register(name, entry_point=lambda: Broken(where))
    config = tiny(200, every_updates=1)
    config = replace(
        config,
        env=replace(config.env, id=name),
        collect=replace(config.collect, random_env_steps=24),
        evaluate=replace(config.evaluate, max_steps=5),
    )
    run, error = stopped_by_nan(config, tmp_path, capsys)
    assert f"batch {where}: nan in rows 0, 1, 2, 3" in error
    gymnasium.registry[name].entry_point = lambda: Broken("nowhere")  # it is mended
    assert main(["resume", str(run), "--collect.num_env_steps", "60"]) == 0
    assert "finished" in capsys.readouterr().out


@pytest.mark.slow
def test_a_full_disk_at_the_end_is_told_and_nothing_is_lost(tmp_path, capsys, monkeypatch):
    import raffia.train.checkpoint as checkpoint

    write = checkpoint.write_folder

    def full(path, *args, **kwargs):
        if int(Path(path).name) >= 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *args, **kwargs)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_folder", full)
        words = ["--config", str(settings(tiny(), tmp_path)), "--run", str(run)]
        assert main(["train", "efficientzero", *words]) == 1
    said = capsys.readouterr()
    assert "update 10: " in said.out and "No space left on device. Available: 000000005" in said.out
    assert "error: " in said.err and "No space left on device" in said.err
    assert main(["resume", str(run)]) == 0
    assert "resuming after update 5" in capsys.readouterr().out
    straight = trained(tiny(), tmp_path, "straight")
    assert same(last_state(straight)[1]["state"], last_state(run)[1]["state"])


# -- signals


def started(words, folder):
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        text=True,
        start_new_session=True,
        cwd=folder,
    )


def wait_for(condition, process, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.01)


def written(run, kind):
    path = run / "metrics.jsonl"
    return path.exists() and f'"kind": "{kind}"' in path.read_text()


def members(session):
    """The processes of a session that live."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, sid = stat.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(sid) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "kind", "num_workers"),
    [
        (signal.SIGTERM, "train", 0),
        (signal.SIGINT, "start", 0),
        (signal.SIGINT, "train", 2),
        (signal.SIGTERM, "evaluate", 2),
    ],
)
def test_a_signal_saves_and_leaves(number, kind, num_workers, tmp_path):
    config = tiny(160)
    config = replace(config, env=replace(config.env, num_workers=num_workers))
    run = tmp_path / "run"
    words = ["--config", settings(config, tmp_path), "--run", run]
    process = started(["train", "efficientzero", *words], tmp_path)
    wait_for(lambda: written(run, kind), process)
    session = process.pid
    begun = time.monotonic()
    # Ctrl-C reaches all processes of a terminal
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    said, _ = process.communicate(timeout=30)
    assert time.monotonic() - begun < 10, said
    assert process.returncode == 128 + number, said
    assert f"raffia resume {run}" in said and "Traceback" not in said
    wait_for(lambda: not members(session), FOREVER, 5)  # the server of workers takes a moment
    assert main(["resume", str(run)]) == 0
    straight = trained(config, tmp_path, "straight")
    (_, one), (_, other) = last_state(straight), last_state(run)
    assert all(same(one[part], other[part]) for part in one)
    assert rows(straight, "train", "episode", "evaluate") == rows(
        run, "train", "episode", "evaluate"
    )


class Forever:
    def poll(self):
        return None


FOREVER = Forever()


@pytest.mark.slow
def test_a_second_signal_leaves_at_once(tmp_path):
    config = tiny(160)
    evaluate = replace(config.evaluate, num_episodes=2, max_steps=10)
    config = replace(
        config,
        evaluate=evaluate,
        search=replace(config.search, num_simulations=300),
        env=replace(config.env, num_envs=64),
        collect=replace(
            config.collect, num_env_steps=64_000, rollout_length=300, random_env_steps=0
        ),
    )
    run = tmp_path / "run"
    words = ["--config", settings(config, tmp_path), "--run", run]
    process = started(["train", "efficientzero", *words], tmp_path)
    wait_for(lambda: written(run, "start"), process)
    time.sleep(1.0)  # into a turn that takes long, as each of its steps is searched
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=30)
    assert time.monotonic() - begun < 3 and process.returncode == 143, said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_reader_that_goes_away_gets_no_traceback(pole, tmp_path):
    process = started(["evaluate", pole, "--episodes", "1"], tmp_path)
    process.stdout.close()
    assert process.wait(60) == 141


@pytest.mark.parametrize("words", ["list presets >&-", "evalute 2>&-", "list presets >&- 2>&- <&-"])
def test_what_is_closed_is_not_written_to(words, tmp_path):
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CODE": PROGRAM}
    line = f'exec "{sys.executable}" -c "$CODE" {words}'
    done = subprocess.run(["sh", "-c", line], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == (2 if "evalute" in words else 0), done.stderr
    assert done.stdout == done.stderr == ""


@pytest.mark.slow
def test_an_evaluation_says_when_the_newest_checkpoint_is_damaged(pole, capsys, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(pole, run)
    newest = max((run / "checkpoints").iterdir())
    state = next(newest.glob("state*.safetensors"))
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(content)
    words = ["evaluate", str(run), "--episodes", "2", "--checkpoint", "newest"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.err.startswith(f"note: checkpoint {newest} is passed over:")
    assert "Warning" not in said.err and ".py" not in said.err
    older = max(int(path.name) for path in (run / "checkpoints").iterdir() if path != newest)
    assert f"checkpoint newest (update {older})" in said.out
    record = json.loads((run / f"evaluations/update-{older}-2-episodes-seed-0.json").read_text())
    assert (record["checkpoint"], record["update"]) == ("newest", older)


@pytest.mark.slow
def test_a_first_run_says_that_kernels_are_compiled_and_counts_the_time(tmp_path):
    def started(folder):
        env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
        words = ["train", "efficientzero", "--preset", "smoke", "--run", str(tmp_path / folder)]

        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words], env=env, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stderr
        rows = map(json.loads, (tmp_path / folder / "metrics.jsonl").read_text().splitlines())
        return done.stdout, sum(row.get("seconds_compile", 0.0) for row in rows)

    said, seconds = started("first")
    assert said.count("compiling kernels for this machine") == 1 and seconds > 1
    said, seconds = started("second")
    assert "compiling kernels" not in said and seconds == 0
