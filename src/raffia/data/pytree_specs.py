"""Pytrees of tensors: a TensorDict (or tensorclass), a dict, a list, a tuple or a named tuple.

Each kind has a class here that takes such data apart into its tensors, always in the same order,
and puts others together in the same way.
"""

import collections
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raffia.tensordict.access import dense_entries, entries, instance_over, is_value, unchecked
from raffia.tensordict.memmap import DTYPE_NAMES
from raffia.tensordict.node import REGISTRY, Node
from raffia.tensordict.tensorclass import is_tensorclass
from raffia.tensordict.tensordict import TensorDict

Json = dict[str, Any]


class StructureMismatch(Exception):
    """Data of another structure; on its way up, each node adds the name of its entry."""

    def __init__(self, why: str, error: type[Exception] = ValueError) -> None:
        self.path: tuple[Any, ...] = ()
        self.why, self.error = why, error

    def within(self, name: Any) -> "StructureMismatch":
        self.path = (name, *self.path)
        return self

    def public(self) -> Exception:
        return self.error(f"{entry(self.path)} {self.why}")


def entry(path: tuple[Any, ...]) -> str:
    """An entry's name in messages.

    >>> entry(("next", "obs")), entry(("obs",)), entry(())
    ("entry ('next', 'obs')", "entry 'obs'", 'the data')
    """
    return f"entry {(path[0] if len(path) == 1 else path)!r}" if path else "the data"


class PytreeSpec(ABC):
    """The structure of a tensor, or of a pytree of tensors."""

    @abstractmethod
    def take(self, data: Any, out: list[Tensor]) -> None:
        """Append the tensors of `data` to `out`; StructureMismatch if it has another structure."""

    @abstractmethod
    def build(self, leaf: Callable[[], Tensor], batch: torch.Size, device: torch.device) -> Any:
        """A pytree of this structure with other tensors, which `leaf` returns one by one."""

    @abstractmethod
    def paths(self) -> Iterator[tuple[Any, ...]]:
        """Paths of the tensors, in their order."""

    @abstractmethod
    def to_json(self) -> Json:
        """The structure as JSON can hold it; `spec_from_json` reads it."""


@dataclass(frozen=True)
class LeafSpec(PytreeSpec):
    """The structure of a tensor."""

    def take(self, data: Any, out: list[Tensor]) -> None:
        if data.__class__ is not Tensor and not isinstance(data, Tensor):
            raise StructureMismatch(f"is {_kind(data)}, but a tensor is stored there", TypeError)
        out.append(data)

    def build(self, leaf: Callable[[], Tensor], batch: torch.Size, device: torch.device) -> Tensor:
        return leaf()

    def paths(self) -> Iterator[tuple[Any, ...]]:
        yield ()

    def to_json(self) -> Json:
        return {"kind": "tensor"}


@dataclass(frozen=True)
class NodeSpec(PytreeSpec):
    """The structure of a node: parts under names."""

    parts: dict[Any, PytreeSpec]

    @abstractmethod
    def entries(self, data: Any) -> dict[Any, Any]:
        """The entries of `data` by name; StructureMismatch if it is another kind of node."""

    def take(self, data: Any, out: list[Tensor]) -> None:
        entries = self.entries(data)
        parts = self.parts
        if len(entries) > len(parts):
            new = next(name for name in entries if name not in parts)
            raise StructureMismatch(f"is not stored here: {_stored(parts)}").within(new)
        for name, part in parts.items():
            if name not in entries:
                new = [other for other in entries if other not in parts]
                found = f"; {', '.join(map(repr, new))} is not stored here" if new else ""
                raise StructureMismatch(f"is missing{found}: {_stored(parts)}").within(name)
            try:
                part.take(entries[name], out)
            except StructureMismatch as mismatch:
                raise mismatch.within(name) from None

    def paths(self) -> Iterator[tuple[Any, ...]]:
        for name, part in self.parts.items():
            for path in part.paths():
                yield (name, *path)

    def parts_json(self) -> list[Any]:
        return [[name, part.to_json()] for name, part in self.parts.items()]


def _stored(parts: dict[Any, PytreeSpec]) -> str:
    return f"every write must have the entries of the first one, {list(parts)}, and no others"


