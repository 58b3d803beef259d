"""The record of a container: its tree as JSON, without what is in the tensors.

It holds class, batch size, names, and the entry under each name. `outline` makes it from a
container, `rebuild` makes a container from it and trusts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor

from raffia.files import (
    DamagedFileError,
    MissingFileError,
    dump_json,
    open_plain,
    parse_json,
    shown,
    write_atomically,
)
from raffia.tensordict import dim_names, kinds, ragged
from raffia.tensordict.build import shape_of
from raffia.tensordict.json_values import decode, encode
from raffia.tensordict.memmap import DTYPE_NAMES, DTYPES
from raffia.tensordict.node import REGISTRY, Names, Node

VERSION = 1
RAGGED_VERSION = 2  # of the record of a folder that holds a nested tensor
META = "meta.json"
ASIDE = ".meta.json.tmp"  # the record while the other files are written
RESERVED = {META, ASIDE}  # names of no other file
CPU = torch.device("cpu")
VALUE_CLASSES = ("NonTensorData", "MetaData", "NonTensorStack")
Record = dict[str, Any]


@dataclass(eq=False, slots=True)
class Outline:
    """A node as it is written to disk: its record, and the entries that the record lists."""

    node: Any
    key: tuple[str, ...]
    record: Record
    entries: dict[str, Any] = field(default_factory=dict)  # name -> Tensor | Outline
    wrap: Any = None  # the tensorclass around the node
    folder: str | None = None
    mapped: dict[str, Tensor] = field(default_factory=dict)
    structures: dict[str, ragged.Structure] = field(default_factory=dict)  # of nested tensors
    result: Any = None

    def walk(self) -> Iterator[Outline]:
        """Yield the outlines below this one, then this outline."""
        for entry in self.entries.values():
            if isinstance(entry, Outline):
                yield from entry.walk()
        yield self

    @property
    def is_value(self) -> bool:
        return self.record["class"] in VALUE_CLASSES


def outline(
    node: Any, key: tuple[str, ...] = (), like: bool = False, nested: bool = False
) -> Outline:
    """The outline of a container; TypeError if it holds what can't be stored.

    nested: nested tensors can be.
    """
    if isinstance(node, Tensor):
        raise NotImplementedError(
            f"entry {'.'.join(key)!r} is an UnbatchedTensor, which can't be stored on disk; "
            "leave it out with td.exclude(key), or store it as an entry of a container without "
            "batch dimensions"
        )
    if node._is_data():
        return Outline(node, key, value_record(node, key))
    if isinstance(node, kinds.TensorClass):
        out = outline(node._td, key, like, nested)
        out.wrap = type(node)
        out.record["tensorclass"] = f"{out.wrap.__module__}.{out.wrap.__qualname__}"
        return out
    record: Record = {"class": "TensorDict", "batch_size": list(node._batch_size)}
    if isinstance(node, kinds.LazyStackedTensorDict):
        record = {"class": "LazyStackedTensorDict", "stack_dim": node.stack_dim}
        record["batch_size"] = list(node._member_size()) if not node.tensordicts else None
        entries = {str(i): member for i, member in enumerate(node.tensordicts)}
    else:
        entries = node._entries()
    if node._device is not None:
        record["device"] = "cpu"  # where it is loaded to, unless the caller names another
    if node._names is not None and any(node._names):
        record["names"] = list(node._names)
    out = Outline(node, key, record)
    for name, value in entries.items():
        if isinstance(value, Node):
            out.entries[name] = outline(value, (*key, name), like, nested)
        else:
            check_leaf(value, (*key, name), like, nested)
            out.entries[name] = value
    return out


def placed(plan: Outline, put: Callable[[Tensor, tuple[str, ...]], Record]) -> Record:
    """The whole record of an outline; `put` returns that of a tensor, with its location."""
    if plan.is_value:
        return plan.record
    listed = {
        name: placed(entry, put) if isinstance(entry, Outline) else put(entry, (*plan.key, name))
        for name, entry in plan.entries.items()
    }
    return {**plan.record, "entries": listed}


def check_leaf(leaf: Tensor, key: tuple[str, ...], like: bool, nested: bool = False) -> None:
    if leaf.is_nested and not nested:
        raise NotImplementedError(
            f"entry {'.'.join(key)!r} is a nested tensor, which this file format cannot hold: "
            "write a folder, td.memmap(folder), or one file with td.consolidate(filename), which "
            "takes jagged ones"
        )
    if hasattr(leaf, "placements"):
        raise TypeError(
            f"entry {'.'.join(key)!r} is a DTensor, of which this process holds a part: save "
            "td.apply(lambda x: x.full_tensor()), which all processes call, or x.to_local()"
        )
    plain = leaf.layout is torch.strided or leaf.is_nested
    if leaf.dtype not in DTYPE_NAMES or not plain:
        raise TypeError(
            f"entry {'.'.join(key)!r} is a tensor of dtype {leaf.dtype} and layout {leaf.layout}, "
            "which can't be stored on disk"
        )
    if leaf.is_meta and not (like and not leaf.is_nested):
        raise TypeError(f"entry {'.'.join(key)!r} is on the meta device: it has no data to store")


def value_class(node: Any) -> str:
    """The name of the class of a non-tensor entry, as records have it."""
    if not isinstance(node, kinds.NonTensorData):
        return "NonTensorStack"
    return "MetaData" if isinstance(node, kinds.MetaData) else "NonTensorData"


def value_record(node: Any, key: tuple[str, ...]) -> Record:
    """The record of a non-tensor entry, which holds its value, or a value for each row."""
    record: Record = {"class": value_class(node)}
    if record["class"] != "NonTensorStack":
        record["batch_size"] = list(node._batch_size)
        record["value"] = encode(node._data, key)
    else:
        members, record["stack_dim"] = node.tensordicts, node.stack_dim
        if all([value_class(m) != "NonTensorStack" and not m._batch_size for m in members]):
            record["values"] = [encode(member._data, key) for member in members]
            record["batch_size"] = list(node._member_size())
        else:
            record["members"] = [value_record(member, key) for member in members]
    if node._device is not None:
        record["device"] = "cpu"
    return record


class Reader:
    """The source of a record: it finds the tensors and containers that the record refers to."""

    nested = False  # whether a tensor can be a nested one

    def __init__(self, path: str, device: torch.device | None, non_blocking: bool) -> None:
        self.path = path
        self.device = device  # where the tensors are wanted
        self.non_blocking = non_blocking

    def fail(self, why: str, part: Record | None = None) -> NoReturn:
        """part: of the record of a nested tensor, what is to blame."""
        raise DamagedFileError(self.path, why)

    def tensor(self, entry: Record) -> Tensor:
        raise NotImplementedError

    def container(self, entry: Record) -> Node:
        return rebuild(self, entry)

    def shared(self, node: Any, name: str | None) -> None:
        """Tie a value that other processes change, too, to the entry `name` that holds it."""

    # what a record may hold

    def size(self, value: Any) -> list[int]:
        if type(value) is not list or not all([type(n) is int and 0 <= n < 2**63 for n in value]):
            self.fail(f"{shown(value)} is not a shape")
        return value

    def dtype(self, name: Any) -> torch.dtype:
        if type(name) is not str or name not in DTYPES:
            self.fail(f"there is no dtype {shown(name)}")
        return DTYPES[name]

    def empty(self, shape: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor to read into, whose length was checked before."""
        try:
            return torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            return self.fail(f"no tensor has the shape {shown(shape)}: {error}")

    def names(self, value: Any, ndim: int) -> Names:
        if value is None:
            return None
        if type(value) is not list or len(value) != ndim:
            self.fail(f"{shown(value)} does not name {ndim} dimensions")
        given = [name for name in value if name is not None]
        if not all([type(name) is str for name in given]) or len({*given}) < len(given):
            self.fail(f"{shown(value)} are not names of dimensions")
        return value

    def on(self, device: Any) -> torch.device | None:
        if device is not None and device != "cpu":
            self.fail(f"{shown(device)} is not a device")
        return self.device or (CPU if device else None)


