"""HashTable: row numbers by hash and content."""

import copy
import pickle
import random

import pytest
import torch
from torch import tensor

from raffia.data.table import CapacityError, HashTable

LEAST, MOST = -(2**63), 2**63 - 1
GOLDEN = 0x9E3779B97F4A7C15  # the multiplier that gives a hash its home in the compiled table


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def table_of(request):
    """Makes a table that gives rows on this device."""

    def table(words=None):
        return HashTable(words=words, device=request.param)

    return table


def signed(number):
    """The int64 of the same bits as a number modulo 2**64."""
    number %= 2**64
    return number - 2**64 if number > MOST else number


def with_home(slots):
    """Distinct hashes whose homes among 64 slots are these."""
    inverse = pow(GOLDEN, -1, 2**64)
    return [signed(((slot << 58) + low) * inverse) for low, slot in enumerate(slots)]


# --- rows ----------------------------------------------------------------------------------------


def test_rows_are_numbered_in_order_of_first_appearance(table_of):
    table = table_of()
    assert table.insert(tensor([9, 4, 9, 7, 4])).tolist() == [0, 1, 0, 2, 1]
    assert table.insert(tensor([1, 7, 1, 0])).tolist() == [3, 2, 3, 4]
    assert len(table) == table.high == 5
    assert table.hashes.tolist() == [9, 4, 7, 1, 0]
    assert table.live().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("hash", [0, -1, 1, LEAST, MOST])
def test_every_int64_is_a_hash(table_of, hash):
    table = table_of()
    assert table.lookup(tensor([hash])).tolist() == [-1]
    assert table.insert(tensor([hash, 5, hash])).tolist() == [0, 1, 0]
    assert table.lookup(tensor([5, hash, 6])).tolist() == [1, 0, -1]
    table.remove(tensor([0]))
    assert table.lookup(tensor([hash])).tolist() == [-1]


def test_unknown_hashes_get_the_number_that_is_asked_for(table_of):
    table = table_of()
    table.insert(tensor([3]))
    assert table.lookup(tensor([3, 4]), missing=7).tolist() == [0, 7]


def test_an_empty_batch(table_of):
    table = table_of(words=2)
    none, content = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.int64)
    assert table.insert(none, content).shape == table.lookup(none, content).shape == (0,)
    table.remove(none)
    assert len(table) == table.high == 0
    assert table.content.shape == (0, 2)


def test_growth_keeps_every_row(table_of):
    numbers = random.Random(0)
    hashes = [numbers.randrange(LEAST, MOST) for _ in range(5000)]
    batch = [numbers.choice(hashes) for _ in range(9000)]
    row_of = {hash: row for row, hash in enumerate(dict.fromkeys(batch))}
    table = table_of()
    for start in range(0, 9000, 1234):
        part = batch[start : start + 1234]
        assert table.insert(tensor(part)).tolist() == [row_of[hash] for hash in part]
    assert table.lookup(tensor(hashes)).tolist() == [row_of.get(hash, -1) for hash in hashes]
    assert table.hashes.tolist() == list(row_of)


def test_what_comes_in_may_have_any_strides_and_stays_as_it_is(table_of):
    table = table_of(words=2)
    hashes, content = tensor([[5, 0], [6, 0], [5, 0]]), tensor([[1, 3, 1], [2, 4, 2]])
    before = hashes.clone(), content.clone()
    assert table.insert(hashes[:, 0], content.T).tolist() == [0, 1, 0]
    assert table.content.tolist() == [[1, 2], [3, 4]]
    assert torch.equal(hashes, before[0]) and torch.equal(content, before[1])


# --- content -------------------------------------------------------------------------------------


def test_equal_hashes_of_unlike_content_get_rows_of_their_own(table_of):
    table = table_of(words=2)
    hashes = tensor([7, 7, 7, 8])
    content = tensor([[1, 2], [1, 3], [1, 2], [1, 2]])
    assert table.insert(hashes, content).tolist() == [0, 1, 0, 2]
    assert table.lookup(tensor([7, 7, 7]), tensor([[1, 3], [2, 2], [1, 2]])).tolist() == [1, -1, 0]
    assert table.content.tolist() == [[1, 2], [1, 3], [1, 2]]


