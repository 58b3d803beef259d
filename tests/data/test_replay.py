"""ReplayBuffer: forms of items and batches, priorities, errors, and resuming.

Any operations in any order, against lists, are in test_replay_properties.py.
"""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._pytree import tree_leaves

from raffia import TensorDict
from raffia.data import ListStorage
from raffia.data.memmap_storage import MemmapStorage
from raffia.data.prioritized import PrioritizedSampler
from raffia.data.replay import ReplayBuffer
from raffia.data.samplers import RandomSampler, SamplerWithoutReplacement
from raffia.data.storage import TensorStorage
from raffia.data.tensordict_replay import PrioritizedReplayBuffer
from raffia.data.writers import (
    ImmutableDatasetWriter,
    TensorDictMaxValueWriter,
)
from raffia.tensordict.memmap import DamagedFileError

A = 5


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def steps(first, n):
    """n steps whose content encodes their number."""
    number = torch.arange(first, first + n)
    return TensorDict(
        obs=number[:, None].expand(n, A).float(),
        next=dict(reward=number * 0.5, done=number % 2 == 0),
        batch_size=[n],
    )


def uniform(size=10, **options):
    return ReplayBuffer(storage=TensorStorage(size), **{"generator": rng(), **options})


def by_priority(size=10, alpha=1.0, beta=1.0, **options):
    storage = TensorStorage(size)
    return PrioritizedReplayBuffer(alpha, beta, storage=storage, **{"generator": rng(), **options})


def filled(make, n, **options):
    buffer = make(**options)
    buffer.extend(steps(0, n))
    return buffer


def drawn(buffer, n=200):
    """All items of a large batch."""
    return set(buffer.sample(n)["index"].tolist())


BOTH = pytest.mark.parametrize("make", [uniform, by_priority])

# ------------------------------------------------------------------------------- in and out


def test_indexed_items_are_copies():
    buffer, data = uniform(4), steps(0, 5)
    buffer.extend(data)
    item = steps(5, 1)[0]
    buffer.add(item)
    for source in (data, item):
        source["obs"].fill_(-1)
    for index in (slice(None), 0, torch.tensor([1])):
        buffer[index]["obs"].zero_()  # in TorchRL these are views
    buffer.sample(9)["obs"].zero_()
    mask = torch.tensor([True, False, False, True])
    for index, expected in [
        (slice(None, None, -1), [5, 4, 3, 2]),
        (torch.tensor([[0, -1], [1, 1]]), [[2, 5], [3, 3]]),
        (mask, [2, 5]),
        (mask.tolist(), [2, 5]),
        (-1, 5),
    ]:
        assert buffer[index]["obs"][..., 0].tolist() == expected
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.uint16):
        assert buffer[torch.tensor([3, 0], dtype=dtype)]["obs"][..., 0].tolist() == [5, 2], dtype
    for index in (1.0, None, ...):
        with pytest.raises(IndexError, match="integers"):
            buffer[index]
    for index in (4, -5, torch.tensor([0, 4])):
        with pytest.raises(IndexError, match="there are 4 items, so none at"):
            buffer[index]
    for index in (mask[:2], mask[None], True):
        with pytest.raises(IndexError, match="one value for each of the 4 items; got shape"):
            buffer[index]


def test_data_of_another_structure_is_refused_and_changes_nothing():
    buffer = filled(by_priority, 3)
    for wrong in (
        steps(3, 2).exclude("obs"),  # in TorchRL this leaves rows uninitialised
        steps(3, 2).set("more", torch.zeros(2)),
        steps(3, 2).set("obs", torch.zeros(2, A + 1)),
        {"obs": torch.zeros(2, A)},
    ):
        with pytest.raises((ValueError, TypeError)):
            buffer.extend(wrong)
    assert len(buffer) == 3 and drawn(buffer, 30) == {0, 1, 2}
    assert buffer.extend(steps(3, 1)).tolist() == [3]


