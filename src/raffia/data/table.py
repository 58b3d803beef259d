"""`HashTable`: from a hash, and the content behind it, to the number of a row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raffia import jit
from raffia.data.compiled_table import CompiledTable
from raffia.data.tensor_table import TensorTable


class CapacityError(ValueError, IndexError):
    """There is no room for the new rows of a batch; nothing of it was inserted.

    An IndexError too, as programs for TorchRL expect it.

    >>> HashTable().insert(torch.tensor([7, 8, 9]), max_size=2)
    Traceback (most recent call last):
    ...
    raffia.data.table.CapacityError: 3 new rows do not fit: 0 are here and max_size is 2; ...
    """


class HashTable:
    """A map from int64 hashes, and the content they stand for, to row numbers 0, 1, 2, ...

    A new hash gets the row that was freed last, or else the first that was never in use, in order
    of first appearance in the batch. With `words`, a row is known by its hash and its content:
    equal hashes of different content get rows of their own, so a collision never gives another's
    row. Every int64 is a good hash. The table grows by itself and never shrinks but by `clear`.

    On the CPU it is `CompiledTable`; on other devices, and without numba, `TensorTable`: the same
    results, row numbers and all. Not safe under threads: who shares a table holds a lock.

    words: int64 numbers of content for each row, as `rows.packed` gives them; None knows rows by
        their hash alone.
    device: where the table lies and what it gives; what it is asked for may lie anywhere.

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
            raise ValueError(f"words={words}: a row has 0 words of content or more, or None")
        self.words = words
        self._removals = 0
        self._table = _empty_table(words or 0, torch.device(device))

    @property
    def device(self) -> torch.device:
        """Where the table lies."""
        return self._table.device

    @property
    def high(self) -> int:
        """How many row numbers were ever in use; live rows lie in `range(high)`.

        >>> table = HashTable()
        >>> table.remove(table.insert(torch.tensor([7, 8]))[:1])
        >>> len(table), table.high
        (1, 2)
        """
        return self._table.high

    @property
    def hashes(self) -> Tensor:
        """The hash of each row, int64 [high]; 0 where a row is free. Not for writing."""
        return self._table.hashes

    @property
    def content(self) -> Tensor:
        """The content of each row, int64 [high, words]; 0 where a row is free. Not for writing."""
        return self._table.content

    def __len__(self) -> int:
        return self._table.num_live

    def lookup(self, hashes: Tensor, content: Tensor | None = None, *, missing: int = -1) -> Tensor:
        """The rows of hashes, `missing` where unknown: int64 [N].

        hashes: int64 [N]
        content: int64 [N, words], if the table was made with `words`
        """
        return self._table.lookup(*self._checked(hashes, content), missing)

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
        table = self._table
        hashes, content = self._checked(hashes, content)
        live, high, num_free = table.num_live, table.high, table.num_free
        rows = table.insert(hashes, content)
        if max_size is not None and table.num_live > max(max_size, live):
            asked = table.num_live - live
            table.rollback(high, num_free)
            raise CapacityError(
                f"{asked} new rows do not fit: {live} are here and max_size is {max_size}; "
                f"raise max_size to {live + asked}, or make room before"
            )
        return rows

    def insert_new(
        self, hashes: Tensor, content: Tensor | None = None, *, max_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """`insert`, and which hashes were unknown before the batch: int64 [N], bool [N].

        >>> table = HashTable()
        >>> table.insert_new(torch.tensor([70, -1, 70]))
        (tensor([0, 1, 0]), tensor([True, True, True]))
        >>> table.insert_new(torch.tensor([-1, 5]))
        (tensor([1, 2]), tensor([False,  True]))
        """
        table = self._table
        high, num_free = table.high, table.num_free
        rows = self.insert(hashes, content, max_size=max_size)
        if table.num_free == num_free:
            return rows, rows >= high
        return rows, torch.isin(rows, table.taken(high, num_free))

    def mark(self) -> tuple[int, int, int]:
        """Where the table stands, for `rollback`; valid until rows are removed."""
        return self._table.high, self._table.num_free, self._removals

    def rollback(self, mark: tuple[int, int, int]) -> None:
        """Take back all that was inserted since `mark()`, as if it had never been.

        >>> table = HashTable()
        >>> mark = table.mark()
        >>> rows = table.insert(torch.tensor([7, 8]))
        >>> table.rollback(mark)
        >>> len(table), table.high
        (0, 0)
        """
        high, num_free, removals = mark
        table = self._table
        if removals != self._removals or high > table.high or num_free < table.num_free:
            raise ValueError(
                "the table cannot go back to this mark: rows were removed, or the table was "
                "cleared, loaded or rolled back further, since mark() was called"
            )
        table.rollback(high, num_free)

    def remove(self, rows: Tensor) -> None:
        """Remove live rows; their numbers are given out again, those at the end of `rows` first.

        rows: int64 [N], each live and there once.
        Raises ValueError otherwise, and removes nothing.

        >>> table = HashTable()
        >>> table.remove(table.insert(torch.tensor([7, 8, 9]))[:2])
        >>> table.insert(torch.tensor([10, 11, 12]))
        tensor([1, 0, 3])
        """
        rows = self._checked_rows(rows)
        removed = self._table.remove(rows)
        if removed < len(rows):
            row = int(rows[removed])
            why = "is there twice" if bool((rows[:removed] == row).any()) else "is not live"
            raise ValueError(
                f"cannot remove row {row} (rows[{removed}]): it {why}; nothing was removed. "
                "Pass rows of table.live(), each once"
            )
        self._removals += 1

    def clear(self) -> None:
        """Forget all rows and give their memory back; numbers start at 0 again."""
        self._table.clear()
        self._removals += 1

    def live(self) -> Tensor:
        """The live rows, ascending: int64 [len].

        >>> table = HashTable()
        >>> table.remove(table.insert(torch.tensor([7, 8, 9]))[1:2])
        >>> table.live()
        tensor([0, 2])
        """
        if not self._table.num_free:
            return torch.arange(self.high, device=self.device)
        live = torch.ones(self.high, dtype=torch.bool, device=self.device)
        live[self._table.free] = False
        return torch.nonzero(live).squeeze(1)

    def state(self) -> dict[str, Tensor]:
        """All there is, as tensors of their own: a table that loads it behaves the same for ever.

        >>> table = HashTable()
        >>> _ = table.insert(torch.tensor([7, 8]))
        >>> table.state()
        {'hashes': tensor([7, 8]), 'free': tensor([], dtype=torch.int64)}
        """
        state = {"hashes": self.hashes.clone(), "free": self._table.free.clone()}
        if self.words is not None:
            state["content"] = self.content.clone()
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Become the table whose `state()` this is, on this table's device.

        Raises ValueError if it is none, or of another number of words; nothing is changed then.

        >>> table = HashTable()
        >>> table.load_state({"hashes": torch.tensor([7, 8]), "free": torch.tensor([0])})
        >>> table.insert(torch.tensor([8, 9]))
        tensor([1, 0])
        """
        hashes, content, free = self._checked_state(state)
        table = _empty_table(self.words or 0, self.device)
        again = table.load(hashes, content, free)
        if again >= 0:
            raise ValueError(
                f"this is no state of a table: row {again} is the same as a row before it, "
                "so it is unclear which of them is meant"
            )
        self._table = table
        self._removals += 1

    def to(self, device: torch.device | str | int) -> HashTable:
        """This table if it lies there, else a copy of it on that device.

        >>> table = HashTable()
        >>> table.to("cpu") is table
        True
        """
        # "cuda" means the current one, which a tensor knows
        device = torch.empty(0, device=device).device
        if device == self.device:
            return self
        there = HashTable(words=self.words, device=device)
        there.load_state(self.state())
        return there

    def _checked(self, hashes: Tensor, content: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Hashes and content of the right dtype and shape, contiguous and where the table lies."""
        if hashes.dtype != torch.int64 or hashes.dim() != 1:
            raise ValueError(
                f"hashes are int64 of shape [N], got {hashes.dtype} of shape {list(hashes.shape)}: "
                "pass hashes.flatten() of an int64 tensor"
            )
        device = self._table.device
        if hashes.device != device:  # torch takes a microsecond to move nothing
            hashes = hashes.to(device)
        hashes = hashes.contiguous()
        if self.words is None:
            if content is not None:
                raise ValueError(
                    "this table knows rows by their hash alone, so it cannot take content: make it "
                    f"as HashTable(words={content.shape[-1] if content.dim() else 1})"
                )
            return hashes, None
        shape = (hashes.shape[0], self.words)
        if content is None:
            raise ValueError(
                f"this table compares content (words={self.words}): pass content, int64 of shape "
                f"{list(shape)}, next to the hashes"
            )
        if content.dtype != torch.int64 or content.shape != shape:
            raise ValueError(
                f"content is int64 of shape {list(shape)} for these hashes, got {content.dtype} "
                f"of shape {list(content.shape)}"
            )
        return hashes, content.to(device).contiguous()

    def _checked_rows(self, rows: Tensor) -> Tensor:
        if rows.dtype != torch.int64 or rows.dim() != 1:
            raise ValueError(
                f"rows are int64 of shape [N], got {rows.dtype} of shape {list(rows.shape)}"
            )
        return rows.to(self._table.device).contiguous()

    def _checked_state(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        wanted = {"hashes", "free"} | (set() if self.words is None else {"content"})
        if set(state) != wanted:
            raise ValueError(
                f"the state of this table (words={self.words}) has the entries {sorted(wanted)}, "
                f"got {sorted(state)}"
            )
        for name, tensor in state.items():
            dims = 2 if name == "content" else 1
            if tensor.dtype != torch.int64 or tensor.dim() != dims:
                raise ValueError(
                    f"{name} of a table's state is int64 with {dims} dimensions, got "
                    f"{tensor.dtype} of shape {list(tensor.shape)}"
                )
        hashes, free = state["hashes"], state["free"]
        content = state.get("content", hashes.new_zeros(len(hashes), 0))
        if content.shape != (len(hashes), self.words or 0):
            raise ValueError(
                f"the content of {len(hashes)} rows of {self.words} words has the shape "
                f"{[len(hashes), self.words]}, got {list(content.shape)}"
            )
        inside = (free >= 0) & (free < len(hashes))
        if not bool(inside.all()) or len(free.unique()) < len(free):
            raise ValueError(
                f"the free rows of a table's state are distinct and lie in range({len(hashes)}), "
                f"got {free.tolist()}"
            )
        hashes, content, free = (x.to(self.device).contiguous() for x in (hashes, content, free))
        return hashes, content, free

    def __getstate__(self) -> dict[str, Any]:
        return {"words": self.words, "device": self.device, **self.state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        words, device = state.pop("words"), state.pop("device")
        self.__init__(words=words, device=device)  # type: ignore[misc]
        self.load_state(state)


def _empty_table(words: int, device: torch.device) -> CompiledTable | TensorTable:
    if device.type == "cpu" and jit.available():
        return CompiledTable(words)
    return TensorTable(words, device)
