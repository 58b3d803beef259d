"""A tree of tensors as a record and flat memory, and back: what travels between processes.

Nothing is pickled: the record is JSON, the memory is the tensors' own bytes.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from mmap import mmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raffia.tensordict.access import unchecked
from raffia.tensordict.collection import TensorDictBase
from raffia.tensordict.memmap import DTYPE_NAMES
from raffia.tensordict.tensordict import TensorDict

ALIGNMENT = 64  # bytes: a cache line
PADDING = bytes(ALIGNMENT)
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
NUM_RECORDS = 64  # in the caches: a run sends trees of few kinds, and many of each


def pack(tree: TensorDictBase, room: int = 0) -> bytearray:
    """The tree as a bytearray: a record of names, dtypes and shapes, then its tensors' memory.

    room: bytes that are left free at the front.
    Raises TypeError for entries that are not plain tensors.

    >>> unpack(pack(TensorDict(a=torch.arange(3), b=dict(c=torch.ones(2, dtype=torch.bool)))))["a"]
    tensor([0, 1, 2])
    """
    parts = parts_of(tree)  # a name, so that its leaves live
    return bytearray().join([bytes(room), *parts.data])


class Parts(NamedTuple):
    """Parts of a packed tree.

    >>> len(parts_of(TensorDict()).leaves)
    0
    """

    data: list[Any]  # bytes, and arrays of bytes over the tensors' own memory
    leaves: list[Tensor]  # which are to live as long
    form: list[Any]  # see `walk`

    @property
    def record(self) -> bytes:
        """The record that comes first."""
        return bytes(self.data[0])

    @property
    def arrays(self) -> list[Any]:
        """The memory of each tensor that has elements, without the padding behind it."""
        return self.data[1::2]


def parts_of(tree: TensorDictBase) -> Parts:
    """The parts that `pack` joins, to be written elsewhere without copying plain tensors' memory.

    >>> tree = TensorDict(x=torch.arange(3))
    >>> b"".join(parts_of(tree).data) == pack(tree)
    True
    """
    form, leaves = walk(tree)
    leaves = [leaf if _is_plain_memory(leaf) else _plain(leaf) for leaf in leaves]
    data: list[Any] = [_record(tuple(form))]
    for leaf in leaves:
        if size := leaf.nbytes:
            data.append((ctypes.c_char * size).from_address(leaf.data_ptr()))
            data.append(PADDING[: -size % ALIGNMENT])
    return Parts(data, leaves, form)


def walk(tree: TensorDictBase) -> tuple[list[Any], list[Tensor]]:
    """Names, dtypes and shapes of a tree in one list, and its leaves: trees of the same form have
    equal lists.

    >>> walk(TensorDict(x=torch.zeros(2)))
    ([torch.Size([]), 1, 'x', torch.float32, torch.Size([2])], [tensor([0., 0.])])
    """
    form: list[Any] = []
    leaves: list[Tensor] = []
    _walk(tree, (), form, leaves)
    return form, leaves


def _walk(node: Any, path: tuple[str, ...], form: list[Any], leaves: list[Tensor]) -> None:
    """Append the leaves below a container, in order, and their part of the record."""
    entries = node.items()
    form += (node.batch_size, len(entries))
    for name, value in entries:
        if type(value) is Tensor and not value.is_nested and value.layout is torch.strided:
            form += (name, value.dtype, value.shape)
            leaves.append(value)
        elif isinstance(value, TensorDictBase):
            form += (name, None)
            _walk(value, (*path, name), form, leaves)
        else:
            raise TypeError(
                f"entry {'.'.join((*path, name))} is a {type(value).__name__}, but only trees of "
                "plain tensors can be sent between processes: encode it as a tensor, such as "
                "torch.frombuffer(text.encode(), dtype=torch.uint8)"
            )


def _is_plain_memory(leaf: Tensor) -> bool:
    """Whether a tensor's elements are contiguous in this process's memory, not lazily changed."""
    return leaf.is_cpu and leaf.is_contiguous() and not leaf.is_conj() and not leaf.is_neg()


def _plain(leaf: Tensor) -> Tensor:
    return leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()


@lru_cache(NUM_RECORDS)
def _record(form: tuple[Any, ...]) -> bytes:
    """The record of a tree that was walked, its length before it, and what is left of a line."""
    record: list[Any] = []  # [path, dtype or "" of a container, shape or batch size, offset]
    _write(record, [], iter(form), 0)
    text = json.dumps(record).encode()
    head = len(text).to_bytes(8, "little") + text
    return head + PADDING[: -len(head) % ALIGNMENT]


def _write(record: list[Any], path: list[str], form: Iterator[Any], size: int) -> int:
    """Write a container's record; returns the byte offset at which its leaves end."""
    record.append([path, "", list(next(form)), 0])
    for _ in range(next(form)):
        own, dtype = [*path, next(form)], next(form)
        if dtype is None:
            size = _write(record, own, form, size)
            continue
        shape = list(next(form))
        record.append([own, DTYPE_NAMES[dtype], shape, size])
        size += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return size


