"""One dialogue as a row of tokens, with the decisions in it: the token-level decision process.

A state is a prefix of the row, an action is one token of the agent's utterance, the token that ends
it included. The environment's tokens are skipped: the state after the last token of an utterance is
the one in which the next utterance begins (Snell et al. 2022, arXiv 2206.11871, section 4).
A `TokenReward` rewards single tokens of the agent, on top of its utterances.

Legend: T tokens of a row, A of them actions, U utterances of the agent.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from raffia.files import shown
from raffia.hints import check_range
from raffia.lm.data.utterances import Observation, token_parts
from raffia.lm.tokenizers.tokenizer import Tokenizer


class Decisions(NamedTuple):
    """The decisions of a row: what was done in which state, and what it earned.

    Lists where a row was made of a dialogue, arrays where it is read out of a store.

    >>> Decisions([2, 3, 4], [2, 3, 4], [0.0, 0.0, 1.0], last_state=6).before(4)
    Decisions(action_idxs=[2], state_idxs=[2], rewards=[0.0], last_state=3)
    """

    action_idxs: list[int]  # [A]
    state_idxs: list[int]  # [A], the state of each action
    rewards: list[float]  # [A], after each action
    last_state: int  # behind the last action

    def before(self, num_tokens: int) -> Decisions:
        """The data points of the first tokens alone: an action is left out if its next state is."""
        states = [at for at in (*self.state_idxs, self.last_state) if at < num_tokens]
        *states, last = states or [num_tokens - 1]
        num = len(states)
        return Decisions(self.action_idxs[:num], states, self.rewards[:num], last)


@dataclass(frozen=True, slots=True)
class DataPoint:
    """One row: its tokens, where the agent decided, and what came of it.

    `from_obs` makes it of a dialogue, `from_tokens` of tokens.

    >>> point = DataPoint.from_tokens([1, 7, 2, 5, 6, 3, 4], [2, 3, 4], [0.0, 0.0, -0.5])
    >>> point.state_idxs, point.terminals
    ([2, 3, 4, 6], [0, 0, 0, 1])
    >>> point.utterance_state_idxs, point.utterance_action_idxs, point.utterance_rewards
    ([2, 6], [5], [-0.5])
    """

    tokens: list[int]  # [T]
    of_tokens: Decisions  # A: token i + 1 is the action that was taken at i
    of_utterances: Decisions  # U: token i ends the utterance that began behind its state
    terminal: bool  # whether the dialogue ended with the row; else its last state's value counts
    episode_return: float  # the sum of all rewards, of those too that were cut off
    was_cut: bool = False  # whether the dialogue was longer than the context

    def decisions(self, per_token: bool) -> Decisions:
        """The decision points: tokens, or whole utterances."""
        return self.of_tokens if per_token else self.of_utterances

    @property
    def action_idxs(self) -> list[int]:
        """[A] rising; token i + 1 is the action that was taken at i."""
        return self.of_tokens.action_idxs

    @property
    def state_idxs(self) -> list[int]:
        """[A + 1]: the index of the state of each action, and of the last state."""
        return [*self.of_tokens.state_idxs, self.of_tokens.last_state]

    @property
    def rewards(self) -> list[float]:
        """[A], after each action."""
        return self.of_tokens.rewards

    @property
    def terminals(self) -> list[int]:
        """[A + 1], 0; 1 at the last if the dialogue ended there, else its value counts on."""
        return [0] * len(self.rewards) + [int(self.terminal)]

    @property
    def utterance_action_idxs(self) -> list[int]:
        """[U], the index of the token that ends an utterance."""
        return self.of_utterances.action_idxs

    @property
    def utterance_state_idxs(self) -> list[int]:
        """[U + 1], the index before each utterance, and of the last state."""
        return [*self.of_utterances.state_idxs, self.of_utterances.last_state]

    @property
    def utterance_rewards(self) -> list[float]:
        """[U], of an utterance with all its tokens."""
        return self.of_utterances.rewards

    @property
    def utterance_terminals(self) -> list[int]:
        """[U + 1]: what `terminals` are for utterances."""
        return [0] * len(self.utterance_rewards) + [int(self.terminal)]

    @classmethod
    def from_obs(
        cls,
        obs: Observation,
        tokenizer: Tokenizer,
        token_reward: TokenReward | None = None,
        *,
        max_len: int | None = None,
    ) -> DataPoint:
        """The row of what an environment shows: utterances become tokens, one after the other.

        An utterance of the environment ends with `eos`, one of the agent with `eoa`, on which its
        reward sits; the row begins with `bos`, or with `boa` if the agent begins (or there is no
        utterance), and ends with `eod` if the dialogue is over.

        By a chat template, actions are the tokens of the agent's messages up to the end of its
        turn; a row of an unfinished dialogue ends with the generation prompt.

        max_len: of a longer row the first tokens are taken, and the actions whose next state is
            among them; it is not terminal.

        >>> from types import SimpleNamespace
        >>> ascii = SimpleNamespace(num_tokens=134, pad_token_id=128, bos_token_id=129,
        ...     eos_token_id=130, boa_token_id=131, eoa_token_id=132, eod_token_id=133,
        ...     encode=lambda text: list(text.encode("ascii")))
        >>> class Greeting:
        ...     def to_sequence(self):
        ...         return [("A", None), ("BC", -0.5)], True
        >>> point = DataPoint.from_obs(Greeting(), ascii)
        >>> point.tokens
        [129, 65, 130, 66, 67, 132, 133]
        >>> point.action_idxs, point.rewards
        ([2, 3, 4], [0.0, 0.0, -0.5])
        """
        if not hasattr(obs, "to_sequence"):
            raise TypeError(
                f"{shown(obs)} is not an observation, because it has no to_sequence(): pass "
                'Dialogue([("hello", None)], terminal=False), or an instance of your own class'
            )
        parts, terminal = token_parts(obs, tokenizer)
        tokens: list[int] = []
        actions: list[int] = []
        rewards: list[float] = []
        for part, reward in parts:
            if reward is not None:
                actions += range(len(tokens) - 1, len(tokens) - 1 + len(part))
                rewards += [*[0.0] * (len(part) - 1), float(reward)]
            tokens += part
        return cls.from_tokens(
            tokens,
            actions,
            rewards,
            terminal=terminal,
            end_of_action=tokenizer.eoa_token_id,
            token_reward=token_reward,
            max_len=max_len,
        )

    @classmethod
    def from_tokens(
        cls,
        tokens: Sequence[int],
        action_idxs: Sequence[int],
        rewards: Sequence[float],
        *,
        terminal: bool = True,
        end_of_action: int | None = None,
        token_reward: TokenReward | None = None,
        max_len: int | None = None,
    ) -> DataPoint:
        """The row of tokens that were made elsewhere; the last state is at the last token.

        end_of_action: the token that ends an utterance of the agent. Without one, actions side by
            side are one utterance.

        >>> two = DataPoint.from_tokens(
        ...     [1, 5, 3, 6, 3], [0, 1, 2, 3], [0, 1, 0, 2], end_of_action=3)
        >>> two.utterance_action_idxs, two.utterance_rewards
        ([2, 4], [1.0, 2.0])
        """
        tokens, actions = list(tokens), list(action_idxs)
        rewards, last = list(map(float, rewards)), len(tokens) - 1
        _check_row(tokens, actions, rewards)
        if token_reward is not None:
            by_token = _by_token(token_reward, tokens)
            rewards = [own + by_token[at + 1] for own, at in zip(rewards, actions, strict=True)]
        _check_finite(rewards)
        # An utterance begins at an action whose predecessor is not an action, or ended one.
        begins = [
            number
            for number, at in enumerate(actions)
            if not number or actions[number - 1] != at - 1 or tokens[at] == end_of_action
        ]
        ends = [*begins, len(actions)][1:]
        utterances = Decisions(
            action_idxs=[actions[end - 1] + 1 for end in ends],
            state_idxs=[actions[begin] for begin in begins],
            rewards=[math.fsum(rewards[a:b]) for a, b in zip(begins, ends, strict=True)],
            last_state=last,
        )
        own = Decisions(actions, actions, rewards, last)
        return cls(tokens, own, utterances, bool(terminal), math.fsum(rewards)).cut(max_len)

    def cut(self, max_len: int | None) -> DataPoint:
        """The first `max_len` tokens; the states among them, and the actions between these.

        It is not terminal: what it would have brought is unknown, so the last state's value stands
        for it. An action is left out if the state that follows it is.

        >>> whole = DataPoint.from_tokens([1, 5, 6, 3, 4], [0, 1, 2], [0.0, 0.0, 1.0])
        >>> part = whole.cut(3)
        >>> part.tokens, part.action_idxs, part.state_idxs, part.terminals, part.episode_return
        ([1, 5, 6], [0, 1], [0, 1, 2], [0, 0, 0], 1.0)
        """
        if max_len is not None:
            check_range("max_len", max_len, 1)
        if max_len is None or len(self.tokens) <= max_len:
            return self
        own, utterances = self.of_tokens.before(max_len), self.of_utterances.before(max_len)
        return DataPoint(
            self.tokens[:max_len], own, utterances, False, self.episode_return, was_cut=True
        )


def _check_row(tokens: list[int], actions: list[int], rewards: list[float]) -> None:
    last = len(tokens) - 1
    if not tokens:
        raise ValueError("a row must have at least one token, the one that opens the dialogue")
    if len(rewards) != len(actions):
        raise ValueError(
            f"there are {len(rewards)} rewards for {len(actions)} actions: pass one for each of "
            "action_idxs (0.0 for no reward)"
        )
    rising = all(map(operator.lt, actions, actions[1:]))
    if actions and not (rising and 0 <= actions[0] and actions[-1] < last):
        raise ValueError(
            f"action_idxs {_few(actions)} must be increasing and lie in 0..{last - 1}: token i + "
            f"1 is the action taken at i, and the row has {last + 1} tokens"
        )


def _check_finite(rewards: list[float]) -> None:
    if not all(map(math.isfinite, rewards)):
        at, reward = next((i, r) for i, r in enumerate(rewards) if not math.isfinite(r))
        raise ValueError(f"reward {at} is {reward!r}, but rewards must be finite numbers")


def _by_token(token_reward: TokenReward, tokens: list[int]) -> list[float]:
    found = list(token_reward.get_token_reward(tokens))
    if len(found) != len(tokens):
        raise ValueError(
            f"{type(token_reward).__name__}.get_token_reward returned {len(found)} rewards for "
            f"{len(tokens)} tokens; it must return one for each"
        )
    return found


def _few(values: Sequence[Any]) -> str:
    return str(list(values)) if len(values) <= 12 else f"{str(list(values[:12]))[:-1]}, ...]"


class TokenReward(ABC):
    """A reward for each token of a row by itself; only the agent's tokens earn it.

    >>> class Short(TokenReward):
    ...     def get_token_reward(self, tokens):
    ...         return [-0.1 if i > 100 else 0.0 for i in range(len(tokens))]
    ...     def settings(self):
    ...         return {"reward": "short"}
    >>> Short().get_token_reward([7, 8])
    [0.0, 0.0]
    """

    @abstractmethod
    def get_token_reward(self, tokens: Sequence[int]) -> list[float]:
        """One number for each token of a row; those of the environment's tokens are not used."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Everything that the numbers depend on, as JSON: other settings make a store be built
        again.
        """


class ConstantTokenReward(TokenReward):
    """A constant reward for each token: below 0 it makes the agent brief.

    >>> ConstantTokenReward(-0.1).get_token_reward([5, 6, 7])
    [-0.1, -0.1, -0.1]
    """

    def __init__(self, reward: float = 0.0) -> None:
        self.reward = _finite(reward, "the reward of a token")

    def get_token_reward(self, tokens: Sequence[int]) -> list[float]:
        """The rewards of tokens: the number repeated once for each token.

        >>> ConstantTokenReward().get_token_reward([5, 6])
        [0.0, 0.0]
        """
        return [self.reward] * len(tokens)

    def settings(self) -> dict[str, Any]:
        """Settings as JSON: the reward.

        >>> ConstantTokenReward(0.5).settings()
        {'kind': 'constant', 'reward': 0.5}
        """
        return {"kind": "constant", "reward": self.reward}


class SpecifiedTokenReward(TokenReward):
    """A table: each token has `scale * reward_of_token[token] + shift`.

    reward_of_token: by the token's number; `default` is for those that it lacks.

    >>> SpecifiedTokenReward({5: 1.0, 6: 3.0}, scale=2.0, shift=-1.0).get_token_reward([6, 5, 9])
    [5.0, 1.0, -1.0]
    """

    def __init__(
        self,
        reward_of_token: Mapping[int, float],
        *,
        scale: float = 1.0,
        shift: float = 0.0,
        default: float = 0.0,
    ) -> None:
        self.scale, self.shift = _finite(scale, "scale"), _finite(shift, "shift")
        self.default = _finite(default, "default")
        self.reward_of_token = {
            token: _finite(reward, f"the reward of token {token!r}")
            for token, reward in reward_of_token.items()
        }
        for token in self.reward_of_token:
            if type(token) is not int or token < 0:
                raise ValueError(
                    f"token rewards are given by token ids; got {token!r}: pass "
                    "{tokenizer.token_to_id('x'): 1.0}"
                )

    def get_token_reward(self, tokens: Sequence[int]) -> list[float]:
        """The rewards by the table.

        >>> SpecifiedTokenReward({5: -0.5}).get_token_reward([5, 6])
        [-0.5, 0.0]
        """
        found, default = self.reward_of_token, self.default
        return [self.scale * found.get(token, default) + self.shift for token in tokens]

    def settings(self) -> dict[str, Any]:
        """The table and the numbers.

        >>> SpecifiedTokenReward({5: 1.0}).settings()["reward_of_token"]
        [[5, 1.0]]
        """
        return {
            "kind": "specified",
            "reward_of_token": [list(pair) for pair in sorted(self.reward_of_token.items())],
            "scale": self.scale,
            "shift": self.shift,
            "default": self.default,
        }


def _finite(value: float, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{what} must be a finite number; got {value!r}")
    return float(value)
