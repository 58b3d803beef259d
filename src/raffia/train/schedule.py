"""`Schedule`: when steps are played, in a run that learns while it plays. Arithmetic only."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When each turn is played, with which weights, and when it is taken in.

    Update u comes after random_env_steps + (u + 1) / updates_per_env_step steps of all environments
    together, or after num_env_steps if that is less.

    >>> schedule = Schedule(turn_size=8, random_env_steps=16, num_env_steps=80,
    ...                     updates_per_env_step=0.5, ahead=4, weights_every=2)
    >>> schedule.steps_due(update=0)
    18
    >>> [schedule.due(turn) for turn in range(6)], [schedule.version(turn) for turn in range(6)]
    ([0, 0, 0, 4, 8, 12], [0, 0, 0, 0, 4, 8])
    """

    random_env_steps: int = 0  # these are played before anything is learnt
    num_env_steps: int
    updates_per_env_step: float = 1.0
    turn_size: int = 1  # steps of all environments together
    ahead: int = 0  # updates from when a turn is asked for to when it is taken in
    weights_every: int = 1  # updates from one version of the weights to the next

    @property
    def num_updates(self) -> int:
        """How many updates go with all of the steps."""
        return round((self.num_env_steps - self.random_env_steps) * self.updates_per_env_step)

    def steps_due(self, update: int) -> int:
        """How many steps of all environments are played before this update."""
        learnt = math.ceil((update + 1) / self.updates_per_env_step)
        return min(self.num_env_steps, self.random_env_steps + learnt)

    def due(self, turn: int) -> int | None:
        """The first update before which the turn is played; None: before none."""
        before = turn * self.turn_size
        if before >= self.num_env_steps:
            return None
        behind = max(0, before - self.random_env_steps)
        update = max(0, math.floor(behind * self.updates_per_env_step) - 2)
        while self.steps_due(update) <= before:
            update += 1
        return update

    def version(self, turn: int) -> int | None:
        """The update after which the turn's weights are published, and it is asked for."""
        due = self.due(turn)
        if due is None:
            return None
        return max(0, due - self.ahead) // self.weights_every * self.weights_every
