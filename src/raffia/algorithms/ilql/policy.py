"""`ILQL_Policy`: the agent's utterances in a dialogue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from raffia.algorithms.ilql.generate import generate
from raffia.algorithms.ilql.model import ILQLModel, ILQLTarget
from raffia.data.readers.episode import Location
from raffia.envs.checked import short_repr
from raffia.lm.data.data_point import DataPoint
from raffia.lm.data.dialogue_rows import ROLES, Dialogue, dialogue_of_messages
from raffia.lm.data.utterances import Observation
from raffia.lm.decoding.config import DecodeConfig
from raffia.lm.decoding.generations import Generations
from raffia.lm.tokenizers.hf_tokenizer import ChatTokenizer
from raffia.lm.tokenizers.tokenizer import Tokenizer

Prompt: TypeAlias = (
    str | list[dict[str, Any]] | Observation
)  # a text, messages, or as environments show it


def observation_of(prompt: Prompt) -> Observation:
    """An observation of a prompt: a text of the other side, or the messages of a chat.

    >>> observation_of("hi").to_sequence()
    ([('hi', None)], False)
    >>> observation_of([{"role": "user", "content": "hi"}])
    Dialogue(sequence=[('hi', None)], terminal=False, roles=('user',))
    """
    if isinstance(prompt, str):
        return Dialogue([(prompt, None)], terminal=False)
    if isinstance(prompt, list):
        here = Location(Path("the dialogue"), "act")
        return dialogue_of_messages(prompt, here, ROLES)._replace(terminal=False)
    if not hasattr(prompt, "to_sequence"):
        raise TypeError(
            "a dialogue is a text, a list of messages such as {'role': 'user', 'content': 'hi'}, "
            f"or an observation with `to_sequence`; not a {type(prompt).__name__}"
        )
    return prompt


class ModelAndTarget(Protocol):
    """The networks that generate: `ILQL`, or anything with these two."""

    @property
    def model(self) -> ILQLModel: ...

    @property
    def target(self) -> ILQLTarget: ...


class ILQL_Policy:
    """Answers observations with texts, drawn, by beams or planned, in evaluation mode.

    agent: whose networks are asked, as they are at each answer.
    config: `num_beams=None` draws; 1 is greedy; more is a beam search; with `plan.num_simulations`
        a tree search chooses each token.
    generator: of the draws; None for torch's own.

    >>> from raffia.algorithms.ilql.agent import ILQL
    >>> from raffia.lm.tokenizers.tokenizer import character_tokenizer
    >>> from raffia.lm.envs.wordle.game import WordleObservation
    >>> tokenizer = character_tokenizer(["abcdefghijklmnopqrstuvwxyz"])
    >>> agent = ILQL(None, {"vocab_size": tokenizer.num_tokens, "n_layer": 1, "n_head": 2,
    ...                     "n_embd": 8, "block_size": 64})
    >>> policy = ILQL_Policy(agent, tokenizer, DecodeConfig(num_beams=2, max_new_tokens=5))
    >>> len(policy.act(WordleObservation())) <= 5
    True
    >>> policy  # doctest: +ELLIPSIS
    ILQL_Policy(... parameters, 32 tokens, a context of 64, DecodeConfig(num_beams=2, ...))
    """

    def __init__(
        self,
        agent: ModelAndTarget,
        tokenizer: Tokenizer,
        config: DecodeConfig | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        vocab_size = agent.model.trunk.vocab_size
        if tokenizer.num_tokens > vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer.num_tokens} tokens, but the model has "
                f"{vocab_size}: use the tokenizer that the model was trained with"
            )
        self.agent, self.tokenizer, self.generator = agent, tokenizer, generator
        self.config = DecodeConfig() if config is None else config

    def __repr__(self) -> str:
        num = sum(p.numel() for p in self.agent.model.parameters())
        return (
            f"ILQL_Policy({num:,} parameters, {self.tokenizer.num_tokens:,} tokens, a context of "
            f"{self.block_size:,}, {short_repr(self.config)})"
        )

    def act(self, observation: Prompt) -> str:
        """The next utterance in a dialogue that has not ended: `act("hi")`, or messages of a chat.

        An environment's observation has a `to_sequence`.
        """
        return self.act_batch([observation])[0]

    def act_batch(self, observations: Sequence[Prompt]) -> list[str]:
        """The next utterance in each of the dialogues; quicker than one by one."""
        return self.texts(self.answer(observations))

    def answer(self, observations: Sequence[Prompt]) -> Generations:
        """Answer as tokens: all generated ones, with their scores."""
        if isinstance(observations, str):
            raise TypeError("several dialogues are a list: act_batch([text]), or act(text) for one")
        return generate(
            self.agent.model,
            self.agent.target,
            [self.prompt(observation) for observation in observations],
            self.config,
            generator=self.generator,
            tokenizer=self.tokenizer,
        )

    @property
    def block_size(self) -> int:
        """Tokens of the context."""
        return self.agent.model.trunk.block_size

    @property
    def room(self) -> int:
        """Tokens that are free for an answer once utterances had to be left out."""
        least = max(1, self.block_size // 4)
        return min(least, self.config.max_new_tokens or least)

    def prompt(self, observation: Prompt) -> list[int]:
        """The dialogue up to now as tokens, in the form of a data set's rows; see `fit`."""
        return self.fit(observation)[0]

    def fit(self, observation: Prompt, room: int = 1) -> tuple[list[int], int]:
        """The prompt, and how many utterances were left out because the context has no room.

        room: tokens for the answer. Where they are not free, the first utterances are left out, but
            for a system message, until `self.room` are; of a last utterance that is longer than the
            context, the beginning.
        """
        observation = observation_of(observation)
        whole = self.tokens(observation)
        if len(whole) + room <= self.block_size:
            return whole, 0
        sequence, terminal = observation.to_sequence()
        roles = getattr(observation, "roles", ())
        head = 1 if roles and roles[0] == "system" else 0
        first, prompt = 0, whole
        for first, (_, reward) in enumerate(sequence):
            if first < head or (reward is not None and isinstance(self.tokenizer, ChatTokenizer)):
                continue  # templates may refuse a chat that begins with an answer
            shorter = [[*part[:head], *part[first:]] for part in (sequence, roles)]
            prompt = self.tokens(Dialogue(shorter[0], terminal, shorter[1]))
            if len(prompt) + self.room <= self.block_size:
                break
        return prompt[-(self.block_size - 1) :], first - head

    def tokens(self, observation: Observation) -> list[int]:
        """The whole dialogue up to now as tokens."""
        point = DataPoint.from_obs(observation, self.tokenizer)
        if point.terminal:
            raise ValueError("the dialogue has ended, so there is no next utterance")
        return point.tokens

    def texts(self, answers: Generations) -> list[str]:
        """The best of the generations for each observation, as text."""
        return [self.tokenizer.decode(tokens) for tokens in answers.best()]
