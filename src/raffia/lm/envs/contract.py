"""The contract of a task in language: observations are dialogues, and environments answer.

A dialogue is a sequence of utterances, each an agent's, with the reward that followed it, or the
environment's, with None instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from raffia.lm.data.utterances import Language_Observation as Language_Observation
from raffia.lm.data.utterances import Utterance as Utterance


class Language_Environment(ABC):
    """An environment of dialogues: the agent gives a text, the environment answers.

    >>> class Talk(Language_Observation):
    ...     def __init__(self, *utterances, terminal=False):
    ...         self.utterances, self.terminal = utterances, terminal
    ...     def to_sequence(self):
    ...         return list(self.utterances), self.terminal
    ...     def __str__(self):
    ...         return " / ".join(text for text, _ in self.utterances)
    >>> class Sum(Language_Environment):
    ...     def reset(self, seed):
    ...         self.talk = Talk(("2 + 2?", None))
    ...         return self.talk
    ...     def step(self, action):
    ...         reward = float(action == "4")
    ...         self.talk = Talk(*self.talk.utterances, (action, reward), terminal=True)
    ...         return self.talk, reward, True
    ...     def is_terminal(self):
    ...         return self.talk.terminal
    >>> env = Sum()
    >>> question = env.reset(seed=0)
    >>> observation, reward, done = env.step("4")
    >>> print(observation, reward, done)
    2 + 2? / 4 1.0 True
    """

    @abstractmethod
    def reset(self, seed: int) -> Language_Observation:
        """Start a dialogue, all of whose randomness follows from the seed."""

    @abstractmethod
    def step(self, action: str) -> tuple[Language_Observation, float, bool]:
        """Answer the agent's text; returns the dialogue after it, the reward, and whether it has
        ended.

        After the end it raises an error that names `reset`.
        """

    @abstractmethod
    def is_terminal(self) -> bool:
        """Whether the dialogue has ended."""


class LanguagePolicy(Protocol):
    """A policy that returns the agent's next utterance.

    >>> class Polite:
    ...     def act(self, observation):
    ...         return "please"
    >>> policy: LanguagePolicy = Polite()
    """

    def act(self, observation: Any, /) -> str:
        """The agent's next utterance in a dialogue that has not ended."""


class BatchLanguagePolicy(LanguagePolicy, Protocol):
    """A policy that answers in many dialogues in one call, which is faster for a model.

    >>> class Polite:
    ...     def act(self, observation):
    ...         return self.act_batch([observation])[0]
    ...     def act_batch(self, observations):
    ...         return ["please"] * len(observations)
    >>> policy: BatchLanguagePolicy = Polite()
    """

    def act_batch(self, observations: Sequence[Any], /) -> list[str]:
        """The agent's next utterance in each of the dialogues."""
