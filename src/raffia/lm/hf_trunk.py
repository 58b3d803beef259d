"""Any causal language model of `transformers` as a trunk, from a folder on this machine.

Needs the extra: pip install 'raffia[hf]'. Nothing is fetched, nothing unpickled, and no code that
came with a model is run.

Legend: B rows, T tokens of a row, P embeddings put before them, d numbers of a hidden state, V
vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from raffia.functional.trees import is_traced
from raffia.lm.attention import Columns, attended_columns
from raffia.lm.hf_models import (
    UNBOUNDED,
    hidden_width,
    load_hf,
    make_hf,
    new_past,
    recompute_layers,
)
from raffia.lm.model import check_call, check_cut, check_known
from raffia.lm.packing import right_length

# Layers of a cache whose first columns can be removed.
CUTTABLE = (
    *("DynamicLayer", "DynamicSlidingWindowLayer"),
    *("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"),
)


class HFTrunk(nn.Module):
    """A model of `transformers` as a `LanguageModel`: tokens to hidden states, to logits.

    model: of a class like `GPT2LMHeadModel`, whose logits are its output layer's of its last hidden
        state, perhaps scaled and bounded as Granite's, Cohere's and Gemma 2's are. That is tried
        with a few tokens, and a model which does more is refused, as is one that reads no token by
        itself behind those in its cache. Where layers see a window of columns, padding between
        tokens counts as columns, too.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> tiny = GPT2Config(vocab_size=9, n_layer=1, n_head=2, n_embd=8, n_positions=16)
    >>> trunk = HFTrunk(GPT2LMHeadModel(tiny)).eval()
    >>> hidden = trunk(torch.tensor([[1, 2, 3]]))
    >>> hidden.shape, trunk.logits(hidden).shape
    (torch.Size([1, 3, 8]), torch.Size([1, 3, 9]))
    """

    skips = False

    def __init__(self, model: Any, *, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.model: Any = model
        config = self.model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.n_embd = hidden_width(config)
        self.block_size: int = getattr(config, "max_position_embeddings", None) or UNBOUNDED
        self._scale = 1.0
        self._scale *= getattr(model, "logit_scale", 1)  # Cohere's
        self._scale *= getattr(self._body, "lm_head_multiplier", 1)  # Falcon-H1's
        self._scale /= getattr(config, "logits_scaling", 1)  # Granite's
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)  # Gemma 2's
        takes = inspect.signature(self._body.forward).parameters
        self._takes_positions = "position_ids" in takes
        self._cache_name = "cache" if "cache" in takes else "past_key_values"  # before 5.24
        self._check_logits()
        self.gradient_checkpointing = gradient_checkpointing
        if gradient_checkpointing:
            recompute_layers(model)

    @classmethod
    def from_folder(
        cls,
        folder: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,  # None for torch's default, whatever the file has
        vocab_size: int | None = None,  # more tokens than it has get new embeddings
        dropout: float | None = None,  # of all kinds that it has; None: as in its config
        gradient_checkpointing: bool = False,  # see `CausalLM`
    ) -> HFTrunk:
        """The model in a folder: config.json and safetensors.

        >>> HFTrunk.from_folder("no/such/folder")
        Traceback (most recent call last):
        ...
        FileNotFoundError: there is no folder no/such/folder: a model's folder holds config.json and
        model.safetensors
        """
        model = load_hf(folder, dtype=dtype, vocab_size=vocab_size, dropout=dropout)
        return cls(model, gradient_checkpointing=gradient_checkpointing)

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],  # the content of a folder's config.json
        *,
        dtype: torch.dtype | None = None,
        vocab_size: int | None = None,  # instead of the config's
        dropout: float | None = None,
        gradient_checkpointing: bool = False,
    ) -> HFTrunk:
        """A model of that kind with new weights, which torch's generator draws.

        >>> tiny = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 9}
        >>> HFTrunk.from_config(tiny, vocab_size=11).vocab_size
        11
        """
        model = make_hf(config, dtype=dtype, vocab_size=vocab_size, dropout=dropout)
        return cls(model, gradient_checkpointing=gradient_checkpointing)

    def forward(
        self,
        tokens: Tensor,  # int64 [B, T]
        attn_mask: Tensor | None = None,  # [B, T], 0 or False: padding, which nothing attends to
        *,
        prefix_embs: Tensor | None = None,  # [B, P, d], put before the tokens
        prefix_attn_mask: Tensor | None = None,  # [B, P]
        remove_prefix_position_embs: bool = False,  # the prefix has its positions in it already
        cache: HFCache | None = None,  # of the tokens before these; these are added
    ) -> Tensor:  # [B, T, d]
        """Hidden states of the tokens after the last norm; without meaning where masked."""
        check_call(self, tokens, attn_mask, prefix_embs, prefix_attn_mask, cache)
        if attn_mask is not None and prefix_embs is None and cache is None and not is_traced():
            longest = right_length(attn_mask)
            if longest:  # causal attention keeps padding at the right from real tokens
                hidden = self(tokens[:, :longest])
                return pad(hidden, (0, 0, 0, tokens.shape[1] - longest))
        num_prefix = 0 if prefix_embs is None else prefix_embs.shape[1]
        attended = attended_columns(tokens, attn_mask, num_prefix, prefix_attn_mask)
        columns = Columns.of(num_prefix + tokens.shape[1], attended, cache)
        inputs: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None:
            inputs[self._cache_name] = cache.past
        if columns.attended is not None:
            inputs["attention_mask"] = columns.attended.long()
        positions = columns.positions(tokens.device)
        if self._takes_positions:
            inputs["position_ids"] = positions.expand(len(tokens), -1)
        if not is_traced() and tokens.shape[1] > 1:  # one token a row is what was just decoded
            check_known(tokens, self.vocab_size)
        if prefix_embs is None:
            inputs["input_ids"] = tokens
        else:
            if remove_prefix_position_embs:
                prefix_embs = prefix_embs - self._position_embs(positions[:, :num_prefix])
            embedded = self.model.get_input_embeddings()(tokens)
            inputs["inputs_embeds"] = torch.cat([prefix_embs.to(embedded.dtype), embedded], 1)
        hidden = self._body(**inputs).last_hidden_state
        if cache is not None:
            cache.advance(columns.num_new, attended)
        return hidden[:, num_prefix:]

    def logits(self, hidden: Tensor) -> Tensor:  # [..., d] -> [..., V]
        """The next token's logits.

        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> tiny = GPT2Config(vocab_size=9, n_layer=1, n_head=2, n_embd=8, n_positions=16)
        >>> HFTrunk(GPT2LMHeadModel(tiny)).logits(torch.zeros(8)).shape
        torch.Size([9])
        """
        return self._bounded(self.model.get_output_embeddings()(hidden))

    def _bounded(self, logits: Tensor) -> Tensor:
        """What the model makes of its output layer's logits."""
        logits = logits if self._scale == 1 else logits * self._scale
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)

    def new_cache(self, batch_size: int, capacity: int | None = None) -> HFCache:
        """An empty cache for `forward`; it grows with what it holds, up to `capacity` columns.

        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> tiny = GPT2Config(vocab_size=9, n_layer=1, n_head=2, n_embd=8, n_positions=16)
        >>> HFTrunk(GPT2LMHeadModel(tiny)).new_cache(3).length
        0
        """
        most = self.block_size if capacity is None else capacity
        return HFCache(new_past(self.model), batch_size, most)

    @property
    def _body(self) -> Any:
        """The model without its output layer."""
        return self.model.base_model

    def _position_embs(self, positions: Tensor) -> Tensor:
        """The position embeddings that the model adds at these positions."""
        table = getattr(self._body, "wpe", None)
        if table is None:
            raise ValueError(
                f"{type(self.model).__name__} has no position table `wpe` as GPT-2 has, so there "
                "is nothing to remove: leave out remove_prefix_position_embs"
            )
        return table(positions)

    def _check_logits(self) -> None:
        name = type(self.model).__name__
        if self._body is self.model:
            raise ValueError(
                f"{name} does not tell which part of it comes before the output layer, so it "
                "cannot be a trunk"
            )
        device = next(self.model.parameters()).device
        tokens = torch.arange(3, device=device)[None] % self.vocab_size
        training, _ = self.model.training, self.model.eval()
        output = self.model.get_output_embeddings()
        with torch.no_grad():
            hidden = self(tokens)
            if hidden.shape[-1] != self.n_embd:
                raise ValueError(
                    f"{name} gives hidden states of {hidden.shape[-1]} numbers, where its config "
                    f"has {self.n_embd}, so it cannot be a trunk"
                )
            ours = self.logits(hidden)
            shorter = self.logits(self(tokens[:, :2]))
            last = self._last_in_parts(tokens)
            loud = output.register_forward_hook(lambda layer, inputs, logits: _to_100(logits))
            theirs = self.model(tokens).logits  # large ones show what a bound would do to them
            ours_loud = self.logits(hidden)
            loud.remove()
        self.model.train(training)
        if not torch.allclose(shorter, ours[:, :2], rtol=1e-3, atol=1e-3):
            raise ValueError(
                f"{name} also attends to later tokens, so it cannot be a trunk: use a causal "
                "language model"
            )
        if not torch.allclose(theirs, ours_loud, rtol=1e-3, atol=1e-3):
            raise ValueError(
                f"{name} changes its logits after the output layer (by "
                f"{float((theirs - ours_loud).abs().max()):.2g} where the largest is 100), so it "
                "cannot be a trunk"
            )
        if last is None or not torch.allclose(last, ours[:, 2], rtol=1e-2, atol=1e-2):
            raise ValueError(
                f"{name} cannot read a token behind padding and others in a cache, or reads it "
                "differently there, so it cannot generate as a trunk"
            )

    def _last_in_parts(self, tokens: Tensor) -> Tensor | None:  # int64 [1, 3] -> [1, V]
        """The last token's logits, read by itself behind the others, and these behind padding;
        None if the model, which may be any, cannot.
        """
        mask = torch.arange(3, device=tokens.device)[None] > 0
        try:
            cache = self.new_cache(1)
            self(pad(tokens[:, :2], (1, 0)), mask, cache=cache)
            return self.logits(self(tokens[:, 2:], cache=cache))[:, 0]
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return None


