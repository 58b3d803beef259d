"""Consolidated containers: all entries in one block, to copy, share, map, pickle or send it as one.

The block and the record of the tree, the one of record.py, are a file, too: the record ends with
its length and a mark, so that the block begins at 0 and can be mapped. What collectives.py sends to
other processes is the same block and record.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from raffia.files import DamagedFileError, dump_json, open_plain, parse_json, write_atomically
from raffia.tensordict import ragged
from raffia.tensordict.build import as_device
from raffia.tensordict.byte_tensors import view_of
from raffia.tensordict.copies import _replaced, synchronise
from raffia.tensordict.future import TensorDictFuture
from raffia.tensordict.memmap import Path
from raffia.tensordict.node import Container, Device
from raffia.tensordict.record import (
    CPU,
    Reader,
    Record,
    check_version,
    outline,
    placed,
    rebuild,
    titled,
)
from raffia.tensordict.safetensors_file import raw_bytes

ALIGN = 16  # bytes: the largest item size, complex128
MARK = b"raffia\x00\x01"
ENDING = 8 + len(MARK)
NAMES = ("values", "offsets", "lengths")  # of the tensors of a jagged one


@dataclass(frozen=True, slots=True)
class Parts:
    """The plain tensors that leaves consist of, and where in a block each begins.

    A jagged nested tensor is its values, offsets and lengths; what several share is there once.
    """

    leaves: list[Tensor]
    tensor_indices: list[list[int]]  # for each leaf, of the tensors that it consists of
    tensors: list[Tensor]
    starts: list[int]
    nbytes: int

    @classmethod
    def of(cls, leaves: list[Tensor]) -> Parts:
        """The parts of leaves; TypeError for those that are not plain memory."""
        tensors: list[Tensor] = []
        known: dict[int, int] = {}

        def added(part: Tensor) -> int:
            if part.layout is not torch.strided:
                raise TypeError(
                    f"consolidate: an entry is a tensor of layout {part.layout}, which is not one "
                    "block of memory; to_dense() makes a plain tensor of it"
                )
            tensors.append(part)
            return len(tensors) - 1

        def shared(part: Any) -> int:
            if id(part) not in known:
                known[id(part)] = added(part)
            return known[id(part)]

        indices = []
        for leaf in leaves:
            if not leaf.is_nested:
                indices.append([added(leaf)])
                continue
            if leaf.layout is not torch.jagged:
                raise NotImplementedError(
                    "consolidate: an entry is a nested tensor of layout torch.strided; make it a "
                    "jagged one, with torch.nested.nested_tensor(x.unbind(), layout=torch.jagged)"
                )
            rows = [shared(part) for part in ragged.parts_of_rows(leaf).values()]
            indices.append([added(leaf.values()), *rows])
        starts, end = [], 0
        for part in tensors:
            starts.append(end)
            end += padded(part.numel() * part.element_size())
        return cls(leaves, indices, tensors, starts, end)

    def views(self, block: Tensor) -> list[Tensor]:
        """Views into a block that correspond to these tensors."""
        flat: dict[torch.dtype, Tensor] = {}  # all of the block, whose length any item size divides
        out = []
        for part, at in zip(self.tensors, self.starts, strict=True):
            dtype = part.dtype
            if dtype not in flat:
                flat[dtype] = block.view(dtype)
            first = at // dtype.itemsize
            out.append(flat[dtype][first : first + part.numel()].view(part.shape))
        return out

    def over(self, found: list[Tensor]) -> Iterator[Tensor]:
        """The leaves again, over other tensors instead of these."""
        for leaf, indices in zip(self.leaves, self.tensor_indices, strict=True):
            if not leaf.is_nested:
                yield found[indices[0]]
            else:
                values, offsets, *lengths = [found[i] for i in indices]
                dim: int = leaf._ragged_idx  # type: ignore[attr-defined]
                yield ragged.jagged_tensor(values, offsets, lengths[0] if lengths else None, dim)

    def described(self, at: int) -> Record:
        """The record of a leaf."""

        def part(i: int) -> Record:
            return {**ragged.described(self.tensors[i]), "at": self.starts[i]}

        leaf: Any = self.leaves[at]
        if not leaf.is_nested:
            return part(self.tensor_indices[at][0])
        named = zip(NAMES, self.tensor_indices[at], strict=False)
        return {"ragged": leaf._ragged_idx, **{name: part(i) for name, i in named}}


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def described(td: Any) -> tuple[bytes, Parts]:
    """The record of a container as one block, and the positions of its parts."""
    leaves: list[Tensor] = []
    records: list[Record] = []

    def put(leaf: Tensor, key: tuple[str, ...]) -> Record:
        leaves.append(leaf)
        records.append({})
        return records[-1]

    record = titled(placed(outline(td, nested=True), put))
    parts = Parts.of(leaves)
    for at, entry in enumerate(records):
        entry.update(parts.described(at))
    return dump_json(record), parts


# --------------------------------------------------------------------------------------- in memory


class BufferOptions(TypedDict, total=False):
    """Options of `consolidate`, for type checkers."""

    num_threads: int
    device: Device
    non_blocking: bool
    inplace: bool
    use_buffer: bool
    share_memory: bool
    pin_memory: bool
    metadata: bool


@overload
def consolidate(
    td: Container,
    filename: Path | None = None,
    *,
    return_early: Literal[False] = False,
    **options: Unpack[BufferOptions],
) -> Container: ...
@overload
def consolidate(
    td: Container,
    filename: Path | None = None,
    *,
    return_early: bool,
    **options: Unpack[BufferOptions],
) -> Container | TensorDictFuture[Container]: ...
def consolidate(
    td: Container,
    filename: Path | None = None,
    *,
    num_threads: int = 0,
    device: Device = None,
    non_blocking: bool = False,
    inplace: bool = False,
    return_early: bool = False,
    use_buffer: bool = False,
    share_memory: bool = False,
    pin_memory: bool = False,
    metadata: bool = False,
) -> Container | TensorDictFuture[Container]:
    """The container with all its entries in one buffer, locked; itself if it already is.

    It takes one copy to a device, and is one block to share or to send.

    filename: a file for the buffer, which is mapped: what is written into the entries is in it.
        `TensorDict.from_consolidated(filename)` reads it.
    num_threads: so many threads copy.
    device: where the buffer is made.
    inplace: replace the entries of this container.
    return_early: with more than one thread, return a future immediately, whose `result()` is the
        container.
    use_buffer: keep the buffer in memory, and write the file once.
    share_memory, pin_memory: where on the CPU the buffer lies.
    metadata: as in tensordict, without effect: the result is pickled as one buffer in any case.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.ones(2), b=dict(c=[1, 2])).consolidate()
    >>> td["a"].untyped_storage().data_ptr() == td["b", "c"].untyped_storage().data_ptr()
    True
    """
    early = return_early and num_threads > 1
    if early and (use_buffer or non_blocking):
        raise ValueError(
            "consolidate: return_early cannot be combined with use_buffer or non_blocking"
        )
    if _is_block(td, filename, device, share_memory, pin_memory):
        return td

    def filled() -> tuple[Tensor, Parts, list[Tensor]]:
        """A block with all entries, the layout of its parts, and views of the parts."""
        parts = Parts.of([leaf.detach() for leaf in td._leaves([])])
        sources = {part.device for part in parts.tensors}
        where = CPU if filename is not None or len(sources) != 1 else sources.pop()
        where = where if device is None else as_device(device)
        if filename is not None:
            if where.type != "cpu":
                raise ValueError(f"consolidate: a file is mapped on the CPU, not on {where}")
            write_block(td, filename)
            if not use_buffer:
                block = mapped_block(filename, parts.nbytes, shared=True)
                return block, parts, parts.views(block)
        block = torch.zeros(parts.nbytes, dtype=torch.uint8, device=where, pin_memory=pin_memory)
        if share_memory:
            block.share_memory_()

        views = parts.views(block)

        def fill(into: Tensor, part: Tensor) -> None:
            into.copy_(part, non_blocking=non_blocking)

        if num_threads > 1:
            with ThreadPoolExecutor(num_threads) as threads:
                list(threads.map(fill, views, parts.tensors))
        else:
            for into, part in zip(views, parts.tensors, strict=True):
                fill(into, part)
        if non_blocking and where.type == "cpu":
            synchronise(td)
        return block, parts, views

    def finish(made: tuple[Tensor, Parts, list[Tensor]]) -> Container:
        block, parts, views = made
        out = td._rebuild(parts.over(views))
        if device is not None or filename is not None:
            out._set_device(block.device)
        if inplace:
            out = _replaced(td, out)
        out._buffer = block
        return out.lock_()

    return TensorDictFuture(filled, finish) if early else finish(filled())


def _is_block(td: Any, filename: Any, device: Any, share_memory: bool, pin_memory: bool) -> bool:
    """Whether a container is already consolidated in the requested way."""
    if filename is not None or not td._locked or not is_consolidated(td):
        return False
    buffer = td._buffer
    if device is not None and as_device(device) != buffer.device:
        return False
    return not (share_memory and not buffer.is_shared() or pin_memory and not buffer.is_pinned())


def is_consolidated(td: Any) -> bool:
    """Whether all entries share one buffer.

    >>> from raffia import TensorDict
    >>> TensorDict(a=0).is_consolidated(), TensorDict(a=0).consolidate().is_consolidated()
    (False, True)
    """
    if td._buffer is None:
        return False
    pointer = td._buffer.untyped_storage().data_ptr()
    parts = Parts.of(td._leaves([])).tensors
    return all([part.untyped_storage().data_ptr() == pointer for part in parts])


def spans(td: Any) -> list[int] | None:
    """Where each leaf begins in the buffer; None if there is no buffer that holds all of them.

    A nested tensor has several parts in the buffer, so its container has no spans.
    """
    if td._buffer is None:
        return None
    start, size, found = td._buffer.data_ptr(), len(td._buffer), []
    for leaf in td._leaves([]):
        if leaf.is_nested or not leaf.is_contiguous():
            return None
        at = leaf.data_ptr() - start if leaf.numel() else 0
        if not 0 <= at <= at + leaf.nbytes <= size:
            return None
        found.append(at)
    return found


def reduce_consolidated(td: Any) -> tuple[Any, ...] | None:
    """The pickled form of a consolidated container, which is its buffer and the empty tree."""
    found = spans(td) if td._locked else None
    if found is None:
        return None
    tree = td._rebuild(iter([torch.empty_like(leaf, device="meta") for leaf in td._leaves([])]))
    return from_buffer, (tree, td._buffer, found)


def from_buffer(tree: Container, buffer: Tensor, spans: list[int]) -> Container:
    """A consolidated container from its buffer, and a tree that holds the shapes and dtypes."""
    starts = zip(tree._leaves([]), spans, strict=True)
    out = tree._rebuild(iter([view_of(buffer, at, x.dtype, x.shape) for x, at in starts]))
    out._buffer = buffer
    return out.lock_()


# --------------------------------------------------------------------------------------- as a file


def write_block(td: Any, filename: Path) -> list[int]:
    """Write a container as one block to a file, atomically; return where each part begins."""
    record, parts = described(td)

    def write(file: BinaryIO) -> None:
        for part in parts.tensors:
            data = raw_bytes(part)
            file.write(data)
            file.write(bytes(padded(len(data)) - len(data)))
        file.write(record + len(record).to_bytes(8, "little") + MARK)

    write_atomically(filename, write)
    return parts.starts


def mapped_block(filename: Path, length: int, *, shared: bool) -> Tensor:
    """Map the first `length` bytes of a file; writes to a shared map change the file."""
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
                self.fail("a nested tensor in a block must be a jagged one")
            return ragged.joined(*ragged.read(self, entry))
        dtype, shape = self.dtype(entry["dtype"]), self.size(entry.get("shape"))
        at, nbytes = entry.get("at"), math.prod(shape) * dtype.itemsize
        if type(at) is not int or at < 0 or at % ALIGN or at + nbytes > len(self.block):
            self.fail(f"a tensor of {nbytes} bytes can't begin at {at!r}")
        return view_of(self.block, at, dtype, shape)

    def part(self, part: Record, name: str) -> Tensor:
        """A tensor of a nested one; one for all that share it."""
        tensor = self.tensor(part)
        if name == "values":
            return tensor
        known = self.__dict__.setdefault("shared", {})
        key = (part["at"], tensor.dtype, tensor.shape)
        out: Tensor = known.setdefault(key, tensor)
        return out


def from_consolidated(cls: type[Container], filename: Path) -> Container:
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
            raise DamagedFileError(path, "it is not a consolidated container, or it is incomplete")
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
    td: Any = rebuild(reader, record)
    td._buffer = block
    return td