def rebuild(reader: Reader, record: Any) -> Node:
    """The container that a record describes; DamagedFileError if it describes none."""
    if type(record) is not dict:
        reader.fail("it is not a record")
    kind = record.get("class")
    if "tensorclass" in record:
        bare = {name: value for name, value in record.items() if name != "tensorclass"}
        return wrapped(reader, record["tensorclass"], rebuild(reader, bare))
    if kind == "LazyStackedTensorDict":
        return lazy_node(reader, record)
    if kind in VALUE_CLASSES:
        return value_node(reader, record)
    if kind != "TensorDict":
        reader.fail(f"there is no class {shown(kind)}")
    batch_size = torch.Size(reader.size(record.get("batch_size")))
    entries = read_entries(reader, record)
    ndim = len(batch_size)
    for name, value in entries.items():
        if ndim and shape_of(value)[:ndim] != batch_size:
            reader.fail(
                f"entry {shown(name)} of shape {list(shape_of(value))} does not begin with the "
                f"batch size {list(batch_size)}"
            )
    names, device = reader.names(record.get("names"), ndim), reader.on(record.get("device"))
    for value in entries.values() if device is not None else ():
        if isinstance(value, Node) and value._is_data():
            value._set_device(device)
    return dim_names.passed_on(kinds.TensorDict._make(entries, batch_size, device, names))


def read_entries(reader: Reader, record: Record) -> dict[str, Any]:
    listed = record.get("entries")
    if type(listed) is not dict:
        reader.fail("its entries are missing")
    entries = {}
    for name, entry in listed.items():
        if type(entry) is not dict:
            reader.fail(f"entry {shown(name)} is not a record")
        tensor = "dtype" in entry or reader.nested and "ragged" in entry
        entries[name] = value = reader.tensor(entry) if tensor else reader.container(entry)
        if entry.get("shared") is True and isinstance(value, Node) and value._is_data():
            reader.shared(value, name)
    return entries


