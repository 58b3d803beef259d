"""ReplayBuffer: what goes in comes out, with the right numbers, priorities and state."""

import gc
import json
import pathlib
import subprocess
import sys
import threading
from collections import namedtuple

import pytest
import torch

from raffia import TensorDict
from raffia.data import ListStorage
from raffia.data.memmap_storage import MemmapStorage
from raffia.data.prioritized import PrioritizedSampler
from raffia.data.prioritized_replay import PrioritizedReplayBuffer
from raffia.data.replay import ReplayBuffer
from raffia.data.samplers import RandomSampler, SamplerWithoutReplacement
from raffia.data.storage import TensorStorage
from raffia.data.writers import ImmutableDatasetWriter, TensorDictMaxValueWriter
from raffia.tensordict.memmap import DamagedFileError
from raffia.tensordict.tensorclass import tensorclass

A = 5


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def steps(first, n):
    """n steps whose content says which item they are."""
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


# ------------------------------------------------------------------------------- in and out


def test_a_batch_holds_the_items_that_its_index_says():
    buffer = uniform(batch_size=64)
    assert buffer.extend(steps(0, 4)).tolist() == [0, 1, 2, 3]
    assert buffer.add(steps(4, 1)[0]) == 4
    assert buffer.extend(steps(5, 12)).tolist() == list(range(5, 17))
    assert len(buffer) == 10
    batch = buffer.sample()
    assert batch.batch_size == torch.Size([64]) and set(batch.keys()) == {"obs", "next", "index"}
    assert set(batch["index"].tolist()) == set(range(7, 17))
    assert torch.equal(batch["obs"], batch["index"][:, None].expand(64, A).float())
    assert torch.equal(batch["next", "reward"], batch["index"] * 0.5)


def test_a_larger_addition_than_the_buffer_keeps_the_last_items():
    buffer = by_priority(3)
    assert buffer.extend(steps(0, 8)).tolist() == list(range(8))
    assert set(buffer.sample(50)["index"].tolist()) == {5, 6, 7}


def test_items_by_age_are_copies():
    buffer = uniform(4)
    buffer.extend(steps(0, 6))
    assert buffer[0]["obs"][0] == 2 and buffer[-1]["obs"][0] == 5
    assert buffer[1:3]["obs"][:, 0].tolist() == [3, 4]
    assert buffer[::-1]["obs"][:, 0].tolist() == [5, 4, 3, 2]
    assert buffer[torch.tensor([[0, -1], [1, 1]])]["obs"][..., 0].tolist() == [[2, 5], [3, 3]]
    buffer[:]["obs"].zero_()  # in TorchRL these are views
    buffer[0]["obs"].zero_()
    buffer[torch.tensor([1])]["obs"].zero_()
    buffer.sample(9)["obs"].zero_()
    assert buffer[:]["obs"][:, 0].tolist() == [2, 3, 4, 5]
    for index in (4, -5, torch.tensor([0, 4])):
        with pytest.raises(IndexError, match="there are 4 items, and none at"):
            buffer[index]


def test_what_was_given_is_copied():
    buffer, data = uniform(), steps(0, 3)
    buffer.extend(data)
    item = steps(3, 1)[0]
    buffer.add(item)
    data["obs"].fill_(-1)
    item["obs"].fill_(-1)
    assert buffer[:]["obs"][:, 0].tolist() == [0, 1, 2, 3]


def test_other_data_than_before_is_refused_and_changes_nothing():
    buffer = by_priority()
    buffer.extend(steps(0, 3))
    for wrong in (
        steps(3, 2).exclude("obs"),  # in TorchRL this leaves rows uninitialised
        steps(3, 2).set("more", torch.zeros(2)),
        steps(3, 2).set("obs", torch.zeros(2, A + 1)),
        {"obs": torch.zeros(2, A)},
    ):
        with pytest.raises((ValueError, TypeError)):
            buffer.extend(wrong)
    assert len(buffer) == 3
    assert set(buffer.sample(30)["index"].tolist()) == {0, 1, 2}
    assert buffer.extend(steps(3, 1)).tolist() == [3]


Pair = namedtuple("Pair", "obs reward")


@tensorclass
class Step:
    obs: torch.Tensor
    reward: torch.Tensor