@BOTH
@pytest.mark.parametrize("collate_fn", [None, lambda batch: batch.clone()])
def test_out_is_filled(make, collate_fn):
    buffer, twin = (filled(make, 17, collate_fn=collate_fn) for _ in range(2))
    out, _ = buffer.sample(6), twin.sample(6)
    addresses = {key: value.data_ptr() for key, value in out.items(True, True)}
    again, info = buffer.sample(out=out, return_info=True)
    assert again is out and all(torch.equal(out[name], x) for name, x in info.items())
    assert {key: value.data_ptr() for key, value in out.items(True, True)} == addresses
    fresh = twin.sample(6)
    assert (out == fresh).all() and out.keys() == fresh.keys()
    bare = buffer.sample(out=out.exclude("index", "priority_weight").clone())
    assert (bare == twin.sample(6)).all() and "index" in bare.keys()
    with pytest.raises(ValueError, match="out has room for a batch of 6, but 5 were requested"):
        buffer.sample(5, out=out)
    buffer = uniform()
    buffer.extend((torch.arange(5), {"x": torch.arange(5.0)}))
    out = (torch.empty(3, dtype=torch.int64), {"x": torch.empty(3)})
    data, info = buffer.sample(out=out, return_info=True)
    assert data is out and out[0].tolist() == out[1]["x"].tolist() == info["index"].tolist()


def test_batches_go_to_a_device():
    batch, info = filled(uniform, 3, device="meta").sample(2, return_info=True)
    assert {leaf.device.type for leaf in batch.values(True, True)} == {"meta"}
    assert info["index"].device.type == "meta"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a GPU is available")
def test_pinning_needs_a_gpu():
    with pytest.raises(ValueError, match="pass pin_memory=torch.cuda.is_available()"):
        uniform(pin_memory=True)


@pytest.mark.gpu
def test_batches_are_pinned_and_moved():
    assert_same = torch.testing.assert_close
    plain, pinned = uniform(batch_size=4), uniform(batch_size=4, pin_memory=True)
    moved = uniform(pin_memory=True, device="cuda", prefetch=2, batch_size=4)
    for buffer in (plain, pinned, moved):
        buffer.extend(steps(0, 9))
    for _ in range(5):
        batch, on_gpu = pinned.sample(), moved.sample()
        assert batch["obs"].is_pinned() and on_gpu["obs"].is_cuda and on_gpu["index"].is_cuda
        for key, value in plain.sample().items(True, True):
            assert_same(batch[key], value)
            assert_same(on_gpu[key].cpu(), value)


def test_growing_storages_and_buffers_without_a_storage():
    buffer = ReplayBuffer(storage=TensorStorage(), generator=rng())
    for first in range(0, 100, 10):
        buffer.extend(steps(first, 10))
    assert len(buffer) == 100 and len(drawn(buffer, 500)) > 90
    buffer = ReplayBuffer(batch_size=2)
    assert (buffer or None) is buffer and len(buffer) == 0  # an empty one is true
    buffer.set_rng(rng())
    buffer.extend([1, 2, 3])
    assert type(buffer.storage) is ListStorage and buffer.next().shape == (2,)


# ----------------------------------------------------------------------------------- priorities


def test_priorities_are_read_from_containers():
    buffer = by_priority(eps=0.0, priority_key=("loss", "td"))
    data = steps(0, 4).set(("loss", "td"), torch.tensor([[0.0], [1.0], [0.0], [3.0]]))
    buffer.extend(data)
    buffer.add(data[0].set(("loss", "td"), torch.tensor([4.0])))
    counts = torch.bincount(buffer.sample(8000)["index"]) / 8000
    assert counts.tolist() == pytest.approx([0, 1 / 8, 0, 3 / 8, 4 / 8], abs=0.03)
    batch = buffer[:].set("index", torch.arange(5)).set(("loss", "td"), torch.eye(5)[1][:, None])
    assert buffer.update_tensordict_priority(batch) == 0 and drawn(buffer) == {1}


@pytest.mark.parametrize("storage", [TensorStorage, ListStorage])
def test_items_of_a_list_come_with_and_without_a_priority(storage):
    buffer = PrioritizedReplayBuffer(1.0, 1.0, eps=0.0, storage=storage(9))
    data = steps(0, 3).set("td_error", torch.tensor([3.0, 2.0, 0.5]))
    buffer.extend([data[0], data[1]])
    buffer.extend([data[2], data[0].exclude("td_error"), data[1]])
    expected = [3.0, 2.0, 0.5, 3.0, 2.0]  # the largest so far for the one without
    assert buffer[:]["td_error"].tolist() == expected
    assert buffer.sampler.state_dict()["chances"].tolist() == expected


