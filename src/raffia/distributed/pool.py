"""Workers of one role: tasks by key, answers in the order of the keys, also when workers are lost.

A worker that is lost is started again, given the state before its oldest open task, and asked for
its open tasks again; so who dies, and when, changes no answer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raffia.distributed.engine import (
    ONE_CPU,
    Engine,
    Lost,
    Needs,
    RoleError,
    TaskError,
    Worker,
    Workers,
)
from raffia.tensordict.tensordict import TensorDict


def waiting_metrics(what: str, worker: str, seconds: float, restarts: int) -> dict[str, float]:
    """The names under which logs, views and reports find what waiting for workers has cost.

    >>> waiting_metrics("batches", "reanalyzer", 2.5, 1)
    {'waited_for_batches_seconds': 2.5, 'reanalyzer_restarts': 1.0}
    """
    return {
        f"waited_for_{what}_seconds": round(seconds, 3),
        f"{worker}_restarts": float(restarts),
    }


@dataclass
class _Task:
    key: int
    task: TensorDict
    weights: Any
    is_asked: bool = False


class Pool:
    """Workers of one role, each with its open tasks.

    state_of: the state before a worker's oldest open task, by the worker's index; what a new worker
        is given. None: the role has no state.
    max_restarts: of one worker without a task done in between; after one more the error says which
        task it was, and the worker's last words.
    patience: seconds without an answer after which a worker is taken for dead.

    >>> import torch
    >>> from raffia.distributed.engine import InlineEngine
    >>> pool = Pool(InlineEngine(), "raffia.distributed.check_engine:Counter", "{}", 2)
    >>> for key in range(3):
    ...     pool.ask(0, key, TensorDict(add=torch.tensor(1)))
    >>> [pool.take(0, key)["total"].item() for key in range(3)]
    [1, 2, 3]
    """

    def __init__(
        self,
        engine: Engine,
        role: str,
        config: str,
        num_workers: int,
        *,
        needs: Needs = ONE_CPU,
        state_of: Callable[[int], TensorDict] | None = None,
        max_restarts: int = 3,
        patience: float = 60.0,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers} must be at least 1")
        engine.require([Workers(role, num_workers, needs)])
        self.engine, self.role, self.config = engine, role, config
        self.num_workers, self.needs = num_workers, needs
        self.max_restarts, self.patience = max_restarts, patience
        self.num_restarts = 0
        self.seconds_waited = 0.0
        self.state_of = state_of
        self._workers: list[Worker | None] = [None] * num_workers
        self._was_lost = [False] * num_workers
        self._num_losses = [0] * num_workers  # at the oldest open task
        self._open: list[deque[_Task]] = [deque() for _ in range(num_workers)]

    def num_open(self, worker: int) -> int:
        """The number of open tasks of a worker."""
        return len(self._open[worker])

    def worker(self, index: int) -> Worker | None:
        """A worker, if it is running."""
        return self._workers[index]

    def metrics(self, what: str, worker: str) -> dict[str, float]:
        """Seconds spent waiting for answers, and restarts of workers, since the start.

        what, worker: names of the answers and of one worker.

        >>> from raffia.distributed.engine import InlineEngine
        >>> pool = Pool(InlineEngine(), "raffia.distributed.check_engine:Counter", "{}", 2)
        >>> pool.metrics("turns", "actor")
        {'waited_for_turns_seconds': 0.0, 'actor_restarts': 0.0}
        """
        return waiting_metrics(what, worker, self.seconds_waited, self.num_restarts)

    def ask(self, worker: int, key: int, task: TensorDict, weights: Any = None) -> None:
        """Ask for a task; the keys of each worker must increase."""
        tasks = self._open[worker]
        if tasks and tasks[-1].key >= key:
            raise ValueError(
                f"task {key} was asked for after task {tasks[-1].key}, but keys must increase"
            )
        tasks.append(_Task(key, task, weights))
        try:
            self._ask_open(worker)
        except Lost:
            self._lose(worker)  # it is started again when the answer is taken

    def take(self, worker: int, key: int) -> TensorDict:
        """The answer to a worker's oldest open task, which must be this one.

        Raises TaskError if the role raised an error, or if the worker was lost too often.
        """
        while True:
            found = self._taken(worker, key, None)
            if found is not None:
                return found

    def try_to_take(self, worker: int, key: int, seconds: float) -> TensorDict | None:
        """Like `take`, if the answer arrives within this time; otherwise None, and the task stays
        open.

        However long the task takes, the worker is not taken for dead.
        """
        return self._taken(worker, key, seconds)

    def _taken(self, worker: int, key: int, seconds: float | None) -> TensorDict | None:
        """The answer; None if it is not there yet, or the worker was lost."""
        tasks = self._open[worker]
        if not tasks or tasks[0].key != key:
            raise ValueError(f"worker {worker}: task {key} is not its oldest open task")
        began = time.monotonic()
        try:
            self._ask_open(worker)
            found = self._workers[worker]
            assert found is not None
            if seconds is not None and not found.poll(seconds):
                return None
            answer = found.take(self.patience)
        except Lost as error:
            self._lose(worker)
            self._num_losses[worker] += 1
            if self._num_losses[worker] > self.max_restarts:
                raise TaskError(
                    f"worker {worker} of {self.role} was lost {self._num_losses[worker]} times at "
                    f"task {key}, the last time with: {error}"
                ) from error
            return None
        except RoleError as error:
            name = f"{self.role.rpartition(':')[2]} {worker}"
            raise TaskError(f"{name}, task {key}: {error}") from error
        finally:
            self.seconds_waited += time.monotonic() - began
        self._num_losses[worker] = 0
        tasks.popleft()
        return answer

    def _ask_open(self, worker: int) -> None:
        """Start the worker if it is not running, and request its open tasks that were not
        requested.
        """
        found = self._workers[worker]
        if found is None:
            found = self.engine.start(self.role, self.config, worker, self.needs)
            self._workers[worker] = found
            self.num_restarts += self._was_lost[worker]
            self._was_lost[worker] = False
            for task in self._open[worker]:
                task.is_asked = False
            if self.state_of is not None:
                found.load(self.state_of(worker))
        for task in self._open[worker]:
            if not task.is_asked:
                found.ask(task.task, task.weights)
                task.is_asked = True

    def _lose(self, worker: int) -> None:
        self._was_lost[worker] = True
        self._forget(worker)

    def _forget(self, worker: int) -> None:
        found, self._workers[worker] = self._workers[worker], None
        if found is not None:
            found.close()

    def reset(self) -> None:
        """Drop all open tasks and end all workers; those that are needed are started again."""
        for worker in range(self.num_workers):
            self.drop(worker)

    def drop(self, worker: int) -> None:
        """Drop the open tasks of a worker and end it; if it is needed, it is started again."""
        self._open[worker].clear()
        self._num_losses[worker] = 0
        self._forget(worker)

    def close(self) -> None:
        """End all workers."""
        self.reset()
