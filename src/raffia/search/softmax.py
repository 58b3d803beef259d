"""Softmax whose bits do not depend on the library, the vector width or the batch.

Searches compare scores, so a last bit can turn a tree. Here each operation is one that IEEE 754
fixes (sums, products, quotients, in a stated order), and the compiled kernels do the same ones.
"""

import torch
from torch import Tensor

# e^r for |r| <= ln(2)/2: the coefficients of Cephes' expf (S. L. Moshier, netlib.org/cephes)
COEFFICIENTS = (
    *(1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3),
    *(4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1),
)
LOG2_E = 1.44269504088896341
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # the first exactly representable, the second small
LEAST = -87.0  # below, e^x is taken for 0


def exp(x: Tensor) -> Tensor:
    """e^x for float32 x <= 0, to 1.2e-7; 0 below -87.

    >>> exp(torch.tensor([0.0, -1.0, -100.0]))
    tensor([1.0000, 0.3679, 0.0000])
    """
    clamped = x.clamp_min(LEAST)
    whole = torch.round(clamped * LOG2_E)
    r = clamped - whole * LN2_HIGH
    r = r - whole * LN2_LOW
    y = torch.full_like(r, COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        y = y * r
        y = y + coefficient
    y = y * (r * r)
    y = y + r
    y = y + 1.0
    power = ((whole.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(x < LEAST, 0.0, y * power)


def in_order(terms: Tensor) -> Tensor:
    """The float64 sum over the last dimension, one after the other.

    >>> in_order(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([6.], dtype=torch.float64)
    """
    return terms.double().cumsum(-1)[..., -1]


def softmax(logits: Tensor) -> Tensor:
    """exp(x - max) / sum over the last dimension, 0 where -inf and everywhere if all are.

    >>> softmax(torch.tensor([[1.0, 1.0, -torch.inf]]))
    tensor([[0.5000, 0.5000, 0.0000]])
    """
    top = logits.amax(-1, keepdim=True)
    weights = exp(logits - top.masked_fill(top == -torch.inf, 0.0))
    total = in_order(weights).to(torch.float32).unsqueeze(-1)
    return weights / torch.where(total == 0, 1.0, total)