def _kind(data: Any) -> str:
    return f"a {type(data).__name__}"


@dataclass(frozen=True)
class ContainerSpec(NodeSpec):
    """The structure of a TensorDict or tensorclass."""

    batch_size: torch.Size  # batch size of a row, without the dimensions that count rows
    names: list[str | None] | None  # names of these dimensions
    has_device: bool  # whether the container has a device
    wrap: Any  # the tensorclass around the container, or None

    def entries(self, data: Any) -> dict[Any, Any]:
        if data.__class__ is TensorDict:
            return dense_entries(data)
        if not isinstance(data, Node) or is_value(data):
            raise StructureMismatch(f"is {_kind(data)}, but a container is stored there", TypeError)
        return _container_entries(data)

    def build(self, leaf: Callable[[], Tensor], batch: torch.Size, device: torch.device) -> Any:
        entries = {name: part.build(leaf, batch, device) for name, part in self.parts.items()}
        size = batch + self.batch_size if self.batch_size else batch
        names = None if self.names is None else [*[None] * len(batch), *self.names]
        td = unchecked(entries, size, device if self.has_device else None, names)
        if self.wrap is None:
            return td
        return instance_over(self.wrap, td)

    def to_json(self) -> Json:
        out: Json = {"kind": "container", "parts": self.parts_json()}
        out |= {"batch_size": list(self.batch_size), "names": self.names}
        wrap = None if self.wrap is None else _class_name(self.wrap)
        return out | {"device": self.has_device, "tensorclass": wrap}


def _container_entries(data: Any) -> dict[str, Any]:
    """The entries of any container; those of a lazy stack are put together."""
    exclusive = {name for names in getattr(data, "_exclusive", list)() for name in names}
    if exclusive:
        raise StructureMismatch("is only in some members of the lazy stack").within(min(exclusive))
    try:
        return entries(data)
    except RuntimeError as error:  # members of a lazy stack that differ in shape
        raise StructureMismatch(f"is a lazy stack that cannot be made dense: {error}") from None


@dataclass(frozen=True)
class DictSpec(NodeSpec):
    """The structure of a plain dict."""

    def entries(self, data: Any) -> dict[Any, Any]:
        if not isinstance(data, dict):
            raise StructureMismatch(f"is {_kind(data)}, but a dict is stored there", TypeError)
        return data

    def build(self, leaf: Callable[[], Tensor], batch: torch.Size, device: torch.device) -> Any:
        return {name: part.build(leaf, batch, device) for name, part in self.parts.items()}

    def to_json(self) -> Json:
        return {"kind": "dict", "parts": self.parts_json()}


@dataclass(frozen=True)
class SequenceSpec(NodeSpec):
    """The structure of a list, tuple or named tuple: its parts are named 0, 1, ..., or by their
    fields."""

    cls: type[Any]

    def entries(self, data: Any) -> dict[Any, Any]:
        same_type = type(data) is self.cls
        if not same_type and hasattr(self.cls, "_fields") and isinstance(data, tuple):
            same_type = getattr(data, "_fields", None) == self.cls._fields
        if not same_type:
            stored = f"a {self.cls.__name__}"
            raise StructureMismatch(f"is {_kind(data)}, but {stored} is stored there", TypeError)
        return dict(zip(_names_in(data), data, strict=True))

    def build(self, leaf: Callable[[], Tensor], batch: torch.Size, device: torch.device) -> Any:
        built = [part.build(leaf, batch, device) for part in self.parts.values()]
        return self.cls(*built) if hasattr(self.cls, "_fields") else self.cls(built)

    def to_json(self) -> Json:
        kind = "namedtuple" if hasattr(self.cls, "_fields") else self.cls.__name__
        return {"kind": kind, "parts": self.parts_json(), "class": _class_name(self.cls)}


def _names_in(data: Any) -> Sequence[Any]:
    return getattr(data, "_fields", range(len(data)))


