"""Wordle: the rules as a value, a game so far as an observation, and the environment of dialogues.

A row of colours is a text of g (right letter and position), y (the letter is elsewhere), b (not),
or a number: its code, in base 3 with b = 0, y = 1, g = 2 and the first letter's digit last.

Legend: V words of the vocabulary, G guesses, S secrets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from raffia.hints import check_choice, check_range
from raffia.lm.envs.contract import Language_Environment, Language_Observation, Utterance
from raffia.lm.envs.draws import Draws
from raffia.lm.envs.wordle.vocabulary import NUM_LETTERS, Vocabulary

Rule = Literal["newspaper", "paper"]
Codes = npt.NDArray[np.uint8]

NUM_CODES = 3**NUM_LETTERS
ALL_BLACK = 0
ALL_GREEN = NUM_CODES - 1
_DIGITS = "byg"


def colors(secret: str, guess: str, rule: Rule = "newspaper") -> str:
    """The colours of a guess.

    rule: "newspaper": a letter is yellow only while copies of it are left in the secret, where
        green ones count first, then yellow ones from the left. "paper": yellow wherever the letter
        is anywhere in the secret, as in the code of Snell et al. (2022).

    >>> colors("taste", "alarm"), colors("taste", "alarm", "paper")
    ('ybbbb', 'ybybb')
    """
    check_choice("rule", rule, get_args(Rule))
    if rule == "paper":
        left = Counter({letter: NUM_LETTERS for letter in secret})
    else:
        left = Counter(s for s, g in zip(secret, guess, strict=True) if s != g)
    row = ""
    for s, g in zip(secret, guess, strict=True):
        if s == g:
            row += "g"
        elif left[g] > 0:
            row += "y"
            left[g] -= 1
        else:
            row += "b"
    return row


def color_codes(secrets: tuple[str, ...], guesses: tuple[str, ...], rule: Rule) -> Codes:
    """The codes of all pairs: [G, S].

    >>> codes = color_codes(("taste", "robot"), ("alarm", "taste", "broom"), "newspaper")
    >>> [[colors_of(code) for code in row] for row in codes.tolist()]
    [['ybbbb', 'bbbyb'], ['ggggg', 'ybbbb'], ['bbbbb', 'yyygb']]
    """
    check_choice("rule", rule, get_args(Rule))
    of_guesses, of_secrets = _letters(guesses), _letters(secrets)
    same = [of_guesses[:, None, i] == of_secrets[None, :, i] for i in range(NUM_LETTERS)]
    codes = np.zeros((len(guesses), len(secrets)), np.uint8)
    for i in range(NUM_LETTERS):
        # Copies of this letter in the secret that no green takes, less those that went to the left.
        left = np.zeros(codes.shape, np.int8)
        for j in range(NUM_LETTERS):
            there = of_guesses[:, None, i] == of_secrets[None, :, j]
            left += there if rule == "paper" else there & ~same[j]
        if rule == "newspaper":
            for k in range(i):
                left -= (of_guesses[:, k] == of_guesses[:, i])[:, None] & ~same[k]
        codes += np.uint8(3**i) * np.where(same[i], 2, left > 0).astype(np.uint8)
    return codes


@cache
def colors_of(code: int) -> str:
    """The colours of a code.

    >>> colors_of(ALL_BLACK), colors_of(1), colors_of(ALL_GREEN)
    ('bbbbb', 'ybbbb', 'ggggg')
    """
    return "".join(_DIGITS[code // 3**i % 3] for i in range(NUM_LETTERS))


def code_of(row: str) -> int:
    """The code of a row of colours.

    >>> code_of("ybbbb")
    1
    """
    if len(row) != NUM_LETTERS or not set(row) <= set(_DIGITS):
        raise ValueError(
            f"{row!r} is not a row of colours, which has {NUM_LETTERS} letters of g, y, b"
        )
    return sum(_DIGITS.index(color) * 3**i for i, color in enumerate(row))


def _letters(words: tuple[str, ...]) -> npt.NDArray[np.uint8]:
    """[number of words, NUM_LETTERS]"""
    data = np.frombuffer("".join(words).encode("ascii"), dtype=np.uint8)
    return data.reshape(len(words), NUM_LETTERS)


Turn = tuple[str, str | None]  # a guess, and its colours like "gybbb"; None: it got no answer
Words = npt.NDArray[np.bool_]  # [V]: which words

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
        check_choice("rule", self.rule, get_args(Rule))
        check_range("num_tries", self.num_tries, 1)
        if self.secrets is not None and not self.secrets:
            raise ValueError("secrets=() leaves no word to be the secret; None allows all of them")
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
        """The words that the secret is drawn from, bool [V].

        >>> words = Vocabulary(("crane", "crown", "slate"))
        >>> Wordle(vocabulary=words, secrets=("slate",)).can_be_secret
        array([False, False,  True])
        """
        if self.secrets is None:
            return np.ones(len(self.vocabulary), np.bool_)
        return np.array([word in self.secrets for word in self.vocabulary])

    def is_valid(self, guess: str) -> bool:
        """Whether a guess counts as a word.

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
        """The words that can be the secret after these turns, bool [V].

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
    """The guesses up to now and their colours: all that a player sees.

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
        """Make the observation that corresponds to these utterances.

        >>> WordleObservation.from_sequence([("abcd", -1.0), ("slate", -1.0), ("<b>" * 5, None)])
        WordleObservation(turns=(('abcd', None), ('slate', 'bbbbb')), num_tries=6)
        """
        turns: list[Turn] = []
        for text, reward in utterances:
            if reward is not None:
                turns.append((text, None))
            elif not turns or turns[-1][1] is not None:
                raise ValueError(
                    f"{text!r} is not the answer to a guess; a guess must come before it"
                )
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


