"""Constants on the device and of the dtype of the tensors that they are used with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def constant(
    value: Any,  # a number, a sequence of numbers, or a tensor
    like: Tensor,
) -> Tensor:
    """Numbers as a tensor of the dtype and device of another tensor.

    On a GPU kernels fill it in: a CUDA graph cannot record a copy from the CPU's memory.

    >>> constant([1, 2], torch.zeros(3, dtype=torch.float64))
    tensor([1., 2.], dtype=torch.float64)
    """
    if like.device.type == "cpu" or isinstance(value, Tensor) and value.device == like.device:
        return torch.as_tensor(value, dtype=like.dtype, device=like.device)
    numbers = value.tolist() if isinstance(value, Tensor) else value
    if isinstance(numbers, Sequence):
        return torch.stack([constant(number, like) for number in numbers])
    return like.new_full((), numbers)
