"""The rows of a `MemmapStorage` in their files: how they are written, checked and repaired.

Each row has a mark of two integers: a stamp, which is the number of the item plus one, or -1 for a
row that was set, and a checksum of content, row number and stamp. A row that holds nothing has the
stamp 0, and instead of the checksum the stamp of an item that was erased there.
"""

import contextlib
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from raffia.data.memmap_files import HEADER, LOG, ROWS, MappedFile
from raffia.data.row_index import carried
from raffia.data.row_log import RowLog, checksums, log_bytes, rows_at_once, together
from raffia.data.structure import RowStructure
from raffia.files import make_files

SET = -1
RowIndex = slice | Tensor  # of rows


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
            self._log = RowLog(log, layouts)
            self._log_file = log  # it is not flushed: see `redo`
            self._targets = [carried(leaf) for leaf in self.leaves]
        self.at_once = rows_at_once(layouts)

    def write(
        self,
        index: RowIndex,
        leaves: Sequence[Tensor],
        number: int | Tensor | None,
        log_for: int | None,
    ) -> None:
        """Write rows, a part of them at a time, such that a kill leaves each part old or new.

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
        rows = torch.arange(index.start, index.stop) if isinstance(index, slice) else index
        if number is None:
            stamps, erased = self.marks[index].unbind(1)
            erased = erased.masked_fill(erased == 0, SET)
            stamps = torch.where(stamps == 0, erased, stamps)
        elif isinstance(number, Tensor):
            stamps = number + 1
        else:
            stamps = torch.arange(number + 1, number + 1 + len(rows))
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
        """Write rows in place; the marks last, which make them count."""
        if isinstance(index, slice):
            for leaf, source in zip(self.leaves, leaves, strict=True):
                leaf[index].copy_(source)
            self.marks[index].copy_(marks)
            return
        for target, source in zip(self._targets, leaves, strict=True):
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
        return checksums(together(leaves, rows, marks[:, 0])) == marks[:, 1]

    def flush(self) -> None:
        """Bring all rows to disk."""
        for file in self._files:
            file.flush()
