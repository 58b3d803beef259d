"""Containers from other structures: `from_dict` and the like; and containers like another one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypedDict, Unpack, overload

import numpy as np
import torch
from torch import Tensor

from raffia.hints import check_choice
from raffia.tensordict import kinds
from raffia.tensordict.build import SizeOptions, as_device, as_size, finished, sized
from raffia.tensordict.keys import NestedKey, is_key
from raffia.tensordict.node import BatchSize, Device, Node
from raffia.tensordict.signatures import shows_options_of


class TensorOptions(TypedDict, total=False):
    """Options of `new_zeros` and its like, for type checkers."""

    dtype: torch.dtype | None
    device: Device
    requires_grad: bool
    layout: torch.layout | None
    pin_memory: bool | None


def _new_filled(
    td: Any,
    make: str,
    size: Any,
    *fill: Any,
    dtype: torch.dtype | None = None,
    device: Device = None,
    requires_grad: bool = False,
    layout: torch.layout | None = None,
    pin_memory: bool | None = None,
) -> Any:
    """A container of `leaf.make(shape, *fill)`, with another batch size."""
    shape = as_size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
    ndim = len(td._batch_size)
    given = dict(dtype=dtype, device=device, layout=layout, pin_memory=pin_memory)
    options: Any = {name: value for name, value in given.items() if value is not None}
    if requires_grad:
        options["requires_grad"] = True
    out = td._batched(
        lambda x: getattr(x, make)(shape + x.shape[ndim:], *fill, **options), ndim, shape
    )
    if device is not None:
        out._set_device(as_device(device))
    return out


class Construction(Node):
    """Containers from other structures, and containers like another one."""

    @classmethod
    @shows_options_of(finished)
    def from_dict(
        cls,
        input_dict: Mapping[Any, Any],
        *,
        names: Sequence[str | None] | None = None,
        **options: Unpack[SizeOptions],
    ) -> Self:
        """A container from a (nested) dict.

        auto_batch_size: take as batch size the longest leading dimensions that all entries share,
            at most `batch_dims`.
        A number becomes a tensor; with a `batch_size` that has dimensions it stays a number.

        >>> from raffia import TensorDict
        >>> TensorDict.from_dict({"a": torch.zeros(2, 3)}, auto_batch_size=True).batch_size
        torch.Size([2, 3])
        """
        return finished(cls, input_dict, names=names, **options)

    @shows_options_of(finished)
    def from_dict_instance(
        self,
        input_dict: Mapping[Any, Any],
        *,
        names: Sequence[str | None] | None = None,
        **options: Unpack[SizeOptions],
    ) -> Self:
        """A container from a (nested) dict, of the kind of this one; so are nested ones.

        Fields of a tensorclass that are not in it get their defaults.

        >>> from raffia import TensorDict
        >>> TensorDict().from_dict_instance({"a": [1, 2]}, batch_size=[2]).batch_size
        torch.Size([2])
        """

        def like_mine(key: Any, value: Any) -> object:
            mine = self._peek_str(key) if isinstance(value, dict) else None
            if isinstance(mine, Construction) and not mine._is_data():
                return mine.from_dict_instance(value)
            return value

        entries = {key: like_mine(key, value) for key, value in input_dict.items()}
        return self._alike(entries, names=names, **options)

    def _alike(self, entries: Mapping[Any, Any], **options: Any) -> Any:
        """A container of this kind with these entries."""
        return finished(type(self), entries, **options)

    @overload
    @classmethod
    def from_any(cls, obj: Mapping[Any, Any], **options: Unpack[SizeOptions]) -> Self: ...
    @overload
    @classmethod
    def from_any(cls, obj: Any, **options: Unpack[SizeOptions]) -> Any: ...

    @classmethod
    @shows_options_of(finished, without="names")
    def from_any(cls, obj: Any, **options: Unpack[SizeOptions]) -> Any:
        """A container from a structure: one made of dicts, dataclasses, tuples, lists and
        containers.

        Named tuples and structured arrays are taken too; other values stay as they are.

        >>> from raffia import TensorDict
        >>> TensorDict.from_any({"a": (torch.zeros(2), {"b": 1})}).to_dict()
        {'a': {'0': tensor([0., 0.]), '1': {'b': tensor(1)}}}
        """
        found = any_entries(obj, cls)
        if found is None:
            return obj
        if isinstance(found, Node):
            return found
        return finished(cls, found, **options)

    @overload
    @classmethod
    def from_pytree(cls, pytree: Tensor, **options: Unpack[SizeOptions]) -> Tensor: ...
    @overload
    @classmethod
    def from_pytree(cls, pytree: Any, **options: Unpack[SizeOptions]) -> Self: ...

    @classmethod
    @shows_options_of(finished, without="names device")
    def from_pytree(cls, pytree: Any, **options: Unpack[SizeOptions]) -> Any:
        """A container from nested dicts, lists and tuples of tensors; `to_pytree` restores them.

        A key of a dict that is not a string, such as 1, is "1" in the container.

        >>> from raffia import TensorDict
        >>> TensorDict.from_pytree([torch.zeros(2), {"a": torch.ones(2)}]).to_dict()
        {'0': tensor([0., 0.]), '1': {'a': tensor([1., 1.])}}
        """
        if isinstance(pytree, Tensor):
            return pytree
        found = any_entries(_rebuilt(pytree, _name_of, _leaf), cls)
        if found is None:
            raise ValueError(
                f"from_pytree takes dicts, lists and tuples of tensors, got {type(pytree).__name__}"
            )
        if isinstance(found, Node):
            return found
        td: Any = finished(cls, found, **options)
        td._skeleton = _rebuilt(pytree, lambda key: key, lambda leaf: None)
        return td

    @classmethod
    @shows_options_of(finished, without="names")
    def from_namedtuple(cls, named_tuple: Any, **options: Unpack[SizeOptions]) -> Self:
        """A container from a named tuple, such as the values and indices that torch gives.

        >>> from collections import namedtuple
        >>> from raffia import TensorDict
        >>> Point = namedtuple("Point", "x y")
        >>> TensorDict.from_namedtuple(Point(torch.zeros(2), torch.ones(2)))["y"]
        tensor([1., 1.])
        >>> TensorDict.from_namedtuple(torch.tensor([3, 9, 5]).max(dim=0))["indices"]
        tensor(1)
        """
        if not _field_names(named_tuple):
            raise TypeError(
                f"from_namedtuple takes a named tuple, got {type(named_tuple).__name__}"
            )
        return finished(cls, any_entries(named_tuple, cls), **options)

    @classmethod
    @shows_options_of(finished, without="names")
    def from_dataclass(
        cls,
        dataclass: Any,
        *,
        dest_cls: Any = None,
        as_tensorclass: bool = False,
        **options: Unpack[SizeOptions],
    ) -> Self:
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
            made = kinds.from_dataclass(dataclass, dest_cls)
            if isinstance(dataclass, type):
                return made
            cls = made
        return finished(cls, any_entries(dataclass, cls), **options)

    @classmethod
    @shows_options_of(finished, without="names")
    def from_tuple(cls, obj: tuple[Any, ...], **options: Unpack[SizeOptions]) -> Self:
        """A container from a tuple; the entries are named "0", "1", ...

        >>> from raffia import TensorDict
        >>> TensorDict.from_tuple((torch.zeros(2), torch.ones(2)))["1"]
        tensor([1., 1.])
        """
        if not isinstance(obj, tuple):
            raise TypeError(f"from_tuple takes a tuple, got {type(obj).__name__}")
        return finished(cls, any_entries(tuple(obj), cls), **options)

    @classmethod
    @shows_options_of(finished)
    def from_list(
        cls,
        input: list[Any],
        *,
        names: Sequence[str | None] | None = None,
        lazy: bool | None = None,
        **options: Unpack[SizeOptions],
    ) -> Self:
        """A stack of containers, one for each dict in the list.

        batch_size, batch_dims: of the stack, whose first dimension is the list.
        lazy: stack without copying; None: only where shapes or keys differ.

        >>> from raffia import TensorDict
        >>> TensorDict.from_list([{"a": 1}, {"a": 2}])["a"]
        tensor([1, 2])
        """
        hows = {True: kinds.lazy_stack, False: kinds.stack, None: kinds.maybe_dense_stack}
        of_rows = _of_rows(len(input), **options)
        out = hows[lazy]([finished(cls, row, **of_rows) for row in input], 0)
        if names is not None:
            out.names = names
        return out

    @classmethod
    @shows_options_of(finished, without="names")
    def from_struct_array(cls, struct_array: np.ndarray, **options: Unpack[SizeOptions]) -> Self:
        """A container from a structured numpy array; its shape is the batch size.

        Tensors share the memory of the array, where it can be written and rows have a length that
        is a multiple of the field's.

        >>> from raffia import TensorDict
        >>> rows = np.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i8"), ("b", "f4")])
        >>> TensorDict.from_struct_array(rows)["b"]
        tensor([2., 4.])
        """
        if not struct_array.dtype.names:
            raise TypeError(
                "from_struct_array takes an array with named fields, got dtype "
                f"{struct_array.dtype}"
            )
        entries = {name: _field(struct_array[name], cls) for name in struct_array.dtype.names}
        return finished(cls, entries, **sized(options, struct_array.shape))

    @classmethod
    def fromkeys(cls, keys: Sequence[NestedKey], value: Any = 0) -> Self:
        """A container with `value` under each key.

        >>> from raffia import TensorDict
        >>> TensorDict.fromkeys(["a", ("b", "c")], 1).to_dict()
        {'a': tensor(1), 'b': {'c': tensor(1)}}
        """
        td = cls._from_entries({}, None, None)
        for key in keys:
            td.set(key, value)
        return td

    @shows_options_of(_new_filled)
    def new_zeros(self, *size: int | Sequence[int], **options: Unpack[TensorOptions]) -> Self:
        """A container of zeros with these entries and another batch size.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.ones(2, 3), batch_size=[2]).new_zeros(4)["a"].shape
        torch.Size([4, 3])
        """
        return _new_filled(self, "new_zeros", size, **options)

    @shows_options_of(_new_filled)
    def new_ones(self, *size: int | Sequence[int], **options: Unpack[TensorOptions]) -> Self:
        """A container of ones with these entries and another batch size.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.zeros(2), batch_size=[2]).new_ones(3)["a"]
        tensor([1., 1., 1.])
        """
        return _new_filled(self, "new_ones", size, **options)

    @shows_options_of(_new_filled)
    def new_empty(self, *size: int | Sequence[int], **options: Unpack[TensorOptions]) -> Self:
        """A container of uninitialised tensors with these entries and another batch size.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.zeros(2, 3), batch_size=[2]).new_empty(5)["a"].shape
        torch.Size([5, 3])
        """
        return _new_filled(self, "new_empty", size, **options)

    @shows_options_of(_new_filled)
    def new_full(
        self, size: int | Sequence[int], fill_value: Any, **options: Unpack[TensorOptions]
    ) -> Self:
        """A container filled with `fill_value`, with these entries and another batch size.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.zeros(2), batch_size=[2]).new_full([3], 7)["a"]
        tensor([7., 7., 7.])
        """
        return _new_filled(self, "new_full", (as_size(size),), fill_value, **options)

    def new_tensor(
        self,
        data: Any,
        *,
        dtype: torch.dtype | None = None,
        device: Device = None,
        requires_grad: bool = False,
    ) -> Self:
        """A container with these entries and the values of `data`, a container or one value for
        all.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.zeros(2), batch_size=[2]).new_tensor(TensorDict(a=[1, 2]))["a"]
        tensor([1., 2.])
        """
        given: dict[str, Any] = dict(dtype=dtype, device=device)
        options = {k: v for k, v in given.items() if v is not None}

        def made(like: Tensor, value: Any) -> Tensor:
            source = value.detach().clone() if isinstance(value, Tensor) else torch.as_tensor(value)
            return source.to(
                **{"dtype": like.dtype, "device": like.device, **options}
            ).requires_grad_(requires_grad)

        if not isinstance(data, Node):
            source = torch.as_tensor(data)
            return self._batched(lambda x: made(x, source), len(self._batch_size), source.shape)
        entries = {}
        for name, value in data._entries().items():
            mine = self._get_str(name)
            if isinstance(value, Node):
                entries[name] = (
                    value if mine is None or value._is_data() else mine.new_tensor(value, **options)
                )
            else:
                entries[name] = made(value if mine is None else mine, value)
        return self._new(entries, data._batch_size)

    @classmethod
    def from_schema(
        cls,
        /,
        schema: Mapping[NestedKey, tuple[Sequence[int], torch.dtype]],
        *,
        batch_size: BatchSize = None,
        storage: str | None = None,
        device: Device = None,
        **kwargs: Any,
    ) -> Self:
        """A container of zeros with these entries.

        schema: for each key the shape of an element and its dtype; an entry has the batch size
            before.
        storage: "memmap" for files, whose folder is `prefix` and other arguments those of
            `memmap_like`; "shared" for shared memory; None for neither.

        >>> from raffia import TensorDict
        >>> TensorDict.from_schema({"obs": ([4], torch.uint8)}, batch_size=[2])["obs"].shape
        torch.Size([2, 4])
        """
        check_choice("storage", storage, (None, "memmap", "shared"))
        if kwargs and storage != "memmap":
            raise TypeError(
                f"from_schema: {sorted(kwargs)} can only be passed with storage='memmap'"
            )
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


def _of_rows(length: int, **options: Unpack[SizeOptions]) -> SizeOptions:
    """The options for each of so many rows, from those for their stack."""
    if options.get("batch_size") is not None:
        size = as_size(options["batch_size"])
        if size[:1] != (length,):
            raise ValueError(
                f"batch_size is that of the stack, so it starts with the length of the list: got "
                f"{tuple(size)} for {length} rows; batch_size=({length}, ...)"
            )
        options["batch_size"] = size[1:]
    if options.get("batch_dims") is not None:
        options["batch_dims"] = options["batch_dims"] - 1  # type: ignore[operator]
    return options


def any_entries(obj: Any, cls: Any) -> Node | dict[str, Any] | None:
    """Entries of a structure, with structures inside taken apart too; None if it has no entries."""
    if obj.__class__ is Tensor:
        return None
    if isinstance(obj, Node):
        return obj
    if isinstance(obj, Mapping):
        pairs: Any = obj.items()
    elif dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        pairs = [(field.name, getattr(obj, field.name)) for field in dataclasses.fields(obj)]
    elif names := _field_names(obj):
        pairs = zip(names, obj, strict=True)
    elif isinstance(obj, np.ndarray) and obj.dtype.names:
        return cls.from_struct_array(obj)
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


def _field_names(obj: Any) -> tuple[str, ...]:
    """The names of the fields of a named tuple or of torch's kind of them; else none."""
    if not isinstance(obj, tuple):
        return ()
    kind: Any = type(obj)
    return getattr(kind, "_fields", ()) or (
        kind.__match_args__ if hasattr(kind, "n_sequence_fields") else ()
    )


