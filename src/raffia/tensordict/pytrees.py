"""Containers as pytrees: `torch.utils._pytree.tree_map`, `torch.vmap`, `torch.func` and others see their leaves.

`torch.vmap` removes a dimension from every leaf, and adds one to every result, without telling the container. The change in
the number of dimensions of the leaves says by how much the batch size has changed; the leading dimensions that they share are
the new one. In `in_dims` and `out_dims`, a dimension is counted from the front: a negative one counts the leaves' own
dimensions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from raffia.tensordict.lazy import LazyStackedTensorDict
from raffia.tensordict.node import Node
from raffia.tensordict.nontensor import NonTensorData, NonTensorStack
from raffia.tensordict.params import TensorDictParams
from raffia.tensordict.tensordict import TensorDict


class Spec:
    """What a container was, beside its leaves: enough to build it again over other leaves."""

    __slots__ = ("keys", "batch_size", "device", "names", "ndims", "locked", "stack_dim")

    def __init__(
        self,
        keys: list[str],
        batch_size: torch.Size,
        device: Any,
        names: list[str | None] | None,
        ndims: list[int | None],
        locked: bool,
        stack_dim: int | None,
    ) -> None:
        self.keys, self.batch_size, self.device, self.names = keys, batch_size, device, names
        self.ndims, self.locked, self.stack_dim = ndims, locked, stack_dim

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self.keys == other.keys

    def __hash__(self) -> int:
        return hash(tuple(self.keys))

    def __repr__(self) -> str:
        return f"Spec({self.keys}, {tuple(self.batch_size)})"


def flatten(td: Any) -> tuple[list[Any], Spec]:
    entries = td._entries()
    values = list(entries.values())
    ndims = [v.dim() if isinstance(v, (Tensor, Node)) else None for v in values]
    return values, Spec(
        list(entries), td._batch_size, td._device, td._names, ndims, td._locked, None
    )


def flatten_lazy(td: Any) -> tuple[list[Any], Any]:
    """Stacked leaves, so that `torch.vmap` can map over any dimension; the members, where shapes or keys differ."""
    if any(td._exclusive()):
        return list(td.tensordicts), Members(td.stack_dim, td._locked)
    try:
        values, spec = flatten(td)
    except RuntimeError:
        return list(td.tensordicts), Members(td.stack_dim, td._locked)
    spec.stack_dim = td.stack_dim
    return values, spec


def unflatten_lazy(values: Any, spec: Any) -> Any:
    if isinstance(spec, Spec):
        return unflatten(values, spec)
    td = LazyStackedTensorDict(*values, stack_dim=spec.stack_dim)
    return td.lock_() if spec.locked else td


@dataclasses.dataclass(frozen=True)
class Members:
    """The context of a lazy stack whose members can't be stacked."""

    stack_dim: int
    locked: bool


def with_keys(flat: tuple[list[Any], Spec]) -> tuple[list[Any], Spec]:
    values, spec = flat
    if isinstance(spec, Members):
        return [(pytree.SequenceKey(i), value) for i, value in enumerate(values)], spec
    return [
        (pytree.MappingKey(key), value) for key, value in zip(spec.keys, values, strict=True)
    ], spec


def unflatten(values: Any, spec: Spec) -> Any:
    values = list(values)
    batch_size = batch_size_of(values, spec)
    device = spec.device
    if device is not None and any([isinstance(v, Tensor) and v.device != device for v in values]):
        device = None
    names, stack_dim = spec.names, spec.stack_dim
    if batch_size != spec.batch_size:
        for i, value in enumerate(values):
            if isinstance(value, NonTensorData):
                values[i] = value._new({}, batch_size)
        at = changed_dims(spec.batch_size, batch_size)
        names = (
            moved(names, at[0], len(batch_size), None)
            if names is not None and len(at) == 1
            else None
        )
        grown = len(batch_size) > len(spec.batch_size)
        stack_dim = place_of(stack_dim, at[0], grown) if stack_dim is not None and at else None
    td: Any = TensorDict._make(dict(zip(spec.keys, values, strict=True)), batch_size, device, names)
    if stack_dim is not None and all([isinstance(leaf, Tensor) for leaf in td._leaves([])]):
        td = LazyStackedTensorDict(*td.unbind(stack_dim), stack_dim=stack_dim)
    return td.lock_() if spec.locked else td


def batch_size_of(values: list[Any], spec: Spec) -> torch.Size:
    """The batch size that fits the new leaves; [] if their shapes have changed in unlike ways."""
    old = spec.batch_size
    size = None
    for value, before in zip(values, spec.ndims, strict=True):
        if (
            before is None
            or not isinstance(value, (Tensor, Node))
            or (isinstance(value, Node) and value._is_data())
        ):
            continue
        shape = value.shape
        if size is None:
            size = shape[: max(len(old) + len(shape) - before, 0)]
        if shape[: len(size)] != size:
            return torch.Size()
    return old if size is None else size


def changed_dims(old: torch.Size, new: torch.Size) -> list[int]:
    """Where the one dimension that was added or removed can have been; nowhere if something else has changed."""
    short, long = (old, new) if len(old) < len(new) else (new, old)
    if len(long) != len(short) + 1:
        return []
    return [i for i in range(len(long)) if long[:i] + long[i + 1 :] == short]


def moved(names: list[Any], at: int, ndim: int, new: Any) -> list[Any] | None:
    """Names after a dimension was added or removed at `at`."""
    names = (
        [*names[:at], new, *names[at:]] if ndim > len(names) else [*names[:at], *names[at + 1 :]]
    )
    return names if any(names) else None


def place_of(dim: int, at: int, added: bool) -> int | None:
    """Where a dimension is after another one was added or removed at `at`; None if it is the one removed."""
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


def _dump(spec: Any) -> Any:
    if isinstance(spec, Members):
        return [spec.stack_dim, spec.locked]
    device = None if spec.device is None else str(spec.device)
    return [
        spec.keys,
        list(spec.batch_size),
        device,
        spec.names,
        spec.ndims,
        spec.locked,
        spec.stack_dim,
    ]


def _load(data: Any) -> Any:
    if len(data) == 2:
        return Members(*data)
    keys, size, device, *rest = data
    return Spec(keys, torch.Size(size), None if device is None else torch.device(device), *rest)


def _register_data(cls: Any) -> None:
    """Non-tensor entries have no leaves; they are their own context."""
    pytree.register_pytree_node(
        cls, lambda node: ([], Constant(node)), lambda values, context: context.node
    )


class Constant:
    """A non-tensor node as the context of a pytree without leaves."""

    __slots__ = ("node",)

    def __init__(self, node: Any) -> None:
        self.node = node

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant):
            return False
        return self.node is other.node or self.node._unwrapped() == other.node._unwrapped()

    def __hash__(self) -> int:
        return hash(type(self.node))

    def __repr__(self) -> str:
        return f"Constant({self.node!r})"


register(TensorDict)
register(TensorDictParams)
register(LazyStackedTensorDict, flatten_lazy, unflatten_lazy)
_register_data(NonTensorData)
_register_data(NonTensorStack)