def unpack(data: bytearray | memoryview | mmap, room: int = 0) -> TensorDict:
    """The tree that was packed, its entries in their order, over this memory: it is not copied.

    >>> tree = TensorDict(x=torch.zeros(2, 3), empty=TensorDict(batch_size=[2]), batch_size=[2])
    >>> unpack(pack(tree))["empty"].batch_size
    torch.Size([2])
    """
    text = _text(data, room)
    first = room + -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT

    def leaf(dtype: torch.dtype, size: int, at: int) -> Tensor:
        return torch.frombuffer(data, dtype=dtype, count=size, offset=first + at)

    return _tree(text, leaf)


def unpack_parts(record: bytes, arrays: Sequence[Any]) -> TensorDict:
    """The tree of this record, over the memory of each tensor that has elements: it is not copied.

    >>> tree = TensorDict(x=torch.arange(3), y=torch.empty(0))
    >>> parts = parts_of(tree)
    >>> unpack_parts(parts.record, parts.arrays)["x"]
    tensor([0, 1, 2])
    """
    rest = iter(arrays)

    def leaf(dtype: torch.dtype, size: int, at: int) -> Tensor:
        return torch.frombuffer(next(rest), dtype=dtype)

    return _tree(_text(record), leaf)


def _text(data: bytes | bytearray | memoryview | mmap, room: int = 0) -> bytes:
    """The text of the record that begins after `room` bytes."""
    start = room + 8
    return bytes(data[start : start + int.from_bytes(data[room:start], "little")])


def _tree(text: bytes, leaf: Callable[[torch.dtype, int, int], Tensor]) -> TensorDict:
    """The tree of a record's text; leaf: the elements of a tensor that has some, of this dtype, so
    many, from this byte on."""
    nodes: list[dict[str, Any]] = []  # their entries, in order: they fit, as they did
    for one in _read(text):
        entry: Any
        if one.dtype is None:
            nodes.append({})
            entry = unchecked(nodes[-1], one.shape)
        elif one.size:
            entry = leaf(one.dtype, one.size, one.at)
            entry = entry if len(one.shape) == 1 else entry.view(one.shape)
        else:
            entry = torch.empty(one.shape, dtype=one.dtype)
        if one.parent < 0:
            root: TensorDict = entry
        else:
            nodes[one.parent][one.name] = entry
    return root


class _Entry(NamedTuple):
    parent: int  # the number of its container among the nodes; -1: the root
    name: str
    dtype: torch.dtype | None  # None: a container
    shape: torch.Size  # or batch size
    size: int
    at: int


@lru_cache(NUM_RECORDS)
def _read(record: bytes) -> list[_Entry]:
    """Contents of a record."""
    number: dict[tuple[str, ...], int] = {}  # of each container
    entries = []
    for path, name, shape, at in json.loads(record):
        parent = number[tuple(path[:-1])] if path else -1
        if not name:
            number[tuple(path)] = len(number)
        dtype = DTYPES[name] if name else None
        entry = path[-1] if path else ""
        entries.append(_Entry(parent, entry, dtype, torch.Size(shape), math.prod(shape), at))
    return entries
