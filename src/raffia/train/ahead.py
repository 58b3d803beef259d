"""Work that a loop requests of workers ahead of time: `OpenTasks`, and batches, whole or in parts.

Batch u is drawn `ahead` updates before update u learns from it, from the replay as it is then, and
made with the weights of then. So neither who makes it, nor how fast, changes a bit of the run.

In parts (`BatchesOfShards`), segments lie with the workers: each holds shards of the replay. The
process that leads draws, which takes it numbers of steps alone, and keeps the replay that
checkpoints are made of. A worker has a copy of the large entry of its shards' rows: it gets each
row once, with the task of the first batch that is drawn after it came in. A worker that is lost is
started again, is given the rows as they were before its oldest open task, and is asked again.

Legend: S shards, W workers; either divides the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from raffia.data.row_feed import RowFeed, RowMirror
from raffia.distributed.board import Board
from raffia.distributed.pool import Pool
from raffia.learner import step_of
from raffia.tensordict.tensordict import TensorDict


class OpenTasks:
    """Tasks of a pool's workers, with the versions of weights that they name.

    Which task is asked for and taken when follows from the number of the update alone; so who does
    it, and how fast, changes no bit of a run.

    pool: the workers, which end with this; whoever made their engine closes it.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool, self.board = pool, Board(pool.engine)

    def _metrics(self, what: str, worker: str, num_open: int) -> dict[str, float]:
        """Open tasks, seconds waited and restarts since the start."""
        return {f"{what}_open": float(num_open), **self.pool.metrics(what, worker)}

    def close(self) -> None:
        """End the workers."""
        self.pool.close()
        self.board.clear()


class Making(Protocol):
    """The parts of making batches ahead that an algorithm defines."""

    def weights(self, state: TensorDict) -> tuple[int, TensorDict]:
        """The weights that a batch drawn now is made with, and their version: equal versions, equal
        weights.
        """

    def task(self, segments: TensorDict) -> TensorDict:
        """The task for the workers, in memory that is not shared with the replay."""

    def batch(self, state: TensorDict, task: TensorDict, answer: TensorDict) -> TensorDict:
        """The batch of a worker's answer, when it is due; what else was answered is used now."""

    def save(self, task: TensorDict) -> TensorDict:
        """A task for a checkpoint: what the replay can't give again."""

    def load(self, saved: TensorDict) -> TensorDict:
        """The task that was saved, once the replay is restored."""


class _Open(NamedTuple):
    version: int
    task: TensorDict


class BatchesAhead(OpenTasks):
    """Open batches: drawn and asked for ahead, taken in their order.

    pool: the workers. Each is given "update" and "version" besides the entries of `making.task`,
        and the weights of `making.weights`.
    ahead: updates from when a batch is drawn to when it is learnt from.
    num_updates: of the run; no batch is drawn for later ones.
    """

    def __init__(self, pool: Pool, making: Making, *, ahead: int, num_updates: int) -> None:
        super().__init__(pool)
        self.ahead, self._num_updates, self._making = ahead, num_updates, making
        self._open: dict[int, _Open] = {}  # by update, rising

    def next(self, state: TensorDict, draw: Callable[[int], TensorDict]) -> TensorDict:
        """The batch of this update, waited for; those that are drawn now are asked for before.

        draw: gives the segments of an update's batch.
        """
        update = step_of(state)
        first = max(self._open, default=update - 1) + 1
        for number in range(
            first, max(update, min(update + self.ahead, self._num_updates - 1)) + 1
        ):
            version, weights = self._making.weights(state)
            self.board.publish(version, weights)
            self._ask(number, version, self._making.task(draw(number)))
        answer = self._take_answer(update)
        taken = self._open.pop(update)
        versions = [one.version for one in self._open.values()]
        self.board.drop_below(min(versions, default=taken.version))
        return self._making.batch(state, taken.task, answer)

    def _ask(self, update: int, version: int, task: TensorDict) -> None:
        self._open[update] = _Open(version, task)
        asked = task.copy()
        asked["update"] = torch.tensor(update, device="cpu")
        asked["version"] = torch.tensor(version, device="cpu")
        self._ask_workers(update, asked, self.board.ref(version))

    def _ask_workers(self, update: int, task: TensorDict, weights: Any) -> None:
        self.pool.ask(update % self.pool.num_workers, update, task, weights)

    def _take_answer(self, update: int) -> TensorDict:
        return self.pool.take(update % self.pool.num_workers, update)

    def metrics(self) -> dict[str, float]:
        """Open batches, seconds waited and restarts since the start."""
        return self._metrics("batches", "reanalyzer", len(self._open))

    def state(self) -> TensorDict:
        """The open batches, as they were drawn, and their weights; nothing if there are none."""
        if not self._open:
            return TensorDict()
        drawn = TensorDict()
        for update, one in self._open.items():
            task = self._making.save(one.task)
            version = torch.tensor(one.version, device="cpu")
            drawn[str(update)] = TensorDict(version=version, task=task)
        return TensorDict(drawn=drawn, weights=self.board.state())

    def load_state(self, state: TensorDict) -> None:
        """Ask again for those that were open: what was drawn is read from the restored replay."""
        self.pool.reset()
        self._open = {}
        self.board.clear()
        if state.is_empty():
            return
        self.board.load_state(state["weights"])
        for name, one in sorted(state["drawn"].items(), key=lambda named: int(named[0])):
            self._ask(int(name), int(one["version"]), self._making.load(one["task"]))


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
    """The parts of making batches from shards that an algorithm defines."""

    @property
    def feeds(self) -> Sequence[RowFeed]:
        """The feeds of the entry that workers hold, one for each shard."""

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
                f"{self._num_shards} shards cannot be divided equally among {num_workers} "
                f"workers: use {self._num_shards} workers"
            )
        self._sent: dict[int, list[int]] = {}  # by worker: rows of its shards that it was sent
        # Of its open tasks, the oldest first: what it had been sent before.
        self._before: dict[int, deque[list[int]]] = {}
        super().__init__(pool, making, ahead=ahead, num_updates=num_updates)
        pool.state_of = self._rows_of

    def _holds(self, worker: int) -> range:
        return holds(worker, self.pool.num_workers, self._num_shards)

    def _workers(self, update: int) -> range:
        """The workers that make the parts of a batch, in the order of their shards."""
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
        """Free overwritten rows that no worker can be asked for any more."""
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
        """The metrics of batches made ahead, and the size of overwritten rows still in use."""
        size = sum([feed.num_bytes_stored for feed in self._making.feeds])
        return super().metrics() | {"mib_kept_for_reanalyzers": round(size / 2**20, 3)}


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
        """Append the rows that came with a task."""
        for name, new in task["rows"].items():
            self._mirrors[int(name)].append(new)

    def read(self, shard: int, rows: torch.Tensor) -> torch.Tensor:
        """The entry in these rows of a shard, in memory that the next read of it reuses."""
        return self._mirrors[shard].read(rows)
