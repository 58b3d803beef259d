"""Observations as inputs of the networks: frames of a stack merged, bytes as numbers of 0..1."""

from __future__ import annotations

import torch
from torch import Tensor

from raffia.envs.env import EnvSpec


def merge_frames(
    observation: Tensor,  # [*, S, *observation_shape], without S if frame_stack is 1
    spec: EnvSpec,
    frame_stack: int = 1,  # S
    flatten: bool = False,  # images as vectors
) -> Tensor:  # [*, S * C, H, W] or [*, S * D]; [*, S * C * H * W] if `flatten`
    """The frames of a stack one after the other in the first dimension, the newest last.

    >>> from raffia.envs.env import Discrete, EnvSpec
    >>> spec = EnvSpec(observation_shape=(3, 8, 8), action=Discrete(2))
    >>> merge_frames(torch.zeros(5, 4, 3, 8, 8), spec, frame_stack=4).shape
    torch.Size([5, 12, 8, 8])
    """
    shape = spec.observation_shape
    stacked = shape if frame_stack == 1 else (frame_stack, *shape)
    lead = observation.shape[: observation.ndim - len(stacked)]
    if observation.shape[len(lead) :] != stacked:
        what = "observations" if frame_stack == 1 else f"stacks of {frame_stack} observations"
        raise ValueError(f"{what} of shape {list(shape)} are needed, got {list(observation.shape)}")
    if flatten:
        return observation.flatten(len(lead)) if stacked else observation
    if frame_stack == 1:
        return observation
    return observation.reshape(*lead, frame_stack * shape[0], *shape[1:])


def as_input(observation: Tensor) -> Tensor:
    """Floats as they are; bytes of 0..255 as floats of 0..1.

    >>> as_input(torch.tensor([0, 51], dtype=torch.uint8))
    tensor([0.0000, 0.2000])
    """
    if observation.dtype == torch.uint8:
        return observation.float().div_(255)
    return observation
