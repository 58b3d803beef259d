"""Storages: the contract for both, and what `TensorStorage` does beyond it."""

import itertools
from collections import OrderedDict, namedtuple

import pytest
import torch

from raffia import TensorClass, TensorDict, lazy_stack
from raffia.data.check_storage import CHECKS, check_storage, equal, numbers_in, refuses, step
from raffia.data.memmap_storage import MemmapStorage
from raffia.data.occupied_rows import OccupiedRows
from raffia.data.storage import TensorStorage
from raffia.tensordict.memmap import DTYPES, DamagedFileError

Point = namedtuple("Point", "x y")


class Step(TensorClass):
    obs: torch.Tensor
    reward: torch.Tensor = None


@pytest.fixture(params=["memory", "grows", "disk"])
def make(request, tmp_path):
    count = itertools.count()
    return {
        "memory": TensorStorage,
        "grows": lambda max_size: TensorStorage(),
        "disk": lambda max_size: MemmapStorage(max_size, tmp_path / str(next(count))),
    }[request.param]


LIMITED = ("rings", "hides_empty_rows", "remembers")  # what is said of a storage with a max_size


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_on_a_gpu(check):
    check(lambda max_size: TensorStorage(max_size, device="cuda"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(make, check):
    if make(3).max_size is None and check.__name__ in LIMITED:
        make = TensorStorage
    check(make)


class Forgets(TensorStorage):
    """A storage with a mistake: it keeps of several entries the old ones."""

    def _write(self, rows, leaves, number):
        super()._write(rows, [leaf if i else leaf * 0 for i, leaf in enumerate(leaves)], number)


class Views(TensorStorage):
    """A storage with a mistake: what it gives is its own memory."""

    def _read(self, index, batch):
        if isinstance(index, torch.Tensor):
            return super()._read(index, batch)
        return [leaf[index] for leaf in self._leaves]


class Counts(TensorStorage):
    """A storage with a mistake: it counts a row that is written twice twice."""

    def __len__(self):
        return self.total


@pytest.mark.parametrize("broken", [Forgets, Views, Counts])
def test_the_contract_finds_mistakes(broken):
    with pytest.raises(AssertionError):
        check_storage(broken)


def test_the_claims_of_the_contract_can_fail():
    with pytest.raises(AssertionError, match="1.0 was found, 1 expected"):
        equal(1.0, 1, "a number")
    with pytest.raises(AssertionError, match="nothing raised"):
        refuses(ValueError, "", lambda: None)
    with pytest.raises(AssertionError, match="does not contain 'x'"):
        refuses(ZeroDivisionError, "x", lambda: 1 // 0)


# ------------------------------------------------------------------------------------ structures


def round_trip(make, data):
    storage = make(4)
    storage.extend(data)
    return storage.get(slice(0, 2)), storage.get(1)


def test_tensorclass(make):
    rows, row = round_trip(make, Step(obs=torch.arange(6.0).view(2, 3), batch_size=[2]))
    assert type(rows) is Step and rows.batch_size == (2,) and row.batch_size == ()
    assert rows.reward is None and row.obs.tolist() == [3.0, 4.0, 5.0]


def test_named_tuple_and_nested_sequences(make):
    data = Point(torch.arange(2), [(torch.zeros(2, 3), {1: torch.ones(2)}), torch.arange(2) > 0])
    rows, row = round_trip(make, data)
    assert type(rows) is Point and type(rows.y) is list and type(rows.y[0]) is tuple
    assert row.x == 1 and row.y[0][1][1] == 1.0 and bool(row.y[1]) and row.y[0][0].shape == (3,)


def test_lazy_stack_becomes_dense(make):
    stack = lazy_stack([step([7])[0], step([8])[0]])
    rows, _ = round_trip(make, stack)
    assert type(rows) is TensorDict and numbers_in(rows) == [7, 8]


@pytest.mark.parametrize(
    "members, words",
    [
        ([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(3))], "can't be made dense"),
        ([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(2), b=1)], "'b' is in some"),
    ],
)
def test_lazy_stack_of_unlike_members_is_refused(make, members, words):
    storage = make(3)
    with pytest.raises(ValueError, match=words):
        storage.extend(lazy_stack(members))
    assert len(storage) == 0 and storage.structure is None


def test_batch_sizes_names_and_device(make):
    inner = TensorDict(b=torch.zeros(2, 3, 5), batch_size=[2, 3, 5], names=["time", None, "five"])
    data = TensorDict(inner=inner, batch_size=[2, 3], names=["time", "env"], device="cpu")
    rows, row = round_trip(make, data)
    assert rows.batch_size == (2, 3) and rows["inner"].batch_size == (2, 3, 5)
    assert rows.names == [None, "env"] and row.names == ["env"]
    assert rows.device == torch.device("cpu")
    assert row.batch_size == (3,) and row["inner"].names == ["env", "five"]


def test_empty_containers_below_are_kept(make):
    data = TensorDict(a=torch.zeros(2), empty=TensorDict(batch_size=[2]), batch_size=[2])
    rows, _ = round_trip(make, data)
    assert list(rows.keys()) == ["a", "empty"] and rows["empty"].batch_size == (2,)


def test_order_of_entries_does_not_matter(make):
    storage = make(3)
    storage.extend({"a": torch.zeros(1), "b": torch.ones(1)})
    storage.extend(OrderedDict(b=torch.ones(1), a=torch.zeros(1)))
    assert storage.get(1) == {"a": torch.tensor(0.0), "b": torch.tensor(1.0)}


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "complex32"])
def test_dtypes(make, name):
    dtype = DTYPES[name]
    if dtype.itemsize > 1 or dtype.is_floating_point:
        raw = torch.arange(5 * 3 * dtype.itemsize, dtype=torch.uint8).view(5, -1)
    else:
        raw = torch.tensor([[1, 0, 1]] * 5, dtype=torch.uint8)
    data = raw.view(dtype)
    storage = make(5)
    storage.set([4, 0, 2], data[:3])
    storage.set(1, data[3])
    found = storage.get([0, 1, 2, 4])
    assert found.dtype is dtype
    assert torch.equal(found.view(torch.uint8), raw[[1, 3, 2, 0]])


