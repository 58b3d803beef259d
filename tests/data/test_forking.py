"""Processes that are forked while a thread uses a buffer or a map: the children can use it too."""

import os
import signal
import threading
import time

import pytest
import torch

from raffia import TensorDict
from raffia.data import processes
from raffia.data.hash_to_int import HashToInt
from raffia.data.map import TensorDictMap
from raffia.data.segment import SegmentReplayBuffer
from raffia.data.storage import TensorStorage
from raffia.data.tensordict_replay import PrioritizedReplayBuffer

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def items(n=2000):
    no = torch.zeros(n, dtype=torch.bool)
    obs = torch.arange(n)
    return TensorDict(observation=obs, terminated=no, truncated=no, batch_size=[n])


class OfBuffer:
    """Uses a replay buffer; what is drawn is right if each item is what its number says."""

    def __init__(self, kind):
        storage, exponents = TensorStorage(3000), {"alpha": 0.6, "beta": 0.4}
        if kind == "segments":
            self.buffer = SegmentReplayBuffer(storage, unroll_steps=1, **exponents)
        else:
            self.buffer = PrioritizedReplayBuffer(storage=storage, **exponents)
        self.buffer.extend(items())

    def use(self):
        index = self.buffer.sample(500)["index"]
        self.buffer.update_priority(index, 1.0)
        self.buffer.extend(items(20))


class OfMap:
    def __init__(self, kind):
        self.map = TensorDictMap(in_keys=["observation"])

    def use(self):
        self.map[items(200)] = items(200)
        assert self.map[items(200)]["observation"].tolist() == list(range(200))


class OfHashes:
    def __init__(self, kind):
        self.table = HashToInt()

    def use(self):
        self.table(torch.arange(500), extend=True)


USES = {"by priority": OfBuffer, "segments": OfBuffer, "map": OfMap, "hashes": OfHashes}


def runs(work, seconds=20):
    """Whether a forked child ends `work()` in time."""
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException:
            import traceback

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
@pytest.mark.parametrize("kind", USES)
def test_children_that_are_forked_while_a_thread_is_at_work(kind):
    uses = USES[kind](kind)
    uses.use()
    over, errors = threading.Event(), []

    def work():
        while not over.is_set():
            try:
                uses.use()
            except BaseException as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert all([runs(uses.use, seconds=10) for _ in range(8)])
    finally:
        over.set()
        for thread in threads:
            thread.join(20)
    assert not errors and not any(thread.is_alive() for thread in threads)
    uses.use()


def test_a_lock_that_is_not_to_be_had_is_free_in_the_child(monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.2)
    uses = OfBuffer("by priority")
    uses.use()
    held, over = threading.Event(), threading.Event()

    def hold():
        with uses.buffer._lock:
            held.set()
            over.wait(20)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    held.wait(20)
    try:
        assert runs(uses.use)
    finally:
        over.set()
        thread.join(20)
    uses.use()  # and the parent's is free again


def test_objects_that_are_gone_are_forgotten():
    before = len(processes._owners)
    uses = OfHashes("hashes")
    assert len(processes._owners) == before + 1
    del uses
    assert len(processes._owners) <= before + 1 and runs(lambda: None)
