"""Nested tensors of strided layout: the sizes of their rows, and views of values that lie in a row.

The sizes are a tensor of integers with a row for each row, as torch keeps them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def checked_sizes(sizes: Tensor) -> Tensor:
    """The sizes of rows, on the CPU and copied; ValueError if no tensor has such rows.

    >>> checked_sizes(torch.tensor([[2, 3], [4, 3]])).tolist()
    [[2, 3], [4, 3]]
    """
    if sizes.dim() != 2 or sizes.is_floating_point() or sum_of_rows(sizes) < 0 or (sizes < 0).any():
        raise ValueError(
            "the sizes of the rows of a nested tensor must be a tensor of integers with a row for "
            f"each, such as torch.tensor([[2, 3], [4, 3]]), got {sizes}"
        )
    return sizes.to("cpu", torch.int64, copy=True)


def sum_of_rows(sizes: Tensor) -> int:
    """The number of elements of rows of these sizes; -1 for sizes that no tensor has.

    >>> sum_of_rows(torch.tensor([[2, 3], [4, 3]]))
    18
    """
    rows = sizes.tolist()
    if any([math.prod([max(n, 1) for n in row]) >= 2**63 for row in rows]):
        return -1
    return sum([math.prod(row) for row in rows])


def shape_of_rows(sizes: Tensor) -> torch.Size:
    """The shape of a nested tensor of strided layout; -1 where its rows differ.

    >>> shape_of_rows(torch.tensor([[2, 3], [4, 3]]))
    torch.Size([2, -1, 3])
    """
    if sizes.dim() < 2:  # of one without rows
        return torch.Size([0])
    columns = [int(n[0]) if len(n) and (n == n[0]).all() else -1 for n in sizes.unbind(1)]
    return torch.Size([len(sizes), *columns])


def view_of_rows(values: Tensor, sizes: Tensor) -> Tensor:
    """The nested tensor whose rows, of these sizes, follow each other in `values`.

    >>> view_of_rows(torch.arange(3.0), torch.tensor([[1], [2]])).unbind()
    (tensor([0.]), tensor([1., 2.]))
    """
    if not len(sizes):  # torch has no view for these
        return torch.nested.nested_tensor([], dtype=values.dtype, device=values.device)
    numels = sizes.prod(1)
    strides = torch.ones_like(sizes)
    if sizes.shape[1] > 1:
        strides[:, :-1] = sizes[:, 1:].flip(1).cumprod(1).flip(1)
    view: Any = torch._nested_view_from_buffer
    out: Tensor = view(values, sizes, strides, numels.cumsum(0) - numels)
    return out
