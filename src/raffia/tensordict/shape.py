"""Shape operations on the batch dimensions; the entries' own dimensions stay as they are."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from raffia.tensordict.build import as_size, batch_dim
from raffia.tensordict.dim_names import given
from raffia.tensordict.lock import locked_error
from raffia.tensordict.node import BatchSize, Container, LeafFn, Names, Node, Op


def _sizes(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`f(2, 3)`, `f((2, 3))` and `f([2, 3])` mean the same."""
    if len(args) == 1 and not isinstance(args[0], (int, torch.SymInt)):
        return tuple(args[0])
    return args


def _done(out: Any, td: Any, origin: tuple[Any, ...]) -> Any:
    """Mark where `out` came from, for use in a `with` statement, and keep it locked if `td` is."""
    out._origin = (origin[0], weakref.ref(td), *origin[1:])
    if td._locked:
        out.lock_()
        out._origin = (origin[0], weakref.ref(td), *origin[1:])
    return out


def _same(td: Any) -> Any:
    """The container itself, where nothing is to be done; `with` has nothing to write back."""
    td._origin = ("same",)
    return td


def replaced_by(td: Container, made: Any, what: str) -> Container:
    """Adopt the entries and batch sizes of `made`; nested containers stay the same objects."""
    if td._locked:
        raise locked_error(td)
    pairs: list[tuple[Any, Any]] = [(td, made)]
    for node, source in pairs:  # grows on the way
        if type(node) is not td._plain:
            raise NotImplementedError(
                f"{what}(inplace=True) is not possible with a {type(node).__name__}; "
                f"td = td.{what}(...) makes a new container"
            )
        for name, value in node._entries().items():
            if isinstance(value, Node) and not value._is_data():
                theirs = source._get_str(name)
                pairs.append((getattr(value, "_td", value), getattr(theirs, "_td", theirs)))
    for node, source in pairs:
        for name, value in node._entries().items():
            if not isinstance(value, Node) or value._is_data():
                node._replace_str(name, source._get_str(name))
        node._batch_size, node._names = source._batch_size, source._names
    return td


def view(
    td: Container,
    *shape: int | Sequence[int] | torch.dtype,
    size: BatchSize = None,
    batch_size: BatchSize = None,
) -> Container:
    """View the entries with another batch shape of as many rows; never a copy.

    A dtype in place of the shape views the entries as that dtype; this can change the last
    dimension of an entry, and `batch_size` is then the batch size of the result.
    Raises RuntimeError if the number of rows differs or an entry can't be viewed so (`reshape`
    copies then).
    In a `with` statement, changes are written back at the end.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(4, 3), batch_size=[4]).view(2, -1)["a"].shape
    torch.Size([2, 2, 3])
    """
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        return td.apply(lambda leaf: leaf.view(shape[0]), batch_size=batch_size)
    wanted = size if size is not None else batch_size if batch_size is not None else _sizes(shape)
    new = _filled_in(wanted, td._batch_size)
    return _resized(td, "view", new)


def reshape(
    td: Container, *shape: int | Sequence[int], size: BatchSize = None, inplace: bool = False
) -> Container:
    """A container with another batch shape of as many rows; copies only where a view can't be.

    inplace: change this container instead of making another one.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(4, 3), batch_size=[4]).reshape(2, 2).batch_size
    torch.Size([2, 2])
    """
    new = _filled_in(_sizes(shape) if size is None else size, td._batch_size)
    if inplace:
        return replaced_by(td, reshape(td, size=new), "reshape")
    return _resized(td, "reshape", new)


def _resized(td: Any, name: str, new: torch.Size) -> Any:
    """The container after `view` or `reshape`."""
    if new == td._batch_size:
        return _same(td)
    return _changed(td, _resizer(name, len(td._batch_size), new), new, None, (name, new))


def _changed(
    td: Any,
    fn: LeafFn,
    new: torch.Size,
    names: Names,
    op: Op,
    origin: tuple[Any, ...] = ("reshape",),
) -> Any:
    """The container after `fn` gave all batch dimensions of each leaf the shape `new`.

    origin: how a `with` statement writes back into this one.
    """
    return _done(td._batched(fn, len(td._batch_size), new, names, op), td, origin)