def lazy_node(reader: Reader, record: Record) -> Node:
    members = list(read_entries(reader, record).values())
    for member in members:
        if not isinstance(member, Node) or member._is_data():
            reader.fail("a member of a stack is not a container")
    size = reader.size(record.get("batch_size")) if not members else None
    out = stacked(reader, record, kinds.LazyStackedTensorDict, members, size)
    names = reader.names(record.get("names"), len(out._batch_size))
    if names is not None:
        out.names = names
    return out


def stacked(reader: Reader, record: Record, cls: Any, members: list[Any], size: Any) -> Node:
    """A lazy stack of members; `size` is the batch size of a member if the list is empty."""
    ndims = {len(member._batch_size) for member in members} or {len(size or ())}
    dim = record.get("stack_dim")
    if len(ndims) > 1 or type(dim) is not int or not 0 <= dim <= min(ndims):
        reader.fail(f"{len(members)} members can't be stacked along dimension {shown(dim)}")
    return cls._of(members, dim, None if size is None else torch.Size(size))


def wrapped(reader: Reader, name: Any, td: Any) -> Node:
    """A tensorclass around a container; only classes that are defined in this process are known."""
    cls = REGISTRY.get(name) if type(name) is str else None
    if cls is None:
        reader.fail(
            f"it holds the tensorclass {shown(name)}, which is not defined here: import the module "
            "that defines it before loading"
        )
    unknown = [key for key in td.keys() if key not in cls._fields]
    if unknown or td._is_data():
        reader.fail(f"{shown(unknown)} are not fields of {name}")
    return cls._over(td.lock_() if cls._frozen else td)


def decoded(reader: Reader, value: Any) -> object:
    try:
        return decode(value)
    except ValueError as error:
        return reader.fail(str(error))


def value_node(reader: Reader, record: Any) -> Node:
    """The non-tensor entry that a record describes."""
    device = reader.on(record.get("device"))
    if record["class"] in ("NonTensorData", "MetaData"):
        if "value" not in record:
            reader.fail("a value is missing")
        size = torch.Size(reader.size(record.get("batch_size")))
        kind = kinds.MetaData if record["class"] == "MetaData" else kinds.NonTensorData
        return kind(decoded(reader, record["value"]), size, device)
    rows = record.get("values", record.get("members"))
    if type(rows) is not list:
        reader.fail("the values of a stack are missing")
    if "values" in record:
        members = [kinds.NonTensorData(decoded(reader, value), None, device) for value in rows]
        member_size = reader.size(record.get("batch_size"))
        return stacked(reader, record, kinds.NonTensorStack, members, member_size)
    for row in rows:
        if type(row) is not dict or row.get("class") not in VALUE_CLASSES:
            reader.fail(f"{shown(row)} is not a non-tensor value")
    members = [value_node(reader, row) for row in rows]
    return stacked(reader, record, kinds.NonTensorStack, members, None)


def titled(record: Record, version: int = VERSION) -> Record:
    return {"format": "raffia", "version": version, **record}


def folder_version(record: Record) -> int:
    """The first version of the format in which the record of a folder can be read."""
    holds = any(["ragged" in entry for entry in record.get("entries", {}).values()])
    return RAGGED_VERSION if holds else VERSION


def open_record(folder: str) -> BinaryIO:
    """The file with the record of a folder, open for reading."""
    path = f"{folder}/{META}"
    try:
        return open_plain(path)
    except (FileNotFoundError, NotADirectoryError):
        why = "it is missing: nothing was saved here, or saving was interrupted"
        raise MissingFileError(path, why) from None


def read_record(folder: str, file: BinaryIO | None = None) -> Record:
    """The record of a folder; `file` is what `open_record` gave, which stays open."""
    if file is None:
        with open_record(folder) as file:
            return read_record(folder, file)
    path = f"{folder}/{META}"
    record = parse_json(path, file.read(), deepest=None)
    if type(record) is not dict or record.get("format") != "raffia":
        why = "it is not a record of a container that was saved by this package"
        raise DamagedFileError(path, why)
    check_version(path, record, (VERSION, RAGGED_VERSION))
    return record


def write_record(folder: str, record: Record) -> None:
    """Replace the record of a folder, atomically."""
    record["version"] = folder_version(record)
    write_atomically(f"{folder}/{META}", dump_json(record), is_synced=False, follows_links=False)


def check_version(path: str, record: Any, known: tuple[int, ...] = (VERSION,)) -> None:
    version = record.get("version") if type(record) is dict else None
    if type(version) is not int or version not in known:
        these = " and ".join([str(n) for n in known])
        raise DamagedFileError(
            path, (f"it has version {shown(version)}, but this release reads {these}")
        )