def _leaf(value: Any) -> Any:
    """A leaf of a pytree; numbers are tensors, so that a list of them is taken apart."""
    return torch.as_tensor(value) if isinstance(value, (bool, int, float, complex)) else value


def _rebuilt(tree: Any, name: Callable[[Any], Any], leaf: Callable[[Any], Any]) -> Any:
    """A pytree with other names for the keys of its dicts, and other leaves."""
    if isinstance(tree, Mapping) and not isinstance(tree, Node):
        out = {name(key): _rebuilt(value, name, leaf) for key, value in tree.items()}
        if len(out) < len(tree):
            raise KeyError(f"two of the keys {list(tree)} of a dict have the same name")
        return out
    if isinstance(tree, (list, tuple)):
        parts = [_rebuilt(value, name, leaf) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return leaf(tree)


def _name_of(key: Any) -> Any:
    return key if is_key(key) else str(key)


def _field(column: np.ndarray, cls: Any) -> Any:
    if column.dtype.names:
        return cls.from_struct_array(column)
    if column.dtype.kind not in "biufc":
        return column.tolist()
    steps = column.strides
    whole = column.flags.aligned and all([n >= 0 and n % column.itemsize == 0 for n in steps])
    if not (whole and column.flags.writeable):
        column = column.copy()  # torch can't view it; a single row counts as contiguous for numpy
    return torch.as_tensor(column)