@pytest.mark.parametrize(
    "wrap",
    [
        lambda number: number,
        lambda number: {"obs": number, "next": [number, (number,)]},
        lambda number: Pair(number, number),
        lambda number: Step(obs=number, reward=number, batch_size=number.shape),
    ],
    ids=["tensor", "pytree", "namedtuple", "tensorclass"],
)
@pytest.mark.parametrize("make", [uniform, by_priority])
def test_any_structure_comes_with_info_about_it(make, wrap):
    buffer = make(4)
    buffer.extend(wrap(torch.arange(6.0)))
    data, info = buffer.sample(50, return_info=True)
    assert type(data) is type(wrap(torch.zeros(1)))
    leaves = torch.utils._pytree.tree_leaves(data)
    assert all([torch.equal(leaf, info["index"].float()) for leaf in leaves])
    assert set(info["index"].tolist()) == {2, 3, 4, 5}
    assert set(info) == {"index"} | ({"priority_weight"} if make is by_priority else set())
    assert torch.utils._pytree.tree_leaves(buffer[0])[0] == 2.0


def test_info_of_a_container_is_what_stands_in_it():
    buffer = by_priority()
    buffer.extend(steps(0, 5))
    batch, info = buffer.sample(7, return_info=True)
    for name in ("index", "priority_weight"):
        assert torch.equal(batch[name], info[name])


@pytest.mark.parametrize("make", [uniform, by_priority])
@pytest.mark.parametrize("collate_fn", [None, lambda batch: batch.clone()])
def test_a_given_container_is_filled(make, collate_fn):
    buffer = make(collate_fn=collate_fn)
    twin = make(collate_fn=collate_fn)
    buffer.extend(steps(0, 17))
    twin.extend(steps(0, 17))
    out = buffer.sample(6)
    twin.sample(6)
    where = {key: value.data_ptr() for key, value in out.items(True, True)}
    again = buffer.sample(out=out)
    assert again is out
    assert {key: value.data_ptr() for key, value in out.items(True, True)} == where
    fresh = twin.sample(6)
    assert (out == fresh).all() and out.keys() == fresh.keys()
    bare = buffer.sample(out=out.exclude("index", "priority_weight").clone())
    assert (bare == twin.sample(6)).all() and "index" in bare.keys()
    with pytest.raises(ValueError, match="out has room for a batch of 6, and 5 are asked for"):
        buffer.sample(5, out=out)


def test_a_given_tensor_or_pytree_is_filled():
    buffer = uniform()
    buffer.extend((torch.arange(5), {"x": torch.arange(5.0)}))
    out = (torch.empty(3, dtype=torch.int64), {"x": torch.empty(3)})
    data, info = buffer.sample(out=out, return_info=True)
    assert data is out
    assert out[0].tolist() == out[1]["x"].tolist() == info["index"].tolist()


def test_collate_and_transform_are_called_in_this_order():
    seen = []

    def collate(batch):
        seen.append(("collate", "index" in batch.keys()))
        return batch.select("obs")

    def transform(batch):
        seen.append(("transform", "index" in batch.keys()))
        return batch["obs"].sum()

    buffer = uniform(collate_fn=collate, transform=transform, batch_size=3)
    buffer.extend(steps(2, 1))
    assert buffer.sample() == 2 * 3 * A
    assert seen == [("collate", False), ("transform", True)]
    assert buffer[0]["obs"].shape == (A,)  # not for these


def test_batches_go_to_a_device():
    buffer = uniform(device="meta")
    buffer.extend(steps(0, 3))
    batch, info = buffer.sample(2, return_info=True)
    assert {leaf.device.type for leaf in batch.values(True, True)} == {"meta"}
    assert info["index"].device.type == "meta"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU to pin for")
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
        batch, there = pinned.sample(), moved.sample()
        assert batch["obs"].is_pinned() and there["obs"].is_cuda and there["index"].is_cuda
        for key, value in plain.sample().items(True, True):
            assert_same(batch[key], value)
            assert_same(there[key].cpu(), value)


# ------------------------------------------------------------------------------------ iteration


