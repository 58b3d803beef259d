"""Which columns of a call are tokens, which positions they have, and who sees whom.

Legend: B rows, T tokens of a row in a call, P embeddings put before them, S columns in all: the
cache's, then P + T new ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from raffia.functional.trees import is_traced
from raffia.lm.attention import visible
from raffia.lm.packing import Packing

__all__ = ["Columns", "Past", "right_padded", "seen_columns"]


class Past(Protocol):
    """What stands before a call: a cache."""

    @property
    def length(self) -> int:
        """Columns so far."""

    @property
    def seen(self) -> Tensor | None:
        """Which of them [B, length] are tokens; None for all."""


def right_padded(tokens: Tensor, attn_mask: Tensor | None) -> Packing | None:
    """How to leave out the padding; None unless all of it is known to stand at the right.

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
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()) or not bool(mask.any()):
        return None
    return Packing.of(mask.sum(1), width)


def seen_columns(
    tokens: Tensor,  # [B, T]
    attn_mask: Tensor | None,  # [B, T]
    num_prefix: int = 0,
    prefix_attn_mask: Tensor | None = None,  # [B, P]
) -> Tensor | None:
    """Which columns [B, P + T] of a call are to be seen; None for all.

    >>> seen_columns(torch.zeros(1, 2), torch.tensor([[0, 1]]), num_prefix=1)
    tensor([[ True, False,  True]])
    """
    if attn_mask is None and prefix_attn_mask is None:
        return None
    prefix = tokens.new_ones(len(tokens), num_prefix)
    parts = [
        prefix if prefix_attn_mask is None else prefix_attn_mask,
        torch.ones_like(tokens) if attn_mask is None else attn_mask,
    ]
    seen = torch.cat([part.bool() for part in parts], 1)
    return None if not is_traced() and bool(seen.all()) else seen


@dataclass(frozen=True)
class Columns:
    """All columns that a call's tokens may see, the call's own at the end.

    >>> columns = Columns.of(3, torch.tensor([[False, True, True]]))
    >>> columns.positions(), columns.mask().int()
    (tensor([[0, 0, 1]]), tensor([[[[1, 0, 0], [0, 1, 0], [0, 1, 1]]]], dtype=torch.int32))
    >>> Columns.of(4, torch.tensor([[True, True, False, False]])).positions()
    tensor([[0, 1, 2, 3]])
    """

    num_new: int  # P + T
    num_all: int  # S
    seen: Tensor | None  # [B, S]; None: all are

    @classmethod
    def of(cls, num_new: int, seen: Tensor | None, past: Past | None = None) -> Columns:
        """A call's columns, seen as `seen` [B, P + T] says (None: all), behind those of a cache.

        >>> Columns.of(2, None).seen is None
        True
        """
        if past is None:
            return cls(num_new, num_new, seen)
        num_all, before = past.length + num_new, past.seen
        if before is None and seen is None:
            return cls(num_new, num_all, None)
        if before is None and seen is not None:
            before = seen.new_ones(len(seen), past.length)
        if seen is None and before is not None:
            seen = before.new_ones(len(before), num_new)
        both = [part for part in (before, seen) if part is not None]
        return cls(num_new, num_all, torch.cat(both, 1))

    def positions(self, device: torch.device | str | None = None) -> Tensor:  # [B or 1, P + T]
        """Of the new columns: how many seen ones stand before each; behind them it counts on."""
        start = self.num_all - self.num_new
        column = torch.arange(self.num_all, device=device)[None]
        if self.seen is None:
            return column[:, start:]
        last = torch.where(self.seen, column, -1).cummax(1).values  # seen, up to this one
        behind = torch.where(last < 0, 0, column - last)
        return (self.seen.cumsum(1) - 1 + behind).clamp(min=0)[:, start:]

    def mask(self, device: torch.device | str | None = None) -> Tensor | None:
        """Which of all columns each new one sees, [B or 1, 1, P + T, S].

        None where a single one sees all, or all are new and each sees those up to itself.
        """
        if self.seen is not None:
            return visible(self.seen, self.num_new)
        if self.num_new in (1, self.num_all):
            return None
        return visible(torch.ones(1, self.num_all, dtype=torch.bool, device=device), self.num_new)
