"""Policies: a search, and the action and the target that are made of it; noise for its roots."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from raffia.functional.draws import (
    check_alpha,
    dirichlet_noise,
    gumbel_noise,
)
from raffia.search import kernels
from raffia.search.base import RecurrentFn, RootOutput, SearchOptions
from raffia.search.check import check_of_each, check_root, check_seed
from raffia.search.mcts import search
from raffia.search.nodes import Nodes, best
from raffia.search.selection import Gumbel, SelectFn, Selection
from raffia.search.softmax import softmax
from raffia.search.tree import Tree


@dataclass(frozen=True)
class PolicyOutput:
    """The plans of B states.

    >>> from raffia.search import RecurrentOutput, RootOutput, muzero_policy
    >>> def model(embedding, action):
    ...     rows = len(action)
    ...     return RecurrentOutput(action.float(), torch.zeros(rows), torch.zeros(rows, 2)
    ...                            ), embedding
    >>> root = RootOutput(torch.zeros(3, 2), torch.zeros(3), torch.zeros(3))
    >>> muzero_policy(root, model, 20, discount=0.0, dirichlet_fraction=0.0, temperature=0.0).action
    tensor([1, 1, 1])
    """

    action: Tensor  # int64 [B]: the choice to take; [B, ...] where the root gave `actions`
    action_weights: Tensor  # float32 [B, A]: the target for the policy, sums to 1
    root_value: Tensor  # float32 [B]
    tree: Tree


def muzero_policy(
    root: RootOutput,
    recurrent_fn: RecurrentFn,
    num_simulations: int | Tensor,  # for all roots, or int64 [B]
    *,
    # fraction of noise in the root's prior, or [B]; evaluation: 0
    dirichlet_fraction: float | Tensor = 0.25,
    dirichlet_alpha: float = 0.3,
    dirichlet: Tensor | None = None,  # [B, A], the noise itself (rows sum to 1)
    temperature: float | Tensor = 1.0,  # action ~ visits^(1/T); 0: the most visited; or [B]
    action_gumbel: Tensor | None = None,  # [B, A], the draw of the action itself
    generator: torch.Generator | None = None,  # for the draws that are not given; None: torch's own
    select: Selection | SelectFn | None = None,  # PUCT() if None
    **options: Unpack[SearchOptions],  # of `search`
) -> PolicyOutput:
    """Plan as MuZero and EfficientZero do: PUCT below a noisy root, actions by visits.

    `action_weights` are the visits divided by their sum. Each draw can be given instead, so that
    the same noise gives the same tree.
    Source: Schrittwieser et al. (2020), appendix B; Ye et al. (2021).

    >>> from raffia.search import RecurrentOutput, RootOutput, muzero_policy
    >>> def model(embedding, action):  # the first of two arms pays 1
    ...     rows = len(action)
    ...     return RecurrentOutput(1.0 - action.float(), torch.zeros(rows), torch.zeros(rows, 2)
    ...                            ), embedding
    >>> root = RootOutput(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1, 1))
    >>> plan = muzero_policy(root, model, 20, discount=0.0, dirichlet_fraction=0.0, temperature=0.0)
    >>> plan.action, plan.action_weights
    (tensor([0]), tensor([[0.9000, 0.1000]]))
    """
    check_root(root)
    _check_noise(root, dirichlet_fraction, dirichlet, action_gumbel, temperature)
    if _any(dirichlet_fraction):
        if dirichlet is None:
            legal = torch.ones_like(root.prior_logits).bool() if root.mask is None else root.mask
            dirichlet = dirichlet_noise(legal, dirichlet_alpha, generator)
        else:
            _check_dirichlet(dirichlet, root.mask)
        root = with_noise(root, dirichlet, dirichlet_fraction)
    tree = search(root, recurrent_fn, num_simulations=num_simulations, select=select, **options)
    visits = tree.visits_of_root()
    if action_gumbel is None and _any(temperature):
        shape = tuple(root.prior_logits.shape)
        action_gumbel = gumbel_noise(shape, generator, root.prior_logits.device)
    chosen = sample_visits(visits, temperature, action_gumbel)
    return PolicyOutput(
        _taken(root, chosen), visits / visits.sum(-1, keepdim=True), tree.value(), tree
    )


def gumbel_policy(
    root: RootOutput,
    recurrent_fn: RecurrentFn,
    num_simulations: int | Tensor,  # for all roots, or int64 [B]
    *,
    max_considered: int = 16,  # actions that the root tries
    value_scale: float = 0.1,
    maxvisit_init: float = 50.0,
    gumbel_scale: float | Tensor = 1.0,  # of the noise drawn here, or [B]; evaluation: 0
    root_gumbel: Tensor | None = None,  # [B, A], the noise itself, scaled already
    generator: torch.Generator | None = None,  # for the noise if not given; None: torch's own
    **options: Unpack[SearchOptions],  # of `search`; here root_value="include" if not given
) -> PolicyOutput:
    """Plan as Gumbel MuZero does: sequential halving at the root, the improved policy as target.

        action_weights = softmax(logits + sigma(completed Q))

    The action is the best among the most visited ones.
    Source: Danihelka et al. (2022), "Policy improvement by planning with Gumbel", ICLR.

    >>> from raffia.search import RecurrentOutput, RootOutput, gumbel_policy
    >>> def model(embedding, action):  # the first of two arms pays 1
    ...     rows = len(action)
    ...     return RecurrentOutput(1.0 - action.float(), torch.zeros(rows), torch.zeros(rows, 2)
    ...                            ), embedding
    >>> root = RootOutput(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1, 1))
    >>> plan = gumbel_policy(root, model, 8, discount=0.0, gumbel_scale=0.0)
    >>> plan.action, plan.action_weights.round(decimals=3)
    (tensor([0]), tensor([[0.9960, 0.0040]]))
    """
    check_root(root)
    if root_gumbel is None:
        shape, device = tuple(root.prior_logits.shape), root.prior_logits.device
        check_of_each("gumbel_scale", gumbel_scale, shape[0])
        scale = torch.as_tensor(gumbel_scale, device=device).unsqueeze(-1)
        root_gumbel = scale * gumbel_noise(shape, generator, device)
    select = Gumbel(
        root_gumbel=root_gumbel,
        max_considered=max_considered,
        value_scale=value_scale,
        maxvisit_init=maxvisit_init,
    )
    options.setdefault("root_value", "include")
    tree = search(root, recurrent_fn, num_simulations=num_simulations, select=select, **options)
    entries = {name: tree.data[name] for name in tree.data.keys()}
    batch = len(tree)
    rows = torch.arange(batch, device=root_gumbel.device)
    nodes = Nodes(entries, rows, torch.zeros_like(rows), 0, 0)
    sigma, visits = select.sigma(nodes), nodes.visits
    gumbel = root_gumbel.to(visits.device, torch.float32)
    turn = visits.amax(-1)
    chosen = best(select.root_scores(gumbel, nodes.prior_logits, sigma, visits, turn), nodes.mask)
    weights = softmax(nodes.prior_logits + sigma)
    return PolicyOutput(_taken(root, chosen), weights, tree.value(), tree)


def with_noise(
    root: RootOutput,
    noise: Tensor,  # [B, A]
    fraction: float | Tensor,  # or [B]
) -> RootOutput:
    """The root with prior (1 - fraction) P + fraction noise, over the legal actions.

    >>> root = RootOutput(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1))
    >>> with_noise(root, torch.tensor([[1.0, 0.0]]), 0.5).prior_logits.exp()
    tensor([[0.7500, 0.2500]])
    """
    logits = root.prior_logits.double()
    if root.mask is not None:
        logits = logits.masked_fill(~root.mask, -torch.inf)
    if isinstance(fraction, Tensor):
        fraction = fraction.to(logits).reshape(-1, 1)
    prior = (1 - fraction) * logits.softmax(-1) + fraction * noise.double()
    return root._replace(prior_logits=prior.log().float())


def sample_visits(
    visits: Tensor,  # [B, A], with a visit in each row
    temperature: float | Tensor = 1.0,  # or [B]
    gumbel: Tensor | None = None,  # [B, A], draws from Gumbel(0, 1); not needed at temperature 0
) -> Tensor:
    """Actions drawn from visits^(1/T) / sum, int64 [B]; where T is 0 or less the most visited,
    lowest first.

    >>> sample_visits(torch.tensor([[3, 5, 5]]), temperature=0.0)
    tensor([1])
    """
    if not _any(temperature):
        return visits.argmax(-1)
    if gumbel is None:
        raise ValueError(
            "a temperature above 0 samples the action: pass gumbel=gumbel_noise(shape)"
        )
    # Gumbel-max; visits relative to the most, so that a small temperature does not overflow
    log_visits, gumbel = visits.double().log(), gumbel.to(visits.device)
    log_visits -= log_visits.amax(-1, keepdim=True)
    if not isinstance(temperature, Tensor) or temperature.ndim == 0:
        return (log_visits / float(temperature) + gumbel).argmax(-1)
    heat = temperature.to(visits.device, torch.float64)
    scores = log_visits / heat.clamp_min(1e-12).unsqueeze(-1) + gumbel
    return torch.where(heat > 0, scores.argmax(-1), visits.argmax(-1))


def _check_dirichlet(noise: Tensor, mask: Tensor | None) -> None:
    over_legal = noise if mask is None else noise.masked_fill(~mask, 0.0)
    least, most = _ends(over_legal.sum(-1))
    if not (noise.amin() >= 0 and 1 - least < 1e-3 and most - 1 < 1e-3):
        raise ValueError(
            "dirichlet must not be negative, and sum to 1 over the legal actions of each root: "
            "draw it with dirichlet_noise(mask)"
        )


def _any(number: float | Tensor) -> bool:
    """Whether a number is above 0 for any root; NaN is not."""
    return bool((number > 0).any()) if isinstance(number, Tensor) else number > 0


def _taken(root: RootOutput, chosen: Tensor) -> Tensor:
    """The chosen actions themselves, where the choices stand for sampled ones."""
    if root.actions is None:
        return chosen
    return root.actions.detach()[torch.arange(len(chosen), device=chosen.device), chosen]


def _check_noise(
    root: RootOutput,
    fraction: float | Tensor,
    dirichlet: Tensor | None,
    action_gumbel: Tensor | None,
    temperature: float | Tensor,
) -> None:
    batch = root.value.size(0)
    check_of_each("dirichlet_fraction", fraction, batch)
    least, most = _ends(fraction)
    if not (least >= 0 and most <= 1):
        raise ValueError(f"dirichlet_fraction={fraction} must be in 0..1")
    if most == 0 and dirichlet is not None:
        raise ValueError(
            "dirichlet was passed, but dirichlet_fraction=0 ignores it: pass for example "
            "dirichlet_fraction=0.25"
        )
    for name, noise in (("dirichlet", dirichlet), ("action_gumbel", action_gumbel)):
        if noise is not None and noise.shape != root.prior_logits.shape:
            raise ValueError(
                f"{name} has shape {list(noise.shape)}; it must be [roots, actions] = "
                f"{list(root.prior_logits.shape)}"
            )
        if noise is not None and not all(map(math.isfinite, _ends(noise))):
            raise ValueError(f"{name} holds NaN or infinity; leave it out to have it drawn")
    check_of_each("temperature", temperature, batch)
    coldest, hottest = _ends(temperature)
    if not (coldest >= 0 and hottest < math.inf):
        raise ValueError(f"temperature={temperature} must be finite and not negative")


def _ends(number: float | Tensor) -> tuple[float, float]:
    """The smallest and the largest of some values."""
    if isinstance(number, Tensor):
        least, most = number.aminmax()
        return float(least), float(most)
    return number, number


def root_gumbel(
    seed: Tensor,  # int64 [B]
    num_actions: int,  # A
    choice: int = 0,  # draws for different uses have different numbers
) -> Tensor:  # float32 [B, A]
    """Gumbel noise of each row, from the child of its seed.

    >>> seed = torch.tensor([7, 8])
    >>> root_gumbel(seed, 3)[1:].equal(root_gumbel(seed[1:], 3))
    True
    """
    check_seed(seed, len(seed))
    seed = seed.cpu().contiguous()
    out = seed.new_empty(len(seed), num_actions, dtype=torch.float32)
    kernels.noise.gumbel(len(seed), num_actions, seed.data_ptr(), choice, out.data_ptr())
    return out


def root_dirichlet(
    seed: Tensor,  # int64 [B]
    num_actions: int,  # A
    alpha: float,  # concentration
    mask: Tensor | None = None,  # bool [B, A], True where the action is legal; None: all are
    choice: int = 0,  # draws for different uses have different numbers
) -> Tensor:  # float32 [B, A]
    """Dirichlet noise over the legal actions of each row, from the child of its seed.

    >>> noise = root_dirichlet(torch.tensor([7]), 3, 0.3)
    >>> round(noise.sum().item(), 5)
    1.0
    """
    check_alpha(alpha)
    check_seed(seed, len(seed))
    seed = seed.cpu().contiguous()
    out = seed.new_empty(len(seed), num_actions, dtype=torch.float32)
    legal_actions = None if mask is None else mask.cpu().contiguous()
    kernels.noise.dirichlet(
        *(len(seed), num_actions, seed.data_ptr(), choice),
        *(0 if legal_actions is None else legal_actions.data_ptr(), float(alpha), out.data_ptr()),
    )
    return out