def _to_100(logits: Tensor) -> Tensor:
    """The logits, with a factor that makes the largest 100."""
    return logits * (100 / max(1e-9, float(logits.abs().max())))


class HFCache:
    """The cache of a model of `transformers`, used as `KeyValueCache`.

    >>> from transformers import DynamicCache
    >>> HFCache(DynamicCache(), batch_size=2, capacity=8).expand(3).batch_size
    6
    """

    def __init__(self, past: Any, batch_size: int, capacity: int) -> None:
        self.past = past  # of `transformers`
        self.batch_size, self.capacity = batch_size, capacity
        self.attended: Tensor | None = None  # which columns [B, length] are tokens; None: all
        self._length = 0

    @property
    def length(self) -> int:
        """How many columns it holds; set to less, it forgets the last."""
        return self._length

    @length.setter
    def length(self, length: int) -> None:
        check_cut(self._length, length)
        if length < self._length:
            _check_forgets(self.past)
            self.past.crop(length - self._length)
        self.attended = None if self.attended is None else self.attended[:, :length]
        self._length = length

    def advance(self, num_columns: int, attended: Tensor | None) -> None:
        """Count columns that the model has put; attended: [B, num_columns], None for all.

        >>> cache = HFCache(None, batch_size=1, capacity=8)
        >>> cache.advance(2, torch.tensor([[False, True]]))
        >>> cache.advance(1, None)
        >>> cache.attended
        tensor([[False,  True,  True]])
        """
        if attended is not None or self.attended is not None:
            self.attended = Columns.of(num_columns, attended, self).attended
        self._length += num_columns

    def reorder(self, index: Tensor) -> HFCache:
        """Row b becomes what row index[b] [B] was."""
        if self.length:
            _check_rows(self.past)
            self.past.reorder_cache(index)
        self.attended = None if self.attended is None else self.attended[index]
        return self

    def select(self, index: Tensor, start: int = 0) -> HFCache:
        """A new cache of these rows [M]; the old stays as it is.

        start: columns before it are left out. They must be padding in all of the rows.
        """
        new = HFCache(copy.deepcopy(self.past), len(index), self.capacity)
        if self.length:
            _check_rows(self.past)
            new.past.reorder_cache(index)  # of all kinds of layers; any number of rows
        if start:
            _leave_out(new.past, start)
        new._length = self.length - start
        new.attended = None if self.attended is None else self.attended[index, start:]
        return new

    def expand(self, num_copies: int) -> HFCache:
        """Return a new cache in which each row is repeated this many times in succession."""
        return self.select(torch.arange(self.batch_size).repeat_interleave(num_copies))


