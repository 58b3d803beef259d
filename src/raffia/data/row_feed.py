"""Copies of one entry of a ring's rows in other processes: `RowFeed` sends, `RowMirror` follows.

Steps are written once and then read by their rows, so a copy of a large entry, such as frames,
needs to be sent each row once; later no more than the numbers of rows travel.

Legend: N rows in the ring; item i lies in row i % N, and items are counted for ever.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from raffia.data.row_index import carried, selected
from raffia.data.storage import Storage
from raffia.tensordict.tensordict import TensorDict


class RowFeed:
    """A feed for copies of one entry: to follow a storage, and to be rebuilt as of an earlier time.

    storage: a ring, whose rows of this entry are never changed before they are overwritten.
    path: of the entry.

    A copy that is lost may be needed as it was some items ago, since tasks are asked again of the
    next one in their order. So overwritten rows are stored here, from `start` on until `forget`:
    `before_extend` is to be called before each addition.

    >>> from raffia.data.storage import TensorStorage
    >>> storage = TensorStorage(4)
    >>> feed = RowFeed(storage, ("x",))
    >>> def add(first, num):
    ...     feed.before_extend(num)
    ...     _ = storage.extend(TensorDict(x=torch.arange(first, first + num), batch_size=[num]))
    >>> add(0, 3)
    >>> feed.start()
    >>> mirror = RowMirror()
    >>> mirror.load(feed.as_of(3))
    >>> add(3, 3)
    >>> mirror.append(feed.since(3))
    >>> mirror.read(torch.tensor([[0, 1], [2, 3]]))
    tensor([[4, 5],
            [2, 3]])
    >>> other = RowMirror()
    >>> other.load(feed.as_of(3))
    >>> other.read(torch.tensor([0, 1, 2]))
    tensor([0, 1, 2])
    """

    def __init__(self, storage: Storage, path: tuple[str, ...]) -> None:
        assert storage.max_size is not None
        self._storage, self._path, self._num_rows = storage, path, storage.max_size
        # First item and its rows, without gaps.
        self._overwritten: deque[tuple[int, Tensor]] = deque()
        self._stop = 0  # the item after the last of these
        self.is_started = False

    @property
    def total(self) -> int:
        """The number of items that were added so far."""
        return self._storage.total

    @property
    def num_bytes_stored(self) -> int:
        """The size in bytes of the overwritten rows that are still stored."""
        return sum([rows.nbytes for _, rows in self._overwritten])

    def start(self) -> None:
        """Store overwritten rows from now on; those stored before are forgotten."""
        self._overwritten.clear()
        self._stop = self._oldest
        self.is_started = True

    def stop(self) -> None:
        """Keep nothing any more."""
        self._overwritten.clear()
        self.is_started = False

    def before_extend(self, most: int) -> None:
        """Keep the rows that the next items overwrite, at most `most` items."""
        if not self.is_started:
            return
        stop = min(self.total, self.total + most - self._num_rows)
        if stop > self._stop:
            self._overwritten.append((self._stop, self._rows(self._stop, stop)))
            self._stop = stop

    def forget(self, total: int) -> None:
        """Drop the overwritten rows that only copies as of fewer items than this need."""
        while (
            self._overwritten
            and self._overwritten[0][0] + len(self._overwritten[0][1]) <= total - self._num_rows
        ):
            self._overwritten.popleft()

    def since(self, total: int) -> TensorDict:
        """The rows added since the given number of items, for `RowMirror.append`."""
        first = max(total, self._oldest)
        rows = self._rows(first, self.total)
        return TensorDict(first=torch.tensor(first, device="cpu"), rows=rows)

    def as_of(self, total: int) -> TensorDict:
        """All rows as they were at the given number of items, for `RowMirror.load`."""
        first = max(0, total - self._num_rows)
        return TensorDict(
            num_rows=torch.tensor(self._num_rows, device="cpu"),
            first=torch.tensor(first, device="cpu"),
            rows=self._of_items(torch.arange(first, total, device="cpu")),
        )

    def read(self, rows: Tensor, total: int | Tensor) -> Tensor:
        """The entry in these rows [*], as it was at the given number of items: [*, ...].

        total: one number, or one that broadcasts over `rows`.
        """
        items = total - 1 - (total - 1 - rows) % self._num_rows
        found = self._of_items(items.reshape(-1))
        return found.view(*rows.shape, *found.shape[1:])

    @property
    def _oldest(self) -> int:
        return max(0, self.total - self._num_rows)

    def _leaf(self) -> Tensor:
        structure = self._storage.structure
        if structure is None:
            raise ValueError(
                f"no rows have been added yet, so the structure of {self._path} is unknown"
            )
        return self._storage._leaves[structure.paths.index(self._path)]

    def _rows(self, first: int, stop: int) -> Tensor:
        return self._stored(torch.arange(first, stop, device="cpu"))

    def _stored(self, items: Tensor) -> Tensor:
        rows = items % self._num_rows
        self._storage.ensure_whole(rows)
        return selected(self._leaf(), rows)

    def _of_items(self, items: Tensor) -> Tensor:
        """The rows of items, overwritten or not."""
        gone = items < self._oldest
        if not gone.any():
            return self._stored(items)
        first = self._overwritten[0][0] if self._overwritten else self._oldest
        if int(items.min()) < first:
            raise IndexError(f"row {int(items.min())} has been overwritten")
        found = self._stored(torch.where(gone, self._oldest, items))
        overwritten = torch.cat([rows for _, rows in self._overwritten])
        carried(found)[gone] = carried(overwritten)[items[gone] - first]
        return found


class RowMirror:
    """A copy of one entry of a ring's rows, that follows it by what a `RowFeed` sends.

    >>> mirror = RowMirror()
    >>> mirror.load(TensorDict(
    ...     num_rows=torch.tensor(4), first=torch.tensor(0), rows=torch.tensor([7, 8])))
    >>> mirror.append(TensorDict(first=torch.tensor(2), rows=torch.tensor([9])))
    >>> mirror.read(torch.tensor([2, 0]))
    tensor([9, 7])
    """

    def __init__(self) -> None:
        self._ring = torch.empty(0, device="cpu")
        self._last = torch.empty(0, device="cpu")  # what was read last: its memory is used again

    def load(self, state: TensorDict) -> None:
        """Hold what `RowFeed.as_of` gave."""
        self._ring = state["rows"].new_empty((int(state["num_rows"]), *state["rows"].shape[1:]))
        self.append(state)

    def append(self, new: TensorDict) -> None:
        """Append the rows that `RowFeed.since` returned."""
        first, rows = int(new["first"]), new["rows"]
        at = first % len(self._ring)
        behind = min(len(rows), len(self._ring) - at)  # the rest continues at row 0
        self._ring[at : at + behind] = rows[:behind]
        self._ring[: len(rows) - behind] = rows[behind:]

    def read(self, rows: Tensor) -> Tensor:
        """The entry in these rows [*]: [*, ...], in memory that the next read uses again."""
        shape = rows.numel(), *self._ring.shape[1:]
        if self._last.shape != shape or self._last.dtype != self._ring.dtype:
            self._last = self._ring.new_empty(shape)
        torch.index_select(carried(self._ring), 0, rows.reshape(-1), out=carried(self._last))
        return self._last.view(*rows.shape, *shape[1:])
