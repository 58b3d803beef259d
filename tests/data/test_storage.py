"""Storages: the contract for all kinds, forms of rows, indexing and state."""

import itertools
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from raffia import TensorClass, TensorDict, lazy_stack
from raffia.data.check_storage import CHECKS, check_storage, equal, numbers_in, refuses, step
from raffia.data.memmap_storage import MemmapStorage
from raffia.data.row_index import OccupiedRows
from raffia.data.storage import TensorStorage
from raffia.data.torchrl_storages import ListStorage
from raffia.tensordict.memmap import DTYPES

Point = namedtuple("Point", "x y")


class Step(TensorClass):
    obs: torch.Tensor
    reward: torch.Tensor = None


@pytest.fixture(params=["memory", "grows", "list", "disk"])
def make(request, tmp_path):
    count = itertools.count()
    return {
        "memory": TensorStorage,
        "grows": lambda max_size: TensorStorage(),
        "list": ListStorage,
        "disk": lambda max_size: MemmapStorage(max_size, tmp_path / str(next(count))),
    }[request.param]


# Checks of a storage before its first write.
BEFORE_WRITES = ("keeps_structure", "refuses_objects", "hides_empty_rows", "detaches")
LIMITED = ("rings", "hides_empty_rows", "remembers")  # checks of a storage with a max_size


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_on_a_gpu(check):
    check(lambda max_size: TensorStorage(max_size, device="cuda"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(make, check):
    if make(3).max_size is None and check.__name__ in LIMITED:
        make = TensorStorage
    check(make)


def ragged(max_size):
    """A ListStorage whose rows are not one tensor."""
    storage = ListStorage(max_size)
    for width in (1, 2):
        below = TensorDict(obs=torch.zeros(width), done=torch.tensor(True))
        storage.set(0, TensorDict(obs=torch.zeros(2, 3, dtype=torch.int64), next=below))
    storage.erase(0)
    return storage


@pytest.mark.parametrize("check", [one for one in CHECKS if one.__name__ not in BEFORE_WRITES])
def test_contract_of_rows_of_different_shapes(check):
    check(ragged)


class Forgets(TensorStorage):
    """A storage with a defect: it keeps the old values of some entries."""

    def _write(self, rows, leaves, number):
        super()._write(rows, [leaf if i else leaf * 0 for i, leaf in enumerate(leaves)], number)


class Views(TensorStorage):
    """A storage with a defect: it returns views of its memory."""

    def _read(self, index, batch):
        if isinstance(index, torch.Tensor):
            return super()._read(index, batch)
        return [leaf[index] for leaf in self._leaves]


class Counts(TensorStorage):
    """A storage with a defect: it counts a row twice that is written twice."""

    def __len__(self):
        return self.total


@pytest.mark.parametrize("broken", [Forgets, Views, Counts])
def test_the_contract_finds_mistakes(broken):
    with pytest.raises(AssertionError):
        check_storage(broken)
    with pytest.raises(AssertionError, match="expected 1, got 1.0"):
        equal(1.0, 1, "a number")
    with pytest.raises(AssertionError, match="nothing was raised"):
        refuses(ValueError, "", lambda: None)
    with pytest.raises(AssertionError, match="does not contain 'x'"):
        refuses(ZeroDivisionError, "x", lambda: 1 // 0)


# ------------------------------------------------------------------------------------ structures


def of_dtype(dtype):
    if dtype.itemsize > 1 or dtype.is_floating_point:
        return torch.arange(15 * dtype.itemsize, dtype=torch.uint8).view(5, -1).view(dtype)
    return torch.tensor([[1, 0, 1]] * 5, dtype=torch.uint8).view(dtype)


NUMBERS = torch.arange(5)
INNER = TensorDict(b=torch.zeros(5, 3, 2), batch_size=[5, 3, 2], names=["time", None, "two"])
ROWS = {
    "container": step(range(5)),
    "tensorclass": Step(obs=NUMBERS, batch_size=[5]),
    "named tuple": Point(NUMBERS, [(torch.zeros(5, 3), {1: NUMBERS}), NUMBERS > 2]),
    "batch sizes": TensorDict(inner=INNER, batch_size=[5, 3], names=["time", "env"], device="cpu"),
    "an empty one": TensorDict(a=NUMBERS, empty=TensorDict(batch_size=[5]), batch_size=[5]),
    "keys with dots": {"a.b": NUMBERS, "a": {"b": torch.zeros(5, 3, dtype=torch.complex128)}},
    "no elements": (torch.zeros(5, 0, 5), NUMBERS),
    "strided": torch.arange(30).view(2, 3, 5).permute(2, 0, 1),
    **{name: of_dtype(dtype) for name, dtype in DTYPES.items() if name != "complex32"},
}


def rows_of(data, rows):
    """Rows of a pytree, by plain indexing of its leaves."""
    if isinstance(data, torch.Tensor) and data.dtype.itemsize == 1:  # torch indexes not all of them
        return data.view(torch.uint8)[rows].view(data.dtype)
    if isinstance(data, (torch.Tensor, TensorDict, TensorClass)):
        return data[rows]
    if isinstance(data, dict):
        return {key: rows_of(value, rows) for key, value in data.items()}
    parts = [rows_of(part, rows) for part in data]
    return type(data)(*parts) if isinstance(data, Point) else type(data)(parts)


def stored(x):
    return bytes(x.clone(memory_format=torch.contiguous_format).untyped_storage())


def same(found, expected):
    mine, theirs = tree_leaves(found), tree_leaves(expected)
    assert type(found) is type(expected) and len(mine) == len(theirs)
    for x, y in zip(mine, theirs, strict=True):
        if isinstance(y, torch.Tensor):
            assert x.dtype is y.dtype and x.shape == y.shape
            assert stored(x) == stored(y)
    if isinstance(expected, (TensorDict, TensorClass)):
        assert found.batch_size == expected.batch_size and found.device == expected.device
        assert found.keys(True) == expected.keys(True)
    return True


@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_any_structure_are_stored_and_saved(make, tmp_path, kind):
    data, storage, other = ROWS[kind], make(5), make(5)
    storage.extend(data)
    for rows in (slice(None), [4, 0, 2], slice(0, 2), 3):
        assert same(storage.read(rows), rows_of(data, rows))
    storage.set([1, 3, 1], rows_of(data, [0, 2, 4]))  # of a repeated row the last value counts
    storage.set(0, rows_of(data, 1))
    now = rows_of(data, [1, 4, 2, 2, 4])
    assert same(storage.read(slice(None)), now)
    storage.save(tmp_path / "saved")
    other.load(tmp_path / "saved")
    assert other.structure == storage.structure and other.total == 5
    assert same(other.read(slice(None)), now)
    assert other.extend(data).tolist() == [*range(5, 10)]
    if kind == "batch sizes":
        rows, row = storage.read(slice(0, 2)), storage.read(1)
        assert rows.names == [None, "env"] and row.names == ["env"]
        assert row["inner"].names == ["env", "two"]


def test_lazy_stacks_become_dense_and_order_does_not_matter(make):
    storage = make(4)
    storage.extend(lazy_stack([step([7])[0], step([8])[0]]))
    found = storage.read(slice(0, 2))
    assert type(found) is TensorDict and numbers_in(found) == [7, 8]
    storage = make(4)
    ragged = [TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(3))]
    for members, match in [
        ([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(2), b=1)], "'b' is "),
        *([] if storage.mixes_shapes else [(ragged, "cannot be made dense")]),
    ]:
        with pytest.raises(ValueError, match=match):
            storage.extend(lazy_stack(members))
        assert len(storage) == 0 and storage.structure is None
    storage.extend({"a": torch.zeros(1), "b": torch.ones(1)})
    storage.extend(OrderedDict(b=torch.ones(1), a=torch.zeros(1)))
    assert storage.read(1) == {"a": torch.tensor(0.0), "b": torch.tensor(1.0)}


# ---------------------------------------------------------------------------------------- mistakes

TWO = torch.zeros(2)
NEVER = [
    (torch.tensor(3.0), ValueError, r"to store a single item, call storage.add\(item\)"),
    ({"a": TWO, "b": torch.zeros(3)}, ValueError, r"'b' has the shape \[3\]"),
    ({"a": None}, TypeError, "entry 'a' is a NoneType"),
    ({"a": {"b": [1.0]}}, TypeError, r"\('a', 'b', 0\) is a float.*torch.as_tensor"),
    ({(1, 2): TWO}, TypeError, "keys must be strings or integers"),
    ({}, ValueError, "no tensor"),
    (torch.zeros(2, 2).to_sparse(), ValueError, "cannot be stored: torch.sparse_coo"),
    (torch.zeros(2, device="meta"), ValueError, "meta"),
]
NOT_HERE = [
    ((TWO, TWO), TypeError, "is a tuple, but a dict is stored there"),
    ({"a": TWO}, ValueError, "entry 'b' is missing"),
    ({"a": TWO, "c": TWO}, ValueError, "'c' is not stored here"),
    ({"a": TWO, "b": [TWO]}, TypeError, "'b' is a list, but a tensor"),
    ({"a": TWO, "b": TWO.half()}, ValueError, r"\.to\(torch.float32\)"),
    ({"a": TWO, "b": torch.zeros(3)}, ValueError, "does not begin with"),
    ({"a": TWO, "b": torch.zeros(2, device="meta")}, ValueError, "no rows|on meta"),
]
OTHER_SHAPE = ({"a": TWO, "b": torch.zeros(2, 0)}, ValueError, r"float32\[0\], but float32")


def test_rows_of_another_structure_are_refused(make):
    empty, storage = make(3), make(3)
    storage.extend({"a": torch.zeros(1), "b": torch.zeros(1)})
    not_here = NOT_HERE if storage.mixes_shapes else [*NOT_HERE, OTHER_SHAPE]
    for one, cases in ((empty, NEVER), (storage, not_here)):
        for data, error, match in cases:
            with pytest.raises(error, match=match):
                one.extend(data)
    assert storage.total == 1 and empty.structure is None and len(empty) == 0
    assert (empty or None) is empty
    empty.extend(torch.zeros(1))  # and still takes anything


BAD_ROWS = [
    (torch.tensor([True, False]), r"mask.nonzero\(\)"),
    (9, "row 9 is out of range: with max_size=9 the rows are 0 to 8.*its number % 9"),
    ([0, -2], "row -2 is out of range"),
    ([0, 2], r"row\(s\) 2 hold nothing.*2 row\(s\) are occupied"),
    (range(9), "2, 3, 4, 5, 6 and 2 more hold nothing"),
]


def test_invalid_rows_and_sizes_are_refused(tmp_path):
    storage = TensorStorage(9)
    storage.extend(torch.arange(2))
    for rows, match in BAD_ROWS:
        with pytest.raises(IndexError, match=match):
            storage.get(rows)
    for size in (0, -1, 2.0, "3", True):
        for cls in (TensorStorage, lambda n: MemmapStorage(n, tmp_path / "x")):
            with pytest.raises((ValueError, TypeError), match="at least 1|whole number"):
                cls(size)
    assert TensorStorage(np.int64(3)).max_size == 3
    assert not (tmp_path / "x").exists()
    storage = TensorStorage(2**50)
    with pytest.raises(MemoryError, match=r"rows of 8 bytes: 8388608.0 GiB.*MemmapStorage"):
        storage.extend(torch.zeros(1, 2))
    assert storage.structure is None and len(storage) == 0


# ---------------------------------------------------------------------------- forms of row numbers


def test_rows_may_be_indexed_in_many_ways(make):
    storage = make(7)
    storage.extend(torch.arange(7) * 10)
    for rows in ([5, 2], (5, 2), torch.tensor([5, 2], dtype=torch.int32), slice(5, 1, -3)):
        assert storage.read(rows).tolist() == [50, 20]
        assert storage.contains(rows).tolist() == [True, True]
        assert rows in storage
    assert 6 in storage and 7 not in storage and -1 not in storage
    assert storage.read(torch.tensor(3)) == 30
    assert storage.read(slice(-2, None)).tolist() == [50, 60]
    storage.set(slice(1, 7, 2), torch.tensor([1, 3, 5]))
    storage.set(slice(0, 1), torch.tensor([-1]))
    assert storage.read(slice(None)).tolist() == [-1, 1, 20, 3, 40, 5, 60]
    storage.erase(slice(0, 2))
    storage.erase(6)
    assert storage.rows().tolist() == [2, 3, 4, 5]


def test_rows_are_read_into_out(make):
    storage = make(5)
    storage.check(torch.zeros(5, 2).long())
    assert storage.structure is None
    storage.allocate(torch.zeros(5, 2).long())
    assert str(storage.structure) == "data int64[2]" and len(storage) == 0
    with pytest.raises(ValueError, match="int64"):
        storage.check(torch.zeros(2))
    assert storage.empty(3).shape == (3, 2)
    storage.extend(torch.arange(10).view(5, 2))
    out = torch.zeros(2, 3, dtype=torch.int64).T  # of another layout
    storage.read([4, 0, 1], out=out)
    assert out.tolist() == [[8, 9], [0, 1], [2, 3]]
    row = torch.zeros(2, dtype=torch.int64)
    assert storage.read(3, out=row) is row and row.tolist() == [6, 7]


def test_occupied_rows_follow_a_set():
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        occupied, model = OccupiedRows(), set()
        for _ in range(30):
            rows = torch.randint(0, 3000, (20,), generator=generator)
            numbers, kind = rows.tolist(), int(torch.randint(0, 4, (), generator=generator))
            if kind == 0:
                occupied.add(rows)
                model |= {*numbers}
            elif kind == 1:
                occupied.remove(rows)
                model -= {*numbers}
            elif kind == 2:
                occupied.add_range(*sorted(numbers[:2]))
                model |= {*range(*sorted(numbers[:2]))}
            elif len(model) < 1500:
                occupied.remove(occupied.rows())
                model = set()
            assert occupied.rows().tolist() == sorted(model)
            assert len(occupied) == len(model) and occupied.high == max(model, default=-1) + 1
            assert occupied.contains(rows - 5).tolist() == [r - 5 in model for r in numbers]


def test_one_entry_of_rows_is_written_and_read(make):
    storage, key = make(5), ("next", "obs")
    storage.extend(step([1, 2, 3, 4]))
    before, rows = storage.read(slice(None)), torch.tensor([3, 0, 3])
    values = before[key][[0, 1, 2]] + 10
    storage.set_entry(key, rows, values)
    assert torch.equal(storage.entry(key, rows), values[[2, 1, 2]])  # the last one wins
    expected = before.clone()
    expected[key][[0, 3]] = values[1:]
    for wrong in (values[:2], values.double(), values[..., None]):
        with pytest.raises(ValueError, match="has rows float32.*for 3 rows"):
            storage.set_entry(key, rows, wrong)
    with pytest.raises(IndexError, match="hold nothing"):
        storage.set_entry(key, torch.tensor([4]), values[:1])
    with pytest.raises(IndexError, match="nothing is stored yet"):
        make(5).set_entry(("obs",), rows, values)
    assert (storage.read(slice(None)) == expected).all() and storage.total == 4


# --------------------------------------------------------------------------------------- the state


def test_a_state_has_copies_of_the_occupied_rows_only(make, tmp_path):
    storage = make(1000)
    storage.extend(step(range(3)))
    state = storage.state_dict()
    assert {type(state[name]) for name in ("structure", "rows")} == {torch.Tensor}
    assert {type(state[name]) for name in ("max_size", "total")} == {int}
    assert {leaf.shape[0] for leaf in state["leaves"].values()} == {3}
    assert [*state["leaves"]] == ["0.obs", "1.next.obs", "2.next.done"]
    storage.set([0], step([9]))
    assert state["leaves"]["0.obs"][0].unique().tolist() == [0]
    make(5).save(tmp_path / "saved")  # an empty one
    storage = make(5)
    storage.load(tmp_path / "saved")
    assert len(storage) == 0 and storage.structure is None


DAMAGES = [
    (lambda s: s.pop("rows"), "it has no rows"),
    (lambda s: s.update(total=-1), "damaged"),
    (lambda s: s.update(rows=torch.tensor([0, 5])), "its rows are out of range"),
    (lambda s: s.update(rows=torch.tensor([1, 0])), "its rows are out of range"),
    (lambda s: s.update(rows=torch.tensor([0.0, 1.0])), "damaged"),
    (lambda s: s.update(leaves={"a": torch.zeros(2)}), "2 rows of data int64"),
    (lambda s: s.update(leaves={}), "damaged"),
    (lambda s: s.update(structure=torch.zeros(0, dtype=torch.uint8)), "it has rows but no"),
    (lambda s: s.update(max_size=3), "max_size=3, but this one has max_size=5"),
]


def test_a_damaged_state_changes_nothing(tmp_path):
    for i, (change, match) in enumerate(DAMAGES):
        for storage in (TensorStorage(5), MemmapStorage(5, tmp_path / str(i))):
            storage.extend(torch.arange(2))
            state = storage.state_dict()
            change(state)
            with pytest.raises(ValueError, match=match):
                storage.load_state_dict(state)
            assert storage.get(slice(None)).tolist() == [0, 1] and storage.total == 2


def test_types_that_this_process_does_not_know():
    from raffia.tensordict.node import REGISTRY

    pair = namedtuple("Gone", "x y")  # cannot be found by its name

    class Gone(TensorClass):
        x: torch.Tensor

    storage, other = TensorStorage(3), TensorStorage(3)
    storage.extend(pair(torch.zeros(1), torch.ones(1)))
    other.load_state_dict(storage.state_dict())
    found = other.get(0)
    assert type(found).__name__ == "Gone" and found._fields == ("x", "y") and found.y == 1
    other.extend(pair(torch.zeros(1), torch.ones(1)))
    storage = TensorStorage(3)
    storage.extend(Gone(x=torch.zeros(1), batch_size=[1]))
    del REGISTRY[f"{Gone.__module__}.{Gone.__qualname__}"]
    with pytest.raises(ValueError, match="Gone, which is not defined here.*import"):
        other.load_state_dict(storage.state_dict())
