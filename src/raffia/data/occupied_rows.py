"""The set of a storage's rows that hold something."""

import torch
from torch import Tensor


class OccupiedRows:
    """The set of rows that hold something; mostly these are the first ones, without a gap.

    As long as there is no gap, only their number is stored. `high` is one more than the last row.

    >>> from raffia.data.occupied_rows import OccupiedRows
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
        """Mark rows, of which there is at least one; gives the mask."""
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
