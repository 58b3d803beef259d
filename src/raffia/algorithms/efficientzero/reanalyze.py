"""Policies and values of stored steps, searched anew with the network of today.

Source: Schrittwieser et al. (2021), "Online and Offline Reinforcement Learning by Planning with a
Learned Model"; Ye et al. (2021), section 4.3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from raffia.algorithms.efficientzero.actor import kept
from raffia.algorithms.efficientzero.planning import Planner
from raffia.tensordict.tensordict import TensorDict

MEMBER = "member"  # int64 [B], whose each window is, where a population learns


class Distinct(NamedTuple):
    """Which of many places to look at so that each step is looked at once.

    >>> distinct(torch.tensor([[7, 8], [8, 9]]), torch.tensor([[True, True], [True, False]]))
    Distinct(first=tensor([0, 1]), of_each=tensor([0, 1, 1]))
    """

    first: Tensor  # int64 [M]: a place of each step, in the flattened tensor
    of_each: Tensor  # int64 [number wanted]: the number of its step, 0..M-1, for each wanted place


def distinct(
    step_index: Tensor,  # int64 [*], equal where the same step is meant
    wanted: Tensor,  # bool [*]
) -> Distinct:
    """The distinct steps among the wanted places: windows of a small replay overlap much."""
    steps, of_each = torch.unique(step_index[wanted], return_inverse=True)
    places = wanted.flatten().nonzero()[:, 0]
    first = torch.full_like(steps, wanted.numel()).scatter_reduce(0, of_each, places, "amin")
    return Distinct(first, of_each)


def reanalyze(
    windows: TensorDict,  # [B], rows drawn at random
    planner: Planner,  # refreshed with the target network
    *,
    generator: torch.Generator,
) -> TensorDict | None:
    """Search the first `reanalyze_ratio` of the windows anew, steps t..t+K, all in one call.

    Gives, for each of the M distinct steps, "step_index", "policy", "value" (and
    "sampled_actions"); None if there is nothing to search. Windows of a population's members, as
    many of each, have "member" [B], and what is given has it, too: a step is each member's own.

    >>> from raffia.algorithms.efficientzero.config import EfficientZeroConfig, SearchConfig
    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> from raffia.envs.env import Discrete, EnvSpec
    >>> spec = EnvSpec(observation_shape=(4,), action=Discrete(2))
    >>> config = EfficientZeroConfig(search=SearchConfig(num_simulations=4))
    >>> planner = Planner(EfficientZeroModelMLP(4, 2), spec, config)
    >>> windows = TensorDict(
    ...     observation=torch.zeros(1, 11, 4), step_index=torch.arange(11).unsqueeze(0),
    ...     valid_step=torch.ones(1, 11, dtype=torch.bool), batch_size=[1])
    >>> reanalyze(windows, planner, generator=torch.Generator())["policy"].shape
    torch.Size([6, 2])
    """
    config = planner.config
    chosen = _first_share(windows, config.targets.reanalyze_ratio)
    rows = slice(config.loss.unroll_steps + 1)
    step_index = windows["step_index"][chosen, rows]
    place = distinct(steps_of(windows)[chosen, rows], windows["valid_step"][chosen, rows]).first
    if not len(place):
        return None
    window, row = chosen[place // step_index.shape[1]], place % step_index.shape[1]
    state = {key: windows[key][window, row] for key in planner.spec.state_keys}
    if MEMBER in windows.keys():
        state[MEMBER] = windows[MEMBER][window]
    plan = planner.plan(
        TensorDict(state, [len(place)]),
        noise=config.targets.reanalyze_noise,
        temperature=0.0,  # no action is taken, so none is drawn
        generator=generator,
    )
    fresh = kept(plan).exclude("action")
    fresh["step_index"] = step_index.flatten()[place]
    return fresh.set(MEMBER, state[MEMBER]) if MEMBER in state else fresh


def _first_share(windows: TensorDict, share: float) -> Tensor:  # int64 [n]
    """The first windows; of each member, where they are a population's, who have as many."""
    if MEMBER not in windows.keys():
        return torch.arange(round(share * len(windows)))
    num_members = int(windows[MEMBER].max()) + 1
    of_each = len(windows) // num_members
    place = torch.arange(len(windows)).view(num_members, of_each)
    return place[:, : round(share * of_each)].flatten()


def steps_of(windows: TensorDict) -> Tensor:  # int64 [*]
    """Numbers of the steps, -1 where there is none; unlike for unlike members.

    >>> windows = TensorDict(step_index=torch.tensor([[3, -1], [3, 4]]),
    ...                      member=torch.tensor([0, 1]), batch_size=[2])
    >>> steps_of(windows)
    tensor([[ 3, -1],
            [ 8,  9]])
    """
    step = windows["step_index"]
    if MEMBER not in windows.keys():
        return step
    member = windows[MEMBER].reshape(-1, *[1] * (step.dim() - 1))
    return torch.where(step < 0, -1, step + member * (step.max() + 1))


def with_fresh(windows: TensorDict, fresh: TensorDict) -> TensorDict:
    """The windows with what was searched anew in place of what was stored, wherever it stands.

    >>> windows = TensorDict(step_index=torch.tensor([[3, 4], [4, -1]]),
    ...                      value=torch.zeros(2, 2), batch_size=[2])
    >>> fresh = TensorDict(step_index=torch.tensor([4]), value=torch.ones(1), batch_size=[1])
    >>> with_fresh(windows, fresh)["value"]
    tensor([[0., 1.],
            [1., 0.]])
    """
    wanted, largest = steps_of(windows), windows["step_index"].max()
    steps = fresh["step_index"]  # in rising order
    if MEMBER in fresh.keys():
        steps = steps + fresh[MEMBER] * (largest + 1)
    place = torch.searchsorted(steps, wanted).clamp_max(len(steps) - 1)
    found = steps[place] == wanted
    out = windows.copy()
    for name in fresh.keys():
        if name not in ("step_index", MEMBER):
            stored = windows[name]
            renewed = fresh[name].to(stored)[place]
            out[name] = torch.where(_over(found, stored), renewed, stored)
    return out


def _over(flags: Tensor, like: Tensor) -> Tensor:
    return flags.reshape(*flags.shape, *[1] * (like.ndim - flags.ndim))
