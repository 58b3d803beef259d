"""Batches whose segments lie with the workers: each holds shards of the replay, and makes parts.

The process that leads draws, which takes it numbers of steps alone, and keeps the replay that
checkpoints are made of. A worker has a copy of the large entry of its shards' rows: it gets each
row once, with the task of the first batch that is drawn after it came in. A worker that is lost is
started again, is given the rows as they were before its oldest open task, and is asked again.

Legend: S shards, W workers; either divides the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from raffia.data.row_feed import RowFeed, RowMirror
from raffia.distributed.pool import Pool
from raffia.tensordict.tensordict import TensorDict
from raffia.train.ahead import BatchesAhead, Making


def holds(worker: int, num_workers: int, num_shards: int) -> range:
    """The shards that a worker holds.

    >>> [list(holds(worker, 2, 4)) for worker in range(2)]
    [[0, 1], [2, 3]]
    >>> [list(holds(worker, 4, 2)) for worker in range(4)]
    [[0], [1], [0], [1]]
    """
    if num_workers < num_shards:
        each = num_shards // num_workers
        return range(worker * each, (worker + 1) * each)
    return range(worker % num_shards, worker % num_shards + 1)


class MakingOfShards(Making, Protocol):
    """What an algorithm says of the making of batches in parts."""

    @property
    def feeds(self) -> Sequence[RowFeed]:
        """Of the entry that workers hold, one for each shard."""

    def part(self, task: TensorDict, shards: range) -> TensorDict:
        """The part of a task that these shards are asked for."""

    def join(self, answers: Sequence[TensorDict]) -> TensorDict:
        """The answer of all parts, which come in the order of their shards."""


class BatchesOfShards(BatchesAhead):
    """`BatchesAhead`, made in parts by the workers that hold the shards.

    Each worker's task has "rows" besides its part: what came into its shards since its task before;
    and the worker is loaded with "rows" of its shards: see `ShardMirrors`. With more workers than
    shards each shard is held by W / S of them, who take turns.
    """

    _making: MakingOfShards

    def __init__(self, pool: Pool, making: MakingOfShards, *, ahead: int, num_updates: int) -> None:
        self._num_shards, num_workers = len(making.feeds), pool.num_workers
        if num_workers % self._num_shards and self._num_shards % num_workers:
            raise ValueError(
                f"{num_workers} workers don't hold as many of {self._num_shards} shards each: take "
                f"{self._num_shards} workers"
            )
        self._sent: dict[int, list[int]] = {}  # by worker: rows of its shards that it was sent
        # Of its open tasks, the oldest first: what it had been sent before.
        self._before: dict[int, deque[list[int]]] = {}
        super().__init__(pool, making, ahead=ahead, num_updates=num_updates)
        pool.state_of = self._rows_of

    def _holds(self, worker: int) -> range:
        return holds(worker, self.pool.num_workers, self._num_shards)

    def _workers(self, update: int) -> range:
        """Who makes the parts of a batch, in the order of their shards."""
        num, size = self.pool.num_workers, self._num_shards
        if num <= size:
            return range(num)
        first = update % (num // size) * size
        return range(first, first + size)

    def _rows_of(self, worker: int) -> TensorDict:
        """The rows that a worker held before its oldest open task."""
        before = self._before.get(worker)
        totals = before[0] if before else self._sent[worker]
        pairs = zip(self._holds(worker), totals, strict=True)
        rows = {str(shard): self._making.feeds[shard].as_of(total) for shard, total in pairs}
        return TensorDict(rows=TensorDict(rows))

    def _ask_workers(self, update: int, task: TensorDict, weights: Any) -> None:
        feeds = self._making.feeds
        for feed in feeds:
            if not feed.is_started:
                feed.start()
        for worker in self._workers(update):
            shards = self._holds(worker)
            totals = [feeds[shard].total for shard in shards]
            sent = self._sent.get(worker, totals)  # all that is there comes with its state
            pairs = zip(shards, sent, strict=True)
            new = {str(shard): feeds[shard].since(total) for shard, total in pairs}
            self._sent[worker] = totals
            self._before.setdefault(worker, deque()).append(sent)
            part = self._making.part(task, shards).set("rows", TensorDict(new))
            self.pool.ask(worker, update, part, weights)

    def _take_answer(self, update: int) -> TensorDict:
        answers = []
        for worker in self._workers(update):
            answers.append(self.pool.take(worker, update))
            self._before[worker].popleft()
        self._forget()
        return self._making.join(answers)

    def _forget(self) -> None:
        """Let go of overwritten rows that no worker can be given any more."""
        oldest: dict[int, int] = {}
        for worker, sent in self._sent.items():
            before = self._before[worker]
            for shard, total in zip(
                self._holds(worker), before[0] if before else sent, strict=True
            ):
                oldest[shard] = min(total, oldest.get(shard, total))
        for shard, total in oldest.items():
            self._making.feeds[shard].forget(total)

    def load_state(self, state: TensorDict) -> None:
        """Ask again for those that were open; with its first task a worker is given all rows."""
        self._sent, self._before = {}, {}
        for feed in self._making.feeds:
            feed.stop()
        super().load_state(state)

    def metrics(self) -> dict[str, float]:
        """As before, and what is kept of overwritten rows."""
        kept = sum([feed.num_bytes_kept for feed in self._making.feeds])
        return super().metrics() | {"mib_kept_for_reanalyzers": round(kept / 2**20, 3)}


class ShardMirrors:
    """A worker's copies of its shards' rows.

    >>> mirrors = ShardMirrors()
    >>> rows = TensorDict(
    ...     num_rows=torch.tensor(4), first=torch.tensor(0), rows=torch.tensor([7, 8]))
    >>> mirrors.load(TensorDict(rows=TensorDict({"1": rows})))
    >>> new = TensorDict(first=torch.tensor(2), rows=torch.tensor([9]))
    >>> mirrors.append(TensorDict(rows=TensorDict({"1": new})))
    >>> mirrors.read(1, torch.tensor([2, 0]))
    tensor([9, 7])
    """

    def __init__(self) -> None:
        self._mirrors: dict[int, RowMirror] = {}

    def load(self, state: TensorDict) -> None:
        """Hold the rows of `BatchesOfShards`' state of a worker."""
        self._mirrors = {}
        for name, rows in state["rows"].items():
            self._mirrors[int(name)] = mirror = RowMirror()
            mirror.load(rows)

    def append(self, task: TensorDict) -> None:
        """Take in the rows that came with a task."""
        for name, new in task["rows"].items():
            self._mirrors[int(name)].append(new)

    def read(self, shard: int, rows: torch.Tensor) -> torch.Tensor:
        """The entry in these rows of a shard, in memory that the next read of it uses again."""
        return self._mirrors[shard].read(rows)