def _class_name(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# -------------------------------------------------------------------------------- reading off


def spec_of(data: Any, batch_dims: int) -> PytreeSpec:
    """The structure of `data`; StructureMismatch if it holds anything but tensors."""
    if isinstance(data, Tensor):
        if isinstance(data, Node):
            raise StructureMismatch(
                "is an UnbatchedTensor, which has no rows to store; leave it out with "
                "td.exclude(...)",
                TypeError,
            )
        if data.layout is not torch.strided or data.is_nested or data.is_meta:
            raise StructureMismatch(
                f"is a tensor that cannot be stored: {data.layout}, on {data.device}"
            )
        if data.dtype not in DTYPE_NAMES:
            raise StructureMismatch(
                f"is a tensor of {data.dtype}, which cannot be stored", TypeError
            )
        return LeafSpec()
    if isinstance(data, Node) and not is_value(data):
        return _container_spec(data, batch_dims)
    if isinstance(data, dict):
        for name in data:
            if not isinstance(name, (str, int)):
                raise StructureMismatch(
                    f"has the key {name!r}, but keys must be strings or integers", TypeError
                )
        return DictSpec(_parts(data, batch_dims))
    if type(data) in (list, tuple) or (isinstance(data, tuple) and hasattr(data, "_fields")):
        return SequenceSpec(
            _parts(dict(zip(_names_in(data), data, strict=True)), batch_dims), type(data)
        )
    raise StructureMismatch(
        f"is {_kind(_plain_value(data))}, but a storage holds only tensors: convert it with "
        "torch.as_tensor(...), or leave it out with td.exclude(...)",
        TypeError,
    )


def _plain_value(data: Any) -> Any:
    return data.tolist() if isinstance(data, Node) else data


def _parts(entries: dict[Any, Any], batch_dims: int) -> dict[Any, PytreeSpec]:
    parts = {}
    for name, value in entries.items():
        try:
            parts[name] = spec_of(value, batch_dims)
        except StructureMismatch as mismatch:
            raise mismatch.within(name) from None
    return parts


def _container_spec(data: Any, batch_dims: int) -> ContainerSpec:
    size, names = data._batch_size[batch_dims:], data._names
    row_names = None if names is None or not any(names[batch_dims:]) else list(names[batch_dims:])
    wrap = type(data) if is_tensorclass(data) else None
    parts = _parts(_container_entries(data), batch_dims)
    return ContainerSpec(parts, size, row_names, data._device is not None, wrap)


# ----------------------------------------------------------------------------------- from JSON


def spec_from_json(record: Json) -> PytreeSpec:
    """The structure that `to_json` wrote; ValueError, KeyError or TypeError otherwise."""
    kind = record["kind"]
    if kind == "tensor":
        return LeafSpec()
    parts = {_name(name): spec_from_json(part) for name, part in record["parts"]}
    if kind == "container":
        size, names = torch.Size(record["batch_size"]), record["names"]
        wrap = _known_tensorclass(record["tensorclass"], parts)
        return ContainerSpec(parts, size, names, record["device"] is True, wrap)
    if kind == "dict":
        return DictSpec(parts)
    if kind in ("list", "tuple") and [*parts] == [*range(len(parts))]:
        return SequenceSpec(parts, list if kind == "list" else tuple)
    if kind == "namedtuple":
        return SequenceSpec(parts, _named_tuple(record["class"], tuple(map(str, parts))))
    raise ValueError(f"{kind!r} is not a known kind of node")


def _name(name: Any) -> str | int:
    if not isinstance(name, (str, int)):
        raise ValueError(f"{name!r} is not a valid name for an entry")
    return name


def _known_tensorclass(name: str | None, parts: dict[Any, PytreeSpec]) -> Any:
    if name is None:
        return None
    if name not in REGISTRY or not parts.keys() <= REGISTRY[name]._fields.keys():
        raise ValueError(
            f"the rows are of the tensorclass {name}, which is not defined here, or has other "
            "fields: import the module that defines it first"
        )
    return REGISTRY[name]


def _named_tuple(name: str, fields: tuple[str, ...]) -> type[Any]:
    """The named tuple of this name if it exists in this process, else an equivalent new one."""
    module, _, qualname = name.rpartition(".")
    found = vars(sys.modules[module]).get(qualname) if module in sys.modules else None
    if isinstance(found, type) and issubclass(found, tuple):
        if getattr(found, "_fields", None) == fields:
            return found
    return collections.namedtuple(qualname, fields)
