"""Seaquest on 10 x 10 cells.

A submarine shoots fish and enemy submarines for a reward of 1 each, and takes divers aboard. Air
lasts for 200 steps; to come up without a diver ends the game, with fewer than six costs one, with
six it is rewarded by the air that is left. Each time up, enemies come sooner, and every other time
they move faster, too.

Fish, bullets and divers are lists within the game's row of words: a length, then five words for
each thing, in the order in which they came.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from raffia.envs.minatar.game import (
    DOWN,
    ENDED,
    FIRE,
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

FIELDS = 5
X, Y, STEP, WAIT, SHOOT = range(FIELDS)  # STEP 1 is to the right, -1 to the left


@kernel
def item(base: int, number: int) -> int:
    """The offset in the game at which the item with this number begins, in the list at `base`.

    >>> item(10, 0), item(10, 1)
    (11, 16)
    """
    return base + 1 + FIELDS * number


@kernel
def add(game: Any, base: int, x: int, y: int, step: int, wait: int, shoot: int) -> None:
    """Add one to the end of the list.

    >>> import numpy as np
    >>> game = np.zeros(11, np.int64)
    >>> add(game, 0, 3, 4, 1, 5, 0)
    >>> game.tolist()
    [1, 3, 4, 1, 5, 0, 0, 0, 0, 0, 0]
    """
    at = item(base, game[base])
    game[at + X], game[at + Y], game[at + STEP] = x, y, step
    game[at + WAIT], game[at + SHOOT] = wait, shoot
    game[base] += 1


@kernel
def remove(game: Any, base: int, number: int) -> None:
    """Remove one item from the list; the items after it move up.

    >>> import numpy as np
    >>> game = np.array([2, 3, 4, 1, 5, 0, 8, 2, -1, 5, 0])
    >>> remove(game, 0, 0)
    >>> game[:6].tolist()
    [1, 8, 2, -1, 5, 0]
    """
    game[base] -= 1
    for word in range(item(base, number), item(base, game[base])):
        game[word] = game[word + FIELDS]


@kernel
def find(game: Any, base: int, x: int, y: int) -> int:
    """The number of the first item in a cell, or -1 if the cell is empty.

    >>> import numpy as np
    >>> game = np.array([2, 3, 4, 1, 5, 0, 8, 2, -1, 5, 0])
    >>> find(game, 0, 8, 2), find(game, 0, 8, 3)
    (1, -1)
    """
    for number in range(game[base]):
        at = item(base, number)
        if game[at + X] == x and game[at + Y] == y:
            return number
    return -1


_X, _Y, _FACING, _AIR, _ABOARD, _ABOVE, _RELOAD = range(OWN, OWN + 7)
_ENEMY_IN, _ENEMY_EVERY, _DIVER_IN, _MOVE_EVERY, _RAMPS = range(OWN + 7, OWN + 12)
# A thing stays at most 60 steps (an enemy at its slowest), 30 when enemies come at each step; so
# there are never as many as there is room for.
_MANY, _FEW = 64, 8
# Where the lists begin; numba would compile what is given a plain 19 again for each such number.
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


@kernel
def _begin(game: Any) -> None:
    game[_X], game[_FACING], game[_ABOVE] = 5, -1, 1
    game[_AIR] = _AIR_FULL
    game[_ENEMY_IN] = game[_ENEMY_EVERY] = _ENEMY_AT_FIRST
    game[_DIVER_IN] = _DIVER_EVERY
    game[_MOVE_EVERY] = _MOVE_AT_FIRST


@kernel
def _against(game: Any, base: int, y: int, step: int) -> bool:
    """Whether something of a list swims the other way in this row."""
    for number in range(game[base]):
        at = item(base, number)
        if game[at + Y] == y and game[at + STEP] != step:
            return True
    return False


@kernel
def _spawn(game: Any) -> None:
    """A fish or a submarine, unless one of its row comes the other way; and a diver."""
    if game[_ENEMY_IN] == 0:
        game[_ENEMY_IN] = game[_ENEMY_EVERY]
        step = 1 if next_word(game) < _HALF else -1
        is_sub = next_word(game) < _THIRD
        y = 1 + below(game, 8)
        if not _against(game, _SUBS, y, step) and not _against(game, _FISH, y, step):
            x = 0 if step > 0 else SIZE - 1
            base, shoot = (_SUBS, _ENEMY_RELOADING) if is_sub else (_FISH, _NEVER)
            add(game, base, x, y, step, game[_MOVE_EVERY], shoot)
    if game[_DIVER_IN] == 0:
        game[_DIVER_IN] = _DIVER_EVERY
        step = 1 if next_word(game) < _HALF else -1
        y = 1 + below(game, 8)
        x = 0 if step > 0 else SIZE - 1
        add(game, _DIVERS, x, y, step, _DIVER_MOVE, _NEVER)


@kernel
def _steer(game: Any, action: int) -> None:
    if action == FIRE and game[_RELOAD] == 0:
        game[_RELOAD] = _RELOADING
        add(game, _SHOTS, game[_X], game[_Y], game[_FACING], _NEVER, _NEVER)
    elif action == LEFT or action == RIGHT:
        game[_FACING] = 1 if action == RIGHT else -1
        game[_X] = min(max(game[_X] + game[_FACING], 0), SIZE - 1)
    elif action == UP or action == DOWN:
        game[_Y] = min(max(game[_Y] + (1 if action == DOWN else -1), 0), SIZE - 2)


@kernel
def _meets_us(game: Any, at: int) -> bool:
    return game[at + X] == game[_X] and game[at + Y] == game[_Y]


@kernel
def _moved(game: Any, base: int, number: int) -> bool:
    """Move an item by one cell; return False if it left the field and was removed."""
    at = item(base, number)
    game[at + X] += game[at + STEP]
    if 0 <= game[at + X] < SIZE:
        return True
    remove(game, base, number)
    return False


@kernel
def _move_shots(game: Any) -> int:
    reward = 0
    for number in range(game[_SHOTS] - 1, -1, -1):
        if _moved(game, _SHOTS, number):
            at = item(_SHOTS, number)
            for base in (_FISH, _SUBS):
                target = find(game, base, game[at + X], game[at + Y])
                if target >= 0:
                    remove(game, base, target)
                    remove(game, _SHOTS, number)
                    reward += 1
                    break
    return reward


@kernel
def _move_divers(game: Any) -> None:
    for number in range(game[_DIVERS] - 1, -1, -1):
        at = item(_DIVERS, number)
        room = game[_ABOARD] < _ABOARD_FULL
        taken = room and _meets_us(game, at)
        if not taken:
            game[at + WAIT] -= 1
            if game[at + WAIT] < 0:
                game[at + WAIT] = _DIVER_MOVE
                taken = _moved(game, _DIVERS, number) and room and _meets_us(game, at)
        if taken:
            game[_ABOARD] += 1
            remove(game, _DIVERS, number)


@kernel
def _shoot(game: Any, at: int) -> None:
    game[at + SHOOT] -= 1
    if game[at + SHOOT] < 0:
        game[at + SHOOT] = _ENEMY_RELOADING
        add(game, _BULLETS, game[at + X], game[at + Y], game[at + STEP], _NEVER, _NEVER)


@kernel
def _move_enemies(game: Any, base: int) -> int:
    """Fish or submarines: they end the game where we are, and run into our shots."""
    reward = 0
    for number in range(game[base] - 1, -1, -1):
        at = item(base, number)
        gone = False
        if _meets_us(game, at):
            game[ENDED] = 1
        game[at + WAIT] -= 1
        if game[at + WAIT] < 0:
            game[at + WAIT] = game[_MOVE_EVERY]
            game[at + X] += game[at + STEP]
            shot = find(game, _SHOTS, game[at + X], game[at + Y])
            if not 0 <= game[at + X] < SIZE:
                gone = True
            elif _meets_us(game, at):
                game[ENDED] = 1
            elif shot >= 0:
                remove(game, _SHOTS, shot)
                gone = True
                reward += 1
        if base == _SUBS:
            _shoot(game, at)  # even as it is hit
        if gone:
            remove(game, base, number)
    return reward


@kernel
def _move_bullets(game: Any) -> None:
    for number in range(game[_BULLETS] - 1, -1, -1):
        at = item(_BULLETS, number)
        if _meets_us(game, at):
            game[ENDED] = 1
        if _moved(game, _BULLETS, number) and _meets_us(game, at):
            game[ENDED] = 1


@kernel
def _breathe(game: Any, ramping: bool) -> int:
    """Use air below; at the surface bring the divers home."""
    if game[_AIR] <= 0:
        game[ENDED] = 1
    if game[_Y] > 0:
        game[_AIR] -= 1
        game[_ABOVE] = 0
        return 0
    if game[_ABOVE]:
        return 0
    if game[_ABOARD] == 0:
        game[ENDED] = 1
        return 0
    reward = 0
    game[_ABOVE] = 1
    if game[_ABOARD] == _ABOARD_FULL:
        reward = game[_AIR] * 10 // _AIR_FULL
        game[_ABOARD] = 0
    game[_ABOARD] -= 1  # below 0 after six were brought home, as in the original
    game[_AIR] = _AIR_FULL
    if ramping and (game[_ENEMY_EVERY] > 1 or game[_MOVE_EVERY] > 2):
        if game[_RAMPS] % 2 == 1:
            game[_MOVE_EVERY] = max(2, game[_MOVE_EVERY] - 1)
        game[_ENEMY_EVERY] = max(1, game[_ENEMY_EVERY] - 1)
        game[_RAMPS] += 1
    return reward


@kernel
def _act(game: Any, action: int, ramping: bool) -> int:
    _spawn(game)
    _steer(game, action)
    reward = _move_shots(game)
    _move_divers(game)
    reward += _move_enemies(game, _SUBS)
    _move_bullets(game)
    reward += _move_enemies(game, _FISH)
    game[_ENEMY_IN] = max(0, game[_ENEMY_IN] - 1)
    game[_DIVER_IN] = max(0, game[_DIVER_IN] - 1)
    game[_RELOAD] = max(0, game[_RELOAD] - 1)
    return reward + _breathe(game, ramping)


@kernel
def _draw_list(game: Any, base: int, plane: Any, trail: Any) -> None:
    for number in range(game[base]):
        at = item(base, number)
        x, y = game[at + X], game[at + Y]
        plane[y, x] = 255
        behind = x - game[at + STEP]
        if base >= _DIVERS and 0 <= behind < SIZE:
            trail[y, behind] = 255


@kernel
def _draw(game: Any, planes: Any) -> None:
    planes[0, game[_Y], game[_X]] = 255
    planes[1, game[_Y], game[_X] - game[_FACING]] = 255
    _draw_list(game, _SHOTS, planes[2], planes[3])
    _draw_list(game, _BULLETS, planes[4], planes[3])
    _draw_list(game, _FISH, planes[5], planes[3])
    _draw_list(game, _SUBS, planes[6], planes[3])
    _draw_list(game, _DIVERS, planes[9], planes[3])
    for column in range(max(0, game[_AIR]) * SIZE // _AIR_FULL):
        planes[7, SIZE - 1, column] = 255
    for column in range(SIZE - 1 - max(0, game[_ABOARD]), SIZE - 1):
        planes[8, SIZE - 1, column] = 255


class MinAtarSeaquest(RampingBatch):
    """E games of Seaquest with ten planes as observations.

    They are the submarine's front and back, its bullets, where enemies and divers were, enemy
    bullets, fish, enemy submarines, the gauges of air and of divers aboard, divers.

    >>> game = MinAtarSeaquest(2)
    >>> state = game.reset(torch.tensor([0, 1]))
    >>> state["observation"].shape, game.spec.action
    (torch.Size([2, 10, 10, 10]), Discrete(n=6))
    """

    name = "seaquest"
    channels = (
        *("submarine front", "submarine back", "friendly bullet", "trail", "enemy bullet"),
        *("enemy fish", "enemy submarine", "air", "divers aboard", "diver"),
    )
    minimal_actions = (NONE, LEFT, UP, RIGHT, DOWN, FIRE)
    num_words = _WORDS
    begin_rows, step_rows = map(staticmethod, compiled_loops(name, _begin, _act, _draw))