def test_an_invalid_priority_adds_no_item():
    buffer = filled(by_priority, 10)
    for index, error in ((0, -1.0), (0, float("nan")), (0, float("inf")), (10**7, 1.0), (-1, 1.0)):
        with pytest.raises((ValueError, IndexError)):
            buffer.update_priority(torch.tensor([index]), torch.tensor([error]))
        if index == 0:
            with pytest.raises(ValueError, match="finite and >= 0"):
                buffer.extend(steps(2, 2).set("td_error", torch.tensor([1.0, error])))
            with pytest.raises(ValueError, match="finite and >= 0"):
                buffer.add(steps(2, 1)[0].set("td_error", torch.tensor(error)))
    mask = torch.arange(10) > 4
    with pytest.raises(IndexError, match=r"items must be integers.*mask.nonzero\(\).squeeze\(1\)"):
        buffer.update_priority(mask, 3.0)
    assert buffer.update_priority(torch.tensor([], dtype=torch.int64), torch.ones(0, 3)) == 0
    assert len(buffer) == 10 and drawn(buffer) == set(range(10))
    assert buffer.sampler.state_dict()["chances"].unique().numel() == 1


def test_exponents_and_rules_of_weights():
    buffer = filled(by_priority, 2, alpha=0.5, beta=0.5)
    buffer.update_priority(torch.arange(2), torch.tensor([1.0, 16.0]))
    assert set(buffer.sample(50)["priority_weight"].tolist()) == {1.0, 0.5}
    buffer.beta, buffer.alpha = 1.0, 0.25
    assert set(buffer.sample(50)["priority_weight"].tolist()) == {1.0, 0.5}
    other = by_priority(alpha=1.0, beta=0.1)
    other.load_state_dict(buffer.state_dict())  # the exponents of the state count
    assert (other.alpha, other.beta) == (0.25, 1.0)
    buffer = filled(by_priority, 2, size=2)
    for priority in (1e300, 1.0):
        buffer.update_priority(torch.tensor([0]), priority)
    buffer.alpha = 2.0  # too much for the largest priority so far: new items are taken all the same
    assert buffer.extend(steps(2, 1)).tolist() == [2] and drawn(buffer) == {2}


# ---------------------------------------------------------------------------------- components


@pytest.mark.parametrize("prefetch", [0, 2])
def test_another_sampler_or_writer_for_the_same_items(prefetch):
    buffer = ReplayBuffer(storage=TensorStorage(4), batch_size=2, prefetch=prefetch)
    buffer.extend(steps(0, 6))
    before = buffer.sampler
    buffer.sample()
    buffer.set_sampler(SamplerWithoutReplacement(shuffle=False))
    assert [batch["index"].tolist() for batch in buffer] == [[2, 3], [4, 5]]
    other = ReplayBuffer(storage=TensorStorage(4), sampler=before)
    with pytest.raises(ValueError, match="belongs to another buffer"):
        buffer.set_sampler(other.sampler)
    with pytest.raises(TypeError, match="sampler must be a Sampler"):
        buffer.set_sampler(None)
    buffer.set_sampler(buffer.sampler)
    buffer.set_sampler(PrioritizedSampler(4, 0.6, 0.4))
    assert buffer.update_priority(torch.arange(6), 2.0) == 2
    with pytest.raises(ValueError, match="moves items"):
        buffer.set_writer(TensorDictMaxValueWriter())
    with pytest.raises(TypeError, match="writer must be a Writer"):
        buffer.set_writer(None)
    buffer.set_writer(ImmutableDatasetWriter())
    for write in (lambda: buffer.extend(steps(0, 2)), lambda: buffer.add(steps(0, 1)[0])):
        with pytest.raises(RuntimeError, match="ImmutableDatasetWriter"):
            write()


OPTIONS = [
    ({"sampler": dict}, TypeError, r"sampler must be a Sampler, such as .*; got \{\}"),
    ({"sampler": "random"}, TypeError, "sampler must be a Sampler, such as .*; got 'random'"),
    ({"writer": RandomSampler}, TypeError, r"such as RoundRobinWriter\(\); got <.*Sampler"),
    ({"storage": 100}, TypeError, r"such as TensorStorage\(100\); got 100"),
    ({"storage": dict}, TypeError, r"storage must be a Storage, such as .*; got \{\}"),
    ({"generator": 0}, TypeError, "generator must be a torch.Generator; got 0: pass"),
    ({"batch_size": "4"}, TypeError, "batch_size='4' must be a whole number"),
    ({"batch_size": True}, TypeError, "batch_size=True must be a whole number"),
    ({"batch_size": -1}, ValueError, "batch_size=-1 must be at least 1"),
    ({"prefetch": -1}, ValueError, "prefetch=-1 must be at least 0"),
    ({"device": "cuda:99"}, ValueError, "device 'cuda:99' is not available here"),
    ({"wirter": None}, TypeError, "wirter"),  # no argument is swallowed
]