def test_iteration_goes_on_for_ever_or_to_the_end_of_the_epoch():
    buffer = uniform(batch_size=2)
    buffer.extend(steps(0, 3))
    assert len([batch for batch, _ in zip(buffer, range(50), strict=False)]) == 50
    epochs = uniform(sampler=SamplerWithoutReplacement(), batch_size=4)
    epochs.extend(steps(0, 10))
    for _ in range(2):
        batches = [batch["index"] for batch in epochs]
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert sorted(torch.cat(batches).tolist()) == list(range(10))
    whole = uniform(sampler=SamplerWithoutReplacement(drop_last=True), batch_size=4)
    whole.extend(steps(0, 10))
    assert [len(batch) for batch in whole] == [4, 4]


# ----------------------------------------------------------------------------------- priorities


def test_priorities_go_by_the_number_of_the_item():
    buffer = by_priority(4, eps=0.0)
    buffer.extend(steps(0, 4))
    batch = buffer.sample(4)
    buffer.extend(steps(4, 3))  # 3, 4, 5, 6 are here
    assert (
        buffer.update_priority(torch.tensor([0, 3, 4, 5, 6]), torch.tensor([9.0, 4, 1, 1, 1])) == 1
    )
    assert buffer.sampler.num_ignored == 1
    late = int((batch["index"] < 3).sum())
    assert buffer.update_priority(batch["index"], torch.full((4,), 4.0)) == late
    counts = torch.bincount(buffer.sample(7000)["index"], minlength=7) / 7000
    assert counts.tolist() == pytest.approx([0, 0, 0, 4 / 7, 1 / 7, 1 / 7, 1 / 7], abs=0.03)


def test_priorities_are_read_from_containers():
    buffer = by_priority(eps=0.0, priority_key=("loss", "td"))
    data = steps(0, 4).set(("loss", "td"), torch.tensor([[0.0], [1.0], [0.0], [3.0]]))
    buffer.extend(data)
    item = data[0].set(("loss", "td"), torch.tensor([4.0]))
    buffer.add(item)
    counts = torch.bincount(buffer.sample(8000)["index"]) / 8000
    assert counts.tolist() == pytest.approx([0, 1 / 8, 0, 3 / 8, 4 / 8], abs=0.03)
    batch = buffer[:].set("index", torch.arange(5)).set(("loss", "td"), torch.eye(5)[1][:, None])
    assert buffer.update_tensordict_priority(batch) == 0
    assert set(buffer.sample(20)["index"].tolist()) == {1}
    more = buffer.extend(steps(9, 20).set(("loss", "td"), torch.ones(20, 1)))
    assert len(more) == 20 and buffer.sampler.num_ignored == 0


def test_a_wrong_priority_in_new_items_adds_none():
    buffer = by_priority()
    buffer.extend(steps(0, 2).set("td_error", torch.ones(2)))
    for error in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="finite and >= 0"):
            buffer.extend(steps(2, 2).set("td_error", torch.tensor([1.0, error])))
        with pytest.raises(ValueError, match="finite and >= 0"):
            buffer.add(steps(2, 1)[0].set("td_error", torch.tensor(error)))
    assert len(buffer) == 2


def test_exponents_can_be_set_on_the_buffer():
    buffer = by_priority(alpha=0.5, beta=0.5)
    buffer.extend(steps(0, 2))
    buffer.update_priority(torch.arange(2), torch.tensor([1.0, 16.0]))
    assert set(buffer.sample(50)["priority_weight"].tolist()) == {1.0, 0.5}
    buffer.beta, buffer.alpha = 1.0, 0.25
    assert (buffer.alpha, buffer.beta) == (0.25, 1.0)
    found = sorted(set(buffer.sample(50)["priority_weight"].tolist()))
    assert found == pytest.approx([0.5, 1.0])


def test_importance_weights_can_be_those_of_the_batch():
    buffer = by_priority(alpha=0.5, beta=1.0, importance="batch")
    buffer.extend(steps(0, 3))
    priority = torch.tensor([0.0001, 4.0, 16.0])
    buffer.update_priority(torch.arange(3), priority)
    batch = buffer.sample(20)
    assert 0 not in batch["index"]  # of which the weights of all would be those of the buffer
    expected = torch.tensor([0.0, 1.0, 0.5])[batch["index"]]
    torch.testing.assert_close(batch["priority_weight"], expected)


