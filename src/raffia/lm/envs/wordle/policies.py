"""Scripted players: good, bad, and mixtures; each guesses in many games in one call.

Legend: N games, V words of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from raffia.hints import check_choice, check_range
from raffia.lm.envs.draws import Draws
from raffia.lm.envs.wordle.game import NUM_CODES, Wordle

Numbers = npt.NDArray[np.int64]

NON_WORD = -1  # instead of a word's number: a guess that is not a word


@dataclass(frozen=True)
class Positions:
    """N games, all after the same number of turns.

    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> start = Positions.start(Wordle(vocabulary=Vocabulary(("crane", "crown"))), num_games=3)
    >>> len(start), start.turn
    (3, 0)
    """

    wordle: Wordle
    fits: npt.NDArray[np.bool_]  # [N, V]: which words can be the secret
    guesses: Numbers  # [N, turns]: numbers of the words so far, or NON_WORD

    @property
    def turn(self) -> int:
        """How many guesses were made."""
        return self.guesses.shape[1]

    def __len__(self) -> int:
        return len(self.fits)

    def __getitem__(self, rows: npt.NDArray[np.bool_]) -> Positions:
        return Positions(self.wordle, self.fits[rows], self.guesses[rows])

    @classmethod
    def start(cls, wordle: Wordle, num_games: int = 1) -> Positions:
        """The positions of games before the first guess.

        >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
        >>> Positions.start(Wordle(vocabulary=Vocabulary(("crane", "crown"))), 3).fits.shape
        (3, 2)
        """
        fits = np.ones((num_games, len(wordle.vocabulary)), np.bool_)
        return cls(wordle, fits, np.zeros((num_games, 0), np.int64))


class Script(Protocol):
    """A player that guesses by a fixed rule.

    >>> class First:
    ...     def guess(self, positions, draws):
    ...         return positions.fits.argmax(-1)
    >>> script: Script = First()
    """

    def guess(self, positions: Positions, draws: Draws) -> Numbers:
        """The number of a word for each game, or NON_WORD: [N].

        draws: each game's own, the same in all its turns
        """


@dataclass(frozen=True)
class RandomWord:
    """Any word of the vocabulary.

    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> start = Positions.start(Wordle(vocabulary=Vocabulary(("crane", "crown"))), 4)
    >>> RandomWord().guess(start, Draws.for_seeds(range(4))).shape
    (4,)
    """

    def guess(self, positions: Positions, draws: Draws) -> Numbers:
        """A guess for each game: [N]."""
        return draws.choose(np.ones_like(positions.fits), "word", positions.turn)


@dataclass(frozen=True)
class Fitting:
    """Any word that can be the secret.

    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> start = Positions.start(Wordle(vocabulary=Vocabulary(("crane",))))
    >>> Fitting().guess(start, Draws.for_seeds([0]))
    array([0])
    """

    def guess(self, positions: Positions, draws: Draws) -> Numbers:
        """A guess for each game: [N]."""
        return draws.choose(positions.fits, "word", positions.turn)


@dataclass(frozen=True)
class Wrong:
    """A word that cannot be the secret, as long as there is one; any word before all is known.

    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> wordle = Wordle(vocabulary=Vocabulary(("crane", "crown")))
    >>> known = Positions(wordle, np.array([[True, False]]), np.array([[1]]))
    >>> Wrong().guess(known, Draws.for_seeds([0]))
    array([1])
    """

    def guess(self, positions: Positions, draws: Draws) -> Numbers:
        """A guess for each game: [N]."""
        wrong = ~positions.fits
        return draws.choose(wrong | ~wrong.any(-1, keepdims=True), "word", positions.turn)


@dataclass(frozen=True)
class NonWord:
    """Something that is not in the vocabulary: four to six letters without sense.

    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> start = Positions.start(Wordle(vocabulary=Vocabulary(("crane",))))
    >>> NonWord().guess(start, Draws.for_seeds([0]))
    array([-1])
    """

    def guess(self, positions: Positions, draws: Draws) -> Numbers:
        """A guess for each game: [N]."""
        return np.full(len(positions), NON_WORD)


@dataclass(frozen=True)
class Say:
    """Guess these words in turn, whatever happens, and then repeat the last one.

    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> start = Positions.start(Wordle(vocabulary=Vocabulary(("crane", "crown"))))
    >>> Say(("crown",)).guess(start, Draws.for_seeds([0]))
    array([1])
    """

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.words or isinstance(self.words, str):
            raise ValueError(f"words={self.words!r} must have at least one word: Say(('crane',))")

    def guess(self, positions: Positions, draws: Draws) -> Numbers:
        """A guess for each game: [N]."""
        word = self.words[min(positions.turn, len(self.words) - 1)]
        number = positions.wordle.vocabulary.number(word)
        if number is None:
            raise ValueError(
                f"{word!r} is not in the vocabulary; use one of its words, or NonWord()"
            )
        return np.full(len(positions), number)


@dataclass(frozen=True)
class Repeat:
    """Guess some words of another script, and from then on repeat one of them: nothing more is
    learnt.

    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> wordle = Wordle(vocabulary=Vocabulary(("crane", "crown")))
    >>> later = Positions(wordle, np.array([[True, False]]), np.array([[1]]))
    >>> Repeat(Fitting()).guess(later, Draws.for_seeds([0]))
    array([1])
    """

    first: Script
    num_first: int = 1

    def __post_init__(self) -> None:
        check_range("num_first", self.num_first, 1)

    def guess(self, positions: Positions, draws: Draws) -> Numbers:
        """A guess for each game: [N]."""
        if positions.turn < self.num_first:
            return self.first.guess(positions, draws.of("first"))
        earlier = np.ones((len(positions), self.num_first), np.bool_)
        which = draws.choose(earlier, "which", positions.turn)
        return np.take_along_axis(positions.guesses, which[:, None], -1)[:, 0]


@dataclass(frozen=True)
class Switch:
    """Follow one script for a number of turns, and another one after them.

    >>> Switch(Say(("crane",)), 2, Fitting()).num_turns
    2
    """

    first: Script
    num_turns: int
    then: Script

    def guess(self, positions: Positions, draws: Draws) -> Numbers:
        """A guess for each game: [N]."""
        now = self.first if positions.turn < self.num_turns else self.then
        return now.guess(positions, draws.of("then" if now is self.then else "first"))


def start_word(word: str, then: Script) -> Switch:
    """A script that always begins with this word.

    >>> start_word("crane", Fitting()).first
    Say(words=('crane',))
    """
    return Switch(Say((word,)), 1, then)


@dataclass(frozen=True)
class Mixture:
    """One of several scripts, drawn for each game or for each guess.

    weights: how often each of them, in any unit

    >>> half_random = Mixture((RandomWord(), Fitting()), (1, 1), each="guess")
    >>> Mixture((half_random, InformationGain()), (1, 3)).fractions()
    [0.25, 0.75]
    """

    scripts: tuple[Script, ...]
    weights: tuple[float, ...]
    each: Literal["game", "guess"] = "game"

    def __post_init__(self) -> None:
        if len(self.scripts) != len(self.weights):
            raise ValueError(
                f"there are {len(self.scripts)} scripts but {len(self.weights)} weights: pass one "
                "for each"
            )
        if not self.weights or min(self.weights) < 0 or sum(self.weights) <= 0:
            raise ValueError(f"weights={self.weights} must be 0 or more, with at least one above 0")
        check_choice("each", self.each, ("game", "guess"))

    def fractions(self) -> list[float]:
        """The weights, so that their sum is 1."""
        return [weight / sum(self.weights) for weight in self.weights]

    def which(self, draws: Draws, turn: int) -> Numbers:
        """The index of the script that guesses in each game: [N].

        >>> mixture = Mixture((RandomWord(), Fitting()), (0, 1))
        >>> mixture.which(Draws.for_seeds([1, 2]), turn=0)
        array([1, 1])
        """
        drawn = draws.uniform("which", turn if self.each == "guess" else 0)
        bounds = np.cumsum(self.fractions()[:-1])
        return np.searchsorted(bounds, drawn, side="right")

    def guess(self, positions: Positions, draws: Draws) -> Numbers:
        """A guess for each game: [N]."""
        which = self.which(draws, positions.turn)
        guesses = np.zeros(len(positions), np.int64)
        for number, script in enumerate(self.scripts):
            rows = which == number
            if rows.any():
                guesses[rows] = script.guess(positions[rows], draws[rows].of("script", number))
        return guesses


@dataclass(frozen=True)
class InformationGain:
    """Guess the word whose colours give the most information about the secret: a strong player.

    The entropy of the colours over the words that fit; of equal words one that fits, and of those
    the first. It looks one guess ahead, so it is near the best player and not it. What it has
    worked out it keeps in `memory`, for positions are met again and again.

    only_fitting: guess only words that can be the secret

    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> wordle = Wordle(vocabulary=Vocabulary.built_in())
    >>> (best,) = InformationGain().guess(Positions.start(wordle), Draws.for_seeds([0]))
    >>> wordle.vocabulary[best]
    'trace'
    """

    only_fitting: bool = False
    memory: dict[Wordle, dict[bytes, int]] = field(default_factory=dict, repr=False, compare=False)

    def guess(self, positions: Positions, draws: Draws) -> Numbers:
        """A guess for each game, without random draws: [N]."""
        packed = np.packbits(positions.fits, axis=-1)
        keys, which = np.unique(packed, axis=0, return_inverse=True)
        first_of = np.full(len(keys), len(positions))
        np.minimum.at(first_of, which.ravel(), np.arange(len(positions)))
        best = np.zeros(len(keys), np.int64)
        memory = self.memory.setdefault(positions.wordle, {})
        for number, (key, row) in enumerate(zip(keys, first_of.tolist(), strict=True)):
            known = memory.get(key.tobytes())
            if known is None:
                known = self._best(positions.wordle.codes, positions.fits[row])
                memory[key.tobytes()] = known
            best[number] = known
        return best[which.ravel()]

    def _best(self, codes: npt.NDArray[np.uint8], fits: npt.NDArray[np.bool_]) -> int:
        numbers = np.flatnonzero(fits)
        if len(numbers) <= 2:  # one of two wins half the time, and gives as much as any
            return int(numbers[0])
        among = numbers if self.only_fitting else np.arange(len(fits))
        gain = information(codes[np.ix_(among, numbers)])
        # Equal sums may differ in the last digits, so entropies are compared rounded.
        return int(among[np.lexsort((among, ~fits[among], -gain.round(9)))[0]])


def information(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """The entropy of the colours of each guess, in nats: [G].

    codes: [G, S], of each guess for each secret, which are as likely as each other

    >>> information(np.array([[0, 0, 0, 0], [0, 0, 1, 1]], np.uint8)).round(3)
    array([0.   , 0.693])
    """
    num_guesses, num_secrets = codes.shape
    flat = codes + np.arange(num_guesses)[:, None] * NUM_CODES
    counts = np.bincount(flat.ravel(), minlength=num_guesses * NUM_CODES)
    sizes = np.arange(num_secrets + 1)
    weights = sizes * np.log(np.maximum(sizes, 1))
    sums = weights[counts].reshape(num_guesses, NUM_CODES).sum(-1)
    return np.log(num_secrets) - sums / num_secrets
