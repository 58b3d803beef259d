"""Containers as pytrees: `torch.utils._pytree.tree_map`, `torch.vmap`, `torch.func` see the leaves.

`torch.vmap` removes a dimension from every leaf, and adds one to every result, without telling the
container. The number of batch dimensions changes as that of the leaves does; the leading dimensions
that they share are the new batch size. In `in_dims` and `out_dims`, a dimension is counted from the
front: a negative one counts the leaves' own dimensions.

A `torch.utils.data.DataLoader` stacks containers: the class is entered in torch's table of what
`default_collate` does with which type.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor as is_batched
from torch._C._functorch import maybe_get_bdim as bdim
from torch.utils import _pytree as pytree
from torch.utils.data._utils.collate import default_collate_fn_map

from raffia.tensordict import dim_names, kinds, pickled
from raffia.tensordict.collection import TensorCollection
from raffia.tensordict.lazy import LazyStackedTensorDict
from raffia.tensordict.lock import _lock as lock
from raffia.tensordict.lock import lock_made
from raffia.tensordict.node import Names, Node, has_tensors, hold
from raffia.tensordict.nontensor import MetaData, NonTensorData, NonTensorStack
from raffia.tensordict.params import TensorDictParams
from raffia.tensordict.stack import maybe_dense_stack
from raffia.tensordict.sub import SubTensorDict
from raffia.tensordict.tensordict import TensorDict
from raffia.tensordict.unbatched import UnbatchedTensor
from raffia.tensordict.vmap_rows import changed_dims, register_data, resized


class Spec(NamedTuple):
    """A container's structure without leaves: enough to rebuild it, nested ones too, over others.

    A tuple, as `torch.export` with `strict=True` can make such a one out of a program.
    """

    keys: list[str]
    below: list[Any]  # for each key the Spec of the container nested there, None for a leaf
    batch_size: torch.Size
    device: Any
    names: Names
    ndims: list[int | None]  # of all leaves, nested ones too; None for what has no dimensions
    locked: bool
    stack_dim: int | None

    def __eq__(self, other: object) -> bool:
        # The device that a container names, its lock and its leaves' dimensions do not count.
        return isinstance(other, Spec) and self._compared() == other._compared()

    def __ne__(self, other: object) -> bool:  # which torch calls, and of which a tuple has its own
        return not self == other

    def _compared(self) -> tuple[object, ...]:
        return self.keys, self.below, self.batch_size, self.names, self.stack_dim

    def __hash__(self) -> int:
        return hash(tuple(self.keys))

    def __repr__(self) -> str:
        return f"Spec({self.keys}, {tuple(self.batch_size)})"

    def paths(self) -> list[tuple[str, ...]]:
        """The nested keys of all leaves."""
        out: list[tuple[str, ...]] = []
        for key, spec in zip(self.keys, self.below, strict=True):
            out += [(key,)] if spec is None else [(key, *path) for path in spec.paths()]
        return out


def flatten(td: Any) -> tuple[list[Any], Spec]:
    """Flatten a container and those nested in it, as one pytree node, into leaves and a spec."""
    values: list[Any] = []
    return values, _flatten(td, values, [])


def _flatten(td: Any, values: list[Any], ndims: list[int | None]) -> Spec:
    entries = td._d if td.__class__ is TensorDict else td._entries()  # spares a call a node
    below: list[Any] = []
    for value in entries.values():
        if value.__class__ is TensorDict:
            below.append(_flatten(value, values, ndims))
            continue
        below.append(None)
        values.append(value)
        if isinstance(value, UnbatchedTensor):
            ndims.append(~value.dim())
            continue
        has_dims = value.__class__ is Tensor or isinstance(value, (Tensor, Node))
        ndims.append(value.dim() if has_dims else None)
    keys = list(entries)
    return Spec(keys, below, td._batch_size, td._device, td._names, ndims, td._locked, None)


def _shows_vmap_dim(value: Any) -> bool:
    """Whether a value shows which dimension `torch.vmap` has taken; `torch.compile` can't ask."""
    compiling = torch.compiler.is_compiling()
    return isinstance(value, Tensor) and not compiling and is_batched(value)


def _has_dims(value: Any) -> bool:
    return has_tensors(value) if isinstance(value, Node) else isinstance(value, Tensor)


def flatten_lazy(td: Any) -> tuple[list[Any], Any]:
    """Stacked leaves, so that `torch.vmap` can map over any dimension.

    The members, where shapes or keys differ.
    """
    if any(td._exclusive()):
        return list(td.tensordicts), _members(td)
    try:
        values, spec = flatten(td)
    except RuntimeError:
        return list(td.tensordicts), _members(td)
    return values, spec._replace(stack_dim=td.stack_dim)


def unflatten_lazy(values: Any, spec: Any) -> Node:
    if isinstance(spec, Spec):
        return unflatten(values, spec)
    _refuse_rows(values, spec)
    return LazyStackedTensorDict(*values, stack_dim=spec.stack_dim)


