"""The training loop: take a batch, compute the gradients, apply them, and run tasks when they are
due."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from raffia.learner import Learner, step_of
from raffia.tensordict.tensordict import TensorDict
from raffia.train.metrics import PhaseClock
from raffia.train.stream import Stream


class Task(Protocol):
    """A task between updates: evaluate, log, save, evolve."""

    def __call__(self, state: TensorDict) -> TensorDict | None:
        """Do the task if it is due; returns a new state, or None to continue with this one."""


class Ended(Exception):
    """Raised by a task that ends the run; the state is the one that it was given.

    >>> Ended("target").reason
    'target'
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


Check = Callable[[TensorDict, TensorDict, TensorDict, TensorDict], None]
OnMetrics = Callable[[TensorDict], None]


def train(
    learner: Learner,
    state: TensorDict,
    stream: Stream,
    *,
    num_updates: int,
    clock: PhaseClock,
    check: Check,  # (state, batch, update, metrics): raises if something is not finite
    on_metrics: OnMetrics,  # gets the metrics of each update
    tasks: Sequence[Task] = (),
    stop: Callable[[], bool] = lambda: False,
) -> tuple[TensorDict, str]:
    """Update until `num_updates` were made; gives the state, and the reason of the end:
    ""finished", "stopped", or the reason that a task gave.

    >>> class Count:  # a learner that counts
    ...     def init(self, seed):
    ...         return TensorDict(step=torch.tensor(0))
    ...     def grads(self, state, batch):
    ...         return TensorDict(), TensorDict()
    ...     def apply(self, state, update):
    ...         return TensorDict(step=state["step"] + 1)
    >>> from itertools import repeat
    >>> from raffia.train.metrics import PhaseClock
    >>> from raffia.train.stream import OfflineStream
    >>> learner = Count()
    >>> state, reason = train(
    ...     learner, learner.init(seed=0), OfflineStream(lambda update: repeat(TensorDict())),
    ...     num_updates=3, clock=PhaseClock(), check=lambda *given: None,
    ...     on_metrics=lambda metrics: None)
    >>> state["step"], reason
    (tensor(3), 'finished')
    """
    while step_of(state) < num_updates:
        if stop():
            return state, "stopped"
        batch = stream.next(state)
        with clock.phase("learn"):
            update, metrics = learner.grads(state, batch)
            check(state, batch, update, metrics)
            state = learner.apply(state, update)
        stream.on_update(batch, metrics)
        on_metrics(metrics)
        try:
            for task in tasks:
                changed = task(state)
                state = state if changed is None else changed
        except Ended as ended:
            return state, ended.reason
    return state, "finished"
