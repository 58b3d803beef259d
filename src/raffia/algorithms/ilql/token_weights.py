"""How much each token counts for the policy, and which slots of a batch count at all.

Legend: B rows, A actions of a row, T tokens of a row.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["Masks", "advantage_weights", "masks_of", "token_weights"]


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


def advantage_weights(
    advantage: Tensor,  # [*], target Q - V
    beta: Tensor | float,
    *,
    exp_weights: bool = True,
    clip_weight: float | None = None,
) -> Tensor:  # [*]
    """How much an action counts by how much better than expected it was; no gradient flows on.

        w = exp(beta A),  or  beta where A > 0 and 1 - beta elsewhere

    >>> advantage = torch.tensor([-1.0, 0.0, 2.0])
    >>> advantage_weights(advantage, 1.0, clip_weight=5.0)
    tensor([0.3679, 1.0000, 5.0000])
    >>> advantage_weights(advantage, 0.75, exp_weights=False)
    tensor([0.2500, 0.2500, 0.7500])
    """
    advantage = advantage.detach()
    if exp_weights:
        weights = (beta * advantage).exp()
    else:
        better = (advantage > 0).to(advantage.dtype)
        weights = beta * better + (1 - beta) * (1 - better)
    return weights if clip_weight is None else weights.clamp_max(clip_weight)


def token_weights(
    weights: Tensor,  # [B, A], of the actions
    mask: Tensor,  # bool [B, A]; in each row, slots that count come before those that do not
    first: Tensor,  # int64 [B, A], position whose next token is the first of the action
    last: Tensor,  # int64 [B, A], ... the last one; the same where an action is one token
    num_positions: int,  # T
    transition_weight: float = 0.0,
) -> Tensor:  # [B, T], of the token behind each position
    """The weights of actions on all of their tokens, and `transition_weight` on the others.

    Actions do not overlap and are in the order of their positions.

    >>> weights, mask = torch.tensor([[2.0, 3.0, 9.0]]), torch.tensor([[True, True, False]])
    >>> first, last = torch.tensor([[1, 4, 0]]), torch.tensor([[2, 4, 0]])
    >>> token_weights(weights, mask, first, last, num_positions=6, transition_weight=0.5)
    tensor([[0.5000, 2.0000, 2.0000, 0.5000, 3.0000, 0.5000]])
    """
    positions = torch.arange(num_positions, device=weights.device)
    start = torch.where(mask, first, num_positions)  # what does not count starts behind the end
    starts = torch.zeros_like(start[:, :1]).expand(-1, num_positions + 1).scatter(1, start, 1)
    action = starts[:, :-1].cumsum(1) - 1  # the latest one that has started
    slot = action.clamp_min(0)
    within = (action >= 0) & (positions <= last.gather(1, slot))
    return torch.where(within, weights.gather(1, slot), transition_weight)
