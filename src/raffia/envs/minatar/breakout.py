"""Breakout on 10 x 10 cells.

A ball runs along diagonals. It breaks bricks for a reward of 1 each; where the paddle does not meet
it in the lowest row, the game ends. When all bricks are gone, new ones come as the ball next gets
down to that row.
"""

from __future__ import annotations

from typing import Any

from raffia.envs.compiled import compiled
from raffia.envs.minatar.batch import MinAtarBatch
from raffia.envs.minatar.world import (
    ENDED,
    LEFT,
    NONE,
    OWN,
    RIGHT,
    SIZE,
    below,
    stuck_action,
)

__all__ = ["MinAtarBreakout"]

_PADDLE, _X, _Y, _DX, _DY, _OLD_X, _OLD_Y, _STRUCK, _BRICKS = range(OWN, OWN + 9)
_BRICK_ROWS = 3  # rows 1..3 of the field, a word of bits each
_WORDS = OWN + 9 + _BRICK_ROWS
_WALL = 0b1111111111


@compiled
def _begin(world: Any) -> None:
    side = below(world, 2)
    world[_PADDLE] = 4
    world[_X] = world[_OLD_X] = side * (SIZE - 1)
    world[_Y] = world[_OLD_Y] = 3
    world[_DX], world[_DY] = 1 - 2 * side, 1
    world[_BRICKS : _BRICKS + _BRICK_ROWS] = _WALL


@compiled
def _act(world: Any, action: int) -> int:
    if action == LEFT:
        world[_PADDLE] = max(0, world[_PADDLE] - 1)
    elif action == RIGHT:
        world[_PADDLE] = min(SIZE - 1, world[_PADDLE] + 1)
    old_x, old_y = world[_X], world[_Y]
    world[_OLD_X], world[_OLD_Y] = old_x, old_y
    x, y = old_x + world[_DX], old_y + world[_DY]
    if x < 0 or x >= SIZE:  # along the side wall, one row on
        x = old_x
        world[_DX] = -world[_DX]
    bricks = _BRICKS + y - 1  # the word of this row, if it has bricks
    reward, inside = 0, False
    if y < 0:
        y = 0
        world[_DY] = 1
    elif 1 <= y <= _BRICK_ROWS and world[bricks] >> x & 1:
        inside = True
        if not world[_STRUCK]:  # having struck one just before, the ball flies through the next
            reward = 1
            world[bricks] ^= 1 << x
            y = old_y
            world[_DY] = -world[_DY]
    elif y == SIZE - 1:
        if not world[_BRICKS : _BRICKS + _BRICK_ROWS].any():
            world[_BRICKS : _BRICKS + _BRICK_ROWS] = _WALL
        if world[_PADDLE] == old_x or world[_PADDLE] == x:
            if world[_PADDLE] != old_x:  # met by the corner: back where it came from
                world[_DX] = -world[_DX]
            y = old_y
            world[_DY] = -1
        else:
            world[ENDED] = 1
    world[_STRUCK] = inside
    world[_X], world[_Y] = x, y
    return reward


@compiled
def _draw(world: Any, planes: Any) -> None:
    planes[0, SIZE - 1, world[_PADDLE]] = 255
    planes[1, world[_Y], world[_X]] = 255
    planes[2, world[_OLD_Y], world[_OLD_X]] = 255
    for row in range(_BRICK_ROWS):
        for column in range(SIZE):
            planes[3, row + 1, column] = 255 * (world[_BRICKS + row] >> column & 1)


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


class MinAtarBreakout(MinAtarBatch):
    """E games of Breakout, seen as planes: paddle, ball, where the ball was, bricks.

    >>> game = MinAtarBreakout(2)
    >>> state = game.reset(torch.tensor([0, 1]))
    >>> state["observation"].shape, state["observation"].dtype
    (torch.Size([2, 4, 10, 10]), torch.uint8)
    >>> game.step(torch.tensor([0, 2]))["reward"]
    tensor([0., 0.])
    """

    channels = ("paddle", "ball", "trail", "brick")
    minimal_actions = (NONE, LEFT, RIGHT)

    def __init__(
        self, num_envs: int, *, sticky_actions: float = 0.1, all_actions: bool = False
    ) -> None:
        super().__init__(
            num_envs,
            "breakout",
            num_words=_WORDS,
            begin_rows=_begin_rows,
            step_rows=_step_rows,
            sticky_actions=sticky_actions,
            all_actions=all_actions,
        )
