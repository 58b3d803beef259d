"""Texts as numbers: the protocol of tokenizers, and two of them, by pieces and by words.

`check_tokenizer` asks whether one has what rows of dialogue are made with, `tokenizer_checksum`
whether it is the same one.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeGuard

from raffia.files import make_folder, shown, write_json
from raffia.hints import did_you_mean

TOKENIZER_FILE = "raffia_tokenizer.json"

PURPOSES = {  # role -> token, and what it does; in this order our own tokenizers have them
    "pad": ("<|pad|>", "pads rows"),
    "eoa": ("</a>", "ends an utterance of the agent"),
    "eos": ("</s>", "ends an utterance of the environment"),
    "bos": ("<s>", "begins a dialogue that the environment begins"),
    "boa": ("<a>", "begins a dialogue that the agent begins"),
    "eod": ("</eod>", "ends a dialogue that is over"),
}
SPECIAL_TOKENS = {role: token for role, (token, _) in PURPOSES.items()}


class Tokenizer(Protocol):
    """Texts as numbers of tokens and back, with six special tokens around utterances.

    Rows of data are made with the special tokens and `encode`; a store of rows in a folder also
    asks for `save`, and whoever talks to the agent for the rest.

    >>> tokenizer: Tokenizer = character_tokenizer(["abc"])
    >>> tokenizer.encode("cab"), tokenizer.decode([0, 1]), tokenizer.pad_token_id
    ([2, 0, 1], 'ab', 3)
    """

    @property
    def num_tokens(self) -> int:
        """One more than the largest number of a token: the size of a model's vocabulary."""

    @property
    def pad_token_id(self) -> int:
        """Fills rows up."""

    @property
    def bos_token_id(self) -> int:
        """Begins a dialogue that the environment begins."""

    @property
    def boa_token_id(self) -> int:
        """Begins a dialogue that the agent begins."""

    @property
    def eos_token_id(self) -> int:
        """Ends an utterance of the environment."""

    @property
    def eoa_token_id(self) -> int:
        """Ends an utterance of the agent."""

    @property
    def eod_token_id(self) -> int:
        """Ends a dialogue that is over."""

    def encode(self, text: str) -> list[int]:
        """The tokens of an utterance: never special ones, whatever the text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens; special ones are left out."""

    def token_to_id(self, token: str) -> int:
        """The number of a token; KeyError if it is unknown."""

    def id_to_token(self, number: int) -> str:
        """The token of a number; KeyError if it is unknown."""

    def save(self, folder: str | Path) -> None:
        """Write it into a folder, for `load_tokenizer`."""


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The numbers of the special tokens, by their roles.

    >>> special_ids(character_tokenizer(["abc"]))
    {'pad': 3, 'eoa': 4, 'eos': 5, 'bos': 6, 'boa': 7, 'eod': 8}
    """
    return {role: getattr(tokenizer, f"{role}_token_id") for role in SPECIAL_TOKENS}


class SpecialTokens(ABC):
    """The numbers of the special tokens, by their roles."""

    # properties, because pyright takes no `cached_property` for one of a protocol
    @property
    def pad_token_id(self) -> int:
        """Fills rows up."""
        return self._special_ids["pad"]

    @property
    def bos_token_id(self) -> int:
        """Begins a dialogue that the environment begins."""
        return self._special_ids["bos"]

    @property
    def boa_token_id(self) -> int:
        """Begins a dialogue that the agent begins."""
        return self._special_ids["boa"]

    @property
    def eos_token_id(self) -> int:
        """Ends an utterance of the environment."""
        return self._special_ids["eos"]

    @property
    def eoa_token_id(self) -> int:
        """Ends an utterance of the agent."""
        return self._special_ids["eoa"]

    @property
    def eod_token_id(self) -> int:
        """Ends a dialogue that is over."""
        return self._special_ids["eod"]

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        return {role: self.special(role) for role in SPECIAL_TOKENS}

    @abstractmethod
    def special(self, role: str) -> int:
        """The number of the special token that has this role."""


@dataclass(frozen=True)
class ListTokenizer(SpecialTokens):
    """A list of tokens, numbered from 0.

    tokens: all of them, with the special ones
    unknown: one of them, for text that has no token; None: such text is an error
    """

    kind: ClassVar[str]

    tokens: tuple[str, ...]
    unknown: str | None = None

    def __post_init__(self) -> None:
        missing = [token for token in SPECIAL_TOKENS.values() if token not in self._ids]
        if missing:
            raise ValueError(
                f"the tokens lack {', '.join(missing)}, which mark where utterances begin and "
                "end: add them with tokens=(*words, *SPECIAL_TOKENS.values())"
            )
        if len(self._ids) < len(self.tokens):
            twice = next(t for i, t in enumerate(self.tokens) if self._ids[t] != i)
            raise ValueError(f"the token {twice!r} occurs twice; remove one of them")
        if "" in self._ids:
            raise ValueError(f"token {self._ids['']} is empty; remove it")
        if self.unknown is not None and self.unknown not in self._ids:
            raise ValueError(f"unknown={self.unknown!r} is not one of the tokens; add it to them")

    @cached_property
    def _ids(self) -> dict[str, int]:
        # Of a token that is there twice, the first index.
        return {token: i for i, token in reversed(list(enumerate(self.tokens)))}

    @cached_property
    def _content(self) -> dict[str, int]:
        """Tokens that texts are made of: no text is taken for a special one."""
        return {
            token: number for token, number in self._ids.items() if number not in self._specials
        }

    @cached_property
    def _specials(self) -> frozenset[int]:
        return frozenset(self._ids[token] for token in SPECIAL_TOKENS.values())

    @property
    def num_tokens(self) -> int:
        """How many tokens there are."""
        return len(self.tokens)

    def special(self, role: str) -> int:
        """The number of the special token that has this role."""
        return self._ids[SPECIAL_TOKENS[role]]

    def token_to_id(self, token: str) -> int:
        """The number of a token."""
        if token not in self._ids:
            raise KeyError(f"there is no token {token!r}{did_you_mean(token, self.tokens)}")
        return self._ids[token]

    def id_to_token(self, number: int) -> str:
        """The token of a number."""
        if not 0 <= number < len(self.tokens):
            raise KeyError(f"there is no token {number}; token ids are 0..{len(self.tokens) - 1}")
        return self.tokens[number]

    def save(self, folder: str | Path) -> None:
        """Write it into a folder, which is made if need be."""
        write_description(
            folder, {"kind": self.kind, "tokens": list(self.tokens), "unknown": self.unknown}
        )

    def _texts(self, ids: Iterable[int]) -> list[str]:
        """The tokens, without the special ones."""
        return [self.id_to_token(int(i)) for i in ids if int(i) not in self._specials]

    def _unknown_id(self, piece: str, text: str) -> int:
        if self.unknown is None:
            raise ValueError(
                f"there is no token for {shown(piece)} in {shown(text)}; create the tokenizer "
                "with it, or with a token for all unknown text: tokens=(..., '<|unk|>'), "
                "unknown='<|unk|>'"
            )
        return self._ids[self.unknown]


@dataclass(frozen=True)
class PieceTokenizer(ListTokenizer):
    """Tokens of any lengths; at each position of a text the longest one that matches.

    >>> tokenizer = PieceTokenizer(("a", "b", "<b>", *SPECIAL_TOKENS.values()))
    >>> tokenizer.encode("ab<b>"), tokenizer.decode([0, 2, 4])
    ([0, 1, 2], 'a<b>')
    """

    kind = "pieces"

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._content, key=len, reverse=True)
        known = "|".join(map(re.escape, longest_first)) or "(?!)"  # none: no match
        return re.compile(f"{known}|(?:(?!{known}).)+", re.DOTALL)  # a token, or what has none

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        ids = self._content
        if text in ids:
            return [ids[text]]
        pieces = self._pattern.findall(text)
        return [ids[p] if p in ids else self._unknown_id(p, text) for p in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens; special ones are left out."""
        return "".join(self._texts(ids))