def test_rows_without_elements(make):
    storage = make(3)
    storage.extend((torch.zeros(2, 0, 5), torch.arange(2)))
    storage.set([1], (torch.zeros(1, 0, 5), torch.tensor([9])))
    empty, numbers = storage.get([1, 0])
    assert empty.shape == (2, 0, 5) and numbers.tolist() == [9, 0]


def test_any_strides(make):
    storage = make(5)
    data = torch.arange(30).view(2, 3, 5).permute(2, 0, 1)
    storage.extend(data)
    storage.set([3, 1], data.flip(0)[:2])
    expected = data.clone()
    expected[[3, 1]] = data.flip(0)[:2]
    assert torch.equal(storage.get(slice(None)), expected)


def test_out_of_another_layout(make):
    storage = make(5)
    storage.extend(torch.arange(10).view(5, 2))
    out = torch.zeros(2, 3, dtype=torch.int64).T
    storage.get([4, 0, 1], out=out)
    assert out.tolist() == [[8, 9], [0, 1], [2, 3]]
    row = torch.zeros(2, dtype=torch.int64)
    assert storage.get(3, out=row) is row and row.tolist() == [6, 7]


# ---------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "data, error, words",
    [
        (torch.tensor(3.0), ValueError, r"add\(item\) takes a single item"),
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, ValueError, r"'b' has the shape \[3\]"),
        ({"a": torch.zeros(2), "b": torch.tensor(0)}, ValueError, "'b' has the shape .* no dimens"),
        ({"a": None}, TypeError, "entry 'a' is a NoneType"),
        ({"a": {"b": [1.0]}}, TypeError, r"\('a', 'b', 0\) is a float.*torch.as_tensor"),
        ({(1, 2): torch.zeros(2)}, TypeError, "keys are strings or integers"),
        ({}, ValueError, "no tensor"),
        (torch.zeros(2, 2).to_sparse(), ValueError, "can't be stored: torch.sparse_coo"),
        (torch.zeros(2, device="meta"), ValueError, "meta"),
    ],
)
def test_what_cannot_be_stored(make, data, error, words):
    storage = make(3)
    with pytest.raises(error, match=words):
        storage.extend(data)
    assert storage.structure is None and len(storage) == 0
    storage.extend(torch.zeros(1))  # and still takes anything