def test_a_uniform_buffer_has_no_priorities():
    buffer = uniform()
    buffer.extend(steps(0, 2))
    with pytest.raises(
        TypeError, match="RandomSampler has no priorities; use PrioritizedReplayBuf"
    ):
        buffer.update_priority(torch.tensor([0]), 1.0)


def test_a_prioritized_sampler_can_be_passed_to_any_buffer():
    buffer = uniform(5, sampler=PrioritizedSampler(5, 0.6, 0.4))
    buffer.extend(steps(0, 7))
    assert "priority_weight" in buffer.sample(3).keys()
    with pytest.raises(ValueError, match="the sampler belongs to another buffer"):
        uniform(5, sampler=buffer.sampler)
    with pytest.raises(ValueError, match="max_capacity=4 and the storage max_size=5: they must be"):
        uniform(5, sampler=PrioritizedSampler(4, 0.6, 0.4))
    with pytest.raises(ValueError, match="priorities need a storage of limited size"):
        by_priority(None)


def test_other_mistakes_are_named():
    buffer = uniform()
    with pytest.raises(RuntimeError, match="the buffer is empty: buffer.extend"):
        buffer.sample(3)
    buffer.extend(steps(0, 3))
    for sample in (buffer.sample, lambda: next(iter(buffer))):
        with pytest.raises(ValueError, match=r"how many\? Pass sample\(batch_size\)"):
            sample()
    with pytest.raises(ValueError, match="got batch_size=0"):
        buffer.sample(0)
    with pytest.raises(ValueError, match="got batch_size=-1"):
        uniform(batch_size=-1)
    with pytest.raises(ValueError, match="prefetch is a number of batches, 0 or more, got -1"):
        uniform(prefetch=-1)
    with pytest.raises(TypeError):
        uniform(wirter=None)  # no argument is swallowed


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"sampler": RandomSampler}, TypeError, r"pass an instance, RandomSampler\(\)"),
        ({"sampler": "random"}, TypeError, "sampler is a Sampler, such as .*, got 'random'"),
        ({"storage": 100}, TypeError, r"such as TensorStorage\(100\), got 100"),
        ({"storage": TensorStorage}, TypeError, "storage is a Storage, such as"),
        ({"generator": 0}, TypeError, "generator is a torch.Generator, got 0: pass"),
        ({"batch_size": "4"}, TypeError, "batch_size is a number of items, got '4'"),
        ({"batch_size": True}, TypeError, "batch_size is a number of items, got True"),
        ({"prefetch": 1.5}, TypeError, "prefetch is a number of batches, got 1.5"),
        ({"device": "cuda:99"}, ValueError, "there is no device 'cuda:99' here"),
    ],
)
def test_parts_of_the_wrong_type_are_refused_when_it_is_made(options, error, match):
    with pytest.raises(error, match=match):
        ReplayBuffer(**{"storage": TensorStorage(9), **options})
    if "sampler" not in options:
        with pytest.raises(error, match=match):
            PrioritizedReplayBuffer(0.6, 0.4, **{"storage": TensorStorage(9), **options})
    ReplayBuffer(storage=TensorStorage(9), sampler=RandomSampler())  # the class is as it was
    assert "lock" not in vars(RandomSampler)


def test_a_batch_has_a_whole_number_of_items():
    buffer = uniform()
    buffer.extend(steps(0, 3))
    with pytest.raises(TypeError, match="batch_size is a number of items, got 2.5"):
        buffer.sample(2.5)
    with pytest.raises(TypeError, match="generator is a torch.Generator, got 0"):
        buffer.generator = 0
    assert len(buffer.sample(2)) == 2


def test_a_mask_reads_items_and_changes_no_priorities():
    buffer = by_priority()
    buffer.extend(steps(0, 3))
    mask = torch.tensor([True, False, True])
    for index in (mask, mask.tolist()):
        assert buffer[index]["obs"][:, 0].tolist() == [0, 2]
    for wrong in (mask[:2], mask[None], True):
        with pytest.raises(IndexError, match="a truth value for each of the 3 items, got shape"):
            buffer[wrong]
    with pytest.raises(IndexError, match=r"items are integers.*mask.nonzero\(\).squeeze\(1\)"):
        buffer.update_priority(mask, 3.0)
    assert buffer.sampler.state_dict()["chances"].unique().numel() == 1


