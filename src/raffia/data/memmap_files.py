"""The files of a `MemmapStorage`: header, lock, and rows as they are written, checked and repaired.

storage.json   the header: layout of the rows, what was flushed, and which rows may have changed
               since; replaced atomically
rows.bin       int64 [max_size + 1, 2]: of each row its stamp and its checksum; then the total
leaf-<i>.bin   the rows of the i-th tensor, side by side
log.bin        the rows that are just being overwritten (`RowLog`)
lock           held by the process that writes

Each row has a mark of two integers: a stamp, which is the number of the item plus one, or -1 for a
row that was set, and a checksum of content, row number and stamp. A row that holds nothing has the
stamp 0, and instead of the checksum the stamp of an item that was erased there.

Rows that hold something are overwritten in two steps: the new rows go into the log, then into
their files.
A process killed in the first step leaves the old rows, in the second a log from which the new rows
are written again. After a loss of power, of the rows that were written since the last flush any
part may be on the disk: those that do not fit their checksums are dropped, and of the items that
were appended those from the first gap on.
"""

import contextlib
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

from raffia.data.row_index import carried
from raffia.data.rows import RowLayout, packed, unpacked, words_of
from raffia.data.siphash import siphash
from raffia.data.structure import RowStructure
from raffia.files import (
    DamagedFileError,
    Lock,
    dump_json,
    foreign_reader,
    make_files,
    read_signed,
    shown,
    signed,
    write_atomically,
)
from raffia.files.folder import check_kind

KIND, VERSION = "raffia.memmap_storage", 1
HEADER, ROWS, LOG, LOCK = "storage.json", "rows.bin", "log.bin", "lock"
SIZE = 1 << 20  # bytes of rows that are written in one call: what stays in the cache of a core
HEAD = 64  # bytes before the rows: how many of them are valid, and the epoch
INTEGER = RowLayout(torch.int64, ())
SET = -1
RowIndex = slice | Tensor  # of rows
Ranges = Sequence[Sequence[int]]  # of rows: first, and after the last
OURS = re.compile(r"storage\.json|rows\.bin|log\.bin|lock|leaf-\d+\.bin|\.[0-9a-f]{12}\.tmp")


class MappedFile:
    """A file mapped to memory, as a tensor of bytes.

    mode: "r" is for reading only: writing to the tensor kills the process then.
    """

    def __init__(self, path: str, nbytes: int, mode: str) -> None:
        self.path, self._map = path, None
        if not nbytes:  # nothing can be mapped
            self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
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
            return torch.empty(shape, dtype=dtype, device="cpu")
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


# -------------------------------------------------------------------------------------- the rows


def make_row_files(folder: str, max_size: int, structure: RowStructure) -> None:
    """Make the files, of rows that hold nothing."""
    make_files(folder, _sizes(structure, max_size))


