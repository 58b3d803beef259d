"""Pictures made smaller: each new pixel is the mean of the area that it covers."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raffia.hints import check_range

LARGEST = 1 << 23  # pixels: 255 times as many still fit into 32 bits


@functools.cache
def _kernels() -> ModuleType:
    """The compiled loop; imported at first use, and numba with it."""
    from raffia.envs import area_kernel

    return area_kernel


def area(
    picture: Tensor,  # uint8 [H, W, C]
    height: int,
    width: int,
) -> Tensor:
    """The picture in another size, channels first: uint8 [C, height, width].

    A pixel that lies in two new ones counts in each with the fraction of it that lies there. The
    sums are of whole numbers and halves are rounded up, so that every machine gives the same
    picture.

    >>> picture = torch.tensor([[0, 0, 9, 90], [0, 2, 9, 90]], dtype=torch.uint8)
    >>> area(picture.unsqueeze(-1), 1, 2)
    tensor([[[ 1, 50]]], dtype=torch.uint8)
    >>> area(picture.unsqueeze(-1), 1, 3)  # a third of the second pixel, two thirds of the third
    tensor([[[ 0,  5, 70]]], dtype=torch.uint8)
    """
    if picture.ndim != 3 or picture.dtype != torch.uint8 or 0 in picture.shape:
        raise ValueError(
            f"a picture must be uint8 [H, W, C]; got {picture.dtype} {list(picture.shape)}. A "
            "grey one has C = 1: area(grey.unsqueeze(-1), height, width)"
        )
    check_range("height", height, 1)
    check_range("width", width, 1)
    if picture.shape[0] * picture.shape[1] > LARGEST:
        raise ValueError(f"a picture of {list(picture.shape)} has more than {LARGEST} pixels")
    channels = picture.shape[2]
    target = torch.empty(channels, height, width, dtype=torch.uint8, device="cpu")
    lines = picture.contiguous().flatten(1).numpy()
    _kernels().area(lines, channels, *taps(picture.shape[1], width), target.numpy())
    return target


@functools.lru_cache(maxsize=16)
def overlaps(size: int, new_size: int) -> Tensor:
    """The overlap of each old pixel with each new one: [new_size, size] float64, whole numbers.

    The unit is 1 / new_size of an old pixel, which is 1 / size of a new one.

    >>> overlaps(3, 2)
    tensor([[2., 1., 0.],
            [0., 1., 2.]], dtype=torch.float64)
    """
    old = torch.arange(size + 1, dtype=torch.float64, device="cpu") * new_size
    new = (torch.arange(new_size + 1, dtype=torch.float64, device="cpu") * size).unsqueeze(1)
    shared = torch.minimum(old[1:], new[1:]) - torch.maximum(old[:-1], new[:-1])
    return shared.clamp_min(0)


@functools.lru_cache(maxsize=16)
def taps(size: int, new_size: int) -> tuple[Any, Any]:
    """Overlaps without the zeros: the first old pixel of each new one, and the fractions from it
    on.

    Arrays int64 [new_size] and int32 [taps, new_size]: as many taps as the fullest one needs.

    >>> first, fractions = taps(3, 2)
    >>> first.tolist(), fractions.tolist()
    ([0, 1], [[2, 1], [1, 2]])
    """
    first = np.arange(new_size) * size // new_size
    last = (np.arange(1, new_size + 1) * size - 1) // new_size
    old = first + np.arange(int((last - first).max()) + 1)[:, None]
    fractions = overlaps(size, new_size).numpy()
    inside = np.minimum(old, size - 1)
    found = np.where(old < size, fractions[np.arange(new_size), inside], 0)
    return first, found.astype(np.int32)
