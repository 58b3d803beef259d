"""Indices of rows in one form, equal ones in groups, and the occupied rows of a storage."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raffia.data import kernels
from raffia.tensordict.index import INTEGERS

Index = int | slice | Tensor  # of rows, checked: a Tensor is int64 [n]
# For dtypes that `index_copy_`, or `index_select` on a GPU, lacks: what carries their bytes.
CARRIERS = {
    dtype: INTEGERS[dtype.itemsize]
    for dtype in (
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
        torch.float4_e2m1fn_x2,
    )
}


def to_index(rows: Any, stop: int, device: torch.device) -> tuple[Index, torch.Size]:
    """Rows in one form, and the batch that they are; IndexError for invalid ones.

    stop: the row after the last, to which a slice refers.

    >>> to_index(slice(-2, None), 5, torch.device("cpu"))
    (slice(3, 5, None), torch.Size([2]))
    >>> to_index([[1, 2]], 5, torch.device("cpu"))
    (tensor([1, 2]), torch.Size([1, 2]))
    """
    if not isinstance(rows, Tensor):
        if isinstance(rows, int) and not isinstance(rows, bool):
            return rows, torch.Size()
        if isinstance(rows, slice):
            first, last, step = rows.indices(stop)
            n = len(range(first, last, step))
            if step == 1:
                return slice(first, first + n), torch.Size([n])
            rows = torch.arange(first, first + n * step, step, device="cpu") if n else []
        rows = torch.as_tensor(rows)
        if not rows.numel():
            rows = rows.long()
    if rows.dtype is not torch.int64:
        if rows.is_floating_point() or rows.is_complex() or rows.dtype is torch.bool:
            raise no_integers("rows", rows.dtype)
        rows = rows.long()
    if rows.device != device:
        rows = rows.to(device)
    if rows.dim() == 1:
        return rows, rows.shape
    return (rows.reshape(-1), rows.shape) if rows.dim() else (int(rows), torch.Size())


def no_integers(what: str, dtype: torch.dtype) -> IndexError:
    """The error about an index that is a mask, or has fractions.

    >>> no_integers("rows", torch.bool)
    IndexError('rows must be integers; got torch.bool. To select where a mask ...
    """
    return IndexError(
        f"{what} must be integers; got {dtype}. To select where a mask is true: "
        "mask.nonzero().squeeze(1)"
    )


def as_rows(index: Index, device: torch.device) -> Tensor:  # int64 [n]
    """The rows themselves.

    >>> as_rows(slice(3, 5), torch.device("cpu")), as_rows(7, torch.device("cpu"))
    (tensor([3, 4]), tensor([7]))
    """
    if isinstance(index, Tensor):
        return index
    start, stop = (index.start, index.stop) if isinstance(index, slice) else (index, index + 1)
    return torch.arange(start, stop, device=device)


def carried(leaf: Tensor) -> Tensor:
    """View a tensor as a dtype whose rows can be read and written anywhere.

    >>> carried(torch.zeros(2, dtype=torch.uint16)).dtype
    torch.int16
    """
    return leaf.view(CARRIERS[leaf.dtype]) if leaf.dtype in CARRIERS else leaf


def selected(leaf: Tensor, rows: Tensor) -> Tensor:
    """A copy of rows, int64 [n].

    >>> selected(torch.tensor([5, 6, 7]), torch.tensor([2, 0]))
    tensor([7, 5])
    """
    if leaf.dtype in CARRIERS:
        return carried(leaf).index_select(0, rows).view(leaf.dtype)
    return leaf.index_select(0, rows)


def bounds(index: Index) -> tuple[int, int]:
    """The lowest and the highest of rows, of which there is at least one.

    >>> bounds(torch.tensor([4, 2])), bounds(slice(3, 5)), bounds(7)
    ((2, 4), (3, 4), (7, 7))
    """
    if isinstance(index, Tensor):
        low, high = index.aminmax()
        return low.item(), high.item()  # type: ignore[return-value]
    return (index.start, index.stop - 1) if isinstance(index, slice) else (index, index)


class RowGroups(NamedTuple):
    """Items of a batch by their value; groups are numbered in order of first appearance.

    Without repetitions `distinct` is the tensor of the values itself.
    """

    distinct: Tensor  # int64 [G], the value of each group
    group: Tensor  # int64 [N], in range(G)
    first: Tensor  # int64 [G], in range(N): the first item of each group
    last: Tensor  # int64 [G], in range(N): the last one


def groups(values: Tensor) -> RowGroups:
    """Group equal values: the distinct ones, the group of each, and where each is first and last.

    values: int64 [N], any numbers.

    >>> distinct, group, first, last = groups(torch.tensor([5, 3, 5, 5]))
    >>> distinct, group
    (tensor([5, 3]), tensor([0, 1, 0, 0]))
    >>> first, last
    (tensor([0, 1]), tensor([3, 1]))
    """
    if not values.is_cpu:
        distinct, group, first, last = groups(values.cpu())
        group = group.to(values.device)
        if first is last:  # all values are distinct
            return RowGroups(values, group, group, group)
        return RowGroups(
            distinct.to(values.device), group, first.to(values.device), last.to(values.device)
        )
    values = values.contiguous()
    n = len(values)
    size = 2 << max(n - 1, 1).bit_length()  # slots, a power of two, at least twice n
    slots = np.zeros(size, np.int64)
    distinct, group, first, last = (torch.empty_like(values) for _ in range(4))
    found = kernels.groups.groups(
        n,
        values.data_ptr(),
        slots.__array_interface__["data"][0],
        65 - size.bit_length(),
        distinct.data_ptr(),
        group.data_ptr(),
        first.data_ptr(),
        last.data_ptr(),
    )
    if found == n:
        return RowGroups(values, group, group, group)
    return RowGroups(distinct[:found], group, first[:found], last[:found])


class OccupiedRows:
    """The set of rows that hold something; mostly these are the first ones, without a gap.

    As long as there is no gap, only their number is stored. `high` is one more than the last row.

    >>> from raffia.data.row_index import OccupiedRows
    >>> occupied = OccupiedRows()
    >>> occupied.add_range(0, 4)
    >>> occupied.remove(torch.tensor([1, 3]))
    >>> len(occupied), occupied.high, occupied.rows()
    (2, 3, tensor([0, 2]))
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.high = 0
        self._count = 0
        self._mask: Tensor | None = None  # bool [at least high], only where there is a gap

    def __len__(self) -> int:
        return self._count

    @property
    def gapless(self) -> bool:
        """Whether the rows are exactly the first `len` ones."""
        return self._mask is None

    def rows(self) -> Tensor:
        """The rows that hold something, ascending: int64 [len]."""
        if self._mask is None:
            return torch.arange(self.high, device=self.device)
        return self._mask[: self.high].nonzero().view(-1)

    def contains(self, rows: Tensor) -> Tensor:
        """Whether these rows hold something: bool, of the shape of `rows`; any integer will do."""
        inside = (rows >= 0) & (rows < self.high)
        if self._mask is None:
            return inside
        return inside & self._mask[rows.clamp(0, self.high)]

    def add_range(self, start: int, stop: int) -> None:
        """Mark rows start..stop-1 as occupied."""
        if stop <= start:
            return
        if self._mask is None and start <= self.high:
            self.high = self._count = max(self.high, stop)
            return
        mask = self._masked(stop)
        self._count += (stop - start) - int(mask[start:stop].count_nonzero())
        mask[start:stop] = True
        self._settle(max(self.high, stop))

    def add(self, rows: Tensor) -> None:
        """Mark rows, int64 [n], as occupied."""
        stop = int(rows.max()) + 1 if len(rows) else 0
        if stop > (self.high if self._mask is None else 0):
            self._mark(rows, True)
            self._settle(max(self.high, stop))

    def remove(self, rows: Tensor) -> None:
        """Mark rows, int64 [n], as empty; rows that were empty do not matter."""
        rows = rows[self.contains(rows)]
        if len(rows):
            self._settle(_last(self._mark(rows, False), self.high) + 1)

    def _mark(self, rows: Tensor, occupied: bool) -> Tensor:
        """Mark rows, of which there is at least one; returns the mask."""
        start, last = [int(row) for row in rows.aminmax()]
        mask = self._masked(max(self.high, last + 1))
        span = mask[start : last + 1]  # counting it is faster than sorting the rows
        before = int(span.count_nonzero())
        span[rows - start] = occupied
        self._count += int(span.count_nonzero()) - before
        return mask

    def clear(self) -> None:
        """Mark all rows as empty."""
        self.high, self._count, self._mask = 0, 0, None

    def _masked(self, size: int) -> Tensor:
        """The mask, with room for `size` rows and one more, which is never true."""
        if self._mask is None:
            self._mask = torch.zeros(max(size, self.high) + 1, dtype=torch.bool, device=self.device)
            self._mask[: self.high] = True
        elif len(self._mask) <= size:
            grown = torch.zeros(2 * size + 1, dtype=torch.bool, device=self.device)
            grown[: self.high] = self._mask[: self.high]
            self._mask = grown
        return self._mask

    def _settle(self, high: int) -> None:
        self.high = high
        if self._count == high:
            self._mask = None


class OccupiedRowsInFile(OccupiedRows):
    """The occupied rows by their marks in a file, which another process writes."""

    def __init__(self, marks: Tensor) -> None:
        self._stamps = marks[:, 0]
        self.device = marks.device

    def __len__(self) -> int:
        return int(self._stamps.count_nonzero())

    @property
    def high(self) -> int:  # type: ignore[override]
        return _last(self._stamps, len(self._stamps)) + 1

    @property
    def gapless(self) -> bool:
        return False  # not for long

    def rows(self) -> Tensor:
        return self._stamps.nonzero().view(-1)

    def contains(self, rows: Tensor) -> Tensor:
        inside = (rows >= 0) & (rows < len(self._stamps))
        return inside & (self._stamps[rows.clamp(0, len(self._stamps) - 1)] != 0)


def _last(mask: Tensor, high: int) -> int:
    """The last row below `high` for which the mask is true, or -1."""
    while high:
        start = max(0, high - 1024)
        found = mask[start:high].nonzero()
        if len(found):
            return start + int(found[-1])
        high = start
    return -1
