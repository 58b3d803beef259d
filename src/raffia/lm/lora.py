"""Low-rank changes of a model's linear layers, which are learnt instead of their weights.

Source: Hu et al. (2021), "LoRA: Low-Rank Adaptation of Large Language Models", section 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

# What makes queries, keys and values: ours, then those of models of `transformers`.
ATTENTION = (
    *("qkv", "c_attn", "q_proj", "k_proj", "v_proj", "query_key_value", "qkv_proj", "Wqkv"),
    *("query", "key", "value"),
)


class LoRA(nn.Module):
    """A linear layer that stays, and a product of two thin matrices that is learnt and added.

        y = base(x) + (alpha / rank) B A x,    A [rank, in] drawn, B [out, rank] zero at first

    base: a linear layer, or one whose weight is [in, out], as GPT-2's are in `transformers`.
    dropout: of what the product is given of x.

    >>> layer = LoRA(torch.nn.Linear(3, 5), rank=2, alpha=4.0)
    >>> x = torch.ones(1, 3)
    >>> torch.equal(layer(x), layer.base(x)), layer.up.shape, layer.down.shape
    (True, torch.Size([5, 2]), torch.Size([2, 3]))
    """

    def __init__(
        self, base: nn.Module, *, rank: int = 8, alpha: float = 16.0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        size_in, size_out = _sizes(base)
        if not 1 <= rank <= min(size_in, size_out):
            raise ValueError(
                f"rank={rank} must be in 1..{min(size_in, size_out)} for a layer of size "
                f"{size_in} to {size_out}; 8 is common"
            )
        self.base = base.requires_grad_(False)
        self.scale, self.dropout = alpha / rank, nn.Dropout(dropout)
        weight = next(base.parameters())
        self.down = nn.Parameter(weight.new_empty(rank, size_in))
        self.up = nn.Parameter(weight.new_zeros(size_out, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))  # as torch draws a linear layer

    def forward(self, x: Tensor) -> Tensor:
        given = self.dropout(x) if self.dropout.p else x  # rates of 0 draw, too
        return self.base(x) + self.scale * linear(linear(given, self.down), self.up)

    def merged(self) -> nn.Module:
        """The base layer, with a new weight that has the change in it.

        Other layers may share the old one, which stays as it is.

        >>> layer = LoRA(torch.nn.Linear(3, 5), rank=1)
        >>> layer.merged() is layer.base
        True
        """
        with torch.no_grad():
            change = self.scale * self.up @ self.down
            change = change if isinstance(self.base, nn.Linear) else change.t()
            self.base.weight = nn.Parameter(self.base.get_parameter("weight") + change)
        return self.base.requires_grad_(True)


def add_lora(
    model: nn.Module,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
    layers: Sequence[str] = ("qkv",),  # last parts of their names; the paper's choice: attention
) -> list[str]:
    """Freeze a model and put `LoRA` around these of its layers; returns their names.

    The model's function stays as it was, until it learns. Its parameters that require gradients
    are now those of LoRA alone; a head on the trunk is to be made or unfrozen afterwards.

    >>> from raffia.lm.transformer import CausalLM
    >>> model = CausalLM(9, n_layer=2, n_head=2, n_embd=8, block_size=4)
    >>> add_lora(model, rank=2, layers=["qkv", "proj"])
    ['h.0.qkv', 'h.0.proj', 'h.1.qkv', 'h.1.proj']
    >>> sum(p.numel() for p in model.parameters() if p.requires_grad)
    192
    """
    found = [(name, parent, last) for name, parent, last in _children(model) if last in layers]
    missing = set(layers) - {last for _, _, last in found}
    if missing or not layers:
        linear_ones = sorted({last for _, _, last in _children(model)})
        raise ValueError(
            f"there is no linear layer {sorted(missing)}; the linear layers are {linear_ones}"
        )
    model.requires_grad_(False)
    for _, parent, last in found:
        layer = LoRA(getattr(parent, last), rank=rank, alpha=alpha, dropout=dropout)
        setattr(parent, last, layer)
    return [name for name, _, _ in found]


def merge_lora(model: nn.Module) -> nn.Module:
    """The model without LoRA's layers and with what they have learnt, to be saved or run.

    >>> from raffia.lm.transformer import CausalLM
    >>> model = CausalLM(9, n_layer=2, n_head=2, n_embd=8, block_size=4)
    >>> _ = add_lora(model, rank=2)
    >>> [name for name, _ in merge_lora(model).named_parameters() if "base" in name]
    []
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoRA):
                setattr(parent, name, child.merged())
    return model.requires_grad_(True)


def attention_layers(model: nn.Module) -> list[str]:
    """The names of the layers that make queries, keys and values, where these are known.

    >>> from raffia.lm.transformer import CausalLM
    >>> attention_layers(CausalLM(9, n_layer=2, n_head=2, n_embd=8, block_size=4))
    ['qkv']
    """
    there = {last for _, _, last in _children(model)}
    found = [name for name in ATTENTION if name in there]
    if not found:
        raise ValueError(
            f"the attention layers of this model are not known: name some of {sorted(there)}"
        )
    return found


def _children(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Each linear layer: its name, the module that holds it, and its name there."""
    for name, parent in model.named_modules():
        if isinstance(parent, LoRA):
            continue
        for last, child in parent.named_children():
            if isinstance(child, nn.Linear) or _is_transposed(child):
                yield f"{name}.{last}".lstrip("."), parent, last


def _is_transposed(layer: nn.Module) -> bool:
    """GPT-2's kind of linear layer in `transformers`, which need not be installed."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def _sizes(base: nn.Module) -> tuple[int, int]:
    if isinstance(base, nn.Linear):
        return base.in_features, base.out_features
    if _is_transposed(base):
        size_in, size_out = base.get_parameter("weight").shape
        return size_in, size_out
    raise TypeError(f"LoRA applies to linear layers, but this is a {type(base).__name__}")
