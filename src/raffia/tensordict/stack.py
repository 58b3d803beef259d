"""Stacking and concatenating containers entry by entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack, overload

import torch
from torch import Tensor

from raffia.hints import check_choice
from raffia.tensordict import build, dim_names, entries, kinds, modes
from raffia.tensordict.build import StackOptions
from raffia.tensordict.collection import TensorDictBase
from raffia.tensordict.keys import MissingKeyError, NestedKey, unravel_key
from raffia.tensordict.lazy import LazyStackedTensorDict, lazy_stack
from raffia.tensordict.node import Container, Entries, Names, Node
from raffia.tensordict.nontensor import NonTensorData, NonTensorStack, all_same
from raffia.tensordict.tensordict import TensorDict
from raffia.tensordict.tree import override
from raffia.tensordict.unbatched import UnbatchedTensor, joined


class StackMismatchError(RuntimeError):
    """Containers can't be stacked densely because their keys or the shapes of their entries differ.

    >>> stack([TensorDict(a=1), TensorDict(b=1)])
    Traceback (most recent call last):
    ...
    raffia.tensordict.stack.StackMismatchError: The sets of keys in the tensordicts to stack are...
    """


@kinds.enter
def stack(input: Sequence[Container], dim: int = 0, *, out: Container | None = None) -> Container:
    """Stack containers of the same keys and shapes along a new batch dimension.

    out: container that the result is written to.
    Lazy stacks are stacked member by member.
    Raises RuntimeError if keys, shapes or batch sizes differ.

    >>> stack([TensorDict(a=1, b=dict(c=2)), TensorDict(a=3, b=dict(c=4))])["b", "c"]
    tensor([2, 4])
    """
    tds: list[Any] = input if isinstance(input, list) else list(input)
    if not tds:
        raise RuntimeError("stack expects a non-empty list of containers")
    if modes.stack_lazily and out is None:
        return LazyStackedTensorDict.lazy_stack(tds, dim)
    result = _stack_nodes(tds, _new_dim(tds[0], dim), False)
    return result if out is None else _written(out, result, "stacked")


def stack_nested(tds: Sequence[Any], dim: int) -> Node:
    """The dense stack, in which what differs in keys or shapes is stacked lazily; so at each level.

    >>> td = stack_nested([TensorDict(a=1, n=dict(b=1)), TensorDict(a=2, n=dict(c=1))], 0)
    >>> type(td).__name__, type(td["n"]).__name__
    ('TensorDict', 'LazyStackedTensorDict')
    """
    return _stack_nodes(list(tds), _new_dim(tds[0], dim), True)


class MaybeDenseOptions(StackOptions, total=False):
    """Options of `maybe_dense_stack`, for type checkers."""

    strict: bool


@overload
def maybe_dense_stack(
    input: Sequence[TensorDictBase], dim: int = 0, **options: Unpack[MaybeDenseOptions]
) -> TensorDict | LazyStackedTensorDict: ...
@overload
def maybe_dense_stack(
    input: Sequence[Container], dim: int = 0, **options: Unpack[MaybeDenseOptions]
) -> Container: ...
@kinds.enter
def maybe_dense_stack(
    input: Sequence[Any], dim: int = 0, *, out: Any = None, strict: bool = False, **options: Any
) -> Node | Tensor:
    """Stack containers densely if keys and shapes are equal, else lazily; so at each level.

    strict: refuse containers of different batch sizes.

    >>> type(maybe_dense_stack([TensorDict(a=1), TensorDict(a=2)])).__name__
    'TensorDict'
    >>> type(maybe_dense_stack([TensorDict(a=1), TensorDict(b=2)])).__name__
    'LazyStackedTensorDict'
    """
    if strict:
        options["strict_shape"] = True
    items = list(input)
    if not items or options or not all([isinstance(td, Node) for td in items]):
        return lazy_stack(items, dim, out=out, **options)
    result = stack_nested(items, dim)
    return result if out is None else out.update(result, inplace=True)


@overload
def dense_stack_tds(
    td_list: Sequence[TensorDictBase] | LazyStackedTensorDict, dim: int | None = None
) -> TensorDict | LazyStackedTensorDict: ...
@overload
def dense_stack_tds(
    td_list: Sequence[Container] | Container, dim: int | None = None
) -> Container: ...
def dense_stack_tds(td_list: Any, dim: int | None = None) -> Node | Tensor:
    """The dense stack of containers: those of a list, or the members of a lazy stack.

    Lazy stacks in the list stay lazy: their members are stacked, so that shapes may differ. Any
    other container is returned as it is.
    dim: needed for a list; that of the lazy stack otherwise.

    >>> type(dense_stack_tds(lazy_stack([TensorDict(a=1), TensorDict(a=2)]))).__name__
    'TensorDict'
    """
    if isinstance(td_list, LazyStackedTensorDict):
        dim = td_list.stack_dim if dim is None else dim
        td_list = td_list.tensordicts
    elif isinstance(td_list, Node):
        return td_list
    elif dim is None:
        raise ValueError(
            "dense_stack_tds: pass the dim along which to stack the list of containers"
        )
    return maybe_dense_stack(td_list, dim)


def _new_dim(first: Any, dim: int) -> int:
    ndim = len(_node(first)._batch_size)
    if not -ndim - 1 <= dim <= ndim:
        raise IndexError(
            f"dim {dim} is out of range for a stack of containers of batch size "
            f"{tuple(first._batch_size)}: it lies in {-ndim - 1} to {ndim}"
        )
    return dim if dim >= 0 else dim + ndim + 1


def _node(td: Any) -> Any:
    if not isinstance(td, Node):
        raise TypeError(f"Expected all inputs to be containers, got {type(td).__name__}")
    return td


def _stack_nodes(tds: list[Any], dim: int, lazily: bool, key: str | None = None) -> Any:
    """Stack nodes; `lazily`: what can't be stacked densely is stacked lazily."""
    for td in tds:
        if td.__class__ is not TensorDict:
            break
    else:
        try:
            return _stack_dense(tds, dim, lazily, key)
        except StackMismatchError:
            if not lazily:
                raise
            return LazyStackedTensorDict._of(tds, dim)
    for td in tds:
        if key is not None and not isinstance(td, Node):
            raise _kind_mismatch(key, tds)
        _node(td)
    first = tds[0]
    if all([td._is_data() for td in tds]):
        return first._stack_data(tds, dim)
    if hasattr(first, "_wrap"):
        return first._wrap(_stack_nodes(_contents(tds), dim, lazily))
    if all([isinstance(td, LazyStackedTensorDict) for td in tds]):
        at, num = first.stack_dim, len(first.tensordicts)
        if lazily and any([td.keys() != first.keys() for td in tds]):
            return LazyStackedTensorDict._of(tds, dim)
        if all([td.stack_dim == at and len(td.tensordicts) == num for td in tds]):
            inner, moved = (dim - 1, at) if dim > at else (dim, at + 1)
            rows = zip(*[td.tensordicts for td in tds], strict=True)
            out = LazyStackedTensorDict._of(
                [_stack_nodes(list(row), inner, lazily) for row in rows], moved
            )
            names = _stacked_names(tds, dim)
            if names is not None:
                out._set_names(names)
            return out
    try:
        return _of_class(tds, _stack_dense([_as_dense(td) for td in tds], dim, lazily, key))
    except RuntimeError:
        if not lazily:
            raise
        return LazyStackedTensorDict._of(tds, dim)