def _members(td: Any) -> Members:
    return Members(td.stack_dim, td._locked, tuple([leaf.dim() for leaf in _tensors(td)]))


def _tensors(td: Any) -> list[Tensor]:
    return [leaf for leaf in td._leaves([]) if isinstance(leaf, Tensor)]


def _refuse_rows(values: Any, spec: Members) -> None:
    """RuntimeError where `torch.vmap` takes rows of each member: not those of the stack."""
    found = [leaf for td in values if isinstance(td, Node) for leaf in _tensors(td)]
    fewer = [leaf.dim() + 1 for leaf in found] == list(spec.ndims)
    if found and fewer and all([is_batched(leaf) for leaf in found]):
        raise RuntimeError(
            "torch.vmap can't map over a lazy stack whose members differ in their keys or in the "
            "shapes of their entries: it has no rows of one shape. Call the function for each of "
            "td.unbind(dim), or pad first: td.densify().to_padded_tensor()"
        )


@dataclasses.dataclass(frozen=True)
class Members:
    """The context of a lazy stack whose members can't be stacked."""

    stack_dim: int
    locked: bool
    ndims: tuple[int, ...] = ()  # of all leaves


def with_keys(flat: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
    values, spec = flat
    if isinstance(spec, Members):
        return [(pytree.SequenceKey(i), value) for i, value in enumerate(values)], spec
    keys = [path[0] if len(path) == 1 else path for path in spec.paths()]
    return [(pytree.MappingKey(key), value) for key, value in zip(keys, values, strict=True)], spec


def unflatten(values: Any, spec: Spec) -> Node:
    values = list(values)
    old, change = spec.batch_size, Change(values, spec.ndims)
    size = change.size_of(len(values), old)
    # a row in `torch.vmap` is as locked as the whole; what `tree_map` makes is not
    change.locked = spec.locked and size is not None and len(size) != len(old)
    td: Any = _unflatten(change, spec, len(old), size)
    if spec.stack_dim is not None and all([isinstance(leaf, Tensor) for leaf in td._leaves([])]):
        at = changed_dims(spec.batch_size, td._batch_size)
        dim: int | None = spec.stack_dim
        if td._batch_size != spec.batch_size:
            added = len(td._batch_size) > len(spec.batch_size)
            dim = new_position(spec.stack_dim, at[0], added) if at else None
        if dim is not None:
            td = LazyStackedTensorDict(*td.unbind(dim), stack_dim=dim)
            if change.locked:
                lock(td, None)
    if td._names is not None:
        dim_names.store(td, td._names)
    return td


class Change:
    """The change in the dimensions of the leaves, which are built into a container one by one.

    at: which leaf is the next.
    locked: whether what is built is locked.
    by: by how many there are more; None if not for all by as many.
    taken: which dimension was taken away, where that is known: of a row in `torch.vmap`.
    """

    __slots__ = ("values", "ndims", "at", "locked", "by", "taken")

    def __init__(self, values: list[Any], ndims: list[int | None]) -> None:
        self.values, self.ndims = values, ndims
        self.at, self.locked = 0, False
        self.by: int | None = 0
        self.taken: int | None = None

    def size_of(self, num: int, old: torch.Size) -> torch.Size | None:
        """The new batch size of a container of the next leaves, whose batch size was `old`.

        The root is asked first, which finds out `by` and `taken`. None: there are no leaves.
        """
        if self.by is None:
            return torch.Size()
        size: torch.Size | None = None
        longest = by = 0
        values, ndims = self.values, self.ndims
        if num < len(values):
            rows = slice(self.at, self.at + num)
            values, ndims = values[rows], ndims[rows]
        for value, before in zip(values, ndims, strict=True):
            if before is None or before < 0:
                continue
            if value.__class__ is not Tensor and not _has_dims(value):
                continue
            shape = value.shape
            if size is None:
                self.by = by = len(shape) - before
                if self.by == -1 and _shows_vmap_dim(value):
                    self.taken = bdim(value)
                longest = len(old)
                if self.taken is None or self.taken < longest:
                    longest += self.by
                size = shape[:longest] if longest > 0 else _NO_DIMS
            elif len(shape) - before != by:
                self.by = None
                return _NO_DIMS
            elif size:
                while shape[: len(size)] != size:
                    size = size[:-1]
        return size


_NO_DIMS = torch.Size()


def _count(spec: Spec) -> int:
    return sum([1 if below is None else _count(below) for below in spec.below])


def _unflatten(change: Change, spec: Spec, ndim: int, size: torch.Size | None) -> TensorDict:
    """A container of the next values.

    size: what the first `ndim` batch dimensions became; None if there is no leaf.
    """
    old = spec.batch_size
    if size is None:
        batch_size = old
    elif len(old) == ndim:
        batch_size = size
    else:
        found = change.size_of(_count(spec), old)
        batch_size = size + old[ndim:] if found is None else found
    entries: dict[str, Any] = {}
    nodes: list[Any] = []
    device, names = spec.device, spec.names
    for key, below in zip(spec.keys, spec.below, strict=True):
        if below is not None:
            known = None if size is None else batch_size
            entries[key] = node = _unflatten(change, below, len(old), known)
            nodes.append(node)
            continue
        value, before = change.values[change.at], spec.ndims[change.at]
        change.at += 1
        if before is not None and before < 0 and isinstance(value, Tensor):
            value = _unbatched(key, value, ~before, batch_size)
            nodes.append(value)
        elif value.__class__ is not Tensor and isinstance(value, Node):
            same = batch_size == old or len(value._batch_size) != before
            if not same and not has_tensors(value):
                value = resized(value, old, batch_size, change.taken)
            hold(value)
            nodes.append(getattr(value, "_td", value))
        elif device is not None and isinstance(value, Tensor) and value.device != device:
            device = None
        entries[key] = value
    if names is not None and batch_size != old:
        at = changed_dims(old, batch_size)
        names = moved(names, at[0], len(batch_size), None) if len(at) == 1 else None
    td = TensorDict._make(entries, batch_size, device, names)
    if change.locked:
        lock_made(td, nodes)
    return td


def _unbatched(key: str, value: Tensor, ndim: int, size: torch.Size) -> UnbatchedTensor:
    """An entry that was an `UnbatchedTensor` of `ndim` dimensions."""
    if value.dim() < ndim and not torch.compiler.is_compiling() and is_batched(value):
        raise RuntimeError(
            f"torch.vmap maps over the entry {key!r}, an UnbatchedTensor, which has no rows: pass "
            "it by itself with in_dims=None, and td.exclude(key) instead of the container"
        )
    return UnbatchedTensor(value, size)


def moved(names: list[Any], at: int, ndim: int, new: Any) -> list[Any] | None:
    """Names after a dimension was added or removed at `at`."""
    names = (
        [*names[:at], new, *names[at:]] if ndim > len(names) else [*names[:at], *names[at + 1 :]]
    )
    return dim_names.given(names)


def new_position(dim: int, at: int, added: bool) -> int | None:
    """The new position of `dim` after an addition or removal at `at`; None if `dim` was removed."""
    if added:
        return dim + 1 if at <= dim else dim
    return None if at == dim else dim - 1 if at < dim else dim


def register(
    cls: Any,
    flatten: Callable[[Any], Any] = flatten,
    unflatten: Callable[[Any, Any], Any] = unflatten,
) -> None:
    """Make a container class a pytree node."""
    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        flatten_with_keys_fn=lambda td: with_keys(flatten(td)),
        serialized_type_name=f"raffia.{cls.__name__}",
        to_dumpable_context=_dump,
        from_dumpable_context=_load,
    )