def remove_row_files(folder: str, structure: RowStructure) -> None:
    """Remove the files that `make_row_files` made, and a header over them.

    The header goes first: one without its files would be taken for a damaged storage.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{folder}/{HEADER}")
    for name in _sizes(structure, 0):
        os.unlink(f"{folder}/{name}")


def _sizes(structure: RowStructure, max_size: int) -> dict[str, int]:
    """The files, and their lengths in bytes."""
    layouts = structure.layouts
    leaves = {f"leaf-{i}.bin": max_size * layout.nbytes for i, layout in enumerate(layouts)}
    return {ROWS: 16 * (max_size + 1), LOG: log_bytes(layouts), **leaves}


class RowFiles:
    """The mapped files, viewed as rows.

    leaves: the tensors, [max_size, ...] each; marks: int64 [max_size, 2]; total: int64 [].
    """

    def __init__(self, folder: str, max_size: int, structure: RowStructure, mode: str) -> None:
        layouts = structure.layouts
        with torch.inference_mode(False):  # else they could only be written in this mode
            rows = MappedFile(f"{folder}/{ROWS}", 16 * (max_size + 1), mode)
            log = MappedFile(f"{folder}/{LOG}", log_bytes(layouts), mode)
            self._files = [rows]
            self.leaves: list[Tensor] = []
            for i, layout in enumerate(layouts):
                file = MappedFile(f"{folder}/leaf-{i}.bin", max_size * layout.nbytes, mode)
                self._files.append(file)
                self.leaves.append(file.tensor(layout.dtype, (max_size, *layout.shape)))
            self.marks = rows.tensor(torch.int64, (max_size, 2))
            self.total = rows.tensor(torch.int64, (), 16 * max_size)
            self._log = RowLog(log, layouts)  # it is not flushed: see `redo`
        self.at_once = rows_at_once(layouts)

    def write(
        self,
        index: RowIndex,
        leaves: Sequence[Tensor],
        number: int | Tensor | None,
        log_for: int | None,
    ) -> None:
        """Write rows in parts, such that a kill leaves each part either old or new.

        index: a slice of n rows, or int64 [n]; leaves: [n, ...] each.
        number: those of appended items, or that of the first; None for rows that are set.
        log_for: the epoch, in which rows are overwritten; None if they all hold nothing.
        """
        n = index.stop - index.start if isinstance(index, slice) else len(index)
        leaves = [leaf.cpu() for leaf in leaves]
        if n <= self.at_once:
            self._write_part(index, leaves, number, log_for)
            return
        for start in range(0, n, self.at_once):
            stop = min(n, start + self.at_once)
            part: RowIndex = (
                slice(index.start + start, index.start + stop)
                if isinstance(index, slice)
                else index[start:stop]
            )
            some = number[start:stop] if isinstance(number, Tensor) else number
            some = some + start if isinstance(some, int) else some
            self._write_part(part, [leaf[start:stop] for leaf in leaves], some, log_for)

    def _write_part(
        self,
        index: RowIndex,
        leaves: Sequence[Tensor],
        number: int | Tensor | None,
        log_for: int | None,
    ) -> None:
        """Write as many rows as the log takes."""
        rows = index
        if isinstance(rows, slice):
            rows = torch.arange(rows.start, rows.stop, device="cpu")
        if number is None:
            stamps, erased = self.marks[index].unbind(1)
            erased = erased.masked_fill(erased == 0, SET)
            stamps = torch.where(stamps == 0, erased, stamps)
        elif isinstance(number, Tensor):
            stamps = number + 1
        else:
            stamps = torch.arange(number + 1, number + 1 + len(rows), device="cpu")
        marks = self._log.write(leaves, rows, stamps)
        if log_for is None:
            self._put(index, marks, leaves)
        else:
            try:
                self._log.hold(len(rows), log_for)
                self._put(index, marks, leaves)
                self._log.clear()
            except BaseException:  # such as KeyboardInterrupt
                self.redo(log_for)
                raise
        if isinstance(number, int):
            self.total.fill_(number + len(rows))

    def _put(self, index: RowIndex, marks: Tensor, leaves: Sequence[Tensor]) -> None:
        """Write rows into the files; the marks last, which make them count."""
        if isinstance(index, slice):
            for leaf, source in zip(self.leaves, leaves, strict=True):
                leaf[index].copy_(source)
            self.marks[index].copy_(marks)
            return
        for leaf, source in zip(self.leaves, leaves, strict=True):
            target = carried(leaf)
            target.index_copy_(0, index, source.view(target.dtype))
        self.marks.index_copy_(0, index, marks)

    def erase(self, rows: Tensor) -> None:
        """Make rows hold nothing, but know which item it was."""
        stamps = self.marks[rows, 0].clamp(0)
        self.marks.index_copy_(0, rows, torch.stack([torch.zeros_like(stamps), stamps], 1))

    def redo(self, epoch: int) -> None:
        """Complete the write that a kill cut off, if there is one since the flush `epoch`.

        Earlier ones are all on disk: of the log nothing is needed that was flushed.
        """
        found = self._log.read(epoch)
        if found is not None and len(found[0]):
            rows, marks, leaves = found
            self._put(rows, marks, leaves)
            self._log.clear()

    def fits(self, rows: Tensor, leaves: Sequence[Tensor]) -> Tensor:
        """Whether these copies of rows fit the marks that the rows have now: bool [n]."""
        marks = self.marks.index_select(0, rows)
        return checksums(packed_rows(leaves, rows, marks[:, 0])) == marks[:, 1]

    def flush(self) -> None:
        """Bring all rows to disk."""
        for file in self._files:
            file.flush()


def repair(files: RowFiles, ranges: Ranges, flushed: int, epoch: int) -> tuple[int, int]:
    """Drop what is not whole; returns how many items were appended, and how many rows were dropped.

    ranges: where rows may have been written since the flush, by which `flushed` items were there.
    """
    files.redo(epoch)
    lost = sum([drop_torn(files, start, stop) for start, stop in ranges])
    first, total = last_run(files, ranges, flushed)
    lost += sum([drop_others(files, start, stop, first, total) for start, stop in ranges])
    return total, lost


def drop_torn(files: RowFiles, start: int, stop: int) -> int:
    """Make rows start..stop-1 that do not fit their checksums hold nothing; how many there were."""
    lost = 0
    for at in range(start, stop, files.at_once):
        marks = files.marks[at : min(stop, at + files.at_once)]
        rows = marks[:, 0].nonzero().view(-1) + at
        torn = rows[~files.fits(rows, [leaf.index_select(0, rows) for leaf in files.leaves])]
        files.marks[torn] = 0
        lost += len(torn)
    return lost


def last_run(files: RowFiles, ranges: Ranges, flushed: int) -> tuple[int, int]:
    """The first and the last (plus one) of the items that stay: a run without a gap.

    Items appended before the flush are in it, but for those whose rows were to be written again
    when the power went: these have given way. Items appended after it are, up to the first gap. If
    none from before the flush is left, it is the longest run. An erased item is not a gap.
    """
    size = len(files.marks)
    marks = [files.marks[start:stop] for start, stop in ranges]
    last = max([flushed, *[int(item_stamps(part).max()) for part in marks]])
    items = torch.arange(max(flushed, last - size), last, device="cpu")
    there = item_stamps(files.marks[items % size]) == items + 1
    if last - size < flushed:
        run = int(there.long().cumprod(0).sum())
        return max(0, last - size), flushed + run
    ends = items.new_tensor([-1]), items.new_tensor([len(items)])
    gaps = torch.cat([ends[0], (~there).nonzero().view(-1), ends[1]])
    longest = int(gaps.diff().argmax())
    return int(items[0] + gaps[longest] + 1), int(items[0] + gaps[longest + 1])


def item_stamps(marks: Tensor) -> Tensor:  # int64 [n]
    """The stamps of the items that are, or were erased, in rows with these marks [n, 2]; else 0."""
    return torch.where(marks[:, 0] == 0, marks[:, 1], marks[:, 0]).clamp(0)


def drop_others(files: RowFiles, start: int, stop: int, first: int, total: int) -> int:
    """Make rows start..stop-1 of other items than first..total-1 hold nothing; how many."""
    marks = files.marks[start:stop]
    stamps = item_stamps(marks)
    others = (stamps > 0) & ((stamps <= first) | (stamps > total))
    lost = int((others & (marks[:, 0] != 0)).count_nonzero())
    marks[others] = 0
    return lost


def checksums(words: Tensor, out: Tensor | None = None) -> Tensor:  # int64 [n]
    """A checksum of each packed row.

    >>> from raffia.data.memmap_files import checksums
    >>> checksums(torch.tensor([[1, 2], [2, 1]])).unique().shape
    torch.Size([2])
    """
    return siphash(words, normalize=False, out=out)


def packed_rows(
    leaves: Sequence[Tensor], rows: Tensor, stamps: Tensor, out: Tensor | None = None
) -> Tensor:
    """Rows packed: the content, the row number and the stamp, all of which a checksum covers."""
    return packed([*leaves, rows, stamps], normalize=False, out=out)


def num_words(layouts: Sequence[RowLayout]) -> int:
    """64-bit words in a packed row."""
    return words_of(layouts) + 2


def rows_at_once(layouts: Sequence[RowLayout]) -> int:
    """How many rows the log takes."""
    return max(1, SIZE // (8 * num_words(layouts)))


def log_bytes(layouts: Sequence[RowLayout]) -> int:
    """The length of the file."""
    return HEAD + rows_at_once(layouts) * (16 + 8 * num_words(layouts))


class RowLog:
    """The file, viewed as rows."""

    def __init__(self, file: MappedFile, layouts: Sequence[RowLayout]) -> None:
        n = rows_at_once(layouts)
        self._layouts = layouts
        self._head = file.tensor(torch.int64, (2,))  # number of rows, epoch
        self._marks = file.tensor(torch.int64, (n, 2), HEAD)
        self._words = file.tensor(torch.int64, (n, num_words(layouts)), HEAD + 16 * n)

    def write(self, leaves: Sequence[Tensor], rows: Tensor, stamps: Tensor) -> Tensor:
        """Write rows down; returns their marks, int64 [n, 2]: stamps and checksums."""
        n = len(rows)
        marks = self._marks[:n]
        words = packed_rows(leaves, rows, stamps, self._words[:n])
        marks[:, 0] = stamps
        checksums(words, out=marks[:, 1])
        return marks

    def hold(self, n: int, epoch: int) -> None:
        """Make the `n` rows written to the log count: after a crash, `read` returns them."""
        self._head[1] = epoch
        self._head[0] = n  # last

    def clear(self) -> None:
        """Clear the log: the rows are written."""
        self._head[0] = 0

    def read(self, epoch: int) -> tuple[Tensor, Tensor, list[Tensor]] | None:
        """Rows, marks and tensors that may not be written yet; None without any.

        epoch: that of the header; what was flushed since is older than the row itself.
        """
        n, written = self._head.tolist()
        if not 0 < n <= len(self._marks) or written != epoch:
            return None
        marks, words = self._marks[:n].clone(), self._words[:n].clone()
        whole = checksums(words) == marks[:, 1]  # false, maybe, after a loss of power
        *leaves, rows, stamps = unpacked(words[whole], [*self._layouts, INTEGER, INTEGER])
        return rows, torch.stack([stamps, marks[whole, 1]], 1), leaves