def _as_dense(td: Any) -> TensorDict:
    return (
        td
        if td.__class__ is TensorDict
        else TensorDict._make(td._entries(), td._batch_size, td._device, td._names)
    )


def _of_class(tds: list[Any], out: Any) -> Any:
    """The result as an instance of the subclass of `TensorDict` that all inputs are of."""
    kind = type(tds[0])
    if (
        kind is not TensorDict
        and issubclass(kind, TensorDict)
        and all([type(td) is kind for td in tds])
    ):
        out.__class__ = kind
    return out


def _contents(tds: list[Any]) -> list[Any]:
    """The containers wrapped by instances of one tensorclass."""
    kinds = list(dict.fromkeys([type(td) for td in tds]))
    if len(kinds) > 1:
        raise TypeError(
            f"Expected all inputs to be of one class, got {[kind.__name__ for kind in kinds]}; "
            "make all of them tensorclasses or none"
        )
    return [td._td for td in tds]


def _stack_dense(tds: list[Any], dim: int, lazily: bool, key: str | None = None) -> TensorDict:
    """Stack plain containers; `key` is that of the entry which they are."""
    first, num = tds[0], len(tds)
    size = first._batch_size
    sizes = [td._batch_size for td in tds]
    if sizes.count(size) != num:
        i = [other == size for other in sizes].index(False)
        if key is not None:
            raise _shape_mismatch(key, size, sizes[i])
        raise StackMismatchError(
            "stacking tensordicts requires them to have congruent batch sizes, got "
            f"td[{i}].batch_size={sizes[i]} and td[0].batch_size={size}"
        )
    out: Entries = {}
    for name, values in _columns(tds, _key_mismatch):
        if values[0].__class__ is not Tensor and isinstance(values[0], Node):
            out[name] = _stack_nodes(values, dim, lazily, name)
            continue
        try:
            out[name] = torch.stack(values, dim)
        except (RuntimeError, TypeError):
            _explain(name, values)
            raise
    device, names = _shared_device(tds), _stacked_names(tds, dim)
    td = TensorDict._make(out, torch.Size((*size[:dim], num, *size[dim:])), device, names)
    return td if names is None else dim_names.passed_on(td)


