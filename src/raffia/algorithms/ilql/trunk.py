"""A trunk's hidden states, and which of them are used: the chosen ones, or all of a fixed shape.

Legend: B rows, K entries of a row, M computed entries, N tokens that have a hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from raffia.functional.trees import is_traced

__all__ = ["HiddenStates", "PackedTrunk", "Slots", "Trunk", "hidden_states"]


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
    """A trunk's hidden states of the tokens of B rows, with or without those of padding.

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


class Trunk(Protocol):
    """What the heads need of a language model: `CausalLM`, or any other of the same face.

    >>> from raffia.lm.transformer import CausalLM
    >>> trunk: Trunk = CausalLM(10, n_layer=1, n_head=2, n_embd=8, block_size=6, dropout=0.0)
    >>> trunk(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 8])
    """

    vocab_size: int
    n_embd: int

    def __call__(
        self,
        tokens: Tensor,  # int64 [B, T]
        attn_mask: Tensor | None = None,  # bool [B, T]
        *,
        prefix_embs: Tensor | None = None,  # [B, P, d]
        prefix_attn_mask: Tensor | None = None,  # bool [B, P]
        remove_prefix_position_embs: bool = False,
    ) -> Tensor:
        """Hidden states [B, T, d] of the tokens, after the last norm."""

    def logits(self, hidden: Tensor) -> Tensor:
        """The next token's logits [*, V]."""


class PackedTrunk(Protocol):
    """A trunk that can leave out padding.

    >>> from raffia.lm.transformer import CausalLM
    >>> trunk = CausalLM(10, n_layer=1, n_head=2, n_embd=8, block_size=6, dropout=0.0)
    >>> packed: PackedTrunk = trunk
    >>> packed.packed_hidden(torch.tensor([[1, 2, 0]]), torch.tensor([2]))[0].shape
    torch.Size([2, 8])
    """

    def packed_hidden(
        self, tokens: Tensor, lengths: Tensor, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [N, d] of the first `lengths` [B] tokens of each row, and their starts.

        wanted: bool [B, T], at which they will be looked at; None: at all of them.
        """


def hidden_states(
    trunk: Trunk,
    tokens: Tensor,  # int64 [B, T]
    attn_mask: Tensor,  # bool [B, T]
    *,
    packed: bool,  # leave out padding, where it stands at the right and the trunk can
    wanted: Tensor | None = None,  # bool [B, T], where they will be looked at; None: everywhere
    more: Mapping[str, Any] | None = None,  # what else the trunk is called with; never packed then
) -> HiddenStates:
    """One pass of a trunk.

    >>> from raffia.lm.transformer import CausalLM
    >>> trunk = CausalLM(10, n_layer=1, n_head=2, n_embd=8, block_size=6, dropout=0.0)
    >>> tokens, mask = torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    >>> hidden_states(trunk, tokens, mask.bool(), packed=True).rows.shape
    torch.Size([4, 8])
    """
    packed_hidden = getattr(trunk, "packed_hidden", None)
    if packed and not more and packed_hidden is not None and _right_padded(attn_mask):
        return HiddenStates(*packed_hidden(tokens, attn_mask.sum(1), wanted))
    hidden = trunk(tokens, attn_mask, **({} if more is None else more))
    num_rows, num_tokens = tokens.shape
    starts = torch.arange(num_rows, device=tokens.device) * num_tokens
    return HiddenStates(hidden.flatten(0, 1), starts)


def _right_padded(attn_mask: Tensor) -> bool:
    """Whether no token stands behind padding; taken for granted where it can't be looked at."""
    return is_traced() or not bool((attn_mask[:, 1:] & ~attn_mask[:, :-1]).any())