@pytest.mark.parametrize(
    "data, error, words",
    [
        ((torch.zeros(2), torch.zeros(2)), TypeError, "is a tuple, where a dict is stored"),
        ({"a": torch.zeros(2)}, ValueError, "entry 'b' is missing"),
        ({"a": torch.zeros(2), "c": torch.zeros(2)}, ValueError, "'c' is not stored here"),
        ({"a": torch.zeros(2), "b": [torch.zeros(2)]}, TypeError, "'b' is a list, where a tensor"),
        ({"a": torch.zeros(2), "b": torch.zeros(2).half()}, ValueError, r"\.to\(torch.float32\)"),
        ({"a": torch.zeros(2), "b": torch.zeros(2, 0)}, ValueError, r"float32\[0\], and float32"),
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, ValueError, "does not begin with"),
        ({"a": torch.zeros(2), "b": torch.zeros(2, device="meta")}, ValueError, "no rows"),
    ],
)
def test_what_does_not_fit(make, data, error, words):
    storage = make(3)
    storage.extend({"a": torch.zeros(1), "b": torch.zeros(1)})
    with pytest.raises(error, match=words):
        storage.extend(data)
    assert storage.total == 1


@pytest.mark.parametrize(
    "rows, words",
    [
        (torch.tensor([True, False]), r"mask.nonzero\(\)"),
        (torch.tensor([0.0]), "rows are integers"),
        (3, "row 3 is out of range: with max_size=3 the rows are 0 to 2.*its number % 3"),
        ([0, -2], "row -2 is out of range"),
        ([0, 2], r"row\(s\) 2 hold nothing.*2 row\(s\) hold something"),
    ],
)
def test_rows_that_are_none(rows, words):
    storage = TensorStorage(3)
    storage.extend(torch.arange(2))
    with pytest.raises(IndexError, match=words):
        storage.get(rows)


def test_many_rows_that_hold_nothing_are_not_all_listed():
    storage = TensorStorage(9)
    storage.extend(torch.arange(1))
    with pytest.raises(IndexError, match="1, 2, 3, 4, 5 and 3 more hold nothing"):
        storage.get(range(9))


@pytest.mark.parametrize("size", [0, -1, 2.0, "3"])
def test_max_size_is_a_number_of_rows(size, tmp_path):
    for cls in (TensorStorage, lambda n: MemmapStorage(n, tmp_path / "x")):
        with pytest.raises(ValueError, match="at least 1"):
            cls(size)
    assert not (tmp_path / "x").exists()


def test_no_memory_is_said_with_the_size():
    storage = TensorStorage(2**50)
    with pytest.raises(MemoryError, match=r"rows of 8 bytes: 8388608.0 GiB.*MemmapStorage"):
        storage.extend(torch.zeros(1, 2))
    assert storage.structure is None and len(storage) == 0


# ------------------------------------------------------------------------- rows: ways to name them


def test_an_empty_storage_is_true(make):
    storage = make(5)
    assert (storage or None) is storage and len(storage) == 0


def test_rows_may_be_given_in_many_ways(make):
    storage = make(7)
    storage.extend(torch.arange(7) * 10)
    for rows in ([5, 2], (5, 2), torch.tensor([5, 2], dtype=torch.int32), slice(5, 1, -3)):
        assert storage.get(rows).tolist() == [50, 20]
        assert storage.contains(rows).tolist() == [True, True]
    assert storage.get(torch.tensor(3)) == 30
    assert storage.get(slice(-2, None)).tolist() == [50, 60]
    assert storage.get(slice(0, 99)).tolist() == [*range(0, 70, 10)]
    storage.set(slice(1, 7, 2), torch.tensor([1, 3, 5]))
    storage.set(slice(0, 1), torch.tensor([-1]))
    assert storage.get(slice(None)).tolist() == [-1, 1, 20, 3, 40, 5, 60]
    storage.erase(slice(0, 2))
    storage.erase(6)
    assert storage.rows().tolist() == [2, 3, 4, 5]


