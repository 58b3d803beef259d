"""A language model's step by one token for each row, by the quickest way that the model allows.

Legend: R rows, H heads, F numbers of a head, S columns of the cache, d = H F.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor
from torch.nn.functional import gelu, scaled_dot_product_attention

from raffia.lm.compiled import CompiledLM
from raffia.lm.kv_cache import KeyValueCache
from raffia.lm.model import LanguageModel
from raffia.lm.transformer import CausalLM
from raffia.lm.transformer_block import Block

# The fused attention of the CPU works on blocks of queries, of which there is one: 32 rows of 157
# columns took 470 us with it and 230 us without, one row 18 us and 30 us.
FEW_ROWS = 4


class TokenReader:
    """Reads a token a row behind a cache: in one compiled call, by `read_token`, or by the model.

    >>> model = CausalLM(10, n_layer=1, n_head=2, n_embd=8, block_size=6, dropout=0.0)
    >>> reader, cache = TokenReader(model), model.new_cache(2)
    >>> with torch.no_grad():
    ...     reader.read(torch.tensor([3, 4]), cache).shape, cache.length
    (torch.Size([2, 8]), 1)
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model, self._compiled = model, CompiledLM.of(model)

    def compiles(self, num_rows: int) -> bool:
        """Whether so many rows are read in one compiled call.

        >>> TokenReader(CausalLM(10, n_layer=1, n_head=2, n_embd=8, block_size=6)).compiles(2)
        False
        """
        return self._compiled is not None and self._compiled.fits(num_rows)

    def read(
        self,
        token: Tensor,  # int64 [R]
        cache: Any,  # of the tokens before; these are added
        padding: Tensor | None = None,  # int64 [R]: columns of padding at the left; None: none
    ) -> Tensor:  # [R, d]
        """Hidden states after the last norm."""
        if self._compiled is not None and self._compiled.fits(len(token)):
            return self._compiled.read(token, cache, padding)
        if _is_plain_gpt2(self.model):
            return read_token(self.model, token, cache, padding)
        return self.model(token.unsqueeze(1), cache=cache)[:, -1]


def _is_plain_gpt2(model: object) -> TypeGuard[CausalLM]:
    return type(model) is CausalLM and model.positions == "learned" and model.activation == "GELU"


def read_token(
    model: CausalLM,
    token: Tensor,  # int64 [R]
    cache: KeyValueCache,  # of the tokens before; these are added
    padding: Tensor | None = None,  # int64 [R]: columns at the left that are none; None: no row's
) -> Tensor:  # [R, d]
    """What `model(token[:, None], cache=cache)[:, 0]` gives: hidden states after the last norm.

    With one token there is nothing to transpose, no causal mask and no position to count, which
    halves the time of small models: there it goes into the number of operations.

    >>> model = CausalLM(10, n_layer=2, n_head=2, n_embd=8, block_size=6, dropout=0.0)
    >>> one, other = model.new_cache(1), model.new_cache(1)
    >>> with torch.no_grad():
    ...     same = [torch.allclose(read_token(model, torch.tensor([token]), one),
    ...                            model(torch.tensor([[token]]), cache=other)[:, 0], atol=1e-6)
    ...             for token in (3, 1, 4)]
    >>> same
    [True, True, True]
    """
    position, mask = cache.length, None
    if padding is None:
        x = model.wte(token) + model.wpe.weight[position]
    else:
        x = model.wte(token) + model.wpe(position - padding)
        column = torch.arange(position + 1, device=token.device)
        mask = (column >= padding.unsqueeze(-1))[:, None, None]  # [R, 1, 1, S]
    shape = len(token), 3, model.n_head, 1, model.n_embd // model.n_head
    for layer, block in enumerate(cast(Iterable[Block], model.h)):
        query, key, value = block.qkv(block.ln1(x)).view(shape).unbind(1)  # each [R, H, 1, F]
        keys, values = cache.put(layer, key, value)
        x = x + block.proj(_attended(query, keys, values, mask).reshape(x.shape))
        x = x + block.out(gelu(block.fc(block.ln2(x)), approximate="tanh"))
    cache.advance(1, None)
    return model.ln_f(x)


def _attended(
    query: Tensor,  # [R, H, 1, F]
    keys: Tensor,  # [R, H, S, F]
    values: Tensor,  # [R, H, S, F]
    mask: Tensor | None,  # bool [R, 1, 1, S]
) -> Tensor:  # [R, H, 1, F]
    if query.device.type != "cpu" or len(query) <= FEW_ROWS:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    scores = (query / math.sqrt(query.shape[-1])) @ keys.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ values
