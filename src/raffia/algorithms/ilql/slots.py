"""Which slots of a batch count, and which are computed: those alone, or all of a fixed shape.

Legend: B rows, A actions of a row, K entries of a row, M computed entries, T tokens of a row, d
numbers of a hidden state.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from raffia.functional.trees import is_traced


class Masks(NamedTuple):
    """Which slots count: bool [B, A] each, the same unless the published ones are asked for.

    >>> real = torch.tensor([[True, False]])
    >>> Masks(real, real).values is real
    True
    """

    values: Tensor  # for the losses of V and Q
    weights: Tensor  # for the policy


def masks_of(
    action_mask: Tensor,  # bool [B, A], real actions
    terminals: Tensor,  # bool [B, A + 1], True where padded
    kind: Literal["strict", "published"] = "strict",
) -> Masks:
    """Real actions; or what the paper's code takes for them.

    There a slot counts for the values if it is not marked terminal, which lets in one slot of
    padding of each row that did not end; and a row without actions has a weight in its first slot.

    >>> real = torch.tensor([[True, False, False]])
    >>> unfinished = torch.tensor([[False, False, True, True]])
    >>> masks_of(real, unfinished, "published")
    Masks(values=tensor([[ True,  True, False]]), weights=tensor([[ True, False, False]]))
    """
    if kind == "strict":
        return Masks(action_mask, action_mask)
    first = torch.arange(action_mask.shape[1], device=action_mask.device) == 0
    without = ~action_mask.any(1, keepdim=True)
    return Masks(~terminals[:, :-1], action_mask | (first & without))


class Slots(NamedTuple):
    """Entries of a grid [B, K], one after the other: [M].

    >>> mask = torch.tensor([[True, False, True], [False, True, False]])
    >>> slots = Slots.of(mask)
    >>> chosen = slots.take(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    >>> chosen, slots.spread(chosen * 10)
    (tensor([1, 3, 5]), tensor([[10,  0, 30], [ 0, 50,  0]]))
    """

    shape: tuple[int, int]
    chosen: Tensor | None  # int64 [M], indices in the flat grid; None: all of them

    @classmethod
    def of(cls, mask: Tensor) -> Slots:
        """Where a mask [B, K] is True; all entries where shapes must not depend on data.

        >>> torch.vmap(lambda mask: Slots.of(mask).take(mask))(torch.tensor([[[True, False]]]))
        tensor([[ True, False]])
        """
        rows, columns = mask.shape
        return cls((rows, columns), None if is_traced() else mask.flatten().nonzero().squeeze(-1))

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

    def flat(self, position: Tensor, width: int) -> Tensor:
        """Positions [B, K] within rows of a width as indices [M] of the rows one after another.

        >>> Slots((2, 1), None).flat(torch.tensor([[1], [0]]), width=4)
        tensor([1, 4])
        """
        start = torch.arange(len(position), device=position.device).unsqueeze(1) * width
        return self.take(position + start)

    def gather(
        self,
        states: Tensor,  # [B, T, d]
        position: Tensor,  # int64 [B, K]
    ) -> Tensor:  # [M, d]
        """The hidden states at positions of the rows.

        >>> Slots((1, 2), torch.tensor([1])).gather(torch.eye(3)[None], torch.tensor([[0, 2]]))
        tensor([[0., 0., 1.]])
        """
        return states.flatten(0, 1).index_select(0, self.flat(position, states.shape[1]))
