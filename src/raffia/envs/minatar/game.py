"""Common code of MinAtar's games: a game as one row of whole numbers, and batches of games.

The first words of a row are the same in all games; a game counts its own from `OWN` on. Everything
that a game will ever do follows from its row and the actions. A batch is many games, stepped by one
compiled loop over their rows, which each game has compiled for it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raffia.envs.env import Discrete, EnvSpec
from raffia.envs.rows import checked_actions, checked_seeds, chosen_rows, refuse_ended
from raffia.functional.seeds import derive_seed
from raffia.hints import check_range
from raffia.jit.kernel import kernel
from raffia.tensordict.tensordict import TensorDict

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
    """The given action, or with probability `sticky` the previous one again.

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
    act: (game, action, ramping), writes the next state; returns the reward.
    draw: (game, planes), writes 255 where something is.

    numba finds code on disk by the file and the name of a function, and takes what it calls from
    its globals. So a game's loop has a separate name, and globals with the kernels of the game.
    """
    kernels = {"begin": begin, "act": act, "draw": draw}

    def compiled(loop: Any) -> Loop:
        own = types.FunctionType(loop.__code__, {**globals(), **kernels})
        own.__name__ = own.__qualname__ = f"{loop.__name__}_of_{game}"
        return kernel(own)

    return compiled(_begin_rows), compiled(_step_rows)


begin: Any = None  # replaced by those of a game, see above
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


CELL = 24  # pixels, of a picture's cells
_GROUND = (18, 18, 24)
_COLOURS = (  # of the planes in a picture, in their order
    *((240, 240, 240), (225, 90, 80), (110, 70, 75), (240, 190, 70), (90, 170, 230)),
    *((150, 210, 110), (180, 130, 220), (90, 200, 190), (60, 110, 190), (210, 140, 170)),
)


class MinAtarBatch:
    """E games of one of MinAtar's games (Young & Tian 2019, arXiv:1903.03176), reimplemented.

    Observations are uint8 [channels, 10, 10], 255 where something is. Actions are those that do
    something in the game; with `all_actions` the six of all games: nothing, left, up, right, down,
    fire. `sticky_actions` is the probability that the action before is done once more instead, 0.1
    as published. The games of a seed are made of the seed alone, not those of the original's seed.

    >>> from raffia.envs.minatar.breakout import MinAtarBreakout
    >>> MinAtarBreakout(4).spec.action, MinAtarBreakout(4, all_actions=True).spec.action
    (Discrete(n=3), Discrete(n=6))
    """

    name: str
    channels: tuple[str, ...]  # names of what each plane shows
    minimal_actions: tuple[int, ...]  # actions of the six that have an effect
    num_words: int  # words of a game's row
    begin_rows: Callable[..., None]  # static methods, see `compiled_loops`
    step_rows: Callable[..., None]

    def __init__(
        self, num_envs: int, *, sticky_actions: float = 0.1, all_actions: bool = False
    ) -> None:
        check_range("num_envs", num_envs, 1)
        check_range("sticky_actions", sticky_actions, 0, 1)
        self.num_envs = num_envs
        self.spec = EnvSpec(
            observation_shape=(len(self.channels), SIZE, SIZE),
            observation_dtype=torch.uint8,
            action=Discrete(6 if all_actions else len(self.minimal_actions)),
            name=f"minatar/{self.name}",
        )
        self._actions = np.array(range(6) if all_actions else self.minimal_actions)
        self._sticky, self._ramping = float(sticky_actions), False
        self._games = np.zeros((num_envs, self.num_words), np.int64)
        self._games[:, ENDED] = 1  # until its first reset
        self._last_planes = np.zeros((num_envs, *self.spec.observation_shape), np.uint8)

    def reset(self, seeds: Tensor, rows: Tensor | None = None) -> TensorDict:
        """Begin the episodes of these seeds int64 [n] in these rows int64 [n] (None: all): [n]."""
        numbers = chosen_rows(rows, self.num_envs)
        for row, seed in zip(numbers, checked_seeds(seeds, len(numbers)), strict=True):
            self._games[row] = 0
            for half in range(2):
                word = derive_seed(seed, "minatar", half)
                self._games[row, 2 * half : 2 * half + 2] = word >> 31, word & 0xFFFFFFFF
        planes = self._planes(len(numbers))
        self.begin_rows(self._games, np.array(numbers, np.int64), planes)
        self._last_planes[numbers] = planes
        return TensorDict(observation=torch.from_numpy(planes), batch_size=[len(numbers)])

    def step(self, action: Tensor, rows: Tensor | None = None) -> TensorDict:
        """Act in these rows (None: all), action int64 [n]: the states after it, [n]."""
        numbers = chosen_rows(rows, self.num_envs)
        actions = self._actions[checked_actions(action, self.spec, len(numbers))]
        index = np.array(numbers, np.int64)
        over = self._games[index, ENDED] | self._games[index, TIME_OVER]
        refuse_ended(index[over != 0].tolist())
        planes = self._planes(len(numbers))
        reward = np.empty(len(numbers), np.float32)
        self.step_rows(self._games, index, actions, self._sticky, self._ramping, reward, planes)
        self._last_planes[index] = planes
        ended = self._games[index, ENDED] != 0
        return TensorDict(
            observation=torch.from_numpy(planes),
            reward=torch.from_numpy(reward),
            terminated=torch.from_numpy(ended),
            truncated=torch.from_numpy((self._games[index, TIME_OVER] != 0) & ~ended),
            batch_size=[len(numbers)],
        )

    def render(self, row: int) -> Tensor:
        """A picture of one game, uint8 [240, 240, 3]: each plane its colour, the first on top."""
        picture = np.empty((SIZE, SIZE, 3), np.uint8)
        picture[:] = _GROUND
        for plane in reversed(range(len(self.channels))):
            picture[self._last_planes[row, plane] > 0] = _COLOURS[plane]
        return torch.from_numpy(picture.repeat(CELL, 0).repeat(CELL, 1))

    def close(self) -> None:
        """Close the games; they hold nothing to release."""

    def _planes(self, num_rows: int) -> Any:
        return np.zeros((num_rows, *self.spec.observation_shape), np.uint8)


class RampingBatch(MinAtarBatch):
    """A batch of a game that becomes harder with the steps, if `difficulty_ramping` is set.

    >>> from raffia.envs.minatar.asterix import MinAtarAsterix
    >>> MinAtarAsterix(2, difficulty_ramping=False).num_envs
    2
    """

    def __init__(
        self,
        num_envs: int,
        *,
        sticky_actions: float = 0.1,
        difficulty_ramping: bool = True,
        all_actions: bool = False,
    ) -> None:
        super().__init__(num_envs, sticky_actions=sticky_actions, all_actions=all_actions)
        self._ramping = difficulty_ramping