def test_rows_without_a_word_of_content_are_known_by_their_hash(table_of):
    table = table_of(words=0)
    assert table.insert(tensor([7, 8, 7]), torch.zeros(3, 0, dtype=torch.int64)).tolist() == [
        0,
        1,
        0,
    ]


# --- removal -------------------------------------------------------------------------------------


def test_the_row_freed_last_is_given_out_first(table_of):
    table = table_of()
    table.insert(tensor([10, 11, 12, 13]))
    table.remove(tensor([2, 0]))
    table.remove(tensor([1]))
    assert len(table) == 1 and table.high == 4
    assert table.live().tolist() == [3]
    assert table.hashes.tolist() == [0, 0, 0, 13]
    assert table.insert(tensor([20, 21, 13, 22, 23])).tolist() == [1, 0, 3, 2, 4]


@pytest.mark.parametrize("slots", [[62, 63, 63, 63, 0, 0], [5, 5, 6, 5, 7, 5], [63] * 9])
def test_a_removal_cuts_no_chain_of_equal_homes(table_of, slots):
    hashes = with_home(slots)  # an empty table has 64 slots; the last is followed by the first
    for gone in range(len(slots)):
        table = table_of()
        table.insert(tensor(hashes))
        table.remove(tensor([gone]))
        expected = [-1 if row == gone else row for row in range(len(slots))]
        assert table.lookup(tensor(hashes)).tolist() == expected


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([0, 3], r"row 3 \(rows\[1\]\): it is not live"),
        ([0, -1], r"row -1 \(rows\[1\]\): it is not live"),
        ([2, 1], r"row 1 \(rows\[1\]\): it is not live"),
        ([2, 0, 2], r"row 2 \(rows\[2\]\): it is there twice; nothing was removed"),
    ],
)
def test_only_live_rows_can_be_removed_and_each_once(table_of, rows, why):
    table = table_of()
    table.insert(tensor([5, 6, 7]))
    table.remove(tensor([1]))
    with pytest.raises(ValueError, match=why):
        table.remove(tensor(rows))
    assert table.lookup(tensor([5, 6, 7])).tolist() == [0, -1, 2]
    assert table.insert(tensor([8, 9])).tolist() == [1, 3]


def test_clear_starts_at_zero_again(table_of):
    table = table_of()
    table.insert(torch.arange(100))
    table.remove(tensor([4]))
    table.clear()
    assert len(table) == table.high == 0
    assert table.insert(tensor([50, 4])).tolist() == [0, 1]


# --- max_size, and taking back -------------------------------------------------------------------


def test_too_many_rows_change_nothing(table_of):
    table = table_of()
    table.insert(tensor([5, 6, 7, 8]))
    table.remove(tensor([1, 3]))
    before = table.state()
    with pytest.raises(CapacityError, match="4 new rows do not fit: 2 are here and max_size is 5"):
        table.insert(tensor([1, 5, 2, 1, 3, 4]), max_size=5)
    with pytest.raises(CapacityError, match="raise max_size to 1002, or make room"):
        table.insert(torch.arange(100, 1100), max_size=100)
    assert {name: x.tolist() for name, x in table.state().items()} == {
        name: x.tolist() for name, x in before.items()
    }
    assert table.lookup(tensor([5, 6, 7, 8, 1])).tolist() == [0, -1, 2, -1, -1]
    assert table.insert(tensor([1, 5, 2, 3]), max_size=5).tolist() == [3, 0, 1, 4]


def test_a_full_table_still_finds(table_of):
    table = table_of()
    table.insert(tensor([5, 6]))
    assert table.insert(tensor([6, 5]), max_size=2).tolist() == [1, 0]
    assert table.insert(tensor([6, 5]), max_size=1).tolist() == [1, 0]  # none is new


def test_which_rows_are_new(table_of):
    table = table_of()
    table.insert(tensor([5, 6, 7]))
    table.remove(tensor([1]))
    rows, is_new = table.insert_new(tensor([8, 5, 8, 9, 7]))
    assert rows.tolist() == [1, 0, 1, 3, 2]
    assert is_new.tolist() == [True, False, True, True, False]
    rows, is_new = table.insert_new(tensor([9, 8]))
    assert is_new.tolist() == [False, False]


