"""HashTable, row numbers by hash and content, and groups of equal numbers.

Any operations in any order are in test_table_properties.py.
"""

import random

import pytest
import torch
from torch import tensor

from raffia.data.row_index import groups
from raffia.data.table import CapacityError, HashTable

LEAST, MOST = -(2**63), 2**63 - 1
GOLDEN = 0x9E3779B97F4A7C15  # the multiplier that gives a hash its home in the compiled table
INVERSE = pow(GOLDEN, -1, 2**64)
EMPTY = tensor([], dtype=torch.int64)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def table_of(request):
    """Makes a table whose rows are on this device."""

    def table(words=None):
        return HashTable(words=words, device=request.param)

    return table


def signed(number):
    """The int64 of the same bits as a number modulo 2**64."""
    number %= 2**64
    return number - 2**64 if number > MOST else number


def with_home(slots):
    """Distinct hashes whose homes among 64 slots are these."""
    return [signed(((slot << 58) + low) * INVERSE) for low, slot in enumerate(slots)]


def same_state(table, before):
    state = table.state()
    return state.keys() == before.keys() and all(torch.equal(state[n], before[n]) for n in state)


def test_equal_hashes_of_different_content_get_different_rows(table_of):
    table = table_of(words=2)
    hashes, content = tensor([[7, 0], [7, 0], [7, 0], [8, 0]]), tensor([[1, 1, 1, 1], [2, 3, 2, 2]])
    before = hashes.clone(), content.clone()
    assert table.insert(hashes[:, 0], content.T).tolist() == [0, 1, 0, 2]  # of any strides
    assert table.lookup(tensor([7, 7, 7]), tensor([[1, 3], [2, 2], [1, 2]])).tolist() == [1, -1, 0]
    assert table.content.tolist() == [[1, 2], [1, 3], [1, 2]]
    assert torch.equal(hashes, before[0]) and torch.equal(content, before[1])
    nothing = EMPTY.reshape(0, 2)
    assert table.insert(EMPTY, nothing).shape == table.lookup(EMPTY, nothing).shape == (0,)
    wordless = table_of(words=0)  # known by their hash
    assert wordless.insert(tensor([7, 8, 7]), EMPTY.reshape(3, 0)).tolist() == [0, 1, 0]


@pytest.mark.parametrize("slots", [[62, 63, 63, 63, 0, 0], [5, 5, 6, 5, 7, 5], [63] * 9])
def test_a_removal_cuts_no_chain_of_equal_homes(table_of, slots):
    hashes = with_home(slots)  # an empty table has 64 slots; the last is followed by the first
    for removed in range(len(slots)):
        table = table_of()
        table.insert(tensor(hashes))
        table.remove(tensor([removed]))
        expected = [-1 if row == removed else row for row in range(len(slots))]
        assert table.lookup(tensor(hashes)).tolist() == expected


def test_rollback_undoes_insertions(table_of):
    table = table_of(words=1)
    table.insert(tensor([5, 6, 7]), tensor([[1], [1], [1]]))
    table.remove(tensor([0, 2]))
    before, mark = table.state(), table.mark()
    table.insert(tensor([8, 6, 6]), tensor([[1], [2], [1]]))
    table.insert(torch.arange(200), torch.arange(200)[:, None])
    late = table.mark()
    table.rollback(mark)
    assert same_state(table, before)
    with pytest.raises(ValueError, match="cannot be rolled back to this mark"):
        table.rollback(late)
    assert table.insert(tensor([8, 6, 9]), tensor([[1], [1], [1]])).tolist() == [2, 1, 0]
    mark = table.mark()
    table.remove(tensor([0]))
    table.insert(tensor([70]), tensor([[1]]))
    with pytest.raises(ValueError, match="rows were removed"):
        table.rollback(mark)


def test_a_table_that_cannot_grow_is_unchanged(monkeypatch):
    table = HashTable()
    table.insert(torch.arange(10))

    def no_memory(self, capacity):
        raise MemoryError

    monkeypatch.setattr(HashTable, "_resize", no_memory)
    with pytest.raises(MemoryError):
        table.insert(torch.arange(5, 100))
    assert len(table) == table.high == 10 and table.insert(tensor([50, 3])).tolist() == [10, 3]


def state_of(**state):
    return lambda table: table.load_state(state)


def rows_of(*rows):
    return lambda table: table.remove(tensor(rows))


