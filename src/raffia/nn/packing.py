"""Rows of unlike length without their padding: what is real, one token after another.

Legend: B rows, T their width with padding, N real tokens of all rows, A chosen positions of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from raffia.functional.trees import is_traced

__all__ = ["Packing"]


@dataclass(frozen=True)
class Packing:
    """Where the real tokens of right-padded rows lie, once the rows are put one after another.

    Layers that treat each token alone (linear ones, norms, embeddings) then cost nothing for
    padding. Within `torch.vmap` and `torch.compile`, where no shape may depend on the data, padding
    stays: N is B * T there, and every method still gives the same at real tokens.

    >>> packing = Packing.of(torch.tensor([2, 3]), width=4)
    >>> packed = packing.pack(torch.tensor([[5, 6, 0, 0], [7, 8, 9, 0]]))
    >>> packed, packing.positions
    (tensor([5, 6, 7, 8, 9]), tensor([0, 1, 0, 1, 2]))
    >>> packing.unpack(packed)
    tensor([[5, 6, 0, 0],
            [7, 8, 9, 0]])
    >>> packed[packing.flat(torch.tensor([[1], [2]]))]
    tensor([[6],
            [9]])
    """

    num_rows: int  # B
    width: int  # T
    starts: Tensor  # [B], where each row starts among the N
    positions: Tensor  # [N], of each token within its row
    index: Tensor | None  # [N], of each token among the B * T; None: all are there
    filled: Tensor | None  # [B * T], for each place a token of the N that may stand there

    @classmethod
    def of(cls, lengths: Tensor, width: int) -> Packing:
        """Of rows [B] of so many real tokens each, padded at the right to `width`."""
        if is_traced():
            return cls.dense(len(lengths), width, lengths.device)
        shortest, longest, total = lengths.min(), lengths.max(), lengths.sum()
        low, high, num_tokens = torch.stack([shortest, longest, total]).tolist()
        if low < 0 or high > width or num_tokens == 0:
            raise ValueError(
                f"rows of {low} to {high} real tokens do not fit a width of {width}: lengths must "
                "lie in 0..width, and at least one row must have a token"
            )
        if num_tokens == len(lengths) * width:
            return cls.dense(len(lengths), width, lengths.device)
        column = torch.arange(width, device=lengths.device)
        index = (column < lengths[:, None]).flatten().nonzero().flatten()
        starts = lengths.cumsum(0) - lengths
        # Padding shows the last real token of its row again. Causal attention lets no real token
        # see it, so neither results nor gradients change.
        filled = starts[:, None] + torch.minimum(column, lengths[:, None] - 1)
        filled = filled.flatten().clamp_(min=0)
        return cls(len(lengths), width, starts, index % width, index, filled)

    @classmethod
    def dense(cls, num_rows: int, width: int, device: torch.device | str = "cpu") -> Packing:
        """Of rows without padding, or whose padding stays: N = B * T.

        >>> Packing.dense(2, 3).starts
        tensor([0, 3])
        """
        starts = torch.arange(num_rows, device=device) * width
        positions = torch.arange(width, device=device).repeat(num_rows)
        return cls(num_rows, width, starts, positions, None, None)

    def pack(self, x: Tensor) -> Tensor:  # [B, T, ...] -> [N, ...]
        """The real tokens."""
        flat = x.flatten(0, 1)
        return flat if self.index is None else flat.index_select(0, self.index)

    def pad(self, x: Tensor) -> Tensor:  # [N, ...] -> [B, T, ...]
        """The other way round, with copies of real tokens as padding: quicker than `unpack`."""
        flat = x if self.filled is None else x.index_select(0, self.filled)
        return flat.unflatten(0, (self.num_rows, self.width))

    def unpack(self, x: Tensor) -> Tensor:  # [N, ...] -> [B, T, ...]
        """The other way round, with zeros as padding."""
        if self.index is not None:
            places = x.new_zeros(self.num_rows * self.width, *x.shape[1:])
            x = places.index_copy(0, self.index, x)
        return x.unflatten(0, (self.num_rows, self.width))

    def flat(self, index: Tensor) -> Tensor:  # [B, A] -> [B, A]
        """Positions within rows as positions among the N: for `hidden.index_select(0, ...)`."""
        return self.starts[:, None] + index
