"""Space Invaders on 10 x 10 cells.

A block of aliens marches to and fro, and a row down at each end; the nearest to the cannon shoots.
Each that is shot gives a reward of 1; the fewer are left, the faster they march, and each new wave
is a little faster than the last. A bullet or an alien that reaches the cannon ends the game, and so
does a row too low. Chance plays no part but in sticky actions.
"""

from __future__ import annotations

from typing import Any

from raffia.envs.compiled import compiled
from raffia.envs.minatar.batch import MinAtarBatch
from raffia.envs.minatar.world import (
    ENDED,
    FIRE,
    LEFT,
    NONE,
    OWN,
    RIGHT,
    SIZE,
    stuck_action,
)

__all__ = ["MinAtarSpaceInvaders"]

# Aliens and bullets are words of ten bits, one for each row of the field; bit x is column x.
_CANNON, _TO_RIGHT, _MARCH_EVERY, _MARCH_IN, _SHOOT_IN, _RELOAD = range(OWN, OWN + 6)
_ALIENS = OWN + 6
_SHOTS = _ALIENS + SIZE  # of the cannon, upward
_BOMBS = _SHOTS + SIZE  # of the aliens, downward
_WORDS = _BOMBS + SIZE
_LOWEST = SIZE - 1
_WAVE_ROWS = 4
_WAVE = 0b0011111100  # columns 2..7
_RELOADING = 5  # steps from one shot to the next
_SHOOT_EVERY = 10  # steps, of the aliens
_SLOWEST, _FASTEST = 12, 6  # steps from one move of a full block to the next, by waves


@compiled
def _new_wave(world: Any) -> None:
    world[_ALIENS : _ALIENS + _WAVE_ROWS] = _WAVE


@compiled
def _begin(world: Any) -> None:
    world[_CANNON] = 5
    world[_MARCH_EVERY] = world[_MARCH_IN] = _SLOWEST
    world[_SHOOT_IN] = _SHOOT_EVERY
    _new_wave(world)


@compiled
def _num_aliens(world: Any) -> int:
    count = 0
    for row in range(SIZE):
        word = world[_ALIENS + row]
        while word:
            word &= word - 1
            count += 1
    return count


@compiled
def _march(world: Any) -> None:
    """One column on; at the end of the field a row down, and back from there."""
    edge = 1 << _LOWEST if world[_TO_RIGHT] else 1
    at_edge = False
    for row in range(SIZE):
        at_edge = at_edge or world[_ALIENS + row] & edge != 0
    if at_edge:
        world[_TO_RIGHT] = 1 - world[_TO_RIGHT]
        lowest = world[_ALIENS + _LOWEST]
        if lowest:
            world[ENDED] = 1
        for row in range(_LOWEST, 0, -1):
            world[_ALIENS + row] = world[_ALIENS + row - 1]
        world[_ALIENS] = lowest  # it comes in again above, as the original's picture has it
    else:
        for row in range(SIZE):
            aliens = world[_ALIENS + row]
            world[_ALIENS + row] = aliens << 1 if world[_TO_RIGHT] else aliens >> 1


@compiled
def _shoot(world: Any) -> None:
    """The lowest alien of the column that is nearest to the cannon, of two the left one."""
    for distance in range(SIZE):
        for side in range(2):
            column = world[_CANNON] + (distance if side else -distance)
            if 0 <= column < SIZE:
                for row in range(_LOWEST, -1, -1):
                    if world[_ALIENS + row] >> column & 1:
                        world[_BOMBS + row] |= 1 << column
                        return


@compiled
def _act(world: Any, action: int, ramping: bool) -> int:
    if action == FIRE and world[_RELOAD] == 0:
        world[_SHOTS + _LOWEST] |= 1 << world[_CANNON]
        world[_RELOAD] = _RELOADING
    elif action == LEFT:
        world[_CANNON] = max(0, world[_CANNON] - 1)
    elif action == RIGHT:
        world[_CANNON] = min(_LOWEST, world[_CANNON] + 1)
    for row in range(_LOWEST):
        world[_SHOTS + row] = world[_SHOTS + row + 1]
        world[_BOMBS + _LOWEST - row] = world[_BOMBS + _LOWEST - row - 1]
    world[_SHOTS + _LOWEST] = world[_BOMBS] = 0
    cannon = 1 << world[_CANNON]
    if (world[_BOMBS + _LOWEST] | world[_ALIENS + _LOWEST]) & cannon:
        world[ENDED] = 1
    if world[_MARCH_IN] == 0:
        world[_MARCH_IN] = min(_num_aliens(world), world[_MARCH_EVERY])
        _march(world)
        if world[_ALIENS + _LOWEST] & cannon:
            world[ENDED] = 1
    if world[_SHOOT_IN] == 0:
        world[_SHOOT_IN] = _SHOOT_EVERY
        _shoot(world)
    before = _num_aliens(world)
    for row in range(SIZE):
        hit = world[_ALIENS + row] & world[_SHOTS + row]
        world[_ALIENS + row] ^= hit
        world[_SHOTS + row] ^= hit
    left = _num_aliens(world)
    world[_RELOAD] = max(0, world[_RELOAD] - 1)
    world[_MARCH_IN] -= 1
    world[_SHOOT_IN] -= 1
    if left == 0:
        if ramping and world[_MARCH_EVERY] > _FASTEST:
            world[_MARCH_EVERY] -= 1
        _new_wave(world)
    return before - left


@compiled
def _draw(world: Any, planes: Any) -> None:
    planes[0, _LOWEST, world[_CANNON]] = 255
    for row in range(SIZE):
        aliens = world[_ALIENS + row]
        shots, bombs = world[_SHOTS + row], world[_BOMBS + row]
        for column in range(SIZE):
            alien = 255 * (aliens >> column & 1)
            planes[1, row, column] = alien
            planes[3 if world[_TO_RIGHT] else 2, row, column] = alien
            planes[4, row, column] = 255 * (shots >> column & 1)
            planes[5, row, column] = 255 * (bombs >> column & 1)


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


class MinAtarSpaceInvaders(MinAtarBatch):
    """E games of Space Invaders, seen as planes.

    They are the cannon, the aliens, the aliens if they march to the left, if to the right, the
    cannon's shots, the aliens' bullets.

    >>> game = MinAtarSpaceInvaders(1, sticky_actions=0.0)
    >>> state = game.reset(torch.tensor([0]))
    >>> int((state["observation"][0, 1] > 0).sum())  # aliens
    24
    """

    channels = ("cannon", "alien", "alien left", "alien right", "friendly bullet", "enemy bullet")
    minimal_actions = (NONE, LEFT, RIGHT, FIRE)

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
            "space_invaders",
            num_words=_WORDS,
            begin_rows=_begin_rows,
            step_rows=_step_rows,
            sticky_actions=sticky_actions,
            all_actions=all_actions,
            ramping=difficulty_ramping,
        )
