"""The files of a `MemmapStorage`: mapped tensors, the header, and the lock of the one writer.

storage.json   the header: layout of the rows, what was flushed, and which rows may have changed
               since; replaced atomically
rows.bin       int64 [max_size + 1, 2]: of each row its stamp and its checksum; then the total
leaf-<i>.bin   the rows of the i-th tensor, side by side
log.bin        the rows that are just being overwritten (log.py of this room: `RowLog`)
lock           held by the process that writes
"""

import ctypes
import errno
import math
import mmap
import os
import re
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raffia.files import (
    DamagedFileError,
    Lock,
    dump_json,
    foreign_reader,
    read_signed,
    shown,
    signed,
    write_atomically,
)
from raffia.files.folder import check_kind

KIND, VERSION = "raffia.memmap_storage", 1
HEADER, ROWS, LOG, LOCK = "storage.json", "rows.bin", "log.bin", "lock"
OURS = re.compile(r"storage\.json|rows\.bin|log\.bin|lock|leaf-\d+\.bin|\.[0-9a-f]{12}\.tmp")


class MappedFile:
    """A file mapped to memory, as a tensor of bytes.

    mode: "r" is for reading only: writing to the tensor kills the process then.
    """

    def __init__(self, path: str, nbytes: int, mode: str) -> None:
        self.path, self._map = path, None
        if not nbytes:  # nothing can be mapped
            self.bytes = torch.empty(0, dtype=torch.uint8)
            return
        try:
            file = open(path, "rb" if mode == "r" else "rb+")
        except FileNotFoundError:
            raise DamagedFileError(path, "the file is missing") from None
        with file:
            found = os.fstat(file.fileno()).st_size
            if found != nbytes:
                raise DamagedFileError(path, f"it holds {found} bytes, not {nbytes}")
            access = mmap.ACCESS_READ if mode == "r" else mmap.ACCESS_WRITE
            self._map = mmap.mmap(file.fileno(), nbytes, access=access)
        buffer: Any = self._map
        if mode == "r":  # torch warns of a read-only buffer, but nothing writes to it here
            address = np.frombuffer(self._map, dtype=np.uint8).ctypes.data
            buffer = (ctypes.c_ubyte * nbytes).from_address(address)
            buffer.map = self._map  # stays as long as a tensor over it
        self.bytes = torch.frombuffer(buffer, dtype=torch.uint8)

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> Tensor:
        """A part of the file, from byte `offset` on, as a tensor."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        return self.bytes[offset : offset + nbytes].view(dtype).view(shape)

    def flush(self) -> None:
        """Bring what was written to disk."""
        if self._map is not None:
            self._map.flush()


# ------------------------------------------------------------------------------------- the header


def read_header(folder: str) -> dict[str, Any] | None:
    """The header of the storage in a folder; None if there is no storage, and may be one.

    Raises FileExistsError if something else is there, DamagedFileError if the header is damaged.
    """
    if not os.path.isdir(folder):
        if os.path.lexists(folder):
            raise FileExistsError(errno.EEXIST, "this is not a folder; choose another path", folder)
        return None
    path = f"{folder}/{HEADER}"
    if not os.path.lexists(path):
        foreign = sorted(name for name in os.listdir(folder) if not OURS.fullmatch(name))
        if foreign:
            raise FileExistsError(
                errno.EEXIST,
                f"this folder holds other files and no MemmapStorage ({shown(foreign[0])}): use a "
                "separate folder",
                folder,
            )
        return None
    header = read_signed(path)
    check_kind(folder, header, KIND, VERSION)
    with foreign_reader(path, "it describes no rows"):
        size, ranges = header["max_size"], header["open"]
        counts = [size, header["total"], header["epoch"], *[n for pair in ranges for n in pair]]
        if not all(type(n) is int and 0 <= n < 2**63 for n in counts) or not size:
            raise ValueError("a count is not a whole number")
        if not all(start <= stop <= size for start, stop in ranges):
            raise ValueError(f"rows {shown(ranges)} are outside of the {size} rows")
    return header


def write_header(folder: str, header: dict[str, Any]) -> None:
    """Replace the header atomically, and bring it to disk."""
    record = {"format": "raffia", "kind": KIND, "version": VERSION, **header}
    write_atomically(f"{folder}/{HEADER}", dump_json(signed(record)))


# --------------------------------------------------------------------------------------- the lock


class WriterLock:
    """Held by the one process that writes into a folder; it ends with the process.

    A forked child does not share it.
    """

    def __init__(self, folder: str) -> None:
        self.owner = os.getpid()
        self._fd: int | None = None
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        fd = os.open(f"{folder}/{LOCK}", flags)
        try:
            self._lock = Lock(fd)
            os.ftruncate(fd, 0)
            os.write(fd, str(self.owner).encode())
        except BlockingIOError:
            other = os.read(fd, 32).decode("ascii", "replace")
            os.close(fd)
            raise RuntimeError(
                f"{folder} is already open for writing in process {other or 'unknown'}: close it "
                "there, or open it for reading with MemmapStorage.open(folder, mode='r')"
            ) from None
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        if self._lock.missing:
            warnings.warn(
                f"{folder}: {self._lock.missing}. Nothing prevents a second process from writing "
                "there: make sure that only one does",
                stacklevel=2,
            )
        if hasattr(os, "register_at_fork"):
            # Else a child, forked to load data, would keep others out after its parent has died.
            os.register_at_fork(after_in_child=_releaser(weakref.ref(self)))

    def release(self) -> None:
        """Release the lock, so that others can write."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        try:
            if os.getpid() == self.owner:  # closing is not enough where a child has the lock too
                self._lock.release()
        finally:
            os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):  # else it never came to be
            self.release()


def _releaser(reference: "weakref.ref[WriterLock]") -> Any:
    def release() -> None:
        lock = reference()
        if lock is not None:
            lock.release()

    return release
