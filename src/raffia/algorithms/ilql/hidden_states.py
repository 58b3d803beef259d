"""A language model's hidden states, and which are used: the chosen ones, or all of a fixed shape.

Legend: B rows, K entries of a row, M computed entries, N tokens that have a hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raffia.functional.trees import is_traced
from raffia.lm.model import LanguageModel
from raffia.lm.packing import Packing, is_right_padded

__all__ = ["HiddenStates", "Slots", "hidden_states"]


class Slots(NamedTuple):
    """Entries of a grid [B, K], one after the other: [M].

    >>> mask = torch.tensor([[True, False, True], [False, True, False]])
    >>> slots = Slots.of(mask, lean=True)
    >>> chosen = slots.take(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    >>> chosen, slots.spread(chosen * 10)
    (tensor([1, 3, 5]), tensor([[10,  0, 30], [ 0, 50,  0]]))
    """

    shape: tuple[int, int]
    chosen: Tensor | None  # int64 [M], indices in the flat grid; None: all of them

    @classmethod
    def of(cls, mask: Tensor, lean: bool) -> Slots:
        """Where a mask [B, K] is True; all entries unless `lean`.

        >>> Slots.of(torch.tensor([[True, False]]), lean=False).chosen is None
        True
        """
        rows, columns = mask.shape
        return cls((rows, columns), mask.flatten().nonzero().squeeze(-1) if lean else None)

    def take(self, grid: Tensor) -> Tensor:
        """The entries [M] of a grid [B, K].

        >>> Slots((1, 2), None).take(torch.tensor([[3, 4]]))
        tensor([3, 4])
        """
        flat = grid.flatten()
        return flat if self.chosen is None else flat.index_select(0, self.chosen)

    def spread(self, values: Tensor) -> Tensor:
        """The grid [B, K] that has these entries [M]; 0 where none was computed.

        >>> Slots((1, 2), torch.tensor([1])).spread(torch.tensor([7.0]))
        tensor([[0., 7.]])
        """
        if self.chosen is None:
            return values.view(self.shape)
        rows, columns = self.shape
        return values.new_zeros(rows * columns).index_copy(0, self.chosen, values).view(self.shape)


class HiddenStates(NamedTuple):
    """Hidden states of the tokens of B rows, with or without those of padding.

    >>> states = HiddenStates(torch.arange(5.0).view(5, 1), starts=torch.tensor([0, 2]))
    >>> position = torch.tensor([[0, 1], [2, 0]])
    >>> states.at(position, Slots((2, 2), None)).squeeze(-1)
    tensor([0., 1., 4., 2.])
    """

    rows: Tensor  # [N, d]
    starts: Tensor  # int64 [B], where the tokens of each row begin

    def at(self, position: Tensor, slots: Slots) -> Tensor:
        """The states [M, d] at positions [B, K] of the rows.

        >>> states = HiddenStates(torch.eye(2), torch.tensor([0]))
        >>> states.at(torch.tensor([[1]]), Slots((1, 1), None))
        tensor([[0., 1.]])
        """
        return self.rows.index_select(0, slots.take(position + self.starts.unsqueeze(1)))


def hidden_states(
    model: LanguageModel,
    tokens: Tensor,  # int64 [B, T]
    attn_mask: Tensor,  # bool [B, T]
    *,
    packed: bool,  # leave out padding, where all of it is at the right
    wanted: Tensor | None = None,  # bool [B, T], where they will be used; None: everywhere
    more: Mapping[str, Any] | None = None,  # what else the model is called with; not packed then
) -> HiddenStates:
    """One pass of a language model.

    >>> from raffia.lm.transformer import CausalLM
    >>> model = CausalLM(10, n_layer=1, n_head=2, n_embd=8, block_size=6, dropout=0.0)
    >>> tokens, mask = torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    >>> hidden_states(model, tokens, mask.bool(), packed=True).rows.shape
    torch.Size([4, 8])
    """
    packed = packed and not more and getattr(model, "packs", False)
    if not packed or not (is_traced() or is_right_padded(attn_mask)):
        hidden = model(tokens, attn_mask, **({} if more is None else more))
        num_rows, num_tokens = tokens.shape
        starts = torch.arange(num_rows, device=tokens.device) * num_tokens
        return HiddenStates(hidden.flatten(0, 1), starts)
    lengths = attn_mask.sum(1)
    if not is_traced():  # there a shape must not depend on data
        longest = int(lengths.max())
        tokens, wanted = tokens[:, :longest], None if wanted is None else wanted[:, :longest]
    packing = Packing.of(lengths, tokens.shape[1])
    wanted = None if wanted is None else packing.pack(wanted)
    return HiddenStates(model(packing.pack(tokens), packing=packing, wanted=wanted), packing.starts)
