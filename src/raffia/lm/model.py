"""The protocol of a language model: one call, logits, and a cache for decoding.

`CausalLM` is one, and `HFTrunk` makes one of a model of `transformers`; so is any module of yours
with these members. Calls that it refuses are checked here, with errors that name the call that
works.

Legend: B rows, T tokens of a row, P embeddings put before them, d numbers of an embedding or a
hidden state, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

from torch import Tensor


class Cache(Protocol):
    """The tokens that a model has read, in the form it needs; `KeyValueCache` is one.

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
        """The columns [B, length] that are tokens; None if all are."""

    def reorder(self, index: Tensor) -> Self:
        """Row b becomes what row index[b] [B] was."""

    def select(self, index: Tensor, start: int = 0) -> Self:
        """A new cache of these rows [M], without the columns before `start`."""

    def expand(self, num_copies: int) -> Self:
        """Return a new cache in which each row is repeated this many times in succession."""


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


def check_room(cache: Cache, batch_size: int, num_columns: int) -> None:
    """Raise ValueError unless this many columns can be added to a cache of this many rows.

    >>> from raffia.lm.kv_cache import KeyValueCache
    >>> made = KeyValueCache(num_layers=1, batch_size=2, num_heads=1, capacity=4, head_dim=8)
    >>> check_room(made, 2, 5)
    Traceback (most recent call last):
    ...
    ValueError: a cache of 4 columns that holds 0 has no room for 5 more: make it larger with
    model.new_cache(batch_size, capacity=5), or pass fewer tokens
    """
    if batch_size != cache.batch_size:
        raise ValueError(
            f"there are {batch_size} rows of tokens, but the cache has "
            f"batch_size={cache.batch_size}: select its rows with cache.select(index), or create "
            "one with model.new_cache(batch_size)"
        )
    if cache.length + num_columns > cache.capacity:
        raise ValueError(
            f"a cache of {cache.capacity} columns that holds {cache.length} has no room for "
            f"{num_columns} more: make it larger with model.new_cache(batch_size, "
            f"capacity={cache.length + num_columns}), or pass fewer tokens"
        )


def check_cut(length: int, new_length: int) -> None:
    """Raise ValueError unless a cache of this many columns can be cut to the requested number.

    >>> check_cut(3, 4)
    Traceback (most recent call last):
    ...
    ValueError: a cache of 3 columns cannot be cut to 4, only to 0..3
    """
    if not 0 <= new_length <= length:
        raise ValueError(
            f"a cache of {length} columns cannot be cut to {new_length}, only to 0..{length}"
        )


def check_call(
    model: LanguageModel,
    tokens: Tensor,  # [B, T]
    attn_mask: Tensor | None = None,  # [B, T]
    prefix_embs: Tensor | None = None,  # [B, P, d]
    prefix_attn_mask: Tensor | None = None,  # [B, P]
    cache: Cache | None = None,
) -> None:
    """Raise ValueError if shapes do not match, or if a row is longer than the model can read.

    >>> from raffia.lm.transformer import CausalLM
    >>> model = CausalLM(5, n_layer=1, n_head=1, n_embd=4, block_size=8)
    >>> check_call(model, torch.zeros(2, 9, dtype=torch.int64))
    Traceback (most recent call last):
    ...
    ValueError: rows of 9 tokens are longer than block_size=8: use only the last 8, or create the
    model with block_size=9
    """
    if tokens.dim() != 2:
        raise ValueError(
            f"tokens must have shape [batch, length], but have {list(tokens.shape)}: for a single "
            "row pass tokens[None]"
        )
    if attn_mask is not None and attn_mask.shape != tokens.shape:
        raise ValueError(
            f"attn_mask {list(attn_mask.shape)} must have the shape of tokens, "
            f"{list(tokens.shape)}: it covers only the tokens of this call, because a cache knows "
            "the earlier ones"
        )
    num_prefix = _num_prefix(tokens, prefix_embs, prefix_attn_mask, model.n_embd)
    num_before, num_new = 0, num_prefix + tokens.shape[1]
    if cache is not None:
        check_room(cache, len(tokens), num_new)
        num_before = cache.length
    length, block_size = num_before + num_new, model.block_size
    if length > block_size:
        parts = [f"{num_before} in the cache"] * (num_before > 0)
        parts += [f"{num_prefix} of the prefix"] * (num_prefix > 0)
        among = f" ({', '.join(parts)})" if parts else ""
        raise ValueError(
            f"rows of {length} tokens{among} are longer than block_size={block_size}: use only "
            f"the last {block_size}, or create the model with block_size={length}"
        )


def _num_prefix(
    tokens: Tensor, prefix_embs: Tensor | None, prefix_attn_mask: Tensor | None, n_embd: int
) -> int:
    if prefix_embs is None:
        if prefix_attn_mask is not None:
            raise ValueError("prefix_attn_mask needs prefix_embs, to which it applies")
        return 0
    if prefix_embs.dim() != 3 or prefix_embs.shape[::2] != (len(tokens), n_embd):
        raise ValueError(
            f"prefix_embs {list(prefix_embs.shape)} must be [batch, length, n_embd], here "
            f"[{len(tokens)}, any, {n_embd}]"
        )
    if prefix_attn_mask is not None and prefix_attn_mask.shape != prefix_embs.shape[:2]:
        raise ValueError(
            f"prefix_attn_mask {list(prefix_attn_mask.shape)} must be [batch, length] as in "
            f"prefix_embs, {list(prefix_embs.shape[:2])}"
        )
    return prefix_embs.shape[1]


def check_known(tokens: Tensor, vocab_size: int) -> None:
    """Raise ValueError unless all tokens are in 0 .. vocab_size - 1.

    >>> check_known(torch.tensor([1, 7]), vocab_size=5)
    Traceback (most recent call last):
    ...
    ValueError: token 7 is not in the vocabulary, 0 to 4: encode the text with the tokenizer of
    the model, or create the model with vocab_size=8 or more
    """
    outside = (tokens < 0) | (tokens >= vocab_size)
    if not bool(outside.any()):
        return
    odd = tokens[outside]
    first, most = int(odd[0]), int(odd.max())
    fix = f", or create the model with vocab_size={most + 1} or more" if most >= vocab_size else ""
    raise ValueError(
        f"token {first} is not in the vocabulary, 0 to {vocab_size - 1}: encode the text with the "
        f"tokenizer of the model{fix}"
    )
