"""Making containers from other structures, and showing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from raffia.tensordict import kinds
from raffia.tensordict.modes import list_to_stack
from raffia.tensordict.nested_rows import shape_of_rows
from raffia.tensordict.node import BatchSize, Container, Device, Node


class BatchSizeError(TypeError, ValueError):
    """The error raised for an argument that is not a valid batch size.

    >>> from raffia import TensorDict
    >>> TensorDict({}, "a")
    Traceback (most recent call last):
    ...
    raffia.tensordict.build.BatchSizeError: a batch_size must be an int or a sequence of ints,
    got str...
    """


_COUNTS: Any = (int, np.integer, torch.SymInt)


def as_size(value: Any) -> torch.Size:
    """A batch size from an int, a sequence of ints or None."""
    kind = value.__class__
    if kind is torch.Size:
        return value
    if kind is not list and kind is not tuple:
        if value is None:
            return torch.Size()
        if isinstance(value, _COUNTS):
            return torch.Size((value,))
    try:
        size = torch.Size(value)
    except TypeError:
        raise BatchSizeError(
            f"a batch_size must be an int or a sequence of ints, got {type(value).__name__} "
            f"{value!r}; pass entries as a dict or as keywords"
        ) from None
    for n in size:
        if n.__class__ is int and n < 0:
            raise ValueError(f"a batch_size cannot have negative dimensions, got {tuple(size)}")
    return size


def batch_dim(td: Any, dim: int) -> int:
    """A batch dimension counted from the front; IndexError if there is no such one."""
    ndim = len(td._batch_size)
    if not -ndim <= dim < ndim:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], "
            f"but got {dim}); Incompatible dim {dim} for tensordict with shape {td._batch_size}"
        )
    return dim % ndim


def as_device(value: Any) -> torch.device:
    """A device, with its index where that is left open."""
    device = value if isinstance(value, torch.device) else torch.device(value)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


_NUMBERS = (bool, int, float, complex, np.number, np.bool_)


def as_entry(value: Any, td: Any, name: str) -> Tensor | Node:
    """The tensor or node that stands for any Python value in the container `td`."""
    if isinstance(value, (Tensor, Node)):
        return value
    if isinstance(value, Mapping):
        return kinds.TensorDict(value, batch_size=td.batch_size, device=td.device)
    if isinstance(value, _NUMBERS):
        return torch.as_tensor(value, device=td.device)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.as_tensor(value, device=td.device)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        tensor = _sequence_as_tensor(value, td.device)
        if tensor is not None:
            return tensor
        if isinstance(value, list) and list_to_stack():
            return kinds.NonTensorStack.from_list(value, device=td.device)
    return kinds.NonTensorData(value, batch_size=td.batch_size, device=td.device)


def _sequence_as_tensor(value: Sequence[Any], device: Any) -> Tensor | None:
    """A tensor of a (nested) list of numbers or of tensors of one shape; None if it is neither."""
    if not value:
        return torch.as_tensor(value, device=device)
    first = value[0]
    if isinstance(first, Tensor):
        if all([isinstance(v, Tensor) and v.shape == first.shape for v in value]):
            return torch.stack(list(value))
        return None
    inner = first
    while isinstance(inner, (list, tuple)) and inner:
        inner = inner[0]
    if isinstance(inner, (*_NUMBERS, list, tuple, Tensor)):
        try:
            return torch.as_tensor(value, device=device)
        except (TypeError, ValueError, RuntimeError):
            return None
    return None


def shape_of(value: Any) -> torch.Size:
    """The shape of a value; -1 where the rows of a nested tensor of strided layout differ.

    >>> shape_of(torch.zeros(2, 3))
    torch.Size([2, 3])
    """
    if not isinstance(value, Tensor) or not value.is_nested or value.layout is torch.jagged:
        return value.shape
    return shape_of_rows(value._nested_tensor_size())


def mismatch(batch_size: torch.Size, value: Any, name: Any) -> RuntimeError:
    """The error for a value, or its shape, that does not begin with the batch size."""
    shape = value if isinstance(value, torch.Size) else shape_of(value)
    return RuntimeError(
        f"batch dimension mismatch: the batch size is {batch_size} but the value has shape "
        f"{shape} for key {name!r}; the leading dimensions of a value must be the batch size"
        + (
            ""
            if shape
            else (
                ". Scalars are 0-dim tensors: expand it to the batch size, or store it with "
                "set_non_tensor"
            )
        )
    )


def holds(value: Any, td: Any) -> bool:
    """Whether a node is `td` or contains it at any level."""
    nodes: list[Any] = [value]
    plain, unlocked = td._plain, not td._locked
    for node in nodes:  # grows on the way
        if node is td:
            return True
        if node.__class__ is plain:
            if not (unlocked and node._locked):  # what is nested in it is locked as well
                for below in node._d.values():
                    if below.__class__ is not Tensor:
                        nodes.append(below)
        elif isinstance(node, Node):
            nodes += _within(node)
    return False


def _within(node: Any) -> list[Any]:
    """The nodes right below one: below a tensorclass, what it wraps."""
    return node._children() if node.__dict__.get("_td") is None else [node._td]


def promoted(value: Container, batch_size: torch.Size, name: str) -> Container:
    """A copy of a nested container with the batch size of the one that takes it in."""
    given = value._batch_size
    copy = value.copy()
    try:
        copy._set_batch_size(batch_size)
    except RuntimeError as error:
        raise RuntimeError(
            f"batch dimension mismatch: the batch size is {batch_size} but the container for key "
            f"{name!r} has {given}, and its entries can't be given the larger one: {error}"
        ) from error
    return copy


def resize(nodes: Sequence[Any], batch_size: torch.Size) -> None:
    """Set the batch size of some nodes, of all or of none."""
    before = [node._batch_size for node in nodes]
    try:
        for node in nodes:
            node._set_batch_size(batch_size)
    except RuntimeError:
        for node, size in zip(nodes, before, strict=True):
            node._set_batch_size(size)
        raise


def common_size(
    td: Any, batch_dims: int | None, known: dict[int, Any] | None = None
) -> torch.Size | None:
    """The longest leading dimensions that all entries share, at most `batch_dims` of them.

    None if there are no entries to ask.
    known: takes in what is found for each container, by its id: itself, and the size.
    """
    size: Any = None
    for value in td._entries().values():
        if value.__class__ is Tensor:
            shape: Any = shape_of(value)
            if -1 in shape and value.is_nested:
                shape = shape[: shape.index(-1)]
        elif hasattr(value, "stack_dim"):
            shape = value._batch_size  # that of a stack stays
        elif isinstance(value, Node):
            shape = (
                (None if isinstance(value, Tensor) else value._batch_size or None)
                if value._is_data()
                else common_size(value, batch_dims, known)
            )
        else:
            shape = value.shape
        if shape is None or shape is size:
            continue
        if size is None:
            size = shape if batch_dims is None else shape[:batch_dims]
        elif shape[: len(size)] != size:
            same = 0
            while same < min(len(size), len(shape)) and size[same] == shape[same]:
                same += 1
            size = size[:same]
    if size is not None:
        size = torch.Size(size)
    if known is not None:
        known[id(td)] = td, size
    return size


def auto_batch_size(
    td: Any,
    batch_dims: int | None,
    keep_compliant_size: bool,
    known: dict[int, Any] | None = None,
) -> None:
    if known is None:
        known = {}
        common_size(td, batch_dims, known)
    size = known[id(td)][1] if id(td) in known else common_size(td, batch_dims, known)
    if size is None:
        size = td._batch_size[:batch_dims]
    for value in td._entries().values():
        if value.__class__ is Tensor:
            continue
        if isinstance(value, Node) and not value._is_data() and not hasattr(value, "stack_dim"):
            if not (keep_compliant_size and value._batch_size[: len(size)] == size):
                auto_batch_size(value, batch_dims, keep_compliant_size, known)
    td._set_batch_size(size)


class SizeOptions(TypedDict, total=False):
    """The options shared by the `from_...` methods, for type checkers; see `finished`."""

    auto_batch_size: bool | None
    batch_dims: int | None
    device: Device
    batch_size: BatchSize


class StackOptions(TypedDict, total=False):
    """The options of `lazy_stack` for containers, for type checkers."""

    out: Node | None
    device: Device
    stack_dim_name: str | None
    strict_shape: bool


class LazyStackOptions(StackOptions, total=False):
    """All options of `lazy_stack`, for type checkers."""

    as_list: bool
    as_padded_tensor: bool
    as_nested_tensor: bool
    padding_side: str
    layout: torch.layout | None
    padding_value: float | bool


def finished(
    cls: type[Container],
    entries: Any,
    *,
    auto_batch_size: bool | None = False,
    batch_dims: int | None = None,
    device: Device = None,
    batch_size: BatchSize = None,
    names: Sequence[str | None] | None = None,
) -> Container:
    """A container over `entries` with the batch size that is given or found.

    auto_batch_size: take as batch size the longest leading dimensions that all entries share, at
        most `batch_dims`.
    """
    if batch_size is not None and (auto_batch_size or batch_dims is not None):
        raise ValueError("pass batch_size, or auto_batch_size=True (with batch_dims), not both")
    if batch_size is not None and (size := as_size(batch_size)):
        entries = _with_plain_numbers(entries, size)
    td = cls._from_entries(entries, batch_size, device)
    if auto_batch_size or batch_dims is not None:
        td.auto_batch_size_(batch_dims)
    if names is not None:
        td.names = names
    return td


def sized(options: SizeOptions, size: torch.Size | tuple[int, ...]) -> SizeOptions:
    """The options with this batch size as the default, unless the batch size is to be inferred."""
    known = ("batch_size", "auto_batch_size", "batch_dims")
    asked = [options.get(name) for name in known]
    if asked[0] is None and not asked[1] and asked[2] is None:
        return {**options, "batch_size": size}
    return options


def _with_plain_numbers(source: Any, size: torch.Size) -> Any:
    """Entries in which numbers next to tensors with batch dimensions stay plain numbers."""
    if isinstance(source, Node):
        return source
    out = {}
    for name, value in source.items():
        if value.__class__ is Tensor:
            pass
        elif isinstance(value, _NUMBERS):
            value = kinds.NonTensorData(value, batch_size=size)
        elif isinstance(value, Mapping):
            value = _with_plain_numbers(value, size)
        out[name] = value
    return out
