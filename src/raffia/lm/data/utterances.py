"""What is asked of an observation and of a tokenizer, and whether what they give is right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, NoReturn, Protocol

__all__ = [
    "DialogueTokenizer",
    "Observation",
    "Sequences",
    "check_sequence",
    "check_tokens",
    "encode_utterance",
]

Sequences = Sequence[tuple[str, float | None]]


class Observation(Protocol):
    """What an environment of text shows: it can say what was spoken so far.

    >>> class Greeting:
    ...     def to_sequence(self):
    ...         return [("hello", None), ("hi", 1.0)], True
    >>> observation: Observation = Greeting()
    """

    def to_sequence(self) -> tuple[Sequences, bool]:
        """The utterances, each with the agent's reward for it or None; whether it is over.

        An utterance of the environment has None, one of the agent a number.
        """


class DialogueTokenizer(Protocol):
    """What is needed of a tokenizer here; `save` only where rows are kept in a folder.

    >>> class Bytes:
    ...     num_tokens, pad_token_id, bos_token_id, eos_token_id = 134, 128, 129, 130
    ...     boa_token_id, eoa_token_id, eod_token_id = 131, 132, 133
    ...     def encode(self, text):
    ...         return list(text.encode("ascii"))
    ...     def save(self, folder):
    ...         pass
    >>> tokenizer: DialogueTokenizer = Bytes()
    """

    @property
    def num_tokens(self) -> int:
        """How many tokens there are: their numbers are below it."""

    @property
    def pad_token_id(self) -> int:
        """Fills a row up."""

    @property
    def bos_token_id(self) -> int:
        """Begins a row in which the environment speaks first."""

    @property
    def eos_token_id(self) -> int:
        """Ends an utterance of the environment."""

    @property
    def boa_token_id(self) -> int:
        """Begins a row in which the agent speaks first."""

    @property
    def eoa_token_id(self) -> int:
        """Ends an utterance of the agent."""

    @property
    def eod_token_id(self) -> int:
        """Ends a dialogue that is over."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without any that begin or end it."""

    def save(self, folder: str) -> None:
        """Write all that `encode` depends on."""


def check_tokens(tokens: Sequence[int], num_tokens: int) -> None:
    """Raise ValueError unless all are numbers of tokens.

    >>> check_tokens([0, 35], 35)
    Traceback (most recent call last):
    ...
    ValueError: token 1 of the row is 35, and the vocabulary has 35 tokens, 0..34: was it made...
    """
    if min(tokens) >= 0 and max(tokens) < num_tokens:
        return
    at = next(place for place, token in enumerate(tokens) if not 0 <= token < num_tokens)
    raise ValueError(
        f"token {at} of the row is {tokens[at]}, and the vocabulary has {num_tokens} tokens, "
        f"0..{num_tokens - 1}: was it made by another tokenizer, or is the vocab_size too small?"
    )


def encode_utterance(text: str, tokenizer: DialogueTokenizer) -> list[int]:
    """The tokens of an utterance, none of which may be one that marks where utterances end.

    >>> from types import SimpleNamespace
    >>> numbers = SimpleNamespace(num_tokens=10, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ...     boa_token_id=3, eoa_token_id=4, eod_token_id=5, encode=lambda text: [*map(int, text)])
    >>> encode_utterance("84", numbers)
    Traceback (most recent call last):
    ...
    ValueError: the utterance '84' holds the eoa token (4), which marks where utterances begin...
    """
    content = list(tokenizer.encode(text))
    marks = {
        tokenizer.pad_token_id: "pad",
        tokenizer.bos_token_id: "bos",
        tokenizer.eos_token_id: "eos",
        tokenizer.boa_token_id: "boa",
        tokenizer.eoa_token_id: "eoa",
        tokenizer.eod_token_id: "eod",
    }
    if not marks.keys().isdisjoint(content):
        found = next(token for token in content if token in marks)
        raise ValueError(
            f"the utterance {_short(text)} holds the {marks[found]} token ({found}), which marks "
            "where utterances begin and end: leave it out of the text (and let `encode` add none)"
        )
    return content


def check_sequence(sequence: Any, terminal: Any) -> None:
    """Raise ValueError unless these are what `to_sequence` should give.

    >>> check_sequence([("hi", None), ("hello", "1")], True)
    Traceback (most recent call last):
    ...
    ValueError: the reward of utterance 1 is '1', not a number or None; a sequence is a list of ...
    """
    if terminal not in (True, False):
        _refuse(f"its second value is {terminal!r}, which must be True or False")
    for place, pair in enumerate(sequence):
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)):
            _refuse(f"utterance {place} is {_short(pair)}")
        reward = pair[1]
        if reward is None:
            continue
        if isinstance(reward, bool) or not isinstance(reward, Real):
            _refuse(f"the reward of utterance {place} is {_short(reward)}, not a number or None")
        if not math.isfinite(reward):
            _refuse(f"the reward of utterance {place} is {reward!r}, which is not finite")


def _refuse(why: str) -> NoReturn:
    raise ValueError(
        f'{why}; a sequence is a list of pairs (text, reward), as in [("hello", None), ("hi", 1.0)]'
        ": None where the environment speaks, a number where the agent does"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
