"""The common part of the games: a game as one row of whole numbers, its random stream, and loops.

The first words of a row are the same in all games; a game counts its own from `OWN` on. Everything
that a game will ever do follows from its row and the actions. All games share the loops over the
rows of a batch; each has them compiled for it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from raffia.jit.kernel import kernel

SIZE = 10  # cells, of the square field
LAST_ACTION = 4  # the words 0..3 are the random stream's
ENDED = 5
TIME_OVER = 6
OWN = 7
NONE, LEFT, UP, RIGHT, DOWN, FIRE = range(6)  # actions
_WORD = 0xFFFFFFFF


@kernel
def next_word(game: Any) -> int:
    """The next 32 bits of the game's random stream.

    xoshiro128++ (Blackman & Vigna, "Scrambled linear pseudorandom number generators", 2021).

    >>> import numpy as np
    >>> next_word(np.array([1, 2, 3, 4]))
    641
    """
    a, b, c, d = game[0], game[1], game[2], game[3]
    total = (a + d) & _WORD
    result = ((((total << 7) & _WORD) | (total >> 25)) + a) & _WORD
    c, d = c ^ a, d ^ b
    game[0], game[1], game[2] = a ^ d, b ^ c, c ^ ((b << 9) & _WORD)
    game[3] = ((d << 11) & _WORD) | (d >> 21)
    return result


@kernel
def below(game: Any, n: int) -> int:
    """A random number of 0..n - 1.

    >>> import numpy as np
    >>> below(np.array([1, 2, 3, 4]), 6)
    0
    """
    return (next_word(game) * n) >> 32


@kernel
def stuck_action(game: Any, action: int, sticky: float) -> int:
    """This action, or with probability `sticky` the one before it once more.

    >>> import numpy as np
    >>> stuck_action(np.array([1, 2, 3, 4, 5]), 2, sticky=1.0)
    5
    """
    if next_word(game) < sticky * 4294967296.0:
        action = game[LAST_ACTION]
    game[LAST_ACTION] = action
    return action


Loop = Callable[..., None]


def compiled_loops(game: str, begin: Any, act: Any, draw: Any) -> tuple[Loop, Loop]:
    """`begin_rows` and `step_rows` of a game, of its kernels.

    begin: (game), writes the first state.
    act: (game, action, ramping), writes the next state; gives the reward.
    draw: (game, planes), writes 255 where something is.

    numba finds code on disk by the file and the name of a function, and takes what it calls from
    its globals. So a game's loop has a name of its own, and globals with the kernels of the game.
    """
    kernels = {"begin": begin, "act": act, "draw": draw}

    def compiled(loop: Any) -> Loop:
        own = types.FunctionType(loop.__code__, {**globals(), **kernels})
        own.__name__ = own.__qualname__ = f"{loop.__name__}_of_{game}"
        return kernel(own)

    return compiled(_begin_rows), compiled(_step_rows)


begin: Any = None  # a game's own take their place, see above
act: Any = None
draw: Any = None


def _begin_rows(games: Any, rows: Any, planes: Any) -> None:
    for i in range(len(rows)):
        begin(games[rows[i]])
        draw(games[rows[i]], planes[i])


def _step_rows(
    games: Any, rows: Any, action: Any, sticky: float, ramping: bool, reward: Any, planes: Any
) -> None:
    for i in range(len(rows)):
        game = games[rows[i]]
        reward[i] = act(game, stuck_action(game, action[i], sticky), ramping)
        draw(game, planes[i])
