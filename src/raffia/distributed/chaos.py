"""An engine whose workers answer late, lose answers and die, by a seed: for tests of any role."""

from __future__ import annotations

import random
from typing import Any

from raffia.distributed.engine import (
    ONE_CPU,
    InlineEngine,
    Lost,
    Needs,
    RoleError,
    Worker,
)
from raffia.functional.seeds import derive_seed
from raffia.tensordict.tensordict import TensorDict


class ChaosEngine(InlineEngine):
    """An `InlineEngine` with faults that are drawn from a seed.

    lost: probability that a worker is gone when an answer is taken, before the task was done.
    wasted: probability that it is gone after the task was done, with the answer.
    eager: probability that open tasks are done when another is asked, not when they are taken.

    >>> import torch
    >>> engine = ChaosEngine(seed=1, lost=1.0)
    >>> worker = engine.start("raffia.distributed.check_engine:Counter", "{}", 0)
    >>> worker.ask(TensorDict(add=torch.tensor(5)))
    >>> worker.take(1.0)
    Traceback (most recent call last):
    ...
    raffia.distributed.engine.Lost: worker 0 is gone
    """

    def __init__(
        self, seed: int, *, lost: float = 0.1, wasted: float = 0.1, eager: float = 0.5
    ) -> None:
        self.seed, self.lost, self.wasted, self.eager = seed, lost, wasted, eager
        self.num_started = self.num_lost = 0

    def start(self, role: str, config: str, index: int, needs: Needs = ONE_CPU) -> ChaosWorker:
        """Start a worker whose faults are drawn from a seed for this worker and this start."""
        self.num_started += 1
        draw = random.Random(derive_seed(self.seed, "worker", index, self.num_started))
        return ChaosWorker(self, super().start(role, config, index, needs), index, draw)


class ChaosWorker:
    """A worker with faults; see `ChaosEngine`."""

    def __init__(
        self, engine: ChaosEngine, worker: Worker, index: int, draw: random.Random
    ) -> None:
        self._engine, self._worker, self._index, self._draw = engine, worker, index, draw
        self._done: list[TensorDict | RoleError] = []
        self._num_open = 0
        self._is_gone = False

    @property
    def is_alive(self) -> bool:
        """Whether it was neither lost nor closed."""
        return not self._is_gone

    def load(self, state: TensorDict) -> None:
        """Set the role's state before the next task."""
        self._worker.load(state)

    def ask(self, task: TensorDict, weights: Any = None) -> None:
        """Ask; what is open may be done already, before anybody takes it."""
        self._refuse_if_gone()
        self._worker.ask(task, weights)
        self._num_open += 1
        if self._draw.random() < self._engine.eager:
            self._do(self._num_open)

    def _do(self, num: int) -> None:
        for _ in range(num):
            try:
                self._done.append(self._worker.take(1.0))
            except RoleError as error:
                self._done.append(error)
        self._num_open -= num

    def take(self, seconds: float) -> TensorDict:
        """Return the oldest answer, unless a drawn fault loses it or the worker."""
        self._refuse_if_gone()
        if self._draw.random() < self._engine.lost:
            self._die()
        if not self._done:
            self._do(1)
        if self._draw.random() < self._engine.wasted:
            self._die()
        found = self._done.pop(0)
        if isinstance(found, RoleError):
            raise found
        return found

    def poll(self, seconds: float) -> bool:
        """True: what is late is late in `take`."""
        return True

    def _die(self) -> None:
        self._engine.num_lost += 1
        self._worker.close()
        self._is_gone = True
        self._refuse_if_gone()

    def _refuse_if_gone(self) -> None:
        if self._is_gone:
            raise Lost(f"worker {self._index} is gone")

    def close(self) -> None:
        """Drop what is open."""
        self._is_gone = True
        self._worker.close()
