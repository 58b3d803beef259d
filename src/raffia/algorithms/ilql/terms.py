"""The terms of ILQL's loss and the weights of tokens, as pure functions, and the slots that count.

Legend: B rows, A actions of a row, T tokens of a row, K entries of a row, M computed entries, V
tokens of the vocabulary, d numbers of a hidden state; [*] any shape, the same for all arguments of
a call. A mask is True where a slot counts; the sums are divided by how many count, or by `count`
where a batch is only a part of what is averaged.

Source: Snell, Kostrikov, Su, Yang & Levine (2022), "Offline RL for Natural Language Generation with
Implicit Language Q Learning", section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from raffia.functional.losses import conservative_loss, expectile_loss, margin_loss, masked_mean
from raffia.functional.trees import is_traced

Number = Tensor | float


def bellman_target(
    rewards: Tensor,  # [*]
    next_values: Tensor,  # [*], V of the next states
    terminals: Tensor,  # bool [*], whether the dialogue ended there
    gamma: Number,
) -> Tensor:  # [*]
    """The target of Q, through which no gradient flows.

        y_t = r_t + gamma (1 - terminal_{t+1}) V(s_{t+1})

    >>> ended = torch.tensor([False, True])
    >>> bellman_target(torch.tensor([0.0, 1.0]), torch.tensor([4.0, 9.0]), ended, 0.5)
    tensor([2., 1.])
    """
    return rewards + gamma * torch.where(terminals, 0, next_values.detach())


def min_target_q(
    target_q: Sequence[Tensor],  # of each target head [*]
    value_min: float | None = None,
    value_max: float | None = None,
) -> Tensor:  # [*]
    """The smaller of the heads' values, brought within bounds; no gradient flows through it.

    >>> min_target_q([torch.tensor([1.0, 5.0]), torch.tensor([2.0, 4.0])], value_max=3.0)
    tensor([1., 3.])
    """
    least = target_q[0] if len(target_q) == 1 else torch.minimum(*target_q)
    least = least.detach()
    if value_min is None and value_max is None:
        return least
    return least.clamp(value_min, value_max)


def q_loss(
    q: Sequence[Tensor],  # of each head: the actions' values [*]
    target: Tensor,  # [*], as of `bellman_target`
    mask: Tensor,  # bool [*]
    count: Tensor | None = None,
) -> Tensor:  # []
    """Squared error; the heads are added.

        sum_i sum m (y - q_i)^2 / n

    >>> heads, target = [torch.tensor([1.0]), torch.tensor([2.0])], torch.tensor([3.0])
    >>> q_loss(heads, target, torch.tensor([True]))
    tensor(5.)
    """
    error = torch.stack([(target.detach() - head).square() for head in q]).sum(0)
    return masked_mean(error, mask, count)


def v_loss(
    v: Tensor,  # [*]
    target: Tensor,  # [*], as of `min_target_q`, or the returns
    mask: Tensor,  # bool [*]
    tau: Number,
    count: Tensor | None = None,
) -> Tensor:  # []
    """V becomes the expectile tau of the values of the data's actions.

        sum m |tau - 1[d < 0]| d^2 / n,  d = target - v

    >>> v_loss(torch.tensor([0.0]), torch.tensor([2.0]), torch.tensor([True]), tau=0.75)
    tensor(3.)
    """
    return masked_mean(expectile_loss(target.detach() - v, tau), mask, count)


def cql_loss(
    q_rows: Sequence[Tensor],  # of each head: the values of all next tokens [*, V]
    action: Tensor,  # int64 [*]
    mask: Tensor,  # bool [*]
    temperature: float = 1.0,
    count: Tensor | None = None,
) -> Tensor:  # []
    """The values of tokens that the data do not have are held down.

        sum_i sum m CE(Q_i / temperature, a) / n

    >>> cql_loss([torch.zeros(1, 4)], torch.tensor([0]), torch.tensor([True]))
    tensor(1.3863)
    """
    losses = [conservative_loss(rows, action, temperature) for rows in q_rows]
    return masked_mean(torch.stack(losses).sum(0), mask, count)


def dm_loss(
    q_rows: Sequence[Tensor],  # of each head: the values of all next tokens [*, V]
    action: Tensor,  # int64 [*]
    mask: Tensor,  # bool [*]
    margin: float = 0.0,
    count: Tensor | None = None,
) -> Tensor:  # []
    """Tokens that are not in the data must have lower values, by a margin.

        sum_i sum m sum_k max(0, Q_i[k] - Q_i[a] + margin)^2 / n

    >>> rows = torch.tensor([[1.0, 3.0]])
    >>> dm_loss([rows, rows], torch.tensor([0]), torch.tensor([True]))
    tensor(8.)
    """
    losses = [margin_loss(rows, action, margin) for rows in q_rows]
    return masked_mean(torch.stack(losses).sum(0), mask, count)


def token_loss(
    logits: Tensor,  # [*, V], the policy's
    token: Tensor,  # int64 [*], which came
    weight: Tensor,  # [*]
    mask: Tensor,  # bool [*]
    count: Tensor | None = None,  # how many next tokens the batch has, those of weight 0 too
) -> Tensor:  # []
    """Cross entropy of the policy, weighted by how good each token was; no gradient to the weight.

        sum m w CE(logits, token) / n

    >>> two = torch.tensor([True, True])
    >>> token_loss(torch.zeros(2, 4), torch.tensor([0, 3]), torch.tensor([1.0, 0.0]), two)
    tensor(0.6931)
    """
    # CQL's term at temperature 1 is this cross entropy, with logits for values
    return masked_mean(weight.detach() * conservative_loss(logits, token), mask, count)


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


class Masks(NamedTuple):
    """The slots that count: bool [B, A] each, all the same unless the published ones are requested.

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
        """The entries where a mask [B, K] is True; all entries if shapes must not depend on data.

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