@pytest.mark.parametrize("prefetch", [0, 2])
def test_another_sampler_draws_from_the_same_items(prefetch):
    buffer = ReplayBuffer(storage=TensorStorage(4), batch_size=2, prefetch=prefetch)
    buffer.extend(steps(0, 6))
    before = buffer.sampler
    buffer.sample()
    buffer.set_sampler(SamplerWithoutReplacement(shuffle=False))
    assert [batch["index"].tolist() for batch in buffer] == [[2, 3], [4, 5]]
    other = ReplayBuffer(storage=TensorStorage(4), sampler=before)
    with pytest.raises(ValueError, match="belongs to another buffer"):
        buffer.set_sampler(other.sampler)
    with pytest.raises(TypeError, match="sampler is a Sampler"):
        buffer.set_sampler(None)
    buffer.set_sampler(buffer.sampler)
    buffer.set_sampler(PrioritizedSampler(4, 0.6, 0.4))
    assert buffer.update_priority(torch.arange(6), 2.0) == 2
    with pytest.raises(ValueError, match="moves items"):
        buffer.set_writer(TensorDictMaxValueWriter())


def test_another_writer_refuses_items():
    buffer = uniform()
    buffer.set_writer(ImmutableDatasetWriter())
    with pytest.raises(RuntimeError, match="ImmutableDatasetWriter"):
        buffer.extend(steps(0, 2))
    with pytest.raises(TypeError, match="writer is a Writer"):
        buffer.set_writer(None)


def test_a_buffer_without_a_storage_has_a_list():
    buffer = ReplayBuffer(batch_size=2)
    buffer.set_rng(rng())
    buffer.extend([1, 2, 3])
    assert type(buffer.storage) is ListStorage and buffer.next().shape == (2,)


def test_an_empty_buffer_is_true():
    assert uniform() and by_priority() and len(uniform()) == 0


def test_empty_starts_anew():
    buffer = by_priority()
    buffer.extend(steps(0, 7))
    buffer.update_priority(torch.arange(7), 5.0)
    buffer.empty()
    assert len(buffer) == 0
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample(2)
    assert buffer.extend(steps(0, 2)).tolist() == [0, 1]
    assert set(buffer.sample(20)["index"].tolist()) == {0, 1}


def test_a_storage_that_grows():
    buffer = ReplayBuffer(storage=TensorStorage(), generator=rng())
    for first in range(0, 100, 10):
        buffer.extend(steps(first, 10))
    batch = buffer.sample(500)
    assert len(buffer) == 100 and len(batch["index"].unique()) > 90
    assert torch.equal(batch["next", "reward"], batch["index"] * 0.5)


# --------------------------------------------------------------------------------------- state

MAKE = {
    "uniform": uniform,
    "distinct": lambda: uniform(sampler=RandomSampler(replacement=False)),
    "epochs": lambda: uniform(sampler=SamplerWithoutReplacement()),
    "prioritized": lambda: by_priority(alpha=0.6, beta=0.4),
}


def run(buffer, first, n):
    """n steps of a training that adds, samples and updates: what was sampled."""
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKE)
def test_it_goes_on_from_a_state_as_if_it_had_never_stopped(kind):
    buffer = MAKE[kind]()
    run(buffer, 0, 6)
    state = buffer.state_dict()
    after = run(buffer, 6, 5)
    other = MAKE[kind]()
    other.load_state_dict(state)
    assert run(other, 6, 5) == after
    buffer.load_state_dict(state)  # and back in time
    assert run(buffer, 6, 5) == after