def _columns(
    tds: list[Any], mismatch: Callable[[list[Entries]], Exception]
) -> list[tuple[str, list[Any]]]:
    """The entries under each name in plain containers; raises an error if their keys differ."""
    stores = [td._d for td in tds]
    if sum(map(len, stores)) != len(stores) * len(stores[0]):
        raise mismatch(stores)
    try:
        return [(name, [store[name] for store in stores]) for name in stores[0]]
    except KeyError:
        raise mismatch(stores) from None


def _shared_device(tds: list[Any]) -> torch.device | None:
    device = tds[0]._device
    return device if device is None or all([td._device == device for td in tds]) else None


def _explain(name: str, values: list[Any]) -> None:
    """Raise the error that explains why `torch.stack` refused, if shapes or kinds differ."""
    for value in values:
        if not isinstance(value, Tensor):
            raise _kind_mismatch(name, values) from None
    for value in values:
        if value.shape != values[0].shape:
            raise _shape_mismatch(name, values[0].shape, value.shape) from None


def _shape_mismatch(name: str, first: torch.Size, other: torch.Size) -> StackMismatchError:
    return StackMismatchError(
        f"The shapes of the tensors to stack is incompatible: {other} vs {first} for key {name}. "
        "`lazy_stack` keeps them apart, `pad_sequence` pads them."
    )


def _kind_mismatch(name: str, values: list[Any]) -> StackMismatchError:
    kinds = list(dict.fromkeys([type(value).__name__ for value in values]))
    return StackMismatchError(
        f"the entries for key {name} can't be stacked: they are {' and '.join(kinds)}"
    )


def _key_mismatch(stores: list[Entries]) -> StackMismatchError:
    extra = sorted(set().union(*stores) - set(stores[0]).intersection(*stores[1:]))
    has = [extra[0] in store for store in stores]
    return StackMismatchError(
        "The sets of keys in the tensordicts to stack are exclusive: not all of them have "
        f"{extra}; number {has.index(True)} has {extra[0]!r}, number {has.index(False)} does not. "
        "Consider using `LazyStackedTensorDict.maybe_dense_stack` instead."
    )


def _stacked_names(tds: Sequence[Any], dim: int) -> Names:
    names = tds[0]._names
    if names is None or any([td._names != names for td in tds]):
        return None
    return [*names[:dim], None, *names[dim:]]


def _written(out: Any, result: Any, what: str) -> Any:
    if out._batch_size != result._batch_size:
        raise RuntimeError(
            f"out.batch_size and {what} batch size must match, got "
            f"out.batch_size={out._batch_size} and "
            f"batch_size={result._batch_size}"
        )
    return out.update(result, inplace=True)


# ------------------------------------------------------------------------------------- cat


def cat(input: Sequence[Container], dim: int = 0, *, out: Container | None = None) -> Container:
    """Concatenate containers of the same keys along a batch dimension.

    out: container that the result is written to.
    With a lazy stack among them, the result is a lazy stack.

    >>> cat([TensorDict(a=[1, 2], batch_size=[2]), TensorDict(a=[3], batch_size=[1])])["a"]
    tensor([1, 2, 3])
    """
    tds: list[Any] = input if isinstance(input, list) else list(input)
    if not tds:
        raise RuntimeError("cat expects a non-empty list of containers")
    ndim = len(_node(tds[0])._batch_size)
    if not -ndim <= dim < ndim:
        raise RuntimeError(
            f"dim must be in the range 0 <= dim < len(batch_size), got dim={dim} and "
            f"batch_size={list(tds[0]._batch_size)}"
        )
    result = _cat_nodes(tds, dim % ndim)
    return result if out is None else _written(out, result, "cat")