def test_the_constructor_refuses_components_of_the_wrong_type():
    for options, error, match in OPTIONS:
        options = {"storage": TensorStorage(9), **options}
        with pytest.raises(error, match=match):
            ReplayBuffer(**options)
        if "sampler" not in options:
            with pytest.raises(error, match=match):
                PrioritizedReplayBuffer(0.6, 0.4, **options)
    ReplayBuffer(storage=TensorStorage(9), sampler=RandomSampler())  # the class is unchanged
    assert "lock" not in vars(RandomSampler)


EMPTY, PLAIN = uniform(), filled(uniform, 3)
TAKEN = uniform(5, sampler=PrioritizedSampler(5, 0.6, 0.4))
MISTAKES = [
    (lambda: EMPTY.sample(3), RuntimeError, "the buffer is empty: call buffer.extend"),
    (lambda: PLAIN.sample(), ValueError, r"items to draw is unknown: pass sample\(batch_size\)"),
    (lambda: next(iter(PLAIN)), ValueError, r"items to draw is unknown: pass sample\(batch_size\)"),
    (lambda: PLAIN.sample(0), ValueError, "batch_size=0 must be at least 1"),
    (lambda: setattr(PLAIN, "generator", 0), TypeError, "generator must be a torch.Generator; got"),
    (lambda: PLAIN.update_priority(torch.tensor([0]), 1.0), TypeError, "RandomSampler has no"),
    (lambda: uniform(5, sampler=TAKEN.sampler), ValueError, "sampler belongs to another buffer"),
    (
        lambda: uniform(5, sampler=PrioritizedSampler(4, 0.6, 0.4)),
        ValueError,
        "max_capacity=4, but the storage has max_size=5: make them",
    ),
    (lambda: by_priority(None), ValueError, "priorities need a storage of limited size"),
]


def test_invalid_calls_are_refused():
    for call, error, match in MISTAKES:
        with pytest.raises(error, match=match):
            call()
    assert len(PLAIN.sample(2)) == 2


# --------------------------------------------------------------------------------------- state

MAKE = {
    "uniform": uniform,
    "distinct": lambda: uniform(sampler=RandomSampler(replacement=False)),
    "epochs": lambda: uniform(sampler=SamplerWithoutReplacement()),
    "prioritized": lambda: by_priority(alpha=0.6, beta=0.4),
}


def run(buffer, first, n):
    """n steps of training that adds, samples and updates; returns the samples."""
    out = []
    for i in range(first, first + n):
        buffer.extend(steps(3 * i, 3))
        batch = buffer.sample(3)
        if isinstance(buffer.sampler, PrioritizedSampler):
            buffer.update_priority(batch["index"], batch["obs"][:, 0] + 1)
        out.append([batch["index"].tolist(), batch["obs"].tolist()])
        if "priority_weight" in batch.keys():
            out.append(batch["priority_weight"].tolist())
    return out


@pytest.mark.parametrize("kind", MAKE)
def test_a_resumed_buffer_continues_like_the_original(kind, tmp_path):
    buffer, make = MAKE[kind](), MAKE[kind]
    buffer.save(tmp_path)  # a fresh one, too
    other = make()
    other.load(tmp_path)
    assert run(other, 0, 6) == run(buffer, 0, 6)
    state = buffer.state_dict()
    kinds = {type(leaf) for leaf in tree_leaves(state)}
    assert kinds <= {torch.Tensor, int}
    after = run(buffer, 6, 5)
    other = make()
    for each in (other, buffer):  # and back in time
        each.load_state_dict(state)
        assert run(each, 6, 5) == after


KINDS = {
    "prioritized": lambda storage: PrioritizedReplayBuffer(0.6, 0.4, storage=storage),
    "highest": lambda storage: PrioritizedReplayBuffer(
        0.6, 0.4, storage=storage, max_priority_within_buffer=True
    ),
    "epochs": lambda storage: ReplayBuffer(storage=storage, sampler=SamplerWithoutReplacement()),
    "uniform": lambda storage: ReplayBuffer(storage=storage),
}


