"""Freeway on 10 x 10 cells.

A chicken crosses eight lanes of cars, upward, for a reward of 1 each time, after which all cars get
new speeds. A car that meets it sends it back to the start. After 2501 steps the episode is over:
nothing in the game ends there, so that is a truncation.
"""

from __future__ import annotations

from typing import Any

from raffia.envs.minatar.game import (
    DOWN,
    NONE,
    OWN,
    SIZE,
    TIME_OVER,
    UP,
    MinAtarBatch,
    below,
    compiled_loops,
    next_word,
)
from raffia.jit.kernel import kernel

_COLUMN = 4  # where the chicken moves
_START = SIZE - 1
_REST = 3  # steps from one move of the chicken to the next
_TIME = 2501  # steps
_LANES = 8  # rows 1..8 of the field
_SLOWEST = 5  # steps from one move of a car to the next, 1 is the fastest
_ROW, _RESTING, _TIME_LEFT, _X = range(OWN, OWN + 4)
_WAIT = _X + _LANES  # steps until a car moves
_PACE = _WAIT + _LANES  # how long it waits each time; negative where it drives to the left
_WORDS = _PACE + _LANES


@kernel
def _new_cars(game: Any) -> None:
    """Speeds and directions; the cars stay where they are."""
    for lane in range(_LANES):
        game[_WAIT + lane] = game[_PACE + lane] = 1 + below(game, _SLOWEST)
    for lane in range(_LANES):
        if next_word(game) < 0x80000000:
            game[_PACE + lane] = -game[_PACE + lane]


@kernel
def _begin(game: Any) -> None:
    game[_ROW], game[_RESTING], game[_TIME_LEFT] = _START, _REST, _TIME
    _new_cars(game)


@kernel
def _act(game: Any, action: int, ramping: bool) -> int:
    if (action == UP or action == DOWN) and game[_RESTING] == 0:
        game[_RESTING] = _REST
        game[_ROW] = min(_START, game[_ROW] + (1 if action == DOWN else -1))
    reward = 0
    if game[_ROW] == 0:
        reward = 1
        game[_ROW] = _START
        _new_cars(game)
    for lane in range(_LANES):
        here = game[_ROW] == lane + 1
        hit = here and game[_X + lane] == _COLUMN
        if game[_WAIT + lane] == 0:
            pace = game[_PACE + lane]
            game[_WAIT + lane] = abs(pace)
            game[_X + lane] = (game[_X + lane] + (1 if pace > 0 else SIZE - 1)) % SIZE
            hit = hit or (here and game[_X + lane] == _COLUMN)
        else:
            game[_WAIT + lane] -= 1
        if hit:
            game[_ROW] = _START
    game[_RESTING] = max(0, game[_RESTING] - 1)
    game[_TIME_LEFT] -= 1
    game[TIME_OVER] = game[_TIME_LEFT] == 0
    return reward


@kernel
def _draw(game: Any, planes: Any) -> None:
    planes[0, game[_ROW], _COLUMN] = 255
    for lane in range(_LANES):
        x, pace = game[_X + lane], game[_PACE + lane]
        planes[1, lane + 1, x] = 255
        behind = (x + (SIZE - 1 if pace > 0 else 1)) % SIZE
        planes[1 + abs(pace), lane + 1, behind] = 255


class MinAtarFreeway(MinAtarBatch):
    """E games of Freeway with planes as observations.

    They are the chicken, the cars, and where cars were, one plane for each of five speeds.

    The original reports that the task has ended when its time is over; here it is truncated.

    >>> game = MinAtarFreeway(2)
    >>> state = game.reset(torch.tensor([0, 1]))
    >>> state["observation"].shape
    torch.Size([2, 7, 10, 10])
    >>> int((state["observation"][0, 1] > 0).sum())  # cars
    8
    """

    name = "freeway"
    channels = ("chicken", "car", "speed 1", "speed 2", "speed 3", "speed 4", "speed 5")
    minimal_actions = (NONE, UP, DOWN)
    num_words = _WORDS
    begin_rows, step_rows = map(staticmethod, compiled_loops(name, _begin, _act, _draw))
