"""Breakout on 10 x 10 cells.

A ball runs along diagonals. It breaks bricks for a reward of 1 each; where the paddle does not meet
it in the lowest row, the game ends. When all bricks are gone, new ones come as the ball next gets
down to that row.
"""

from __future__ import annotations

from typing import Any

from raffia.envs.minatar.game import (
    ENDED,
    LEFT,
    NONE,
    OWN,
    RIGHT,
    SIZE,
    MinAtarBatch,
    below,
    compiled_loops,
)
from raffia.jit.kernel import kernel

_PADDLE, _X, _Y, _DX, _DY, _OLD_X, _OLD_Y, _STRUCK, _BRICKS = range(OWN, OWN + 9)
_BRICK_ROWS = 3  # rows 1..3 of the field, a word of bits each
_WORDS = OWN + 9 + _BRICK_ROWS
_WALL = 0b1111111111


@kernel
def _begin(game: Any) -> None:
    side = below(game, 2)
    game[_PADDLE] = 4
    game[_X] = game[_OLD_X] = side * (SIZE - 1)
    game[_Y] = game[_OLD_Y] = 3
    game[_DX], game[_DY] = 1 - 2 * side, 1
    game[_BRICKS : _BRICKS + _BRICK_ROWS] = _WALL


@kernel
def _act(game: Any, action: int, ramping: bool) -> int:
    if action == LEFT:
        game[_PADDLE] = max(0, game[_PADDLE] - 1)
    elif action == RIGHT:
        game[_PADDLE] = min(SIZE - 1, game[_PADDLE] + 1)
    old_x, old_y = game[_X], game[_Y]
    game[_OLD_X], game[_OLD_Y] = old_x, old_y
    x, y = old_x + game[_DX], old_y + game[_DY]
    if x < 0 or x >= SIZE:  # along the side wall, one row on
        x = old_x
        game[_DX] = -game[_DX]
    bricks = _BRICKS + y - 1  # the word of this row, if it has bricks
    reward, inside = 0, False
    if y < 0:
        y = 0
        game[_DY] = 1
    elif 1 <= y <= _BRICK_ROWS and game[bricks] >> x & 1:
        inside = True
        if not game[_STRUCK]:  # having struck one just before, the ball flies through the next
            reward = 1
            game[bricks] ^= 1 << x
            y = old_y
            game[_DY] = -game[_DY]
    elif y == SIZE - 1:
        if not game[_BRICKS : _BRICKS + _BRICK_ROWS].any():
            game[_BRICKS : _BRICKS + _BRICK_ROWS] = _WALL
        if game[_PADDLE] == old_x or game[_PADDLE] == x:
            if game[_PADDLE] != old_x:  # hit by the corner: back where it came from
                game[_DX] = -game[_DX]
            y = old_y
            game[_DY] = -1
        else:
            game[ENDED] = 1
    game[_STRUCK] = inside
    game[_X], game[_Y] = x, y
    return reward


@kernel
def _draw(game: Any, planes: Any) -> None:
    planes[0, SIZE - 1, game[_PADDLE]] = 255
    planes[1, game[_Y], game[_X]] = 255
    planes[2, game[_OLD_Y], game[_OLD_X]] = 255
    for row in range(_BRICK_ROWS):
        for column in range(SIZE):
            planes[3, row + 1, column] = 255 * (game[_BRICKS + row] >> column & 1)


class MinAtarBreakout(MinAtarBatch):
    """E games of Breakout with planes as observations: paddle, ball, where the ball was, bricks.

    >>> game = MinAtarBreakout(2)
    >>> state = game.reset(torch.tensor([0, 1]))
    >>> state["observation"].shape, state["observation"].dtype
    (torch.Size([2, 4, 10, 10]), torch.uint8)
    >>> game.step(torch.tensor([0, 2]))["reward"]
    tensor([0., 0.])
    """

    name = "breakout"
    channels = ("paddle", "ball", "trail", "brick")
    minimal_actions = (NONE, LEFT, RIGHT)
    num_words = _WORDS
    begin_rows, step_rows = map(staticmethod, compiled_loops(name, _begin, _act, _draw))
