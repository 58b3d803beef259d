"""`TensorTable`: the table behind `HashTable` in plain tensor operations, for any device."""

from __future__ import annotations

import torch
from torch import Tensor

from raffia.data.groups import tensor_groups


class TensorTable:
    """Rows by hash and content in a sorted list of hashes; the same results as `CompiledTable`.

    words: int64 numbers of content in each row, 0 for none.
    device: where it lies; what comes in lies there too.

    >>> table = TensorTable(0, "cpu")
    >>> table.insert(torch.tensor([7, -1, 7]), None)
    tensor([0, 1, 0])
    """

    def __init__(self, words: int, device: torch.device | str) -> None:
        self.words = words
        self.device = torch.empty(0, device=device).device  # "cuda" is one of several; which?
        self.clear()

    def clear(self) -> None:
        """Forget all rows and give their memory back."""
        self.high = self.num_free = 0
        self._free = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._hashes = self._free
        self._content = self._free.new_zeros(0, self.words)
        self._sorted = self._order = self._free  # hashes of the live rows, ascending; their rows

    @property
    def num_live(self) -> int:
        return self.high - self.num_free

    @property
    def hashes(self) -> Tensor:
        return self._hashes[: self.high]

    @property
    def content(self) -> Tensor:
        return self._content[: self.high]

    @property
    def free(self) -> Tensor:
        return self._free[: self.num_free]

    def lookup(self, hashes: Tensor, content: Tensor | None, missing: int) -> Tensor:
        rows = torch.full_like(hashes, missing)
        if not self.num_live:
            return rows
        position = torch.searchsorted(self._sorted, hashes)
        if content is None:
            found, candidate = self._at(position, hashes)
            return torch.where(found, candidate, rows)
        items = torch.arange(len(hashes), device=self.device)
        while len(items):  # rows of equal hash stand one after another
            found, candidate = self._at(position, hashes[items])
            items, position, candidate = items[found], position[found], candidate[found]
            same = (self._content[candidate] == content[items]).all(1)
            rows[items[same]] = candidate[same]
            items, position = items[~same], position[~same] + 1
        return rows

    def _at(self, position: Tensor, hashes: Tensor) -> tuple[Tensor, Tensor]:
        """Whether these hashes are at these positions of the sorted ones, and the rows there."""
        inside = position.clamp(max=len(self._sorted) - 1)
        return (self._sorted[inside] == hashes) & (inside == position), self._order[inside]

    def insert(self, hashes: Tensor, content: Tensor | None) -> Tensor:
        rows = self.lookup(hashes, content, -1)
        unknown = torch.nonzero(rows < 0).squeeze(1)
        if not len(unknown):
            return rows
        new = hashes[unknown]
        if content is None:
            groups = tensor_groups(new)
        else:
            both = torch.cat([new[:, None], content[unknown]], 1)
            groups = tensor_groups(torch.unique(both, dim=0, return_inverse=True)[1])
        taken = self._take(len(groups.first))
        self._hashes[taken] = new[groups.first]
        if content is not None:
            self._content[taken] = content[unknown[groups.first]]
        self._merge(taken)
        rows[unknown] = taken[groups.group]
        return rows

    def _take(self, n: int) -> Tensor:
        """The numbers of n rows: those freed last, then ones never used."""
        reused = min(n, self.num_free)
        high = self.high + n - reused
        if len(self._hashes) < high:
            self._hashes = _grown(self._hashes, max(high, 2 * self.high))
            self._content = _grown(self._content, max(high, 2 * self.high))
        fresh = torch.arange(self.high, high, device=self.device)
        last_freed = self._free[self.num_free - reused : self.num_free].flip(0)
        self.high, self.num_free = high, self.num_free - reused
        return torch.cat([last_freed, fresh])

    def _merge(self, rows: Tensor) -> None:
        """Put the hashes of new rows among the sorted ones."""
        new, order = self._hashes[rows].sort()
        position = torch.searchsorted(self._sorted, new, right=True)
        position += torch.arange(len(new), device=self.device)
        old = torch.ones(len(self._sorted) + len(new), dtype=torch.bool, device=self.device)
        old[position] = False
        merged, merged_order = self._sorted.new_empty((2, len(old))).unbind(0)
        merged[old], merged_order[old] = self._sorted, self._order
        merged[position], merged_order[position] = new, rows[order]
        self._sorted, self._order = merged, merged_order

    def taken(self, high: int, num_free: int) -> Tensor:
        """The rows taken since `high` and `num_free` were these, in no special order."""
        fresh = torch.arange(high, self.high, device=self.device)
        return torch.cat([self._free[self.num_free : num_free], fresh])

    def rollback(self, high: int, num_free: int) -> None:
        """Take back all that was inserted since `high` and `num_free` were these."""
        self._forget(self.taken(high, num_free))
        self.high, self.num_free = high, num_free  # a row taken from the stack still stands there

    def remove(self, rows: Tensor) -> int:
        """Remove rows; the result is their number, or the index of a wrong one and nothing done."""
        n, num_free = len(rows), self.num_free
        live = torch.zeros(self.high + 1, dtype=torch.bool, device=self.device)
        live[self._order] = True
        inside = (rows >= 0) & (rows < self.high)
        good = live[torch.where(inside, rows, self.high)]
        groups = tensor_groups(rows)
        again = torch.ones_like(good)
        again[groups.first] = False
        wrong = torch.nonzero(~good | again)
        if len(wrong):
            return int(wrong[0])
        if len(self._free) < num_free + n:
            self._free = _grown(self._free, max(num_free + n, 2 * num_free))
        self._free[num_free : num_free + n] = rows
        self.num_free += n
        self._forget(rows)
        return n

    def _forget(self, rows: Tensor) -> None:
        dead = torch.zeros(self.high, dtype=torch.bool, device=self.device)
        dead[rows] = True
        self._hashes[rows] = 0
        self._content[rows] = 0
        stays = ~dead[self._order]
        self._sorted, self._order = self._sorted[stays], self._order[stays]

    def load(self, hashes: Tensor, content: Tensor, free: Tensor) -> int:
        """Fill an empty table; the result is a row that is the same as one before it, or -1."""
        self._hashes, self._content, self._free = hashes.clone(), content.clone(), free.clone()
        self.high, self.num_free = len(hashes), len(free)
        live = torch.ones(self.high, dtype=torch.bool, device=self.device)
        live[free] = False
        rows = torch.nonzero(live).squeeze(1)
        self._sorted, order = self._hashes[rows].sort(stable=True)
        self._order = rows[order]
        both = torch.cat([hashes[rows, None], content[rows]], 1)
        groups = tensor_groups(torch.unique(both, dim=0, return_inverse=True)[1])
        again = torch.ones_like(rows, dtype=torch.bool)
        again[groups.first] = False
        repeated = rows[again]
        return int(repeated[0]) if len(repeated) else -1


def _grown(tensor: Tensor, length: int) -> Tensor:
    """A tensor of `length` rows that starts with those of another; the others are 0."""
    grown = tensor.new_zeros(length, *tensor.shape[1:])
    grown[: len(tensor)] = tensor
    return grown
