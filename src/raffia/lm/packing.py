"""Rows of different lengths without their padding: the real tokens, one after another.

Legend: B rows, T their width with padding, N real tokens of all rows, A chosen positions of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_GROUPS = 8  # at most; on a GPU one: a call for each would cost more than the padding
LEAST_STEP = 16  # tokens from the width of a group to that of the next, for the same reason


@dataclass(frozen=True)
class Groups:
    """Rows put together by length, since attention is over whole rows: little padding is left.

    >>> starts, positions = torch.tensor([0, 20, 21]), torch.cat([torch.arange(20)] * 2)
    >>> Groups.of([20, 1, 19], starts, positions).shapes
    [(1, 1), (2, 20)]
    """

    shapes: list[tuple[int, int]]  # of each group: rows and their width
    filled: Tensor  # for each slot of all groups, a token of the N to fill it
    real: Tensor  # [N], the slot of each token

    @classmethod
    def of(
        cls,
        lengths: list[int],  # [B]
        starts: Tensor,  # [B], where each row starts among the N tokens
        positions: Tensor,  # [N], of each token within its row
    ) -> Groups:
        """Rows without a token are in none."""
        device = starts.device
        longest = max(lengths)
        on_cpu = device.type == "cpu"
        step = max(LEAST_STEP, -(-longest // NUM_GROUPS)) if on_cpu else longest
        rows_of: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            if length:
                rows_of.setdefault(-(-length // step), []).append(row)
        shapes, filled, offsets, num_slots = [], [], [0] * len(lengths), 0
        all_lengths = torch.tensor(lengths, device=device)
        for _, rows in sorted(rows_of.items()):
            width = max(lengths[row] for row in rows)
            chosen, column = torch.tensor(rows, device=device), torch.arange(width, device=device)
            # Padding shows the last real token of its row again. Causal attention lets no real
            # token attend to it, so neither results nor gradients change.
            last = all_lengths[chosen, None] - 1
            filled.append((starts[chosen, None] + torch.minimum(column, last)).flatten())
            shapes.append((len(rows), width))
            for row in rows:
                offsets[row] = num_slots
                num_slots += width
        begins = torch.tensor(offsets, device=device).repeat_interleave(all_lengths)
        return cls(shapes, torch.cat(filled), begins + positions)


@dataclass(frozen=True)
class Packing:
    """The positions of the real tokens of right-padded rows, once the rows are concatenated.

    Layers that treat each token alone (linear ones, norms, embeddings) then cost nothing for
    padding. Where no shape may depend on the data, in `torch.vmap` and `torch.compile`, rows are
    `dense`: N is B * T.

    >>> packing = Packing.of(torch.tensor([2, 3]), width=4)
    >>> packed = packing.pack(torch.tensor([[5, 6, 0, 0], [7, 8, 9, 0]]))
    >>> packed, packing.positions
    (tensor([5, 6, 7, 8, 9]), tensor([0, 1, 0, 1, 2]))
    >>> packing.unpack(packed)
    tensor([[5, 6, 0, 0],
            [7, 8, 9, 0]])
    """

    num_rows: int  # B
    width: int  # T
    positions: Tensor  # [N], of each token within its row
    index: Tensor | None  # [N], of each token among the B * T; None: all are there
    groups: Groups | None = None  # None: all rows are as wide

    @classmethod
    def of(cls, lengths: Tensor, width: int) -> Packing:
        """A packing of rows [B] with these numbers of real tokens, each padded at the right to
        `width`.
        """
        numbers = lengths.tolist()
        low, high, num_tokens = min(numbers), max(numbers), sum(numbers)
        if low < 0 or high > width or num_tokens == 0:
            raise ValueError(
                f"rows of {low} to {high} real tokens do not fit a width of {width}: lengths must "
                "be in 0..width, and at least one row must have a token"
            )
        if num_tokens == len(lengths) * width:
            return cls.dense(len(lengths), width, lengths.device)
        column = torch.arange(width, device=lengths.device)
        index = (column < lengths[:, None]).flatten().nonzero().flatten()
        starts = lengths.cumsum(0) - lengths
        positions = index % width
        groups = Groups.of(numbers, starts, positions)
        return cls(len(lengths), width, positions, index, groups)

    @classmethod
    def dense(cls, num_rows: int, width: int, device: torch.device | str = "cpu") -> Packing:
        """A packing of rows without padding, or whose padding stays: N = B * T.

        >>> Packing.dense(2, 3).positions
        tensor([0, 1, 2, 0, 1, 2])
        """
        positions = torch.arange(width, device=device).repeat(num_rows)
        return cls(num_rows, width, positions, None)

    def pack(self, x: Tensor) -> Tensor:  # [B, T, ...] -> [N, ...]
        """The real tokens."""
        flat = x.flatten(0, 1)
        return flat if self.index is None else flat.index_select(0, self.index)

    def parts(self, x: Tensor) -> Sequence[Tensor]:  # [N, ...] -> each [B', T', ...]
        """Split the rows into groups of similar length, with copies of real tokens as padding.

        >>> packing = Packing.of(torch.tensor([1, 30, 8]), width=40)
        >>> [tuple(part.shape) for part in packing.parts(torch.zeros(39, 4))]
        [(2, 8, 4), (1, 30, 4)]
        """
        if self.groups is None:
            return [x.unflatten(0, (self.num_rows, self.width))]
        shapes = self.groups.shapes
        sizes = [num_rows * width for num_rows, width in shapes]
        parts = x.index_select(0, self.groups.filled).split(sizes)
        return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:  # each [B', T', ...] -> [N, ...]
        """The inverse of `parts`."""
        rows = [part.flatten(0, 1) for part in parts]
        flat = rows[0] if len(rows) == 1 else torch.cat(rows)
        return flat if self.groups is None else flat.index_select(0, self.groups.real)

    def unpack(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:  # [N, ...] -> [B, T, ...]
        """The inverse of `pack`, with zeros as padding.

        chosen: int64 [M], which of the N tokens x [M, ...] has; zeros stand for the others.
        """
        index = self.index
        if chosen is not None:
            index = chosen if index is None else index[chosen]
        if index is not None:
            padded = x.new_zeros(self.num_rows * self.width, *x.shape[1:])
            x = padded.index_copy(0, index, x)
        return x.unflatten(0, (self.num_rows, self.width))


def is_right_padded(mask: Tensor) -> bool:  # bool [B, T]
    """Whether no token comes after padding.

    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> is_right_padded(mask), is_right_padded(mask.flip(1))
    (True, False)
    """
    return not bool((mask[:, 1:] & ~mask[:, :-1]).any())


def right_length(mask: Tensor) -> int:  # [B, T], 0 or False: padding
    """The length of the longest row where all padding is at the right; else 0.

    >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> right_length(mask), right_length(mask.flip(1))
    (2, 0)
    """
    mask = mask.bool()
    return int(mask.sum(1).max()) if is_right_padded(mask) else 0
