"""Rows: reading and writing by index, exactly as a tensor of shape `batch_size` behaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raffia.tensordict import dim_names, kinds, shape
from raffia.tensordict.atomic import all_or_nothing
from raffia.tensordict.lock import locked_error
from raffia.tensordict.memmap import keep_mapped
from raffia.tensordict.node import Container, Names, Node, has_tensors
from raffia.tensordict.views import completed, paired

_SCALAR = torch.zeros((), dtype=torch.bool)


class EllipsisError(IndexError, RuntimeError):
    """An index with two `...`; tensors raise IndexError for it, tensordict RuntimeError.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[3])[..., ...]
    Traceback (most recent call last):
    ...
    raffia.tensordict.index.EllipsisError: An index can only have one ellipsis at most, got...
    """


def indexed_size(batch_size: torch.Size, index: Any) -> torch.Size:
    """The shape of `tensor[index]` for a tensor of shape `batch_size`."""
    return _SCALAR.expand(batch_size)[index].shape


def normalise(index: Any, batch_size: torch.Size) -> Any:
    """The index in a form that means the same on a leaf, which has more dimensions than the batch.

    The ellipsis is written out, boolean masks become the indices of their true elements (found
    once, not once per leaf), lists, ranges and arrays become tensors.
    Raises IndexError for more indices than batch dimensions.
    """
    given = [_plain_part(part) for part in (index if isinstance(index, tuple) else (index,))]
    used = sum([dims_of(part) for part in given])
    missing = len(batch_size) - used
    if missing < 0:
        raise IndexError(
            f"too many indices for tensor of dimension {len(batch_size)}: "
            f"the batch size is {tuple(batch_size)}, the index {index!r}"
        )
    if sum([part is Ellipsis for part in given]) > 1:
        raise EllipsisError(f"An index can only have one ellipsis at most, got {index!r}")
    parts: list[Any] = []
    at = 0
    for part in given:
        if part is Ellipsis:
            parts.extend([slice(None)] * missing)
            at += missing
        elif isinstance(part, Tensor) and part.dtype is torch.bool and part.dim():
            parts.extend(_true_rows(part, batch_size[at : at + part.dim()]))
            at += part.dim()
        else:
            parts.append(part)
            at += dims_of(part)
    return parts[0] if len(parts) == 1 else tuple(parts)


_FROM_LOADER = (  # what torch does with a `Mapping`: it reads it by what it yields, which are rows
    "; to have a DataLoader without batch_size return containers unchanged, pass it "
    "collate_fn=torch.nn.Identity()"
)


def _plain_part(part: Any) -> Any:
    """One part of an index as an int, slice, None, `...`, truth value or tensor."""
    if part is None or part is Ellipsis or isinstance(part, (int, slice, Tensor)):
        return part
    if isinstance(part, np.integer):
        return int(part)
    if isinstance(part, str):
        raise IndexError(
            "a key and an index can't be mixed in one pair of brackets: "
            f"read the entry first, td[{part!r}][...]"
        )
    if not isinstance(part, (list, tuple, range, np.ndarray)):
        raise IndexError(
            "only integers, slices (`:`), ellipsis (`...`), None and long or byte Variables "
            "are valid indices "
            f"(got {type(part).__name__})" + (_FROM_LOADER if isinstance(part, Node) else "")
        )
    if isinstance(part, list) and part and isinstance(part[0], str):
        raise IndexError(
            f"a list of keys is not an index, got {part!r}; "
            f"td.select({', '.join(map(repr, part))}) returns a container with these entries"
        )
    tensor = torch.as_tensor(list(part) if isinstance(part, (range, tuple)) else part)
    return tensor.long() if tensor.numel() == 0 and tensor.dtype.is_floating_point else tensor


def dims_of(part: Any) -> int:
    """The number of dimensions that a part of an index takes."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype is torch.bool else 1


def _true_rows(mask: Tensor, size: torch.Size) -> tuple[Tensor, ...]:
    if mask.shape != size:
        raise IndexError(
            f"the mask has shape {tuple(mask.shape)}, but the dimensions that it indexes have "
            f"shape {tuple(size)}"
        )
    return mask.nonzero(as_tuple=True)