def test_an_invalid_state_changes_nothing(tmp_path):
    buffer, small, other = by_priority(10), by_priority(4), by_priority(4)
    run(other, 0, 5)
    run(buffer, 0, 6)
    buffer.save(tmp_path / "big")
    run(small, 0, 3)
    before, big = small.state_dict(), buffer.state_dict()
    for load in (
        lambda: small.load_state_dict(big),
        lambda: small.load(tmp_path / "big"),
        lambda: small.load_state_dict({**other.state_dict(), "storage": big["storage"]}),
    ):
        with pytest.raises(ValueError):
            load()
        after = small.state_dict()
        assert torch.equal(before["sampler"]["chances"], after["sampler"]["chances"])
        assert torch.equal(before["generator"], after["generator"])
        assert before["storage"]["total"] == after["storage"]["total"]
    (file,) = (tmp_path / "big").glob("sampling*.safetensors")
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedFileError):
        buffer.load(tmp_path / "big")


def test_a_state_of_another_kind_of_buffer_is_refused(tmp_path):
    for saved, kind in itertools.permutations(["prioritized", "epochs", "uniform"], 2):
        buffer, other = KINDS[saved](TensorStorage(10)), KINDS[kind](TensorStorage(10))
        buffer.extend(steps(0, 7))
        buffer.save(tmp_path / saved)
        other.extend(steps(20, 2))
        was, now = (type(one.sampler).__name__ for one in (buffer, other))
        text = f"buffer has a {was}, but this one has a {now}: load it"
        none = "not belong to a replay buffer: it has no kind, total, sampler"
        for load, state, match in [
            (other.load, tmp_path / saved, text),
            (other.load_state_dict, buffer.state_dict(), text),
            (other.load_state_dict, {}, none),
        ]:
            with pytest.raises(ValueError, match=match):
                load(state)
        assert other[:]["obs"][:, 0].tolist() == [20, 21] and drawn(other) <= {0, 1}


# ---------------------------------------------------------- state and storage saved separately


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_with_more_items_than_the_storage_is_refused(tmp_path, kind):
    buffer = KINDS[kind](TensorStorage(10))
    buffer.extend(steps(0, 7))
    buffer.sample(2)
    state = buffer.state_dict(items=False)
    for other in (KINDS[kind](TensorStorage(10)), KINDS[kind](MemmapStorage(10, tmp_path))):
        other.extend(steps(0, 5))
        for wrong in (state, {**state, "storage": other.storage.state_dict()}):
            with pytest.raises(ValueError, match="knows of 7 items, but the storage has 5"):
                other.load_state_dict(wrong)
            assert drawn(other, 90) <= set(range(5))
        assert other.extend(steps(5, 1)).tolist() == [5] and len(other) == 6
    if kind in ("prioritized", "epochs"):  # these refuse new items before they are written
        buffer.storage.clear()
        for add in (lambda: buffer.extend(steps(0, 2)), lambda: buffer.add(steps(0, 1)[0])):
            with pytest.raises(ValueError, match=r"7 items, but the storage has 0: .*clear"):
                add()
            assert buffer.storage.total == 0
        buffer.sampler.clear()
        assert buffer.extend(steps(0, 2)).tolist() == [0, 1] and drawn(buffer) == {0, 1}


def test_items_lost_in_a_crash_are_forgotten():
    buffer = filled(by_priority, 12)
    state = buffer.state_dict(items=False)
    buffer.storage.erase(torch.tensor([2, 3, 4]))  # the oldest, overwritten by what was lost
    buffer.load_state_dict(state)
    assert drawn(buffer) == set(range(5, 12))


# ------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("prefetch", [0, 2])
@BOTH
def test_one_thread_adds_while_others_sample_and_update(make, prefetch):
    buffer, stop = filled(make, 10, size=50, prefetch=prefetch, batch_size=16), threading.Event()

    def add():
        buffer.extend(steps(buffer.storage.total, 7))

    def learn():
        batch = buffer.sample()
        assert torch.equal(batch["obs"][:, 0], batch["index"].float())
        assert torch.equal(batch["next", "reward"], batch["index"] * 0.5)
        if make is by_priority:
            buffer.update_priority(batch["index"], torch.rand(16))

    def until_stopped(work):
        while not stop.is_set():
            work()

    with ThreadPoolExecutor(3) as pool:
        threads = [pool.submit(until_stopped, work) for work in (add, learn, learn)]
        stop.wait(0.5)
        stop.set()
    assert [thread.result() for thread in threads] == [None] * 3
    assert buffer.storage.total > 60
