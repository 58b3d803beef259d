"""Returns of sequences of rewards [*, T]; time is the last dimension.

The discount of step t is 0 where the episode terminated with that reward, else gamma: it cuts off
all that comes after it. `ends` marks steps after which the episode continues unobserved (a time
limit): there the value of the state that was reached stands for the rest, as at the last step.
Where two players take turns and each value is that of the player to move, gamma is negative.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from raffia.functional.trees import is_traced
from raffia.hints import check_range


def discounted_sum(
    reward: Tensor,  # [*, T], r_{t+1}
    discount: Tensor | float,  # [*, T]
    bootstrap: Tensor | float = 0.0,  # [*], v(s_T), behind the last reward
) -> Tensor:  # [*, T]
    """The discounted sum of rewards from each step on.

        G_t = r_{t+1} + g_{t+1} G_{t+1},  G_T = bootstrap

    Source: Sutton & Barto (2018), equation 3.9.

    >>> discounted_sum(torch.tensor([1.0, 2.0, 4.0]), 0.5)
    tensor([3., 4., 4.])
    """
    _check_of_each("bootstrap", bootstrap, reward)
    following = reward.new_zeros(reward.shape[:-1]) + bootstrap
    sums = []
    for r, g in _backwards(reward, discount):
        following = r + g * following
        sums.append(following)
    return torch.stack(sums[::-1], -1) if sums else reward.clone()


def n_step_return(
    reward: Tensor,  # [*, T], r_{t+1}
    discount: Tensor | float,  # [*, T]
    value: Tensor,  # [*, T], v(s_{t+1})
    n: Tensor | int,  # int64 [*], at least 1: each sequence has its own horizon
    ends: Tensor | None = None,  # bool [*, T]
    num: int | None = None,  # N: of the first steps alone; None: of all
) -> Tensor:  # [*, N]
    """The n-step return: n discounted rewards and the bootstrap value behind them.

        G_t = r_{t+1} + g_{t+1} r_{t+2} + ... + (g_{t+1}...g_{t+n}) v_{t+n}

    Where fewer than n rewards remain, the last value closes the sum.
    Source: Sutton & Barto (2018), equation 7.1.

    >>> reward, value = torch.ones(2, 3), torch.tensor([[0.0, 0, 8], [0, 0, 8]])
    >>> n_step_return(reward, 0.5, value, n=torch.tensor([1, 2]))
    tensor([[1.0000, 1.0000, 5.0000],
            [1.5000, 3.5000, 5.0000]])
    """
    _check_of_each("n", n, reward)
    length = reward.shape[-1]
    horizon = torch.as_tensor(n, device=reward.device)
    if is_traced():
        longest = length  # the numbers cannot be looked at
    else:
        if horizon.numel():
            check_range("n", int(horizon.min()), 1)
        longest = min(length, int(horizon.max())) if horizon.numel() else 1
    num = length if num is None else min(num, length)
    if not num:
        return (reward + discount * value)[..., :0]
    last = (torch.arange(length, device=reward.device) == length - 1).expand(reward.shape)
    parts = reward, _like(reward, discount), value, last if ends is None else last | ends
    ahead = [0, max(0, num + longest - 1 - length)]
    # Time first: what a step reads lies side by side.
    rewards, rates, values, stops = (pad(x, ahead).movedim(-1, 0).contiguous() for x in parts)
    steps = torch.arange(1, longest + 1, device=reward.device).view(-1, *[1] * reward.dim())
    closes = stops.unfold(0, num, 1)[:longest].movedim(-1, 1).contiguous() | (horizon <= steps)
    out = values[:num]
    for k in reversed(range(longest)):  # multiply-adds of all steps, no index arithmetic
        at = slice(k, k + num)
        following = torch.where(closes[k], values[at], out)
        out = rewards[at] + rates[at] * following
    return out.movedim(0, -1)


def lambda_return(
    reward: Tensor,  # [*, T], r_{t+1}
    discount: Tensor | float,  # [*, T]
    value: Tensor,  # [*, T], v(s_{t+1})
    lambda_: Tensor | float,  # [*, T], 0..1
    ends: Tensor | None = None,  # bool [*, T]
) -> Tensor:  # [*, T]
    """The lambda-return: the mean of all n-step returns with weights proportional to lambda^n.

        G_t = r_{t+1} + g_{t+1} ((1 - lambda) v_{t+1} + lambda G_{t+1}),  G_T = v_T

    Less the values v_t it is the generalised advantage estimate (GAE): see `examples/ppo.py`.
    Source: Sutton & Barto (2018), equation 12.2, as a recursion.

    >>> lambda_return(torch.ones(3), 0.5, torch.tensor([0.0, 0.0, 8.0]), 0.5)
    tensor([1.5625, 2.2500, 5.0000])
    """
    fractions = _like(reward, lambda_)
    if ends is not None:  # the value stands for the rest, so it counts fully
        fractions = fractions.masked_fill(ends, 0.0)
    if not reward.shape[-1]:
        return reward + discount * value
    following = value[..., -1]
    sums = []
    for (r, g), v, fraction in zip(
        _backwards(reward, discount),
        value.unbind(-1)[::-1],
        fractions.unbind(-1)[::-1],
        strict=True,
    ):
        following = r + g * ((1 - fraction) * v + fraction * following)
        sums.append(following)
    return torch.stack(sums[::-1], -1)


def value_prefix(
    reward: Tensor,  # [*, T], 0 behind the end
    horizon: int,  # L
) -> Tensor:  # [*, T]
    """Value prefixes: undiscounted sums of rewards so far, reset after each `horizon` steps.

        p_k = sum of r_j over j = k - k mod L, ..., k

    A reward is easier to foretell as part of such a sum, as it need not be known at which step it
    comes. Source: Ye et al. (2021), section 4.2.

    >>> value_prefix(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), 3)
    tensor([1., 3., 6., 4., 9.])
    """
    check_range("horizon", horizon, 1)
    return torch.cat([part.cumsum(-1) for part in reward.split(horizon, -1)], -1)


def _backwards(reward: Tensor, discount: Tensor | float) -> list[tuple[Tensor, Tensor]]:
    """Rewards and discounts [*] of each step, the last one first."""
    both = reward.unbind(-1), _like(reward, discount).unbind(-1)
    return list(zip(*both, strict=True))[::-1]


def _check_of_each(name: str, number: Tensor | float, reward: Tensor) -> None:
    """Check that a number of each sequence has no dimension more: it would broadcast over time."""
    if isinstance(number, Tensor) and number.dim() >= max(1, reward.dim()):
        raise ValueError(
            f"{name} has shape {list(number.shape)}; with rewards {list(reward.shape)} it must be "
            f"one number, or one for each sequence: {list(reward.shape[:-1])}"
        )


def _like(reward: Tensor, factor: Tensor | float) -> Tensor:
    """A factor for each reward, with its precision; a fraction is one for whole rewards, too."""
    dtype = reward.dtype if reward.is_floating_point() else torch.get_default_dtype()
    return torch.as_tensor(factor, dtype=dtype, device=reward.device).expand_as(reward)
