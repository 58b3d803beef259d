"""`LRUOrder`: the order of rows by their last use, exact and without a sort for each eviction."""

from __future__ import annotations

import torch
from torch import Tensor

NEVER = torch.iinfo(torch.int64).max  # the stamp of a row that is not in use: never the oldest


class LRUOrder:
    """The order in which rows were last used.

    Each use stamps a row with the next number. The oldest rows stand in a queue, cut from the
    stamps when it runs out: every use since then gave a stamp above all of the queue's, so an entry
    whose stamp has not changed is the oldest of all. An eviction costs O(1) on average, not a sort.

    >>> from raffia.data.lru import LRUOrder
    >>> used = LRUOrder()
    >>> used.touch(torch.tensor([0, 1, 2]))
    >>> used.touch(torch.tensor([0]))
    >>> used.oldest(2)
    tensor([1, 2])
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._stamps = torch.empty(0, dtype=torch.int64, device=device)
        self.clear()

    def clear(self) -> None:
        """Forget all uses."""
        self._stamps = self._stamps.new_empty(0)
        self._clock = 0
        self._forget_queue()

    def _forget_queue(self) -> None:
        self._queue = self._queued = self._stamps.new_empty(0)
        self._position = 0

    def touch(self, rows: Tensor) -> None:
        """Mark rows as used, one after the other; a row that occurs twice counts as used at
        the last.

        rows: int64 [N]
        """
        if not len(rows):
            return
        high = int(rows.max()) + 1
        if high > len(self._stamps):
            more = max(high, 2 * len(self._stamps)) - len(self._stamps)
            self._stamps = torch.cat([self._stamps, self._stamps.new_full((more,), NEVER)])
        now = torch.arange(self._clock, self._clock + len(rows), device=rows.device)
        self._clock += len(rows)
        self._stamps[rows] = -1  # what is in use is older than now, and NEVER is not
        self._stamps.scatter_reduce_(0, rows, now, "amax")

    def stamps(self, rows: Tensor) -> Tensor:
        """The stamps of when rows were last used, for `restore`: int64 [N].

        rows: int64 [N], each of which was used once
        """
        return self._stamps[rows]

    def restore(self, rows: Tensor, stamps: Tensor) -> None:
        """Undo the uses of rows since `stamps` were taken."""
        self._stamps[rows] = stamps
        self._forget_queue()  # which may have passed these rows over as used

    def drop(self, rows: Tensor) -> None:
        """Mark rows as no longer in use.

        rows: int64 [N]
        """
        self._stamps[rows] = NEVER

    def oldest(self, count: int) -> Tensor:
        """The `count` rows in use that were used least recently, the oldest first: int64 [count].

        They are still in use afterwards, until `drop`.

        Raises ValueError if fewer are in use.
        """
        found = self._next(count)
        if len(found) < count:  # cut a new queue, long enough to pay for itself
            in_use = int((self._stamps != NEVER).sum())
            if in_use < count:
                raise ValueError(f"{count} rows were requested, but only {in_use} are in use")
            length = min(in_use, max(count, in_use // 8))
            self._queued, self._queue = self._stamps.topk(length, largest=False, sorted=True)
            self._position = 0
            found = self._next(count)
        return found

    def _next(self, count: int) -> Tensor:
        """The next `count` rows of the queue whose stamps still hold, or fewer."""
        end, chunk = self._position, max(2 * count, 64)  # a look at the whole queue costs O(queue)
        parts, found = [self._queue[:0]], 0
        while found < count and end < len(self._queue):
            part = slice(end, end + chunk)
            rows = self._queue[part]
            fresh = rows[self._stamps[rows] == self._queued[part]]
            if not found and not len(fresh):
                self._position = min(end + chunk, len(self._queue))  # stale for good
            parts.append(fresh)
            found += len(fresh)
            end += chunk
        return torch.cat(parts)[:count]

    def state(self) -> Tensor:
        """The order as one tensor: the rows in use from the oldest to the newest, int64 [len].

        >>> from raffia.data.lru import LRUOrder
        >>> used = LRUOrder()
        >>> used.touch(torch.tensor([2, 0]))
        >>> used.state()
        tensor([2, 0])
        """
        in_use = int((self._stamps != NEVER).sum())
        return self._stamps.topk(in_use, largest=False, sorted=True).indices

    def load_state(self, rows: Tensor) -> None:
        """Load a state of `state()`."""
        self.clear()
        self.touch(rows.to(self._stamps.device))
