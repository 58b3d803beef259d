"""Losses of each prediction; weights, masks and means are up to the caller."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize


def soft_cross_entropy(
    logits: Tensor,  # [*, N]
    target: Tensor,  # [*, N], probabilities
) -> Tensor:  # [*]
    """Cross entropy between a target distribution and logits, in nats.

        -sum_i target_i log softmax(logits)_i

    A target of zeros costs nothing; where a target is 0, a logit may be -inf (an illegal action).

    >>> soft_cross_entropy(torch.zeros(2, 4), torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0]]))
    tensor([1.3863, -0.0000])
    """
    log_prob = logits.log_softmax(-1).masked_fill(target == 0, 0)  # 0 * -inf would be NaN
    return -(target * log_prob).sum(-1)


def negative_cosine_similarity(
    x: Tensor,  # [*, N]
    y: Tensor,  # [*, N]
    eps: float = 1e-5,
) -> Tensor:  # [*], from -1 (same direction) to 1
    """Negative cosine similarity of vectors; a norm below `eps` counts as `eps`.

    Gradients flow to both; SimSiam stops them at its target: pass `y.detach()`.
    Source: Chen & He (2021), equation 1.

    >>> x, y = torch.tensor([[1.0, 0], [3, 0]]), torch.tensor([[0, 2.0], [1, 0]])
    >>> negative_cosine_similarity(x, y)
    tensor([-0., -1.])
    """
    return -(normalize(x, dim=-1, eps=eps) * normalize(y, dim=-1, eps=eps)).sum(-1)


def expectile_loss(
    error: Tensor,  # [*], target - prediction
    tau: Tensor | float,  # 0..1
) -> Tensor:  # [*]
    """Asymmetric squared error, whose minimum is the targets' expectile tau.

        |tau - 1[error < 0]| error^2

    0.5 gives half the squared error, whose minimum is the mean; towards 1 it is the largest target.
    Source: Kostrikov, Nair & Levine (2021), "Offline RL with Implicit Q-Learning", equation 5.

    >>> expectile_loss(torch.tensor([-2.0, 2.0]), 0.75)
    tensor([1., 3.])
    """
    return (tau - (error < 0).to(error.dtype)).abs() * error.square()


def conservative_loss(
    q: Tensor,  # [*, V]
    action: Tensor,  # int64 [*]
    temperature: float = 1.0,
) -> Tensor:  # [*]
    """Conservative Q-learning's term: cross entropy of the action taken under softmax(Q), in nats.

        log sum_k exp(q_k / T) - q_a / T

    Source: Kumar, Zhou, Tucker & Levine (2020), "Conservative Q-Learning", equation 4; as a cross
    entropy for tokens in Snell et al. (2022), section 4.2.

    >>> conservative_loss(torch.tensor([[1.0, 1.0], [9.0, 0.0]]), torch.tensor([0, 1]))
    tensor([0.6931, 9.0001])
    """
    rows = (q / temperature).reshape(-1, q.shape[-1])
    return cross_entropy(rows, action.flatten(), reduction="none").view(action.shape)


def margin_loss(
    q: Tensor,  # [*, V]
    action: Tensor,  # int64 [*]
    margin: float = 0.0,
) -> Tensor:  # [*]
    """Squared hinge loss of other actions' values over the taken action's, summed over actions.

        sum_k max(0, q_k - q_a + margin)^2

    The action itself is one of the k: it adds margin^2, of which nothing is learnt.

    >>> margin_loss(torch.tensor([[1.0, 3.0, 0.5]]), torch.tensor([0]), margin=1.0)
    tensor([10.2500])
    """
    own = q.gather(-1, action.unsqueeze(-1))
    return (q - own + margin).relu().square().sum(-1)


def masked_mean(
    values: Tensor,  # [*]
    mask: Tensor,  # bool [*]
    count: Tensor | None = None,  # [], what the sum is divided by; None: how many are True
) -> Tensor:  # []
    """The mean where the mask is true; elsewhere values may be NaN. Where nothing counts it is 0.

    >>> values = torch.tensor([1.0, 3.0, torch.nan])
    >>> masked_mean(values, torch.tensor([True, True, False]))
    tensor(2.)
    >>> masked_mean(values, torch.zeros(3, dtype=torch.bool))
    tensor(0.)
    """
    total = torch.where(mask, values, 0).sum()
    count = mask.sum() if count is None else count
    return total / torch.where(count == 0, 1, count)