@dataclass(frozen=True)
class WordTokenizer(ListTokenizer):
    """Tokens are the words between spaces.

    >>> tokenizer = WordTokenizer.from_texts(["the cat", "the dog"])
    >>> tokenizer.encode("the  dog"), tokenizer.decode([0, 1])
    ([2, 1], 'cat dog')
    """

    kind = "words"

    @classmethod
    def from_texts(cls, texts: Iterable[str], unknown: str | None = None) -> WordTokenizer:
        """The words of some texts, in the order of the alphabet.

        unknown: a token for all other words

        >>> WordTokenizer.from_texts(["a b"], unknown="<|unk|>").encode("a c")
        [0, 2]
        """
        words = sorted({word for text in texts for word in text.split()})
        return cls(_with_specials(words, unknown), unknown)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        ids = self._content
        return [ids[word] if word in ids else self._unknown_id(word, text) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, with a space between them; special ones are left out."""
        return " ".join(self._texts(ids))


def character_tokenizer(texts: Iterable[str], unknown: str | None = None) -> PieceTokenizer:
    """One token for each character of some texts, in the order of their codes.

    unknown: a token for each run of other characters

    >>> tokenizer = character_tokenizer(["hello"])
    >>> tokenizer.tokens[:4], tokenizer.num_tokens
    (('e', 'h', 'l', 'o'), 10)
    """
    characters = sorted({character for text in texts for character in text})
    return PieceTokenizer(_with_specials(characters, unknown), unknown)


def write_description(folder: str | Path, description: dict[str, Any]) -> None:
    """Write the description that `load_tokenizer` reads."""
    make_folder(folder)
    write_json(Path(folder, TOKENIZER_FILE), description, indent=1)


def _with_specials(content: Sequence[str], unknown: str | None) -> tuple[str, ...]:
    own = [] if unknown is None else [unknown]
    return tuple(dict.fromkeys([*content, *own, *SPECIAL_TOKENS.values()]))


FIX = (
    "HFTokenizer(folder, add_missing=True) of raffia.lm adds the special tokens that a Hugging "
    "Face tokenizer lacks (the model's vocabulary must then be that large), and Raffia's own "
    "tokenizers have them all"
)


def check_tokenizer(tokenizer: Any) -> None:
    """Raise ValueError unless there is a number for each special token.

    >>> from types import SimpleNamespace
    >>> check_tokenizer(SimpleNamespace(num_tokens=50257, pad_token_id=None, bos_token_id=50256))
    Traceback (most recent call last):
    ...
    ValueError: this SimpleNamespace as a tokenizer has no pad_token_id, the id of the token that
    pads rows: HFTokenizer(folder, add_missing=True) of raffia.lm adds the special ...
    """
    kind = f"this {type(tokenizer).__name__} as a tokenizer"
    num_tokens = getattr(tokenizer, "num_tokens", None)
    if not _is_number(num_tokens) or num_tokens < 1:
        raise ValueError(f"{kind} has no num_tokens, the largest token id plus one: {FIX}")
    for role, (_, purpose) in PURPOSES.items():
        name = f"{role}_token_id"
        number = getattr(tokenizer, name, None)
        if not _is_number(number):
            raise ValueError(f"{kind} has no {name}, the id of the token that {purpose}: {FIX}")
        if not 0 <= number < num_tokens:
            raise ValueError(
                f"its {name} is {number}, but {kind} has num_tokens={num_tokens}, so ids are "
                f"0..{num_tokens - 1}: raise num_tokens, and the model's vocab_size with it"
            )


def tokenizer_checksum(tokenizer: Tokenizer) -> str:
    """A checksum of a tokenizer's kind and of everything that it saves.

    >>> from types import SimpleNamespace
    >>> ids = dict(num_tokens=9, pad_token_id=0, bos_token_id=1, eos_token_id=2, boa_token_id=3,
    ...            eoa_token_id=4, eod_token_id=5)
    >>> first = SimpleNamespace(**ids, save=lambda folder: None)
    >>> second = SimpleNamespace(**{**ids, "num_tokens": 10}, save=lambda folder: None)
    >>> tokenizer_checksum(first) == tokenizer_checksum(second)
    False
    """
    code = hashlib.sha256()
    order = ("pad", "bos", "eos", "boa", "eoa", "eod")
    numbers = [tokenizer.num_tokens, *map(special_ids(tokenizer).__getitem__, order)]
    code.update(f"{type(tokenizer).__qualname__} {numbers}".encode())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        for root, folders, names in os.walk(folder):
            folders.sort()
            for name in sorted(names):
                path = os.path.join(root, name)
                with open(path, "rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                code.update(f"\n{os.path.relpath(path, folder)} {content}".encode())
    return code.hexdigest()


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)
