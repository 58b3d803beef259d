"""Pytrees of tensors: a TensorDict (or tensorclass), a dict, a list, a tuple or a named tuple.

A `PytreeSpec` takes such data apart into its tensors, always in the same order, and puts others
together in the same way.
"""

import collections
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class PytreeSpec:
    """The structure of a tensor, or of a pytree of tensors: parts under names.

    Parts of a list or tuple have the names 0, 1, ..., those of a named tuple its fields.
    """

    kind: str  # "tensor", "container", "dict", "list", "tuple" or "namedtuple"
    parts: dict[Any, "PytreeSpec"] = field(default_factory=dict)
    cls: Any = None  # of a sequence its type, of a tensorclass that
    # of a container, where `batch_size` and `names` are without the dimensions that count rows:
    batch_size: torch.Size = torch.Size()
    names: list[str | None] | None = None
    has_device: bool = False

    def take(self, data: Any, out: list[Tensor]) -> None:
        """Append the tensors of `data` to `out`; StructureMismatch if it has another structure."""
        if self.kind == "tensor":
            if data.__class__ is not Tensor and not isinstance(data, Tensor):
                raise self._other(data)
            out.append(data)
            return
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

    def entries(self, data: Any) -> dict[Any, Any]:
        """The entries of a node by name; StructureMismatch if it is another kind of node."""
        if self.kind == "container":
            if data.__class__ is TensorDict:
                return dense_entries(data)
            if isinstance(data, Node) and not is_value(data):
                return _container_entries(data)
        elif self.kind == "dict":
            if isinstance(data, dict):
                return data
        elif type(data) is self.cls or (
            self.kind == "namedtuple"
            and isinstance(data, tuple)
            and getattr(data, "_fields", None) == self.cls._fields
        ):
            return dict(zip(_names_in(data), data, strict=True))
        raise self._other(data)

    def _other(self, data: Any) -> StructureMismatch:
        name = self.cls.__name__ if self.kind == "namedtuple" else self.kind
        return StructureMismatch(f"is {_kind(data)}, but a {name} is stored there", TypeError)

    def build(self, leaf: Callable[[], Tensor], batch: torch.Size, device: torch.device) -> Any:
        """A pytree of this structure with other tensors, which `leaf` returns one by one."""
        if self.kind == "tensor":
            return leaf()
        built = {
            name: leaf() if part.kind == "tensor" else part.build(leaf, batch, device)
            for name, part in self.parts.items()
        }
        if self.kind == "container":
            size = batch + self.batch_size if self.batch_size else batch
            names = None if self.names is None else [*[None] * len(batch), *self.names]
            td = unchecked(built, size, device if self.has_device else None, names)
            return td if self.cls is None else instance_over(self.cls, td)
        if self.kind == "dict":
            return built
        return self.cls(*built.values()) if self.kind == "namedtuple" else self.cls(built.values())

    def paths(self) -> Iterator[tuple[Any, ...]]:
        """Paths of the tensors, in their order."""
        if self.kind == "tensor":
            yield ()
        for name, part in self.parts.items():
            for path in part.paths():
                yield (name, *path)

    def to_json(self) -> Json:
        """The structure as JSON can hold it; `spec_from_json` reads it."""
        out: Json = {"kind": self.kind}
        if self.kind != "tensor":
            out["parts"] = [[name, part.to_json()] for name, part in self.parts.items()]
        cls = None if self.cls is None else f"{self.cls.__module__}.{self.cls.__qualname__}"
        if self.kind == "container":
            out |= {"batch_size": list(self.batch_size), "names": self.names}
            out |= {"device": self.has_device, "tensorclass": cls}
        elif cls is not None:
            out["class"] = cls
        return out


def _stored(parts: dict[Any, PytreeSpec]) -> str:
    return f"every write must have the entries of the first one, {list(parts)}, and no others"


def _kind(data: Any) -> str:
    return f"a {type(data).__name__}"


def _container_entries(data: Any) -> dict[str, Any]:
    """The entries of any container; those of a lazy stack are put together."""
    exclusive = {name for names in getattr(data, "_exclusive", list)() for name in names}
    if exclusive:
        raise StructureMismatch("is only in some members of the lazy stack").within(min(exclusive))
    try:
        return entries(data)
    except RuntimeError as error:  # members of a lazy stack that differ in shape
        raise StructureMismatch(f"is a lazy stack that cannot be made dense: {error}") from None


def _names_in(data: Any) -> Sequence[Any]:
    return getattr(data, "_fields", range(len(data)))


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
                "is a tensor that cannot be stored: "
                f"{'nested' if data.is_nested else data.layout}, on {data.device}"
            )
        if data.dtype not in DTYPE_NAMES:
            raise StructureMismatch(
                f"is a tensor of {data.dtype}, which cannot be stored", TypeError
            )
        return PytreeSpec("tensor")
    if isinstance(data, Node) and not is_value(data):
        return _container_spec(data, batch_dims)
    if isinstance(data, dict):
        for name in data:
            if not isinstance(name, (str, int)):
                raise StructureMismatch(
                    f"has the key {name!r}, but keys must be strings or integers", TypeError
                )
        return PytreeSpec("dict", _parts(data, batch_dims))
    kind = type(data).__name__ if type(data) in (list, tuple) else "namedtuple"
    if kind != "namedtuple" or (isinstance(data, tuple) and hasattr(data, "_fields")):
        parts = _parts(dict(zip(_names_in(data), data, strict=True)), batch_dims)
        return PytreeSpec(kind, parts, type(data))
    if hasattr(data, "batch_size") and hasattr(data, "to_dict") and not isinstance(data, Node):
        raise StructureMismatch(
            f"is a {type(data).__name__} of {type(data).__module__.partition('.')[0]}: convert it "
            "with raffia.TensorDict(td.to_dict(), batch_size=td.batch_size)",
            TypeError,
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


def _container_spec(data: Any, batch_dims: int) -> PytreeSpec:
    size, names = data._batch_size[batch_dims:], data._names
    row_names = None if names is None or not any(names[batch_dims:]) else list(names[batch_dims:])
    cls = type(data) if is_tensorclass(data) else None
    parts = _parts(_container_entries(data), batch_dims)
    return PytreeSpec("container", parts, cls, size, row_names, data._device is not None)


# ----------------------------------------------------------------------------------- from JSON


def spec_from_json(record: Json) -> PytreeSpec:
    """The structure that `to_json` wrote; ValueError, KeyError or TypeError otherwise."""
    kind = record["kind"]
    if kind == "tensor":
        return PytreeSpec(kind)
    parts = {_name(name): spec_from_json(part) for name, part in record["parts"]}
    if kind == "container":
        size, names = torch.Size(record["batch_size"]), record["names"]
        cls = _known_tensorclass(record["tensorclass"], parts)
        return PytreeSpec(kind, parts, cls, size, names, record["device"] is True)
    if kind == "dict":
        return PytreeSpec(kind, parts)
    if kind in ("list", "tuple") and [*parts] == [*range(len(parts))]:
        return PytreeSpec(kind, parts, list if kind == "list" else tuple)
    if kind == "namedtuple":
        return PytreeSpec(kind, parts, _named_tuple(record["class"], tuple(map(str, parts))))
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
