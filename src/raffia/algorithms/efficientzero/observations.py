"""Observations as inputs of the networks: frames of a stack merged, bytes as numbers of 0..1.

Legend: B segments, K unrolled steps, S frames in a stack, O the shape of an observation with its
frames merged.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from raffia.data.segment_batches import stacked, unstacked
from raffia.envs.env import EnvSpec
from raffia.functional.augment import draw_intensity, draw_shift, intensity, random_shift
from raffia.tensordict.tensordict import TensorDict

FRAMES, AUGMENTATION = "frames", "augmentation"  # of a batch


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
        raise ValueError(f"{what} must have shape {list(shape)}; got {list(observation.shape)}")
    if flatten:
        return observation.flatten(len(lead)) if stacked else observation
    if frame_stack == 1:
        return observation
    return observation.reshape(*lead, frame_stack * shape[0], *shape[1:])


def as_input(observation: Tensor) -> Tensor:
    """Convert observations to floats: floats stay, bytes of 0..255 become 0..1.

    >>> as_input(torch.tensor([0, 51], dtype=torch.uint8))
    tensor([0.0000, 0.2000])
    """
    if observation.dtype == torch.uint8:
        return observation.float().div_(255)
    return observation


def frames_of(
    observation: Tensor,  # [B, L, *observation_shape], or stacks [B, L, S, *observation_shape]
    num_rows: int,  # the first so many of L
    frame_stack: int = 1,  # S
) -> Tensor:  # [B, S - 1 + num_rows, *observation_shape], in new memory
    """The frames that the first rows of segments show, each once.

    >>> stacks = stacked(torch.tensor([[1, 2, 3, 4]]), 2)
    >>> frames_of(stacks, 2, frame_stack=2)
    tensor([[1, 2, 3]])
    """
    if frame_stack == 1:
        return observation[:, :num_rows].clone()
    frames = unstacked(observation)
    if frames is not None:
        return frames[:, : frame_stack - 1 + num_rows].clone()
    return torch.cat([observation[:, 0], observation[:, 1:num_rows, -1]], 1)


def draw_augmentation(
    batch_size: int,  # B
    kinds: Collection[str],  # of "shift", "intensity"
    num_draws: int,  # of each segment: its first observation, then all later ones together
    generator: torch.Generator,
) -> TensorDict:  # [B]
    """Shifts [B, num_draws, 2] and factors of brightness [B, num_draws] of the kinds asked for.

    >>> draws = draw_augmentation(3, ["shift"], 2, torch.Generator())
    >>> draws["shift"].shape
    torch.Size([3, 2, 2])
    """
    draws = {"shift": draw_shift, "intensity": draw_intensity}
    drawn: dict[str, list[Tensor]] = {name: [] for name in draws if name in kinds}
    for _ in range(num_draws):
        for name, each in drawn.items():
            each.append(draws[name](batch_size, generator=generator))
    return TensorDict({name: torch.stack(each, 1) for name, each in drawn.items()}, [batch_size])


def with_observations(
    batch: TensorDict,  # [B]
    spec: EnvSpec,
    frame_stack: int = 1,  # S
    flatten: bool = False,  # images as vectors
) -> TensorDict:  # [B]
    """The batch with "observation" [B, *O] and "next_observation" [B, K, *O] made of its "frames".

    Frames [B, S + K, *observation_shape] and the numbers in "augmentation", if there are any, are
    what travels to the learner's device; stacks, shifts and brightness are made there. Without
    later frames, K = 0, there is no "next_observation".

    >>> from raffia.envs.env import Discrete, EnvSpec
    >>> spec = EnvSpec(observation_shape=(1, 8, 8), action=Discrete(2))
    >>> batch = TensorDict(frames=torch.zeros(5, 4 + 3, 1, 8, 8), batch_size=[5])
    >>> with_images = with_observations(batch, spec, frame_stack=4)
    >>> with_images["observation"].shape, with_images["next_observation"].shape
    (torch.Size([5, 4, 8, 8]), torch.Size([5, 3, 4, 8, 8]))
    """
    frames = batch[FRAMES]
    stacks = frames if frame_stack == 1 else stacked(frames, frame_stack)
    observation = merge_frames(stacks, spec, frame_stack, flatten)
    draws = batch.get(AUGMENTATION, None)
    with_images = batch.exclude(FRAMES, AUGMENTATION)
    with_images["observation"] = _augmented(observation[:, 0], draws, 0)
    if observation.shape[1] > 1:
        with_images["next_observation"] = _augmented(observation[:, 1:], draws, 1)
    return with_images


def _augmented(images: Tensor, draws: TensorDict | None, which: int) -> Tensor:
    """Shift each sample and change its brightness by its own draw, which its images share.

    Bytes stay bytes if they are only shifted.
    """
    if draws is None:
        return images
    if (shift := draws.get("shift", None)) is not None:
        images = random_shift(images, shift[:, which])
    if (factor := draws.get("intensity", None)) is not None:
        images = intensity(as_input(images), factor[:, which])
    return images
