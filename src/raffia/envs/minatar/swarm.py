"""Lists of moving things within a world's row of words: fish, bullets, divers.

A list is its length and then five words for each thing, in the order in which they came.
"""

from __future__ import annotations

from typing import Any

from raffia.envs.compiled import compiled

__all__ = ["FIELDS", "SHOOT", "STEP", "WAIT", "X", "Y", "add", "find", "item", "remove"]

FIELDS = 5
X, Y, STEP, WAIT, SHOOT = range(FIELDS)  # STEP 1 is to the right, -1 to the left


@compiled
def item(base: int, number: int) -> int:
    """Where the thing of this number begins in the world, for the list that begins at `base`.

    >>> item(10, 0), item(10, 1)
    (11, 16)
    """
    return base + 1 + FIELDS * number


@compiled
def add(world: Any, base: int, x: int, y: int, step: int, wait: int, shoot: int) -> None:
    """One more at the end of the list.

    >>> import numpy as np
    >>> world = np.zeros(11, np.int64)
    >>> add(world, 0, 3, 4, 1, 5, 0)
    >>> world.tolist()
    [1, 3, 4, 1, 5, 0, 0, 0, 0, 0, 0]
    """
    at = item(base, world[base])
    world[at + X], world[at + Y], world[at + STEP] = x, y, step
    world[at + WAIT], world[at + SHOOT] = wait, shoot
    world[base] += 1


@compiled
def remove(world: Any, base: int, number: int) -> None:
    """Take one out of the list; those behind it move up.

    >>> import numpy as np
    >>> world = np.array([2, 3, 4, 1, 5, 0, 8, 2, -1, 5, 0])
    >>> remove(world, 0, 0)
    >>> world[:6].tolist()
    [1, 8, 2, -1, 5, 0]
    """
    world[base] -= 1
    for word in range(item(base, number), item(base, world[base])):
        world[word] = world[word + FIELDS]


@compiled
def find(world: Any, base: int, x: int, y: int) -> int:
    """The number of the first thing in a cell, -1 if there is none.

    >>> import numpy as np
    >>> world = np.array([2, 3, 4, 1, 5, 0, 8, 2, -1, 5, 0])
    >>> find(world, 0, 8, 2), find(world, 0, 8, 3)
    (1, -1)
    """
    for number in range(world[base]):
        at = item(base, number)
        if world[at + X] == x and world[at + Y] == y:
            return number
    return -1
