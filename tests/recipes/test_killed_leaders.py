"""Leaders that are killed or stopped leave no process behind, and a resume loses nothing."""

import json
import os
import random
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from raffia.train.config import to_json
from tests.processes import are_gone, descendants, started, wait_for
from tests.recipes.layouts import AHEAD, results_of, trained
from tests.recipes.runs import with_all
from tests.recipes.test_resumes import newest_update

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_KILLS = 10
# All kinds of processes that a leader has: actors, an evaluator, a learner.
CONFIG = with_all(AHEAD, learners__num=2, evaluators__join_after=9, checkpoint__every_updates=1)
LAYOUT = dict(actors__num=2, evaluators__num=1, engine__name="process")


def shared_memory(pid):
    """The names of the shared memory that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split()[-1]) for line in lines if "/dev/shm/psm_" in line}


def saved_update(folder):
    return newest_update(folder / "checkpoints")


@contextmanager
def leader_of(folder, **changes):
    """A leader that starts or resumes the run of a folder; it is killed at the end."""
    settings = folder.with_suffix(".json")
    settings.write_text(json.dumps(to_json(with_all(CONFIG, **LAYOUT, **changes))))
    train_args = ["train", "efficientzero", "--config", settings, "--run", folder]
    args = ["resume", folder] if saved_update(folder) else train_args
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    with started(*args, stderr=subprocess.PIPE, **quiet) as leader:
        try:
            yield leader
        finally:
            leader.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return trained(CONFIG, tmp_path_factory.mktemp("plain") / "run")[:3]


def assert_ends_as(undisturbed, folder):
    with leader_of(folder) as last:
        assert last.wait(300) == 0, last.stderr.read()
    assert results_of(folder)[:3] == undisturbed


@pytest.mark.parametrize(
    ("name", "to_all", "status"), [("SIGINT", True, 130), ("SIGTERM", False, 143)]
)
def test_a_signal_saves_the_run_and_ends_its_workers(name, to_all, status, undisturbed, tmp_path):
    """Ctrl-C reaches all processes of a terminal, SIGTERM the one that it is sent to."""
    folder, metrics = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    with leader_of(folder, checkpoint__every_updates=1_000) as leader:
        wait_for(lambda: metrics.exists() and '"train"' in metrics.read_text(), 200)
        others = descendants(leader.pid)
        (os.killpg if to_all else os.kill)(leader.pid, getattr(signal, name))
        assert leader.wait(60) == status, leader.stderr.read()
    assert len(others) >= 4
    wait_for(lambda: are_gone(others), 20)
    end = json.loads(metrics.read_text().splitlines()[-1])
    assert (end["kind"], end["reason"]) == ("end", "stopped")
    assert end["update"] == saved_update(folder) and 0 < saved_update(folder) < undisturbed[0]
    assert_ends_as(undisturbed, folder)


def test_leaders_that_are_killed_leave_nothing_behind(undisturbed, tmp_path):
    folder, draw = tmp_path / "killed", random.Random(0)
    num_processes = num_memory = 0
    for _ in range(NUM_KILLS):
        before = saved_update(folder)
        with leader_of(folder) as leader:
            wait_for(
                lambda b=before, one=leader: saved_update(folder) > b or one.poll() is not None, 200
            )
            time.sleep(draw.uniform(0.0, 0.2))
            assert leader.poll() is None, leader.stderr.read()
            others, memory = descendants(leader.pid), shared_memory(leader.pid)
            num_processes, num_memory = num_processes + len(others), num_memory + len(memory)
        wait_for(lambda pids=others: are_gone(pids), 20)
        wait_for(lambda names=memory: not any(name.exists() for name in names), 20)
    assert num_processes >= 4 * NUM_KILLS and num_memory >= NUM_KILLS
    assert_ends_as(undisturbed, folder)
