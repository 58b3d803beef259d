"""Indices of rows: an int, a slice or integers, in one form; and tensors that take them."""

from typing import Any

import torch
from torch import Tensor

Index = int | slice | Tensor  # of rows, checked: a Tensor is int64 [n]
# For dtypes that `index_copy_`, or `index_select` on a GPU, lacks: what carries their bytes.
CARRIERS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.int8,
    torch.float8_e4m3fnuz: torch.int8,
    torch.float8_e5m2: torch.int8,
    torch.float8_e5m2fnuz: torch.int8,
    torch.float8_e8m0fnu: torch.int8,
    torch.float4_e2m1fn_x2: torch.int8,
}


def to_index(rows: Any, stop: int, device: torch.device) -> tuple[Index, torch.Size]:
    """Rows in one form, and the batch that they are; IndexError for what are none.

    stop: the row after the last, to which a slice refers.

    >>> to_index(slice(-2, None), 5, torch.device("cpu"))
    (slice(3, 5, None), torch.Size([2]))
    >>> to_index([[1, 2]], 5, torch.device("cpu"))
    (tensor([1, 2]), torch.Size([1, 2]))
    """
    if not isinstance(rows, Tensor):
        if isinstance(rows, int) and not isinstance(rows, bool):
            return rows, torch.Size()
        if isinstance(rows, slice):
            first, last, step = rows.indices(stop)
            n = len(range(first, last, step))
            if step == 1:
                return slice(first, first + n), torch.Size([n])
            rows = torch.arange(first, first + n * step, step) if n else []
        rows = torch.as_tensor(rows)
        if not rows.numel():
            rows = rows.long()
    if rows.dtype is not torch.int64:
        if rows.is_floating_point() or rows.is_complex() or rows.dtype is torch.bool:
            raise no_integers("rows", rows.dtype)
        rows = rows.long()
    if rows.device != device:
        rows = rows.to(device)
    if rows.dim() == 1:
        return rows, rows.shape
    return (rows.reshape(-1), rows.shape) if rows.dim() else (int(rows), torch.Size())


def no_integers(what: str, dtype: torch.dtype) -> IndexError:
    """The error about an index that is a mask, or has fractions.

    >>> no_integers("rows", torch.bool)
    IndexError('rows are integers, not torch.bool; those where a mask is true are ...
    """
    return IndexError(
        f"{what} are integers, not {dtype}; those where a mask is true are "
        "mask.nonzero().squeeze(1)"
    )


def as_rows(index: Index, device: torch.device) -> Tensor:  # int64 [n]
    """The rows themselves.

    >>> as_rows(slice(3, 5), torch.device("cpu")), as_rows(7, torch.device("cpu"))
    (tensor([3, 4]), tensor([7]))
    """
    if isinstance(index, Tensor):
        return index
    start, stop = (index.start, index.stop) if isinstance(index, slice) else (index, index + 1)
    return torch.arange(start, stop, device=device)


def carried(leaf: Tensor) -> Tensor:
    """The same memory as a dtype whose rows can be read and written anywhere.

    >>> carried(torch.zeros(2, dtype=torch.uint16)).dtype
    torch.int16
    """
    return leaf.view(CARRIERS[leaf.dtype]) if leaf.dtype in CARRIERS else leaf


def selected(leaf: Tensor, rows: Tensor) -> Tensor:
    """A copy of rows, int64 [n].

    >>> selected(torch.tensor([5, 6, 7]), torch.tensor([2, 0]))
    tensor([7, 5])
    """
    if leaf.dtype in CARRIERS:
        return carried(leaf).index_select(0, rows).view(leaf.dtype)
    return leaf.index_select(0, rows)


def bounds(index: Index) -> tuple[int, int]:
    """The lowest and the highest of rows, of which there is at least one.

    >>> bounds(torch.tensor([4, 2])), bounds(slice(3, 5)), bounds(7)
    ((2, 4), (3, 4), (7, 7))
    """
    if isinstance(index, Tensor):
        low, high = index.aminmax()
        return low.item(), high.item()  # type: ignore[return-value]
    return (index.start, index.stop - 1) if isinstance(index, slice) else (index, index)
