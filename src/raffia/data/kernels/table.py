"""The loops of `HashTable`: find, insert, move and remove rows by hash and content.

A slot is two int64 side by side, the hash and the row plus one; zero there marks it as empty.
The home of a hash is the top bits of its product with 2^64 / golden ratio (Knuth, The Art of
Computer Programming 3, section 6.4); from there slots are tried one after another.
"""

from typing import Any

import numpy as np

from raffia.jit.kernel import kernel, load_i64, prefetch, store_i64
from raffia.jit.records import I64s, Record, fields_at

HIGH, NUM_FREE = range(2)  # the indices of `counts`
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
AHEAD = 24  # keys between asking for a slot and reading it: memory takes about as long as 24 keys
NEAR = 10  # the same for the content of the row in it, which can be asked for when the slot is here


class TableRecord(Record):
    """The slots and the rows of a table."""

    slots: int  # address
    shift: int  # 64 less the bits of the number of a slot
    mask: int  # bytes of all slots, less one
    hashes: I64s  # [capacity] of each row
    content: int  # address of int64 [capacity, words]
    words: int
    free: I64s  # the free rows, the one that is taken next last
    capacity: int  # rows that there is room for
    counts: I64s  # rows that were ever in use; how many of them are free


table_at = fields_at(TableRecord)


@kernel
def _home(slots: int, hash: int, shift: int) -> Any:
    """The address of the slot where the search for a hash begins."""
    return slots + (np.int64((np.uint64(hash) * GOLDEN) >> np.uint64(shift)) << 4)


@kernel
def _next(slots: int, slot: int, mask: int) -> int:
    """The address of the slot after one; the first after the last. mask: bytes of all, less one."""
    return slots + ((slot + 16 - slots) & mask)


@kernel
def _equal(left: int, right: int, words: int) -> bool:
    for word in range(0, 8 * words, 8):
        if load_i64(left + word) != load_i64(right + word):
            return False
    return True


@kernel
def _search(
    slots: int, shift: int, mask: int, hash: int, stored: int, content: int, words: int
) -> int:
    """The slot of a hash with this content, or the empty slot where it belongs.

    stored: the content of all rows; content: the one that is sought.
    """
    slot = _home(slots, hash, shift)
    while True:
        number = load_i64(slot + 8)
        if number == 0:
            return slot
        if load_i64(slot) == hash:
            if words == 0 or _equal(stored + 8 * words * (number - 1), content, words):
                return slot
        slot = _next(slots, slot, mask)


@kernel
def _prefetch_keys(
    slots: int, shift: int, stored: int, words: int, hashes: int, i: int, n: int
) -> None:
    """Prefetch the memory that the next keys will need."""
    prefetch(_home(slots, load_i64(hashes + 8 * min(i + AHEAD, n - 1)), shift))
    if words:
        slot = _home(slots, load_i64(hashes + 8 * min(i + NEAR, n - 1)), shift)
        row = stored + 8 * words * (load_i64(slot + 8) - 1)
        prefetch(row)
        prefetch(row + 8 * words - 1)


@kernel
def lookup(table: int, n: int, hashes: int, content: int, missing: int, out: int) -> None:
    """Look up the row of each of n hashes, or `missing` if it is not in the table."""
    # Fields that loops use are read before them: to the compiler any store may change a record.
    t = table_at(table)
    slots, shift, mask, stored, words = t.slots, t.shift, t.mask, t.content, t.words
    for i in range(n):
        _prefetch_keys(slots, shift, stored, words, hashes, i, n)
        hash, given = load_i64(hashes + 8 * i), content + 8 * words * i
        number = load_i64(_search(slots, shift, mask, hash, stored, given, words) + 8)
        store_i64(out + 8 * i, number - 1 if number else missing)


