"""PUCT: selection by value plus prior, as in MuZero and EfficientZero."""

import functools
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from raffia.functional.draws import GOLDEN, mix
from raffia.hints import check_choice
from raffia.search.memory import plain
from raffia.search.nodes import Nodes, best

Normalize = Literal["running", "tree", "siblings"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PUCT:
    """Choose the action of the highest clip(norm(Q), 0, 1) + c(N) sqrt(N + 1) P / (1 + n).

        c(N) = c_init + log((N + c_base + 1) / c_base)

    with N the visits of all the node's actions, n of this one, P its prior. An action that was not
    tried counts as (mean_q(parent) + sum of tried Q) / (1 + number tried), at the root as the mean
    of the tried Q. Q is normalised by the range of Q in the tree. With two players mean_q(parent)
    is taken as it is, not turned to the child's view, as in the published search.

    Sources: Schrittwieser et al. (2020), "Mastering Atari, Go, Chess and Shogi by Planning with a
    Learned Model", appendix B; Ye et al. (2021), "Mastering Atari Games with Limited Data",
    appendix A (value of untried actions, soft range).

    >>> PUCT(first_visit="value", ties="random", tie_seed=torch.tensor([3])).c_init
    1.25
    """

    c_init: float = 1.25
    c_base: float = 19652.0
    # What decides the first choice at a fresh node: the prior (sqrt(N + 1): MuZero's paper), or
    # values alone (sqrt(N) = 0: all actions tie, as EfficientZero's and LightZero's code has it).
    first_visit: Literal["prior", "value"] = "prior"
    # Whether N in the logarithm counts the node's own evaluation too, as in mctx.
    count_own: bool = False
    # The range that Q is normalised by: "running" takes in every Q that was backed up and never
    # shrinks (MuZero's paper), "tree" is that of the Q of now (EfficientZero's code), "siblings"
    # that of the node's own and its tried actions' values, untried ones counting as the least
    # (mctx).
    normalize: Normalize = "running"
    # Whether discount * value(root) belongs to the running range, as in LightZero.
    root_in_range: bool = False
    # The range counts as at least this ("soft" minimum and maximum of EfficientZero).
    min_range: float = 0.01
    # Equal scores: the lowest action, or the choice of `tie_seed` (int64 [B], one a root).
    ties: Literal["lowest", "random"] = "lowest"
    tie_seed: Tensor | None = None

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            example = f"; for example PUCT({name}={allowed[0]!r})"
            check_choice(name, getattr(self, name), allowed, example)
        if not (self.c_base > 0 and self.min_range > 0):
            raise ValueError(f"c_base={self.c_base} and min_range={self.min_range} must be above 0")
        if not 0 <= self.c_init < float("inf"):
            raise ValueError(f"c_init={self.c_init} must be finite and not negative")
        if self.root_in_range and self.normalize != "running":
            raise ValueError(
                "root_in_range=True is only for the running range of Q: pass normalize='running'"
            )
        if (self.ties == "random") != (self.tie_seed is not None):
            raise ValueError(
                f"ties={self.ties!r} with tie_seed={self.tie_seed!r}: random ties are drawn from "
                "tie_seed, an int64 tensor [B]; pass both or neither"
            )

    needs_logits = False

    def exploration(self, num_simulations: int) -> Tensor:
        """c(N) sqrt(N + 1) for N in 0..num_simulations: float32 [num_simulations + 1], on the CPU.

        >>> PUCT(first_visit="value").exploration(2)
        tensor([0.0000, 1.2501, 1.7680])
        """
        # the compiler warns of caches, and traces through this anyway
        table = _exploration if torch.compiler.is_compiling() else _cached_exploration
        return table(self.c_init, self.c_base, self.first_visit, self.count_own, num_simulations)

    def __call__(self, nodes: Nodes, carry: Tensor | None) -> tuple[Tensor, Tensor]:
        """Choose the actions [M]; the carry is mean_q of the nodes, float64 [M]."""
        visits, mask = nodes.visits, nodes.mask
        tried = visits > 0
        mean_q = self._mean_q(nodes, carry)
        if self.normalize == "siblings":
            value = _among_siblings(nodes, tried)
        else:
            q = torch.where(tried, nodes.q, mean_q.float().unsqueeze(-1))
            value = self._in_range(q, nodes.q_range)
        total = visits.sum(-1)
        table = self.exploration(nodes.num_simulations)
        scale = table.to(visits.device)[total].unsqueeze(-1)
        scores = value + scale * nodes.prior / (visits + 1).float()
        if self.tie_seed is None:
            return best(scores, mask), mean_q
        return best(self._break_ties(scores, mask, nodes), mask), mean_q

    def _mean_q(self, nodes: Nodes, carry: Tensor | None) -> Tensor:
        num = nodes.num_tried
        if carry is None:
            return nodes.q_sum / num.clamp_min(1)
        return (carry + nodes.q_sum) / (1 + num)

    def _in_range(self, q: Tensor, q_range: tuple[Tensor, Tensor]) -> Tensor:
        low, high = (bound.unsqueeze(-1) for bound in q_range)
        width = (high - low).clamp_min(self.min_range)
        return torch.where(high > low, (q - low) / width, q).clamp(0.0, 1.0)

    def _break_ties(self, scores: Tensor, mask: Tensor | None, nodes: Nodes) -> Tensor:
        """1 for the one of the best that its hash puts before the others, 0 elsewhere."""
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        assert self.tie_seed is not None
        seed = self.tie_seed.to(scores.device)[nodes.root]
        turn = (nodes.simulation * GOLDEN + 2**63) % 2**64 - 2**63  # a number of 64 bits again
        state = mix(seed + turn) + nodes.row * GOLDEN
        action = torch.arange(scores.shape[-1], device=scores.device)
        draw = mix(state.unsqueeze(-1) + action * GOLDEN)
        draw = torch.where(
            scores == scores.amax(-1, keepdim=True), draw, torch.iinfo(draw.dtype).min
        )
        return (draw == draw.amax(-1, keepdim=True)).float()

    def prepare(
        self, num_legal: list[int], budget: list[int], num_actions: int, device: torch.device
    ) -> "PUCT":
        """The selection with its seeds as int64 on the device."""
        if self.tie_seed is None:
            return self
        if self.tie_seed.shape != (len(budget),):
            raise ValueError(
                f"tie_seed has shape {tuple(self.tie_seed.shape)}, but there are {len(budget)} "
                f"roots: pass an int64 tensor [{len(budget)}]"
            )
        return replace(self, tie_seed=plain(self.tie_seed, torch.int64, device))


_CHOICES: dict[str, tuple[str, ...]] = {
    "first_visit": ("prior", "value"),
    "normalize": ("running", "tree", "siblings"),
    "ties": ("lowest", "random"),
}


def _exploration(
    c_init: float, c_base: float, first_visit: str, count_own: bool, num_simulations: int
) -> Tensor:
    num = torch.arange(num_simulations + 1, dtype=torch.float64)
    counted = num + 1 if count_own else num
    c = torch.log((counted + c_base + 1) / c_base) + c_init
    return (c * torch.sqrt(num + 1 if first_visit == "prior" else num)).float()


_cached_exploration = functools.lru_cache(maxsize=64)(_exploration)


def _among_siblings(nodes: Nodes, tried: Tensor) -> Tensor:
    """Q within the range of the node's value and its tried actions' Q; untried: the least."""
    value = nodes.value.unsqueeze(-1)
    known = torch.where(tried, nodes.q, value)
    low = torch.minimum(value, known.amin(-1, keepdim=True))
    high = torch.maximum(value, known.amax(-1, keepdim=True))
    return (torch.where(tried, known, low) - low) / (high - low).clamp_min(1e-8)
