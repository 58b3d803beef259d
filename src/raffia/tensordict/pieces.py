"""A container in pieces along a batch dimension; views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from raffia.tensordict import dim_names
from raffia.tensordict.build import batch_dim
from raffia.tensordict.dim_names import given
from raffia.tensordict.memmap import keep_mapped
from raffia.tensordict.node import Container, Entries, Names, Node


def pieces(
    td: Any,
    cut: Callable[[Tensor], Sequence[Tensor]],
    ndim: int,
    sizes: list[torch.Size],
    rows: list[Any],
    names: Names,
) -> list[Any]:
    """One container for each piece that `cut` makes of a leaf.

    ndim, sizes: the first `ndim` dimensions become `sizes[i]` in piece i.
    rows: the index that takes out piece i, for nodes that are not plain containers.
    """
    columns: list[Sequence[Any]] = []
    for value in td._entries().values():
        if not isinstance(value, Node):
            columns.append(cut(value))
        elif type(value) is td._plain:
            below = (
                None
                if names is None and value._names is None
                else [*(names or [None] * len(sizes[0])), *dim_names.get_names(value)[ndim:]]
            )
            columns.append(pieces(value, cut, ndim, sizes, rows, below))
        else:
            columns.append(
                [value._index(row, ndim, size) for row, size in zip(rows, sizes, strict=True)]
            )
    keys = list(td._entries())
    extra = td._batch_size[ndim:]
    if not columns:
        return [td._new({}, size + extra, names) for size in sizes]
    new = td._new
    if extra:
        sizes = [size + extra for size in sizes]
    entries: list[Entries] = [
        dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)
    ]
    out = [new(row, size, names) for row, size in zip(entries, sizes, strict=True)]
    return out if names is None else [dim_names.passed_on(piece) for piece in out]


def unbind(td: Container, dim: int = 0) -> tuple[Container, ...]:
    """The rows along `dim`, each without that dimension; views.

    >>> from raffia import TensorDict
    >>> [row["a"].item() for row in TensorDict(a=torch.arange(2), batch_size=[2]).unbind(0)]
    [0, 1]
    """
    dim = batch_dim(td, dim)
    size = td._batch_size
    new = torch.Size((*size[:dim], *size[dim + 1 :]))
    names = None if td._names is None else given([*td._names[:dim], *td._names[dim + 1 :]])
    lead = [slice(None)] * dim
    rows: list[Any] = [(*lead, i) for i in range(size[dim])] if dim else list(range(size[dim]))
    out = pieces(td, lambda leaf: leaf.unbind(dim), len(size), [new] * size[dim], rows, names)
    return tuple([keep_mapped(row, td) for row in out] if td._locked else out)


def split(td: Container, split_size: int | Sequence[int], dim: int = 0) -> tuple[Container, ...]:
    """Consecutive pieces along `dim`; views.

    split_size: rows in each piece (the last may be smaller), or a list of the sizes of all pieces.

    >>> from raffia import TensorDict
    >>> [part["a"].tolist() for part in TensorDict(a=torch.arange(5), batch_size=[5]).split(2)]
    [[0, 1], [2, 3], [4]]
    """
    dim = batch_dim(td, dim)
    total = td._batch_size[dim]
    if isinstance(split_size, int):
        if split_size <= 0:
            raise ValueError(f"split: split_size must be positive, got {split_size}.")
        lengths = [min(split_size, total - at) for at in range(0, total, split_size)] or [0]
    else:
        lengths = list(split_size)
        if not all(isinstance(n, int) for n in lengths):
            raise TypeError(f"split: split_size is an int or a list of ints, got {split_size!r}")
        if sum(lengths) != total or any(n < 0 for n in lengths):
            raise RuntimeError(
                f"split_with_sizes expects split_sizes to sum exactly to {total} "
                f"(input tensor's size at dimension {dim}), "
                f"but got split_sizes={lengths}"
            )
    return td._cut(lengths, dim)


def cut(td: Container, lengths: list[int], dim: int) -> tuple[Container, ...]:
    """Consecutive pieces of these lengths along `dim`, which together are all rows."""
    size = td._batch_size
    sizes = [torch.Size((*size[:dim], n, *size[dim + 1 :])) for n in lengths]
    rows: list[Any] = []
    at = 0
    for n in lengths:
        rows.append((*[slice(None)] * dim, slice(at, at + n)))
        at += n

    def parts(leaf: Tensor) -> Sequence[Tensor]:
        return leaf.split_with_sizes(lengths, dim)  # half the time of `split`, which is in Python

    out = pieces(td, parts, len(size), sizes, rows, td._names)
    return tuple([keep_mapped(part, td).lock_() for part in out] if td._locked else out)


def chunk(td: Container, chunks: int, dim: int = 0) -> tuple[Container, ...]:
    """Split into at most `chunks` equal pieces along `dim` (the last may be smaller); views.

    >>> from raffia import TensorDict
    >>> [part["a"].tolist() for part in TensorDict(a=torch.arange(5), batch_size=[5]).chunk(2)]
    [[0, 1, 2], [3, 4]]
    """
    if chunks < 1:
        raise ValueError(f"chunks must be a strictly positive integer, got {chunks}.")
    dim = batch_dim(td, dim)
    total = td._batch_size[dim]
    return split(td, max(-(-total // chunks), 1), dim)


def tensor_split(td: Container, indices_or_sections: Any, dim: int = 0) -> tuple[Container, ...]:
    """Pieces along `dim`: so many of nearly equal size, or cut at the given indices; views.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.arange(5), batch_size=[5])
    >>> [part["a"].tolist() for part in td.tensor_split([1, 3])]
    [[0], [1, 2], [3, 4]]
    """
    dim = batch_dim(td, dim)
    total = td._batch_size[dim]
    if indices_or_sections.__class__ is int and indices_or_sections > 0:
        least, longer = divmod(total, indices_or_sections)
        lengths = [least + 1] * longer + [least] * (indices_or_sections - longer)
    else:
        parts = torch.empty(total, device="meta").tensor_split(indices_or_sections)
        lengths = [part.shape[0] for part in parts]
    if sum(lengths) == total:
        return td._cut(lengths, dim)
    bounds = [0, *(int(i) for i in indices_or_sections), total]
    lead = [slice(None)] * dim
    return tuple([td[(*lead, slice(a, b))] for a, b in zip(bounds, bounds[1:], strict=False)])
