"""`MemmapStorage`: rows on disk, reached through memory; a crash never corrupts them."""

import errno
import os
import time
from typing import Any, Self

import torch
from torch import Tensor

from raffia.data.memmap_files import (
    HEADER,
    RowFiles,
    WriterLock,
    make_row_files,
    read_header,
    remove_row_files,
    repair,
    write_header,
)
from raffia.data.row_index import Index, OccupiedRowsInFile, as_rows, bounds
from raffia.data.storage import Storage
from raffia.data.structure import RowStructure, StorageContents
from raffia.files import DamagedFileError, foreign_reader, make_folder
from raffia.hints import check_choice

Path = str | os.PathLike[str]
BLOCKS = 1024  # parts of the rows, for each of which the header tells whether they may have changed
RETRIES = 50  # of a reader that meets rows which are just being written; 1 ms each


class MemmapStorage(Storage):
    """Rows in memory-mapped files, of any nested structure; there can be more than memory holds.

    max_size: the number of rows, for which space is taken on the disk at the first write.
    folder: where the files are, made if need be. A storage that is there already, of the same
        `max_size`, continues from where it was.
    mode: "r" reads while one process writes; any number of processes can.

    It does all that `TensorStorage` does. What is written is in the system's hands when the call
    returns, and on the disk after `flush()`, which the system also does at times. After a crash,
    the storage is opened again as if nothing had happened, and this holds:

    - A killed process (SIGKILL, out of memory, an exception): every row holds what was written last
      before the kill, as a whole; rows of the call that was cut off hold the old or the new.
    - Damaged files: rows written by an earlier process are checked when they are first read, and
      raise DamagedFileError if they are not as they were written.
    - Loss of power, or a crash of the system: rows that were not written since the last flush are
      as they were. Those that were are old, new, or dropped (they hold nothing then): never a
      mixture. Of appended items those up to the first dropped one are there, and `total` counts
      them, so that a ring has no gap. `lost` counts the dropped rows.

    Raises RuntimeError if another process writes there, FileExistsError or ValueError if the folder
    holds something else, OSError if the disk is full; nothing is changed then.

    >>> import tempfile
    >>> from raffia.data.memmap_storage import MemmapStorage
    >>> folder = tempfile.TemporaryDirectory()
    >>> with MemmapStorage(1000, folder.name) as storage:
    ...     _ = storage.extend({"obs": torch.arange(6).view(3, 2)})
    >>> storage = MemmapStorage.open(folder.name)
    >>> storage.get(2), storage.total
    ({'obs': tensor([4, 5])}, 3)
    >>> storage.close()
    >>> folder.cleanup()
    """

    in_memory = False
    _skips = False  # so that a kill at any time leaves a ring without a gap

    def __init__(self, max_size: int, folder: Path, *, mode: str = "r+") -> None:
        if max_size is None:
            raise ValueError("a MemmapStorage needs a max_size: MemmapStorage(1_000_000, folder)")
        check_choice("mode", mode, ("r+", "r"), "; 'r' is for reading only")
        super().__init__(max_size)
        self.folder = os.path.abspath(folder)
        self.mode = mode
        self.lost = 0
        self._lock: WriterLock | None = None
        self._closed = False
        self._size = max_size = int(max_size)
        self._files: RowFiles | None = None
        self._changed = False  # since the last flush
        self._unread: Tensor | None = None  # bool [max_size]: written before, not read here yet
        self._num_unread = 0
        self._epoch = self._flushed = 0  # the number of flushes, and the total at the last one
        self._block = -(-max_size // BLOCKS)  # rows in a block
        num_blocks = -(-max_size // self._block)
        self._open = bytearray(num_blocks)  # blocks that may change, as the header on disk records
        self._used = bytearray(num_blocks)  # blocks that were written to since the last flush
        header = self._found()
        if mode == "r+":
            make_folder(self.folder)
            self._lock = WriterLock(self.folder)
        try:
            header = self._found()  # the process that wrote before may have changed it
            if header is not None:
                self._attach(header)
        except BaseException:
            self._release()
            raise

    def _found(self) -> dict[str, Any] | None:
        """The header in the folder, of a storage of this size."""
        header = read_header(self.folder)
        if header is None and self.mode == "r":
            raise _nothing_there(self.folder)
        if header is not None and header["max_size"] != self._max_size:
            raise ValueError(
                f"{self.folder} holds a storage with max_size={header['max_size']}, not "
                f"{self._max_size}: open it with MemmapStorage.open({self.folder!r})"
            )
        return header

    @classmethod
    def open(cls, folder: Path, *, mode: str = "r+") -> Self:
        """Open the existing storage in a folder.

        mode: "r" reads while one process writes.
        Raises FileNotFoundError without a storage, otherwise as `MemmapStorage(max_size, folder)`.

        >>> import tempfile
        >>> from raffia.data.memmap_storage import MemmapStorage
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     storage = MemmapStorage(10, folder)
        ...     _ = storage.extend(torch.arange(3))
        ...     reader = MemmapStorage.open(folder, mode="r")
        ...     _ = storage.extend(torch.arange(3))
        ...     reader.get(slice(None))
        tensor([0, 1, 2, 0, 1, 2])
        """
        header = read_header(os.path.abspath(folder))
        if header is None:
            raise _nothing_there(folder)
        return cls(header["max_size"], folder, mode=mode)

    # -- opening and closing

    def _attach(self, header: dict[str, Any]) -> None:
        """Map the files that the header describes, and repair what a crash has left."""
        with foreign_reader(f"{self.folder}/{HEADER}", "it describes no rows"):
            structure = RowStructure.from_json(header["structure"])
        files = RowFiles(self.folder, self._size, structure, self.mode)
        self._structure, self._files, self._leaves = structure, files, files.leaves
        self._epoch, self._flushed = header["epoch"], header["total"]
        if self.mode == "r":
            self._occupied = OccupiedRowsInFile(files.marks)
        else:
            self._repair(files, header["open"])

    def _repair(self, files: RowFiles, ranges: list[list[int]]) -> None:
        """Complete or drop what a crash cut off; only rows in `ranges` were written since a
        flush."""
        self._total, self.lost = repair(files, ranges, self._flushed, self._epoch)
        files.total.fill_(self._total)
        self._occupied.add(files.marks[:, 0].nonzero().view(-1))
        self._unread = files.marks[:, 0] != 0
        self._num_unread = int(self._unread.count_nonzero())
        if ranges:
            self._commit(files, bytearray(len(self._open)))

    def close(self) -> None:
        """Flush, and let others write; this storage cannot be used any longer.

        At the end of the process, or of a `with` statement, it is closed too; without a flush
        where the process is killed, which loses nothing (see the class).
        """
        if self._closed:
            return
        if self._lock is not None and self._lock.owner == os.getpid() and self._files is not None:
            if self._changed or any(self._open):
                self._commit(self._files, bytearray(len(self._open)))
        self._closed, self._files, self._leaves = True, None, []
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_writable(self) -> None:
        self._check_open()
        if self._lock is None:
            raise RuntimeError(
                f"{self.folder} is open for reading only: open it for writing with "
                "MemmapStorage.open(folder), while no other process does"
            )
        if self._lock.owner != os.getpid():
            raise RuntimeError(
                f"{self.folder} is open for writing in process {self._lock.owner}, the parent of "
                "this one: read it here with MemmapStorage.open(folder, mode='r')"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(
                "this storage has been closed: open it again with "
                f"MemmapStorage.open({self.folder!r})"
            )

    def __reduce__(self) -> Any:
        """Pickle to a reader of the same folder, for a process alongside the one that writes."""
        self._check_open()
        if self._structure is None:
            raise RuntimeError(
                f"nothing has been written to {self.folder} yet, so another process cannot open "
                "it: call storage.allocate(rows), which fixes the structure of a row without "
                "writing any"
            )
        return _reader, (self.folder,)

    # -- flushing

    def flush(self) -> None:
        """Bring all that was written to disk: from the return on, no crash takes it away.

        >>> import tempfile
        >>> from raffia.data.memmap_storage import MemmapStorage
        >>> with tempfile.TemporaryDirectory() as folder, MemmapStorage(9, folder) as storage:
        ...     _ = storage.extend(torch.arange(3))
        ...     storage.flush()
        """
        self._check_writable()
        if self._files is None or not self._changed:
            return
        ahead = bytearray(len(self._open))
        if self._total > self._flushed:  # a ring: as much will be written next, right behind
            block = self._total % self._size // self._block
            for i in range(block, block + sum(self._used) + 1):
                ahead[i % len(ahead)] = 1
        self._commit(self._files, ahead)

    def _commit(self, files: RowFiles, opened: bytearray) -> None:
        """Flush; from now on only the blocks `opened` may change until the next header."""
        files.flush()
        self._write_header(opened, self._epoch + 1, self._total)
        self._epoch, self._flushed, self._open = self._epoch + 1, self._total, opened
        self._used = bytearray(len(opened))
        self._changed = False

    def _write_header(self, opened: bytearray, epoch: int, total: int) -> None:
        assert self._structure is not None
        write_header(
            self.folder,
            {
                "max_size": self._size,
                "structure": self._structure.to_json(),
                "epoch": epoch,
                "total": total,
                "open": _ranges(opened, self._block, self._size),
            },
        )

    def _announce(self, rows: slice | Tensor) -> None:
        """Make the header on disk record that these rows may change.

        It then records more rows than these, so that it is rarely written: of twice as many
        rows each time where they follow each other, of four times as many where they do not.
        """
        self._changed = True
        if isinstance(rows, slice):
            first, last = rows.start // self._block, (rows.stop - 1) // self._block
            self._used[first : last + 1] = b"\1" * (last + 1 - first)
            if 0 not in self._open[first : last + 1]:
                return
            blocks = range(first, last + 1)
        else:
            blocks = (rows // self._block).unique().tolist()
            for block in blocks:
                self._used[block] = 1
            if all([self._open[block] for block in blocks]):
                return
        opened = bytearray(self._open)
        for block in blocks:
            opened[block] = 1
        least, times = (64, 1) if isinstance(rows, slice) else (16, 3)
        for i in range(max(len(opened) // least, times * sum(opened))):
            opened[(blocks[-1] + i) % len(opened)] = 1
        self._write_header(opened, self._epoch, self._flushed)
        self._open = opened

    # -- what Storage asks for

    @property
    def total(self) -> int:
        """How many items were ever appended, by any process, since the last `clear`."""
        return int(self._files.total) if self.mode == "r" and self._files else self._total

    def _allocate(self, structure: RowStructure, size: int) -> None:
        self._check_writable()
        make_row_files(self.folder, size, structure)
        self._structure = structure
        try:
            files = RowFiles(self.folder, size, structure, self.mode)
            self._write_header(self._open, 0, 0)
        except BaseException:
            self._structure = None
            # The header may stand already, if its name alone could not be brought to disk.
            remove_row_files(self.folder, structure)
            raise
        self._files, self._leaves = files, files.leaves

    def _write(self, rows: Index, leaves: list[Tensor], number: int | Tensor | None) -> None:
        self._check_writable()
        assert self._files is not None
        if isinstance(rows, int):
            rows, leaves = slice(rows, rows + 1), [leaf.unsqueeze(0) for leaf in leaves]
        self._announce(rows)
        fresh = self._occupied.gapless and bounds(rows)[0] >= self._occupied.high
        self._files.write(rows, leaves, number, None if fresh else self._epoch)
        self._need_no_check(rows)

    def _forget(self, rows: Tensor | None) -> None:
        self._check_writable()
        if self._files is None:
            return
        if rows is not None:
            self._announce(rows)
            self._need_no_check(rows)
            self._files.erase(rows)
            return
        self._unread, self._num_unread = None, 0
        self._announce(slice(0, self._size))
        self._files.marks.zero_()
        self._files.total.zero_()
        self._write_header(self._open, self._epoch, 0)
        self._flushed = 0

    def _replace(self, new: StorageContents) -> None:
        self._check_writable()
        if self._structure and new.structure and new.structure != self._structure:
            raise ValueError(
                f"{self.folder} holds rows of {self._structure}, but the state has rows of "
                f"{new.structure}: load it into a MemmapStorage in a new folder"
            )
        super()._replace(new)
        if self._files is not None:
            self._files.total.fill_(self._total)
            self._commit(self._files, bytearray(len(self._open)))

    def _unsettle(self) -> None:
        pass  # what a row looks like is settled with the files

    # -- reading, while another process writes

    def holds_items(self, items: Tensor) -> bool:
        """Whether rows still hold these items; asked after reading, it tells which these were."""
        if self.mode == "r+" or self._files is None:
            return True
        return torch.equal(self._files.marks[items % self._size, 0], items + 1)

    def _check_occupied(self, index: Index) -> None:
        self._check_open()
        super()._check_occupied(index)

    def ensure_whole(self, rows: Index) -> None:
        """Check rows that were there when this process opened the storage, at their first use.

        Raises DamagedFileError if one does not fit its checksum.
        """
        if not self._num_unread:
            return
        assert self._unread is not None and self._files is not None
        wanted = as_rows(rows, self._device)
        wanted = wanted[self._unread[wanted]].unique()
        at_once = self._files.at_once
        for part in wanted.split(at_once):
            fits = self._files.fits(part, [leaf.index_select(0, part) for leaf in self._leaves])
            if not bool(fits.all()):
                raise DamagedFileError(
                    self.folder,
                    f"rows {part[~fits][:5].tolist()} do not match their checksums: the files are "
                    "damaged, or were changed by another program. storage.erase(rows) discards "
                    "these rows",
                )
        self._unread[wanted] = False
        self._num_unread -= len(wanted)

    def _need_no_check(self, rows: slice | Tensor) -> None:
        """Mark these rows as needing no check, since they were written here."""
        if not self._num_unread:
            return
        assert self._unread is not None
        if isinstance(rows, slice):
            self._num_unread -= int(self._unread[rows].count_nonzero())
        else:
            self._num_unread -= len(rows[self._unread[rows]].unique())
        self._unread[rows] = False

    def _read(self, index: Index, batch: torch.Size) -> list[Tensor]:
        if self.mode == "r+":
            self.ensure_whole(index)
            return super()._read(index, batch)
        found = self._whole(as_rows(index, self._device))
        return [rows.view(batch + rows.shape[1:]) for rows in found]

    def _read_entry(self, i: int, rows: Tensor) -> Tensor:
        if self.mode == "r":  # what belongs together is known of whole rows
            return self._whole(rows)[i]
        self.ensure_whole(rows)
        return super()._read_entry(i, rows)

    def _copy(self, index: Index, batch: torch.Size, targets: list[Tensor]) -> None:
        if self.mode == "r+":
            self.ensure_whole(index)
            super()._copy(index, batch, targets)
            return
        for target, rows in zip(targets, self._read(index, batch), strict=True):
            target.copy_(rows)

    def _whole(self, rows: Tensor) -> list[Tensor]:
        """Copies of rows, none of which was just being written."""
        assert self._files is not None
        for _ in range(RETRIES):
            found = [leaf.index_select(0, rows) for leaf in self._leaves]
            fits = self._files.fits(rows, found)
            if bool(fits.all()):
                return found
            time.sleep(0.001)
            self._check_occupied(rows)  # they may have been erased
        raise DamagedFileError(
            self.folder,
            f"rows {rows[~fits][:5].tolist()} do not match their checksums. If a crash "
            "interrupted a write, MemmapStorage.open(folder) repairs them; if the files are "
            "damaged or were changed by another program, its erase(rows) discards them",
        )


def _nothing_there(folder: Path) -> FileNotFoundError:
    why = "no storage has been written to this folder yet"
    return FileNotFoundError(errno.ENOENT, why, str(folder))


def _reader(folder: str) -> MemmapStorage:
    return MemmapStorage.open(folder, mode="r")


def _ranges(blocks: bytearray, block: int, size: int) -> list[list[int]]:
    """Runs of blocks that are 1, as first row and the row after the last.

    >>> _ranges(bytearray([1, 1, 0, 1]), block=3, size=11)
    [[0, 6], [9, 11]]
    """
    out: list[list[int]] = []
    for i, one in enumerate(blocks):
        if one and out and out[-1][1] == i * block:
            out[-1][1] = min(size, (i + 1) * block)
        elif one:
            out.append([i * block, min(size, (i + 1) * block)])
    return out
