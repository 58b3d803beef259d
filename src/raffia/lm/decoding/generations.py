"""Generations: the texts that continue each prompt, the model's scores of them, their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor


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
        return self.take(torch.arange(num).expand(len(self.tokens), num))

    def take(self, index: Tensor) -> Generations:  # int64 [P, K]
        """These texts of each prompt, in this order.

        >>> two = Generations(tokens=[[[5], [6]]], log_prob=torch.tensor([[-1.5, -2.0]]),
        ...                   stopped=torch.tensor([[True, False]]))
        >>> two.take(torch.tensor([[1, 0]])).tokens
        [[[6], [5]]]
        """
        index = index.to(self.log_prob.device)
        parts: dict[str, Any] = {part.name: getattr(self, part.name) for part in fields(self)}
        tokens = [
            [texts[number] for number in numbers]
            for texts, numbers in zip(parts.pop("tokens"), index.tolist(), strict=True)
        ]
        for name, part in parts.items():
            parts[name] = None if part is None else part.gather(-1, index)
        return Generations(tokens=tokens, **parts)


def rerank(
    generations: Generations,
    by: Literal["log_prob", "advantage", "value"],  # the sum or value that puts them in order
) -> Generations:
    """The texts of each prompt from the best to the worst.

    >>> two = Generations(tokens=[[[1], [2]]], log_prob=torch.tensor([[-3.0, -2.0]]),
    ...                   stopped=torch.tensor([[True, True]]))
    >>> rerank(two, "log_prob").tokens
    [[[2], [1]]]
    """
    scores: Tensor | None = getattr(generations, by)
    if scores is None:
        raise ValueError(
            f"these generations have no {by} to be put in order by: make them with "
            f"DecodeConfig(rerank={by!r}), or with report_all=True"
        )
    missing = generations.log_prob == -torch.inf  # no such text: behind all others
    scores = scores.masked_fill(missing, -torch.inf)
    return generations.take(scores.argsort(dim=-1, descending=True, stable=True))
