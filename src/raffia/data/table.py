"""`HashTable`: from a hash, and the content behind it, to the number of a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from raffia.data import kernels

SMALLEST = 32  # rows a table has room for at first: with their slots 1.3 KB

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class CapacityError(ValueError, IndexError):
    """The error raised if the new rows of a batch do not fit; none of them was inserted.

    An IndexError too, as programs for TorchRL expect it.

    >>> HashTable().insert(torch.tensor([7, 8, 9]), max_size=2)
    Traceback (most recent call last):
    ...
    raffia.data.table.CapacityError: 3 new rows do not fit: the table holds 0, and max_size ...
    """


class HashTable:
    """A map from int64 hashes, and the content they stand for, to row numbers 0, 1, 2, ...

    A new hash gets the row that was freed last, or else the first that was never in use, in order
    of first appearance in the batch. With `words`, a row is known by its hash and its content:
    equal hashes of different content get separate rows, so a collision never gives the row of
    another. Every int64 is a good hash. The table grows by itself and never shrinks but by `clear`.

    Open addressing with linear probing in compiled loops; at most every second slot is used, and
    the table grows by doubling. Hashes that were chosen to collide in one slot make it slow, by as
    many steps as there are such. It lies on the CPU. All arrays are numpy's own: a tensor over one
    of them may be moved to shared memory when it is sent to another process, the array stays at its
    address. Not safe under threads: hold a lock.

    words: int64 numbers of content for each row, as `rows.packed` gives them; None knows rows by
        their hash alone.
    device: where the rows lie that it gives; what it is asked for may lie anywhere.

    >>> table = HashTable()
    >>> table.insert(torch.tensor([70, -1, 70, 5]))
    tensor([0, 1, 0, 2])
    >>> table.lookup(torch.tensor([5, 6]))
    tensor([ 2, -1])
    >>> table = HashTable(words=1)
    >>> table.insert(torch.tensor([70, 70]), torch.tensor([[1], [2]]))  # a collision
    tensor([0, 1])
    """

    def __init__(
        self, *, words: int | None = None, device: torch.device | str | int = "cpu"
    ) -> None:
        if words is not None and words < 0:
            raise ValueError(
                f"words={words} must be 0 or more, the words of content of a row, or None"
            )
        self.words, self.device = words, torch.empty(0, device=device).device
        self._removals = 0
        self._empty()

    def _empty(self) -> None:
        """Remove all rows and release their memory."""
        self._counts: Numbers = np.zeros(2, np.int64)  # rows ever in use, free ones
        self._record = kernels.table.TableRecord()
        self._record.update(words=self.words, counts=_address(self._counts))
        self._address = self._record.address
        self._lookup, self._insert = kernels.table.lookup, kernels.table.insert
        self._free: Numbers = np.zeros(0, np.int64)
        self._hashes: Numbers = np.zeros(0, np.int64)
        self._content: Numbers = np.zeros((0, self.words or 0), np.int64)
        self._resize(SMALLEST)

    @property
    def high(self) -> int:
        """How many row numbers were ever in use; live rows lie in `range(high)`.

        >>> table = HashTable()
        >>> table.remove(table.insert(torch.tensor([7, 8]))[:1])
        >>> len(table), table.high
        (1, 2)
        """
        return int(self._counts[0])

    @property
    def num_free(self) -> int:
        """How many of these are free."""
        return int(self._counts[1])

    @property
    def hashes(self) -> Tensor:
        """The hash of each row, int64 [high] on the CPU; 0 where one is free. Not for writing."""
        return torch.from_numpy(self._hashes[: self.high])

    @property
    def content(self) -> Tensor:
        """The content of each row, int64 [high, words]; 0 where one is free. Not for writing."""
        return torch.from_numpy(self._content[: self.high])

    @property
    def free(self) -> Tensor:
        """The free rows, the one that is taken next last."""
        return torch.from_numpy(self._free[: self.num_free])

    def hashes_of(self, rows: Tensor) -> Tensor:
        """The hashes of rows, int64 [N]."""
        return self.hashes[rows.cpu()].to(self.device)

    def content_of(self, rows: Tensor) -> Tensor:
        """The content of rows, int64 [N, words]."""
        return self.content[rows.cpu()].to(self.device)

    def __len__(self) -> int:
        return self.high - self.num_free

    def lookup(self, hashes: Tensor, content: Tensor | None = None, *, missing: int = -1) -> Tensor:
        """The rows of hashes, `missing` where unknown: int64 [N].

        hashes: int64 [N]
        content: int64 [N, words], if the table was made with `words`
        """
        hashes, content = self._arrays(hashes, content)
        rows = torch.empty_like(hashes)
        given = 0 if content is None else content.data_ptr()
        n = len(hashes)
        self._lookup(self._address, n, hashes.data_ptr(), given, missing, rows.data_ptr())
        return rows.to(self.device)

    def insert(
        self, hashes: Tensor, content: Tensor | None = None, *, max_size: int | None = None
    ) -> Tensor:
        """The rows of hashes, int64 [N], where unknown ones get rows in order of first appearance.

        hashes: int64 [N]
        content: int64 [N, words], if the table was made with `words`
        max_size: how many live rows there may be in the end.
        Raises CapacityError if there would be more; nothing is inserted then.

        >>> HashTable().insert(torch.tensor([70, -1, 70, 5]), max_size=3)
        tensor([0, 1, 0, 2])
        """
        hashes, content = self._arrays(hashes, content)
        live, high, num_free = len(self), self.high, self.num_free
        rows = self._inserted(hashes, content)
        if max_size is not None and len(self) > max(max_size, live):
            asked = len(self) - live
            self._take_back(high, num_free)
            raise CapacityError(
                f"{asked} new rows do not fit: the table holds {live}, and max_size is "
                f"{max_size}. Raise max_size to {live + asked}, or remove rows first"
            )
        return rows.to(self.device)

    def _inserted(self, hashes: Tensor, content: Tensor | None) -> Tensor:
        rows = torch.empty_like(hashes)
        given = 0 if content is None else content.data_ptr()
        n, before, mark = len(hashes), len(self), (self.high, self.num_free)
        done = self._insert(self._address, 0, n, hashes.data_ptr(), given, rows.data_ptr())
        while done < n:
            new, old = len(self) - before, self._slots
            try:
                self._resize(_next_capacity(len(self._hashes), done, new, n))
            except MemoryError:
                self._take_back(*mark)
                raise
            kernels.table.move_slots(self._address, _address(old), len(old))
            done = self._insert(self._address, done, n, hashes.data_ptr(), given, rows.data_ptr())
        return rows

    def insert_new(self, hashes: Tensor, content: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`insert`, and which hashes were unknown before the batch: int64 [N], bool [N].

        >>> table = HashTable()
        >>> table.insert_new(torch.tensor([70, -1, 70]))
        (tensor([0, 1, 0]), tensor([True, True, True]))
        >>> table.insert_new(torch.tensor([-1, 5]))
        (tensor([1, 2]), tensor([False,  True]))
        """
        high, num_free = self.high, self.num_free
        rows = self.insert(hashes, content)
        if self.num_free == num_free:
            return rows, rows >= high
        return rows, torch.isin(rows, self._taken(high, num_free).to(self.device))

    def _taken(self, high: int, num_free: int) -> Tensor:
        """The rows taken since `high` and `num_free` were these, in no special order."""
        reused = torch.from_numpy(self._free[self.num_free : num_free].copy())
        return torch.cat([reused, torch.arange(high, self.high, device="cpu")])

    def mark(self) -> tuple[int, int, int]:
        """A mark of the table's current state, for `rollback`; valid until rows are removed."""
        return self.high, self.num_free, self._removals

    def rollback(self, mark: tuple[int, int, int]) -> None:
        """Undo all insertions since `mark()`, as if they had never happened.

        >>> table = HashTable()
        >>> mark = table.mark()
        >>> rows = table.insert(torch.tensor([7, 8]))
        >>> table.rollback(mark)
        >>> len(table), table.high
        (0, 0)
        """
        high, num_free, removals = mark
        if removals != self._removals or high > self.high or num_free < self.num_free:
            raise ValueError(
                "the table cannot be rolled back to this mark: since mark() was called, rows were "
                "removed, or the table was cleared, loaded or rolled back further"
            )
        self._take_back(high, num_free)

    def _take_back(self, high: int, num_free: int) -> None:
        rows = self._taken(high, num_free)
        kernels.table.remove(self._address, len(rows), rows.data_ptr(), 1)
        # Taking a row from the stack leaves it written there.
        self._counts[:] = high, num_free

    def remove(self, rows: Tensor) -> None:
        """Remove live rows; their numbers are given out again, those at the end of `rows` first.

        rows: int64 [N], each live and there once.
        Raises ValueError otherwise, and removes nothing.

        >>> table = HashTable()
        >>> table.remove(table.insert(torch.tensor([7, 8, 9]))[:2])
        >>> table.insert(torch.tensor([10, 11, 12]))
        tensor([1, 0, 3])
        """
        assert rows.dtype is torch.int64 and rows.dim() == 1
        rows = rows.cpu().contiguous()
        loops, n, num_free = kernels.table, len(rows), self.num_free
        removed = int(loops.mark(self._address, n, rows.data_ptr()))
        if removed < n:
            row = int(rows[removed])
            why = "is given twice" if bool((rows[:removed] == row).any()) else "is not in use"
            raise ValueError(
                f"cannot remove row {row} (rows[{removed}]): it {why}. Nothing was removed. Pass "
                "rows of table.live(), each once"
            )
        if len(self._free) < num_free + n:
            self._free = _grown(self._free, max(num_free + n, 2 * num_free), num_free)
            self._record.update(free=_address(self._free))
        loops.remove(self._address, n, rows.data_ptr(), -1)
        self._free[num_free : num_free + n] = rows.numpy()
        self._counts[1] = num_free + n
        self._removals += 1

    def clear(self) -> None:
        """Remove all rows and release their memory; row numbers restart at 0."""
        self._empty()
        self._removals += 1

    def live(self) -> Tensor:
        """The live rows, ascending: int64 [len].

        >>> table = HashTable()
        >>> table.remove(table.insert(torch.tensor([7, 8, 9]))[1:2])
        >>> table.live()
        tensor([0, 2])
        """
        live = torch.ones(self.high, dtype=torch.bool, device="cpu")
        live[self.free] = False
        return live.nonzero().squeeze(1).to(self.device)

    def state(self) -> dict[str, Tensor]:
        """All contents as separate tensors: a table that loads them behaves the same from then on.

        >>> table = HashTable()
        >>> _ = table.insert(torch.tensor([7, 8]))
        >>> table.state()
        {'hashes': tensor([7, 8]), 'free': tensor([], dtype=torch.int64)}
        """
        state = {"hashes": self.hashes.clone(), "free": self.free.clone()}
        if self.words is not None:
            state["content"] = self.content.clone()
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore the table whose `state()` returned this.

        Raises ValueError for an invalid state, or one of another number of words; nothing is
        changed then.

        >>> table = HashTable()
        >>> table.load_state({"hashes": torch.tensor([7, 8]), "free": torch.tensor([0])})
        >>> table.insert(torch.tensor([8, 9]))
        tensor([1, 0])
        """
        hashes, content, free = self._checked_state(state)
        table = HashTable(words=self.words, device=self.device)
        again = table._fill(hashes, content, free)
        if again >= 0:
            raise ValueError(
                f"this is not a valid state of a table: row {again} is equal to an earlier row, "
                "so it is ambiguous"
            )
        removals = self._removals + 1
        self.__dict__.update(table.__dict__)
        self._removals = removals

    def _fill(self, hashes: Tensor, content: Tensor, free: Tensor) -> int:
        """Fill an empty table; the result is a row that is the same as one before it, or -1."""
        high = len(hashes)
        self._resize(max(SMALLEST, 1 << (high - 1).bit_length()))
        self._hashes[:high], self._content[:high] = hashes.numpy(), content.numpy()
        self._free = free.numpy().copy()
        self._record.update(free=_address(self._free))
        self._counts[:] = high, len(free)
        dead: Numbers = np.zeros(high, np.int64)
        dead[self._free] = 1
        return int(kernels.table.fill(self._address, high, _address(dead)))

    def _resize(self, capacity: int) -> None:
        """Make room for `capacity` rows, a power of two; slots are left empty."""
        high = self.high
        slots: Numbers = np.zeros((2 * capacity, 2), np.int64)
        hashes = _grown(self._hashes, capacity, high)
        content = _grown(self._content, capacity, high)
        self._slots, self._hashes, self._content = slots, hashes, content  # all or none
        self._record.update(
            slots=_address(slots),
            shift=64 - (2 * capacity - 1).bit_length(),
            mask=32 * capacity - 1,
            hashes=_address(hashes),
            content=_address(content),
            capacity=capacity,
        )

    def _arrays(self, hashes: Tensor, content: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Hashes and content for kernels, which check nothing: contiguous and on the CPU."""
        assert hashes.dtype is torch.int64 and hashes.dim() == 1
        if content is None or self.words is None:
            assert content is None and self.words is None
            return hashes.cpu().contiguous(), None
        assert content.dtype is torch.int64 and content.shape == (len(hashes), self.words)
        return hashes.cpu().contiguous(), content.cpu().contiguous()

    def _checked_state(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        wanted = {"hashes", "free"} | (set() if self.words is None else {"content"})
        if set(state) != wanted:
            raise ValueError(
                f"the state of this table (words={self.words}) must have the entries "
                f"{sorted(wanted)}; got {sorted(state)}"
            )
        for name, tensor in state.items():
            dims = 2 if name == "content" else 1
            if tensor.dtype != torch.int64 or tensor.dim() != dims:
                raise ValueError(
                    f"{name} in the state of a table must be int64 with {dims} dimensions; got "
                    f"{tensor.dtype} of shape {list(tensor.shape)}"
                )
        hashes, free = state["hashes"], state["free"]
        content = state.get("content", hashes.new_zeros(len(hashes), 0))
        if content.shape != (len(hashes), self.words or 0):
            raise ValueError(
                f"the content of {len(hashes)} rows of {self.words} words must have shape "
                f"{[len(hashes), self.words]}; got {list(content.shape)}"
            )
        inside = (free >= 0) & (free < len(hashes))
        if not bool(inside.all()) or len(free.unique()) < len(free):
            raise ValueError(
                "the free rows in the state of a table must be distinct and in "
                f"range({len(hashes)}); got {free.tolist()}"
            )
        hashes, content, free = (x.cpu().contiguous() for x in (hashes, content, free))
        return hashes, content, free

    def __getstate__(self) -> dict[str, Any]:
        return {"words": self.words, "device": self.device, **self.state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        words, device = state.pop("words"), state.pop("device")
        self.__init__(words=words, device=device)  # type: ignore[misc]
        self.load_state(state)


def _address(array: Numbers) -> int:
    return int(array.__array_interface__["data"][0])


def _grown(array: Numbers, length: int, used: int) -> Numbers:
    """An array of `length` rows that starts with the first `used` ones of another."""
    grown: Numbers = np.zeros((length, *array.shape[1:]), np.int64)
    grown[:used] = array[:used]
    return grown


def _next_capacity(capacity: int, done: int, new: int, n: int) -> int:
    """Twice as much; more in a batch whose first `done` of n items were nearly all new."""
    wanted = capacity + 1
    if 10 * new > 9 * done:
        wanted = min(16 * capacity, capacity + n - done)
    return 1 << (wanted - 1).bit_length()
