"""A language model's step by one token for each row, by the quickest way that the model allows.

For a few rows of a small model most of the time of torch's operations goes into calling them. On
the CPU a compiled call is the whole step, `CompiledLM`, which reads the weights where they are, so
that nothing is copied first and nothing goes stale.

Legend: R rows, H heads, F numbers of a head, S columns of the cache, d = H F.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from raffia.lm.kv_cache import KeyValueCache
from raffia.lm.model import LanguageModel, check_known, check_room
from raffia.lm.transformer import CausalLM
from raffia.lm.transformer_block import Block
from raffia.nn.blocks import has_hooks

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
        self._is_plain = _is_plain_gpt2(model)

    def compiles(self, num_rows: int) -> bool:
        """Whether this many rows are read in one compiled call.

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
        if self._is_plain:
            return read_token(cast(CausalLM, self.model), token, cache, padding)
        return self.model(token.unsqueeze(1), cache=cache)[:, -1]


def _is_plain_gpt2(model: object) -> TypeGuard[CausalLM]:
    """Whether all that a model does is what its layers do: no block of another class, no hook."""
    if type(model) is not CausalLM or (model.positions, model.activation) != ("learned", "GELU"):
        return False
    return not any(map(has_hooks, model.modules())) and all(
        type(block) is Block for block in model.h
    )


def read_token(
    model: CausalLM,
    token: Tensor,  # int64 [R]
    cache: KeyValueCache,  # of the tokens before; these are added
    padding: Tensor | None = None,  # int64 [R]: columns of padding at the left; None: none
) -> Tensor:  # [R, d]
    """Compute `model(token[:, None], cache=cache)[:, 0]`: hidden states after the last norm.

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


MOST_ROWS = 64  # above, torch's matrix products are as quick
MOST_WORK = 2**24  # products of a step, above which several threads are worth more


class CompiledLM:
    """Reads a token a row as the model does, in one call.

    >>> model = CausalLM(10, n_layer=2, n_head=2, n_embd=64, block_size=6, dropout=0.0)
    >>> compiled = CompiledLM.of(model)
    >>> one, other = model.new_cache(1), model.new_cache(1)
    >>> with torch.no_grad():
    ...     same = [torch.allclose(compiled.read(torch.tensor([token]), one),
    ...                            model(torch.tensor([[token]]), cache=other)[:, 0], atol=1e-5)
    ...             for token in (3, 1, 4)]
    >>> same
    [True, True, True]
    """

    def __init__(self, model: CausalLM) -> None:
        self._model = model  # whose parameters stay alive with it
        self._weights: list[Tensor | None] = [model.wte.weight, model.wpe.weight]
        self._weights += [model.ln_f.weight, model.ln_f.bias]
        for block in model.h:
            for layer in _layers(cast(Block, block)):
                self._weights += [layer.weight, layer.bias]
        self._addresses = array("q", [0 if p is None else p.data_ptr() for p in self._weights])
        inner = cast(Block, model.h[0]).fc.out_features
        self._sizes = len(model.h), model.n_head, model.n_embd, inner
        self._num_weights = sum(0 if p is None else p.numel() for p in self._weights[2:])
        self._room = torch.empty(0)

    @classmethod
    def of(cls, model: object) -> CompiledLM | None:
        """Compile a model for reading; None if it cannot be read this way: see `compiles`."""
        return cls(model) if compiles(model) else None

    def fits(self, num_rows: int) -> bool:
        """Whether this many rows are read faster than by torch.

        >>> model = CausalLM(10, n_layer=2, n_head=2, n_embd=64, block_size=6, dropout=0.0)
        >>> CompiledLM(model).fits(4), CompiledLM(model).fits(1000)
        (True, False)
        """
        alone = torch.get_num_threads() == 1
        return num_rows <= MOST_ROWS and (alone or num_rows * self._num_weights <= MOST_WORK)

    def read(
        self,
        token: Tensor,  # int64 [R]
        cache: KeyValueCache,  # of the tokens before; these are added
        padding: Tensor | None = None,  # int64 [R]: columns of padding at the left; None: none
    ) -> Tensor:  # [R, d]
        """Hidden states after the last norm."""
        from raffia.lm.kernels import token_step

        num_rows, position = len(token), cache.length
        num_layers, num_heads, size, inner = self._sizes
        token = token.to(torch.int64).contiguous()
        check_room(cache, num_rows, 1)
        keys, values = cache.memory()
        needed = num_rows * (5 * size + inner) + position + 64
        if len(self._room) < needed:
            self._room = torch.empty(needed + 1024, dtype=torch.float32)
        out = torch.empty(num_rows, size, dtype=torch.float32)
        step = [4 * stride for stride in keys.stride()]
        wrong = token_step(
            self._addresses.buffer_info()[0],
            self._model.vocab_size,
            num_layers,
            num_heads,
            size,
            inner,
            self._model.layer_norm_eps,
            num_rows,
            token.data_ptr(),
            0 if padding is None else padding.data_ptr(),
            position,
            keys.data_ptr(),
            values.data_ptr(),
            step[0],
            step[1],
            step[2],
            self._room.data_ptr(),
            out.data_ptr(),
        )
        if wrong >= 0:
            check_known(token, self._model.vocab_size)
        cache.advance(1, None)
        return out


def compiles(model: object) -> TypeGuard[CausalLM]:
    """Whether a model can be read by compiled calls: plain layers of float32 on the CPU.

    >>> compiles(CausalLM(10, n_layer=1, n_head=2, n_embd=64, positions="rotary"))
    False
    """
    if not _is_plain_gpt2(model):
        return False
    blocks = [cast(Block, block) for block in model.h]
    layers = [layer for block in blocks for layer in _layers(block)]
    if any(type(layer) not in (nn.Linear, nn.LayerNorm) for layer in layers):
        return False
    if len({block.fc.out_features for block in blocks}) != 1:  # none, or layers of different widths
        return False
    if not all(plain(p) for p in model.parameters()):
        return False
    from raffia.jit.vectors import WIDTH

    sizes = model.n_embd // model.n_head, blocks[0].fc.out_features
    return all(size % WIDTH == 0 for size in sizes)


def plain(parameter: Tensor) -> bool:
    """Whether kernels can read a parameter where it is.

    >>> plain(torch.zeros(2, 3)), plain(torch.zeros(2, 3).t())
    (True, False)
    """
    return (
        parameter.dtype == torch.float32
        and parameter.device.type == "cpu"
        and parameter.is_contiguous()
    )


def _layers(block: Block) -> tuple[nn.Linear | nn.LayerNorm, ...]:
    return block.ln1, block.qkv, block.proj, block.ln2, block.fc, block.out