def getitem(td: Container, index: Any) -> Container:
    """Rows of the container: each entry is indexed; integers, slices and `...` give views.

    Raises IndexError for an index out of range or with more parts than batch dimensions.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.arange(6).view(3, 2), batch_size=[3])
    >>> td[1]["a"], td[td["a"][:, 0] > 1].batch_size
    (tensor([2, 3]), torch.Size([2]))
    """
    batch_size = td._batch_size
    kind = index.__class__
    if index is Ellipsis or (kind is tuple and not index):
        return td
    size: torch.Size | None = None  # to be read off an entry
    if not batch_size:
        index = _scalar_index(index)
    elif kind is int:
        rows = batch_size[0]
        if not -rows <= index < rows:
            raise IndexError(f"index {index} is out of bounds for dimension 0 with size {rows}")
        size = batch_size[1:]
    elif kind is slice:
        if index == _ALL:
            return td
        size = torch.Size((len(range(*index.indices(batch_size[0]))), *batch_size[1:]))
    elif kind is Tensor and index.dtype is torch.int64:
        size = index.shape + batch_size[1:]
    else:
        index = normalise(index, batch_size)
        if index.__class__ is not Tensor:
            parts = index if isinstance(index, tuple) else (index,)
            if all([p.__class__ is slice and p == _ALL for p in parts]):
                return td
    out = td._index(index, len(batch_size), size)
    if td._names is not None:
        dim_names.store(out, _indexed_names(td._names, index))
    if size is not None and kind is Tensor:  # mostly a copy
        return out
    return keep_mapped(out, td) if td._locked else out


_ALL = slice(None)


def _scalar_index(index: Any) -> Any:
    """Check an index into a container without batch dimensions: None, `...` or one truth value."""
    parts = [
        part for part in (index if isinstance(index, tuple) else (index,)) if part is not Ellipsis
    ]
    for part in parts:
        if not (part is None or isinstance(part, bool) or _is_flag(part)):
            raise RuntimeError(
                "indexing a tensordict with td.batch_dims==0 is not permitted. "
                f"Got index {index!r}."
            )
    return tuple(parts)