def _cat_nodes(tds: list[Any], dim: int) -> Any:
    for td in tds:
        if td.__class__ is not TensorDict:
            break
    else:
        return _cat_dense(tds, dim)
    for td in tds:
        _node(td)
    first = tds[0]
    if all([td._is_data() for td in tds]):
        return _cat_data(tds, dim)
    if hasattr(first, "_wrap"):
        return first._wrap(_cat_nodes(_contents(tds), dim))
    for td in tds:
        if isinstance(td, LazyStackedTensorDict):
            return _cat_lazy(tds, dim, td.stack_dim)
    return _of_class(tds, _cat_dense([_as_dense(td) for td in tds], dim))


def _cat_lazy(tds: list[Any], dim: int, stack_dim: int) -> Any:
    """A lazy stack along `stack_dim`, into whose members the others are taken apart."""
    rows = [td.unbind(stack_dim) for td in tds]
    if dim == stack_dim:
        return LazyStackedTensorDict._of([td for row in rows for td in row], stack_dim)
    if any([len(row) != len(rows[0]) for row in rows]):
        raise RuntimeError(
            f"cat along dim {dim} needs the same number of rows along dim {stack_dim} in each, "
            f"got {[len(row) for row in rows]}"
        )
    inner = dim - (dim > stack_dim)
    return LazyStackedTensorDict._of(
        [_cat_nodes(list(row), inner) for row in zip(*rows, strict=True)], stack_dim
    )


def _cat_dense(tds: list[Any], dim: int) -> TensorDict:
    first = tds[0]
    size, length = first._batch_size, 0
    for i, td in enumerate(tds):
        other = td._batch_size
        if other != size and (
            len(other) != len(size)
            or other[:dim] != size[:dim]
            or other[dim + 1 :] != size[dim + 1 :]
        ):
            raise RuntimeError(
                f"concatenating tensordicts along dim {dim} requires them to have the same batch "
                f"size elsewhere, got td[{i}].batch_size={other} and td[0].batch_size={size}"
            )
        length += other[dim]
    out: Entries = {}
    for name, values in _columns(tds, _cat_key_mismatch):
        if values[0].__class__ is not Tensor and isinstance(values[0], Node):
            out[name] = _cat_nodes(values, dim)
            continue
        try:
            out[name] = torch.cat(values, dim)
        except (RuntimeError, TypeError) as error:
            shapes = [tuple(v.shape) for v in values]
            raise RuntimeError(
                f"the entries {name!r}, of shapes {shapes}, can't be concatenated: {error}"
            ) from error
    size = torch.Size((*size[:dim], length, *size[dim + 1 :]))
    return dim_names.passed_on(TensorDict._make(out, size, _shared_device(tds), first._names))


def _cat_key_mismatch(stores: list[Entries]) -> MissingKeyError:
    i = [store.keys() == stores[0].keys() for store in stores].index(False)
    return MissingKeyError(
        f"tensordict {i} has keys {sorted(stores[i])} but tensordict 0 has keys "
        f"{sorted(stores[0])}; all tensordicts to concatenate must have the same keys"
    )


# ------------------------------------------------------------------------------------- padding


