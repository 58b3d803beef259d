"""Groups of equal rows of a batch, for work done once for each group in one pass."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raffia.data import kernels


class RowGroups(NamedTuple):
    """Items of a batch by their value; groups are numbered in order of first appearance.

    Without repetitions `distinct` is the tensor of the values itself.
    """

    distinct: Tensor  # int64 [G], the value of each group
    group: Tensor  # int64 [N], in range(G)
    first: Tensor  # int64 [G], in range(N): the first item of each group
    last: Tensor  # int64 [G], in range(N): the last one


def groups(values: Tensor) -> RowGroups:
    """Group equal values: the distinct ones, the group of each, and where each is first and last.

    values: int64 [N], any numbers.

    >>> distinct, group, first, last = groups(torch.tensor([5, 3, 5, 5]))
    >>> distinct, group
    (tensor([5, 3]), tensor([0, 1, 0, 0]))
    >>> first, last
    (tensor([0, 1]), tensor([3, 1]))
    """
    if not values.is_cpu:
        distinct, group, first, last = groups(values.cpu())
        group = group.to(values.device)
        if first is last:  # nothing is there twice
            return RowGroups(values, group, group, group)
        return RowGroups(
            distinct.to(values.device), group, first.to(values.device), last.to(values.device)
        )
    values = values.contiguous()
    n = len(values)
    size = 2 << max(n - 1, 1).bit_length()  # slots, a power of two, at least twice n
    slots = np.zeros(size, np.int64)
    distinct, group, first, last = (torch.empty_like(values) for _ in range(4))
    found = kernels.groups.groups(
        n,
        values.data_ptr(),
        slots.__array_interface__["data"][0],
        65 - size.bit_length(),
        distinct.data_ptr(),
        group.data_ptr(),
        first.data_ptr(),
        last.data_ptr(),
    )
    if found == n:
        return RowGroups(values, group, group, group)
    return RowGroups(distinct[:found], group, first[:found], last[:found])
