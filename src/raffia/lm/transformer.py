"""A causal language model: GPT-2's shape, or the same with rotary positions.

Legend: B rows, T tokens of a row, P embeddings put before them, N real tokens of all rows, d
numbers of a hidden state, V vocabulary.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop

from raffia.functional.trees import is_traced
from raffia.hints import check_choice
from raffia.lm.attention import Columns, Rotation, View, attended_columns, right_padded, rotation
from raffia.lm.kv_cache import KeyValueCache
from raffia.lm.model import check_call, check_known
from raffia.lm.packing import Packing
from raffia.lm.transformer_block import ACTIVATIONS, Block, recomputed

MOST_CHOSEN = 0.8  # fraction of the tokens, above which choosing costs more than it saves


class CausalLM(nn.Module):
    """Tokens to hidden states, each of which attends to the tokens up to its own.

    Its output layer is its table of embeddings. Positions count the tokens that are attended to,
    so padding, left or right, changes nothing. New weights are drawn as GPT-2's were: deviation
    0.02, smaller by sqrt(2 n_layer) where layers write into the residual stream.

    dim_feedfwd: inner width of the dense layers; None for 4 n_embd.
    activation: of the dense layers: one of `raffia.lm.transformer_block.ACTIVATIONS`.
    dropout: of embeddings, attention weights and what layers add; drawn from torch's generator.
    gradient_checkpointing: keeps one hidden state a layer for the backward pass and recomputes
        the rest there: less memory, a third more time. Transforms of `torch.func` go without.

    >>> model = CausalLM(vocab_size=50, n_layer=2, n_head=2, n_embd=16, block_size=32).eval()
    >>> tokens = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]])
    >>> hidden = model(tokens, attn_mask=torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]))
    >>> hidden.shape, model.logits(hidden).shape
    (torch.Size([2, 5, 16]), torch.Size([2, 5, 50]))
    """

    skips = True

    def __init__(
        self,
        vocab_size: int,
        *,
        n_layer: int = 12,
        n_head: int = 12,
        n_embd: int = 768,
        block_size: int = 1024,
        dim_feedfwd: int | None = None,
        dropout: float = 0.1,
        layer_norm_eps: float = 1e-5,
        bias: bool = True,
        positions: Literal["learned", "rotary"] = "learned",
        activation: str = "GELU",
        gradient_checkpointing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_shape(n_embd, n_head, positions)
        check_choice("activation", activation, ACTIVATIONS)
        self.vocab_size, self.n_embd = vocab_size, n_embd
        self.n_layer, self.n_head = n_layer, n_head
        self.block_size, self.dim_feedfwd = block_size, dim_feedfwd or 4 * n_embd
        self.dropout, self.layer_norm_eps, self.bias = dropout, layer_norm_eps, bias
        self.positions: Literal["learned", "rotary"] = positions
        self.activation, self.gradient_checkpointing = activation, gradient_checkpointing
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        common: dict[str, Any] = {
            "layer_norm_eps": layer_norm_eps,
            "bias": bias,
            "activation": activation,
            **where,
        }
        self.wte = nn.Embedding(vocab_size, n_embd, **where)
        if positions == "learned":
            self.wpe = nn.Embedding(block_size, n_embd, **where)
        self.h = nn.ModuleList(
            Block(n_embd, n_head, self.dim_feedfwd, layer=i, dropout=dropout, **common)
            for i in range(n_layer)
        )
        self.ln_f = nn.LayerNorm(n_embd, layer_norm_eps, bias=bias, **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights from torch's generator."""
        deviation = 0.02
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 1:  # norms
                nn.init.ones_(parameter)
            elif name.endswith(("proj.weight", "out.weight")):
                nn.init.normal_(parameter, std=deviation / math.sqrt(2 * self.n_layer))
            else:
                nn.init.normal_(parameter, std=deviation)

    def settings(self) -> dict[str, Any]:
        """The arguments for a model of the same shape: `CausalLM(**model.settings())`.

        >>> CausalLM(7, n_layer=1, n_head=1, n_embd=4).settings()["dim_feedfwd"]
        16
        """
        names = (
            "vocab_size n_layer n_head n_embd block_size dim_feedfwd dropout layer_norm_eps bias"
        )
        return {name: getattr(self, name) for name in (*names.split(), "positions", "activation")}

    def forward(
        self,
        tokens: Tensor,  # int64 [B, T]
        attn_mask: Tensor | None = None,  # [B, T], 0 or False: padding, which nothing attends to
        *,
        wanted: Tensor | None = None,  # bool [B, T]: others may come out as zeros; None: all
        prefix_embs: Tensor | None = None,  # [B, P, d], put before the tokens
        prefix_attn_mask: Tensor | None = None,  # [B, P]
        remove_prefix_position_embs: bool = False,  # the prefix has its positions in it already
        cache: KeyValueCache | None = None,  # of the tokens before these; these are added
    ) -> Tensor:  # [B, T, d]
        """Hidden states of the tokens after the last norm; without meaning where masked.

        Padding at the right is left out of all layers, and tokens that are not wanted of the last
        one, as far as no wanted one attends to them; not where shapes must not depend on data, in
        `torch.vmap` and `torch.compile`.
        """
        check_call(self, tokens, attn_mask, prefix_embs, prefix_attn_mask, cache)
        if prefix_embs is None and cache is None:
            packing = right_padded(tokens, attn_mask)
            if packing is not None:
                return self._packed(tokens, packing, wanted)
        x = self._embedded(tokens)
        num_prefix = 0
        if prefix_embs is not None:
            num_prefix = prefix_embs.shape[1]
            x = torch.cat([prefix_embs.to(x.dtype), x], 1)
        attended = attended_columns(tokens, attn_mask, num_prefix, prefix_attn_mask)
        columns = Columns.of(x.shape[1], attended, cache)
        positions = columns.positions(x.device)
        view = View(
            mask=columns.mask(x.device),
            causal=columns.num_new == columns.num_all,
            rotation=self._rotation(positions, x.dtype),
            cache=cache,
        )
        bare = num_prefix if remove_prefix_position_embs else 0
        hidden = self._layers(self._with_positions(x, positions, bare), view)
        if cache is not None:
            cache.advance(x.shape[1], attended)
        return hidden[:, num_prefix:]

    def logits(self, hidden: Tensor) -> Tensor:  # [..., d] -> [..., V]
        """The next token's logits.

        >>> CausalLM(50, n_layer=1, n_head=2, n_embd=16).logits(torch.zeros(3, 16)).shape
        torch.Size([3, 50])
        """
        # The weights come first: their gradient is then a separate tensor, to which that of the
        # look-ups is added, and not a view, for which new memory would be needed.
        logits = (self.wte.weight @ hidden.reshape(-1, self.n_embd).t()).t()
        return logits.contiguous().view(*hidden.shape[:-1], self.vocab_size)

    def new_cache(self, batch_size: int, capacity: int | None = None) -> KeyValueCache:
        """An empty cache for `forward`, of `capacity` columns; None for block_size, the most.

        >>> CausalLM(50, n_layer=1, n_head=2, n_embd=16, block_size=32).new_cache(4).capacity
        32
        """
        weight = self.wte.weight
        return KeyValueCache(
            num_layers=self.n_layer,
            batch_size=batch_size,
            num_heads=self.n_head,
            capacity=self.block_size if capacity is None else capacity,
            head_dim=self.n_embd // self.n_head,
            dtype=weight.dtype,
            device=weight.device,
        )

    def _packed(
        self,
        tokens: Tensor,  # [B, T]
        packing: Packing,
        wanted: Tensor | None,  # bool [B, T]
    ) -> Tensor:  # [B, T, d]
        """The hidden states of the real tokens alone, packed one after another."""
        tokens, chosen = packing.pack(tokens), None
        if wanted is not None and not is_traced():
            chosen = packing.pack(wanted).nonzero().squeeze(-1)
            if len(chosen) > MOST_CHOSEN * len(tokens):
                chosen = None
        x = self._embedded(tokens)
        rows = torch.arange(packing.width, device=tokens.device)[None]
        view = View(packing=packing, rotation=self._rotation(rows, x.dtype))
        hidden = self._layers(self._with_positions(x, packing.positions), view, chosen)
        return packing.unpack(hidden, chosen)

    def _embedded(self, tokens: Tensor) -> Tensor:
        if is_traced():
            return self.wte(tokens)
        on_cpu = tokens.device.type == "cpu"
        if on_cpu:
            with suppress(IndexError):  # the look-up itself checks
                return self.wte(tokens)
        # Elsewhere it would bring down the process; one token a row is what was just decoded.
        if on_cpu or tokens.shape[-1] > 1:
            check_known(tokens, self.vocab_size)
        return self.wte(tokens)

    def _with_positions(self, x: Tensor, positions: Tensor, bare: int = 0) -> Tensor:
        """Add position embeddings, except to the first `bare` columns."""
        if self.positions == "learned":
            added = self.wpe(positions)
            if bare:
                none = added.new_zeros(len(added), bare, self.n_embd)
                added = torch.cat([none, added[:, bare:]], 1)
            x = x + added
        elif bare:
            raise ValueError(
                "rotary positions are not added to an embedding, so there is nothing to remove: "
                "leave out remove_prefix_position_embs"
            )
        return drop(x, self.dropout, self.training)

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation | None:
        if self.positions == "learned":
            return None
        cosine, sine = rotation(positions, self.n_embd // self.n_head, dtype)
        return cosine.unsqueeze(1), sine.unsqueeze(1)  # for all heads

    def _layers(self, x: Tensor, view: View, chosen: Tensor | None = None) -> Tensor:
        again = self.gradient_checkpointing and torch.is_grad_enabled() and not _is_transformed()
        for number, block in enumerate(self.h):
            if chosen is not None and number == len(self.h) - 1:
                view = replace(view, chosen=chosen)
            x = recomputed(cast(Block, block), x, view) if again else block(x, view)
        return self.ln_f(x)


def _is_transformed() -> bool:
    return is_traced() and not torch.compiler.is_compiling()


def _check_shape(n_embd: int, n_head: int, positions: str) -> None:
    if n_embd % n_head:
        raise ValueError(
            f"n_embd={n_embd} must be a multiple of n_head={n_head}; the next is "
            f"n_embd={-(-n_embd // n_head) * n_head}"
        )
    check_choice("positions", positions, ("learned", "rotary"))
    if positions == "rotary" and n_embd // n_head % 2:
        raise ValueError(
            f"rotary positions rotate pairs, but a head has n_embd / n_head = {n_embd // n_head} "
            "numbers: make that even, or use positions='learned'"
        )
