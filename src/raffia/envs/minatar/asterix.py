"""Asterix on 10 x 10 cells.

Enemies and gold come in from the sides, one in a lane. Gold gives a reward of 1, an enemy ends the
game. With the steps they come sooner and move faster.
"""

from __future__ import annotations

from typing import Any

from raffia.envs.compiled import compiled
from raffia.envs.minatar.batch import MinAtarBatch
from raffia.envs.minatar.world import (
    DOWN,
    ENDED,
    LEFT,
    NONE,
    OWN,
    RIGHT,
    SIZE,
    UP,
    below,
    next_word,
    stuck_action,
)

__all__ = ["MinAtarAsterix"]

_LANES = 8  # rows 1..8 of the field
_X, _Y, _SPAWN_IN, _SPAWN_EVERY, _MOVE_IN, _MOVE_EVERY, _RAMP_IN, _RAMPS = range(OWN, OWN + 8)
_KIND = OWN + 8  # what is in each lane
_THEIR_X = _KIND + _LANES
_THEIR_STEP = _THEIR_X + _LANES  # 1 to the right, -1 to the left
_WORDS = _THEIR_STEP + _LANES
_NOTHING, _ENEMY, _GOLD = range(3)
_RAMP_EVERY = 102  # steps
_THIRD = 0x55555556  # of 2^32


@compiled
def _begin(world: Any) -> None:
    world[_X], world[_Y] = 5, 5
    world[_SPAWN_IN] = world[_SPAWN_EVERY] = 10
    world[_MOVE_IN] = world[_MOVE_EVERY] = 5
    world[_RAMP_IN] = _RAMP_EVERY


@compiled
def _spawn(world: Any) -> None:
    """Something new in a free lane, if there is one."""
    from_left = next_word(world) < 0x80000000
    kind = _GOLD if next_word(world) < _THIRD else _ENEMY
    num_free = 0
    for lane in range(_LANES):
        num_free += world[_KIND + lane] == _NOTHING
    if num_free == 0:
        return
    chosen = below(world, num_free)
    for lane in range(_LANES):
        if world[_KIND + lane] == _NOTHING:
            if chosen == 0:
                world[_KIND + lane] = kind
                world[_THEIR_X + lane] = 0 if from_left else SIZE - 1
                world[_THEIR_STEP + lane] = 1 if from_left else -1
                return
            chosen -= 1


@compiled
def _meet(world: Any) -> int:
    """What is where the player is: gold is taken, an enemy ends the game."""
    lane = world[_Y] - 1
    if world[_KIND + lane] == _NOTHING or world[_THEIR_X + lane] != world[_X]:
        return 0
    if world[_KIND + lane] == _ENEMY:
        world[ENDED] = 1
        return 0
    world[_KIND + lane] = _NOTHING
    return 1


@compiled
def _ramp(world: Any) -> None:
    """Every so often things come sooner, and every other time they move faster."""
    if world[_SPAWN_EVERY] == 1 and world[_MOVE_EVERY] == 1:
        return
    world[_RAMP_IN] -= 1
    if world[_RAMP_IN] == 0:
        world[_RAMP_IN] = _RAMP_EVERY
        if world[_RAMPS] % 2 == 1:
            world[_MOVE_EVERY] = max(1, world[_MOVE_EVERY] - 1)
        world[_SPAWN_EVERY] = max(1, world[_SPAWN_EVERY] - 1)
        world[_RAMPS] += 1


@compiled
def _act(world: Any, action: int, ramping: bool) -> int:
    if world[_SPAWN_IN] == 0:
        world[_SPAWN_IN] = world[_SPAWN_EVERY]
        _spawn(world)
    if action == LEFT or action == RIGHT:
        x = world[_X] + (1 if action == RIGHT else -1)
        world[_X] = min(max(x, 0), SIZE - 1)
    elif action == UP or action == DOWN:
        y = world[_Y] + (1 if action == DOWN else -1)
        world[_Y] = min(max(y, 1), _LANES)
    reward = _meet(world)
    if world[_MOVE_IN] == 0:
        world[_MOVE_IN] = world[_MOVE_EVERY]
        for lane in range(_LANES):
            world[_THEIR_X + lane] += world[_THEIR_STEP + lane]
            if world[_THEIR_X + lane] < 0 or world[_THEIR_X + lane] >= SIZE:
                world[_KIND + lane] = _NOTHING
        reward += _meet(world)
    world[_SPAWN_IN] -= 1
    world[_MOVE_IN] -= 1
    if ramping:
        _ramp(world)
    return reward


@compiled
def _draw(world: Any, planes: Any) -> None:
    planes[0, world[_Y], world[_X]] = 255
    for lane in range(_LANES):
        kind, x = world[_KIND + lane], world[_THEIR_X + lane]
        if kind != _NOTHING:
            planes[1 if kind == _ENEMY else 3, lane + 1, x] = 255
            behind = x - world[_THEIR_STEP + lane]
            if 0 <= behind < SIZE:
                planes[2, lane + 1, behind] = 255


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
        reward[i] = _act(world, stuck_action(world, action[i], sticky), ramping)
        _draw(world, planes[i])


class MinAtarAsterix(MinAtarBatch):
    """E games of Asterix, seen as planes: player, enemies, where they and gold were, gold.

    >>> game = MinAtarAsterix(2, difficulty_ramping=False)
    >>> state = game.reset(torch.tensor([0, 1]))
    >>> state["observation"].shape, game.spec.action
    (torch.Size([2, 4, 10, 10]), Discrete(n=5))
    """

    channels = ("player", "enemy", "trail", "gold")
    minimal_actions = (NONE, LEFT, UP, RIGHT, DOWN)

    def __init__(
        self,
        num_envs: int,
        *,
        sticky_actions: float = 0.1,
        difficulty_ramping: bool = True,
        all_actions: bool = False,
    ) -> None:
        super().__init__(
            num_envs,
            "asterix",
            num_words=_WORDS,
            begin_rows=_begin_rows,
            step_rows=_step_rows,
            sticky_actions=sticky_actions,
            all_actions=all_actions,
            ramping=difficulty_ramping,
        )
