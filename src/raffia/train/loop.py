"""The training loop: make a step, then run the tasks that are due."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from raffia.learner import step_of
from raffia.tensordict.tensordict import TensorDict

Step = Callable[[TensorDict], tuple[TensorDict, TensorDict]]  # a state -> the next one, metrics


class Task(Protocol):
    """A task between updates: evaluate, log, save, evolve."""

    def __call__(self, state: TensorDict, metrics: TensorDict) -> TensorDict | None:
        """Do the task if it is due; returns a new state, or None to continue with this one.

        metrics: those of the update that gave the state.
        """


class Ended(Exception):
    """Raised by a task that ends the run; the state is the one that it was given.

    >>> Ended("target").reason
    'target'
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def train(
    state: TensorDict,
    step: Step,
    *,
    num_updates: int,
    every: Sequence[Task] = (),
    stop: Callable[[], bool] = lambda: False,
) -> tuple[TensorDict, str]:
    """Make steps until `num_updates` were made; gives the state, and the reason of the end:
    "finished", "stopped", or the reason that a task gave.

    state: a learner's; its "step" says how many updates were made.
    every: tasks, which are run after each update.

    >>> def count(state):
    ...     return TensorDict(step=state["step"] + 1), TensorDict(loss=torch.tensor(0.5))
    >>> state, reason = train(TensorDict(step=torch.tensor(0)), count, num_updates=3)
    >>> state["step"], reason
    (tensor(3), 'finished')
    """
    while step_of(state) < num_updates:
        if stop():
            return state, "stopped"
        state, metrics = step(state)
        try:
            for task in every:
                changed = task(state, metrics)
                state = state if changed is None else changed
        except Ended as ended:
            return state, ended.reason
    return state, "finished"
