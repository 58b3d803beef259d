"""Processes that are forked while a thread uses a buffer or a map: the children can use it too."""

import os
import signal
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from raffia import TensorDict
from raffia.data import processes
from raffia.data.map import TensorDictMap
from raffia.data.query import HashToInt
from raffia.data.segment import SegmentReplayBuffer
from raffia.data.storage import TensorStorage
from raffia.data.tensordict_replay import PrioritizedReplayBuffer
from raffia.functional.seeds import GLOBAL_DRAWS, global_draws

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def items(n=2000):
    no = torch.zeros(n, dtype=torch.bool)
    obs = torch.arange(n)
    return TensorDict(observation=obs, terminated=no, truncated=no, batch_size=[n])


def use_of(kind):
    """A function to call repeatedly, which checks what it draws or reads."""
    if kind == "map":
        table = TensorDictMap(in_keys=["observation"])

        def write_and_read():
            table[items(200)] = items(200)
            assert table[items(200)]["observation"].tolist() == list(range(200))

        return table, write_and_read
    if kind == "hashes":
        hashes = HashToInt()
        return hashes, lambda: hashes(torch.arange(500), extend=True)
    storage, exponents = TensorStorage(3000), {"alpha": 0.6, "beta": 0.4}
    if kind == "segments":
        buffer = SegmentReplayBuffer(storage, unroll_steps=1, **exponents)
    else:
        buffer = PrioritizedReplayBuffer(storage=storage, **exponents)
    buffer.extend(items())

    def sample_and_update():
        buffer.update_priority(buffer.sample(500)["index"], 1.0)
        buffer.extend(items(20))

    return buffer, sample_and_update


def runs(work, seconds=20):
    """Whether a forked child ends `work()` in time."""
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    for _ in range(int(seconds / 0.01)):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["by priority", "segments", "map", "hashes"])
def test_children_that_are_forked_while_a_thread_is_at_work(kind):
    _, use = use_of(kind)
    use()
    over = threading.Event()

    def work():
        while not over.is_set():
            use()

    with ThreadPoolExecutor(2) as pool:
        threads = [pool.submit(work) for _ in range(2)]
        try:
            assert all([runs(use, seconds=10) for _ in range(4)])
        finally:
            over.set()
        assert [thread.result(20) for thread in threads] == [None, None]
    use()


def draw():
    with global_draws(0):
        torch.rand(1)


@pytest.mark.parametrize("kind", ["by priority", "draws"])
def test_a_lock_that_another_thread_holds_is_free_in_the_child(kind, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.2)
    lock, use = GLOBAL_DRAWS, draw
    if kind != "draws":
        buffer, use = use_of(kind)
        lock = buffer._lock
    use()
    acquired, over = threading.Event(), threading.Event()

    def hold():
        with lock:
            acquired.set()
            over.wait(20)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(hold)
        acquired.wait(20)
        try:
            assert runs(use, seconds=10)
        finally:
            over.set()
    use()  # and the parent's is free again


def test_a_thread_that_holds_the_lock_of_draws_can_fork():
    def draw_and_fork():
        with global_draws(0):
            assert runs(draw, seconds=10)
        draw()

    draw_and_fork()
    assert runs(draw_and_fork, seconds=15)


def test_collected_objects_are_forgotten():
    before = len(processes._owners)
    uses = HashToInt()
    assert len(processes._owners) == before + 1
    del uses
    assert len(processes._owners) <= before + 1 and runs(lambda: None)
