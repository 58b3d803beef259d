"""Which columns of a call are tokens, which positions they have, and which attend to which.

Legend: B rows, T tokens of a row in a call, P embeddings put before them, S columns in all: the
cache's, then P + T new ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from raffia.functional.trees import is_traced
from raffia.lm.attention import visible
from raffia.lm.model import Cache
from raffia.lm.packing import Packing, is_right_padded


def right_padded(tokens: Tensor, attn_mask: Tensor | None) -> Packing | None:
    """How to leave out the padding; None unless all of it is known to be at the right.

    >>> tokens, mask = torch.zeros(2, 2, dtype=torch.int64), torch.tensor([[1, 1], [1, 0]])
    >>> right_padded(tokens, mask).index, right_padded(tokens, mask.flip(1))
    (tensor([0, 1, 2]), None)
    """
    num_rows, width = tokens.shape
    if attn_mask is None:
        return Packing.dense(num_rows, width, tokens.device)
    if is_traced():
        return None
    mask = attn_mask.bool()
    if not is_right_padded(mask) or not bool(mask.any()):
        return None
    return Packing.of(mask.sum(1), width)


def attended_columns(
    tokens: Tensor,  # [B, T]
    attn_mask: Tensor | None,  # [B, T]
    num_prefix: int = 0,
    prefix_attn_mask: Tensor | None = None,  # [B, P]
) -> Tensor | None:
    """Which columns [B, P + T] of a call are tokens; None for all.

    >>> attended_columns(torch.zeros(1, 2), torch.tensor([[0, 1]]), num_prefix=1)
    tensor([[ True, False,  True]])
    """
    if attn_mask is None and prefix_attn_mask is None:
        return None
    prefix = tokens.new_ones(len(tokens), num_prefix)
    parts = [
        prefix if prefix_attn_mask is None else prefix_attn_mask,
        torch.ones_like(tokens) if attn_mask is None else attn_mask,
    ]
    attended = torch.cat([part.bool() for part in parts], 1)
    return None if not is_traced() and bool(attended.all()) else attended


@dataclass(frozen=True)
class Columns:
    """All columns that a call's tokens may attend to, the call's own at the end.

    >>> columns = Columns.of(3, torch.tensor([[False, True, True]]))
    >>> columns.positions(), columns.mask().int()
    (tensor([[0, 0, 1]]), tensor([[[[1, 0, 0], [0, 1, 0], [0, 1, 1]]]], dtype=torch.int32))
    >>> Columns.of(4, torch.tensor([[True, True, False, False]])).positions()
    tensor([[0, 1, 2, 3]])
    """

    num_new: int  # P + T
    num_all: int  # S
    attended: Tensor | None  # [B, S]; None: all are

    @classmethod
    def of(cls, num_new: int, attended: Tensor | None, cache: Cache | None = None) -> Columns:
        """A call's columns, of which `attended` [B, P + T] are tokens, behind those of a cache.

        >>> Columns.of(2, None).attended is None
        True
        """
        if cache is None:
            return cls(num_new, num_new, attended)
        num_all, before = cache.length + num_new, cache.attended
        if before is None and attended is None:
            return cls(num_new, num_all, None)
        if before is None and attended is not None:
            before = attended.new_ones(len(attended), cache.length)
        if attended is None and before is not None:
            attended = before.new_ones(len(before), num_new)
        both = [part for part in (before, attended) if part is not None]
        return cls(num_new, num_all, torch.cat(both, 1))

    def positions(self, device: torch.device | str | None = None) -> Tensor:  # [B or 1, P + T]
        """Of the new columns: how many tokens precede each; padding behind them counts on."""
        start = self.num_all - self.num_new
        column = torch.arange(self.num_all, device=device)[None]
        if self.attended is None:
            return column[:, start:]
        last = torch.where(self.attended, column, -1).cummax(1).values  # up to this one
        behind = torch.where(last < 0, 0, column - last)
        return (self.attended.cumsum(1) - 1 + behind).clamp(min=0)[:, start:]

    def mask(self, device: torch.device | str | None = None) -> Tensor | None:
        """Which of all columns each new one attends to, [B or 1, 1, P + T, S].

        None where a single one attends to all, or all are new and each attends up to itself.
        """
        if self.attended is not None:
            return visible(self.attended, self.num_new)
        if self.num_new in (1, self.num_all):
            return None
        return visible(torch.ones(1, self.num_all, dtype=torch.bool, device=device), self.num_new)
