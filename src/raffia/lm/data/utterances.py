"""Dialogues as environments show them, and checks of their utterances and tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, NoReturn, Protocol, TypeAlias

from raffia.lm.tokenizers.tokenizer import Tokenizer, special_ids

__all__ = [
    "Observation",
    "Utterance",
    "check_sequence",
    "check_tokens",
    "encode_utterance",
    "shown",
]

Utterance: TypeAlias = tuple[str, float | None]  # with the agent's reward; None: the environment's


class Observation(Protocol):
    """What an environment of text shows: the dialogue so far, as a sequence of utterances.

    >>> class Greeting:
    ...     def to_sequence(self):
    ...         return [("hello", None), ("hi", 1.0)], True
    >>> observation: Observation = Greeting()
    """

    def to_sequence(self) -> tuple[Sequence[Utterance], bool]:
        """The utterances, each with the agent's reward for it or None; whether it is over.

        An utterance of the environment has None, one of the agent a number.
        """


def check_tokens(tokens: Sequence[int], num_tokens: int) -> None:
    """Raise ValueError unless all are numbers of tokens.

    >>> check_tokens([0, 35], 35)
    Traceback (most recent call last):
    ...
    ValueError: token 1 of the row is 35, and the vocabulary has 35 tokens, 0..34: was it made...
    """
    if min(tokens) >= 0 and max(tokens) < num_tokens:
        return
    at = next(i for i, token in enumerate(tokens) if not 0 <= token < num_tokens)
    raise ValueError(
        f"token {at} of the row is {tokens[at]}, and the vocabulary has {num_tokens} tokens, "
        f"0..{num_tokens - 1}: was it made by another tokenizer, or is the vocab_size too small?"
    )


def encode_utterance(text: str, tokenizer: Tokenizer) -> list[int]:
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
    marks = {number: role for role, number in special_ids(tokenizer).items()}
    if not marks.keys().isdisjoint(content):
        found = next(token for token in content if token in marks)
        raise ValueError(
            f"the utterance {shown(text)} holds the {marks[found]} token ({found}), which marks "
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
    for number, pair in enumerate(sequence):
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)):
            _refuse(f"utterance {number} is {shown(pair)}")
        reward = pair[1]
        if reward is None:
            continue
        if isinstance(reward, bool) or not isinstance(reward, Real):
            _refuse(f"the reward of utterance {number} is {shown(reward)}, not a number or None")
        if not math.isfinite(reward):
            _refuse(f"the reward of utterance {number} is {reward!r}, which is not finite")


def _refuse(why: str) -> NoReturn:
    raise ValueError(
        f'{why}; a sequence is a list of pairs (text, reward), as in [("hello", None), ("hi", 1.0)]'
        ": None for the environment's, a number for the agent's"
    )


def shown(value: Any) -> str:
    """A value in an error, on one line.

    >>> shown("hi")
    "'hi'"
    """
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
