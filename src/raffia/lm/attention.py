"""Causal attention of many heads over rows that are packed, padded or cached.

`Columns`: which columns of a call are tokens, which positions they have, which attend to which.
Positions may be angles: queries and keys are rotated, so that attention depends on distances; the
first half of a head's numbers is paired with the second, as in GPT-NeoX and Llama.
Source: Su, Lu, Pan, Murtadha, Wen & Liu (2021), "RoFormer", equation 34.

Legend: B rows, T tokens of a row in this call, P embeddings put before them, S columns that may be
attended to (the cache's, then P + T new ones), N tokens of all rows (packed), H heads, F numbers of
a head, d = H F.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention

from raffia.functional.trees import is_traced
from raffia.lm.kv_cache import KeyValueCache
from raffia.lm.model import Cache
from raffia.lm.packing import Packing, is_right_padded

Rotation = tuple[Tensor, Tensor]  # cosine and sine


@dataclass(frozen=True)
class View:
    """The layout of tokens in one call, and which attend to which; the same for all layers."""

    packing: Packing | None = None  # where tokens are [N, d]; None: they are [B, T, d]
    mask: Tensor | None = None  # [B, 1, T, S], True: is attended to; None: see `causal`
    causal: bool = True  # without a mask: token t attends to the first t + 1 columns; False: all
    rotation: Rotation | None = None  # of rotary positions, [B or 1, 1, T, F / 2]
    cache: KeyValueCache | None = None
    chosen: Tensor | None = None  # int64 [M], tokens of the N that a layer outputs; None: all


def visible(attended: Tensor, num_tokens: int) -> Tensor:  # [B, S], T -> [B, 1, T, S]
    """The causal mask of the last T columns: each attends to tokens up to itself, or else to
    itself.

    Itself even though it is padding, as a softmax over nothing is not a number; nobody looks there.

    >>> visible(torch.tensor([[False, True, True]]), 2).int()
    tensor([[[[0, 1, 0], [0, 1, 1]]]], dtype=torch.int32)
    """
    num_columns = attended.shape[1]
    column = torch.arange(num_columns, device=attended.device)
    own = column[num_columns - num_tokens :, None]
    none = attended.cumsum(1)[:, None, num_columns - num_tokens :, None] == 0
    return ((column <= own) & attended[:, None, None, :]) | ((column == own) & none)


def attend(
    qkv: Tensor,  # [N, 3 d] or [B, T, 3 d]
    view: View,
    *,
    num_heads: int,
    layer: int = 0,
    dropout: float = 0.0,  # of the weights
) -> Tensor:  # [N, d] or [B, T, d]
    """Scaled dot-product attention over the columns that each token may attend to.

        softmax(q k^T / sqrt(F)) v

    Source: Vaswani et al. (2017), "Attention Is All You Need", equation 1.

    >>> attend(torch.zeros(1, 2, 12), View(), num_heads=2).shape
    torch.Size([1, 2, 4])
    """
    if view.packing is None:
        return _attend(qkv, view, num_heads, layer, dropout)
    parts = view.packing.parts(qkv)
    return view.packing.joined([_attend(part, view, num_heads, layer, dropout) for part in parts])


def _attend(qkv: Tensor, view: View, num_heads: int, layer: int, dropout: float) -> Tensor:
    """Attention over rows [B, T, 3 d]; without a cache T may be less than the view's."""
    query, key, value = _heads(qkv, num_heads)
    if view.rotation is not None:
        cosine, sine = (part[:, :, : qkv.shape[1]] for part in view.rotation)
        query, key = rotate(query, (cosine, sine)), rotate(key, (cosine, sine))
    if view.cache is not None:
        key, value = view.cache.put(layer, key, value)
    if is_traced() and not torch.compiler.is_compiling():
        out = _by_hand(query, key, value, view, dropout)
    else:
        causal = view.mask is None and view.causal
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=view.mask, dropout_p=dropout, is_causal=causal
        )
    return out.transpose(1, 2).flatten(2)


def _heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each [B, H, T, F]."""
    num_rows, num_tokens, size = qkv.shape
    if not qkv.requires_grad:  # fewer calls, where one token is read at a time
        parts = qkv.view(num_rows, num_tokens, 3, num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        return query, key, value
    # Splitting the features costs the backward pass one copy; unbinding a dimension, two.
    query, key, value = (
        part.view(num_rows, num_tokens, num_heads, -1).transpose(1, 2)
        for part in qkv.split(size // 3, -1)
    )
    return query, key, value


def _by_hand(query: Tensor, key: Tensor, value: Tensor, view: View, dropout: float) -> Tensor:
    """Attention step by step for `torch.vmap`, which would loop over the fused one and warn."""
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    mask = view.mask
    if mask is None and view.causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1).to(value.dtype)  # autocast gives it as float32
    return drop(weights, dropout, training=dropout > 0) @ value


def rotation(positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rotation:
    """Cosines and sines [..., head_dim / 2] of the angles at positions [...].

        angle_i(p) = p * 10000^(-2 i / head_dim)

    Computed in float32 at least: bfloat16 has no room for the angle of position 500.

    >>> cosine, sine = rotation(torch.tensor([0, 1]), head_dim=2, dtype=torch.float32)
    >>> cosine, sine
    (tensor([[1.0000], [0.5403]]), tensor([[0.0000], [0.8415]]))
    """
    wide = torch.promote_types(dtype, torch.float32)
    pair = torch.arange(0, head_dim, 2, device=positions.device, dtype=wide)
    angle = positions.to(wide).unsqueeze(-1) * 10000.0 ** (-pair / head_dim)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """x [..., F] with each pair (x_i, x_{i + F/2}) rotated by its angle.

    >>> rotate(torch.tensor([1.0, 0.0]), rotation(torch.tensor(1), 2, torch.float32))
    tensor([0.5403, 0.8415])
    """
    cosine, sine = by
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def right_padded(tokens: Tensor, attn_mask: Tensor | None) -> Packing | None:
    """The packing that leaves out padding; None unless all of it is known to be at the right.

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
    """The columns [B, P + T] of a call that are tokens; None if all are.

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
    """The columns that a call's tokens may attend to, with the call's own at the end.

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
        """The positions of the new columns: the number of tokens before each; later padding counts
        on.
        """
        start = self.num_all - self.num_new
        column = torch.arange(self.num_all, device=device)[None]
        if self.attended is None:
            return column[:, start:]
        last = torch.where(self.attended, column, -1).cummax(1).values  # up to this one
        behind = torch.where(last < 0, 0, column - last)
        return (self.attended.cumsum(1) - 1 + behind).clamp(min=0)[:, start:]

    def mask(self, device: torch.device | str | None = None) -> Tensor | None:
        """The attention mask of the new columns over all columns, [B or 1, 1, P + T, S].

        None where a single one attends to all, or all are new and each attends up to itself.
        """
        if self.attended is not None:
            return visible(self.attended, self.num_new)
        if self.num_new in (1, self.num_all):
            return None
        return visible(torch.ones(1, self.num_all, dtype=torch.bool, device=device), self.num_new)
