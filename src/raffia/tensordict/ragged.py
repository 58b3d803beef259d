"""Nested tensors as plain ones: their values, and the position of each row in the values.

A record of one is {"ragged": d, "values": {...}, "offsets": {...}} of a jagged one whose dimension
`d` is the ragged one, with "lengths" if rows do not follow each other without holes; and
{"ragged": "strided", "values": {...}, "sizes": {...}} of one of strided layout, row after row.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from raffia.files import open_plain, write_atomically
from raffia.tensordict.memmap import DTYPE_NAMES, MemoryMappedTensor, mapped
from raffia.tensordict.nested_rows import checked_sizes, shape_of_rows, sum_of_rows, view_of_rows

Record = dict[str, Any]
Known = dict[Any, dict[str, Tensor]]  # structures by their content

STRIDED = "strided"
INTEGERS = (torch.int64, torch.int32)

# jagged tensor -> its values as a mapped tensor, which torch does not keep in it
_mapped_values: Any = WeakTensorKeyDictionary()


@dataclass(eq=False, slots=True)
class Structure:
    """The structure of a nested tensor, without its values; in memory, never mapped."""

    ragged: int | str
    parts: dict[str, Tensor]  # "offsets" and perhaps "lengths"; or "sizes"

    def files(self, folder: str | None, record: Record) -> list[tuple[str, Tensor]]:
        """The files that a record names for the parts, and the parts."""
        return [(f"{folder}/{record[name]['file']}", part) for name, part in self.parts.items()]


def parted(leaf: Tensor, like: bool = False) -> tuple[Tensor, Structure]:
    """The values and the structure of a nested tensor; the values are mapped if the tensor is.

    like: the values are only asked for their shape and dtype.
    """
    nested: Any = leaf
    if leaf.layout is torch.jagged:
        parts = {name: in_memory(part) for name, part in parts_of_rows(leaf).items()}
        values = _mapped_values.get(leaf)
        values = nested.detach().values() if values is None else values
        return values, Structure(nested._ragged_idx, parts)
    sizes = nested._nested_tensor_size()
    sizes = sizes if sizes.dim() == 2 else torch.empty(0, 0, dtype=torch.int64)  # without rows
    structure = Structure(STRIDED, {"sizes": sizes})
    numel = sum_of_rows(sizes)
    if like:
        return torch.empty(numel, dtype=leaf.dtype, device="meta"), structure
    plain: Any = leaf.detach()
    values = plain.values()
    if values.numel() != numel or not leaf.is_contiguous():
        rows = [row.reshape(-1) for row in plain.unbind()]
        values = torch.cat(rows) if rows else values.new_empty(0)
    elif isinstance(leaf, MemoryMappedTensor):
        values = mapped(values, leaf._file)
    return values, structure


def parts_of_rows(leaf: Any) -> dict[str, Tensor]:
    """The tensors of a jagged one that say where its rows are in its values."""
    parts = {"offsets": leaf.offsets(), "lengths": leaf.lengths()}
    return {name: part for name, part in parts.items() if part is not None}


def in_memory(part: Tensor) -> Tensor:
    """A copy of a tensor of the structure, which no change of a file reaches."""
    return part.detach().as_subclass(Tensor).to("cpu", copy=True)


def joined(values: Tensor, structure: Structure) -> Tensor:
    """The nested tensor of a structure over other values; these stay mapped if they are.

    Those of one of strided layout fill a memory of their own.
    """
    parts = structure.parts
    if isinstance(structure.ragged, int):
        offsets, lengths = parts["offsets"], parts.get("lengths")
        out = jagged_tensor(values, offsets, lengths, structure.ragged)
        if isinstance(values, MemoryMappedTensor):
            _mapped_values[out] = values
        return out
    sizes = parts["sizes"]
    if values.is_meta:
        raise NotImplementedError(
            "torch has no nested tensors of strided layout on the meta device: load without "
            "device='meta', or another part of the folder with subpath="
        )
    out = view_of_rows(values.as_subclass(Tensor), sizes)
    return mapped(out, values._file) if isinstance(values, MemoryMappedTensor) else out


def jagged_tensor(values: Tensor, offsets: Tensor, lengths: Tensor | None, dim: int) -> Tensor:
    """The nested tensor of rows of `values`, whose dimension `dim` is the one of varying length."""
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=dim)


def as_shape(shape: Any) -> tuple[torch.Size, Structure | None, torch.Size]:
    """A shape; the structure if it is that of a nested tensor; and the shape of the values."""
    if not isinstance(shape, Tensor) or shape.dim() < 2:
        shape = torch.Size(shape.tolist() if isinstance(shape, Tensor) else shape)
        return shape, None, shape
    sizes = checked_sizes(shape)
    structure = Structure(STRIDED, {"sizes": sizes})
    return shape_of_rows(sizes), structure, torch.Size([sum_of_rows(sizes)])


# ---------------------------------------------------------------------------------- a record, files


def described(tensor: Tensor) -> Record:
    """The record of a plain tensor, without its location."""
    return {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape)}


def record(structure: Structure, values: Record, name: Callable[[str], str]) -> Record:
    """The record of a nested tensor in a folder.

    name: gives the name of a file with a given ending.
    """
    out: Record = {"ragged": structure.ragged, "values": values}
    for part, content in structure.parts.items():
        out[part] = {"file": name(f".{part}.memmap"), **described(content)}
    return out


def parts_of(entry: Record) -> list[Record]:
    """The records of the tensors that one of a nested tensor refers to."""
    return [part for part in entry.values() if type(part) is dict]


def part_of(reader: Any, entry: Record, name: str) -> Tensor:
    """A tensor of a nested one, from its record."""
    found = entry.get(name)
    if type(found) is not dict or "ragged" in found or "dtype" not in found:
        reader.fail(f"the {name} of a nested tensor are missing")
    out: Tensor = reader.part(found, name)
    return out


def check_same(content: Tensor, path: str) -> None:
    """Raise RuntimeError if the file exists with different content of the same length."""
    if os.path.lexists(path):
        with open_plain(path) as file:
            found = file.read()
        if found != content.numpy().tobytes():
            raise RuntimeError(
                f"The file {path} already exists, for rows of other lengths: remove it, or save "
                "to another folder"
            )


def write(files: list[tuple[str, Tensor]]) -> None:
    """Write structures to files, each atomically: no other process sees a partial one."""
    for path, content in files:
        write_atomically(path, content.numpy().tobytes(), is_synced=False, follows_links=False)


def read(reader: Any, entry: Record) -> tuple[Tensor, Structure]:
    """Values and structure that a record describes; the reader fails if they do not fit."""
    ragged = entry["ragged"]
    values = part_of(reader, entry, "values")
    if ragged == STRIDED:
        sizes = part_of(reader, entry, "sizes")
        if sizes.dtype is not torch.int64 or sizes.dim() != 2 or (sizes < 0).any():
            reader.fail(
                "the sizes of a nested tensor are not a matrix of non-negative integers",
                entry["sizes"],
            )
        if values.dim() != 1 or sum_of_rows(sizes) != len(values):
            reader.fail("the sizes of a nested tensor do not fit its values", entry["sizes"])
        return values, Structure(ragged, {"sizes": sizes})
    offsets = part_of(reader, entry, "offsets")
    lengths = part_of(reader, entry, "lengths") if "lengths" in entry else None
    if type(ragged) is not int or not 1 <= ragged <= values.dim():
        reader.fail(f"{ragged!r:.80} is not a dimension of a nested tensor")
    integers = all([t.dtype in INTEGERS for t in (offsets, lengths) if t is not None])
    if not integers or offsets.dim() != 1 or not len(offsets):
        reader.fail("the offsets of a nested tensor are not a vector of integers", entry["offsets"])
    total = values.shape[ragged - 1]
    gaps = offsets.long().diff()
    if ((offsets < 0) | (offsets > total)).any() or (gaps < 0).any():
        reader.fail(
            "the offsets of a nested tensor must not decrease, and must lie within its values",
            entry["offsets"],
        )
    if lengths is None:
        return values, Structure(ragged, {"offsets": offsets})
    if lengths.shape != gaps.shape or (lengths < 0).any():
        reader.fail("the lengths of a nested tensor do not fit its offsets", entry["lengths"])
    if (lengths > total - offsets[:-1]).any():
        reader.fail("the rows of a nested tensor extend beyond its values", entry["lengths"])
    return values, Structure(ragged, {"offsets": offsets, "lengths": lengths})


def content_of(parts: dict[str, Tensor]) -> tuple[tuple[str, torch.dtype, bytes], ...]:
    return tuple([(name, p.dtype, p.cpu().numpy().tobytes()) for name, p in parts.items()])


def known_in(leaves: list[Tensor]) -> Known:
    """The structures of the jagged ones among some tensors."""
    known: Known = {}
    for leaf in leaves:
        if leaf.layout is torch.jagged:
            parts = parts_of_rows(leaf)
            known[content_of(parts)] = parts
    return known


def shared(structure: Structure, known: Known, device: torch.device | None = None) -> Structure:
    """The structure on a device, made of the tensors of an equal one among those that are known.

    Torch combines two jagged tensors only if they share their offsets.
    """
    key = content_of(structure.parts)
    if key not in known:
        is_moved = device is not None and structure.ragged != STRIDED
        known[key] = {n: p.to(device) if is_moved else p for n, p in structure.parts.items()}
    return Structure(structure.ragged, known[key])
