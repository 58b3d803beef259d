"""The words of the game: a list of our own, or a file of yours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path

from raffia.hints import check_range
from raffia.lm.envs.draws import Draws

NUM_LETTERS = 5
_WORD = re.compile(f"[a-z]{{{NUM_LETTERS}}}")


class VocabularyError(ValueError):
    """A list of words that cannot be played with; names the word, and in a file the line.

    >>> try:
    ...     Vocabulary(("crane", "crown", "crane"))
    ... except VocabularyError as error:
    ...     print(error)
    word 3: 'crane' is a duplicate of word 1: remove one of them
    """


@dataclass(frozen=True)
class Vocabulary:
    """Words of five letters, each with its number.

    >>> words = Vocabulary(("crane", "slate", "adieu"))
    >>> len(words), words[1], words.number("slate"), "robot" in words
    (3, 'slate', 1, False)
    """

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        _check((f"word {number}", word) for number, word in enumerate(self.words, 1))
        if not self.words:
            raise VocabularyError(
                "a vocabulary must have at least one word: Vocabulary(('crane',))"
            )

    @classmethod
    def built_in(cls) -> Vocabulary:
        """About 670 plain English words in alphabetical order.

        >>> len(Vocabulary.built_in()) > 600
        True
        """
        text = files("raffia.lm.envs.wordle").joinpath("words.txt").read_text("utf-8")
        return cls(tuple(text.split()))

    @classmethod
    def from_file(cls, path: str | Path) -> Vocabulary:
        """The words of a text file: one on each line; empty lines and those with # are skipped.

        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "words.txt")
        ...     _ = path.write_text("# mine\\ncrane\\nslate\\n")
        ...     Vocabulary.from_file(path).words
        ('crane', 'slate')
        """
        try:
            lines = Path(path).read_text("utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise VocabularyError(f"{path} is not text in UTF-8: {error}") from error
        words = [
            (f"{path}:{number}", line.strip())
            for number, line in enumerate(lines, 1)
            if line.strip() and not line.startswith("#")
        ]
        _check(words)
        if not words:
            raise VocabularyError(f"{path} contains no words; write one on each line")
        return cls(tuple(word for _, word in words))

    def subset(self, num_words: int, seed: int = 0) -> Vocabulary:
        """Draw this many of the words by the seed, and keep their order: a smaller game.

        A smaller subset of the same seed lies in the larger one.

        >>> words = Vocabulary.built_in()
        >>> few, more = words.subset(24, seed=1), words.subset(200, seed=1)
        >>> len(few), set(few) < set(more)
        (24, True)
        """
        check_range("num_words", num_words, 1, len(self))
        order = Draws.for_rows(seed, range(len(self)), "words of a subset").uniform().argsort()
        return Vocabulary(tuple(self.words[index] for index in sorted(order[:num_words].tolist())))

    def number(self, word: str) -> int | None:
        """The word's index in the list; None if it is not in the list.

        >>> Vocabulary(("crane",)).number("robot") is None
        True
        """
        return self._numbers.get(word)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def __iter__(self) -> Iterator[str]:
        return iter(self.words)

    def __getitem__(self, number: int) -> str:
        return self.words[number]

    def __contains__(self, word: object) -> bool:
        return word in self._numbers


def _check(words: Iterable[tuple[str, str]]) -> None:
    """words: each with where it is."""
    first: dict[str, str] = {}
    for where, word in words:
        if not _WORD.fullmatch(word):
            raise VocabularyError(
                f"{where}: {word!r} is not a word of the game, which has {NUM_LETTERS} letters "
                "a-z, like 'crane': correct it or leave it out"
            )
        if word in first:
            raise VocabularyError(
                f"{where}: {word!r} is a duplicate of {first[word]}: remove one of them"
            )
        first[word] = where
