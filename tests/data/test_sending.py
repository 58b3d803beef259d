"""Buffers that are copied, pickled and sent to other processes: copies, which share nothing.

Processes that are forked while a thread uses a buffer or a map can use it too: test_forking.py.
"""

import contextlib
import copy
import pickle
import subprocess
import sys
import threading

import pytest
import torch

from raffia import TensorDict
from raffia.data.map import TensorDictMap
from raffia.data.memmap_storage import MemmapStorage
from raffia.data.replay import ReplayBuffer
from raffia.data.samplers import SamplerWithoutReplacement
from raffia.data.segment import SegmentReplayBuffer
from raffia.data.storage import Storage, TensorStorage
from raffia.data.tensordict_replay import PrioritizedReplayBuffer
from raffia.data.torchrl_storages import LazyMemmapStorage


def rng():
    return torch.Generator().manual_seed(0)


def items(first, n):
    obs = torch.arange(first, first + n)
    no = torch.zeros(n, dtype=torch.bool)
    half = (obs / 4).to(torch.bfloat16)
    return TensorDict(obs=obs, half=half, terminated=no, truncated=no, batch_size=[n])


def segments(**options):
    storage = TensorStorage(10)
    return SegmentReplayBuffer(storage, unroll_steps=1, observation_keys=["obs"], **options)


MAKE = {
    "uniform": lambda **kw: ReplayBuffer(storage=TensorStorage(10), **kw),
    "without replacement": lambda **kw: ReplayBuffer(
        storage=TensorStorage(10), sampler=SamplerWithoutReplacement(), **kw
    ),
    "by priority": lambda **kw: PrioritizedReplayBuffer(0.6, 0.4, storage=TensorStorage(10), **kw),
    "segments": segments,
    "segments by priority": lambda **kw: segments(alpha=0.6, beta=0.4, **kw),
}
MADE = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
COPIES = {"copy": copy.deepcopy, "pickle": lambda buffer: pickle.loads(pickle.dumps(buffer))}


def filled(make, **options):
    buffer = make(generator=rng(), batch_size=4, **options)
    for first in range(0, 14, 7):
        buffer.extend(items(first, 7))
    index = buffer.sample()["index"]
    if hasattr(buffer, "beta") and buffer.beta is not None:
        buffer.update_priority(index, torch.rand(4, generator=rng()))
    return buffer


def history(buffer):
    """The batches drawn while items are added."""
    out = []
    for i in range(5):
        out += [x for x in buffer.sample().values(True, True)]
        buffer.extend(items(100 + i, 1))
    return out


@MADE
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_copy_continues_the_same_and_shares_nothing(make, copied, prefetch):
    buffer, same = (filled(make, prefetch=prefetch) for _ in range(2))
    other = copied(buffer)
    assert type(other) is type(buffer) and len(other) == len(buffer)
    expected = history(same)
    for found in (history(other), history(buffer)):  # the first does not change the second
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@contextlib.contextmanager
def write_during_copy(monkeypatch, write):
    """Another thread writes after the rows of a storage were copied, and before all else is."""
    state_of, writers = Storage.__getstate__, []

    def state_then_write(storage):
        state = state_of(storage)
        if not writers:
            writers.append(threading.Thread(target=write))
            writers[0].start()
            writers[0].join(0.05)
        return state

    monkeypatch.setattr(Storage, "__getstate__", state_then_write)
    yield
    writers[0].join()
    monkeypatch.undo()