def test_of_a_row_given_twice_the_last_is_kept(make):
    storage = make(3)
    storage.set([1, 0, 1, 1], step([1, 2, 3, 4]))
    assert numbers_in(storage.get([0, 1])) == [2, 4] and len(storage) == 2
    storage.set([1, 0, 1, 0], step([5, 6, 7, 8]))
    assert numbers_in(storage.get([0, 1])) == [8, 7]


def test_growing():
    storage = TensorStorage()
    for n in range(100):
        assert storage.add(torch.tensor([n, -n])) == n
    assert storage.get([0, 17, 99]).tolist() == [[0, 0], [17, -17], [99, -99]]
    storage.set([5000, 3], torch.tensor([[1, 1], [2, 2]]))
    assert storage.get([99, 5000, 3]).tolist() == [[99, -99], [1, 1], [2, 2]]
    assert len(storage) == 101
    with pytest.raises(IndexError, match="hold nothing"):
        storage.get(4999)


def test_check_and_allocate_write_nothing(make):
    storage = make(4)
    storage.check(torch.zeros(2, 3))
    assert storage.structure is None
    storage.allocate(torch.zeros(2, 3))
    assert str(storage.structure) == "data float32[3]" and len(storage) == 0
    with pytest.raises(ValueError, match="float32"):
        storage.check(torch.zeros(2))
    assert storage.empty(5).shape == (5, 3)


def test_held_follows_a_set():
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        held, model = OccupiedRows(), set()
        for _ in range(30):
            rows = torch.randint(0, 3000, (20,), generator=generator)
            kind = int(torch.randint(0, 4, (), generator=generator))
            if kind == 0:
                held.add(rows)
                model |= {*rows.tolist()}
            elif kind == 1:
                held.remove(rows)
                model -= {*rows.tolist()}
            elif kind == 2:
                start, stop = sorted(rows[:2].tolist())
                held.add_range(start, stop)
                model |= {*range(start, stop)}
            elif len(model) < 1500:
                held.remove(held.rows())
                model = set()
            assert held.rows().tolist() == sorted(model)
            assert len(held) == len(model) and held.high == max(model, default=-1) + 1
            assert held.contains(rows - 5).tolist() == [r - 5 in model for r in rows.tolist()]


# --------------------------------------------------------------------------------------- the state


def test_state_is_tensors_and_integers_of_held_rows_only(make):
    storage = make(1000)
    storage.extend(step(range(3)))
    state = storage.state_dict()
    assert {type(state[name]) for name in ("structure", "rows")} == {torch.Tensor}
    assert {type(state[name]) for name in ("max_size", "total")} == {int}
    assert {leaf.shape[0] for leaf in state["leaves"].values()} == {3}
    assert [*state["leaves"]] == ["0.obs", "1.next.obs", "2.next.done"]


def test_state_is_a_copy():
    storage = TensorStorage(3)
    storage.extend(torch.arange(3))
    state = storage.state_dict()
    storage.set([0], torch.tensor([9]))
    assert state["leaves"]["0.data"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda s: s.pop("rows"), "it has no rows"),
        (lambda s: s.update(total=-1), "damaged"),
        (lambda s: s.update(rows=torch.tensor([0, 5])), "no rows of such"),
        (lambda s: s.update(rows=torch.tensor([1, 0])), "no rows of such"),
        (lambda s: s.update(rows=torch.tensor([0.0, 1.0])), "damaged"),
        (lambda s: s.update(leaves={"a": torch.zeros(2)}), "2 rows of data int64"),
        (lambda s: s.update(leaves={}), "damaged"),
        (lambda s: s.update(structure=torch.zeros(0, dtype=torch.uint8)), "and no structure"),
        (lambda s: s.update(max_size=3), "max_size=3, this one has max_size=5"),
    ],
)
def test_a_damaged_state_changes_nothing(tmp_path, change, words):
    for storage in (TensorStorage(5), MemmapStorage(5, tmp_path / "a")):
        storage.extend(torch.arange(2))
        state = storage.state_dict()
        change(state)
        with pytest.raises(ValueError, match=words):
            storage.load_state_dict(state)
        assert storage.get(slice(None)).tolist() == [0, 1] and storage.total == 2


def test_an_empty_storage_is_saved_and_loaded(make, tmp_path):
    make(5).save(tmp_path / "saved")
    storage = make(5)
    storage.load(tmp_path / "saved")
    assert len(storage) == 0 and storage.structure is None


