"""Asterix on 10 x 10 cells.

Enemies and gold come in from the sides, one in a lane. Gold gives a reward of 1, an enemy ends the
game. With the steps they come sooner and move faster.
"""

from __future__ import annotations

from typing import Any

from raffia.envs.minatar.game import (
    DOWN,
    ENDED,
    LEFT,
    NONE,
    OWN,
    RIGHT,
    SIZE,
    UP,
    RampingBatch,
    below,
    compiled_loops,
    next_word,
)
from raffia.jit.kernel import kernel

_LANES = 8  # rows 1..8 of the field
_X, _Y, _SPAWN_IN, _SPAWN_EVERY, _MOVE_IN, _MOVE_EVERY, _RAMP_IN, _RAMPS = range(OWN, OWN + 8)
_KIND = OWN + 8  # what is in each lane
_THEIR_X = _KIND + _LANES
_THEIR_STEP = _THEIR_X + _LANES  # 1 to the right, -1 to the left
_WORDS = _THEIR_STEP + _LANES
_NOTHING, _ENEMY, _GOLD = range(3)
_RAMP_EVERY = 102  # steps
_THIRD = 0x55555556  # of 2^32


@kernel
def _begin(game: Any) -> None:
    game[_X], game[_Y] = 5, 5
    game[_SPAWN_IN] = game[_SPAWN_EVERY] = 10
    game[_MOVE_IN] = game[_MOVE_EVERY] = 5
    game[_RAMP_IN] = _RAMP_EVERY


@kernel
def _spawn(game: Any) -> None:
    """Something new in a free lane, if there is one."""
    from_left = next_word(game) < 0x80000000
    kind = _GOLD if next_word(game) < _THIRD else _ENEMY
    num_free = 0
    for lane in range(_LANES):
        num_free += game[_KIND + lane] == _NOTHING
    if num_free == 0:
        return
    chosen = below(game, num_free)
    for lane in range(_LANES):
        if game[_KIND + lane] == _NOTHING:
            if chosen == 0:
                game[_KIND + lane] = kind
                game[_THEIR_X + lane] = 0 if from_left else SIZE - 1
                game[_THEIR_STEP + lane] = 1 if from_left else -1
                return
            chosen -= 1


@kernel
def _meet(game: Any) -> int:
    """Handle what is at the player's position: gold is collected, an enemy ends the game."""
    lane = game[_Y] - 1
    if game[_KIND + lane] == _NOTHING or game[_THEIR_X + lane] != game[_X]:
        return 0
    if game[_KIND + lane] == _ENEMY:
        game[ENDED] = 1
        return 0
    game[_KIND + lane] = _NOTHING
    return 1


@kernel
def _ramp(game: Any) -> None:
    """Raise the difficulty at intervals: things come sooner, and every other time move faster."""
    if game[_SPAWN_EVERY] == 1 and game[_MOVE_EVERY] == 1:
        return
    game[_RAMP_IN] -= 1
    if game[_RAMP_IN] == 0:
        game[_RAMP_IN] = _RAMP_EVERY
        if game[_RAMPS] % 2 == 1:
            game[_MOVE_EVERY] = max(1, game[_MOVE_EVERY] - 1)
        game[_SPAWN_EVERY] = max(1, game[_SPAWN_EVERY] - 1)
        game[_RAMPS] += 1


@kernel
def _act(game: Any, action: int, ramping: bool) -> int:
    if game[_SPAWN_IN] == 0:
        game[_SPAWN_IN] = game[_SPAWN_EVERY]
        _spawn(game)
    if action == LEFT or action == RIGHT:
        x = game[_X] + (1 if action == RIGHT else -1)
        game[_X] = min(max(x, 0), SIZE - 1)
    elif action == UP or action == DOWN:
        y = game[_Y] + (1 if action == DOWN else -1)
        game[_Y] = min(max(y, 1), _LANES)
    reward = _meet(game)
    if game[_MOVE_IN] == 0:
        game[_MOVE_IN] = game[_MOVE_EVERY]
        for lane in range(_LANES):
            game[_THEIR_X + lane] += game[_THEIR_STEP + lane]
            if game[_THEIR_X + lane] < 0 or game[_THEIR_X + lane] >= SIZE:
                game[_KIND + lane] = _NOTHING
        reward += _meet(game)
    game[_SPAWN_IN] -= 1
    game[_MOVE_IN] -= 1
    if ramping:
        _ramp(game)
    return reward


@kernel
def _draw(game: Any, planes: Any) -> None:
    planes[0, game[_Y], game[_X]] = 255
    for lane in range(_LANES):
        kind, x = game[_KIND + lane], game[_THEIR_X + lane]
        if kind != _NOTHING:
            planes[1 if kind == _ENEMY else 3, lane + 1, x] = 255
            behind = x - game[_THEIR_STEP + lane]
            if 0 <= behind < SIZE:
                planes[2, lane + 1, behind] = 255


class MinAtarAsterix(RampingBatch):
    """E games of Asterix with planes as observations.

    They are the player, the enemies, where enemies and gold were, the gold.

    >>> game = MinAtarAsterix(2, difficulty_ramping=False)
    >>> state = game.reset(torch.tensor([0, 1]))
    >>> state["observation"].shape, game.spec.action
    (torch.Size([2, 4, 10, 10]), Discrete(n=5))
    """

    name = "asterix"
    channels = ("player", "enemy", "trail", "gold")
    minimal_actions = (NONE, LEFT, UP, RIGHT, DOWN)
    num_words = _WORDS
    begin_rows, step_rows = map(staticmethod, compiled_loops(name, _begin, _act, _draw))
