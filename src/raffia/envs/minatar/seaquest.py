"""Seaquest on 10 x 10 cells.

A submarine shoots fish and enemy submarines for a reward of 1 each, and takes divers aboard. Air
lasts for 200 steps; to come up without a diver ends the game, with fewer than six costs one, with
six it is rewarded by the air that is left. Each time up, enemies come sooner, and every other time
they move faster, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from raffia.envs.compiled import compiled
from raffia.envs.minatar.batch import MinAtarBatch
from raffia.envs.minatar.swarm import FIELDS, SHOOT, STEP, WAIT, X, Y, add, find, item, remove
from raffia.envs.minatar.world import (
    DOWN,
    ENDED,
    FIRE,
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

__all__ = ["MinAtarSeaquest"]

_X, _Y, _FACING, _AIR, _ABOARD, _ABOVE, _RELOAD = range(OWN, OWN + 7)
_ENEMY_IN, _ENEMY_EVERY, _DIVER_IN, _MOVE_EVERY, _RAMPS = range(OWN + 7, OWN + 12)
# A thing stays at most 60 steps (an enemy at its slowest), 30 when enemies come at each step; so
# there are never as many as there is room for.
_MANY, _FEW = 64, 8
# Where the lists begin; numba would compile what is given a plain 19 anew for each such number.
_SHOTS = np.int64(OWN + 12)
_BULLETS = _SHOTS + 1 + FIELDS * _FEW
_DIVERS = _BULLETS + 1 + FIELDS * _MANY  # from here on they leave a trail
_FISH = _DIVERS + 1 + FIELDS * _FEW
_SUBS = _FISH + 1 + FIELDS * _MANY
_WORDS = int(_SUBS) + 1 + FIELDS * _MANY
_AIR_FULL, _ABOARD_FULL = 200, 6
_RELOADING, _ENEMY_RELOADING = 5, np.int64(10)  # steps from one shot to the next
_ENEMY_AT_FIRST, _MOVE_AT_FIRST, _DIVER_EVERY = 20, 5, 30  # steps
_DIVER_MOVE = np.int64(5)
_NEVER = np.int64(0)
_HALF, _THIRD = 0x80000000, 0x55555556  # of 2^32


@compiled
def _begin(world: Any) -> None:
    world[_X], world[_FACING], world[_ABOVE] = 5, -1, 1
    world[_AIR] = _AIR_FULL
    world[_ENEMY_IN] = world[_ENEMY_EVERY] = _ENEMY_AT_FIRST
    world[_DIVER_IN] = _DIVER_EVERY
    world[_MOVE_EVERY] = _MOVE_AT_FIRST


@compiled
def _against(world: Any, base: int, y: int, step: int) -> bool:
    """Whether something of a list swims the other way in this row."""
    for number in range(world[base]):
        at = item(base, number)
        if world[at + Y] == y and world[at + STEP] != step:
            return True
    return False


@compiled
def _spawn(world: Any) -> None:
    """A fish or a submarine, unless one of its row comes the other way; and a diver."""
    if world[_ENEMY_IN] == 0:
        world[_ENEMY_IN] = world[_ENEMY_EVERY]
        step = 1 if next_word(world) < _HALF else -1
        is_sub = next_word(world) < _THIRD
        y = 1 + below(world, 8)
        if not _against(world, _SUBS, y, step) and not _against(world, _FISH, y, step):
            x = 0 if step > 0 else SIZE - 1
            base, shoot = (_SUBS, _ENEMY_RELOADING) if is_sub else (_FISH, _NEVER)
            add(world, base, x, y, step, world[_MOVE_EVERY], shoot)
    if world[_DIVER_IN] == 0:
        world[_DIVER_IN] = _DIVER_EVERY
        step = 1 if next_word(world) < _HALF else -1
        y = 1 + below(world, 8)
        x = 0 if step > 0 else SIZE - 1
        add(world, _DIVERS, x, y, step, _DIVER_MOVE, _NEVER)


@compiled
def _steer(world: Any, action: int) -> None:
    if action == FIRE and world[_RELOAD] == 0:
        world[_RELOAD] = _RELOADING
        add(world, _SHOTS, world[_X], world[_Y], world[_FACING], _NEVER, _NEVER)
    elif action == LEFT or action == RIGHT:
        world[_FACING] = 1 if action == RIGHT else -1
        world[_X] = min(max(world[_X] + world[_FACING], 0), SIZE - 1)
    elif action == UP or action == DOWN:
        world[_Y] = min(max(world[_Y] + (1 if action == DOWN else -1), 0), SIZE - 2)


@compiled
def _meets_us(world: Any, at: int) -> bool:
    return world[at + X] == world[_X] and world[at + Y] == world[_Y]


@compiled
def _moved(world: Any, base: int, number: int) -> bool:
    """Move a thing one cell on; False if it has left the field, and is gone."""
    at = item(base, number)
    world[at + X] += world[at + STEP]
    if 0 <= world[at + X] < SIZE:
        return True
    remove(world, base, number)
    return False


@compiled
def _move_shots(world: Any) -> int:
    reward = 0
    for number in range(world[_SHOTS] - 1, -1, -1):
        if _moved(world, _SHOTS, number):
            at = item(_SHOTS, number)
            for base in (_FISH, _SUBS):
                target = find(world, base, world[at + X], world[at + Y])
                if target >= 0:
                    remove(world, base, target)
                    remove(world, _SHOTS, number)
                    reward += 1
                    break
    return reward


@compiled
def _move_divers(world: Any) -> None:
    for number in range(world[_DIVERS] - 1, -1, -1):
        at = item(_DIVERS, number)
        room = world[_ABOARD] < _ABOARD_FULL
        taken = room and _meets_us(world, at)
        if not taken:
            world[at + WAIT] -= 1
            if world[at + WAIT] < 0:
                world[at + WAIT] = _DIVER_MOVE
                taken = _moved(world, _DIVERS, number) and room and _meets_us(world, at)
        if taken:
            world[_ABOARD] += 1
            remove(world, _DIVERS, number)


@compiled
def _shoot(world: Any, at: int) -> None:
    world[at + SHOOT] -= 1
    if world[at + SHOOT] < 0:
        world[at + SHOOT] = _ENEMY_RELOADING
        add(world, _BULLETS, world[at + X], world[at + Y], world[at + STEP], _NEVER, _NEVER)


@compiled
def _move_enemies(world: Any, base: int) -> int:
    """Fish or submarines: they end the game where we are, and run into our shots."""
    reward = 0
    for number in range(world[base] - 1, -1, -1):
        at = item(base, number)
        gone = False
        if _meets_us(world, at):
            world[ENDED] = 1
        world[at + WAIT] -= 1
        if world[at + WAIT] < 0:
            world[at + WAIT] = world[_MOVE_EVERY]
            world[at + X] += world[at + STEP]
            shot = find(world, _SHOTS, world[at + X], world[at + Y])
            if not 0 <= world[at + X] < SIZE:
                gone = True
            elif _meets_us(world, at):
                world[ENDED] = 1
            elif shot >= 0:
                remove(world, _SHOTS, shot)
                gone = True
                reward += 1
        if base == _SUBS:
            _shoot(world, at)  # even as it is hit
        if gone:
            remove(world, base, number)
    return reward


@compiled
def _move_bullets(world: Any) -> None:
    for number in range(world[_BULLETS] - 1, -1, -1):
        at = item(_BULLETS, number)
        if _meets_us(world, at):
            world[ENDED] = 1
        if _moved(world, _BULLETS, number) and _meets_us(world, at):
            world[ENDED] = 1


@compiled
def _breathe(world: Any, ramping: bool) -> int:
    """Use air below; at the surface bring the divers home."""
    if world[_AIR] <= 0:
        world[ENDED] = 1
    if world[_Y] > 0:
        world[_AIR] -= 1
        world[_ABOVE] = 0
        return 0
    if world[_ABOVE]:
        return 0
    if world[_ABOARD] == 0:
        world[ENDED] = 1
        return 0
    reward = 0
    world[_ABOVE] = 1
    if world[_ABOARD] == _ABOARD_FULL:
        reward = world[_AIR] * 10 // _AIR_FULL
        world[_ABOARD] = 0
    world[_ABOARD] -= 1  # below 0 after six were brought home, as in the original
    world[_AIR] = _AIR_FULL
    if ramping and (world[_ENEMY_EVERY] > 1 or world[_MOVE_EVERY] > 2):
        if world[_RAMPS] % 2 == 1:
            world[_MOVE_EVERY] = max(2, world[_MOVE_EVERY] - 1)
        world[_ENEMY_EVERY] = max(1, world[_ENEMY_EVERY] - 1)
        world[_RAMPS] += 1
    return reward


@compiled
def _act(world: Any, action: int, ramping: bool) -> int:
    _spawn(world)
    _steer(world, action)
    reward = _move_shots(world)
    _move_divers(world)
    reward += _move_enemies(world, _SUBS)
    _move_bullets(world)
    reward += _move_enemies(world, _FISH)
    world[_ENEMY_IN] = max(0, world[_ENEMY_IN] - 1)
    world[_DIVER_IN] = max(0, world[_DIVER_IN] - 1)
    world[_RELOAD] = max(0, world[_RELOAD] - 1)
    return reward + _breathe(world, ramping)


@compiled
def _draw_list(world: Any, base: int, plane: Any, trail: Any) -> None:
    for number in range(world[base]):
        at = item(base, number)
        x, y = world[at + X], world[at + Y]
        plane[y, x] = 255
        behind = x - world[at + STEP]
        if base >= _DIVERS and 0 <= behind < SIZE:
            trail[y, behind] = 255


@compiled
def _draw(world: Any, planes: Any) -> None:
    planes[0, world[_Y], world[_X]] = 255
    planes[1, world[_Y], world[_X] - world[_FACING]] = 255
    _draw_list(world, _SHOTS, planes[2], planes[3])
    _draw_list(world, _BULLETS, planes[4], planes[3])
    _draw_list(world, _FISH, planes[5], planes[3])
    _draw_list(world, _SUBS, planes[6], planes[3])
    _draw_list(world, _DIVERS, planes[9], planes[3])
    for column in range(max(0, world[_AIR]) * SIZE // _AIR_FULL):
        planes[7, SIZE - 1, column] = 255
    for column in range(SIZE - 1 - max(0, world[_ABOARD]), SIZE - 1):
        planes[8, SIZE - 1, column] = 255


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


class MinAtarSeaquest(MinAtarBatch):
    """E games of Seaquest, seen as ten planes.

    They are the submarine's front and back, its bullets, where enemies and divers were, enemy
    bullets, fish, enemy submarines, the gauges of air and of divers aboard, divers.

    >>> game = MinAtarSeaquest(2)
    >>> state = game.reset(torch.tensor([0, 1]))
    >>> state["observation"].shape, game.spec.action
    (torch.Size([2, 10, 10, 10]), Discrete(n=6))
    """

    channels = (
        *("submarine front", "submarine back", "friendly bullet", "trail", "enemy bullet"),
        *("enemy fish", "enemy submarine", "air", "divers aboard", "diver"),
    )
    minimal_actions = (NONE, LEFT, UP, RIGHT, DOWN, FIRE)

    def __init__(
        self, num_envs: int, *, sticky_actions: float = 0.1, difficulty_ramping: bool = True
    ) -> None:
        super().__init__(
            num_envs,
            "seaquest",
            num_words=_WORDS,
            begin_rows=_begin_rows,
            step_rows=_step_rows,
            sticky_actions=sticky_actions,
            all_actions=True,
            ramping=difficulty_ramping,
        )