def test_rollback_is_as_if_nothing_had_been_inserted(table_of):
    table = table_of(words=1)
    table.insert(tensor([5, 6, 7]), tensor([[1], [1], [1]]))
    table.remove(tensor([0, 2]))
    before, mark = table.state(), table.mark()
    table.insert(tensor([8, 6, 6]), tensor([[1], [2], [1]]))
    table.insert(torch.arange(200), torch.arange(200)[:, None])
    table.rollback(mark)
    for name, x in table.state().items():
        assert torch.equal(x, before[name]), name
    assert table.insert(tensor([8, 6, 9]), tensor([[1], [1], [1]])).tolist() == [2, 1, 0]


def test_a_mark_ends_with_what_cannot_be_taken_back(table_of):
    table = table_of()
    early = table.mark()
    rows = table.insert(tensor([5, 6]))
    late = table.mark()
    table.rollback(early)
    with pytest.raises(ValueError, match="cannot go back to this mark"):
        table.rollback(late)
    rows = table.insert(tensor([5, 6]))
    mark = table.mark()
    table.remove(rows[:1])
    table.insert(tensor([7]))
    with pytest.raises(ValueError, match="rows were removed"):
        table.rollback(mark)
    assert table.lookup(tensor([5, 6, 7])).tolist() == [-1, 1, 0]


def test_a_table_that_cannot_grow_stays_as_it_was(monkeypatch):
    table = HashTable()
    table.insert(torch.arange(10))

    def no_memory(self, capacity):
        raise MemoryError

    monkeypatch.setattr(HashTable, "_resize", no_memory)
    with pytest.raises(MemoryError):
        table.insert(torch.arange(5, 100))
    assert len(table) == table.high == 10
    assert table.insert(tensor([50, 3])).tolist() == [10, 3]


# --- state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [None, 2])
def test_a_loaded_table_continues_the_same(table_of, words):
    def given(*hashes):
        content = torch.ones(len(hashes), 2, dtype=torch.int64)
        return (tensor(hashes),) if words is None else (tensor(hashes), content)

    table = table_of(words)
    table.insert(*given(5, 6, 7, 8, 9))
    table.remove(tensor([3, 1]))
    twin = table_of(words)
    twin.insert(*given(40, 41))
    twin.load_state(table.state())
    for one in (table, twin, copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert one.live().tolist() == [0, 2, 4]
        assert one.insert(*given(7, 20, 21, 22, 6)).tolist() == [2, 1, 3, 5, 6]
        assert one.device == table.device


def test_a_state_is_a_copy(table_of):
    table = table_of()
    table.insert(tensor([5, 6]))
    state = table.state()
    state["hashes"].fill_(0)
    twin = table_of()
    good = table.state()
    twin.load_state(good)
    good["hashes"].fill_(0)
    assert table.lookup(tensor([5, 6])).tolist() == twin.lookup(tensor([5, 6])).tolist() == [0, 1]


EMPTY = tensor([], dtype=torch.int64)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"hashes": tensor([5, 6, 5]), "free": EMPTY}, "row 2 is the same as a row before it"),
        ({"hashes": tensor([5, 6]), "free": tensor([2])}, r"lie in range\(2\), got \[2\]"),
        ({"hashes": tensor([5, 6]), "free": tensor([-1])}, r"lie in range\(2\), got \[-1\]"),
        ({"hashes": tensor([5, 6]), "free": tensor([1, 1])}, r"are distinct .* got \[1, 1\]"),
        ({"hashes": tensor([5, 6])}, r"has the entries \['free', 'hashes'\], got \['hashes'\]"),
        ({"hashes": EMPTY, "free": EMPTY, "content": EMPTY[:, None]}, "words=None"),
        ({"hashes": tensor([5.0]), "free": EMPTY}, "hashes .* int64 with 1 dim.* got torch.float"),
        ({"hashes": tensor(5), "free": EMPTY}, r"got torch.int64 of shape \[\]"),
    ],
)
def test_what_is_no_state_is_refused(table_of, state, why):
    table = table_of()
    table.insert(tensor([8, 9]))
    with pytest.raises(ValueError, match=why):
        table.load_state(state)
    assert table.insert(tensor([9, 7])).tolist() == [1, 2]


