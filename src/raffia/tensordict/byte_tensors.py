"""Bytes as a tensor, and back: text that travels or is saved among tensors."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["bytes_to_tensor", "tensor_to_bytes"]


def bytes_to_tensor(data: bytes) -> Tensor:  # uint8 [len(data)]
    """The bytes in memory of their own.

    >>> bytes_to_tensor(b"abc"), bytes_to_tensor(b"").shape
    (tensor([97, 98, 99], dtype=torch.uint8), torch.Size([0]))
    """
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def tensor_to_bytes(tensor: Tensor) -> bytes:
    """The memory of a tensor, of any device, as bytes.

    >>> tensor_to_bytes(bytes_to_tensor(b"abc"))
    b'abc'
    """
    return tensor.cpu().numpy().tobytes()
