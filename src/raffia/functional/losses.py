"""Losses of single predictions; weights, masks and means are the caller's."""

from torch import Tensor
from torch.nn.functional import normalize


def soft_cross_entropy(
    logits: Tensor,  # [*, N]
    target: Tensor,  # [*, N], probabilities
) -> Tensor:  # [*]
    """Cross entropy between a distribution and the one that the logits give, in nats.

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
    """Distance in direction of two vectors, of which a length below `eps` counts as `eps`.

    Gradients flow to both; SimSiam stops them at its target: pass `y.detach()`.
    Source: Chen & He (2021), equation 1.

    >>> x, y = torch.tensor([[1.0, 0], [3, 0]]), torch.tensor([[0, 2.0], [1, 0]])
    >>> negative_cosine_similarity(x, y)
    tensor([-0., -1.])
    """
    return -(normalize(x, dim=-1, eps=eps) * normalize(y, dim=-1, eps=eps)).sum(-1)
