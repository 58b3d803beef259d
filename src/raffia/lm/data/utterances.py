"""Dialogues as environments show them, as tokens, and checks of their utterances and tokens.

A dialogue is written between the six special tokens of a tokenizer, or by its chat template.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from numbers import Real
from typing import Any, Protocol, TypeAlias

from raffia.files import shown
from raffia.lm.tokenizers.chat_template import AGENT, OTHER
from raffia.lm.tokenizers.hf_tokenizer import ChatTokenizer
from raffia.lm.tokenizers.tokenizer import Tokenizer, special_ids

Utterance: TypeAlias = tuple[str, float | None]  # with the agent's reward; None: the environment's


class Observation(Protocol):
    """The observation of an environment of text: the dialogue up to now, as a sequence of
    utterances.

    It may also have `roles`, a role of a chat template for each utterance: "system", "tool", "user"
    or "assistant". Without them the agent's are the assistant's, all others the user's.

    >>> class Greeting:
    ...     def to_sequence(self):
    ...         return [("hello", None), ("hi", 1.0)], True
    >>> observation: Observation = Greeting()
    """

    def to_sequence(self) -> tuple[Sequence[Utterance], bool]:
        """The utterances, each with the agent's reward for it or None; whether it is over.

        An utterance of the environment has None, one of the agent a number.
        """


class Language_Observation(ABC):
    """A dialogue up to now, as the next policy to act observes it.

    It is a value: a step of the environment gives a new one and leaves the old as it was.

    >>> class Asked(Language_Observation):
    ...     def to_sequence(self):
    ...         return [("2 + 2?", None)], False
    ...     def __str__(self):
    ...         return "2 + 2?"
    >>> Asked().to_sequence(), Asked().metadata()
    (([('2 + 2?', None)], False), {})
    """

    @abstractmethod
    def to_sequence(self) -> tuple[Sequence[Utterance], bool]:
        """The utterances with their rewards, and whether the dialogue has ended (`terminal`)."""

    @abstractmethod
    def __str__(self) -> str:
        """The dialogue for a person to read."""

    def metadata(self) -> dict[str, Any]:
        """Further facts about the dialogue as JSON values, none of which the agent reads."""
        return {}


def token_parts(
    observation: Observation, tokenizer: Tokenizer
) -> tuple[list[tuple[list[int], float | None]], bool]:
    """The tokens of a dialogue in parts, each with the agent's reward for it or None; whether it is
    over.

    The agent's parts have the token that ends them; all others are context. Raises ValueError for
    what is not a dialogue.
    """
    sequence, terminal = observation.to_sequence()
    check_sequence(sequence, terminal)
    if isinstance(tokenizer, ChatTokenizer):
        roles = getattr(observation, "roles", ()) or _default_roles(sequence)
        parts = _by_template(sequence, roles, bool(terminal), tokenizer)
    else:
        parts = _between_marks(sequence, bool(terminal), tokenizer)
    return list(parts), bool(terminal)


def _between_marks(
    sequence: Sequence[Utterance], terminal: bool, tokenizer: Tokenizer
) -> Iterator[tuple[list[int], float | None]]:
    marks = {number: role for role, number in special_ids(tokenizer).items()}
    opening = bool(sequence) and sequence[0][1] is None
    yield [tokenizer.bos_token_id if opening else tokenizer.boa_token_id], None
    for text, reward in sequence:
        end = tokenizer.eos_token_id if reward is None else tokenizer.eoa_token_id
        content = list(tokenizer.encode(text))  # of any iterable
        if not marks.keys().isdisjoint(content):
            found = next(token for token in content if token in marks)
            raise ValueError(
                f"the utterance {shown(text)} contains the {marks[found]} token ({found}), which "
                "marks where utterances begin and end: remove it from the text (and let `encode` "
                "add none)"
            )
        yield [*content, end], reward
    if terminal:
        yield [tokenizer.eod_token_id], None


def _by_template(
    sequence: Sequence[Utterance], roles: Sequence[str], terminal: bool, tokenizer: ChatTokenizer
) -> Iterator[tuple[list[int], float | None]]:
    if len(roles) != len(sequence):
        raise ValueError(f"{len(roles)} roles for {len(sequence)} utterances: there is one of each")
    messages = [
        {"role": AGENT if reward is not None else role, "content": text}
        for role, (text, reward) in zip(roles, sequence, strict=True)
    ]
    rewards = iter([reward for _, reward in sequence if reward is not None])
    for tokens, by_agent in tokenizer.parts(messages, is_over=terminal):
        yield tokens, next(rewards) if by_agent else None


def _default_roles(sequence: Sequence[Utterance]) -> list[str]:
    return [OTHER if reward is None else AGENT for _, reward in sequence]


def check_tokens(tokens: Sequence[int], num_tokens: int) -> None:
    """Raise ValueError unless all are numbers of tokens.

    >>> check_tokens([0, 35], 35)
    Traceback (most recent call last):
    ...
    ValueError: token 1 of the row is 35, but the vocabulary has 35 tokens, 0..34: the ...
    """
    if min(tokens) >= 0 and max(tokens) < num_tokens:
        return
    at = next(i for i, token in enumerate(tokens) if not 0 <= token < num_tokens)
    raise ValueError(
        f"token {at} of the row is {tokens[at]}, but the vocabulary has {num_tokens} tokens, "
        f"0..{num_tokens - 1}: the row was made with another tokenizer, or vocab_size is too small"
    )


def check_sequence(sequence: Any, terminal: Any) -> None:
    """Raise ValueError unless these are valid results of `to_sequence`.

    >>> check_sequence([("hi", None), ("hello", "1")], True)
    Traceback (most recent call last):
    ...
    ValueError: the reward of utterance 1 is '1', not a number or None; a sequence must be a ...
    """
    why = _wrong(sequence, terminal)
    if why:
        raise ValueError(
            f'{why}; a sequence must be a list of pairs (text, reward), as in [("hello", None), '
            '("hi", 1.0)], with None for the environment and a number for the agent'
        )


def _wrong(sequence: Any, terminal: Any) -> str:
    """A description of what is wrong with a sequence; empty if it is valid."""
    if terminal not in (True, False):
        return f"its second value is {terminal!r}, but must be True or False"
    if not isinstance(sequence, Sequence) or isinstance(sequence, str):
        return f"{shown(sequence)} is not a list of utterances"
    for number, pair in enumerate(sequence):
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)):
            return f"utterance {number} is {shown(pair)}"
        if not _can_be_written(pair[0]):
            return f"utterance {number} contains half of a surrogate pair: {shown(pair[0])}"
        reason = "" if pair[1] is None else wrong_reward(pair[1])
        if reason:
            return f"the reward of utterance {number} {reason}"
    return ""


def _can_be_written(text: str) -> bool:
    """Whether a text has characters only; JSON can spell halves of some, as in "\\ud800"."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def wrong_reward(value: Any) -> str:
    """Why something cannot be a reward; nothing for a finite number.

    >>> wrong_reward(1.5), wrong_reward("1"), wrong_reward(float("inf"))
    ('', "is '1', not a number or None", 'is inf, which is not finite')
    """
    # A float is known; to ask whether another class is of numbers takes a microsecond.
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        return f"is {shown(value)}, not a number or None"
    with suppress(OverflowError):  # of a whole number of hundreds of digits
        if math.isfinite(value):
            return ""
    return f"is {shown(value)}, which is not finite"
