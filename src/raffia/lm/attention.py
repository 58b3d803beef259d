"""Causal attention of many heads over rows that are packed, padded or cached.

Legend: B rows, T tokens of a row in this call, S columns that may be attended to (T, and those of
the cache before them), N tokens of all rows (packed), H heads, F numbers of a head, d = H F.
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
from raffia.lm.packing import Packing
from raffia.lm.rotary import Rotation, rotate


@dataclass(frozen=True)
class View:
    """The layout of tokens in one call, and which attend to which; the same for all layers."""

    packing: Packing | None = None  # where tokens are [N, d]; None: they are [B, T, d]
    mask: Tensor | None = None  # [B, 1, T, S], True: is attended to; None: see `causal`
    causal: bool = True  # without a mask: token t attends to the first t + 1 columns; False: all
    rotation: Rotation | None = None  # of rotary positions, [B or 1, 1, T, F / 2]
    cache: KeyValueCache | None = None
    chosen: Tensor | None = None  # int64 [M], tokens of the N that a layer goes on with; None: all


def visible(attended: Tensor, num_tokens: int) -> Tensor:  # [B, S], T -> [B, 1, T, S]
    """Which columns each of the last T attends to: tokens up to itself; itself, if there is none.

    Itself even though it is padding, as a softmax over nothing is no number; nobody looks there.

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
    """What tokens gather from those that they attend to.

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
    """The same of rows [B, T, 3 d]; without a cache T may be less than the view's."""
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
    """The same for `torch.vmap`, which would loop over the fused one and warn."""
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    mask = view.mask
    if mask is None and view.causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1).to(value.dtype)  # autocast gives it as float32
    return drop(weights, dropout, training=dropout > 0) @ value
