"""What a language model is to the rest of the library: one call, logits, and a cache for decoding.

`CausalLM` is one, and `HFTrunk` makes one of a model of `transformers`; so is any module of yours
with these members.

Legend: B rows, T tokens of a row, P embeddings put before them, d numbers of a hidden state, V
vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Cache(Protocol):
    """What a model keeps of the tokens that it has read; `KeyValueCache` is one.

    >>> from raffia.lm.kv_cache import KeyValueCache
    >>> made: Cache = KeyValueCache(num_layers=1, batch_size=2, num_heads=1, capacity=4, head_dim=2)
    >>> made.length, made.expand(3).batch_size
    (0, 6)
    """

    length: int  # columns so far; set to less, it forgets the last

    @property
    def batch_size(self) -> int:
        """Rows."""

    @property
    def capacity(self) -> int:
        """The most columns."""

    @property
    def attended(self) -> Tensor | None:
        """Which columns [B, length] are tokens; None for all."""

    def reorder(self, index: Tensor) -> Any:
        """Row b becomes what row index[b] [B] was, in place."""

    def select(self, index: Tensor, start: int = 0) -> Any:
        """A new cache of these rows [M], without the columns before `start`."""

    def expand(self, num_copies: int) -> Any:
        """A new cache with each row so many times, one after the other."""


class LanguageModel(Protocol):
    """Tokens to hidden states, and hidden states to logits; a module of torch.

    A pass is plain (rows of tokens, with a mask where some are padding) or cached (the tokens
    behind those that a cache holds). Learning and scoring need no more than the plain pass,
    `logits`, `vocab_size` and `n_embd`; only decoding asks for a cache, and only a model that
    `skips` is given `wanted`.

    >>> import torch
    >>> from raffia.lm.transformer import CausalLM
    >>> model: LanguageModel = CausalLM(10, n_layer=1, n_head=2, n_embd=8, block_size=6).eval()
    >>> tokens, mask = torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    >>> plain = model(tokens, mask)
    >>> plain.shape, model.logits(plain).shape
    (torch.Size([2, 3, 8]), torch.Size([2, 3, 10]))
    >>> cache = model.new_cache(1)
    >>> with torch.no_grad():
    ...     steps = [model(token[None, None], cache=cache) for token in tokens[0]]
    >>> torch.allclose(torch.cat(steps, 1), plain[:1], atol=1e-6)
    True
    """

    vocab_size: int
    n_embd: int  # d
    block_size: int  # the longest row
    skips: bool  # whether it leaves out what is not `wanted`

    def __call__(
        self,
        tokens: Tensor,  # int64 [B, T]
        attn_mask: Tensor | None = None,  # [B, T], 0 or False: padding
        *,
        wanted: Tensor | None = None,  # bool [B, T]: others may come out as zeros; None: all
        prefix_embs: Tensor | None = None,  # [B, P, d], put before the tokens
        prefix_attn_mask: Tensor | None = None,  # [B, P]
        remove_prefix_position_embs: bool = False,  # the prefix has its positions in it already
        cache: Any = None,  # of this model's `new_cache`: of the tokens before; these are added
    ) -> Tensor:
        """Hidden states [B, T, d] of the tokens, after the last norm."""

    def logits(self, hidden: Tensor) -> Tensor:
        """The next token's logits [*, V] of hidden states [*, d]."""

    def new_cache(self, batch_size: int, capacity: int | None = None) -> Cache:
        """An empty cache, for at most `capacity` columns; None for block_size."""
