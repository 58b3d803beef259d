"""Segments of consecutive steps: which rows they read, and stacks of their frames without a copy.

Steps of one episode are linked row to row. The first row's `preceding` and the last row's
`following` are the row itself, so following the links past an end stays there: frames before an
episode are its first one, and rows behind it are its last row, with no condition anywhere.

Legend: B segments, L rows in a segment, S frames in a stack, N rows in the ring.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from raffia import jit


class Ring(NamedTuple):
    """The links between the rows of a ring, and their kinds."""

    preceding: Tensor  # [N] int64, row of the step before; at the first one the row itself
    following: Tensor  # [N] int64, row of the step after; at the last one the row itself
    kind: Tensor  # [N] uint8
    newest: int  # item: item i lies in row i % N


class Kinds(NamedTuple):
    """The entries about a row, by its kind."""

    mask: Tensor  # [kinds] bool
    discount: Tensor  # [kinds] float32
    closed: int  # the first kind that is no step


class Segments(NamedTuple):
    """Windows, row by row."""

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


@functools.cache
def kernels() -> ModuleType:
    """The compiled loop; imported at first use, and numba with it."""
    from raffia.data.kernels import segments

    return segments


def find_segments(
    ring: Ring,
    kinds: Kinds,
    start: Tensor,
    *,
    before: int,
    length: int,
    out: Segments | None = None,
) -> tuple[Tensor, Segments]:
    """The rows of segments: `before` ones in front of each start, and L from it on.

    start: [B] int64, rows.
    out: is filled and given back; contiguous and on the CPU.
    Returns int64 [B, before + L], and what the last L of them are.

    >>> from raffia.data.segments import Kinds, Ring, find_segments
    >>> links = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2])
    >>> ring = Ring(*links, kind=torch.tensor([0, 0, 1], dtype=torch.uint8), newest=2)
    >>> kinds = Kinds(torch.tensor([True, False]), torch.tensor([1.0, 0.0]), closed=1)
    >>> rows, found = find_segments(ring, kinds, torch.tensor([1]), before=2, length=4)
    >>> rows, found.item
    (tensor([[0, 0, 1, 2, 2, 2]]), tensor([[ 1,  2, -1, -1]]))
    >>> found.discount
    tensor([[1., 0., 0., 0.]])
    """
    if not jit.available():
        return find_segments_by_tensors(ring, kinds, start, before=before, length=length, out=out)
    num_segments = len(start)
    found = Segments.empty(num_segments, length) if out is None else out
    rows = start.new_empty(num_segments, before + length)
    rows[:, before] = start
    kernels().find_segments(
        num_segments,
        before,
        length,
        ring.preceding.data_ptr(),
        ring.following.data_ptr(),
        ring.kind.data_ptr(),
        len(ring.kind),
        ring.newest,
        kinds.mask.data_ptr(),
        kinds.discount.data_ptr(),
        kinds.closed,
        rows.data_ptr(),
        *[tensor.data_ptr() for tensor in found],
    )
    return rows, found


def find_segments_by_tensors(
    ring: Ring,
    kinds: Kinds,
    start: Tensor,
    *,
    before: int,
    length: int,
    out: Segments | None = None,
) -> tuple[Tensor, Segments]:
    """The same as `find_segments`, in tensor operations."""
    num_rows = len(ring.kind)
    lines = start.new_empty(before + length, len(start))  # one for each step back or forth
    lines[before] = start
    for i in range(before, 0, -1):
        torch.index_select(ring.preceding, 0, lines[i], out=lines[i - 1])
    for i in range(before + 1, before + length):
        torch.index_select(ring.following, 0, lines[i - 1], out=lines[i])
    table = lines.t().contiguous()
    rows = table[:, before:]
    item = ring.newest - (ring.newest - rows) % num_rows
    valid = torch.ones(rows.shape, dtype=torch.bool)
    torch.ne(rows[:, 1:], rows[:, :-1], out=valid[:, 1:])
    kind = ring.kind[rows].long()
    found = Segments(
        torch.where(valid, item, -1),
        valid,
        kind < kinds.closed,
        kinds.mask[kind],
        kinds.discount[kind],
    )
    if out is None:
        return table, found
    for target, value in zip(out, found, strict=True):
        target.copy_(value)
    return table, out


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