@MADE
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_is_of_one_moment(make, copied, monkeypatch):
    buffer, same = (filled(make) for _ in range(2))
    with write_during_copy(monkeypatch, lambda: buffer.extend(items(14, 7))):
        other = copied(buffer)
    assert buffer.storage.total == other.storage.total + 7
    assert all(torch.equal(a, b) for a, b in zip(history(same), history(other), strict=True))


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_of_a_map_is_of_one_moment(copied, monkeypatch):
    pairs = TensorDictMap(in_keys=["obs"], out_keys=["half"])
    pairs[items(0, 3)] = items(0, 3)
    with write_during_copy(monkeypatch, lambda: pairs.update(items(3, 3), items(3, 3))):
        other = copied(pairs)
    assert (len(pairs), len(other), len(other.storage)) == (6, 3, 3)
    on_disk = TensorDictMap(in_keys=["obs"], storage=LazyMemmapStorage(9))
    mixed = TensorDictMap(in_keys=["obs"], storage={"half": LazyMemmapStorage(9)})
    for one in (on_disk, mixed):  # a copy would read what is written there for other keys
        with pytest.raises(TypeError, match="values on disk cannot be copied.*TensorDictMap.load"):
            copied(one)
    twin = copy.copy(pairs)  # the same map, of which a program may set other functions
    twin[items(6, 1)] = items(6, 1)
    assert len(pairs) == 7


WORKER = """
import sys
import torch
import torch.multiprocessing as mp
from raffia import TensorDict
from raffia.data import (
    MemmapStorage, PrioritizedReplayBuffer, SegmentReplayBuffer, TensorStorage
)

def items(first):
    no = torch.zeros(10, dtype=torch.bool)
    obs = torch.arange(first, first + 10)
    return TensorDict(obs=obs, terminated=no, truncated=no, batch_size=[10])

def content(buffer):
    return sorted(set(buffer.sample(200)["obs"].flatten().tolist()))

def work(buffer, inbox, outbox):
    outbox.put((buffer.sample(4)["index"].tolist(), content(buffer)))
    inbox.get()
    outbox.put((0, content(buffer)))

if __name__ == "__main__":
    kind, folder = sys.argv[1:]
    options = {"alpha": 0.6, "beta": 0.4, "generator": torch.Generator().manual_seed(0)}
    if kind == "segments":
        buffer = SegmentReplayBuffer(
            TensorStorage(10), unroll_steps=1, observation_keys=["obs"], **options
        )
    else:
        storage = MemmapStorage(10, folder) if kind == "disk" else TensorStorage(10)
        buffer = PrioritizedReplayBuffer(storage=storage, **options)
    buffer.extend(items(0))
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=work, args=(buffer, inbox, outbox), daemon=True)
    process.start()
    before = buffer.sample(4)["index"].tolist(), content(buffer)
    assert outbox.get(timeout=60) == before
    buffer.extend(items(100))  # overwrites all items
    inbox.put("go on")
    after = outbox.get(timeout=60)[1]
    assert after == (content(buffer) if kind == "disk" else before[1]), after
    process.join(20)
    assert process.exitcode == 0
    print("right")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "segments", "disk"])
def test_sent_to_a_spawned_worker_it_is_a_copy_and_on_disk_a_reader(kind, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WORKER)
    command = [sys.executable, str(script), kind, str(tmp_path / "rows")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert found.stdout == "right\n", found.stderr


def test_a_storage_on_disk_is_sent_as_a_reader_or_not_at_all(tmp_path):
    storage = MemmapStorage(10, tmp_path / "rows")
    with pytest.raises(RuntimeError, match="nothing has been written.*storage.allocate"):
        pickle.dumps(storage)
    storage.extend(torch.arange(4))
    reader = pickle.loads(pickle.dumps(storage))
    assert reader.mode == "r" and reader.get(slice(None)).tolist() == [0, 1, 2, 3]
    storage.close()
    with pytest.raises(RuntimeError, match="has been closed"):
        pickle.dumps(storage)
    with MemmapStorage(10, tmp_path / "segments") as storage:
        buffer = SegmentReplayBuffer(storage, unroll_steps=1, observation_keys=["obs"])
        buffer.extend(items(0, 4))
        with pytest.raises(TypeError, match="cannot be sent to another process.*Send batches"):
            pickle.dumps(buffer)
