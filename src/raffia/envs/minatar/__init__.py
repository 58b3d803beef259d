"""MinAtar: Atari games made small, on a field of 10 x 10 cells (Young & Tian 2019)."""

from typing import TYPE_CHECKING

from raffia.envs.minatar.asterix import MinAtarAsterix as MinAtarAsterix
from raffia.envs.minatar.breakout import MinAtarBreakout as MinAtarBreakout
from raffia.envs.minatar.freeway import MinAtarFreeway as MinAtarFreeway
from raffia.envs.minatar.game import MinAtarBatch as MinAtarBatch
from raffia.envs.minatar.seaquest import MinAtarSeaquest as MinAtarSeaquest
from raffia.envs.minatar.space_invaders import MinAtarSpaceInvaders as MinAtarSpaceInvaders
from raffia.lazy import public_names as _public_names

GAMES = {  # by their names: GAMES[name](num_envs)
    "asterix": MinAtarAsterix,
    "breakout": MinAtarBreakout,
    "freeway": MinAtarFreeway,
    "seaquest": MinAtarSeaquest,
    "space_invaders": MinAtarSpaceInvaders,
}

if not TYPE_CHECKING:
    __all__ = _public_names(__name__)
