"""Making containers from other structures, and showing them."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raffia.tensordict import printing
from raffia.tensordict.keys import NestedKey
from raffia.tensordict.node import Node
from raffia.tensordict.ragged import shape_of_rows
from raffia.tensordict.value_options import list_to_stack


class BatchSizeError(TypeError, ValueError):
    """What is given as a batch size is none.

    >>> from raffia import TensorDict
    >>> TensorDict({}, "a")
    Traceback (most recent call last):
    ...
    raffia.tensordict.build.BatchSizeError: a batch_size is an int or a sequence of ints, got str...
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
            f"a batch_size is an int or a sequence of ints, got {type(value).__name__} {value!r}; "
            "entries are given as a dict or as keywords"
        ) from None
    for n in size:
        if n.__class__ is int and n < 0:
            raise ValueError(f"a batch_size has no negative dimensions, got {tuple(size)}")
    return size


def as_device(value: Any) -> torch.device:
    """A device, with its index where that is left open."""
    device = value if isinstance(value, torch.device) else torch.device(value)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


_NUMBERS = (bool, int, float, complex, np.number, np.bool_)


def as_entry(value: Any, td: Any, name: str) -> Any:
    """The tensor or node that stands for any Python value in the container `td`."""
    from raffia.tensordict.nontensor import NonTensorData, NonTensorStack
    from raffia.tensordict.tensordict import TensorDict

    if isinstance(value, (Tensor, Node)):
        return value
    if isinstance(value, Mapping):
        return TensorDict(value, batch_size=td.batch_size, device=td.device)
    if isinstance(value, _NUMBERS):
        return torch.as_tensor(value, device=td.device)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.as_tensor(value, device=td.device)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        tensor = _sequence_as_tensor(value, td.device)
        if tensor is not None:
            return tensor
        if isinstance(value, list) and list_to_stack():
            return NonTensorStack.from_list(value, device=td.device)
    return NonTensorData(value, batch_size=td.batch_size, device=td.device)


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
    """The error for a value that does not have the leading dimensions of the container."""
    shape = shape_of(value)
    return RuntimeError(
        f"batch dimension mismatch: the batch size is {batch_size} but the value has shape "
        f"{shape} for key {name!r}; the leading dimensions of a value must be the batch size"
        + (
            ""
            if shape
            else ". Scalars are 0-dim tensors: expand it to the batch size, "
            "or keep it with set_non_tensor"
        )
    )


def holds(value: Any, td: Any) -> bool:
    """Whether a node is `td`, or has it nested in it."""
    nodes: list[Any] = [value]
    plain, unlocked = td._plain, not td._locked
    for node in nodes:  # grows on the way
        if node is td:
            return True
        if node.__class__ is plain:
            if not (unlocked and node._locked):  # what is nested in it is locked as well
                nodes += [v for v in node._d.values() if v.__class__ is not Tensor]
        elif isinstance(node, Node):
            nodes += _within(node)
    return False


def _within(node: Any) -> list[Any]:
    """The nodes right below one: below a tensorclass, what it wraps."""
    return node._children() if node.__dict__.get("_td") is None else [node._td]


def promoted(value: Any, batch_size: torch.Size, name: str) -> Any:
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


def finished(
    cls: Any,
    entries: Any,
    auto_batch_size: bool | None,
    batch_size: Any,
    device: Any,
    batch_dims: int | None,
    names: Any = None,
) -> Any:
    """A container over `entries` with the batch size that is given or found."""
    if batch_size is not None and (auto_batch_size or batch_dims is not None):
        raise ValueError("give batch_size, or auto_batch_size=True (with batch_dims), not both")
    if batch_size is not None and (size := as_size(batch_size)):
        entries = _numbers_kept(entries, size)
    td = cls._from_entries(entries, batch_size, device)
    if auto_batch_size or batch_dims is not None:
        td.auto_batch_size_(batch_dims)
    if names is not None:
        td.names = names
    return td


