"""What the games have in common: a world as one row of whole numbers, and its random stream.

The first words of a row are the same in all games; a game counts its own from `OWN` on. Everything
that a world will ever do follows from its row and the actions.
"""

from __future__ import annotations

from typing import Any

from raffia.envs.compiled import compiled

__all__ = ["ENDED", "LAST_ACTION", "OWN", "SIZE", "TIME_OVER", "below", "next_word", "stuck_action"]

SIZE = 10  # cells, of the square field
LAST_ACTION = 4  # the words 0..3 are the random stream's
ENDED = 5
TIME_OVER = 6
OWN = 7
NONE, LEFT, UP, RIGHT, DOWN, FIRE = range(6)  # actions
_WORD = 0xFFFFFFFF


@compiled
def next_word(world: Any) -> int:
    """The next 32 bits of the world's random stream.

    xoshiro128++ (Blackman & Vigna, "Scrambled linear pseudorandom number generators", 2021).

    >>> import numpy as np
    >>> next_word(np.array([1, 2, 3, 4]))
    641
    """
    a, b, c, d = world[0], world[1], world[2], world[3]
    total = (a + d) & _WORD
    result = ((((total << 7) & _WORD) | (total >> 25)) + a) & _WORD
    c, d = c ^ a, d ^ b
    world[0], world[1], world[2] = a ^ d, b ^ c, c ^ ((b << 9) & _WORD)
    world[3] = ((d << 11) & _WORD) | (d >> 21)
    return result


@compiled
def below(world: Any, n: int) -> int:
    """A random number of 0..n - 1.

    >>> import numpy as np
    >>> below(np.array([1, 2, 3, 4]), 6)
    0
    """
    return (next_word(world) * n) >> 32


@compiled
def stuck_action(world: Any, action: int, sticky: float) -> int:
    """This action, or with probability `sticky` the one before it once more.

    >>> import numpy as np
    >>> stuck_action(np.array([1, 2, 3, 4, 5]), 2, sticky=1.0)
    5
    """
    if next_word(world) < sticky * 4294967296.0:
        action = world[LAST_ACTION]
    world[LAST_ACTION] = action
    return action
