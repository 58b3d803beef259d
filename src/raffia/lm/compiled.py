"""A language model's step by one token as a compiled call on the CPU.

For a few rows of a small model most of the time of torch's operations goes into calling them. Here
a call is the whole step, and weights are read in place, so that nothing is copied first and
nothing goes stale.

Legend: R rows, d numbers of a hidden state.
"""

from __future__ import annotations

from array import array
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn

import raffia.jit
from raffia.lm.checks import check_known, check_room
from raffia.lm.kv_cache import KeyValueCache
from raffia.lm.transformer import CausalLM
from raffia.lm.transformer_block import Block

MOST_ROWS = 64  # above, torch's matrix products are as quick
MOST_WORK = 2**24  # products of a step, above which several threads are worth more


class CompiledLM:
    """Reads a token a row as the model does, in one call; None of its layers' hooks is called.

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
        """None where the model can't be read so: see `compiles`."""
        return cls(model) if compiles(model) else None

    def fits(self, num_rows: int) -> bool:
        """Whether so many rows are read more quickly than by torch.

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
        from raffia.lm.kernels.token_step import token_step

        num_rows, position = len(token), cache.length
        num_layers, num_heads, size, inner = self._sizes
        token = token.to(torch.int64).contiguous()
        check_room(cache, num_rows, 1)
        keys, values = cache.memory()
        needed = num_rows * (5 * size + inner) + position + 64
        if len(self._room) < needed:
            self._room = torch.empty(needed + 1024)
        out = torch.empty(num_rows, size)
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
    if type(model) is not CausalLM or not raffia.jit.available():
        return False
    if model.positions != "learned" or model.activation != "GELU":
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
    """Whether kernels can read it in place.

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
