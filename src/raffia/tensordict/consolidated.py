"""A consolidated container as a block of its entries, and the record of the tree: as one file.

The record is the one of disk.py; it ends with its length and a mark, so that the block begins at 0
and can be mapped. What collectives.py sends to other processes is the same block and record.
"""

from __future__ import annotations

import math
import os
from typing import Any, BinaryIO

import torch
from torch import Tensor

from raffia.files import DamagedFileError, dump_json, open_plain, parse_json, write_atomically
from raffia.tensordict import ragged
from raffia.tensordict.memmap import DTYPE_NAMES, Path
from raffia.tensordict.record import (
    Outline,
    Reader,
    Record,
    check_version,
    outline,
    rebuild,
    titled,
)

Joined = tuple[int, int, int | None]  # where values, offsets and lengths are among the pieces

ALIGN = 16  # bytes: the largest item size, complex128
MARK = b"raffia\x00\x01"
ENDING = 8 + len(MARK)


def pieces(leaves: list[Tensor]) -> tuple[list[Tensor], list[int | Joined]]:
    """The plain tensors that leaves consist of, and where among them each leaf finds its own.

    A jagged nested tensor is its values, offsets and lengths; what several share is there once.
    """
    out: list[Tensor] = []
    places: list[int | Joined] = []
    known: dict[int, int] = {}

    def place(part: Any) -> int:
        if id(part) not in known:
            known[id(part)] = len(out)
            out.append(part)
        return known[id(part)]

    for leaf in leaves:
        if not leaf.is_nested:
            places.append(len(out))
            out.append(leaf)
            continue
        if leaf.layout is not torch.jagged:
            raise NotImplementedError(
                "consolidate: an entry is a nested tensor of layout torch.strided; make it a "
                "jagged one, with torch.nested.nested_tensor(x.unbind(), layout=torch.jagged)"
            )
        jagged: Any = leaf
        lengths = jagged.lengths()
        values = len(out)
        out.append(jagged.values())
        places.append(
            (values, place(jagged.offsets()), None if lengths is None else place(lengths))
        )
    return out, places


def put_together(leaves: list[Tensor], places: list[int | Joined], parts: list[Tensor]) -> Any:
    """The leaves again, over other tensors in the place of their pieces."""
    for leaf, place in zip(leaves, places, strict=True):
        if isinstance(place, int):
            yield parts[place]
        else:
            values, offsets, lengths = place
            of = None if lengths is None else parts[lengths]
            dim: int = leaf._ragged_idx  # type: ignore[attr-defined]
            yield ragged.jagged_tensor(parts[values], parts[offsets], of, dim)


def described(td: Any) -> tuple[bytes, list[Tensor], list[int]]:
    """The record of a container as one block; its leaves in their order, and where each begins."""
    leaves: list[Tensor] = []
    starts: list[int] = []
    known: dict[int, int] = {}  # where what several nested tensors share begins
    end = 0

    def put(leaf: Tensor) -> Record:
        nonlocal end
        listed: Record = {"dtype": DTYPE_NAMES[leaf.dtype], "shape": list(leaf.shape), "at": end}
        leaves.append(leaf)
        starts.append(end)
        end += padded(leaf.numel() * leaf.dtype.itemsize)
        return listed

    def shared(leaf: Tensor) -> Record:
        if id(leaf) in known:
            return {
                "dtype": DTYPE_NAMES[leaf.dtype],
                "shape": list(leaf.shape),
                "at": known[id(leaf)],
            }
        known[id(leaf)] = end
        return put(leaf)

    def jagged(leaf: Any) -> Record:
        listed: Record = {"ragged": leaf._ragged_idx, "values": put(leaf.values())}
        listed["offsets"] = shared(leaf.offsets())
        if leaf.lengths() is not None:
            listed["lengths"] = shared(leaf.lengths())
        return listed

    def place(plan: Outline) -> Record:
        if plan.is_value:
            return plan.record
        listed: Record = {}
        for name, entry in plan.entries.items():
            if isinstance(entry, Outline):
                listed[name] = place(entry)
                continue
            listed[name] = jagged(entry) if entry.is_nested else put(entry)
        return {**plan.record, "entries": listed}

    return dump_json(titled(place(outline(td, nested=True)))), leaves, starts


def write_block(td: Any, filename: Path) -> list[int]:
    """Write a container as one block to a file, at once or not at all; where each leaf begins."""
    record, leaves, starts = described(td)

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
    nested = True

    def tensor(self, entry: Record) -> Tensor:
        if "ragged" in entry:
            if entry["ragged"] == ragged.STRIDED:
                self.fail("a nested tensor in a block is a jagged one")
            return ragged.joined(*ragged.read(self, entry))
        dtype, shape = self.dtype(entry["dtype"]), self.size(entry.get("shape"))
        at, nbytes = entry.get("at"), math.prod(shape) * dtype.itemsize
        if type(at) is not int or at < 0 or at % ALIGN or at + nbytes > len(self.block):
            self.fail(f"a tensor of {nbytes} bytes can't begin at {at!r}")
        return self.block[at : at + nbytes].view(dtype).view(shape)

    def part(self, part: Record, name: str) -> Tensor:
        """A tensor of a nested one; one for all that share it."""
        tensor = self.tensor(part)
        if name == "values":
            return tensor
        known = self.__dict__.setdefault("shared", {})
        key = (part["at"], tensor.dtype, tensor.shape)
        out: Tensor = known.setdefault(key, tensor)
        return out

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
    with open_plain(path, follows_links=True) as file:
        length = os.fstat(file.fileno()).st_size
        file.seek(max(0, length - ENDING))
        ending = file.read(ENDING)
        size = int.from_bytes(ending[:8], "little")
        if ending[8:] != MARK or size > length - ENDING:
            raise DamagedFileError(path, "it is not a consolidated container, or not all of it")
        file.seek(length - ENDING - size)
        record = parse_json(path, file.read(size))
    return over_block(path, record, mapped_block(path, length - ENDING - size, shared=False))


def over_block(source: str, record: Any, block: Tensor) -> Any:
    """The container that a record describes, its entries views of a block; not locked.

    source: where both are from, for errors.
    """
    reader = BlockReader(source, None if block.device.type == "cpu" else block.device, False)
    check_version(source, record)
    reader.block = block
    td = rebuild(reader, record)
    td._buffer = block
    return td