def pad_sequence(
    list_of_tensordicts: Sequence[Container],
    pad_dim: int = 0,
    padding_value: float | Mapping[NestedKey, float] = 0.0,
    out: Container | None = None,
    return_mask: bool | NestedKey = False,
    padding_side: str = "right",
) -> Container:
    """Pad the entries of containers along one dimension to the longest, and stack them.

    pad_dim: dimension of the entries, batch dimensions included; negative ones count from the end.
    padding_value: for all entries, or one for each key (0 for keys that are not named).
    return_mask: True, or the key for a container of masks, true where an entry is not padding.
    padding_side: "right" puts the padding after the data, "left" before it.

    >>> rows = [TensorDict(a=torch.ones(n), batch_size=[n]) for n in (2, 3)]
    >>> padded = pad_sequence(rows, return_mask=True)
    >>> padded["a"], padded["masks", "a"].sum(-1)
    (tensor([[1., 1., 0.],
            [1., 1., 1.]]), tensor([2, 3]))
    """
    tds: list[Any] = list(list_of_tensordicts)
    if not tds:
        raise RuntimeError("pad_sequence: the list of containers is empty")
    check_choice("padding_side", padding_side, ("left", "right"))
    if return_mask and hasattr(tds[0], "_wrap"):
        raise RuntimeError(
            "pad_sequence: a tensorclass has no field for the masks; convert it with "
            "to_tensordict() first"
        )
    keys = list(tds[0].keys(True, True))
    for i, td in enumerate(tds):
        if set(td.keys(True, True)) != set(keys):
            raise KeyError(
                f"pad_sequence: container {i} has the keys "
                f"{sorted(map(str, td.keys(True, True)))}, but container 0 has "
                f"{sorted(map(str, keys))}; all need the same keys"
            )
    fills: dict[Any, float] = {}
    if isinstance(padding_value, Mapping):
        fills = {unravel_key(key): value for key, value in padding_value.items()}
        for key in fills:
            if key not in keys:
                raise KeyError(
                    f"pad_sequence: padding_value names {key!r}, which is not an entry; the "
                    f"entries are {keys}"
                )
    ndim = len(tds[0]._batch_size)
    longest = max([td._batch_size[pad_dim] for td in tds]) if 0 <= pad_dim < ndim else None
    lengths: dict[Any, tuple[int, int]] = {}  # of each entry: what is padded, to which length
    for key in keys:
        leaves = [entries.get(td, key) for td in tds]
        at = _leaf_dim(leaves[0], pad_dim, key)
        lengths[key] = at, max([leaf.shape[at] for leaf in leaves])

    def padded(leaf: Tensor, key: Any) -> Tensor:
        fill = fills.get(key, 0.0) if isinstance(padding_value, Mapping) else padding_value
        return _padded(leaf, *lengths[key], fill, padding_side)

    rows = [_padded_node(td, padded, pad_dim, longest, padding_side) for td in tds]
    result = _stack_nodes(rows, 0, False)
    if return_mask:
        masks = result.empty()
        for key, (at, length) in lengths.items():
            rows = []
            for leaf in [entries.get(td, key) for td in tds]:
                lead = leaf.shape[:ndim] if at < ndim else (*leaf.shape[:ndim], leaf.shape[at])
                row = torch.ones(lead, dtype=torch.bool, device=leaf.device)
                rows.append(_padded(row, min(at, ndim), length, False, padding_side))
            masks.set(key, torch.stack(rows))
        result.set("masks" if return_mask is True else return_mask, masks)
    return result if out is None else out.update(result, inplace=True)


def _padded_node(
    td: Any,
    padded: Callable[[Tensor, Any], Tensor],
    pad_dim: int,
    longest: int | None,
    side: str,
    prefix: tuple[str, ...] = (),
) -> Any:
    """The container with padded leaves; data is padded with None, if the batch dimension is."""
    size, pairs = td._batch_size, []
    if longest is not None:
        missing = longest - size[pad_dim]
        pairs = [0, 0] * pad_dim + ([missing, 0] if side == "left" else [0, missing])
        size = torch.Size((*size[:pad_dim], longest, *size[pad_dim + 1 :]))
    out: Entries = {}
    for name, value in td._entries().items():
        key = (*prefix, name)
        if isinstance(value, Tensor):
            out[name] = padded(value, key if prefix else name)
            if out[name].shape[: len(size)] != size and not isinstance(value, Node):
                raise build.mismatch(size, out[name], name)
        elif value._is_data():
            out[name] = value.pad(pairs) if pairs else value
        else:
            out[name] = _padded_node(value, padded, pad_dim, longest, side, key)
    return td._new(out, size, td._names)


def _leaf_dim(leaf: Tensor, dim: int, key: NestedKey) -> int:
    if not -leaf.dim() <= dim < leaf.dim():
        raise IndexError(
            f"pad_sequence: pad_dim={dim} is out of range for the entry {key!r} of shape "
            f"{tuple(leaf.shape)}"
        )
    return dim % leaf.dim()


def _padded(leaf: Tensor, dim: int, length: int, fill: float, side: str) -> Tensor:
    missing = length - leaf.shape[dim]
    if not missing:
        return leaf
    filler = leaf.new_full((*leaf.shape[:dim], missing, *leaf.shape[dim + 1 :]), fill)
    return torch.cat([filler, leaf] if side == "left" else [leaf, filler], dim)


override(torch.stack)(stack)
override(torch.cat, torch.concat, torch.concatenate)(cat)


def _cat_data(nodes: Sequence[Any], dim: int) -> Any:
    """Concatenate data nodes: one value stays one, if it is the same everywhere."""
    first = nodes[0]
    size = list(first._batch_size)
    if any([isinstance(node, UnbatchedTensor) for node in nodes]) or all_same(nodes):
        size[dim] = sum([node._batch_size[dim] for node in nodes])
        if isinstance(first, NonTensorData):
            return first._like(torch.Size(size))
        return joined(nodes, size, "cat")
    rows = [row for node in nodes for row in node.unbind(dim)]
    return NonTensorStack._of(rows, dim, torch.Size((*size[:dim], *size[dim + 1 :])))
