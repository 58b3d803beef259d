"""Rewards for single tokens of the agent, which are added to those of its utterances."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any


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
        """All that the numbers depend on, as JSON: with other settings a store is built again."""


class ConstantTokenReward(TokenReward):
    """The same for each token: below 0 it makes the agent brief.

    >>> ConstantTokenReward(-0.1).get_token_reward([5, 6, 7])
    [-0.1, -0.1, -0.1]
    """

    def __init__(self, reward: float = 0.0) -> None:
        self.reward = _finite(reward, "the reward of a token")

    def get_token_reward(self, tokens: Sequence[int]) -> list[float]:
        """As many times the number as there are tokens.

        >>> ConstantTokenReward().get_token_reward([5, 6])
        [0.0, 0.0]
        """
        return [self.reward] * len(tokens)

    def settings(self) -> dict[str, Any]:
        """The number.

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
                    f"rewards are given by the numbers of tokens, got {token!r}: "
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
        raise ValueError(f"{what} is a finite number, got {value!r}")
    return float(value)
