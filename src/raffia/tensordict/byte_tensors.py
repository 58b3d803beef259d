"""Bytes as tensors, and back: text that travels among tensors, and tensors that lie in a block."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def bytes_to_tensor(data: bytes) -> Tensor:  # uint8 [len(data)]
    """A uint8 tensor with a copy of the bytes.

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


def view_of(block: Tensor, at: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor that begins at a byte of a block.

    >>> view_of(bytes_to_tensor(b"abcd"), 2, torch.uint8, (2, 1))
    tensor([[ 99],
            [100]], dtype=torch.uint8)
    """
    return block[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
