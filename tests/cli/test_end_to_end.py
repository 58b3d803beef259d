"""The commands as a user calls them, end to end, on tiny runs."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from raffia.cli import main
from raffia.recipes.efficientzero.presets import PRESETS
from raffia.train.config import to_json
from tests.processes import RAFFIA, environment, living, started, wait_for
from tests.recipes.runs import last_state, rows, same, short


def tiny(num_env_steps=80, **changes):
    config = short(num_env_steps, **changes)
    return replace(
        config,
        loss=replace(config.loss, unroll_steps=5),
        targets=replace(config.targets, n_step=5),
        collect=replace(config.collect, updates_per_env_step=0.25, rollout_length=1),
        checkpoint=replace(config.checkpoint, every_updates=5),
        evaluate=replace(config.evaluate, every_env_steps=60),
    )


def game():
    config = tiny(env=replace(PRESETS["tictactoe"].env, num_envs=4))
    targets = replace(config.targets, discount=1.0, n_step=9, correct_horizon=False)
    return replace(config, targets=targets, evaluate=replace(config.evaluate, max_steps=9))


def settings(config, folder):
    path = folder / "settings.json"
    path.write_text(json.dumps(to_json(config)))
    return path


def trained(config, home, name):
    args = ["--config", str(settings(config, home)), "--run", str(home / name)]
    assert main(["train", "efficientzero", *args]) == 0
    return home / name


@pytest.fixture(scope="module")
def pole(tmp_path_factory):
    return trained(tiny(), tmp_path_factory.mktemp("runs"), "pole")


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    return trained(game(), tmp_path_factory.mktemp("runs"), "board")


def lines(capsys):
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out and "\033" not in captured.out
    assert all(line == line.rstrip() for line in captured.out.splitlines())
    return captured.out.splitlines()


@pytest.mark.slow
def test_an_evaluation_is_printed_recorded_and_shown_in_the_report(pole, capsys):
    assert main(["evaluate", str(pole), "--episodes", "4", "--record"]) == 0
    output = lines(capsys)
    assert output[0] == f"{pole}, checkpoint best (update 10): 4 episodes"
    record = json.loads((pole / "evaluations" / "update-10-4-episodes-seed-0.json").read_text())
    assert (record["checkpoint"], record["update"], record["opponent"]) == ("best", 10, None)
    videos = [f"episodes/update-10-seed0-00{i}.gif" for i in range(3)]
    assert len(record["returns"]) == 4
    assert record["files"] == videos  # in the order of the returns
    assert [line for line in output if "wrote" in line][1:] == [f"wrote {pole / f}" for f in videos]
    assert main(["report", str(pole)]) == 0
    assert lines(capsys) == [f"wrote {pole / 'report.html'}"]
    page = (pole / "report.html").read_text()
    assert "Missing or damaged" not in page and "update-10-4-episodes-seed-0" in page
    assert page.count("<svg") >= 4 and "data:image/gif" in page


@pytest.mark.slow
def test_a_game_is_evaluated_against_an_opponent(board, capsys):
    assert main(["evaluate", str(board), "--episodes", "4", "--opponent", "random"]) == 0
    output = lines(capsys)
    update = json.loads(next((board / "evaluations").glob("*.json")).read_text())["update"]
    assert output[0].startswith(f"{board}, checkpoint best (update {update}): 4 episodes")
    assert output[0].endswith(" against the random player")
    assert output[1].split() == ["as", "wins", "draws", "losses"]
    assert main(["evaluate", str(board), "--episodes", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["opponent"] == "perfect" and found["as_first"] == [True, False]


def test_a_person_plays(board, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("b2\nb2\nzz\nundo\na1\nquit\n"))
    assert main(["play", str(board), "--num-simulations", "3"]) == 0
    output = capsys.readouterr().out
    for text in ("you begin", "The agent plays", "is taken", "is not a move", "Goodbye."):
        assert text in output


def test_the_demo_runs(tmp_path, capsys, monkeypatch):
    evaluate = replace(tiny().evaluate, target_return=1.0)
    config = lambda seed: replace(tiny(seed=seed), evaluate=evaluate)  # noqa: E731
    monkeypatch.setattr("raffia.cli.demo.demo_config", config)
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 0
    output = lines(capsys)
    ends = f"{tmp_path / 'demo'} reached its target return: "
    assert any(line.startswith(ends) for line in output)
    assert f"report: {tmp_path / 'demo' / 'report.html'}" in output
    assert "<svg" in (tmp_path / "demo" / "report.html").read_text()


def running(config, folder):
    """Training in another process."""
    args = ["--config", settings(config, folder), "--run", folder / "run"]
    return started("train", "efficientzero", *args, cwd=folder)


# -- signals


def written(run, kind):
    path = run / "metrics.jsonl"
    return path.exists() and f'"kind": "{kind}"' in path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "kind", "num_workers"),
    [
        (signal.SIGINT, "start", 0),
        (signal.SIGINT, "train", 2),
        (signal.SIGTERM, "evaluate", 2),
    ],
)
def test_a_signal_saves_and_exits(number, kind, num_workers, tmp_path):
    config = tiny(160)
    config = replace(config, env=replace(config.env, num_workers=num_workers))
    run, process = tmp_path / "run", running(config, tmp_path)
    wait_for(lambda: written(run, kind), process=process)
    start = time.monotonic()
    # Ctrl-C reaches all processes of a terminal
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    output, _ = process.communicate(timeout=30)
    assert time.monotonic() - start < 10, output
    assert process.returncode == 128 + number, output
    assert f"raffia resume {run}" in output and "Traceback" not in output
    # The server of workers takes a moment.
    wait_for(lambda: process.pid not in {expected.session for expected in living().values()}, 5)
    assert main(["resume", str(run)]) == 0
    uninterrupted = trained(config, tmp_path, "straight")
    (_, expected), (_, found) = last_state(uninterrupted), last_state(run)
    assert all(same(expected[part], found[part]) for part in expected)
    kinds = "train", "episode", "evaluate"
    assert rows(uninterrupted, *kinds) == rows(run, *kinds)


@pytest.mark.slow
def test_a_second_signal_exits_immediately(tmp_path):
    config = tiny(160)
    long = {"num_env_steps": 64_000, "rollout_length": 300, "random_env_steps": 0}
    config = replace(
        config,
        evaluate=replace(config.evaluate, num_episodes=2, max_steps=10),
        search=replace(config.search, num_simulations=300),
        env=replace(config.env, num_envs=64),
        collect=replace(config.collect, **long),
    )
    process = running(config, tmp_path)
    wait_for(lambda: written(tmp_path / "run", "start"), process=process)
    time.sleep(1.0)  # into a rollout that takes long, as each of its steps is searched
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert time.monotonic() - start < 3 and process.returncode == 143, output
    assert "Traceback" not in output


@pytest.mark.parametrize("words", ["list presets >&-", "evalute 2>&-", "list presets >&- 2>&- <&-"])
def test_closed_streams_are_not_written_to(words, tmp_path):
    line = f'exec "{sys.executable}" -m raffia {words}'
    options = {"capture_output": True, "text": True, "cwd": tmp_path}
    done = subprocess.run(["sh", "-c", line], env=environment(), **options)
    assert done.returncode == (2 if "evalute" in words else 0), done.stderr
    assert done.stdout == done.stderr == ""


@pytest.mark.slow
def test_a_first_run_announces_and_times_the_compilation_of_kernels(tmp_path):
    def train(folder):
        env = environment(NUMBA_CACHE_DIR=str(tmp_path / "kernels"))
        args = ["train", "efficientzero", "--preset", "smoke", "--run", str(tmp_path / folder)]
        done = subprocess.run([*RAFFIA, *args], env=env, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        rows = map(json.loads, (tmp_path / folder / "metrics.jsonl").read_text().splitlines())
        return done.stdout, sum(row.get("seconds_compile", 0.0) for row in rows)

    output, seconds = train("first")
    assert output.count("compiling kernels for this machine") == 1 and seconds > 1
    output, seconds = train("second")
    assert "compiling kernels" not in output and seconds == 0
