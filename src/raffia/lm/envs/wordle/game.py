"""Wordle: the rules as a value, and a game so far as an observation.

Legend: V words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from raffia.lm.envs.contract import Language_Observation, Utterance
from raffia.lm.envs.wordle.colors import (
    ALL_BLACK,
    ALL_GREEN,
    Rule,
    code_of,
    color_codes,
    colors_of,
    require_rule,
)
from raffia.lm.envs.wordle.vocabulary import NUM_LETTERS, Vocabulary

Turn = tuple[str, str | None]  # a guess, and its colours like "gybbb"; None: it got no answer
Words = npt.NDArray[np.bool_]  # [V]: which words
Codes = npt.NDArray[np.uint8]

_GREEN = colors_of(ALL_GREEN)
WIN_REWARD, OTHER_REWARD = 0.0, -1.0


@dataclass(frozen=True, kw_only=True)
class Wordle:
    """The rules of the game, and the table of all colours, which is made once.

    rule: see `colors`
    known_words_only: a guess outside the vocabulary is invalid; else any five letters are a guess
    answer_invalid: an invalid guess gets five times black; else it gets no answer at all, as in the
        code of Snell et al. (2022), where any five letters count as a guess, too. Either way it
        takes a try and gives no information.
    secrets: the words of the vocabulary that can be the secret; None: all. No player knows them.

    >>> wordle = Wordle(vocabulary=Vocabulary(("crane", "crown", "slate")))
    >>> wordle.answer("crown", secret="crane"), wordle.answer("toolong", secret="crane")
    ('ggbby', 'bbbbb')
    """

    vocabulary: Vocabulary
    rule: Rule = "newspaper"
    known_words_only: bool = True
    answer_invalid: bool = True
    num_tries: int = 6
    secrets: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        require_rule(self.rule)
        if self.num_tries < 1:
            raise ValueError(f"num_tries={self.num_tries} must be 1 or more; the game has 6")
        if self.secrets is not None and not self.secrets:
            raise ValueError("secrets=(): no word can be the secret; None lets all of them be it")
        for secret in self.secrets or ():
            if secret not in self.vocabulary:
                raise ValueError(f"the secret {secret!r} is not in the vocabulary; add it there")

    @classmethod
    def as_published(cls, vocabulary: Vocabulary) -> Wordle:
        """The rules of the code of Snell et al. (2022), to compare with.

        >>> wordle = Wordle.as_published(Vocabulary(("taste", "crane")))
        >>> wordle.answer("alarm", "taste"), wordle.answer("toolong", "taste")
        ('ybybb', None)
        """
        return cls(
            vocabulary=vocabulary, rule="paper", known_words_only=False, answer_invalid=False
        )

    @cached_property
    def codes(self) -> Codes:
        """The code of the colours of every word for every secret, [V, V]: guess, then secret.

        >>> wordle = Wordle(vocabulary=Vocabulary(("crane", "crown", "slate")))
        >>> colors_of(int(wordle.codes[1, 0]))
        'ggbby'
        """
        words = self.vocabulary.words
        return color_codes(words, words, self.rule)

    @cached_property
    def can_be_secret(self) -> Words:
        """Which words the secret is drawn from: [V].

        >>> words = Vocabulary(("crane", "crown", "slate"))
        >>> Wordle(vocabulary=words, secrets=("slate",)).can_be_secret
        array([False, False,  True])
        """
        if self.secrets is None:
            return np.ones(len(self.vocabulary), np.bool_)
        return np.array([word in self.secrets for word in self.vocabulary])

    def is_valid(self, guess: str) -> bool:
        """Whether a guess is answered for what it is.

        >>> Wordle(vocabulary=Vocabulary(("crane",))).is_valid("robot")
        False
        """
        if guess in self.vocabulary:
            return True
        letters = len(guess) == NUM_LETTERS and guess.isascii() and guess.isalpha()
        return letters and guess.islower() and not self.known_words_only

    def answer(self, guess: str, secret: str) -> str | None:
        """The colours that a guess gets; None where it gets no answer.

        >>> Wordle(vocabulary=Vocabulary(("crane",))).answer("crane", "crane")
        'ggggg'
        """
        number = self.vocabulary.number(secret)
        if number is None:
            raise ValueError(f"the secret {secret!r} is not in the vocabulary")
        if not self.is_valid(guess):
            return colors_of(ALL_BLACK) if self.answer_invalid else None
        return colors_of(int(self._row(guess)[number]))

    def fitting(self, turns: Iterable[Turn], among: Words | None = None) -> Words:
        """Which words can be the secret after these turns: [V].

        among: which could be before them; None: all

        A word fits if, as the secret, it would have got the guesses the very colours that they got.

        >>> wordle = Wordle(vocabulary=Vocabulary(("crane", "crown", "slate")))
        >>> wordle.fitting([("slate", "bbgbg")])
        array([ True, False, False])
        """
        fits = np.ones(len(self.vocabulary), np.bool_) if among is None else among
        for guess, row in turns:
            if row is not None and self.is_valid(guess):
                fits = fits & (self._row(guess) == code_of(row))
        return fits

    def words_left(self, turns: Iterable[Turn]) -> tuple[str, ...]:
        """The words that fit.

        >>> wordle = Wordle(vocabulary=Vocabulary(("crane", "crown", "slate")))
        >>> wordle.words_left([("slate", "bbbbb")])
        ('crown',)
        """
        numbers = np.flatnonzero(self.fitting(turns)).tolist()
        return tuple(self.vocabulary[number] for number in numbers)

    def _row(self, guess: str) -> Codes:
        """The codes of a valid guess for every secret: [V]."""
        number = self.vocabulary.number(guess)
        if number is not None:
            return self.codes[number]
        return color_codes(self.vocabulary.words, (guess,), self.rule)[0]


@dataclass(frozen=True)
class WordleObservation(Language_Observation):
    """The guesses so far and their colours: all that a player sees.

    The reward is 0 for the guess that wins, and -1 for every other.

    >>> game = WordleObservation((("slate", "bbgbg"), ("crane", "ggggg")))
    >>> game.to_sequence()[0][:3]
    [('slate', -1.0), ('<b><b><g><b><g>', None), ('crane', 0.0)]
    >>> print(game)
    slate  bbgbg
    crane  ggggg
    """

    turns: tuple[Turn, ...] = ()
    num_tries: int = 6

    @classmethod
    def from_sequence(
        cls, utterances: Sequence[Utterance], num_tries: int = 6
    ) -> WordleObservation:
        """The observation that gives these utterances.

        >>> WordleObservation.from_sequence([("abcd", -1.0), ("slate", -1.0), ("<b>" * 5, None)])
        WordleObservation(turns=(('abcd', None), ('slate', 'bbbbb')), num_tries=6)
        """
        turns: list[Turn] = []
        for text, reward in utterances:
            if reward is not None:
                turns.append((text, None))
            elif not turns or turns[-1][1] is not None:
                raise ValueError(f"{text!r} is not the answer to a guess; a guess stands before it")
            else:
                row = text.replace("<", "").replace(">", "")
                code_of(row)  # raises an error for what is wrong with it
                turns[-1] = turns[-1][0], row
        return cls(tuple(turns), num_tries)

    @property
    def won(self) -> bool:
        """Whether the last guess was right."""
        return bool(self.turns) and self.turns[-1][1] == _GREEN

    @property
    def terminal(self) -> bool:
        """Whether the game is over: won, or no try is left."""
        return self.won or len(self.turns) >= self.num_tries

    def rewards(self) -> list[float]:
        """The reward of each guess.

        >>> WordleObservation((("slate", "bbgbg"), ("crane", "ggggg"))).rewards()
        [-1.0, 0.0]
        """
        return [WIN_REWARD if row == _GREEN else OTHER_REWARD for _, row in self.turns]

    def to_sequence(self) -> tuple[list[Utterance], bool]:
        """The guesses with their rewards, each followed by its colours like "<b><y><g><b><b>"."""
        utterances: list[Utterance] = []
        for (guess, row), reward in zip(self.turns, self.rewards(), strict=True):
            utterances.append((guess, reward))
            if row is not None:
                utterances.append(("".join(f"<{color}>" for color in row), None))
        return utterances, self.terminal

    def metadata(self) -> dict[str, Any]:
        """Whether it was won, and the number of guesses.

        >>> WordleObservation((("crane", "ggggg"),)).metadata()
        {'won': True, 'num_guesses': 1}
        """
        return {"won": self.won, "num_guesses": len(self.turns)}

    def after(self, guess: str, row: str | None) -> WordleObservation:
        """The observation one turn later.

        >>> WordleObservation().after("crane", "ggggg").won
        True
        """
        return WordleObservation((*self.turns, (guess, row)), self.num_tries)

    def __str__(self) -> str:
        return "\n".join(f"{guess}  {row or 'no answer'}" for guess, row in self.turns)
