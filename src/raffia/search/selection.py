"""Selections: PUCT, Gumbel MuZero's, and plain functions; each chooses the actions of a descent."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self, get_args

import torch
from torch import Tensor

from raffia.functional.draws import GOLDEN, mix
from raffia.hints import check_choice, check_count
from raffia.search.memory import plain
from raffia.search.nodes import Nodes, best
from raffia.search.softmax import in_order, softmax

Normalize = Literal["running", "tree", "siblings"]
SelectFn = Callable[[Nodes, Any], tuple[Tensor, Any]]  # (nodes, carry) -> (action [M], carry)
LEAST_LOGIT = -1e9
TINY = torch.finfo(torch.float32).tiny


class Selection(Protocol):
    """The protocol of selections: how a search chooses actions, and what it carries to child nodes.

    >>> from raffia.search import PUCT, Gumbel
    >>> [selection.needs_logits for selection in (PUCT(), Gumbel(root_gumbel=torch.zeros(1, 2)))]
    [False, True]
    """

    @property
    def needs_logits(self) -> bool: ...  # nodes.prior_logits
    @property
    def normalize(self) -> Normalize: ...  # which range of Q the tree tracks: nodes.q_range
    @property
    def root_in_range(self) -> bool: ...

    def prepare(
        self, num_legal: list[int], budget: list[int], num_actions: int, device: torch.device
    ) -> Self:
        """The selection prepared for one search; num_legal, budget: one number for each root."""

    def __call__(self, nodes: Nodes, carry: Any) -> tuple[Tensor, Any]:
        """Choose the actions [M]; returns them, and the carry for the children."""


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
    # The range counts as at least this ("soft" minimum and maximum of EfficientZero); that of
    # "siblings" as at least 1e-8, whatever this is.
    min_range: float = 0.01
    # Equal scores: the lowest action, or the choice of `tie_seed` (int64 [B], one a root).
    ties: Literal["lowest", "random"] = "lowest"
    tie_seed: Tensor | None = None

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            example = f"; for example PUCT({name}={allowed[0]!r})"
            check_choice(name, getattr(self, name), allowed, example)
        if not (0 < self.c_base < math.inf and self.min_range > 0):
            raise ValueError(
                f"c_base={self.c_base} and min_range={self.min_range} must be above 0, and c_base "
                "finite"
            )
        if not 0 <= self.c_init < math.inf:
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
    ) -> PUCT:
        """The selection with its seeds as int64 on the device."""
        if self.tie_seed is None:
            return self
        if self.tie_seed.shape != (len(budget),) or self.tie_seed.is_floating_point():
            raise ValueError(
                f"tie_seed is {self.tie_seed.dtype} {list(self.tie_seed.shape)}, but there are "
                f"{len(budget)} roots: pass an int64 tensor [{len(budget)}]"
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
    num = torch.arange(num_simulations + 1, dtype=torch.float64, device="cpu")
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Gumbel:
    """Gumbel selection: at the root the best g + logits + sigma(Q) among the actions whose turn it
    is; below it the action whose share of visits lags the improved policy the most.

        sigma(q) = (maxvisit_init + max_b n(b)) * value_scale * (completed q, rescaled to [0, 1])
        below the root: argmax softmax(logits + sigma)(a) - n(a) / (1 + sum_b n(b))

    Source: Danihelka, Guez, Schrittwieser, Silver (2022), "Policy improvement by planning with
    Gumbel", ICLR (eqs. 8-12, algorithm 2).

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
        check_count("max_considered", self.max_considered, 1)
        for name in ("value_scale", "maxvisit_init"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be finite and not negative")

    def prepare(
        self, num_legal: list[int], budget: list[int], num_actions: int, device: torch.device
    ) -> Gumbel:
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
            considered=torch.tensor(table, dtype=torch.int32, device=device)[rows],
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


@dataclass(frozen=True)
class CheckedSelection:
    """A function `select(nodes, carry) -> (action, carry)`, or another `Selection` than those here,
    with a check of the actions that it chooses.

    >>> CheckedSelection(lambda nodes, carry: (nodes.visits.argmin(-1), carry)).needs_logits
    True
    """

    select: Any
    needs_logits: bool = True
    normalize: Normalize = "running"
    root_in_range: bool = False

    def prepare(
        self, num_legal: list[int], budget: list[int], num_actions: int, device: torch.device
    ) -> CheckedSelection:
        """The selection prepared for one search; a function needs no preparation."""
        if not hasattr(self.select, "prepare"):
            return self
        return replace(self, select=self.select.prepare(num_legal, budget, num_actions, device))

    def __call__(self, nodes: Nodes, carry: Any) -> tuple[Tensor, Any]:
        """The actions and the carry, after a check that the actions are legal."""
        answer = self.select(nodes, carry)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise TypeError(
                f"select returned a {type(answer).__name__}; it must return (action, carry)"
            )
        _check_actions(answer[0], nodes)
        return answer


def _check_actions(action: Any, nodes: Nodes) -> None:
    visits, mask = nodes.visits, nodes.mask
    if not isinstance(action, Tensor) or action.dtype != torch.int64:
        kind = action.dtype if isinstance(action, Tensor) else type(action).__name__
        raise TypeError(f"select returned {kind} as actions; they must be an int64 tensor")
    if action.shape != visits.shape[:1]:
        raise ValueError(
            f"select returned actions {list(action.shape)} for {visits.shape[0]} nodes; it must "
            "return one for each"
        )
    num_actions = visits.shape[1]
    if not bool(((action >= 0) & (action < num_actions)).all()):
        raise ValueError(
            f"select returned actions {action.tolist()}; they must be in 0..{num_actions - 1}"
        )
    if mask is None:
        return
    ends = ~mask.any(-1)  # a node that ended is not walked from, but may be asked about
    if not bool((mask.gather(1, action.unsqueeze(1)).squeeze(1) | ends).all()):
        raise ValueError(
            f"select returned actions {action.tolist()}, some of which are illegal; nodes.mask "
            "shows the legal ones"
        )


def as_selection(select: Any) -> Any:
    """`PUCT` and `Gumbel` themselves, checks around any other selection; `PUCT()` for None.

    >>> as_selection(None).normalize
    'running'
    """
    if select is None:
        return PUCT()
    if isinstance(select, type):
        raise TypeError(f"select is the class {select.__name__}; pass {select.__name__}(...)")
    if type(select) in (PUCT, Gumbel):
        return select
    if not callable(select):
        raise TypeError(
            f"select is a {type(select).__name__}; it must be PUCT(), Gumbel(...) or a function "
            "select(nodes, carry) -> (action, carry)"
        )
    if not hasattr(select, "prepare"):
        return CheckedSelection(select)
    check_choice("normalize", select.normalize, get_args(Normalize))
    return CheckedSelection(select, select.needs_logits, select.normalize, select.root_in_range)
