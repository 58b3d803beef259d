"""MuZero's value transform, and values as categorical distributions over a support."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from raffia.functional.trees import is_differentiated


def signed_hyperbolic(
    x: Tensor,  # [*]
    eps: float = 1e-3,
) -> Tensor:  # [*]
    """MuZero's value transform, which compresses large values.

        h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x

    `eps` keeps the inverse Lipschitz. Source: Pohlen et al. (2018), proposition A.2.

    >>> signed_hyperbolic(torch.tensor([-3.0, 0.0, 8.0]))
    tensor([-1.0030,  0.0000,  2.0080])
    """
    found = x.sign() * ((x.abs() + 1).sqrt() - 1) + eps * x
    if not is_differentiated(x):
        return found
    return torch.where(x == 0, x * (0.5 + eps), found)  # at 0 sign and abs have no gradient, h has


def signed_parabolic(
    v: Tensor,  # [*]
    eps: float = 1e-3,
) -> Tensor:  # [*]
    """The inverse of `signed_hyperbolic`.

        h^-1(v) = sign(v) (t^2 - 1),  t = (sqrt(1 + 4 eps (|v| + 1 + eps)) - 1) / (2 eps)

    Here t is reckoned as 2 (|v| + 1 + eps) / (sqrt(1 + 4 eps (|v| + 1 + eps)) + 1): the difference
    above cancels in float32 (h^-1(0) would be -2.6e-5). NaN stays NaN.

    >>> signed_parabolic(torch.tensor([-1.0030, 0.0000, 2.0080]))
    tensor([-3.0000,  0.0000,  8.0000])
    """
    shifted = v.abs() + (1 + eps)
    t = 2 * shifted / ((1 + 4 * eps * shifted).sqrt() + 1)
    found = v.sign() * (t * t - 1)
    if not is_differentiated(v):
        return found
    return torch.where(v == 0, v * (2 / (1 + 2 * eps)), found)


@dataclass(frozen=True)
class Support:
    """The support of a categorical distribution: evenly spaced numbers from start to before stop.

    start, stop, step: as in `range`, `stop` is left out; on the scale of `signed_hyperbolic` where
        values are compressed.

    >>> support = Support(-2, 3)
    >>> support.size, support.values()
    (5, tensor([-2., -1.,  0.,  1.,  2.]))
    """

    start: float
    stop: float
    step: float = 1.0

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.start, self.stop, self.step))) or not (
            self.step > 0 and self.start < self.stop
        ):
            raise ValueError(
                f"{self} is empty: start must be below stop, and step positive, as in "
                "Support(-300, 301, 1), which is -300, -299, ..., 300"
            )

    @property
    def size(self) -> int:
        """The number of atoms."""
        # a step such as 0.1 is not exact: without the margin, 0 .. 0.3 would have 4 numbers
        return max(1, math.ceil((self.stop - self.start) / self.step - 1e-6))

    @property
    def last(self) -> float:
        """The largest atom."""
        return self.start + (self.size - 1) * self.step

    def values(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> Tensor:  # [size]
        """The atoms [size]."""
        return torch.arange(self.size, dtype=dtype, device=device) * self.step + self.start


def two_hot(
    x: Tensor,  # [*], already on the scale of the support
    support: Support,
) -> Tensor:  # [*, size], sums to 1
    """Two-hot encoding: the distribution on the two nearest atoms whose mean is the number.

    Numbers beyond the support become its first or last. A NaN gives a row of NaN.

    >>> two_hot(torch.tensor([0.25, 9.0]), Support(-1, 3))
    tensor([[0.0000, 0.7500, 0.2500, 0.0000],
            [0.0000, 0.0000, 0.0000, 1.0000]])
    """
    position = (x.clamp(support.start, support.last) - support.start) / support.step
    # the mass on i falls off linearly with the distance to it, which leaves two neighbours
    grid = torch.arange(support.size, dtype=position.dtype, device=position.device)
    return (1 - (position.unsqueeze(-1) - grid).abs()).clamp_min(0)


def precise(x: Tensor) -> Tensor:
    """x in float32 if it has half precision, too coarse for sums and values; else x itself.

    >>> precise(torch.zeros(2, dtype=torch.bfloat16)).dtype, precise(torch.zeros(2).double()).dtype
    (torch.float32, torch.float64)
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def expected_value(
    logits: Tensor,  # [*, size]
    support: Support,
) -> Tensor:  # [*]
    """The mean of the distribution with the given logits.

    Reckoned from the middle of the support outwards, so equal logits give exactly the middle; and
    in float32 or better, as half precision would be too coarse for values.

    >>> expected_value(torch.tensor([0.0, 0.0, 0.0]), Support(0, 3))
    tensor(1.)
    """
    if logits.shape[-1] != support.size:
        raise ValueError(
            f"logits over {support} must have {support.size} entries in their last dimension, got "
            f"shape {list(logits.shape)}"
        )
    half = support.size // 2
    if not half:
        return torch.full_like(logits[..., 0], support.start)  # of one number
    mass = logits.softmax(-1, torch.promote_types(logits.dtype, torch.float32))
    middle = (support.start + support.last) / 2
    upward = support.values(mass.dtype, mass.device)[-half:] - middle
    # no matrix product, which autocast would bring back to half precision
    return ((mass[..., -half:] - mass[..., :half].flip(-1)) * upward).sum(-1) + middle


def scalar_to_categorical(
    x: Tensor,  # [*], raw values
    support: Support,
    eps: float = 1e-3,
) -> Tensor:  # [*, size]
    """The target distribution that a network learns for a value: `two_hot(h(x))`.

    >>> scalar_to_categorical(torch.tensor([3.0]), Support(0, 3), eps=0.0)
    tensor([[0., 1., 0.]])
    """
    return two_hot(signed_hyperbolic(x, eps), support)


def categorical_to_scalar(
    logits: Tensor,  # [*, size]
    support: Support,
    eps: float = 1e-3,
) -> Tensor:  # [*], raw values
    """The value that logits stand for: `h^-1` of their expected value.

    >>> target = scalar_to_categorical(torch.tensor([-2.5, 40.0]), Support(-300, 301))
    >>> categorical_to_scalar(target.log(), Support(-300, 301)).round(decimals=2)
    tensor([-2.5000, 40.0000])
    """
    return signed_parabolic(expected_value(logits, support), eps)
