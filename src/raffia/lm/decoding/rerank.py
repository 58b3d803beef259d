"""Re-ranking: several texts for a prompt, put in order by the model's scores of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from raffia.lm.decoding.generations import Generations

__all__ = ["rerank"]


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
    order = scores.masked_fill(missing, -torch.inf).argsort(dim=-1, descending=True, stable=True)

    def ordered(entry: Tensor | None) -> Tensor | None:
        return None if entry is None else entry.gather(-1, order)

    return replace(
        generations,
        tokens=[
            [texts[index] for index in indices]
            for texts, indices in zip(generations.tokens, order.tolist(), strict=True)
        ],
        log_prob=generations.log_prob.gather(-1, order),
        stopped=generations.stopped.gather(-1, order),
        kl=ordered(generations.kl),
        advantage=ordered(generations.advantage),
        value=ordered(generations.value),
    )