@kernel
def insert(table: int, start: int, n: int, hashes: int, content: int, out: int) -> int:
    """Find or insert hashes[start:n]; the result is n, or where it stopped for want of room."""
    t = table_at(table)
    slots, shift, mask, stored, words = t.slots, t.shift, t.mask, t.content, t.words
    stored_hashes, free, capacity = t.hashes, t.free, t.capacity
    high, num_free = t.counts[HIGH], t.counts[NUM_FREE]
    i = start
    while i < n:
        _prefetch_keys(slots, shift, stored, words, hashes, i, n)
        hash, given = load_i64(hashes + 8 * i), content + 8 * words * i
        slot = _search(slots, shift, mask, hash, stored, given, words)
        row = load_i64(slot + 8) - 1
        if row < 0:
            if num_free:
                num_free -= 1
                row = free[num_free]
            elif high < capacity:
                row = high
                high += 1
            else:
                break
            store_i64(slot, hash)
            store_i64(slot + 8, row + 1)
            stored_hashes[row] = hash
            for word in range(words):
                store_i64(stored + 8 * (words * row + word), load_i64(given + 8 * word))
        store_i64(out + 8 * i, row)
        i += 1
    t.counts[HIGH], t.counts[NUM_FREE] = high, num_free
    return i


@kernel
def move_slots(table: int, old: int, num_old: int) -> None:
    """Fill empty slots from those at `old`; the order of homes is the same, so it is one sweep."""
    t = table_at(table)
    slots, mask, shift = t.slots, t.mask, t.shift
    for source in range(old, old + 16 * num_old, 16):
        number = load_i64(source + 8)
        if number:
            hash = load_i64(source)
            slot = _home(slots, hash, shift)
            while load_i64(slot + 8):
                slot = _next(slots, slot, mask)
            store_i64(slot, hash)
            store_i64(slot + 8, number)


@kernel
def fill(table: int, n: int, dead: int) -> int:
    """Assign slots to the rows below n that are not dead.

    dead: n numbers, other than 0 where a row is dead.
    Returns a row that is the same as one before it, or -1.
    """
    t = table_at(table)
    slots, shift, mask, stored, words = t.slots, t.shift, t.mask, t.content, t.words
    for row in range(n):
        if load_i64(dead + 8 * row) == 0:
            hash = t.hashes[row]
            slot = _search(slots, shift, mask, hash, stored, stored + 8 * words * row, words)
            if load_i64(slot + 8):
                return row
            store_i64(slot, hash)
            store_i64(slot + 8, row + 1)
    return -1


@kernel
def _slot_holding(t: TableRecord, row: int, number: int) -> int:
    """The slot where `number` stands for a row, or 0."""
    slots, mask = t.slots, t.mask
    if row < 0 or row >= t.counts[HIGH]:
        return 0
    slot = _home(slots, t.hashes[row], t.shift)
    while True:
        found = load_i64(slot + 8)
        if found == number:
            return slot
        if found == 0:
            return 0
        slot = _next(slots, slot, mask)


@kernel
def mark(table: int, n: int, rows: int) -> int:
    """Make the numbers of rows negative in their slots.

    Returns n, or the index of a row that is not live or came before; then nothing is marked.
    """
    t = table_at(table)
    for i in range(n):
        row = load_i64(rows + 8 * i)
        slot = _slot_holding(t, row, row + 1)
        if slot == 0:
            for j in range(i):
                row = load_i64(rows + 8 * j)
                store_i64(_slot_holding(t, row, -row - 1) + 8, row + 1)
            return i
        store_i64(slot + 8, -row - 1)
    return n


@kernel
def remove(table: int, n: int, rows: int, sign: int) -> None:
    """Empty the slots of rows, in which stands `sign * (row + 1)`, and their hash and content."""
    t = table_at(table)
    for i in range(n):
        row = load_i64(rows + 8 * i)
        _close(t, _slot_holding(t, row, sign * (row + 1)))
        t.hashes[row] = 0
        for word in range(8 * t.words * row, 8 * t.words * (row + 1), 8):
            store_i64(t.content + word, 0)


@kernel
def _close(t: TableRecord, hole: int) -> None:
    """Empty a slot and move later entries back where allowed, so that no search meets a gap."""
    slots, mask, shift = t.slots, t.mask, t.shift
    slot = _next(slots, hole, mask)
    while load_i64(slot + 8):
        hash = load_i64(slot)
        if ((slot - _home(slots, hash, shift)) & mask) >= ((slot - hole) & mask):
            store_i64(hole, hash)
            store_i64(hole + 8, load_i64(slot + 8))
            hole = slot
        slot = _next(slots, slot, mask)
    store_i64(hole + 8, 0)
