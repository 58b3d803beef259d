"""Segments of consecutive steps: which rows they read, and stacks of their frames without a copy.

Legend: B segments, L rows in a segment, S frames in a stack.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from raffia.data import kernels
from raffia.data.ring import EpisodeRing


class Kinds(NamedTuple):
    """The entries about a row, by its kind."""

    mask: Tensor  # [kinds] bool
    discount: Tensor  # [kinds] float32


class Segments(NamedTuple):
    """Segments, row by row."""

    item: Tensor  # [B, L] int64, -1 where the row is not valid
    valid: Tensor  # [B, L] bool: the row belongs to the episode, and is not its last one repeated
    valid_step: Tensor  # [B, L] bool: the row, or what it repeats, is a step
    mask: Tensor  # [B, L] bool
    discount: Tensor  # [B, L] float32

    @classmethod
    def empty(cls, num_segments: int, length: int) -> Segments:
        """Segments with unset values, to be filled."""
        size = num_segments, length
        valid, valid_step, mask = torch.empty(3, *size, dtype=torch.bool).unbind(0)
        item, discount = torch.empty(size, dtype=torch.int64), torch.empty(size)
        return cls(item, valid, valid_step, mask, discount)


def find_segments(
    ring: EpisodeRing,
    kinds: Kinds,
    start: Tensor,
    *,
    length: int,
    out: Segments | None = None,
) -> tuple[Tensor, Segments]:
    """The rows of segments: those that the ring looks back in front of each start, and L from it.

    start: [B] int64, rows.
    out: is filled and given back; contiguous and on the CPU.
    Returns int64 [B, before + L], and what the last L of them are.

    >>> from raffia.data.segments import Kinds, find_segments
    >>> ring = EpisodeRing(9, look_ahead=0, look_back=2)
    >>> no, ends = torch.zeros(3, 1, dtype=torch.bool), torch.tensor([[False], [False], [True]])
    >>> _ = ring.append(ends, no, torch.tensor([0]))
    >>> kinds = Kinds(torch.ones(5, dtype=torch.bool), torch.tensor([1.0, 0, 1, 0, 0]))
    >>> rows, found = find_segments(ring, kinds, torch.tensor([1]), length=4)
    >>> rows, found.item
    (tensor([[0, 0, 1, 2, 3, 3]]), tensor([[ 1,  2,  3, -1]]))
    >>> found.discount
    tensor([[1., 0., 0., 0.]])
    """
    num_segments, before = len(start), ring.look_back
    found = Segments.empty(num_segments, length) if out is None else out
    rows = start.new_empty(num_segments, before + length)
    rows[:, before] = start
    sizes = num_segments, before, length
    arrays = rows, *found, kinds.mask, kinds.discount
    ring.segments.set(*[array.data_ptr() for array in arrays], *sizes)
    kernels.ring.find_segments(ring.address, ring.segments.address)
    return rows, found


def stacked(frames: Tensor, stack: int) -> Tensor:
    """Frames [B, L + S - 1, ...] as stacks [B, L, S, ...] of the S newest: a view, no copy.

    Stacks of neighbouring rows lie on the same memory: clone before writing in place.

    >>> from raffia.data.segments import stacked
    >>> stacked(torch.tensor([[1, 2, 3, 4]]), 2)
    tensor([[[1, 2],
             [2, 3],
             [3, 4]]])
    """
    return frames.unfold(1, stack, 1).movedim(-1, 2)


def unstacked(stacks: Tensor) -> Tensor | None:
    """The frames [B, L + S - 1, ...] under a view that `stacked` made; None if it isn't one.

    >>> from raffia.data.segments import stacked, unstacked
    >>> frames = torch.tensor([[1, 2, 3, 4]])
    >>> unstacked(stacked(frames, 2)).data_ptr() == frames.data_ptr()
    True
    >>> unstacked(stacked(frames, 2).clone()) is None
    True
    """
    num_segments, length, stack, *shape = stacks.shape
    segment, step, frame, *inner = stacks.stride()
    num_frames = length + stack - 1
    if step != frame:
        return None
    size, stride = (num_segments, num_frames, *shape), (segment, frame, *inner)
    frames = stacks.as_strided(size, stride, stacks.storage_offset())
    return frames if frames.is_contiguous() else None
