"""The loops over the rows of a batch, which all games share; each game has them compiled for it."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from raffia.envs.minatar.game import stuck_action
from raffia.jit.kernel import kernel

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
