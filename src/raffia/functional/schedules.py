"""Schedules: factors of a rate as functions of the number of updates.

They are elementwise: a step [P] gives factors [P]. Products of schedules are schedules.
"""

import math

import torch
from torch import Tensor


def warmup(
    step: Tensor,  # int64 [*], updates made before this one
    num_steps: float,
) -> Tensor:  # [*], 0..1
    """A linear warm-up: from 0 at step 0 to 1 at `num_steps`; always 1 where that is 0.

    >>> warmup(torch.tensor([0, 5, 10, 99]), 10)
    tensor([0.0000, 0.5000, 1.0000, 1.0000])
    """
    return torch.ones_like(step, dtype=torch.float32) if num_steps <= 0 else linear(step, num_steps)


def step_decay(
    step: Tensor,  # int64 [*]
    every: int,
    rate: float,
) -> Tensor:  # [*]
    """A step decay: rate^(step // every); before step 0 it is 1.

    >>> step_decay(torch.tensor([0, 99, 100, 250]), every=100, rate=0.5)
    tensor([1.0000, 1.0000, 0.5000, 0.2500])
    """
    if every < 1:
        raise ValueError(f"step_decay(every={every}): it must be at least 1 step")
    times = torch.div(step, every, rounding_mode="floor").clamp_min(0)
    return torch.as_tensor(rate, device=step.device).pow(times)


def linear(
    step: Tensor,  # int64 [*]
    num_steps: float,
    start: float = 0.0,
    stop: float = 1.0,
) -> Tensor:  # [*]
    """A linear schedule from `start` at step 0 to `stop` at `num_steps`, and constant after it.

    >>> linear(torch.tensor([0, 5, 10, 99]), 10, start=1.0, stop=0.2)
    tensor([1.0000, 0.6000, 0.2000, 0.2000])
    """
    fraction = (step / num_steps).clamp(0, 1)
    return start * (1 - fraction) + stop * fraction  # exact at both ends


def cosine_decay(
    step: Tensor,  # int64 [*]
    num_steps: float,
    stop: float = 0.0,
) -> Tensor:  # [*]
    """A cosine decay from 1 at step 0 to `stop` at `num_steps`, and constant after it.

    Source: Loshchilov & Hutter (2017), equation 5, without restarts.

    >>> cosine_decay(torch.tensor([0, 5, 10, 99]), 10)
    tensor([1.0000, 0.5000, 0.0000, 0.0000])
    """
    fraction = (step / num_steps).clamp(0, 1)
    return stop + (1 - stop) * (1 + (math.pi * fraction).cos()) / 2
