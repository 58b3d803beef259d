"""Gumbel MuZero's selection: sequential halving at the root, the improved policy below.

Source: Danihelka, Guez, Schrittwieser, Silver (2022), "Policy improvement by planning with Gumbel",
ICLR (eqs. 8-12, algorithm 2).
"""

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raffia.hints import check_range
from raffia.search.memory import plain
from raffia.search.nodes import Nodes, best
from raffia.search.softmax import in_order, softmax

LEAST_LOGIT = -1e9
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True, eq=False)
class Gumbel:
    """Gumbel selection: at the root the best g + logits + sigma(Q) among the actions whose turn it
    is; below it the action whose share of visits lags the improved policy the most.

        sigma(q) = (maxvisit_init + max_b n(b)) * value_scale * (completed q, rescaled to [0, 1])
        below the root: argmax softmax(logits + sigma)(a) - n(a) / (1 + sum_b n(b))

    >>> select = Gumbel(root_gumbel=torch.zeros(1, 4), max_considered=4)
    >>> select.value_scale, select.maxvisit_init
    (0.1, 50.0)
    """

    root_gumbel: Tensor  # [B, A], draws from Gumbel(0, 1)
    max_considered: int = 16  # actions tried at the root
    value_scale: float = 0.1
    maxvisit_init: float = 50.0
    considered: Tensor | None = None  # int32 [B, simulations], found by `prepare`

    needs_logits = True
    normalize = "running"
    root_in_range = False

    def __post_init__(self) -> None:
        check_range("max_considered", self.max_considered, 1)
        for name in ("value_scale", "maxvisit_init"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be finite and not negative")

    def prepare(
        self, num_legal: list[int], budget: list[int], num_actions: int, device: torch.device
    ) -> "Gumbel":
        """The selection with its schedule of sequential halving, by each root's legal actions and
        budget.

        num_legal, budget: one number for each root.
        """
        shape = (len(budget), num_actions)
        if self.root_gumbel.shape != shape:
            raise ValueError(
                f"root_gumbel has shape {tuple(self.root_gumbel.shape)}; it must be [roots, "
                f"actions] = {list(shape)}"
            )
        if not torch.isfinite(self.root_gumbel).all():
            raise ValueError("root_gumbel holds NaN or infinity; draw it with gumbel_noise(shape)")
        width, kinds = max(budget), sorted(set(zip(num_legal, budget, strict=True)))
        table = [
            (*considered_visits(min(m, self.max_considered), s), *[0] * (width - s))
            for m, s in kinds
        ]
        number = {kind: index for index, kind in enumerate(kinds)}
        rows = [number[kind] for kind in zip(num_legal, budget, strict=True)]
        return replace(
            self,
            root_gumbel=plain(self.root_gumbel, torch.float32, device),
            considered=torch.tensor(table, dtype=torch.int32)[rows].to(device),
        )

    def __call__(self, nodes: Nodes, carry: None) -> tuple[Tensor, None]:
        """Choose the actions [M]."""
        visits, logits = nodes.visits, nodes.prior_logits
        sigma = self.sigma(nodes)
        if nodes.depth == 0:
            assert self.considered is not None
            turn = self.considered[nodes.root, visits.sum(-1)]
            scores = self.root_scores(self.root_gumbel[nodes.root], logits, sigma, visits, turn)
            return best(scores, nodes.mask), None
        fraction = visits.float() / (1 + visits.sum(-1, keepdim=True)).float()
        return best(softmax(logits + sigma) - fraction, nodes.mask), None

    def root_scores(
        self,
        gumbel: Tensor,  # [M, A]
        logits: Tensor,  # [M, A]
        sigma: Tensor,  # [M, A]
        visits: Tensor,  # [M, A]
        turn: Tensor,  # [M]: only actions with this many visits count
    ) -> Tensor:
        """The scores g + logits + sigma(q) [M, A], -inf where it is not the action's turn."""
        logits = logits - logits.amax(-1, keepdim=True)
        scores = ((gumbel + logits) + sigma).clamp_min(LEAST_LOGIT)
        return torch.where(visits == turn.unsqueeze(-1), scores, -torch.inf)

    def sigma(self, nodes: Nodes) -> Tensor:
        """sigma of the nodes' completed Q [M, A] float32."""
        q, visits = nodes.q, nodes.visits
        tried = visits > 0
        prior = nodes.prior.clamp_min(TINY).double()
        weight = in_order(torch.where(tried, prior, 0.0))
        weighted = in_order(torch.where(tried, prior * q.double(), 0.0))
        weighted = weighted / torch.where(weight > 0, weight, 1.0)
        total = visits.sum(-1)
        mixed = ((nodes.raw_value.double() + total * weighted) / (total + 1)).float()
        completed = torch.where(tried, q, mixed.unsqueeze(-1))
        low, high = completed.amin(-1, keepdim=True), completed.amax(-1, keepdim=True)
        rescaled = (completed - low) / (high - low).clamp_min(1e-8)
        most = visits.amax(-1, keepdim=True).double()
        scale = ((self.maxvisit_init + most) * self.value_scale).float()
        return scale * rescaled


@functools.lru_cache(maxsize=1024)
def considered_visits(num_considered: int, num_simulations: int) -> tuple[int, ...]:
    """The visit count of the actions whose turn it is in each simulation (sequential halving).

    >>> considered_visits(4, 8)
    (0, 0, 0, 0, 1, 1, 2, 2)
    """
    if num_considered <= 1:
        return tuple(range(num_simulations))
    rounds, left, visits = math.ceil(math.log2(num_considered)), num_considered, 0
    turns: list[int] = []
    while len(turns) < num_simulations:
        more = max(1, num_simulations // (rounds * left))  # for each of those that are left
        for n in range(visits, visits + more):
            turns += [n] * left
        visits, left = visits + more, max(2, left // 2)
    return tuple(turns[:num_simulations])
