"""Selection: fitness -> the slot that each member's state comes from.

Legend: P members, E evaluations of each. Selection itself is `state[parents]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raffia.evolution.config import check_fraction, check_tournament


def mean_fitness(history: Tensor, last: int) -> Tensor:  # [E, P] -> [P]
    """The mean over the last evaluations; what is no number counts as the worst, -inf.

    >>> mean_fitness(torch.tensor([[9.0, 1.0], [2.0, 1.0], [4.0, torch.nan]]), last=2)
    tensor([3., -inf])
    """
    if last < 1:
        raise ValueError(f"eval_loop={last}: fitness is the mean of at least one evaluation")
    return _worst_if_nan(history[-last:].mean(0))


def tournament(
    fitness: Tensor,  # [P], the larger the better
    *,
    tournament_size: int = 2,
    elitism: bool = True,
    population_size: int | None = None,  # slots to fill; None: P
    generator: torch.Generator,
) -> Tensor:  # int64 [slots]
    """The parents that tournaments choose.

    With elitism the first slot is the best member's. Each other is that of the best of
    `tournament_size` members, drawn with replacement; of equals the first drawn.

    Source: Miller & Goldberg (1995), "Genetic Algorithms, Tournament Selection, and the Effects of
    Noise", section 2.

    >>> generator = torch.Generator().manual_seed(0)
    >>> tournament(torch.tensor([1.0, 5.0, 3.0]), tournament_size=3, generator=generator)[0]
    tensor(1)
    """
    size = len(fitness)
    slots = size if population_size is None else population_size
    check_tournament(tournament_size, elitism, size)
    if slots < 1:
        raise ValueError(f"population_size={slots}: there is at least one slot to fill")
    fitness = _worst_if_nan(fitness)
    drawn = torch.randint(size, (slots, tournament_size), generator=generator)
    winners = fitness.cpu()[drawn].argmax(1, keepdim=True)
    parents = drawn.gather(1, winners).squeeze(1)
    if elitism:
        parents[0] = int(fitness.argmax())
    return parents.to(fitness.device)


def truncation(
    fitness: Tensor,  # [P], the larger the better
    *,
    fraction: float = 0.25,
    generator: torch.Generator,
) -> Tensor:  # int64 [P]
    """The parents of truncation: each of the worst fraction is replaced by one of the best.

    All others keep their slots. Which of the best is drawn.

    Source: Jaderberg et al. (2017), arXiv 1711.09846, section 4.1.1.

    >>> generator = torch.Generator().manual_seed(0)
    >>> truncation(torch.tensor([1.0, 5.0, 3.0, 4.0]), fraction=0.25, generator=generator)
    tensor([1, 1, 2, 3])
    """
    check_fraction(fraction)
    size = len(fitness)
    order = _worst_if_nan(fitness).argsort(descending=True, stable=True)
    num = max(1, int(fraction * size)) if size > 1 else 0
    parents = torch.arange(size, device=fitness.device)
    if num:
        drawn = torch.randint(num, (num,), generator=generator).to(fitness.device)
        parents[order[size - num :]] = order[:num][drawn]
    return parents


def _worst_if_nan(fitness: Tensor) -> Tensor:
    return torch.where(fitness.isnan(), -torch.inf, fitness)
