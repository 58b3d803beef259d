"""Sampling: tokens drawn by probability, or the likeliest ones.

Each text draws from numbers of its own, so it is the same whatever texts are made beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raffia.functional.draws import seeded_uniform
from raffia.lm.decoding.steps import Choose, Moment


def best_token(now: Moment) -> Tensor:  # int64 [R]
    """The token of the largest score.

    >>> from raffia.lm.decoding.scorer import Choice
    >>> choice = Choice(torch.tensor([[0.2, 0.8]]).log(), None, None, None)
    >>> best_token(Moment(choice, None, torch.tensor([0]), 0))
    tensor([1])
    """
    return now.choice.log_probs.argmax(-1)


def drawing(
    seeds: Tensor,  # int64 [N], one for each text
    most: int,  # tokens that a text may get
) -> Choose:
    """Draws tokens by probability, from the numbers of each text.

    >>> from raffia.lm.decoding.scorer import Choice
    >>> choose = drawing(torch.tensor([5, 6]), 3)
    >>> choice = Choice(torch.tensor([[0.0, 1.0]]).log(), None, None, None)
    >>> choose(Moment(choice, None, torch.tensor([1]), 2))
    tensor([1])
    """
    uniform = _uniform(seeds, most)
    return lambda now: draw_tokens(now.choice.log_probs, uniform[now.step, now.text])


def new_seeds(num: int, generator: torch.Generator | None = None) -> Tensor:
    """Seeds of texts, int64 [num]; drawing them one by one gives the same ones.

    >>> new_seeds(2, torch.Generator().manual_seed(0)).shape
    torch.Size([2])
    """
    device = "cpu" if generator is None else generator.device
    draws = [torch.randint(2**62, (), generator=generator, device=device) for _ in range(num)]
    return torch.stack(draws)


def draw_tokens(
    log_probs: Tensor,  # [R, V]
    uniform: Tensor,  # float64 [R], within (0, 1)
) -> Tensor:  # int64 [R]
    """Tokens drawn by probability: the first at which the summed probabilities pass the number.

    >>> draw_tokens(torch.tensor([[0.2, 0.0, 0.8]]).log(), torch.tensor([0.21]).double())
    tensor([2])
    """
    passed = log_probs.double().exp().cumsum(-1)
    bar = (uniform * passed[:, -1]).unsqueeze(-1)  # rounded sums needn't end at 1
    return torch.searchsorted(passed, bar, right=True).squeeze(-1)


def _uniform(seeds: Tensor, num: int) -> Tensor:
    """Numbers within (0, 1) of 46 random bits: int64 [N] -> float64 [num, N]."""
    coarse, fine = seeded_uniform(seeds, 2 * num).double().t().split(num)
    return (coarse + (fine - 0.5) * 2.0**-23).contiguous()
