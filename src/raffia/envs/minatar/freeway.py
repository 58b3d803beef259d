"""Freeway on 10 x 10 cells.

A chicken crosses eight lanes of cars, upward, for a reward of 1 each time, after which all cars get
new speeds. A car that meets it sends it back to the start. After 2501 steps the episode is over:
nothing in the game ends there, so that is a truncation.
"""

from __future__ import annotations

from typing import Any

from raffia.envs.compiled import compiled
from raffia.envs.minatar.batch import MinAtarBatch
from raffia.envs.minatar.world import (
    DOWN,
    NONE,
    OWN,
    SIZE,
    TIME_OVER,
    UP,
    below,
    next_word,
    stuck_action,
)

__all__ = ["MinAtarFreeway"]

_COLUMN = 4  # where the chicken walks
_START = SIZE - 1
_REST = 3  # steps from one move of the chicken to the next
_TIME = 2501  # steps
_LANES = 8  # rows 1..8 of the field
_SLOWEST = 5  # steps from one move of a car to the next, 1 is the fastest
_ROW, _RESTING, _TIME_LEFT, _X = range(OWN, OWN + 4)
_WAIT = _X + _LANES  # steps until a car moves
_PACE = _WAIT + _LANES  # how long it waits each time; negative where it drives to the left
_WORDS = _PACE + _LANES


@compiled
def _new_cars(world: Any) -> None:
    """Speeds and directions; the cars stay where they are."""
    for lane in range(_LANES):
        world[_WAIT + lane] = world[_PACE + lane] = 1 + below(world, _SLOWEST)
    for lane in range(_LANES):
        if next_word(world) < 0x80000000:
            world[_PACE + lane] = -world[_PACE + lane]


@compiled
def _begin(world: Any) -> None:
    world[_ROW], world[_RESTING], world[_TIME_LEFT] = _START, _REST, _TIME
    _new_cars(world)


@compiled
def _act(world: Any, action: int) -> int:
    if (action == UP or action == DOWN) and world[_RESTING] == 0:
        world[_RESTING] = _REST
        world[_ROW] = min(_START, world[_ROW] + (1 if action == DOWN else -1))
    reward = 0
    if world[_ROW] == 0:
        reward = 1
        world[_ROW] = _START
        _new_cars(world)
    for lane in range(_LANES):
        here = world[_ROW] == lane + 1
        hit = here and world[_X + lane] == _COLUMN
        if world[_WAIT + lane] == 0:
            pace = world[_PACE + lane]
            world[_WAIT + lane] = abs(pace)
            world[_X + lane] = (world[_X + lane] + (1 if pace > 0 else SIZE - 1)) % SIZE
            hit = hit or (here and world[_X + lane] == _COLUMN)
        else:
            world[_WAIT + lane] -= 1
        if hit:
            world[_ROW] = _START
    world[_RESTING] = max(0, world[_RESTING] - 1)
    world[_TIME_LEFT] -= 1
    world[TIME_OVER] = world[_TIME_LEFT] == 0
    return reward


@compiled
def _draw(world: Any, planes: Any) -> None:
    planes[0, world[_ROW], _COLUMN] = 255
    for lane in range(_LANES):
        x, pace = world[_X + lane], world[_PACE + lane]
        planes[1, lane + 1, x] = 255
        behind = (x + (SIZE - 1 if pace > 0 else 1)) % SIZE
        planes[1 + abs(pace), lane + 1, behind] = 255


@compiled
def _begin_rows(worlds: Any, rows: Any, planes: Any) -> None:
    for i in range(len(rows)):
        _begin(worlds[rows[i]])
        _draw(worlds[rows[i]], planes[i])


@compiled
def _step_rows(
    worlds: Any, rows: Any, action: Any, sticky: float, ramping: bool, reward: Any, planes: Any
) -> None:
    for i in range(len(rows)):
        world = worlds[rows[i]]
        reward[i] = _act(world, stuck_action(world, action[i], sticky))
        _draw(world, planes[i])


class MinAtarFreeway(MinAtarBatch):
    """E games of Freeway, seen as planes: chicken, cars, and five of where cars were, by speed.

    The original says that the task has ended when its time is over; here it is truncated.

    >>> game = MinAtarFreeway(2)
    >>> state = game.reset(torch.tensor([0, 1]))
    >>> state["observation"].shape
    torch.Size([2, 7, 10, 10])
    >>> int((state["observation"][0, 1] > 0).sum())  # cars
    8
    """

    channels = ("chicken", "car", "speed 1", "speed 2", "speed 3", "speed 4", "speed 5")
    minimal_actions = (NONE, UP, DOWN)

    def __init__(
        self, num_envs: int, *, sticky_actions: float = 0.1, all_actions: bool = False
    ) -> None:
        super().__init__(
            num_envs,
            "freeway",
            num_words=_WORDS,
            begin_rows=_begin_rows,
            step_rows=_step_rows,
            sticky_actions=sticky_actions,
            all_actions=all_actions,
        )
