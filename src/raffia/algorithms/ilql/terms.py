"""The terms of ILQL's loss and the weights of tokens, as pure functions.

Legend: B rows, A actions of a row, T tokens of a row, V tokens of the vocabulary; [*] any shape,
the same for all arguments of a call. A mask is True where a slot counts; the sums are divided by
how many count, or by `count` where a batch is only a part of what is averaged.

Source: Snell, Kostrikov, Su, Yang & Levine (2022), "Offline RL for Natural Language Generation with
Implicit Language Q Learning", section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raffia.functional.losses import conservative_loss, expectile_loss, margin_loss, masked_mean
from raffia.functional.returns import discounted_sum

Number = Tensor | float


def bellman_target(
    rewards: Tensor,  # [*]
    next_values: Tensor,  # [*], V of the next states
    terminals: Tensor,  # bool [*], whether the dialogue ended there
    gamma: Number,
) -> Tensor:  # [*]
    """What Q is trained towards; no gradient flows through it.

        y_t = r_t + gamma (1 - terminal_{t+1}) V(s_{t+1})

    >>> ended = torch.tensor([False, True])
    >>> bellman_target(torch.tensor([0.0, 1.0]), torch.tensor([4.0, 9.0]), ended, 0.5)
    tensor([2., 1.])
    """
    return rewards + gamma * torch.where(terminals, 0, next_values.detach())


def monte_carlo_returns(
    rewards: Tensor,  # [B, A], 0 where padded
    gamma: Number,
) -> Tensor:  # [B, A]
    """The rewards that came, from each action on. Finite for all gamma and lengths.

        G_t = r_t + gamma G_{t+1}

    >>> monte_carlo_returns(torch.tensor([[1.0, 0.0, 4.0]]), 0.5)
    tensor([[2., 2., 4.]])
    """
    return discounted_sum(rewards, gamma)


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
    """Tokens that the data do not have shall be worth less, by a margin.

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
