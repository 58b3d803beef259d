"""A container as one safetensors file: its tensors, and in the metadata the record of the tree.

The metadata has a checksum of the whole file, too, made with zeros instead of it. The library of
safetensors reads the file, which may come from elsewhere. It is written here: as the checksum is
made on the way, a full disk is the error of the system, and a kill leaves no file of another name.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable
from io import BufferedReader
from typing import Any, BinaryIO

import safetensors
import torch
from torch import Tensor, nn

from raffia.files import (
    Path,
    dump_json,
    foreign_reader,
    make_folder,
    open_plain,
    parse_json,
    shown,
    write_atomically,
)
from raffia.tensordict import ragged
from raffia.tensordict.memmap import DTYPES
from raffia.tensordict.node import Node
from raffia.tensordict.record import Reader, Record, check_version, outline, placed, rebuild, titled

FILE_DTYPES = {
    "BOOL": torch.bool,
    **{f"U{n}": DTYPES[f"uint{n}"] for n in (8, 16, 32, 64)},
    **{f"I{n}": DTYPES[f"int{n}"] for n in (8, 16, 32, 64)},
    **{f"F{n}": DTYPES[f"float{n}"] for n in (16, 32, 64)},
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
FILE_DTYPE_NAMES = {dtype: name for name, dtype in FILE_DTYPES.items()}
# dtypes that the format, or older readers of it, lack -> what carries their numbers, in how many
CARRIERS: dict[torch.dtype, tuple[torch.dtype, list[int]]] = {
    torch.complex32: (torch.float16, [2]),
    torch.complex128: (torch.float64, [2]),
    torch.float8_e8m0fnu: (torch.uint8, []),
    torch.float4_e2m1fn_x2: (torch.uint8, []),
}
LONGEST_HEADER = 100_000_000  # as in other readers of the format
RECORD, CHECKSUM = "raffia", "raffia.sha256"
NO_CHECKSUM = "0" * 64


def save_file(td: Any, path: Path) -> None:
    """Write a container as one safetensors file, atomically.

    >>> import tempfile
    >>> from raffia import TensorDict
    >>> from safetensors.torch import load_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file(TensorDict(a=torch.ones(2)), f"{folder}/x")
    ...     load_file(f"{folder}/x")
    {'a': tensor([1., 1.])}
    """
    stored: dict[str, Tensor] = {}
    names: dict[Any, str] = {}  # by address, so that a tensor with two keys is stored once

    def put(leaf: Tensor, key: tuple[str, ...]) -> Record:
        where = view_key(leaf)
        if where not in names:
            names[where] = tensor_name(key, stored)
            stored[names[where]] = leaf
        record: Record = {"tensor": names[where], **ragged.described(leaf)}
        if isinstance(leaf, nn.Parameter):
            record["parameter"] = leaf.requires_grad
        return record

    record = titled(placed(outline(td), put))
    tensors = sorted(stored.items(), key=lambda item: -item[1].dtype.itemsize)  # keeps them aligned
    text = header_of(dump_json(record).decode(), tensors)

    def write(file: BinaryIO) -> None:
        checksum = hashlib.sha256(text)
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in tensors:
            if tensor.numel():
                data = raw_bytes(tensor)
                checksum.update(data)
                file.write(data)
        file.seek(8 + text.index(NO_CHECKSUM.encode(), text.index(f'"{CHECKSUM}"'.encode())))
        file.write(checksum.hexdigest().encode())

    path = os.path.abspath(path)
    make_folder(os.path.dirname(path))
    write_atomically(path, write)


def header_of(record: str, tensors: list[tuple[str, Tensor]]) -> bytes:
    """The header of a file of these tensors, stored one after the other; without the checksum."""
    metadata = {"format": "pt", RECORD: record, CHECKSUM: NO_CHECKSUM}
    header: Record = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors:
        carrier, extra = CARRIERS.get(tensor.dtype, (tensor.dtype, []))
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        entry: Record = {"dtype": FILE_DTYPE_NAMES[carrier], "shape": [*tensor.shape, *extra]}
        header[name] = entry | {"data_offsets": [begin, end]}
    text = dump_json(header)
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST_HEADER:
        raise ValueError(
            f"the keys and non-tensor values take {len(text)} bytes, but one file holds at most "
            "100 MB of them"
        )
    return text


def view_key(tensor: Tensor) -> Hashable:
    """A key that is equal for two tensors that are the same memory, viewed in the same way."""
    if not tensor.numel():
        return id(tensor)
    view = tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), view


def tensor_name(key: tuple[str, ...], taken: dict[str, Tensor]) -> str:
    """The name of a tensor for other readers of the file: its key with dots, made unique.

    >>> tensor_name(("a", "b"), {"a.b": torch.ones(1)})
    'a.b~2'
    """
    name = ".".join(key).encode("utf-8", "replace").decode()
    n, out = 1, name
    while out in taken or out == "__metadata__":
        n += 1
        out = f"{name}~{n}"
    return out


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, row by row.

    >>> bytes(raw_bytes(torch.tensor([1, 2], dtype=torch.uint8)))
    b'\\x01\\x02'
    """
    return memory_of(
        tensor.detach().cpu().as_subclass(Tensor).resolve_conj().resolve_neg().contiguous()
    )


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a plain, contiguous tensor as a view: writing to it changes the tensor.

    >>> plain = torch.tensor([1, 2], dtype=torch.uint8)
    >>> memory_of(plain)[0] = 3
    >>> plain
    tensor([3, 2], dtype=torch.uint8)
    """
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


class FileReader(Reader):
    """Reads a container out of a safetensors file."""

    def __init__(self, path: str, device: torch.device | None, non_blocking: bool) -> None:
        super().__init__(path, device, non_blocking)
        self.tensors: dict[str, Tensor] = {}
        self.parameters: dict[str, nn.Parameter] = {}

    def read(self) -> Node:
        """The container in this file."""
        with (
            open_plain(self.path, follows_links=True) as file,
            foreign_reader(self.path, "it is not a safetensors file, or it is incomplete"),
            safetensors.safe_open(self.path, framework="pt") as opened,
        ):
            if os.stat(self.path).st_ino != os.fstat(file.fileno()).st_ino:
                return self.read()  # another process has replaced it meanwhile
            metadata = opened.metadata() or {}
            header = file.read(int.from_bytes(file.read(8), "little"))
            known = metadata.get(CHECKSUM, "")
            checksum = hashlib.sha256(header.replace(known.encode(), NO_CHECKSUM.encode(), 1))
            found = {}
            for name in opened.offset_keys():  # one behind the other, as the library has checked
                found[name], data = self.next_tensor(file, opened, name)
                checksum.update(data)
            self.tensors = {name: found[name] for name in opened.keys()}  # noqa: SIM118, no mapping
        if not metadata.keys() & {RECORD, CHECKSUM}:  # another program's
            parse_json(self.path, header, deepest=None)  # no name is there twice
            return rebuild(self, record_of_all(self.tensors))
        if len(known) != 64 or checksum.hexdigest() != known:
            self.fail("its content is not what was saved: the checksum differs")
        if RECORD not in metadata:
            self.fail("its record is missing")
        record = parse_json(self.path, metadata[RECORD], deepest=None)
        check_version(self.path, record)
        return rebuild(self, record)

    def next_tensor(self, file: BufferedReader, opened: Any, name: str) -> tuple[Tensor, Any]:
        """The tensor whose bytes come next in the file, and these bytes."""
        listed = opened.get_slice(name)
        dtype = FILE_DTYPES.get(listed.get_dtype())
        if dtype is None:  # one that only the library knows
            out = opened.get_tensor(name).clone()
            data: Any = file.read(out.nbytes)
        else:
            out = torch.empty(listed.get_shape(), dtype=dtype, device="cpu")
            data = memory_of(out)
            if file.readinto(data) != len(data):
                self.fail("it has become shorter")
        if self.device is not None:
            out = out.to(self.device, non_blocking=self.non_blocking)
        return out, data

    def tensor(self, entry: Record) -> Tensor:
        name, dtype, shape = entry.get("tensor"), self.dtype(entry["dtype"]), entry.get("shape")
        if type(name) is not str or name not in self.tensors:
            self.fail(f"there is no tensor {shown(name)}")
        found = self.tensors[name]
        if found.dtype is not dtype:
            carrier, extra = CARRIERS.get(dtype, (None, []))
            last = list(found.shape[found.dim() - len(extra) :])
            if carrier is not found.dtype or last != extra:
                self.fail(f"tensor {shown(name)} is not of {entry['dtype']}")
            found = torch.view_as_complex(found) if extra else found.view(dtype)
            self.tensors[name] = found
        if list(found.shape) != shape:
            self.fail(f"tensor {shown(name)} is not of shape {shown(shape)}")
        needs_grad = entry.get("parameter")
        if needs_grad is None:
            return found
        real = dtype.is_floating_point or dtype.is_complex
        if type(needs_grad) is not bool or needs_grad > real:
            self.fail(f"tensor {shown(name)} can't be a parameter")
        if name not in self.parameters:
            self.parameters[name] = nn.Parameter(found, requires_grad=needs_grad)
        return self.parameters[name]


def record_of_all(tensors: dict[str, Tensor]) -> Record:
    """The record of a container that holds all tensors under their names."""
    listed = {name: {"tensor": name, **ragged.described(x)} for name, x in tensors.items()}
    return {"class": "TensorDict", "batch_size": [], "entries": listed}
