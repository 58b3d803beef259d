"""Positions as angles: queries and keys are rotated, so that attention depends on distances.

Source: Su, Lu, Pan, Murtadha, Wen & Liu (2021), "RoFormer", equation 34; the first half of a head's
numbers is paired with the second, as in GPT-NeoX and Llama.
"""

from __future__ import annotations

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]  # cosine and sine


def rotation(positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rotation:
    """Cosines and sines [..., head_dim / 2] of the angles at positions [...].

        angle_i(p) = p * 10000^(-2 i / head_dim)

    Computed in float32 at least: bfloat16 has no room for the angle of position 500.

    >>> cosine, sine = rotation(torch.tensor([0, 1]), head_dim=2, dtype=torch.float32)
    >>> cosine, sine
    (tensor([[1.0000], [0.5403]]), tensor([[0.0000], [0.8415]]))
    """
    wide = torch.promote_types(dtype, torch.float32)
    pair = torch.arange(0, head_dim, 2, device=positions.device, dtype=wide)
    angle = positions.to(wide).unsqueeze(-1) * 10000.0 ** (-pair / head_dim)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """x [..., F] with each pair (x_i, x_{i + F/2}) rotated by its angle.

    >>> rotate(torch.tensor([1.0, 0.0]), rotation(torch.tensor(1), 2, torch.float32))
    tensor([0.5403, 0.8415])
    """
    cosine, sine = by
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