def _numbers_kept(source: Any, size: torch.Size) -> Any:
    """Entries in which a number that stands beside tensors with batch dimensions is kept as one."""
    from raffia.tensordict.nontensor import NonTensorData

    if isinstance(source, Node):
        return source
    out = {}
    for name, value in source.items():
        if value.__class__ is Tensor:
            pass
        elif isinstance(value, _NUMBERS):
            value = NonTensorData(value, batch_size=size)
        elif isinstance(value, Mapping):
            value = _numbers_kept(value, size)
        out[name] = value
    return out


def from_dict(
    cls: Any,
    input_dict: Mapping[Any, Any],
    *,
    auto_batch_size: bool | None = None,
    batch_size: Any = None,
    device: Any = None,
    batch_dims: int | None = None,
    names: Sequence[str | None] | None = None,
) -> Any:
    """A container from a (nested) dict.

    auto_batch_size: take as batch size the longest leading dimensions that all entries share, at
        most `batch_dims`.
    A number becomes a tensor; beside a `batch_size` with dimensions it is kept as a number.

    >>> from raffia import TensorDict
    >>> TensorDict.from_dict({"a": torch.zeros(2, 3)}, auto_batch_size=True).batch_size
    torch.Size([2, 3])
    """
    return finished(cls, input_dict, auto_batch_size, batch_size, device, batch_dims, names)


def from_dict_instance(
    td: Any,
    input_dict: Mapping[Any, Any],
    *,
    auto_batch_size: bool | None = None,
    batch_size: Any = None,
    device: Any = None,
    batch_dims: int | None = None,
    names: Sequence[str | None] | None = None,
) -> Any:
    """A container from a (nested) dict, of the kind of this one.

    >>> from raffia import TensorDict
    >>> TensorDict().from_dict_instance({"a": [1, 2]}, batch_size=[2]).batch_size
    torch.Size([2])
    """
    return from_dict(
        type(td),
        input_dict,
        auto_batch_size=auto_batch_size,
        batch_size=batch_size,
        device=device,
        batch_dims=batch_dims,
        names=names,
    )


def from_any(
    cls: Any,
    obj: Any,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: Any = None,
    batch_size: Any = None,
) -> Any:
    """A container from a structure: one made of dicts, dataclasses, tuples, lists and containers.

    Named tuples and structured arrays are taken too; other values are kept.

    >>> from raffia import TensorDict
    >>> TensorDict.from_any({"a": (torch.zeros(2), {"b": 1})}).to_dict()
    {'a': {'0': tensor([0., 0.]), '1': {'b': tensor(1)}}}
    """
    found = any_entries(obj, cls)
    if found is None:
        return obj
    if isinstance(found, Node):
        return found
    return finished(cls, found, auto_batch_size, batch_size, device, batch_dims)


def any_entries(obj: Any, cls: Any) -> Any:
    """Entries of a structure, with structures inside taken apart too; None if it has no entries."""
    if obj.__class__ is Tensor:
        return None
    if isinstance(obj, Node):
        return obj
    if isinstance(obj, Mapping):
        pairs: Any = obj.items()
    elif dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        pairs = [(field.name, getattr(obj, field.name)) for field in dataclasses.fields(obj)]
    elif isinstance(obj, tuple) and hasattr(obj, "_fields"):
        pairs = zip(obj._fields, obj, strict=True)
    elif isinstance(obj, np.ndarray) and obj.dtype.names:
        return from_struct_array(cls, obj)
    elif isinstance(obj, tuple):
        pairs = [(str(i), value) for i, value in enumerate(obj)]
    elif isinstance(obj, list) and any(
        [isinstance(v, (Mapping, tuple, list, Tensor)) for v in obj]
    ):
        pairs = [(str(i), value) for i, value in enumerate(obj)]
    else:
        return None
    out = {}
    for name, value in pairs:
        below = any_entries(value, cls)
        out[name] = value if below is None else below
    return out