MISTAKES = {  # of a table where row 0 has 5, row 2 has 7, and row 1 is free
    "too large": (rows_of(0, 3), r"row 3 \(rows\[1\]\): it is not in use"),
    "twice": (rows_of(2, 0, 2), r"row 2 \(rows\[2\]\): it is given twice. Nothing was removed"),
    "same": (state_of(hashes=tensor([5, 6, 5]), free=EMPTY), "row 2 is equal to an earlier row"),
    "free 2": (state_of(hashes=tensor([5, 6]), free=tensor([2])), r"in range\(2\); got \[2\]"),
    "free twice": (state_of(hashes=tensor([5]), free=tensor([0, 0])), r"must be distinct .* \[0,"),
    "no free": (state_of(hashes=tensor([5])), r"must have the entries \['free', 'hashes'\]; got"),
    "more": (state_of(hashes=EMPTY, free=EMPTY, content=EMPTY[:, None]), "words=None"),
    "float state": (state_of(hashes=tensor([5.0]), free=EMPTY), "int64 with 1 dim.* torch.float"),
    "capacity": (
        lambda t: t.insert(tensor([1, 5, 2, 1, 3, 4]), max_size=5),
        "4 new rows do not fit: the .* holds 2, and max_size is 5",
    ),
    "room": (lambda t: t.insert(torch.arange(100, 1100), max_size=100), "Raise max_size to 1002,"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_invalid_calls_change_nothing(table_of, kind):
    table = table_of()
    table.insert(tensor([5, 6, 7]))
    table.remove(tensor([1]))
    before, (call, match) = table.state(), MISTAKES[kind]
    with pytest.raises(CapacityError if kind in ("capacity", "room") else ValueError, match=match):
        call(table)
    assert same_state(table, before)
    assert table.insert(tensor([8, 9, 5]), max_size=4).tolist() == [1, 3, 0]
    assert table.insert(tensor([8, 5]), max_size=1).tolist() == [1, 0]  # none is new


def test_kernels_get_no_other_arrays(table_of):
    for words, wrong in [
        (None, lambda t: t.remove(tensor([1]).int())),
        (None, lambda t: t.lookup(torch.ones(2))),
        (None, lambda t: t.insert(tensor([[1, 2]]))),
        (None, lambda t: t.insert(tensor([1]), tensor([[1, 2]]))),
        (2, lambda t: t.insert(tensor([1]))),
        (2, lambda t: t.insert(tensor([1]), tensor([[1, 2, 3]]))),
        (2, lambda t: t.insert(tensor([1]), torch.ones(1, 2))),
    ]:
        table = table_of(words)
        with pytest.raises(AssertionError):
            wrong(table)
        assert not len(table)


def test_memory_use():
    table = HashTable()
    table.insert(torch.arange(10**6) * GOLDEN.bit_length())
    arrays = (table._slots, table._hashes, table._content, table._free)
    assert sum(array.nbytes for array in arrays) <= 42.1 * 10**6  # 42 bytes a key
    table = HashTable()
    table.insert(torch.randint(600, (10**5,), generator=torch.Generator().manual_seed(0)))
    assert len(table) == 600 and len(table._slots) == 2048
    table = HashTable()
    for start in range(0, 20000, 20):  # with many removals it does not grow
        table.remove(table.insert(torch.arange(start, start + 20)))
    assert table.high == 20 and len(table._slots) == 64
    assert not table._slots[:, 1].any()  # a row in no slot
    table.insert(tensor([5, 6]))
    table.hashes.share_memory_()  # moves the tensor's memory; the table keeps its own
    assert table.lookup(tensor([6, 7, 5])).tolist()[1] == -1 and len(table) == 2


# --- groups --------------------------------------------------------------------------------------


def expected_groups(values):
    distinct = list(dict.fromkeys(values))
    first = [values.index(value) for value in distinct]
    last = [len(values) - 1 - values[::-1].index(value) for value in distinct]
    return [distinct, [distinct.index(value) for value in values], first, last]


@pytest.mark.parametrize("device", DEVICES)
def test_groups_equal_plain_lists(device):
    numbers = random.Random(0)
    colliding = with_home([63] * 50)  # numbers of one home are distinguished
    batches = [[*colliding, *colliding[::-1]], [4, -1, MOST, LEAST], [5, 6, 5]]
    for n in (0, 1, 2, 3, 4, 5, 8, 16, 17, 33, 100):
        for most in (1, 5, n + 1, 2**62):
            batches.append([numbers.randrange(-most, most) for _ in range(n)])
    for values in batches:
        input = tensor(values, dtype=torch.int64, device=device)
        for x in (input, torch.stack([input, input], 1)[:, 0]):
            assert [part.tolist() for part in groups(x)] == expected_groups(values)
    if device == "cpu":  # values without repetition are returned
        values = tensor([4, -1, MOST, LEAST])
        assert groups(values).distinct is values
