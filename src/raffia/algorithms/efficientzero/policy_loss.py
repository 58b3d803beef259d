"""Losses between policies and their targets: over all actions, or over sampled ones.

Legend: A actions, N sampled ones of D numbers, P parameters of a policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

# parameters [M, P], actions [M, N, D] -> log densities [M, N], as of a `Sampler`
LogDensity = Callable[[Tensor, Tensor], Tensor]


def discrete_policy_loss(
    logits: Tensor,  # [*, A]
    target: Tensor,  # [*, A]; zeros cost nothing
) -> tuple[Tensor, Tensor]:  # [*], [*]
    """Cross entropy with the target, and the entropy of the policy itself, in nats.

    >>> discrete_policy_loss(torch.zeros(1, 4), torch.tensor([[0.5, 0.5, 0.0, 0.0]]))
    (tensor([1.3863]), tensor([1.3863]))
    """
    log_policy = logits.log_softmax(-1)
    return -(target * log_policy).sum(-1), -(log_policy.exp() * log_policy).sum(-1)


def sampled_policy_loss(
    parameters: Tensor,  # [*, P]: means, then standard deviations
    target: Tensor,  # [*, N]: fractions of the visits; zeros cost nothing
    actions: Tensor,  # [*, N, D]: those that were sampled at the root
    log_density: LogDensity,
) -> tuple[Tensor, Tensor]:  # [*], [*]
    """Cross entropy with the visits of sampled actions, and the entropy of the Gaussian.

        -sum_i target_i log pi(a_i)

    The density is not rescaled to the N actions: these were drawn from the policy, so with visits
    that prefer none of them the policy stays, where softmax_i log pi(a_i) would widen it. It is a
    density, so the loss can be negative. The entropy is of the normal distribution, before it is
    squashed into bounds.
    Source: Hubert et al. (2021), "Learning and Planning in Complex Action Spaces", section 5.

    >>> from raffia.search import GaussianSampler
    >>> parameters, actions = torch.tensor([[0.0, 1.0]]), torch.tensor([[[0.0], [1.0]]])
    >>> target = torch.tensor([[0.5, 0.5]])
    >>> sampled_policy_loss(parameters, target, actions, GaussianSampler(2).log_density)
    (tensor([1.1689]), tensor([1.4189]))
    """
    lead = parameters.shape[:-1]
    flat = parameters.flatten(0, -2), actions.flatten(0, -3)
    log_prob = log_density(*flat).unflatten(0, lead)
    deviation = parameters.chunk(2, -1)[1]
    entropy = (deviation.log() + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)
    return -(target * log_prob).sum(-1), entropy
