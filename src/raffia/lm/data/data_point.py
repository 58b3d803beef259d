"""One dialogue as a row of tokens, with the decisions in it: the token-level decision process.

A state is a prefix of the row, an action is one token of the agent's utterance, the token that ends
it included. The environment's tokens are skipped: the state after the last token of an utterance is
the one in which the next utterance begins (Snell et al. 2022, arXiv 2206.11871, section 4).

Legend: T tokens of a row, A of them actions, U utterances of the agent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from raffia.lm.data.token_reward import TokenReward
from raffia.lm.data.utterances import Observation, check_sequence, encode_utterance
from raffia.lm.tokenizers.tokenizer import Tokenizer

__all__ = ["DataPoint"]


@dataclass(frozen=True, slots=True)
class DataPoint:
    """One row: its tokens, where the agent decided, and what came of it.

    tokens: [T].
    action_idxs: [A] rising; token i + 1 is the action that was taken at i.
    state_idxs: [A + 1]: the same, and the index of the last state.
    rewards: [A], after each action.
    terminals: [A + 1], 0; 1 at the last if the dialogue ended there, else its value counts on.
    utterance_action_idxs: [U], the index of the token that ends an utterance.
    utterance_state_idxs: [U + 1], the index before each utterance, and of the last state.
    utterance_rewards: [U], of an utterance with all its tokens.
    episode_return: the sum of all rewards, of those too that were cut off.
    was_cut: whether the row was longer than the context.

    >>> point = DataPoint.from_tokens([1, 7, 2, 5, 6, 3, 4], [2, 3, 4], [0.0, 0.0, -0.5])
    >>> point.state_idxs, point.terminals
    ([2, 3, 4, 6], [0, 0, 0, 1])
    >>> point.utterance_state_idxs, point.utterance_action_idxs, point.utterance_rewards
    ([2, 6], [5], [-0.5])
    """

    tokens: list[int]
    action_idxs: list[int]
    state_idxs: list[int]
    rewards: list[float]
    terminals: list[int]
    utterance_action_idxs: list[int]
    utterance_state_idxs: list[int]
    utterance_rewards: list[float]
    episode_return: float
    was_cut: bool = False

    def __post_init__(self) -> None:
        num = len(self.action_idxs)
        if not self.tokens:
            raise ValueError("a row has no tokens; it begins at least with the token that opens it")
        if len(self.rewards) != num:
            raise ValueError(
                f"{len(self.rewards)} rewards for {num} actions: give one for each of action_idxs "
                "(0.0 where there is none)"
            )
        if len(self.state_idxs) != num + 1 or len(self.terminals) != num + 1:
            raise ValueError(
                f"{len(self.state_idxs)} state_idxs and {len(self.terminals)} terminals for {num} "
                f"actions: both have one more than the actions, which is {num + 1}"
            )
        last = len(self.tokens) - 1
        if num and not (
            0 <= self.action_idxs[0]
            and self.action_idxs[-1] < last
            and all(a < b for a, b in pairwise(self.action_idxs))
        ):
            raise ValueError(
                f"action_idxs {_few(self.action_idxs)} must rise and lie in 0..{last - 1}: token "
                f"i + 1 is the action taken at i, and the row has {last + 1} tokens"
            )
        if self.state_idxs[:-1] != self.action_idxs or not (
            (self.action_idxs[-1] if num else -1) < self.state_idxs[-1] <= last
        ):
            raise ValueError(
                f"state_idxs {_few(self.state_idxs)} must be the action_idxs and then the index of "
                f"the last state, behind them and at most {last}"
            )
        if any(self.terminals[:-1]) or self.terminals[-1] not in (0, 1):
            raise ValueError(
                f"terminals {_few(self.terminals)}: all are 0, only the last may be 1 (the "
                "dialogue ended there)"
            )
        for number, reward in enumerate(self.rewards):
            if not math.isfinite(reward):
                raise ValueError(f"reward {number} is {reward!r}; rewards are finite numbers")
        self._check_utterances()

    def _check_utterances(self) -> None:
        num = len(self.utterance_action_idxs)
        if len(self.utterance_rewards) != num or len(self.utterance_state_idxs) != num + 1:
            raise ValueError(
                f"{num} utterance_action_idxs, {len(self.utterance_rewards)} utterance_rewards and "
                f"{len(self.utterance_state_idxs)} utterance_state_idxs: of the last there is one "
                "more than of the others"
            )

    @property
    def utterance_terminals(self) -> list[int]:
        """[U + 1]: what `terminals` are for utterances.

        >>> DataPoint.from_tokens([1, 5, 3], [0, 1], [0.0, 1.0], terminal=False).utterance_terminals
        [0, 0]
        """
        return [0] * len(self.utterance_action_idxs) + [self.terminals[-1]]

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
        sequence, terminal = obs.to_sequence()
        check_sequence(sequence, terminal)
        opening = bool(sequence) and sequence[0][1] is None
        tokens = [tokenizer.bos_token_id if opening else tokenizer.boa_token_id]
        begins, ends, earned = [], [], []
        for text, reward in sequence:
            content = encode_utterance(text, tokenizer)
            if reward is None:
                tokens += [*content, tokenizer.eos_token_id]
            else:
                begins.append(len(tokens) - 1)
                tokens += [*content, tokenizer.eoa_token_id]
                ends.append(len(tokens) - 1)
                earned.append(float(reward))
        if terminal:
            tokens.append(tokenizer.eod_token_id)
        by_token = [0.0] * len(tokens) if token_reward is None else _by_token(token_reward, tokens)
        actions: list[int] = []
        rewards: list[float] = []
        totals: list[float] = []
        for begin, end, reward in zip(begins, ends, earned, strict=True):
            within = by_token[begin + 1 : end + 1]
            totals.append(reward + math.fsum(within))
            within[-1] += reward
            actions += range(begin, end)
            rewards += within
        utterances = _Utterances(begins, ends, totals)
        return cls._of(tokens, actions, rewards, utterances, terminal).cut(max_len)

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
        rewards = [float(reward) for reward in rewards]
        last = len(tokens) - 1
        if token_reward is not None and len(rewards) == len(actions):
            by_token = _by_token(token_reward, tokens)
            within = [by_token[at + 1] if 0 <= at < last else 0.0 for at in actions]
            rewards = [own + extra for own, extra in zip(rewards, within, strict=True)]
        utterances = _Utterances([], [], [])
        if len(rewards) == len(actions):  # if not, it is refused below
            for index, reward in zip(actions, rewards, strict=True):
                ended = 0 <= index <= last and tokens[index] == end_of_action
                utterances.add(index, reward, ended)
        return cls._of(tokens, actions, rewards, utterances, terminal).cut(max_len)

    @classmethod
    def _of(
        cls,
        tokens: list[int],
        actions: list[int],
        rewards: list[float],
        utterances: _Utterances,
        terminal: bool,
    ) -> DataPoint:
        last = len(tokens) - 1
        return cls(
            tokens=tokens,
            action_idxs=actions,
            state_idxs=[*actions, last],
            rewards=rewards,
            terminals=[0] * len(actions) + [int(terminal)],
            utterance_action_idxs=utterances.ends,
            utterance_state_idxs=[*utterances.begins, last],
            utterance_rewards=utterances.totals,
            episode_return=math.fsum(rewards),
        )

    def cut(self, max_len: int | None) -> DataPoint:
        """The first `max_len` tokens; the states among them, and the actions between these.

        It is not terminal: what it would have brought is unknown, so the last state's value stands
        for it. An action is left out if the state that follows it is.

        >>> whole = DataPoint.from_tokens([1, 5, 6, 3, 4], [0, 1, 2], [0.0, 0.0, 1.0])
        >>> part = whole.cut(3)
        >>> part.tokens, part.action_idxs, part.state_idxs, part.terminals, part.episode_return
        ([1, 5, 6], [0, 1], [0, 1, 2], [0, 0, 0], 1.0)
        """
        if max_len is not None and max_len < 1:
            raise ValueError(f"max_len={max_len}: a row has at least its first token; None is all")
        if max_len is None or len(self.tokens) <= max_len:
            return self
        states = _below(self.state_idxs, max_len)
        of_utterances = _below(self.utterance_state_idxs, max_len)
        num, utterances = len(states) - 1, len(of_utterances) - 1
        return DataPoint(
            tokens=self.tokens[:max_len],
            action_idxs=states[:-1],
            state_idxs=states,
            rewards=self.rewards[:num],
            terminals=[0] * (num + 1),
            utterance_action_idxs=self.utterance_action_idxs[:utterances],
            utterance_state_idxs=of_utterances,
            utterance_rewards=self.utterance_rewards[:utterances],
            episode_return=self.episode_return,
            was_cut=True,
        )


class _Utterances(NamedTuple):
    """The agent's utterances: the state before each, its last token, its reward."""

    begins: list[int]
    ends: list[int]
    totals: list[float]

    def add(self, index: int, reward: float, ended: bool) -> None:
        """An action at an index; of the last utterance if that reaches it and has not ended."""
        if not self.ends or self.ends[-1] != index or ended:
            self.begins.append(index)
            self.ends.append(index + 1)
            self.totals.append(reward)
        else:
            self.ends[-1] = index + 1
            self.totals[-1] += reward


def _below(indices: list[int], bound: int) -> list[int]:
    """The indices below a bound; the last one below it, if none of them is."""
    return [index for index in indices if index < bound] or [bound - 1]


def _by_token(token_reward: TokenReward, tokens: list[int]) -> list[float]:
    found = list(token_reward.get_token_reward(tokens))
    if len(found) != len(tokens):
        raise ValueError(
            f"{type(token_reward).__name__}.get_token_reward gave {len(found)} rewards for "
            f"{len(tokens)} tokens: it gives one for each"
        )
    return found


def _few(values: Sequence[Any]) -> str:
    return str(list(values)) if len(values) <= 12 else f"{str(list(values[:12]))[:-1]}, ...]"