def _is_flag(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype is torch.bool and not part.dim()


def _indexed_names(names: list[str | None], index: Any) -> Names:
    """Names after indexing: slices keep theirs, integers drop it, new dimensions have none."""
    if index.__class__ is int:
        return dim_names.given(names[1:])
    parts = list(index) if isinstance(index, tuple) else [index]
    out: list[str | None] = []
    group: list[str | None] = []  # names of the dimensions that arrays make
    where, arrays = [], 0  # positions of arrays and of truth values, which are arrays to torch
    source = iter(names)
    for part in parts:
        if part is None:
            out.append(None)
        elif isinstance(part, slice):
            out.append(next(source))
        elif isinstance(part, bool) or _is_flag(part) or isinstance(part, Tensor) and part.dim():
            where.append(len(out))
            if isinstance(part, bool) or part.dtype is torch.bool:
                group = group or [None]
                continue
            name, width = next(source), part.dim()
            own = [name] if width == 1 else _spread(name, part.shape)
            group = own if arrays == 0 else [None] * max(width, len(group))
            arrays += 1
        else:
            next(source)
    at = where[0] if where and where[0] == where[-1] else 0
    return dim_names.given([*out[:at], *group, *out[at:], *source])


def _spread(name: str | None, shape: torch.Size) -> list[str | None]:
    """Names of the dimensions that a tensor of this shape makes of one: only one of them has it."""
    long = [dim for dim, size in enumerate(shape) if size != 1]
    return [name if [dim] == long else None for dim in range(len(shape))]


def setitem(td: Any, index: Any, value: Any) -> None:
    """Write into rows of the container: `td[index] = value`.

    value: a container or dict whose batch size is that of the rows (or expands to it), or a number
        or tensor for all entries.
    Entries that are new are created, with zeros in the other rows.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.zeros(3), batch_size=[3])
    >>> td[1] = TensorDict(a=1.0, b=5)
    >>> td["a"], td["b"]
    (tensor([0., 1., 0.]), tensor([0, 5, 0]))
    """
    batch_size = td._batch_size
    if not batch_size and index is not Ellipsis and index != ():
        index = _scalar_index(index)
    else:
        index = normalise(index, batch_size)
    if isinstance(value, (Node, Mapping)):
        if -1 in batch_size:  # of a lazy stack
            size = td._index(index, len(batch_size), None)._batch_size
        else:
            size = indexed_size(batch_size, index)
        if not isinstance(value, Node):
            value = td._plain(value, batch_size=size, device=td.device)
        elif value._batch_size != size:
            value = _expanded(td, value, size, index)
        nodes = td._children() if td._lazy else [td]
        for name in value.keys() if td._locked else ():
            if all([node._peek_str(name) is None for node in nodes]):
                raise locked_error(td, name)
    td._set_index(index, value, len(batch_size))


def _expanded(td: Any, value: Any, size: torch.Size, index: Any) -> Any:
    """A container for rows of batch size `size`; one row is written into all of a lazy stack's."""
    given, leaves = value._batch_size, value._leaves([])
    is_whole = all([leaf.shape[: len(size)] == size for leaf in leaves])
    if td._lazy and len(given) <= len(size) and not (is_whole and leaves):
        if all([n in (1, m) for n, m in zip(reversed(given), reversed(size), strict=False)]):
            return value.expand(size)
    if given == size[: len(given)] and is_whole:
        value = value.copy()
        value.batch_size = size
        return value
    if not given or len(given) >= len(size) or given != size[len(size) - len(given) :]:
        raise RuntimeError(
            f"indexed destination TensorDict batch size is {size} "
            f"(batch_size = {td._batch_size}, index = {index!r}), "
            f"which differs from the source batch size {given}"
        )
    return value.expand(size)


def set_index(td: Any, index: Any, value: Any, ndim: int) -> None:
    """Write `value` into rows of a dense node; `index`, normalised, covers `ndim` dimensions."""
    entries = td._entries()
    if not isinstance(value, Node) or value._is_data():
        if not isinstance(
            value, (Tensor, np.ndarray, list, tuple, int, float, complex, np.generic)
        ):
            raise TypeError(
                "rows can be set to a container, a dict, a tensor or a number, "
                f"not to {type(value).__name__} {value!r}"
            )
        for name, mine in entries.items():
            if not isinstance(mine, Node):
                _set_rows(mine, index, value, name)
            elif not isinstance(mine, Tensor):  # an UnbatchedTensor has no rows
                mine._set_index(index, value, ndim)
        return
    rows_ndim = len(value._batch_size) - len(td._batch_size) + ndim
    for name, theirs in value._entries().items():
        mine = entries.get(name)
        if mine is None:
            td._set_str(name, _zeros_for(td, theirs, rows_ndim, ndim))
            mine = td._get_str(name)  # which may be a copy, on the device or with the names of `td`
        if isinstance(mine, Node):
            replaced = mine._set_index(index, theirs, ndim)
            if replaced is not None:
                td._replace_str(name, replaced)
        else:
            _set_rows(mine, index, theirs, name)


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


def _set_rows(leaf: Tensor, index: Any, value: Any, name: str) -> None:
    try:
        try:
            leaf[index] = value
        except NotImplementedError:  # as for uint16, whose bytes an integer that torch can set has
            integer = INTEGERS[leaf.itemsize]
            own = torch.as_tensor(value, device=leaf.device).to(leaf.dtype)
            leaf.view(integer)[index] = own.view(integer)
    except (RuntimeError, ValueError) as error:
        shape = getattr(value, "shape", None)
        raise RuntimeError(
            f"rows of entry {name!r} of shape {leaf.shape} can't be set to a value of shape "
            f"{shape}: {error}"
        ) from error
    except TypeError as error:
        if not isinstance(value, Node):
            raise
        raise TypeError(
            f"entry {name!r} is a tensor; its rows can't be set to a {type(value).__name__}"
        ) from error


def _zeros_for(td: Any, theirs: Any, rows_ndim: int, ndim: int) -> Any:
    """A new entry for all rows, zero where nothing is written."""
    shape = td._batch_size[:ndim] + theirs.shape[rows_ndim:]
    if not isinstance(theirs, Node):
        return theirs.new_zeros(shape)
    if theirs._is_data():
        return theirs._filled(shape)
    like: Any = theirs if isinstance(theirs, kinds.TensorClass) else td
    return like._new({}, shape)


def iterate(td: Container) -> Iterator[Container]:
    """The rows along the first dimension, one after the other.

    >>> from raffia import TensorDict
    >>> [row["a"].item() for row in TensorDict(a=torch.arange(3), batch_size=[3])]
    [0, 1, 2]
    """
    if not td._batch_size:
        raise TypeError(
            "iteration over a 0-d container; "
            "td.keys(), td.values() and td.items() go over its entries"
        )
    return iter(td.unbind(0))


def length(td: Any) -> int:
    """The size of the first batch dimension, 0 without one.

    >>> from raffia import TensorDict
    >>> len(TensorDict(batch_size=[3, 4]))
    3
    """
    return td._batch_size[0] if td._batch_size else 0


def expand_right(mask: Tensor, leaf: Tensor) -> Tensor:
    """`mask` with singleton dimensions at its end: it broadcasts over the leaf's own dimensions."""
    ndim = mask.dim()
    extra = leaf.dim() - ndim
    return mask.reshape(mask.shape + (1,) * extra) if ndim and extra > 0 else mask


def where(
    td: Container,
    condition: Tensor,
    other: Any,
    *,
    out: Container | None = None,
    pad: float | bool | None = None,
    update_batch_size: bool = False,
) -> Container:
    """This container where `condition` is true and `other` (container, number, tensor) elsewhere.

    condition: its shape broadcasts with the batch size.
    out: container that the result is written to.
    pad: stands for entries that only one of the two has (else KeyError).

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.ones(2), batch_size=[2]).where(torch.tensor([True, False]), 0.0)["a"]
    tensor([1., 0.])
    """
    if pad is not None and isinstance(other, Node):
        td, other = completed(td, other, lambda leaf: torch.full_like(leaf, pad))
    return written(td._where(condition, other), out, update_batch_size)


def written(result: Container, out: Container | None, update_batch_size: bool) -> Container:
    """The return value of `where`: its result, or `out` after the result was written to it."""
    if out is None:
        return result
    if update_batch_size:
        out.batch_size = result._batch_size
    if out._batch_size != result._batch_size:
        raise RuntimeError(
            f"where: out has batch size {out._batch_size}, but the result has "
            f"{result._batch_size}; pass update_batch_size=True"
        )
    if not out._locked:
        _replace_values(out, result)
    return out.update(result, inplace=not update_batch_size)


def _replace_values(out: Any, result: Any) -> None:
    """Store the values that are not tensors; one for all rows can't become one for each."""
    for node, name, mine, value in paired(out, result):
        if isinstance(value, Node) and isinstance(mine, Node) and not isinstance(mine, Tensor):
            if mine.__class__ is not value.__class__:
                node._set_str(name, value)


def chosen(td: Any, condition: Tensor, other: Any) -> Any:
    """`where` of a dense node."""
    if not isinstance(other, Node):
        leaves = td._leaves([])
        found = zip(td._spread(condition, []), leaves, strict=True)
        return td._rebuild(iter([torch.where(c, leaf, other) for c, leaf in found]))
    entries = {}
    mine, theirs = td._entries(), other._entries()
    for name in dict.fromkeys([*mine, *theirs]):
        a, b = mine.get(name), theirs.get(name)
        if a is None or b is None:
            entries[name] = a if b is None else b
            if has_tensors(entries[name]):
                raise KeyError(
                    f"where: only one of the two containers has {name!r}; pass pad=value to use "
                    "that value for the other"
                )
        elif isinstance(a, Node):
            entries[name] = a._where(condition, b)
        else:
            entries[name] = torch.where(expand_right(condition, a), a, b)
    ndim = len(td._batch_size)
    size = td._batch_size
    if condition.dim() <= ndim and size[: condition.dim()] != condition.shape:
        size = torch.broadcast_shapes(condition.shape + (1,) * (ndim - condition.dim()), size)
    return td._new(entries, size, td._names)


def masked_fill(td: Container, mask: Tensor, value: float | bool) -> Container:
    """A container with `value` in all entries where `mask` is true.

    mask: shape of the batch size, or broadcast with it.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.ones(2), batch_size=[2]).masked_fill(torch.tensor([True, False]), 0)["a"]
    tensor([0., 1.])
    """
    leaves = td._leaves([])
    masks = _masks(td, mask)
    filled = [leaf.masked_fill(m, value) for leaf, m in zip(leaves, masks, strict=True)]
    return td._rebuild(iter(filled))


def _masks(td: Any, mask: Tensor) -> list[Tensor]:
    """The mask over the batch dimensions for each leaf, in a form that broadcasts with the leaf."""
    size = td._batch_size
    fits = [m in (1, n) for m, n in zip(mask.shape, size, strict=False)]
    if mask.dim() > len(size) or not all(fits):
        raise RuntimeError(
            f"the mask has shape {tuple(mask.shape)}, but the first batch dimensions do not: the "
            f"batch size is {tuple(size)}"
        )
    return td._spread(mask, [])


def masked_fill_(td: Container, mask: Tensor, value: float | bool) -> Container:
    """Write `value` into all entries where `mask` is true.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.ones(2), batch_size=[2])
    >>> td.masked_fill_(torch.tensor([True, False]), 0)["a"]
    tensor([0., 1.])
    """
    for leaf, m in zip(td._leaves([]), _masks(td, mask), strict=True):
        leaf.masked_fill_(m, value)
    return td


def masked_select(td: Container, mask: Tensor, *, inplace: bool = False) -> Container:
    """The rows where `mask` is true.

    mask: shape of the first batch dimensions.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.arange(3), batch_size=[3])
    >>> td.masked_select(torch.tensor([True, False, True]))["a"]
    tensor([0, 2])
    """
    out = getitem(td, mask)
    if not inplace:
        # Rows of a lazy stack may be its members; by a mask of several dimensions they are copies.
        lazy: Any = td if td._lazy else None
        return out.clone() if lazy is not None and mask.dim() <= max(1, lazy.stack_dim) else out
    if td._locked:
        raise locked_error(td)
    with all_or_nothing(td):
        td._set_batch_size(torch.Size())
        for name, value in out._entries().items():
            td._replace_str(name, value)
        td._set_batch_size(out._batch_size)
    return td


def gather(
    td: Container, dim: int, index: Tensor, out: Container | None = None, *, inplace: bool = False
) -> Container:
    """Gather rows along `dim`: `out[i, j] = td[index[i, j], j]` for dim = 0.

    index: as many dimensions as the batch size.
    out: container of the size of `index` that the result is written to.
    inplace: change this container instead of making another one.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.arange(6).view(2, 3), batch_size=[2, 3])
    >>> td.gather(1, torch.tensor([[2], [0]]))["a"]
    tensor([[2],
            [3]])
    """
    if inplace and out is not None:
        raise ValueError("gather: pass out or inplace=True, not both")
    ndim = len(td._batch_size)
    if index.dim() != ndim:
        raise RuntimeError(
            f"gather: the index has shape {tuple(index.shape)} and the batch size is "
            f"{tuple(td._batch_size)}, but both need the same number of dimensions"
        )
    if not -ndim <= dim < ndim:
        raise RuntimeError(
            f"gather: dim {dim} is out of range for batch size {tuple(td._batch_size)}"
        )
    dim = dim % ndim

    def rows(leaf: Tensor) -> Tensor:
        extra = leaf.shape[ndim:]
        return torch.gather(leaf, dim, expand_right(index, leaf).expand(index.shape + extra))

    result = td._batched(rows, ndim, index.shape, td._names)
    if inplace:
        return shape.replaced_by(td, result, "gather")
    return result if out is None else out.update_(result)


def copy_at_(td: Container, tensordict: Node, idx: Any, non_blocking: bool = False) -> Container:
    """Write a container into the rows `idx`; all keys must be there.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2), batch_size=[2]).copy_at_(TensorDict(a=1.0), 0)["a"]
    tensor([1., 0.])
    """
    return td.update_at_(tensordict, idx, non_blocking=non_blocking)


def sub_tensordict(td: Container, idx: Any) -> Container:
    """A view of the rows `idx` that holds for any index; entries set in it are set in `td`.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.zeros(3), batch_size=[3])
    >>> td._get_sub_tensordict(torch.tensor([0, 2])).update({"a": torch.ones(2)}).batch_size
    torch.Size([2])
    >>> td["a"]
    tensor([1., 0., 1.])
    """
    view: Any = kinds.SubTensorDict(td, idx)
    return view
