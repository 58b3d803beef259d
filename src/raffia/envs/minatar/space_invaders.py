"""Space Invaders on 10 x 10 cells.

A block of aliens marches to and fro, and a row down at each end; the nearest to the cannon shoots.
Each that is shot gives a reward of 1; the fewer are left, the faster they march, and each new wave
is a little faster than the last. A bullet or an alien that reaches the cannon ends the game, and so
does a row too low. Chance plays no part but in sticky actions.
"""

from __future__ import annotations

from typing import Any

from raffia.envs.minatar.game import (
    ENDED,
    FIRE,
    LEFT,
    NONE,
    OWN,
    RIGHT,
    SIZE,
    RampingBatch,
    compiled_loops,
)
from raffia.jit.kernel import kernel

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


@kernel
def _new_wave(game: Any) -> None:
    game[_ALIENS : _ALIENS + _WAVE_ROWS] = _WAVE


@kernel
def _begin(game: Any) -> None:
    game[_CANNON] = 5
    game[_MARCH_EVERY] = game[_MARCH_IN] = _SLOWEST
    game[_SHOOT_IN] = _SHOOT_EVERY
    _new_wave(game)


@kernel
def _num_aliens(game: Any) -> int:
    count = 0
    for row in range(SIZE):
        word = game[_ALIENS + row]
        while word:
            word &= word - 1
            count += 1
    return count


@kernel
def _march(game: Any) -> None:
    """Move one column on; at the end of the field one row down, and back from there."""
    edge = 1 << _LOWEST if game[_TO_RIGHT] else 1
    at_edge = False
    for row in range(SIZE):
        at_edge = at_edge or game[_ALIENS + row] & edge != 0
    if at_edge:
        game[_TO_RIGHT] = 1 - game[_TO_RIGHT]
        lowest = game[_ALIENS + _LOWEST]
        if lowest:
            game[ENDED] = 1
        for row in range(_LOWEST, 0, -1):
            game[_ALIENS + row] = game[_ALIENS + row - 1]
        game[_ALIENS] = lowest  # it comes in again above, as the original's picture has it
    else:
        for row in range(SIZE):
            aliens = game[_ALIENS + row]
            game[_ALIENS + row] = aliens << 1 if game[_TO_RIGHT] else aliens >> 1


@kernel
def _shoot(game: Any) -> None:
    """The lowest alien of the column that is nearest to the cannon, of two the left one."""
    for distance in range(SIZE):
        for side in range(2):
            column = game[_CANNON] + (distance if side else -distance)
            if 0 <= column < SIZE:
                for row in range(_LOWEST, -1, -1):
                    if game[_ALIENS + row] >> column & 1:
                        game[_BOMBS + row] |= 1 << column
                        return


@kernel
def _act(game: Any, action: int, ramping: bool) -> int:
    if action == FIRE and game[_RELOAD] == 0:
        game[_SHOTS + _LOWEST] |= 1 << game[_CANNON]
        game[_RELOAD] = _RELOADING
    elif action == LEFT:
        game[_CANNON] = max(0, game[_CANNON] - 1)
    elif action == RIGHT:
        game[_CANNON] = min(_LOWEST, game[_CANNON] + 1)
    for row in range(_LOWEST):
        game[_SHOTS + row] = game[_SHOTS + row + 1]
        game[_BOMBS + _LOWEST - row] = game[_BOMBS + _LOWEST - row - 1]
    game[_SHOTS + _LOWEST] = game[_BOMBS] = 0
    cannon = 1 << game[_CANNON]
    if (game[_BOMBS + _LOWEST] | game[_ALIENS + _LOWEST]) & cannon:
        game[ENDED] = 1
    if game[_MARCH_IN] == 0:
        game[_MARCH_IN] = min(_num_aliens(game), game[_MARCH_EVERY])
        _march(game)
        if game[_ALIENS + _LOWEST] & cannon:
            game[ENDED] = 1
    if game[_SHOOT_IN] == 0:
        game[_SHOOT_IN] = _SHOOT_EVERY
        _shoot(game)
    before = _num_aliens(game)
    for row in range(SIZE):
        hit = game[_ALIENS + row] & game[_SHOTS + row]
        game[_ALIENS + row] ^= hit
        game[_SHOTS + row] ^= hit
    left = _num_aliens(game)
    game[_RELOAD] = max(0, game[_RELOAD] - 1)
    game[_MARCH_IN] -= 1
    game[_SHOOT_IN] -= 1
    if left == 0:
        if ramping and game[_MARCH_EVERY] > _FASTEST:
            game[_MARCH_EVERY] -= 1
        _new_wave(game)
    return before - left


@kernel
def _draw(game: Any, planes: Any) -> None:
    planes[0, _LOWEST, game[_CANNON]] = 255
    for row in range(SIZE):
        aliens = game[_ALIENS + row]
        shots, bombs = game[_SHOTS + row], game[_BOMBS + row]
        for column in range(SIZE):
            alien = 255 * (aliens >> column & 1)
            planes[1, row, column] = alien
            planes[3 if game[_TO_RIGHT] else 2, row, column] = alien
            planes[4, row, column] = 255 * (shots >> column & 1)
            planes[5, row, column] = 255 * (bombs >> column & 1)


class MinAtarSpaceInvaders(RampingBatch):
    """E games of Space Invaders, as planes.

    They are the cannon, the aliens, the aliens if they march to the left, if to the right, the
    cannon's shots, the aliens' bullets.

    >>> game = MinAtarSpaceInvaders(1, sticky_actions=0.0)
    >>> state = game.reset(torch.tensor([0]))
    >>> int((state["observation"][0, 1] > 0).sum())  # aliens
    24
    """

    name = "space_invaders"
    channels = ("cannon", "alien", "alien left", "alien right", "friendly bullet", "enemy bullet")
    minimal_actions = (NONE, LEFT, RIGHT, FIRE)
    num_words = _WORDS
    begin_rows, step_rows = map(staticmethod, compiled_loops(name, _begin, _act, _draw))