@pytest.mark.slow
def test_it_goes_on_from_a_folder_in_another_process(tmp_path):
    after = {}
    for kind, make in MAKE.items():
        buffer = make()
        run(buffer, 0, 6)
        buffer.save(tmp_path / kind)
        after[kind] = run(buffer, 6, 5)
    code = f"""
import json, sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import test_replay as t
out = {{}}
for kind, make in t.MAKE.items():
    buffer = make()
    buffer.load({str(tmp_path)!r} + "/" + kind)
    out[kind] = t.run(buffer, 6, 5)
print(json.dumps(out))
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert json.loads(out.stdout) == after


def test_a_state_is_of_tensors_and_numbers_only():
    def leaves(state):
        for value in state.values():
            yield from leaves(value) if isinstance(value, dict) else [value]

    for make in MAKE.values():
        buffer = make()
        for state in (buffer.state_dict(), run(buffer, 0, 5) and buffer.state_dict()):
            assert {type(leaf) for leaf in leaves(state)} <= {torch.Tensor, int}


def test_a_fresh_buffer_can_be_saved(tmp_path):
    for kind, make in MAKE.items():
        make().save(tmp_path / kind)
        other = make()
        other.load(tmp_path / kind)
        assert run(other, 0, 4) == run(make(), 0, 4)


def test_a_state_that_does_not_fit_changes_nothing(tmp_path):
    buffer, small, other = by_priority(10), by_priority(4), by_priority(4)
    run(other, 0, 5)
    run(buffer, 0, 6)
    buffer.save(tmp_path / "big")
    run(small, 0, 3)
    before = small.state_dict()
    for load in (
        lambda: small.load_state_dict(buffer.state_dict()),
        lambda: small.load(tmp_path / "big"),
        lambda: small.load_state_dict(
            {**other.state_dict(), "storage": buffer.state_dict()["storage"]}
        ),
    ):
        with pytest.raises(ValueError):
            load()
        after = small.state_dict()
        assert torch.equal(before["sampler"]["chances"], after["sampler"]["chances"])
        assert torch.equal(before["generator"], after["generator"])
        assert before["storage"]["total"] == after["storage"]["total"]
    assert len(small.sample(5)["index"]) == 5


def test_a_generator_goes_with_the_state_or_not_at_all():
    given, none = uniform(), ReplayBuffer(storage=TensorStorage(10))
    with pytest.raises(ValueError, match="the state has a generator and the buffer has none"):
        none.load_state_dict(given.state_dict())
    with pytest.raises(ValueError, match="the buffer has a generator and the state has none"):
        given.load_state_dict(none.state_dict())
    none.generator = rng(5)
    none.load_state_dict(given.state_dict())
    assert torch.equal(none.generator.get_state(), rng(0).get_state())


def test_a_damaged_folder_is_refused(tmp_path):
    buffer = by_priority()
    run(buffer, 0, 3)
    buffer.save(tmp_path)
    (file,) = tmp_path.glob("sampling*.safetensors")
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedFileError):
        buffer.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        buffer.load(tmp_path / "nowhere")


@pytest.mark.slow
def test_items_on_disk(tmp_path):
    buffer = ReplayBuffer(
        storage=MemmapStorage(10, tmp_path / "rows"), generator=rng(), batch_size=9
    )
    plain = uniform(batch_size=9)
    for each in (buffer, plain):
        each.extend(steps(0, 14))
    assert (buffer.sample() == plain.sample()).all()
    buffer.storage.flush()
    del buffer
    gc.collect()
    found = PrioritizedReplayBuffer(0.6, 0.4, storage=MemmapStorage(10, tmp_path / "rows"))
    assert set(found.sample(90)["index"].tolist()) == set(range(4, 14))  # with equal priorities
    found.update_priority(torch.arange(4, 14), torch.eye(10)[3] * 1e9)
    state = found.state_dict(items=False)
    assert set(state) == {"kind", "total", "sampler"}
    del found
    gc.collect()
    found = PrioritizedReplayBuffer(0.6, 0.4, storage=MemmapStorage(10, tmp_path / "rows"))
    found.load_state_dict(state)
    assert set(found.sample(90)["index"].tolist()) == {7}


KINDS = {
    "prioritized": lambda storage: PrioritizedReplayBuffer(0.6, 0.4, storage=storage),
    "highest": lambda storage: PrioritizedReplayBuffer(
        0.6, 0.4, storage=storage, max_priority_within_buffer=True
    ),
    "epochs": lambda storage: ReplayBuffer(storage=storage, sampler=SamplerWithoutReplacement()),
    "uniform": lambda storage: ReplayBuffer(storage=storage),
}


@pytest.mark.parametrize("more", [0, 3, 8, 25])  # 8: the ring wraps; 25: nothing is known of it
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_may_be_older_than_the_storage(tmp_path, kind, more):
    with MemmapStorage(10, tmp_path) as storage:
        buffer = KINDS[kind](storage)
        buffer.extend(steps(0, 4))
        if hasattr(buffer, "priorities"):
            buffer.update_priority(torch.arange(4), torch.tensor([0.0, 9.0, 0.0, 4.0]))
        buffer.sample(2)
        state = buffer.state_dict(items=False)
        for first in range(4, 4 + more):
            buffer.extend(steps(first, 1))
    with MemmapStorage(10, tmp_path) as storage:
        buffer = KINDS[kind](storage)
        buffer.load_state_dict(state)
        live = range(max(0, 4 + more - 10), 4 + more)
        if hasattr(buffer, "priorities"):  # the new ones have the largest
            chances = buffer.priorities.state_dict()["chances"]
            known = [1e-8, 9 + 1e-8, 1e-8, 4 + 1e-8]
            largest = 4 + 1e-8 if (kind, more) == ("highest", 8) else 9 + 1e-8  # 1 is gone there
            for item in live:
                expected = known[item] if item < 4 else largest
                assert chances[item % 10].item() == pytest.approx(expected**0.6)
        for _ in range(6):
            assert set(buffer.sample(20)["index"].tolist()) <= set(live)
        assert buffer.extend(steps(4 + more, 2)).tolist() == [4 + more, 5 + more]
        drawn = [buffer.sample(20)["index"] for _ in range(30)]
        assert {4 + more, 5 + more} <= set(torch.cat(drawn).tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_more_items_than_the_storage_has_is_refused(tmp_path, kind):
    buffer = KINDS[kind](TensorStorage(10))
    buffer.extend(steps(0, 7))
    buffer.sample(2)
    state = buffer.state_dict(items=False)
    for other in (KINDS[kind](TensorStorage(10)), KINDS[kind](MemmapStorage(10, tmp_path))):
        other.extend(steps(0, 5))
        with pytest.raises(ValueError, match="knows of 7 items, and the storage has 5"):
            other.load_state_dict(state)
        assert set(other.sample(90)["index"].tolist()) <= set(range(5))
        with pytest.raises(ValueError, match="knows of 7 items, and the storage has 5"):
            other.load_state_dict({**state, "storage": other.storage.state_dict()})
        assert other.extend(steps(5, 1)).tolist() == [5] and len(other) == 6


def test_items_that_a_crash_took_from_the_storage_are_forgotten():
    buffer = by_priority(10, alpha=1.0, beta=1.0)
    buffer.extend(steps(0, 12))
    state = buffer.state_dict(items=False)
    buffer.storage.erase(torch.tensor([2, 3, 4]))  # the oldest, overwritten by what was lost
    buffer.load_state_dict(state)
    assert set(buffer.sample(200)["index"].tolist()) == set(range(5, 12))
    buffer.extend(steps(12, 4))
    assert set(buffer.sample(300)["index"].tolist()) == set(range(6, 16))


@pytest.mark.parametrize("kind", ["prioritized", "epochs"])
def test_what_refuses_new_items_does_so_before_they_are_written(kind):
    buffer = KINDS[kind](TensorStorage(10))
    buffer.extend(steps(0, 7))
    buffer.sample(3)
    buffer.storage.clear()
    for add in (lambda: buffer.extend(steps(0, 2)), lambda: buffer.add(steps(0, 1)[0])):
        with pytest.raises(ValueError, match=r"knows of 7 items, and the storage has 0: .*clear"):
            add()
        assert buffer.storage.total == 0
    buffer.sampler.clear()
    assert buffer.extend(steps(0, 2)).tolist() == [0, 1]
    assert set(buffer.sample(20)["index"].tolist()) == {0, 1}


def test_an_alpha_that_is_too_much_for_the_largest_priority_refuses_no_item():
    buffer = by_priority(2, alpha=1.0)
    buffer.extend(steps(0, 2))
    buffer.update_priority(torch.tensor([0]), 1e300)
    buffer.update_priority(torch.tensor([0]), 1.0)
    buffer.alpha = 2.0
    assert buffer.extend(steps(2, 1)).tolist() == [2]
    assert set(buffer.sample(20)["index"].tolist()) == {2}


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_follows_the_writer(tmp_path, kind):
    with MemmapStorage(10, tmp_path) as storage:
        storage.extend(steps(0, 4))
        with MemmapStorage(10, tmp_path, mode="r") as same:
            reader = KINDS[kind](same)
            for first, n in ((4, 3), (7, 8), (15, 31)):
                reader.sample(3)
                storage.extend(steps(first, n))
                live = set(range(max(0, first + n - 10), first + n))
                drawn = [reader.sample(20) for _ in range(30)]
                assert set(torch.cat([batch["index"] for batch in drawn]).tolist()) == live or (
                    kind == "epochs"
                )
                for batch in drawn:
                    assert torch.equal(batch["obs"][:, 0], batch["index"].float())
                assert set(drawn[-1]["index"].tolist()) <= live
                if hasattr(reader, "priorities"):
                    assert reader.update_priority(drawn[-1]["index"], 2.0) == 0


@pytest.mark.parametrize("saved", ["prioritized", "epochs", "uniform"])
def test_a_save_of_another_kind_of_buffer_is_refused(tmp_path, saved):
    buffer = KINDS[saved](TensorStorage(10))
    buffer.extend(steps(0, 7))
    buffer.save(tmp_path)
    was = type(buffer.sampler).__name__
    for kind in {"prioritized", "epochs", "uniform"} - {saved}:
        other = KINDS[kind](TensorStorage(10))
        other.extend(steps(20, 2))
        match = f"a {was} was saved, and this one has a {type(other.sampler).__name__}: load it"
        for load in (
            lambda other=other: other.load(tmp_path),
            lambda other=other: other.load_state_dict(buffer.state_dict()),
        ):
            with pytest.raises(ValueError, match=match):
                load()
        with pytest.raises(ValueError, match="not of a replay buffer: no kind, total, sampler in"):
            other.load_state_dict({})
        assert other[:]["obs"][:, 0].tolist() == [20, 21]
        assert set(other.sample(9)["index"].tolist()) <= {0, 1}


def test_the_exponents_of_the_state_count():
    buffer = by_priority(alpha=0.6, beta=0.4)
    buffer.beta = 0.9
    other = by_priority(alpha=1.0, beta=1.0)
    other.load_state_dict(buffer.state_dict())
    assert (other.alpha, other.beta) == (0.6, 0.9)


# ------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("make", [uniform, by_priority])
def test_one_thread_adds_while_others_sample_and_update(make, prefetch):
    buffer = make(50, prefetch=prefetch, batch_size=16)
    buffer.extend(steps(0, 10))
    errors, stop = [], threading.Event()

    def guarded(work):
        def loop():
            try:
                while not stop.is_set():
                    work()
            except BaseException as error:
                errors.append(error)

        return threading.Thread(target=loop)

    def add():
        buffer.extend(steps(buffer.storage.total, 7))

    def learn():
        batch = buffer.sample()
        assert torch.equal(batch["obs"][:, 0], batch["index"].float())
        assert torch.equal(batch["next", "reward"], batch["index"] * 0.5)
        if make is by_priority:
            buffer.update_priority(batch["index"], torch.rand(16))

    threads = [guarded(add), guarded(learn), guarded(learn)]
    for thread in threads:
        thread.start()
    stop.wait(0.5)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert buffer.storage.total > 60


# -------------------------------------------------------------- what was wrong with the peer's


@pytest.mark.parametrize("prefetch", [0, 3])
def test_prioritized_draws_follow_the_seed(prefetch):
    def indices(generator, prefetch):
        buffer = by_priority(generator=generator, prefetch=prefetch, batch_size=4)
        buffer.extend(steps(0, 10))
        return [buffer.sample()["index"].tolist() for _ in range(5)]

    torch.manual_seed(3)
    by_global = indices(None, 0)
    assert indices(rng(3), prefetch) == by_global
    assert indices(rng(4), prefetch) != by_global


def test_no_priority_or_index_poisons_the_buffer():
    buffer = by_priority()
    buffer.extend(steps(0, 10))
    for index, priority in (
        (0, -1.0),
        (0, float("nan")),
        (0, float("inf")),
        (10**7, 1.0),
        (-1, 1.0),
    ):
        with pytest.raises((ValueError, IndexError)):
            buffer.update_priority(torch.tensor([index]), torch.tensor([priority]))
    assert set(buffer.sample(200)["index"].tolist()) == set(range(10))
