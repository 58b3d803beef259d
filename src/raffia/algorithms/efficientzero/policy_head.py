"""The policy's last layers, for discrete and for continuous actions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from raffia.algorithms.efficientzero.heads import HeadOptions, head


class GaussianHead(nn.Module):
    """Mean and standard deviation of each number of an action, of which sampled actions are drawn.

    sizes: of the input, the hidden layers and the action.
    sigma_type: "conditioned", where it is the network's too, or "fixed".
    fixed_sigma_value: the standard deviation if it is fixed.
    options: those of `head`; with `zero_last` both start at the same for any input: mean 0,
        standard deviation 1 (or fixed).

    The exponent of sigma is clamped to -20 .. 2.

    >>> GaussianHead([4, 8, 1], sigma_type="fixed", zero_last=True)(torch.ones(2, 4))
    tensor([[0.0000, 0.3000],
            [0.0000, 0.3000]], grad_fn=<CatBackward0>)
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        sigma_type: str = "conditioned",
        fixed_sigma_value: float = 0.3,
        **options: Unpack[HeadOptions],
    ) -> None:
        super().__init__()
        check_sigma(sigma_type, fixed_sigma_value)
        *sizes, self.action_size = sizes
        self.fixed_sigma = fixed_sigma_value if sigma_type == "fixed" else None
        num_outputs = self.action_size * (1 if sigma_type == "fixed" else 2)
        self.net = head([*sizes, num_outputs], **options)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, size] -> [B, 2 * action_size]: the means, then the standard deviations."""
        output = self.net(x)
        if self.fixed_sigma is not None:
            return torch.cat([output, torch.full_like(output, self.fixed_sigma)], -1)
        mean, exponent = output.chunk(2, -1)
        return torch.cat([mean, exponent.clamp(-20, 2).exp()], -1)


def policy_head(
    sizes: Sequence[int],
    *,
    sigma_type: str | None = None,
    fixed_sigma_value: float = 0.3,
    **options: Unpack[HeadOptions],
) -> nn.Module:
    """Logits over sizes[-1] actions, or a `GaussianHead` where `sigma_type` is given.

    >>> policy_head([4, 8, 3])(torch.zeros(2, 4)).shape
    torch.Size([2, 3])
    """
    if sigma_type is None:
        check_sigma("fixed", fixed_sigma_value)
        return head(sizes, **options)
    return GaussianHead(
        sizes, sigma_type=sigma_type, fixed_sigma_value=fixed_sigma_value, **options
    )


def check_sigma(sigma_type: str, fixed_sigma_value: float) -> None:
    """ValueError for options that no `GaussianHead` has, also where none is built.

    >>> check_sigma("free", 0.3)
    Traceback (most recent call last):
    ...
    ValueError: sigma_type='free': it is 'conditioned' or 'fixed'
    """
    if sigma_type not in ("conditioned", "fixed"):
        raise ValueError(f"sigma_type={sigma_type!r}: it is 'conditioned' or 'fixed'")
    if not 0 < fixed_sigma_value < math.inf:
        raise ValueError(
            f"fixed_sigma_value={fixed_sigma_value} is no standard deviation: it is a number > 0"
        )
