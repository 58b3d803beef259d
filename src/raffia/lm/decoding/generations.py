"""Generations: the texts that continue each prompt, and the model's scores of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

__all__ = ["Generations", "Stop"]


@dataclass(frozen=True)
class Stop:
    """When a text is complete, besides the full context and `max_new_tokens`.

    tokens: those that end it, the agent's end of an utterance above all; they are part of it.
    condition: called after each token with all that were generated in this text.

    >>> Stop(tokens=(30,), condition=lambda tokens: tokens[-2:] == [7, 7]).tokens
    (30,)
    """

    tokens: Sequence[int] = ()
    condition: Callable[[list[int]], bool] | None = None

    def ended(
        self,
        token: Tensor,  # int64 [R], the newest of each text
        texts: Callable[[], list[list[int]]],  # all that were generated, R texts
    ) -> Tensor:  # bool [R]
        """Which texts are complete.

        >>> Stop(tokens=(30, 31)).ended(torch.tensor([30, 3, 31]), lambda: [])
        tensor([ True, False,  True])
        """
        done = self.ended_by_token(token)
        if self.condition is not None:
            wanted = [bool(self.condition(text)) for text in texts()]
            done |= torch.tensor(wanted, device=token.device)
        return done

    def ended_by_token(self, token: Tensor) -> Tensor:  # int64 [R] -> bool [R]
        """The same without the condition.

        >>> Stop(tokens=(30,)).ended_by_token(torch.tensor([30, 3]))
        tensor([ True, False])
        """
        done = torch.zeros_like(token, dtype=torch.bool)
        for stop in self.tokens:
            done |= token == stop
        return done


@dataclass(frozen=True)
class Generations:
    """G texts for each of P prompts, and sums over their tokens.

    Entries are None where the decoding did not need the network: `report_all=True` has them made.

    >>> from raffia.lm.decoding.generations import Generations
    >>> Generations(tokens=[[[5, 30]]], log_prob=torch.tensor([[-1.5]]),
    ...             stopped=torch.tensor([[True]])).best()
    [[5, 30]]
    """

    tokens: list[list[list[int]]]  # [P][G][n]; no tokens: no such text (fewer than G beams)
    log_prob: Tensor  # [P, G] under the perturbed policy
    stopped: Tensor  # bool [P, G]: by `Stop`; else cut at the limit
    kl: Tensor | None = None  # [P, G] log-probability less that of the unperturbed policy
    advantage: Tensor | None = None  # [P, G] sum of min target Q - V
    value: Tensor | None = None  # [P, G] min target Q of the last token

    def best(self) -> list[list[int]]:
        """The first text of each prompt."""
        return [texts[0] for texts in self.tokens]

    def first(self, num: int) -> Generations:
        """The first texts of each prompt.

        >>> Generations(tokens=[[[5], [6]]], log_prob=torch.tensor([[-1.5, -2.0]]),
        ...             stopped=torch.tensor([[True, False]])).first(1).log_prob
        tensor([[-1.5000]])
        """
        parts: dict[str, Any] = {part.name: getattr(self, part.name) for part in fields(self)}
        tokens = [texts[:num] for texts in parts.pop("tokens")]
        for name, part in parts.items():
            parts[name] = None if part is None else part[:, :num]
        return Generations(tokens=tokens, **parts)
