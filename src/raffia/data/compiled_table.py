"""`CompiledTable`: the table behind `HashTable` on the CPU, open addressing in compiled loops."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_HIGH, _NUM_FREE = 8, 9  # where they stand in the header, counted in numbers as numpy does
SMALLEST = 32  # rows a table has room for at first: with their slots 1.3 KB

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@functools.cache
def kernels() -> ModuleType:
    """The compiled loops, imported at first use, and numba with them."""
    from raffia.data.kernels import table

    return table


class CompiledTable:
    """Rows by hash and content: linear probing, at most every second slot used, grows by doubling.

    Arguments and results of the methods are documented at `HashTable`, which checks what comes in.
    Hashes that were chosen to collide in one slot make it slow, by as many steps as there are such.
    All arrays are numpy's own: a tensor over one of them may be moved to shared memory by whoever
    sends it to another process, the array stays at its address.

    words: int64 numbers of content in each row, 0 for none.

    >>> table = CompiledTable(0)
    >>> table.insert(torch.tensor([7, -1, 7]), None)
    tensor([0, 1, 0])
    """

    device = torch.device("cpu")

    def __init__(self, words: int) -> None:
        self.words = words
        self.clear()

    def clear(self) -> None:
        """Forget all rows and give their memory back."""
        loops = kernels()
        self._header: Numbers = np.zeros(loops.HEADER_LENGTH, np.int64)
        self._address = _address(self._header)
        self._lookup, self._insert = loops.lookup, loops.insert
        self._free: Numbers = np.zeros(0, np.int64)
        self._hashes: Numbers = np.zeros(0, np.int64)
        self._content: Numbers = np.zeros((0, self.words), np.int64)
        self._resize(SMALLEST)

    def _set(self, offset: int, number: int) -> None:
        self._header[offset // 8] = number

    def _resize(self, capacity: int) -> None:
        """Make room for `capacity` rows, a power of two; slots are left empty."""
        loops, high = kernels(), self.high
        slots: Numbers = np.zeros((2 * capacity, 2), np.int64)
        hashes = _grown(self._hashes, capacity, high)
        content = _grown(self._content, capacity, high)
        self._slots, self._hashes, self._content = slots, hashes, content  # all or none
        self._set(loops.SLOTS, _address(slots))
        self._set(loops.SHIFT, 64 - (2 * capacity - 1).bit_length())
        self._set(loops.MASK, 32 * capacity - 1)
        self._set(loops.HASHES, _address(hashes))
        self._set(loops.CONTENT, _address(content))
        self._set(loops.WORDS, self.words)
        self._set(loops.CAPACITY, capacity)

    def _grow(self, capacity: int) -> None:
        old = self._slots
        self._resize(capacity)
        kernels().move_slots(self._address, _address(old), len(old))

    @property
    def high(self) -> int:
        return int(self._header[_HIGH])

    @property
    def num_free(self) -> int:
        return int(self._header[_NUM_FREE])

    @property
    def num_live(self) -> int:
        return self.high - self.num_free

    @property
    def hashes(self) -> Tensor:
        return torch.from_numpy(self._hashes[: self.high])

    @property
    def content(self) -> Tensor:
        return torch.from_numpy(self._content[: self.high])

    @property
    def free(self) -> Tensor:
        return torch.from_numpy(self._free[: self.num_free])

    def lookup(self, hashes: Tensor, content: Tensor | None, missing: int) -> Tensor:
        rows = torch.empty_like(hashes)
        given = 0 if content is None else content.data_ptr()
        n = len(hashes)
        self._lookup(self._address, n, hashes.data_ptr(), given, missing, rows.data_ptr())
        return rows

    def insert(self, hashes: Tensor, content: Tensor | None) -> Tensor:
        rows = torch.empty_like(hashes)
        given = 0 if content is None else content.data_ptr()
        n, before, mark = len(hashes), self.num_live, (self.high, self.num_free)
        done = self._insert(self._address, 0, n, hashes.data_ptr(), given, rows.data_ptr())
        while done < n:
            new = self.num_live - before
            try:
                self._grow(_next_capacity(len(self._hashes), done, new, n))
            except MemoryError:
                self.rollback(*mark)
                raise
            done = self._insert(self._address, done, n, hashes.data_ptr(), given, rows.data_ptr())
        return rows

    def taken(self, high: int, num_free: int) -> Tensor:
        """The rows taken since `high` and `num_free` were these, in no special order."""
        reused = torch.from_numpy(self._free[self.num_free : num_free].copy())
        return torch.cat([reused, torch.arange(high, self.high, device="cpu")])

    def rollback(self, high: int, num_free: int) -> None:
        """Take back all that was inserted since `high` and `num_free` were these."""
        loops = kernels()
        rows = self.taken(high, num_free)
        loops.remove(self._address, len(rows), rows.data_ptr(), 1)
        self._set(loops.HIGH, high)
        self._set(loops.NUM_FREE, num_free)  # taking a row from the stack leaves it written there

    def remove(self, rows: Tensor) -> int:
        """Remove rows; the result is their number, or the index of a wrong one and nothing done."""
        loops = kernels()
        n, num_free = len(rows), self.num_free
        marked = int(loops.mark(self._address, n, rows.data_ptr()))
        if marked < n:
            return marked
        if len(self._free) < num_free + n:
            self._free = _grown(self._free, max(num_free + n, 2 * num_free), num_free)
            self._set(loops.FREE, _address(self._free))
        loops.remove(self._address, n, rows.data_ptr(), -1)
        self._free[num_free : num_free + n] = rows.numpy()
        self._set(loops.NUM_FREE, num_free + n)
        return n

    def load(self, hashes: Tensor, content: Tensor, free: Tensor) -> int:
        """Fill an empty table; the result is a row that is the same as one before it, or -1."""
        loops = kernels()
        high, num_free = len(hashes), len(free)
        self._resize(max(SMALLEST, 1 << (high - 1).bit_length()))
        self._hashes[:high], self._content[:high] = hashes.numpy(), content.numpy()
        self._free = free.numpy().copy()
        self._set(loops.FREE, _address(self._free))
        self._set(loops.HIGH, high)
        self._set(loops.NUM_FREE, num_free)
        dead: Numbers = np.zeros(high, np.int64)
        dead[self._free] = 1
        return int(loops.fill(self._address, high, _address(dead)))


def _address(array: Numbers) -> int:
    return int(array.__array_interface__["data"][0])


def _grown(array: Numbers, length: int, used: int) -> Numbers:
    """An array of `length` rows that starts with the first `used` ones of another."""
    grown: Numbers = np.zeros((length, *array.shape[1:]), np.int64)
    grown[:used] = array[:used]
    return grown


def _next_capacity(capacity: int, done: int, new: int, n: int) -> int:
    """Twice as much; more at once in a batch whose first `done` of n items were nearly all new."""
    wanted = capacity + 1
    if 10 * new > 9 * done:
        wanted = min(16 * capacity, capacity + n - done)
    return 1 << (wanted - 1).bit_length()
