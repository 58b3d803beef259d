"""Tensors as kernels and indices need them: of one dtype, on one device, side by side in memory."""

import torch
from torch import Tensor


def plain(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tensor itself where it is so already, else a copy.

    >>> plain(torch.ones(2, 3).t(), torch.float32, torch.device("cpu")).is_contiguous()
    True
    """
    if tensor.dtype == dtype and tensor.device == device and is_plain(tensor):
        return tensor
    return tensor.to(device, dtype).resolve_conj().resolve_neg().contiguous()


def is_plain(tensor: Tensor) -> bool:
    """Whether memory holds the values as they are: no strides, no sign or conjugate to come."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