@kinds.enter
def register_subclass(cls: type[TensorDict]) -> None:
    """Make a class that derives from `TensorDict` a pytree node: it is built as that class."""

    def build(values: Any, spec: Spec) -> Node:
        td = unflatten(values, spec)
        td.__class__ = cls
        return td

    register(cls, flatten, build)


def _dump(spec: Any) -> Any:
    if isinstance(spec, Members):
        return [spec.stack_dim, spec.locked, list(spec.ndims)]
    device = None if spec.device is None else str(spec.device)
    below = [None if child is None else _dump(child) for child in spec.below]
    size, last = list(spec.batch_size), [spec.names, spec.ndims, spec.locked, spec.stack_dim]
    return [spec.keys, below, size, device, *last]


def _load(data: Any) -> Any:
    if len(data) == 3:
        return Members(data[0], data[1], tuple(data[2]))
    keys, below, size, device, *rest = data
    specs = [None if child is None else _load(child) for child in below]
    where = None if device is None else torch.device(device)
    return Spec(keys, specs, torch.Size(size), where, *rest)


register(TensorDict)
register(TensorDictParams)
register(LazyStackedTensorDict, flatten_lazy, unflatten_lazy)
register(SubTensorDict)
register_data(NonTensorData)
register_data(NonTensorStack)
register_data(MetaData)
for kind in (
    *(TensorDict, TensorDictParams, LazyStackedTensorDict, SubTensorDict),
    *(NonTensorData, NonTensorStack, MetaData),
):
    pickled.KINDS[kind.__name__] = kind


def collate(batch: Any, *, collate_fn_map: Any = None) -> Node:
    """A list of containers as one: a lazy stack where their keys or shapes differ.

    Rows that were read in one call, with `__getitems__`, are one container already.

    >>> from torch.utils.data import DataLoader
    >>> steps = TensorDict(obs=torch.arange(6), batch_size=[6])
    >>> [batch["obs"].tolist() for batch in DataLoader(steps, batch_size=4)]
    [[0, 1, 2, 3], [4, 5]]
    """
    return batch if isinstance(batch, TensorCollection) else maybe_dense_stack(batch)


default_collate_fn_map[TensorCollection] = collate
