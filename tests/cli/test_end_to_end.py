"""The commands as a user calls them: whole, on tiny runs."""

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
    record = json.loads((pole / "evaluations" / "update-10-4-episodes-seed-0.json").read_text())
    assert (record["checkpoint"], record["update"], record["opponent"]) == ("best", 10, None)
    films = [f"episodes/update-10-seed0-00{i}.gif" for i in range(3)]
    assert len(record["returns"]) == 4
    assert record["files"] == films  # in the order of the returns
    assert [line for line in said if "wrote" in line][1:] == [f"wrote {pole / f}" for f in films]
    assert main(["report", str(pole)]) == 0
    assert lines(capsys) == [f"wrote {pole / 'report.html'}"]
    page = (pole / "report.html").read_text()
    assert "Missing or damaged" not in page and "update-10-4-episodes-seed-0" in page
    assert page.count("<svg") >= 4 and "data:image/gif" in page


@pytest.mark.slow
def test_a_game_is_evaluated_against_an_opponent(board, capsys):
    assert main(["evaluate", str(board), "--episodes", "4", "--opponent", "random"]) == 0
    said = lines(capsys)
    update = json.loads(next((board / "evaluations").glob("*.json")).read_text())["update"]
    assert said[0].startswith(f"{board}, checkpoint best (update {update}): 4 episodes")
    assert said[0].endswith(" against the random player")
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


def test_the_demo_goes_through(tmp_path, capsys, monkeypatch):
    evaluate = replace(tiny().evaluate, target_return=1.0)
    config = lambda seed: replace(tiny(seed=seed), evaluate=evaluate)  # noqa: E731
    monkeypatch.setattr("raffia.cli.demo.demo_config", config)
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 0
    said = lines(capsys)
    ends = f"{tmp_path / 'demo'} reached its target return: "
    assert any(line.startswith(ends) for line in said)
    assert f"report: {tmp_path / 'demo' / 'report.html'}" in said
    assert "<svg" in (tmp_path / "demo" / "report.html").read_text()


def running(config, folder):
    """A training in another process."""
    words = ["--config", settings(config, folder), "--run", folder / "run"]
    return started("train", "efficientzero", *words, cwd=folder)


# -- what goes wrong while it runs


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
def test_a_signal_saves_and_leaves(number, kind, num_workers, tmp_path):
    config = tiny(160)
    config = replace(config, env=replace(config.env, num_workers=num_workers))
    run, process = tmp_path / "run", running(config, tmp_path)
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
    kinds = "train", "episode", "evaluate"
    assert rows(straight, *kinds) == rows(run, *kinds)


@pytest.mark.slow
def test_a_second_signal_leaves_at_once(tmp_path):
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
    time.sleep(1.0)  # into a turn that takes long, as each of its steps is searched
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=30)
    assert time.monotonic() - begun < 3 and process.returncode == 143, said
    assert "Traceback" not in said


@pytest.mark.parametrize("words", ["list presets >&-", "evalute 2>&-", "list presets >&- 2>&- <&-"])
def test_what_is_closed_is_not_written_to(words, tmp_path):
    line = f'exec "{sys.executable}" -m raffia {words}'
    options = {"capture_output": True, "text": True, "cwd": tmp_path}
    done = subprocess.run(["sh", "-c", line], env=environment(), **options)
    assert done.returncode == (2 if "evalute" in words else 0), done.stderr
    assert done.stdout == done.stderr == ""


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