@pytest.mark.parametrize(
    "data",
    [
        step(range(5)),
        Step(obs=torch.arange(5), batch_size=[5]),
        Point(torch.arange(5), [torch.zeros(5, 2), (torch.ones(5),)]),
        torch.arange(5).to(torch.float8_e4m3fn),
        {"a.b": torch.arange(5), "a": {"b": torch.zeros(5, 3, dtype=torch.complex128)}},
    ],
    ids=lambda data: type(data).__name__,
)
def test_saved_and_loaded(make, tmp_path, data):
    storage, other = make(3), make(3)
    storage.extend(data)
    storage.save(tmp_path / "saved")
    other.load(tmp_path / "saved")
    assert other.structure == storage.structure and other.total == 5
    mine, theirs = storage.state_dict()["leaves"], other.state_dict()["leaves"]
    for name in mine:
        assert torch.equal(mine[name].view(torch.uint8), theirs[name].view(torch.uint8))
    assert type(other.get(0)) is type(storage.get(0))
    assert other.extend(data).tolist() == [*range(5, 10)]


def test_saved_in_memory_and_loaded_on_disk(tmp_path):
    storage, other = TensorStorage(4), MemmapStorage(4, tmp_path / "a")
    storage.extend(step(range(6)))
    storage.save(tmp_path / "saved")
    other.load(tmp_path / "saved")
    other.close()
    other = MemmapStorage.open(tmp_path / "a")
    assert other.total == 6 and numbers_in(other.get([2, 3, 0, 1])) == [2, 3, 4, 5]


def test_a_damaged_save_is_found(tmp_path):
    storage = TensorStorage(4)
    storage.extend(step(range(3)))
    storage.save(tmp_path)
    [file] = tmp_path.glob("storage*")
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedFileError, match="not what was saved"):
        storage.load(tmp_path)
    assert len(storage) == 3


def test_named_tuple_that_this_process_does_not_know():
    gone = namedtuple("Gone", "x y")  # not to be found by its name
    storage, other = TensorStorage(3), TensorStorage(3)
    storage.extend(gone(torch.zeros(1), torch.ones(1)))
    other.load_state_dict(storage.state_dict())
    found = other.get(0)
    assert type(found).__name__ == "Gone" and found._fields == ("x", "y") and found.y == 1
    other.extend(gone(torch.zeros(1), torch.ones(1)))


def test_tensorclass_that_this_process_does_not_know():
    from raffia.tensordict.node import REGISTRY

    class Gone(TensorClass):
        x: torch.Tensor

    storage, other = TensorStorage(3), TensorStorage(3)
    storage.extend(Gone(x=torch.zeros(1), batch_size=[1]))
    del REGISTRY[f"{Gone.__module__}.{Gone.__qualname__}"]
    with pytest.raises(ValueError, match="Gone, which is not defined here.*import"):
        other.load_state_dict(storage.state_dict())


def test_one_entry_of_rows_is_written_and_read(make):
    storage = make(5)
    storage.extend(step([1, 2, 3, 4]))
    before = storage.get(slice(None))
    rows = torch.tensor([3, 0, 3])
    values = before["next", "obs"][[0, 1, 2]] + 10
    storage.set_entry(("next", "obs"), rows, values)
    assert torch.equal(storage.entry(("next", "obs"), rows), values[[2, 1, 2]])  # the last one wins
    after = storage.get(slice(None))
    assert torch.equal(after["next", "obs"][1:3], before["next", "obs"][1:3])
    assert torch.equal(after["obs"], before["obs"]) and storage.total == 4
    for wrong in (values[:2], values.double(), values[..., None]):
        with pytest.raises(ValueError, match="has rows float32.*for 3 rows"):
            storage.set_entry(("next", "obs"), rows, wrong)
    with pytest.raises(IndexError, match="hold nothing"):
        storage.set_entry(("next", "obs"), torch.tensor([4]), values[:1])
    with pytest.raises(IndexError, match="nothing is stored yet"):
        make(5).set_entry(("obs",), rows, values)
    assert torch.equal(storage.get(slice(None))["next", "obs"], after["next", "obs"])