def test_content_of_another_table_is_refused(table_of):
    table, other = table_of(words=2), table_of(words=1)
    other.insert(tensor([7]), tensor([[3]]))
    with pytest.raises(ValueError, match=r"1 rows of 2 words has the shape \[1, 2\], got \[1, 1\]"):
        table.load_state(other.state())
    state = {"hashes": tensor([7, 7]), "free": EMPTY, "content": tensor([[3], [3]])}
    with pytest.raises(ValueError, match="row 1 is the same"):
        other.load_state(state)
    state["content"] = tensor([[3], [4]])
    other.load_state(state)
    assert other.lookup(tensor([7]), tensor([[4]])).tolist() == [1]


def test_free_rows_of_a_state_may_look_the_same(table_of):
    table = table_of()
    table.load_state({"hashes": tensor([0, 0, 0]), "free": tensor([2, 0])})
    assert table.insert(tensor([0, 1, 2, 3])).tolist() == [1, 0, 2, 3]


@pytest.mark.gpu
def test_rows_lie_on_the_device_of_the_table():
    table = HashTable(device="cuda")
    assert table.insert(tensor([5, 6])).device.type == "cuda"
    assert table.lookup(tensor([6], device="cuda")).tolist() == [1]


# --- mistakes ------------------------------------------------------------------------------------


def test_wrong_input_is_named(table_of):
    plain, compares = table_of(), table_of(words=2)
    with pytest.raises(ValueError, match=r"int64 of shape \[N\], got torch.float32 of shape \[2\]"):
        plain.lookup(torch.ones(2))
    with pytest.raises(ValueError, match=r"of shape \[1, 2\]: pass hashes.flatten\(\)"):
        plain.insert(tensor([[1, 2]]))
    with pytest.raises(ValueError, match=r"make it as HashTable\(words=3\)"):
        plain.insert(tensor([1]), tensor([[1, 2, 3]]))
    with pytest.raises(ValueError, match=r"pass content, int64 of shape \[1, 2\]"):
        compares.insert(tensor([1]))
    with pytest.raises(ValueError, match=r"of shape \[1, 2\] .* got torch.int64 of shape \[1, 3\]"):
        compares.insert(tensor([1]), tensor([[1, 2, 3]]))
    with pytest.raises(ValueError, match=r"rows are int64 of shape \[N\], got torch.int32"):
        plain.remove(tensor([1], dtype=torch.int32))
    with pytest.raises(ValueError, match="words=-1"):
        table_of(words=-1)


# --- what it costs -------------------------------------------------------------------------------


def test_a_million_keys_take_42_bytes_each():
    table = HashTable()
    table.insert(torch.arange(10**6) * GOLDEN.bit_length())
    inner = table
    arrays = (inner._slots, inner._hashes, inner._content, inner._free, inner._header)
    assert sum(array.nbytes for array in arrays) <= 42.1 * 10**6


def test_few_distinct_keys_in_a_large_batch_take_little_room():
    table = HashTable()
    table.insert(torch.randint(600, (10**5,), generator=torch.Generator().manual_seed(0)))
    assert len(table) == 600
    assert len(table._slots) == 2048


def test_a_table_with_many_removals_does_not_grow():
    table = HashTable()
    for start in range(0, 20000, 20):
        rows = table.insert(torch.arange(start, start + 20))
        table.remove(rows)
    assert table.high == 20
    assert len(table._slots) == 64
    assert not table._slots[:, 1].any()  # a row in no slot


def test_rows_seen_as_a_tensor_may_be_shared_with_other_processes():
    table = HashTable()
    table.insert(tensor([5, 6]))
    table.hashes.share_memory_()  # moves what the tensor holds; the table keeps its own
    assert table.insert(tensor([6, 7])).tolist() == [1, 2]
    assert table.hashes.tolist() == [5, 6, 7]
