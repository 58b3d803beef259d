"""The commands as a user calls them: whole, on tiny runs."""

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from raffia.cli import main
from raffia.recipes.efficientzero.presets import PRESETS
from raffia.train.config import to_json
from tests.processes import RAFFIA, environment, living, started, wait_for
from tests.recipes.runs import last_state, rows, same, short


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


def written(run, kind):
    path = run / "metrics.jsonl"
    return path.exists() and f'"kind": "{kind}"' in path.read_text()


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
    process = started("train", "efficientzero", *words, cwd=tmp_path)
    wait_for(lambda: written(run, kind), process=process)
    begun = time.monotonic()
    # Ctrl-C reaches all processes of a terminal
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    said, _ = process.communicate(timeout=30)
    assert time.monotonic() - begun < 10, said
    assert process.returncode == 128 + number, said
    assert f"raffia resume {run}" in said and "Traceback" not in said
    # The server of workers takes a moment.
    wait_for(lambda: process.pid not in {one.session for one in living().values()}, 5)
    assert main(["resume", str(run)]) == 0
    straight = trained(config, tmp_path, "straight")
    (_, one), (_, other) = last_state(straight), last_state(run)
    assert all(same(one[part], other[part]) for part in one)
    assert rows(straight, "train", "episode", "evaluate") == rows(
        run, "train", "episode", "evaluate"
    )


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
    process = started("train", "efficientzero", *words, cwd=tmp_path)
    wait_for(lambda: written(run, "start"), process=process)
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
    process = started("evaluate", pole, "--episodes", "1", cwd=tmp_path)
    process.stdout.close()
    assert process.wait(60) == 141


@pytest.mark.parametrize("words", ["list presets >&-", "evalute 2>&-", "list presets >&- 2>&- <&-"])
def test_what_is_closed_is_not_written_to(words, tmp_path):
    line = f'exec "{sys.executable}" -m raffia {words}'
    options = {"capture_output": True, "text": True, "cwd": tmp_path}
    done = subprocess.run(["sh", "-c", line], env=environment(), **options)
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
    assert said.err.startswith(f"note: checkpoint {newest} is skipped:")
    assert "Warning" not in said.err and ".py" not in said.err
    older = max(int(path.name) for path in (run / "checkpoints").iterdir() if path != newest)
    assert f"checkpoint newest (update {older})" in said.out
    record = json.loads((run / f"evaluations/update-{older}-2-episodes-seed-0.json").read_text())
    assert (record["checkpoint"], record["update"]) == ("newest", older)


@pytest.mark.slow
def test_a_first_run_says_that_kernels_are_compiled_and_counts_the_time(tmp_path):
    def begun(folder):
        env = environment(NUMBA_CACHE_DIR=str(tmp_path / "kernels"))
        words = ["train", "efficientzero", "--preset", "smoke", "--run", str(tmp_path / folder)]
        done = subprocess.run([*RAFFIA, *words], env=env, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        rows = map(json.loads, (tmp_path / folder / "metrics.jsonl").read_text().splitlines())
        return done.stdout, sum(row.get("seconds_compile", 0.0) for row in rows)

    said, seconds = begun("first")
    assert said.count("compiling kernels for this machine") == 1 and seconds > 1
    said, seconds = begun("second")
    assert "compiling kernels" not in said and seconds == 0
