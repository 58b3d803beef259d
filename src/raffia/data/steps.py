"""Steps on their way into a segment buffer: checked, and taken apart into what is stored.

Legend: T times, E environments, C episodes that end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raffia.data.structure import RowStructure
from raffia.tensordict.keys import (
    MissingKeyError,
    NestedKey,
    unravel_key,
    unravel_key_list,
    unravel_key_to_tuple,
)
from raffia.tensordict.tensordict import TensorDict

NEXT = "next"
Path = tuple[Any, ...]


class StepKeys:
    """The entries of a step by their meaning.

    observation: entries of a state, there before any action, and after the last one.
    terminated, truncated: what marks the end of an episode.
    """

    def __init__(
        self, observation: Sequence[NestedKey], terminated: NestedKey, truncated: NestedKey
    ) -> None:
        self.observation = tuple(unravel_key_list(observation))
        self.terminated, self.truncated = terminated, truncated
        self.observation_paths = [unravel_key_to_tuple(key) for key in self.observation]
        self.flag_paths = [unravel_key_to_tuple(key) for key in (terminated, truncated)]
        if any(path[0] == NEXT for path in self.observation_paths):
            raise ValueError(
                f"observation_keys={list(observation)} must name observations before an action, "
                f"not ones below {NEXT!r}; the observation after the action is found there "
                "automatically: observation_keys=['obs']"
            )

    @property
    def under_next(self) -> bool:
        """Whether the outcome of a step, such as its reward, is under "next" and is stored there.

        >>> StepKeys(("observation",), ("next", "terminated"), ("next", "truncated")).under_next
        True
        """
        return any(path[0] == NEXT for path in self.flag_paths)

    def is_observation(self, path: Path) -> bool:
        """Whether an entry is one of a state.

        >>> StepKeys(("obs",), "terminated", "truncated").is_observation(("obs", "pixels"))
        True
        """
        return any(path[: len(own)] == own for own in self.observation_paths)


class StoredSteps(NamedTuple):
    """Steps taken apart into what is stored: tensors in the order of their structure."""

    structure: RowStructure
    rows: list[Tensor]  # [T * E, ...] each
    closing: list[Tensor]  # [C, ...] each, of the closing rows: by time, then by environment
    terminated: Tensor  # [T, E] bool
    truncated: Tensor  # [T, E] bool
    ends: Tensor  # [T, E] bool


def take_steps(steps: TensorDict, keys: StepKeys, structure: RowStructure | None) -> StoredSteps:
    """The stored form of steps [T, E]; raises KeyError or ValueError that names what is wrong.

    structure: of the stored rows; None before the first.

    >>> from raffia.data.steps import StepKeys, take_steps
    >>> step = TensorDict(
    ...     observation=torch.tensor([[5]]),
    ...     reward=torch.tensor([[1.0]]),
    ...     terminated=torch.tensor([[True]]),
    ...     truncated=torch.tensor([[False]]),
    ...     next=dict(observation=torch.tensor([[6]])),
    ...     batch_size=[1, 1],
    ... )
    >>> keys = StepKeys(("observation",), "terminated", "truncated")
    >>> take_steps(step, keys, None).closing
    [tensor([6]), tensor([0.]), tensor([True]), tensor([False])]
    """
    terminated, truncated = _flag(steps, keys.terminated), _flag(steps, keys.truncated)
    ends = terminated | truncated
    for key in keys.observation:
        if steps.get(key, None) is None:
            after = steps.get(NEXT, None)
            found = after.keys() if hasattr(after, "keys") else ()
            states = [name for name in steps.keys() if name in found]
            raise MissingKeyError(
                f"steps have no entry {key!r}, which observation_keys names; their entries are "
                f"{sorted(map(str, steps.keys()))}. SegmentReplayBuffer(..., "
                f"observation_keys={states or ['...']}) names the observation before an action"
            )
    stored = _stored(steps, keys)
    if structure is None:
        structure = RowStructure.of(stored, 2)
    leaves, _ = structure.leaves(stored, 2)
    closing: list[Tensor] = []
    if bool(ends.any()):
        for path, leaf in zip(structure.paths, leaves, strict=True):
            if keys.is_observation(path):
                closing.append(_after(steps, path, leaf)[ends])
            elif path in keys.flag_paths:
                closing.append(leaf[ends])
            else:
                closing.append(leaf.new_zeros(int(ends.sum()), *leaf.shape[2:]))
    rows = [leaf.flatten(0, 1) for leaf in leaves]
    return StoredSteps(structure, rows, closing, terminated, truncated, ends)


def _stored(steps: TensorDict, keys: StepKeys) -> TensorDict:
    """The stored part of each step: without the next observation, which is that of the next row."""
    if NEXT not in steps.keys():
        return steps
    rows = steps.exclude(NEXT)
    if keys.under_next:
        # Entry by entry: no empty container stays where an observation was.
        for key, value in steps[NEXT].items(True, True):
            path = unravel_key_to_tuple(key)
            if not keys.is_observation(path):
                rows.set((NEXT, *path), value)
    return rows


def _flag(steps: TensorDict, key: NestedKey) -> Tensor:
    """Whether an episode ends with each step, on the CPU: [T, E] bool."""
    flag, shape = steps[key], steps.batch_size
    if flag.dtype is not torch.bool or flag.shape not in (shape, (*shape, 1)):
        raise ValueError(
            f"entry {key!r} is {flag.dtype} {list(flag.shape[len(shape) :])} for each step; it "
            "must be a single torch.bool, which marks whether the episode ends with the step"
        )
    return flag.reshape(shape).cpu().contiguous()


def _after(steps: TensorDict, path: Path, like: Tensor) -> Tensor:
    """An observation after each step; only those after the last step of an episode are needed."""
    nested, key = (NEXT, *path), unravel_key(path)
    found = steps.get(nested, None)
    if found is None:
        raise MissingKeyError(
            f"an episode ends in these steps, but there is no entry {nested!r} with the "
            f"observation after its last action: set steps[{nested!r}] = ... with the shape of "
            f"{key!r}. Its values have no effect at steps that do not end an episode"
        )
    if found.shape != like.shape or found.dtype is not like.dtype:
        raise ValueError(
            f"entry {nested!r} is {found.dtype} {list(found.shape)}, but {key!r} is {like.dtype} "
            f"{list(like.shape)}: they must have the same dtype and shape"
        )
    return found.detach()


def in_parts(ends: Tensor, num_rows: int) -> list[slice]:
    """Cut times into parts whose steps and closing rows find room in the ring together.

    ends: [T, E] bool.

    >>> ends = torch.tensor([[False, False], [True, False], [False, False], [False, False]])
    >>> in_parts(ends, 5)
    [slice(0, 2, None), slice(2, 4, None)]
    """
    num_times, num_envs = ends.shape
    if ends.numel() + int(ends.sum()) <= num_rows:
        return [slice(0, num_times)]
    parts, start, used = [], 0, 0
    for t, num_ends in enumerate(ends.sum(1).tolist()):
        needed = num_envs + num_ends
        if used + needed > num_rows:
            parts.append(slice(start, t))
            start, used = t, 0
        used += needed
    return [*parts, slice(start, num_times)]


def numbers(index: Any) -> Tensor:
    """Numbers of items as int64 on the CPU, of any shape; TypeError for other values.

    >>> numbers([[3, 5]])
    tensor([[3, 5]])
    """
    try:
        index = torch.as_tensor(index).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"numbers must be integers of at most 64 bits; got {index!r}") from error
    if index.dtype.is_floating_point or index.dtype.is_complex or index.dtype is torch.bool:
        if index.numel():
            raise TypeError(f"numbers must be integers; got {index.dtype}")
    return index.long()


def with_priorities(index: Any, priority: Tensor | float) -> tuple[Tensor, Tensor]:
    """Numbers of steps and their priorities, of one shape or one for all; ValueError if not.

    >>> with_priorities([3, 5], 2.0)
    (tensor([3, 5]), tensor(2.))
    """
    index, priority = numbers(index), torch.as_tensor(priority).detach().cpu()
    if priority.ndim and priority.shape != index.shape:
        raise ValueError(
            f"index {list(index.shape)} needs priorities of that shape, or one for all; got "
            f"{list(priority.shape)}"
        )
    return index, priority


def with_entries(index: Any, entries: TensorDict) -> Tensor:
    """Numbers of the rows that entries of this batch size are of; ValueError if they are not.

    >>> with_entries([3, 5], TensorDict(batch_size=[2]))
    tensor([3, 5])
    """
    index = numbers(index)
    if entries.batch_size != index.shape:
        raise ValueError(
            f"index has the shape {list(index.shape)}, but entries has the batch size "
            f"{list(entries.batch_size)}: they must be equal"
        )
    return index


def several(env: int | Sequence[int] | Tensor | None, count: int) -> Tensor:
    """Numbers of the environments that E = count steps at a time are of: int64 [E].

    >>> several(None, 3), several(7, 1)
    (tensor([0, 1, 2]), tensor([7]))
    """
    if env is None:
        return torch.arange(count, device="cpu")
    envs = different(env)
    if len(envs) != count:
        raise ValueError(
            f"the steps are from {count} environment(s), but env={env} names {len(envs)}"
        )
    return envs


def different(env: int | Sequence[int] | Tensor) -> Tensor:
    """Numbers of environments, all different: int64 [E].

    >>> different([3, 10**9])
    tensor([         3, 1000000000])
    """
    try:
        envs = numbers(env).reshape(-1)
    except TypeError as error:
        raise TypeError(
            f"env={env!r} must name environments by integers, such as env=3 or env=[0, 1]"
        ) from error
    if len(envs) and (int(envs.min()) < 0 or len(envs.unique()) < len(envs)):
        raise ValueError(f"env={env} must be different numbers of 0 or more")
    return envs
