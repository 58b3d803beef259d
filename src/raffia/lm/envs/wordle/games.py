"""Many games of a script simulated together, as arrays.

Legend: N games, V words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from raffia.functional.seeds import derive_seed
from raffia.lm.envs.draws import Draws
from raffia.lm.envs.wordle.game import (
    ALL_BLACK,
    ALL_GREEN,
    OTHER_REWARD,
    WIN_REWARD,
    Wordle,
    WordleObservation,
    colors_of,
)
from raffia.lm.envs.wordle.policies import NON_WORD, Numbers, Positions, Script
from raffia.lm.envs.wordle.vocabulary import NUM_LETTERS

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def game_seeds(seed: int, num_games: int) -> list[int]:
    """A seed for each game of a set; the games of a larger set begin with those of a smaller one.

    >>> game_seeds(0, 2) == game_seeds(0, 5)[:2]
    True
    """
    return [derive_seed(seed, "wordle game", number) for number in range(num_games)]


@dataclass(frozen=True)
class Games:
    """N finished games.

    >>> from raffia.lm.envs.wordle.policies import Say
    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> wordle = Wordle(vocabulary=Vocabulary(("crane", "crown", "slate")))
    >>> games = simulate(wordle, Say(("slate", "crane", "crown")), seeds=[0, 1, 2, 3])
    >>> games.returns().tolist()
    [-2.0, -1.0, -2.0, 0.0]
    >>> print(games[1])
    slate  bbgbg
    crane  ggggg
    """

    wordle: Wordle
    draws: Draws
    guesses: Numbers  # [N, num_tries]: numbers of words, or NON_WORD
    codes: npt.NDArray[np.uint8]  # [N, num_tries]: their colours
    lengths: Numbers  # [N]: how many guesses there were; what follows has no meaning

    def __len__(self) -> int:
        return len(self.lengths)

    def won(self) -> npt.NDArray[np.bool_]:
        """Whether each was won: [N]."""
        return self.codes[np.arange(len(self)), self.lengths - 1] == ALL_GREEN

    def returns(self) -> npt.NDArray[np.floating[Any]]:
        """The sum of the rewards of each: [N]."""
        last = np.where(self.won(), WIN_REWARD, OTHER_REWARD)
        return (self.lengths - 1) * OTHER_REWARD + last

    def __getitem__(self, game: int) -> WordleObservation:
        observation = WordleObservation((), self.wordle.num_tries)
        for turn in range(int(self.lengths[game])):
            number = int(self.guesses[game, turn])
            row: str | None = colors_of(int(self.codes[game, turn]))
            if number == NON_WORD:
                text = self._non_words[game, turn]
                row = row if self.wordle.answer_invalid else None
            else:
                text = self.wordle.vocabulary[number]
            observation = observation.after(text, row)
        return observation

    def __iter__(self) -> Iterator[WordleObservation]:
        return (self[game] for game in range(len(self)))

    @cached_property
    def _non_words(self) -> dict[tuple[int, int], str]:
        """What was said instead of a word, by game and turn."""
        found: dict[tuple[int, int], str] = {}
        for turn in range(self.wordle.num_tries):
            here = (self.guesses[:, turn] == NON_WORD) & (turn < self.lengths)
            games = here.nonzero()[0]
            texts = self._without_sense(self.draws[games].of("letters", turn))
            found.update(zip([(game, turn) for game in games.tolist()], texts, strict=True))
        return found

    def _without_sense(self, draws: Draws) -> list[str]:
        """Letters without sense; five of them only where they are not a guess."""
        lengths = (4, 6, NUM_LETTERS) if self.wordle.known_words_only else (4, 6)
        sizes = [lengths[i] for i in _number(draws, len(lengths), "length")]
        texts: dict[int, str] = {}
        for attempt in range(1000):
            left = [row for row in range(len(sizes)) if row not in texts]
            if not left:
                return [texts[row] for row in range(len(sizes))]
            now = draws[np.array(left)]
            drawn = [_number(now, len(_LETTERS), attempt, i) for i in range(max(lengths))]
            for row, *letters in zip(left, *drawn, strict=True):
                text = "".join([_LETTERS[i] for i in letters[: sizes[row]]])
                if text not in self.wordle.vocabulary:
                    texts[row] = text
        raise AssertionError("a vocabulary of all words there are")


def _number(draws: Draws, below: int, *parts: int | str) -> list[int]:
    """A number from 0 to before `below` for each row."""
    return (draws.uniform(*parts) * below).astype(np.int64).tolist()


def simulate(
    wordle: Wordle,
    script: Script,
    seeds: npt.ArrayLike,
    *,
    secrets: npt.ArrayLike | None = None,
) -> Games:
    """Play one game for each seed in a batch: the same games as one by one in `WordleEnv`.

    secrets: numbers of words, one for each seed, that stay the secrets of their games; None: they
        are drawn again before each answer, which to a player is the same

    >>> from raffia.lm.envs.wordle.policies import InformationGain
    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> wordle = Wordle(vocabulary=Vocabulary.built_in().subset(50))
    >>> games = simulate(wordle, InformationGain(), game_seeds(0, 200))
    >>> games.returns().mean().round(1)
    np.float64(-1.3)
    """
    draws = Draws.for_seeds(seeds)
    num_games, num_words = len(draws.keys), len(wordle.vocabulary)
    fixed = None if secrets is None else np.asarray(secrets, np.int64)
    if fixed is not None and (len(fixed) != num_games or not (0 <= fixed).all()):
        raise ValueError(
            f"there are {len(fixed)} secrets for {num_games} seeds; pass one number for each"
        )
    if fixed is not None and (fixed >= num_words).any():
        raise ValueError(
            f"the secret {fixed.max()} is not the number of a word; there are {num_words}"
        )
    guesses = np.full((num_games, wordle.num_tries), NON_WORD)
    codes = np.zeros(guesses.shape, np.uint8)
    lengths = np.zeros(num_games, np.int64)
    running = np.arange(num_games)
    fits = np.ones((num_games, num_words), np.bool_)  # of the running ones
    for turn in range(wordle.num_tries):
        if not len(running):
            break
        now = draws[running]
        if fixed is None:
            secret = now.choose(fits & wordle.can_be_secret, "secret", turn)
        else:
            secret = fixed[running]
        guess = script.guess(Positions(wordle, fits, guesses[running, :turn]), now.of("script"))
        is_word = guess != NON_WORD
        code = np.where(is_word, wordle.codes[guess, secret], ALL_BLACK).astype(np.uint8)
        fits = fits & (~is_word[:, None] | (wordle.codes[guess] == code[:, None]))
        guesses[running, turn], codes[running, turn] = guess, code
        lengths[running] = turn + 1
        goes_on = code != ALL_GREEN
        running, fits = running[goes_on], fits[goes_on]
    return Games(wordle, draws, guesses, codes, lengths)
