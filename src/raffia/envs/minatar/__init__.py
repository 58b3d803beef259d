"""MinAtar: Atari games made small, on a field of 10 x 10 cells (Young & Tian 2019)."""

from raffia.envs.minatar.asterix import MinAtarAsterix
from raffia.envs.minatar.breakout import MinAtarBreakout
from raffia.envs.minatar.freeway import MinAtarFreeway
from raffia.envs.minatar.game import MinAtarBatch
from raffia.envs.minatar.seaquest import MinAtarSeaquest
from raffia.envs.minatar.space_invaders import MinAtarSpaceInvaders

__all__ = [
    "GAMES",
    "MinAtarAsterix",
    "MinAtarBatch",
    "MinAtarBreakout",
    "MinAtarFreeway",
    "MinAtarSeaquest",
    "MinAtarSpaceInvaders",
]

GAMES = {  # by their names: GAMES[name](num_envs)
    "asterix": MinAtarAsterix,
    "breakout": MinAtarBreakout,
    "freeway": MinAtarFreeway,
    "seaquest": MinAtarSeaquest,
    "space_invaders": MinAtarSpaceInvaders,
}