def _check_rows(past: Any) -> None:
    for layer in past.layers:
        if not hasattr(layer, "reorder_cache"):
            raise ValueError(
                f"rows of a {type(layer).__name__} cannot be selected: generate one text at a time"
            )


def _check_forgets(past: Any) -> None:
    """Raise ValueError for a layer with a state of all tokens, of which the last stay a part."""
    for layer in past.layers:
        if hasattr(layer, "recurrent_states") and not getattr(layer, "is_croppable", False):
            raise ValueError(
                f"a {type(layer).__name__} cannot forget the last tokens that it has read: decode "
                "without planning, or read them with a copy, cache.select(rows)"
            )


def _leave_out(past: Any, num_columns: int) -> None:
    """Remove the first columns, some of which a layer with a sliding window may have forgotten."""
    for layer in past.layers:
        if not hasattr(layer, "keys"):  # a state of all tokens, to which padding adds nothing
            continue
        if type(layer).__name__ not in CUTTABLE:
            raise ValueError(
                f"columns of a {type(layer).__name__} cannot be removed: use "
                "start=0, which leaves the padding"
            )
        left = max(0, num_columns - (layer.get_seq_length() - layer.keys.shape[-2]))
        layer.keys, layer.values = layer.keys[..., left:, :], layer.values[..., left:, :]
        if layer.is_sliding:
            layer.cumulative_length -= num_columns
