"""Batches that workers make before they are due, while the loop goes on.

Batch u is drawn `ahead` updates before update u learns from it, from the replay as it is then, and
made with the weights of then. So neither who makes it, nor how fast, changes a bit of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from raffia.distributed.pool import Pool
from raffia.learner import step_of
from raffia.tensordict.tensordict import TensorDict
from raffia.train.open_tasks import OpenTasks


class Making(Protocol):
    """What an algorithm says of the making of its batches."""

    def weights(self, state: TensorDict) -> tuple[int, TensorDict]:
        """What a batch that is drawn now is made with, and its version: equal where these are."""

    def task(self, segments: TensorDict) -> TensorDict:
        """What the workers are given, in memory of its own."""

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
        asked["update"], asked["version"] = torch.tensor(update), torch.tensor(version)
        self._ask_workers(update, asked, self.board.ref(version))

    def _ask_workers(self, update: int, task: TensorDict, weights: Any) -> None:
        self.pool.ask(update % self.pool.num_workers, update, task, weights)

    def _take_answer(self, update: int) -> TensorDict:
        return self.pool.take(update % self.pool.num_workers, update)

    def metrics(self) -> dict[str, float]:
        """Open batches, seconds waited and restarts so far."""
        return self._metrics("batches", "reanalyzer", len(self._open))

    def state(self) -> TensorDict:
        """The open batches, as they were drawn, and their weights; nothing if there are none."""
        if not self._open:
            return TensorDict()
        drawn = TensorDict()
        for update, one in self._open.items():
            task = self._making.save(one.task)
            drawn[str(update)] = TensorDict(version=torch.tensor(one.version), task=task)
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
