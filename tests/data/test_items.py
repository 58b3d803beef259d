"""Forms of items: lists of them, numpy arrays, rollouts; nothing is read as other rows."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from raffia import TensorDict
from raffia.data.memmap_storage import MemmapStorage
from raffia.data.replay import ReplayBuffer
from raffia.data.storage import TensorStorage
from raffia.data.tensordict_replay import PrioritizedReplayBuffer
from raffia.tensordict.tensorclass import tensorclass

Point = namedtuple("Point", "x y")


@tensorclass
class Step:
    obs: torch.Tensor


def buffer_of(kind=ReplayBuffer, size=20, **options):
    exponents = () if kind is ReplayBuffer else (1.0, 1.0)
    rng = torch.Generator().manual_seed(0)
    return kind(*exponents, storage=TensorStorage(size), generator=rng, **options)


KINDS = pytest.mark.parametrize("kind", [ReplayBuffer, PrioritizedReplayBuffer])

# An item of three numbers, in all forms that a buffer accepts.
ITEMS = {
    "container": lambda x: TensorDict(obs=x),
    "container with a batch size": lambda x: TensorDict(obs=x, batch_size=[3]),
    "tensorclass": lambda x: Step(obs=x),
    "nested container": lambda x: TensorDict(a=TensorDict(obs=x), b=x.sum()),
    "tensor": lambda x: x,
    "array": lambda x: x.numpy(),
    "dict": lambda x: {"obs": x},
    "dict of an array and numbers": lambda x: {"obs": x.numpy(), "reward": 0.5, "done": False},
    "numbers of numpy": lambda x: {"obs": x.numpy(), "done": np.bool_(True)},
    "tuple": lambda x: (x, x.sum()),
    "named tuple": lambda x: Point(x, {"z": x}),
    "list": lambda x: [x, x.sum()],
    "tuple of containers": lambda x: (TensorDict(obs=x), x),
}


def numbers(data):
    """All numbers of a pytree, in order."""
    return [torch.as_tensor(leaf).double().flatten().tolist() for leaf in tree_leaves(data)]


@KINDS
@pytest.mark.parametrize("name", ITEMS)
def test_a_list_is_read_as_items(kind, name):
    items = [ITEMS[name](torch.arange(3.0) + 10 * i) for i in range(5)]
    single, together = buffer_of(kind), buffer_of(kind)
    for item in items:
        single.add(item)
    assert together.extend(items).tolist() == [0, 1, 2, 3, 4]
    for i in range(5):
        assert numbers(together[i]) == numbers(single[i]) == numbers(items[i])
        assert type(together[i]) is type(single[i])
    assert together.extend(items[:2]).tolist() == [5, 6]  # now that the form of a row is known
    assert numbers(together[-1]) == numbers(items[1])
    together.sample(4)


def test_items_of_different_structure_are_refused():
    buffer, x = buffer_of(), torch.zeros(1)
    for items, error, match in [
        ([torch.zeros(3), torch.zeros(2)], ValueError, r"item 1 of.*\[2\].*as a tuple or a dict"),
        ([{"a": x, "b": x}, {"a": x}], ValueError, "item 1 of the list, entry 'b' is missing"),
        ([{"a": 1}, {"a": 2}, {"a": "three"}], TypeError, "item 2 of the list.*is a str"),
        ([], ValueError, "the list has no items"),
        (np.array(["a", "b"]), TypeError, "numpy array of dtype .*U1.* cannot be stored"),
    ]:
        with pytest.raises(error, match=match):
            buffer.extend(items)
    with pytest.raises(TypeError, match=r"\('obs', 0\) is a float.*torch.as_tensor"):
        buffer.add({"obs": [0.5, 1.5]})  # a list of numbers is no tensor
    assert len(buffer) == 0
    buffer.extend((torch.zeros(4, 3), torch.zeros(4, 2)))  # as the error says
    assert len(buffer) == 4


@pytest.mark.parametrize(
    "wrap", [lambda td: (td, td), lambda td: {"a": td}, lambda td: Point(td, td["obs"])]
)
def test_containers_without_a_batch_dimension_are_refused_in_other_pytrees(wrap):
    buffer, item = buffer_of(), wrap(TensorDict(obs=torch.zeros(3)))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"has the batch size \[\].*pass a list of items"):
            buffer.extend(item)
        buffer.add(item)  # as one item it is right
        item = wrap(TensorDict(obs=torch.zeros(3)))
    with pytest.raises(ValueError, match=r"has the batch size \[\].*pass a list of items"):
        buffer.extend(wrap(TensorDict(obs=torch.zeros(5, 3))))
    assert len(buffer) == 2


def test_rows_of_lists_are_accepted_where_such_rows_are_stored():
    buffer = buffer_of()
    buffer.add([torch.zeros(3), torch.tensor(1)])
    assert len(buffer.extend([torch.ones(4, 3), torch.arange(4)])) == 4  # four rows of lists
    assert len(buffer.extend([[torch.ones(3), torch.tensor(7)]])) == 1  # one item that is a list
    assert buffer[:][1].tolist() == [1, 0, 1, 2, 3, 7]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6)[::-1],
        np.arange(6, dtype=">i4"),
        np.arange(6).astype("f4")[::2],
        np.frombuffer(bytes(range(8)), np.uint8),  # can't be written to
        np.arange(6, dtype=np.uint16),
        np.zeros((3, 0)),
    ],
    ids=["backwards", "big endian", "strided", "read only", "uint16", "empty rows"],
)
def test_arrays_of_any_layout(array, tmp_path):
    with MemmapStorage(18, tmp_path / "rows") as disk:
        for storage in (TensorStorage(18), disk):
            storage.extend({"x": array, "reward": np.ones(len(array))})
            source = array.copy()
            storage.extend({"x": source, "reward": np.ones(len(array))})
            source[:1] = 99  # the stored item is a copy
            found = storage.get(slice(None))
            assert found["x"].tolist() == [*array.tolist()] * 2
            assert found["reward"].dtype is torch.float64


# ----------------------------------------------------------------------- rollouts [T, E]


def test_priorities_of_items_with_a_batch_size_and_of_grids_of_items():
    buffer = buffer_of(PrioritizedReplayBuffer, eps=0.0)
    rollout = TensorDict(obs=torch.arange(12).view(6, 2), batch_size=[6, 2])
    buffer.extend(rollout.set("td_error", torch.ones(6, 2)))
    batch = buffer[:].set("index", torch.arange(6).unsqueeze(1).expand(6, 2))
    error = torch.zeros(6, 2)
    error[3] = torch.tensor([2.0, 0.0])  # the largest of them counts, not the last
    assert buffer.update_tensordict_priority(batch.set("td_error", error)) == 0
    assert set(buffer.sample(20)["index"][:, 0].tolist()) == {3}
    buffer = buffer_of(PrioritizedReplayBuffer, eps=0.0)
    buffer.extend(TensorDict(obs=torch.zeros(6), batch_size=[6]))
    grid = TensorDict(index=torch.arange(6).view(2, 3), batch_size=[2, 3])
    error = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    buffer.update_tensordict_priority(grid.set("td_error", error))
    assert set(buffer.sample(20)["index"].tolist()) == {2}


# ----------------------------------------------------------------- items with and without priority


@pytest.mark.parametrize("key", ["td_error", ("next", "td_error")])
@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_items_with_and_without_a_priority_can_be_mixed(key, as_dict, first):
    def items(start, n, error=None):
        td = TensorDict(obs=torch.arange(start, start + n), next=TensorDict(r=torch.zeros(n)))
        td.batch_size = [n]
        if error is not None:
            td[key] = torch.full((n,), error)
        return td.to_dict() if as_dict else td

    buffer = buffer_of(PrioritizedReplayBuffer, eps=0.0, priority_key=key)
    numbers = [buffer.extend(items(0, 2, 2.0 if first else None))]
    numbers += [buffer.extend(items(2, 2, None if first else 2.0))]
    numbers += [buffer.extend(items(4, 1, 6.0))]
    number = buffer.add(items(5, 1)[0] if not as_dict else {"obs": 5, "next": {"r": 0.0}})
    assert torch.cat(numbers).tolist() == [0, 1, 2, 3, 4] and number == 5
    batch, info = buffer.sample(6000, return_info=True)
    assert torch.equal(info["index"], batch["obs"])
    # Without a priority an item starts with the largest so far: 1 before there was any.
    expected = torch.tensor([2.0, 2, 2, 2, 6, 6] if first else [1.0, 1, 2, 2, 6, 6])
    counts = info["index"].bincount(minlength=6) / 6000
    torch.testing.assert_close(counts, expected / expected.sum(), atol=0.03, rtol=0)
    below = batch["next"] if key != "td_error" else batch
    assert ("td_error" in below.keys()) == first
    if first:
        assert torch.equal(below["td_error"], expected[batch["obs"]])
