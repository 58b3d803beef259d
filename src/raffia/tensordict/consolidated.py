"""A consolidated container as one file: the block of its entries, then the record of the tree.

The record is the one of disk.py; it ends with its length and a mark, so that the block begins at 0
and can be mapped.
"""

from __future__ import annotations

import math
import os
from typing import Any, BinaryIO

import torch
from torch import Tensor

from raffia.files import DamagedFileError, parse_json, write_atomically
from raffia.tensordict.disk import (
    Outline,
    Reader,
    Record,
    dump,
    open_regular,
    outline,
    rebuild,
    titled,
)
from raffia.tensordict.memmap import DTYPE_NAMES, Path

ALIGN = 16  # bytes: the largest item size, complex128
MARK = b"raffia\x00\x01"
ENDING = 8 + len(MARK)


def write_block(td: Any, filename: Path) -> list[int]:
    """Write a container as one block to a file, at once or not at all; where each leaf begins."""
    leaves: list[Tensor] = []
    starts: list[int] = []
    end = 0

    def place(plan: Outline) -> Record:
        nonlocal end
        if plan.is_value:
            return plan.record
        listed: Record = {}
        for name, entry in plan.entries.items():
            if isinstance(entry, Outline):
                listed[name] = place(entry)
                continue
            listed[name] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": list(entry.shape)}
            listed[name]["at"] = end
            leaves.append(entry)
            starts.append(end)
            end += padded(entry.numel() * entry.dtype.itemsize)
        return {**plan.record, "entries": listed}

    record = dump(titled(place(outline(td))))

    def write(file: BinaryIO) -> None:
        for leaf in leaves:
            flat: Any = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            file.write(memoryview(flat))
            file.write(bytes(padded(len(flat)) - len(flat)))
        file.write(record + len(record).to_bytes(8, "little") + MARK)

    write_atomically(filename, write)
    return starts


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def mapped_block(filename: Path, length: int, *, shared: bool) -> Tensor:
    """The first `length` bytes of a file; writing into what is shared reaches it."""
    if not length:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(os.fspath(filename), shared=shared, size=length, dtype=torch.uint8)


class BlockReader(Reader):
    """Reads tensors out of a block."""

    block: Tensor

    def tensor(self, entry: Record) -> Tensor:
        dtype, shape = self.dtype(entry["dtype"]), self.size(entry.get("shape"))
        at, nbytes = entry.get("at"), math.prod(shape) * dtype.itemsize
        if type(at) is not int or at < 0 or at % ALIGN or at + nbytes > len(self.block):
            self.fail(f"a tensor of {nbytes} bytes can't begin at {at!r}")
        return self.block[at : at + nbytes].view(dtype).view(shape)

    def container(self, entry: Record) -> Any:
        return rebuild(self, entry)


def from_consolidated(cls: Any, filename: Path) -> Any:
    """The container in a file that `consolidate(filename=...)` wrote.

    Its tensors are views of one map of the file: it is read where it is used, and what is written
    into them stays in memory. It is not locked.
    Raises DamagedFileError for any other file.

    >>> import tempfile
    >>> from raffia import TensorDict
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = TensorDict(a=torch.ones(2), b="text").consolidate(f"{folder}/td")
    ...     td = TensorDict.from_consolidated(f"{folder}/td")
    >>> td["a"], td["b"], td.is_consolidated()
    (tensor([1., 1.]), 'text', True)
    """
    path = os.path.abspath(filename)
    fd, length = open_regular(path)
    with open(fd, "rb") as file:
        file.seek(max(0, length - ENDING))
        ending = file.read(ENDING)
        size = int.from_bytes(ending[:8], "little")
        if ending[8:] != MARK or size > length - ENDING:
            raise DamagedFileError(path, "it is not a consolidated container, or not all of it")
        file.seek(length - ENDING - size)
        record = parse_json(path, file.read(size))
    reader = BlockReader(path, None, False)
    reader.check_version(record)
    reader.block = mapped_block(path, length - ENDING - size, shared=False)
    td = rebuild(reader, record)
    td._buffer = reader.block
    return td
