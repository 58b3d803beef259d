"""Lists of moving things within a game's row of words: fish, bullets, divers.

A list is its length and then five words for each thing, in the order in which they came.
"""

from __future__ import annotations

from typing import Any

from raffia.jit.kernel import kernel

FIELDS = 5
X, Y, STEP, WAIT, SHOOT = range(FIELDS)  # STEP 1 is to the right, -1 to the left


@kernel
def item(base: int, number: int) -> int:
    """Where the thing of this number begins in the game, for the list that begins at `base`.

    >>> item(10, 0), item(10, 1)
    (11, 16)
    """
    return base + 1 + FIELDS * number


@kernel
def add(game: Any, base: int, x: int, y: int, step: int, wait: int, shoot: int) -> None:
    """One more at the end of the list.

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
    """Take one out of the list; those behind it move up.

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
    """The number of the first thing in a cell, -1 if there is none.

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
