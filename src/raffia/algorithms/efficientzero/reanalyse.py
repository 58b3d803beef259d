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


def reanalyse(
    windows: TensorDict,  # [B], rows drawn at random
    planner: Planner,  # refreshed with the target network
    *,
    generator: torch.Generator,
) -> TensorDict | None:
    """Search the first `reanalyse_ratio` of the windows anew, steps t..t+K, all in one call.

    Gives, for each of the M distinct steps, "step_index", "policy", "value" (and
    "sampled_actions"); None if there is nothing to search.

    >>> from raffia.algorithms.efficientzero.config import EfficientZeroConfig, SearchConfig
    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> from raffia.envs.env import Discrete, EnvSpec
    >>> spec = EnvSpec(observation_shape=(4,), action=Discrete(2))
    >>> config = EfficientZeroConfig(search=SearchConfig(num_simulations=4))
    >>> planner = Planner(EfficientZeroModelMLP(4, 2), spec, config)
    >>> windows = TensorDict(
    ...     observation=torch.zeros(1, 11, 4), step_index=torch.arange(11).unsqueeze(0),
    ...     valid_step=torch.ones(1, 11, dtype=torch.bool), batch_size=[1])
    >>> reanalyse(windows, planner, generator=torch.Generator())["policy"].shape
    torch.Size([6, 2])
    """
    config = planner.config
    num_windows = round(config.targets.reanalyse_ratio * len(windows))
    rows = slice(num_windows), slice(config.loss.unroll_steps + 1)
    step_index = windows["step_index"][rows]
    place = distinct(step_index, windows["valid_step"][rows]).first
    if not len(place):
        return None
    window, row = place // step_index.shape[1], place % step_index.shape[1]
    state = {key: windows[key][window, row] for key in planner.spec.state_keys}
    plan = planner.plan(
        TensorDict(state, [len(place)]),
        noise=config.targets.reanalyse_noise,
        temperature=0.0,  # no action is taken, so none is drawn
        generator=generator,
    )
    fresh = kept(plan).exclude("action")
    fresh["step_index"] = step_index.flatten()[place]
    return fresh


def with_fresh(windows: TensorDict, fresh: TensorDict) -> TensorDict:
    """The windows with what was searched anew in place of what was stored, wherever it stands.

    >>> windows = TensorDict(step_index=torch.tensor([[3, 4], [4, -1]]),
    ...                      value=torch.zeros(2, 2), batch_size=[2])
    >>> fresh = TensorDict(step_index=torch.tensor([4]), value=torch.ones(1), batch_size=[1])
    >>> with_fresh(windows, fresh)["value"]
    tensor([[0., 1.],
            [1., 0.]])
    """
    steps = fresh["step_index"]  # in rising order
    place = torch.searchsorted(steps, windows["step_index"]).clamp_max(len(steps) - 1)
    found = steps[place] == windows["step_index"]
    out = windows.copy()
    for name in fresh.keys():
        if name != "step_index":
            stored = windows[name]
            renewed = fresh[name].to(stored)[place]
            out[name] = torch.where(_over(found, stored), renewed, stored)
    return out


def _over(flags: Tensor, like: Tensor) -> Tensor:
    return flags.reshape(*flags.shape, *[1] * (like.ndim - flags.ndim))