def _filled_in(shape: Any, batch_size: torch.Size) -> torch.Size:
    """The shape with -1 replaced by what is left."""
    shape = tuple(shape) if not isinstance(shape, int) else (shape,)
    rows = math.prod(batch_size)
    unknown = [i for i, n in enumerate(shape) if isinstance(n, int) and n < 0]
    if unknown:
        known = math.prod([n for i, n in enumerate(shape) if i != unknown[0]])
        if len(unknown) > 1 or shape[unknown[0]] != -1 or not known or rows % known:
            raise RuntimeError(f"invalid shape {list(shape)} for a batch of {rows} elements")
        shape = (*shape[: unknown[0]], rows // known, *shape[unknown[0] + 1 :])
    elif math.prod(shape) != rows:
        raise RuntimeError(f"invalid shape {list(shape)} for a batch of {rows} elements")
    return torch.Size(shape)


def _resizer(name: str, ndim: int, new: torch.Size) -> LeafFn:
    """The tensor's method `name`, which takes sizes, for leaves whose first `ndim` become `new`."""

    def resized(leaf: Tensor) -> Tensor:
        return getattr(leaf, name)((*new, *leaf.shape[ndim:]))

    if torch.compiler.is_compiling():  # sizes are symbols then, which no dict finds
        return resized
    sizes: dict[torch.Size, tuple[int, ...]] = {}  # entries often have few shapes

    def looked_up(leaf: Tensor) -> Tensor:
        shape = leaf.shape
        try:
            size = sizes.get(shape)
        except TypeError:  # symbols, in what `torch.export` traces
            return resized(leaf)
        if size is None:
            size = sizes[shape] = (*new, *shape[ndim:])
        return getattr(leaf, name)(*size) if size else resized(leaf)

    return looked_up


def flatten(
    td: Container,
    start_dim: int | None = None,
    end_dim: int | None = None,
    *,
    inplace: bool = False,
) -> Container:
    """Merge the batch dimensions from `start_dim` to `end_dim` into one; without these, all.

    inplace: change this container instead of making another one.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[2, 3, 4]).flatten(1, 2).batch_size
    torch.Size([2, 12])
    """
    if inplace:
        return replaced_by(td, flatten(td, start_dim, end_dim), "flatten")
    if not td._batch_size:
        return _done(unsqueeze(td, 0), td, ("reshape",))
    start = 0 if start_dim is None else batch_dim(td, start_dim)
    end = len(td._batch_size) - 1 if end_dim is None else batch_dim(td, end_dim)
    if end < start:
        raise ValueError(
            f"flatten: start_dim={start_dim} comes after end_dim={end_dim}; "
            f"flatten({end}, {start})?"
        )
    size = td._batch_size
    new = torch.Size((*size[:start], math.prod(size[start : end + 1]), *size[end + 1 :]))
    names = td._names
    if names is not None:
        names = given([*names[:start], names[start] if start == end else None, *names[end + 1 :]])
    return _changed(td, lambda leaf: leaf.flatten(start, end), new, names, ("reshape", new))


def unflatten(
    td: Container, dim: int, unflattened_size: Any, *, inplace: bool = False
) -> Container:
    """Split a batch dimension into several.

    unflattened_size: their sizes, one of which may be -1.
    inplace: change this container instead of making another one.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[2, 12]).unflatten(1, (3, -1)).batch_size
    torch.Size([2, 3, 4])
    """
    if inplace:
        return replaced_by(td, unflatten(td, dim, unflattened_size), "unflatten")
    dim = batch_dim(td, dim)
    size = td._batch_size
    try:
        parts = _filled_in(unflattened_size, size[dim : dim + 1])
    except RuntimeError as error:
        raise RuntimeError(
            f"unflatten: Provided sizes {list(unflattened_size)} don't multiply up to "
            f"the size of dim {dim} ({size[dim]}) in the input tensor"
        ) from error
    new = torch.Size((*size[:dim], *parts, *size[dim + 1 :]))
    names = td._names
    if names is not None:
        names = given([*names[:dim], *[None] * (len(parts) - 1), names[dim], *names[dim + 1 :]])
    return _changed(td, lambda leaf: leaf.unflatten(dim, parts), new, names, ("reshape", new))


def unsqueeze(td: Container, dim: int) -> Container:
    """A container with a new batch dimension of size 1 at `dim`.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[2, 3]).unsqueeze(-1).batch_size
    torch.Size([2, 3, 1])
    """
    size = td._batch_size
    ndim = len(size)
    if not -ndim - 1 <= dim <= ndim:
        raise RuntimeError(
            "unsqueezing is allowed for dims comprised between "
            "`-td.batch_dims - 1` and `td.batch_dims` only. "
            f"Got dim={dim} with a batch size of {size}."
        )
    dim = dim % (ndim + 1)
    names = td._names
    if names is not None:
        names = [*names[:dim], None, *names[dim:]]
    new = torch.Size((*size[:dim], 1, *size[dim:]))
    return _changed(td, lambda leaf: leaf.unsqueeze(dim), new, names, ("unsqueeze", dim))


def squeeze(td: Container, dim: int | tuple[int, ...] | None = None) -> Container:
    """A container without the batch dimensions of size 1, or only without `dim` if that is one.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[1, 3, 1]).squeeze().batch_size
    torch.Size([3])
    """
    size = td._batch_size
    if dim is None:
        dims = [i for i, n in enumerate(size) if n == 1]
    elif isinstance(dim, (tuple, list)):
        dims = sorted([batch_dim(td, d) for d in dim if size[batch_dim(td, d)] == 1])
    else:
        dim = batch_dim(td, dim)
        dims = [dim] if size[dim] == 1 else []
    if not dims:
        return _same(td)
    left = [i for i in range(len(size)) if i not in dims]
    names = None if td._names is None else given([td._names[i] for i in left])
    new = torch.Size([size[i] for i in left])
    at: Any = dims[0] if len(dims) == 1 else tuple(dims)
    origin = ("squeeze",) if dim is None else ("reshape",)
    op = ("squeeze", tuple(dims))
    return _changed(td, lambda leaf: leaf.squeeze(at), new, names, op, origin)


def permute(td: Container, *dims: int | Sequence[int], **kwargs: Any) -> Container:
    """A container whose batch dimensions are in the order `dims`.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[2, 3, 4]).permute(2, 0, 1).batch_size
    torch.Size([4, 2, 3])
    """
    wanted = _sizes(dims or tuple(kwargs.values()))
    ndim = len(td._batch_size)
    order = tuple([d + ndim if d < 0 else d for d in wanted])
    if len(order) == 0 and ndim == 0:
        return td
    if sorted(order) != list(range(ndim)):
        raise ValueError(
            f"Cannot compute the permutation, got dims={list(wanted)} "
            f"but expected a permutation of {list(range(ndim))}."
        )
    if order == tuple(range(ndim)):
        return _same(td)
    names = None if td._names is None else [td._names[d] for d in order]
    new = torch.Size([td._batch_size[d] for d in order])

    def permuted(leaf: Tensor) -> Tensor:
        return leaf.permute(*order, *range(ndim, leaf.dim()))

    back = tuple(sorted(range(ndim), key=order.__getitem__))
    return _changed(td, permuted, new, names, ("permute", order), ("permute", back))


def transpose(td: Container, dim0: int, dim1: int) -> Container:
    """A container with two batch dimensions exchanged.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[2, 3, 4]).transpose(0, 2).batch_size
    torch.Size([4, 3, 2])
    """
    ndim = len(td._batch_size)
    if not (-ndim <= dim0 < ndim and -ndim <= dim1 < ndim):
        raise ValueError(
            "dim0 and dim1 must be within the range of the number of dimensions: "
            f"got {dim0} and {dim1} for batch size {td._batch_size}"
        )
    dim0, dim1 = dim0 % ndim, dim1 % ndim
    if dim0 == dim1:
        return _same(td)
    order = list(range(ndim))
    order[dim0], order[dim1] = dim1, dim0
    names = None if td._names is None else [td._names[d] for d in order]
    new = torch.Size([td._batch_size[d] for d in order])
    op = ("transpose", dim0, dim1)
    back = ("permute", tuple(order))
    return _changed(td, lambda leaf: leaf.transpose(dim0, dim1), new, names, op, back)


def swapaxes(td: Container, axis0: int, axis1: int) -> Container:
    """Swap two batch dimensions; an alias of `transpose`.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[2, 3]).swapaxes(0, 1).batch_size
    torch.Size([3, 2])
    """
    return transpose(td, axis0, axis1)


swapdims = swapaxes


def movedim(
    td: Container, source: int | Sequence[int], destination: int | Sequence[int]
) -> Container:
    """A container with batch dimensions moved to other positions.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[2, 3, 4]).movedim(0, 2).batch_size
    torch.Size([3, 4, 2])
    """
    src = [batch_dim(td, d) for d in ([source] if isinstance(source, int) else source)]
    dst = [
        batch_dim(td, d) for d in ([destination] if isinstance(destination, int) else destination)
    ]
    if len(src) != len(dst):
        raise ValueError(
            f"movedim: as many sources as destinations are needed, got {source} and {destination}"
        )
    order: list[Any] = [None] * len(td._batch_size)
    for s, d in zip(src, dst, strict=True):
        order[d] = s
    rest = iter([d for d in range(len(order)) if d not in src])
    return permute(td, [next(rest) if d is None else d for d in order])


moveaxis = movedim


def expand(td: Container, *shape: int | Sequence[int], **kwargs: Any) -> Container:
    """A container whose batch dimensions of size 1 are repeated, not copied; -1 keeps a size.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.ones(1, 2), batch_size=[1]).expand(4, 3)["a"].shape
    torch.Size([4, 3, 2])
    """
    target = (
        _sizes(shape) if shape or not kwargs else tuple(kwargs.get("size", kwargs.get("shape", ())))
    )
    size = td._batch_size
    lead = len(target) - len(size)
    if lead < 0:
        raise RuntimeError(
            f"the number of dimensions in the target ({len(target)}) must be at least that "
            f"of the batch size {tuple(size)}"
        )
    new = torch.Size([size[i - lead] if n == -1 and i >= lead else n for i, n in enumerate(target)])
    for n, mine in zip(new[lead:], size, strict=True):
        if mine != n and mine != 1:
            raise RuntimeError(
                "Incompatible expanded shape: The expanded shape length at non-singleton "
                "dimension should be same as the original length. target_shape = "
                f"{tuple(target)}, existing_shape = {size}"
            )
    names: Names = None if td._names is None else [*[None] * lead, *td._names]
    return _mapped(td, _resizer("expand", len(size), new), new, ("expand", new), names)


def expand_as(td: Container, other: Tensor | Node) -> Container:
    """`expand` to the shape of another container or tensor.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[1]).expand_as(torch.zeros(4)).batch_size
    torch.Size([4])
    """
    like: Any = other
    return expand(td, like.shape)


def broadcast_to(td: Container, shape: int | Sequence[int]) -> Container:
    """Expand the batch size to a shape; an alias of `expand`.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[1]).broadcast_to((4,)).batch_size
    torch.Size([4])
    """
    return expand(td, *as_size(shape))


def _mapped(td: Any, fn: LeafFn, size: torch.Size, op: Op, names: Names = None) -> Any:
    out = td._batched(fn, len(td._batch_size), size, names, op)
    return out.lock_() if td._locked else out


def repeat(td: Container, *repeats: int | Sequence[int], inplace: bool = False) -> Container:
    """Repeat the rows the given number of times along each batch dimension; copies.

    inplace: change this container instead of making another one.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.tensor([1, 2]), batch_size=[2]).repeat(2)["a"]
    tensor([1, 2, 1, 2])
    """
    if inplace:
        return replaced_by(td, repeat(td, *repeats), "repeat")
    times = _sizes(repeats)
    if len(times) != len(td._batch_size):
        raise ValueError(
            f"repeat needs one number for each batch dimension: got {tuple(times)} "
            f"for batch size {tuple(td._batch_size)}"
        )
    ndim = len(times)
    size = torch.Size([n * k for n, k in zip(td._batch_size, times, strict=True)])
    return _mapped(
        td,
        lambda leaf: leaf.repeat(*times, *[1] * (leaf.dim() - ndim)),
        size,
        ("repeat", times),
        td._names,
    )


def repeat_interleave(
    td: Container,
    repeats: Tensor | int,
    dim: int | None = None,
    *,
    output_size: int | None = None,
    inplace: bool = False,
) -> Container:
    """A container with each row along `dim` repeated; `dim=None` flattens the batch first.

    inplace: change this container instead of making another one.
    Along the stack dimension of a lazy stack, the result holds the same members several times.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.tensor([1, 2]), batch_size=[2]).repeat_interleave(2, dim=0)["a"]
    tensor([1, 1, 2, 2])
    """
    if inplace:
        made = repeat_interleave(td, repeats, dim, output_size=output_size)
        return replaced_by(td, made, "repeat_interleave")
    if not td._batch_size:
        td = unsqueeze(td, 0)
    if dim is None:
        if len(td._batch_size) > 1:
            return repeat_interleave(reshape(td, -1), repeats, 0, output_size=output_size)
        dim = 0
    at = batch_dim(td, dim)

    def repeated(leaf: Tensor) -> Tensor:
        return torch.repeat_interleave(leaf, repeats, dim=at, output_size=output_size)

    size = list(td._batch_size)
    size[at] = (
        int(repeats.sum())
        if isinstance(repeats, Tensor) and repeats.numel() > 1
        else size[at] * int(repeats)
    )
    return _mapped(td, repeated, torch.Size(size), ("repeat_interleave", repeats, at), td._names)


def tile(td: Container, dims: int | Sequence[int]) -> Container:
    """A container with its rows tiled along the batch dimensions, the last one first.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.tensor([1, 2]), batch_size=[2]).tile((2,))["a"]
    tensor([1, 2, 1, 2])
    """
    times = (dims,) if isinstance(dims, int) else tuple(dims)
    ndim = len(td._batch_size)
    if len(times) > ndim:
        td = reshape(td, *[1] * (len(times) - ndim), *td._batch_size)
    return repeat(td, *[1] * (ndim - len(times)), *times)


def roll(
    td: Container,
    shifts: int | Sequence[int],
    dims: int | Sequence[int] | None = None,
    *,
    inplace: bool = False,
) -> Container:
    """A container whose rows are rolled along `dims`, or else along the flattened batch.

    inplace: change this container instead of making another one.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.arange(3), batch_size=[3]).roll(1, 0)["a"]
    tensor([2, 0, 1])
    """
    if inplace:
        return replaced_by(td, roll(td, shifts, dims), "roll")
    if dims is None:
        if len(td._batch_size) == 1:
            return roll(td, shifts, 0)
        out = reshape(roll(reshape(td, -1), shifts, 0), td._batch_size)
        return out.refine_names(*td._names) if td._names is not None else out
    at = tuple([batch_dim(td, d) for d in ([dims] if isinstance(dims, int) else dims)])
    by = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    return _mapped(
        td, lambda leaf: torch.roll(leaf, by, at), td._batch_size, ("roll", by, at), td._names
    )


def flip(td: Container, *args: int | Sequence[int], dims: int | Sequence[int] = ()) -> Container:
    """A container whose rows are in reverse order along batch dimensions: by position, or `dims`.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.arange(3), batch_size=[3]).flip(0)["a"]
    tensor([2, 1, 0])
    """
    at = tuple([batch_dim(td, d) for d in _sizes(args or (dims,))])
    return _mapped(td, lambda leaf: leaf.flip(at), td._batch_size, ("flip", at), td._names)


def fliplr(td: Container) -> Container:
    """`flip` along the second batch dimension.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.arange(4).view(2, 2), batch_size=[2, 2]).fliplr()["a"]
    tensor([[1, 0],
            [3, 2]])
    """
    if len(td._batch_size) < 2:
        raise RuntimeError(
            f"fliplr needs two batch dimensions, but the batch size is {tuple(td._batch_size)}"
        )
    return flip(td, 1)


def flipud(td: Container) -> Container:
    """`flip` along the first batch dimension.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.arange(2), batch_size=[2]).flipud()["a"]
    tensor([1, 0])
    """
    return flip(td, 0)


def rot90(td: Container, k: int = 1, dims: tuple[int, int] = (0, 1)) -> Container:
    """A container rotated by `k` times 90 degrees in the plane of two batch dimensions.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.arange(4).view(2, 2), batch_size=[2, 2]).rot90()["a"]
    tensor([[1, 3],
            [0, 2]])
    """
    if len(td._batch_size) < 2:
        raise RuntimeError(
            f"rot90 needs two batch dimensions, but the batch size is {tuple(td._batch_size)}"
        )
    at = [batch_dim(td, d) for d in dims]
    if len({*at}) != 2 or len(at) != 2:
        raise RuntimeError(f"rot90 needs two different dims, got {tuple(dims)}")
    size = [*td._batch_size]
    if k % 2:
        size[at[0]], size[at[1]] = size[at[1]], size[at[0]]
    return _mapped(td, lambda leaf: torch.rot90(leaf, k, at), torch.Size(size), ("rot90",))


def narrow(td: Container, dim: int, start: int, length: int) -> Container:
    """The `length` rows from `start` on along `dim`; a view.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.arange(5), batch_size=[5]).narrow(0, 1, 2)["a"]
    tensor([1, 2])
    """
    dim = batch_dim(td, dim)
    size = td._batch_size[dim]
    start = start + size if start < 0 else start
    if not (0 <= start and 0 <= length and start + length <= size):
        raise RuntimeError(
            f"narrow: start ({start}) + length ({length}) exceeds dimension size ({size})"
        )
    return td[(*[slice(None)] * dim, slice(start, start + length))]


def atleast_1d(td: Container) -> Container:
    """The container, with a batch dimension if it has none.

    >>> from raffia import TensorDict
    >>> TensorDict().atleast_1d().batch_size
    torch.Size([1])
    """
    return td if td._batch_size else unsqueeze(td, 0)


def atleast_2d(td: Container) -> Container:
    """The container, with two batch dimensions if it has fewer.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[3]).atleast_2d().batch_size
    torch.Size([1, 3])
    """
    td = atleast_1d(td)
    return unsqueeze(td, 0) if len(td._batch_size) == 1 else td


def atleast_3d(td: Container) -> Container:
    """The container, with three batch dimensions if it has fewer.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[3]).atleast_3d().batch_size
    torch.Size([1, 1, 3])
    """
    td = atleast_2d(td)
    return unsqueeze(td, 0) if len(td._batch_size) == 2 else td


def pad(
    tensordict: Container,
    pad_size: Sequence[int],
    value: float = 0.0,
    inplace: bool = False,
    safe: bool = True,
) -> Container:
    """A container whose batch dimensions are longer, filled up with `value`.

    pad_size: rows before and after, for the first dimension, then the second, and so on.
    inplace: change this container instead of making another one.
    safe: nothing is changed where one entry can't be padded; here that is so in any case.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.ones(2), batch_size=[2]).pad([1, 0])["a"]
    tensor([0., 1., 1.])
    """
    td = tensordict
    if inplace:
        return replaced_by(td, pad(td, pad_size, value), "pad")
    size = td._batch_size
    if len(pad_size) > 2 * len(size):
        raise RuntimeError(
            "The length of pad_size must be <= 2 * the number of batch dimensions: "
            f"got {list(pad_size)} for batch size {tuple(size)}"
        )
    if len(pad_size) % 2:
        raise RuntimeError(
            "pad_size must have an even number of dimensions: (before, after) for each; "
            f"got {list(pad_size)}"
        )
    pairs = [(pad_size[i], pad_size[i + 1]) for i in range(0, len(pad_size), 2)]
    new = torch.Size([n + sum(pairs[i]) if i < len(pairs) else n for i, n in enumerate(size)])

    def padded(leaf: Tensor) -> Tensor:
        widths = [(0, 0)] * (leaf.dim() - len(pairs))
        flat = [width for pair in [*widths, *reversed(pairs)] for width in pair]
        return torch.nn.functional.pad(leaf, flat, value=value)

    return td._batched(padded, len(size), new, td._names, ("pad",))