class WordleEnv(Language_Environment):
    """Six tries to find a secret word; the reward is 0 for the guess that wins, -1 for every other.

    Before each answer the secret is drawn again from the words that fit what is known, of those
    that can be the secret. To the player this is the game with one secret: given what is known,
    each of them is as likely as the others.

    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> env = WordleEnv(Wordle(vocabulary=Vocabulary.built_in()))
    >>> observation = env.reset(seed=3)
    >>> for word in ("slate", "crown"):
    ...     observation, reward, done = env.step(word)
    >>> print(observation, reward, done)
    slate  bbbbb
    crown  ybbyb -1.0 False
    >>> env.words_left()
    ('twice', 'watch', 'which')
    """

    def __init__(self, wordle: Wordle) -> None:
        self.wordle = wordle
        self._observation: WordleObservation | None = None

    def reset(self, seed: int) -> WordleObservation:
        """A new game."""
        self._draws = Draws.for_seeds([seed])
        self._fits = self.wordle.fitting(())
        self._observation = WordleObservation((), self.wordle.num_tries)
        return self._observation

    def step(self, action: str) -> tuple[WordleObservation, float, bool]:
        """Guess this word."""
        game = self._running()
        among = (self._fits & self.wordle.can_be_secret)[None]
        (secret,) = self._draws.choose(among, "secret", len(game.turns)).tolist()
        row = self.wordle.answer(action, self.wordle.vocabulary[secret])
        self._fits = self.wordle.fitting([(action, row)], self._fits)
        self._observation = game.after(action, row)
        return self._observation, self._observation.rewards()[-1], self._observation.terminal

    def is_terminal(self) -> bool:
        """Whether the game is over."""
        return self._observation is not None and self._observation.terminal

    def words_left(self) -> tuple[str, ...]:
        """The words that fit what is known."""
        numbers = self._fits.nonzero()[0].tolist()
        return tuple(self.wordle.vocabulary[number] for number in numbers)

    def _running(self) -> WordleObservation:
        if self._observation is None:
            raise RuntimeError("no game has started; call reset(seed) first")
        if self._observation.terminal:
            raise RuntimeError("the game is over; call reset(seed) to start another")
        return self._observation
