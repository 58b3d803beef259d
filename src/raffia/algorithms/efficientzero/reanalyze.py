"""Reanalyze: policies and values of stored steps, searched again with the present network.

Source: Schrittwieser et al. (2021), "Online and Offline Reinforcement Learning by Planning with a
Learned Model"; Ye et al. (2021), section 4.3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from raffia.algorithms.efficientzero.actor import replay_entries
from raffia.algorithms.efficientzero.planning import Planner
from raffia.tensordict.tensordict import TensorDict

MEMBER = "member"  # int64 [B], the member of each segment, where a population learns


class Distinct(NamedTuple):
    """One index for each distinct step among many.

    >>> distinct(torch.tensor([[7, 8], [8, 9]]), torch.tensor([[True, True], [True, False]]))
    Distinct(first=tensor([0, 1]), of_each=tensor([0, 1, 1]))
    """

    first: Tensor  # int64 [M]: an index of each step in the flattened tensor
    of_each: Tensor  # int64 [number wanted]: the number of its step, 0..M-1, for each wanted index


def distinct(
    step_index: Tensor,  # int64 [*], equal where the same step is meant
    wanted: Tensor,  # bool [*]
) -> Distinct:
    """The distinct steps among the wanted ones: segments of a small replay overlap much."""
    steps, of_each = torch.unique(step_index[wanted], return_inverse=True)
    indices = wanted.flatten().nonzero()[:, 0]
    first = torch.full_like(steps, wanted.numel()).scatter_reduce(0, of_each, indices, "amin")
    return Distinct(first, of_each)


def reanalyze(
    segments: TensorDict,  # [B], rows drawn at random
    planner: Planner,  # refreshed with the target network
    *,
    generator: torch.Generator,
) -> TensorDict | None:
    """Search the first `reanalyze_ratio` of the segments again, steps t..t+K, all in one call.

    Gives, for each of the M distinct steps, "step_index", "policy", "value" (and
    "sampled_actions"); None if there is nothing to search. Windows of a population's members, as
    many of each, have "member" [B], and what is given has it, too: a step is each member's own.

    >>> from raffia.algorithms.efficientzero.config import EfficientZeroConfig, SearchConfig
    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> from raffia.envs.env import Discrete, EnvSpec
    >>> spec = EnvSpec(observation_shape=(4,), action=Discrete(2))
    >>> config = EfficientZeroConfig(search=SearchConfig(num_simulations=4))
    >>> planner = Planner(EfficientZeroModelMLP(4, 2), spec, config)
    >>> segments = TensorDict(
    ...     observation=torch.zeros(1, 11, 4), step_index=torch.arange(11).unsqueeze(0),
    ...     valid_step=torch.ones(1, 11, dtype=torch.bool), batch_size=[1])
    >>> reanalyze(segments, planner, generator=torch.Generator())["policy"].shape
    torch.Size([6, 2])
    """
    config = planner.config
    chosen = _first_fraction(segments, config.targets.reanalyze_ratio)
    rows = slice(config.loss.unroll_steps + 1)
    step_index = segments["step_index"][chosen, rows]
    index = distinct(steps_of(segments)[chosen, rows], segments["valid_step"][chosen, rows]).first
    if not len(index):
        return None
    segment, row = chosen[index // step_index.shape[1]], index % step_index.shape[1]
    state = {key: segments[key][segment, row] for key in planner.spec.state_keys}
    if MEMBER in segments.keys():
        state[MEMBER] = segments[MEMBER][segment]
    plan = planner.plan(
        TensorDict(state, [len(index)]),
        noise=config.targets.reanalyze_noise,
        temperature=0.0,  # no action is taken, so none is drawn
        generator=generator,
    )
    reanalyzed = replay_entries(plan).exclude("action")
    reanalyzed["step_index"] = step_index.flatten()[index]
    return reanalyzed.set(MEMBER, state[MEMBER]) if MEMBER in state else reanalyzed


def _first_fraction(segments: TensorDict, fraction: float) -> Tensor:  # int64 [n]
    """Indices of the first segments; in a population, as many of each member."""
    if MEMBER not in segments.keys():
        return torch.arange(round(fraction * len(segments)))
    num_members = int(segments[MEMBER].max()) + 1
    of_each = len(segments) // num_members
    index = torch.arange(len(segments)).view(num_members, of_each)
    return index[:, : round(fraction * of_each)].flatten()


def steps_of(segments: TensorDict) -> Tensor:  # int64 [*]
    """Numbers of the steps, -1 where a step is missing; the numbers of different members differ.

    >>> segments = TensorDict(step_index=torch.tensor([[3, -1], [3, 4]]),
    ...                      member=torch.tensor([0, 1]), batch_size=[2])
    >>> steps_of(segments)
    tensor([[ 3, -1],
            [ 8,  9]])
    """
    step = segments["step_index"]
    if MEMBER not in segments.keys():
        return step
    member = segments[MEMBER].reshape(-1, *[1] * (step.dim() - 1))
    return torch.where(step < 0, -1, step + member * (step.max() + 1))


def with_reanalyzed(segments: TensorDict, reanalyzed: TensorDict) -> TensorDict:
    """The segments with searched entries instead of the stored ones, wherever these steps occur.

    >>> segments = TensorDict(step_index=torch.tensor([[3, 4], [4, -1]]),
    ...                      value=torch.zeros(2, 2), batch_size=[2])
    >>> reanalyzed = TensorDict(step_index=torch.tensor([4]), value=torch.ones(1), batch_size=[1])
    >>> with_reanalyzed(segments, reanalyzed)["value"]
    tensor([[0., 1.],
            [1., 0.]])
    """
    wanted, largest = steps_of(segments), segments["step_index"].max()
    steps = reanalyzed["step_index"]  # in rising order
    if MEMBER in reanalyzed.keys():
        steps = steps + reanalyzed[MEMBER] * (largest + 1)
    index = torch.searchsorted(steps, wanted).clamp_max(len(steps) - 1)
    found = steps[index] == wanted
    out = segments.copy()
    for name in reanalyzed.keys():
        if name not in ("step_index", MEMBER):
            stored = segments[name]
            renewed = reanalyzed[name].to(stored)[index]
            is_new = found.reshape(*found.shape, *[1] * (stored.ndim - found.ndim))
            out[name] = torch.where(is_new, renewed, stored)
    return out