def from_pytree(
    cls: Any,
    pytree: Any,
    *,
    batch_size: Any = None,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
) -> Any:
    """A container from nested dicts, lists and tuples of tensors; `to_pytree` restores them.

    >>> from raffia import TensorDict
    >>> TensorDict.from_pytree([torch.zeros(2), {"a": torch.ones(2)}]).to_dict()
    {'0': tensor([0., 0.]), '1': {'a': tensor([1., 1.])}}
    """
    if isinstance(pytree, Tensor):
        return pytree
    found = any_entries(pytree, cls)
    if found is None:
        raise ValueError(
            f"from_pytree takes dicts, lists and tuples of tensors, got {type(pytree).__name__}"
        )
    if isinstance(found, Node):
        return found
    td = finished(cls, found, auto_batch_size, batch_size, None, batch_dims)
    td._skeleton = _kinds(pytree)
    return td


def _kinds(tree: Any) -> Any:
    """The structure of a pytree: which kind of sequence or dict stands where."""
    if isinstance(tree, Mapping):
        return {name: _kinds(value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        parts = [_kinds(value) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return None


def from_namedtuple(
    cls: Any,
    named_tuple: Any,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: Any = None,
    batch_size: Any = None,
) -> Any:
    """A container from a named tuple.

    >>> from collections import namedtuple
    >>> from raffia import TensorDict
    >>> TensorDict.from_namedtuple(namedtuple("Point", "x y")(torch.zeros(2), torch.ones(2)))["y"]
    tensor([1., 1.])
    """
    if not hasattr(named_tuple, "_fields"):
        raise TypeError(f"from_namedtuple takes a named tuple, got {type(named_tuple).__name__}")
    return finished(
        cls, any_entries(named_tuple, cls), auto_batch_size, batch_size, device, batch_dims
    )


def from_dataclass(
    cls: Any,
    dataclass: Any,
    *,
    dest_cls: Any = None,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    as_tensorclass: bool = False,
    device: Any = None,
    batch_size: Any = None,
) -> Any:
    """A container from an instance of a dataclass.

    as_tensorclass: give a tensorclass with the same fields; `dest_cls` names the one to use.

    >>> import dataclasses
    >>> from raffia import TensorDict
    >>> @dataclasses.dataclass
    ... class Point:
    ...     x: torch.Tensor
    >>> TensorDict.from_dataclass(Point(torch.zeros(2)))["x"]
    tensor([0., 0.])
    """
    if not dataclasses.is_dataclass(dataclass):
        raise TypeError(f"from_dataclass takes a dataclass, got {type(dataclass).__name__}")
    if as_tensorclass or dest_cls is not None or isinstance(dataclass, type):
        from raffia.tensordict.tensorclass import from_dataclass as to_class

        made = to_class(dataclass, dest_cls)
        if isinstance(dataclass, type):
            return made
        cls = made
    return finished(
        cls, any_entries(dataclass, cls), auto_batch_size, batch_size, device, batch_dims
    )


def from_tuple(
    cls: Any,
    obj: tuple[Any, ...],
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: Any = None,
    batch_size: Any = None,
) -> Any:
    """A container from a tuple; the entries are named "0", "1", ...

    >>> from raffia import TensorDict
    >>> TensorDict.from_tuple((torch.zeros(2), torch.ones(2)))["1"]
    tensor([1., 1.])
    """
    if not isinstance(obj, tuple):
        raise TypeError(f"from_tuple takes a tuple, got {type(obj).__name__}")
    return finished(
        cls, any_entries(tuple(obj), cls), auto_batch_size, batch_size, device, batch_dims
    )


def from_list(
    cls: Any,
    input: list[Any],
    *,
    auto_batch_size: bool | None = None,
    batch_size: Any = None,
    device: Any = None,
    batch_dims: int | None = None,
    names: Sequence[str | None] | None = None,
    lazy: bool | None = None,
) -> Any:
    """A stack of containers, one for each dict in the list.

    lazy: stack without copying; None: only where shapes or keys differ.

    >>> from raffia import TensorDict
    >>> TensorDict.from_list([{"a": 1}, {"a": 2}])["a"]
    tensor([1, 2])
    """
    from raffia.tensordict.lazy import lazy_stack
    from raffia.tensordict.stack import maybe_dense_stack, stack

    rows = [finished(cls, row, auto_batch_size, batch_size, device, batch_dims) for row in input]
    how = maybe_dense_stack if lazy is None else lazy_stack if lazy else stack
    out = how(rows, 0)
    if names is not None:
        out.names = names
    return out


def from_struct_array(
    cls: Any,
    struct_array: np.ndarray,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: Any = None,
    batch_size: Any = None,
) -> Any:
    """A container from a structured numpy array; its shape is the batch size.

    >>> from raffia import TensorDict
    >>> rows = np.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i8"), ("b", "f4")])
    >>> TensorDict.from_struct_array(rows)["b"]
    tensor([2., 4.])
    """
    if not struct_array.dtype.names:
        raise TypeError(
            f"from_struct_array takes an array with named fields, got dtype {struct_array.dtype}"
        )
    entries = {name: _field(struct_array[name], cls) for name in struct_array.dtype.names}
    if batch_size is None and not auto_batch_size and batch_dims is None:
        batch_size = struct_array.shape
    return finished(cls, entries, auto_batch_size, batch_size, device, batch_dims)


def _field(column: np.ndarray, cls: Any) -> Any:
    if column.dtype.names:
        return from_struct_array(cls, column)
    return (
        torch.as_tensor(np.ascontiguousarray(column))
        if column.dtype.kind in "biufc"
        else column.tolist()
    )


def fromkeys(cls: Any, keys: Sequence[NestedKey], value: Any = 0) -> Any:
    """A container with `value` under each key.

    >>> from raffia import TensorDict
    >>> TensorDict.fromkeys(["a", ("b", "c")], 1).to_dict()
    {'a': tensor(1), 'b': {'c': tensor(1)}}
    """
    td = cls._from_entries({}, None, None)
    for key in keys:
        td.set(key, value)
    return td


# ------------------------------------------------------------------------ like this one


def _new_filled(
    td: Any,
    make: str,
    size: Any,
    fill: tuple[Any, ...],
    options: dict[str, Any],
    empty_lazy: bool = False,
) -> Any:
    shape = as_size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
    ndim = len(td._batch_size)
    options = {name: value for name, value in options.items() if value is not None}
    out = td._batched(
        lambda x: getattr(x, make)(shape + x.shape[ndim:], *fill, **options), ndim, shape
    )
    if "device" in options:
        out._set_device(as_device(options["device"]))
    return out


def new_zeros(
    td: Any, *size: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> Any:
    """A container of zeros with these entries and another batch size.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.ones(2, 3), batch_size=[2]).new_zeros(4)["a"].shape
    torch.Size([4, 3])
    """
    return _new_filled(
        td, "new_zeros", size, (), dict(dtype=dtype, device=device, requires_grad=requires_grad)
    )


def new_ones(
    td: Any, *size: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> Any:
    """A container of ones with these entries and another batch size.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2), batch_size=[2]).new_ones(3)["a"]
    tensor([1., 1., 1.])
    """
    return _new_filled(
        td, "new_ones", size, (), dict(dtype=dtype, device=device, requires_grad=requires_grad)
    )


def new_empty(
    td: Any, *size: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> Any:
    """A container of uninitialised tensors with these entries and another batch size.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2, 3), batch_size=[2]).new_empty(5)["a"].shape
    torch.Size([5, 3])
    """
    return _new_filled(
        td, "new_empty", size, (), dict(dtype=dtype, device=device, requires_grad=requires_grad)
    )


def new_full(
    td: Any,
    size: Any,
    fill_value: Any,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
) -> Any:
    """A container filled with `fill_value`, with these entries and another batch size.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2), batch_size=[2]).new_full([3], 7)["a"]
    tensor([7., 7., 7.])
    """
    options = dict(dtype=dtype, device=device, requires_grad=requires_grad)
    return _new_filled(td, "new_full", (as_size(size),), (fill_value,), options)


def new_tensor(
    td: Any, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> Any:
    """A container with these entries and the values of `data`, a container or something for all.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2), batch_size=[2]).new_tensor(TensorDict(a=[1, 2]))["a"]
    tensor([1., 2.])
    """
    options = {k: v for k, v in dict(dtype=dtype, device=device).items() if v is not None}

    def made(like: Tensor, value: Any) -> Tensor:
        source = value.detach().clone() if isinstance(value, Tensor) else torch.as_tensor(value)
        return source.to(**{"dtype": like.dtype, "device": like.device, **options}).requires_grad_(
            requires_grad
        )

    if not isinstance(data, Node):
        source = torch.as_tensor(data)
        return td._batched(lambda x: made(x, source), len(td._batch_size), source.shape)
    entries = {}
    for name, value in data._entries().items():
        mine = td._get_str(name)
        if isinstance(value, Node):
            entries[name] = (
                value if mine is None or value._is_data() else new_tensor(mine, value, **options)
            )
        else:
            entries[name] = made(value if mine is None else mine, value)
    return td._new(entries, data._batch_size)


def from_schema(
    cls: Any,
    /,
    schema: Mapping[NestedKey, tuple[Sequence[int], torch.dtype]],
    *,
    batch_size: Any = None,
    storage: str | None = None,
    device: Any = None,
    **kwargs: Any,
) -> Any:
    """A container of zeros with these entries.

    schema: for each key the shape of an element and its dtype; an entry has the batch size before.
    storage: "memmap" for files, whose folder is `prefix` and other arguments those of
        `memmap_like`; "shared" for shared memory; None for neither.

    >>> from raffia import TensorDict
    >>> TensorDict.from_schema({"obs": ([4], torch.uint8)}, batch_size=[2])["obs"].shape
    torch.Size([2, 4])
    """
    if storage not in (None, "memmap", "shared"):
        raise ValueError(f'from_schema: storage is None, "memmap" or "shared", got {storage!r}')
    if kwargs and storage != "memmap":
        raise TypeError(f"from_schema: {sorted(kwargs)} go with storage='memmap' only")
    size = as_size(batch_size)
    mapped = storage == "memmap"
    td = cls._from_entries({}, size, None if mapped else device)
    for key, (shape, dtype) in schema.items():
        if mapped:  # no memory for what is made on disk below
            td.set(key, torch.zeros((), dtype=dtype).expand((*size, *shape)))
        else:
            td.set(key, torch.zeros((*size, *shape), dtype=dtype, device=td._device))
    if mapped:
        return td.memmap_like(**kwargs)
    return td.share_memory_() if storage == "shared" else td


# ------------------------------------------------------------------------ showing


def show(td: Any) -> str:
    """The text of a container: entries in alphabetical order, nested ones indented."""
    options = printing.shown() or printing.DEFAULTS
    if options["compact"]:
        return printing.compact(td, options)
    names = sorted(td.keys()) if options["sort_keys"] == "alphabetical" else td.keys()
    lines = [f"{name}: {_describe(td, name)}" for name in names]
    fields = ",\n".join([indented(line) for line in lines])
    body = ["fields={" + ("\n" + fields + "}" if lines else "\n}"), *td._extra_lines()]
    said = {
        "show_batch_size": f"batch_size={td.batch_size}",
        "show_device": f"device={td.device}",
        "show_is_shared": f"is_shared={td.is_shared()}",
    }
    body += [*[text for name, text in said.items() if options[name]], *td._last_lines()]
    return f"{type(td).__name__}(\n" + indented(",\n".join(body)) + ")"


def indented(text: str) -> str:
    """`text` four columns to the right, but for blank lines."""
    if "\n\n" in text:
        return textwrap.indent(text, "    ")
    return "    " + text.replace("\n", "\n    ")


def _describe(td: Any, name: str) -> str:
    try:
        value = td._get_str(name)
    except RuntimeError:
        return td._describe_unlike(name)
    return describe_tensor(value) if isinstance(value, Tensor) else repr(value)


def describe_tensor(value: Any) -> str:
    """One line for a tensor: class, shape, device, dtype, sharing."""
    if not isinstance(value, Tensor):
        return repr(value)
    kind = "Parameter" if isinstance(value, nn.Parameter) else type(value).__name__
    shared = (
        value.untyped_storage().is_shared()
        if value.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(value)
        else value.is_cuda
    )
    options, shape = printing.shown(), shape_of(value)
    if options is not None:
        return f"{kind}({', '.join(printing.tensor_parts(value, shape, shared, options))})"
    return f"{kind}(shape={shape}, device={value.device}, dtype={value.dtype}, is_shared={shared})"
