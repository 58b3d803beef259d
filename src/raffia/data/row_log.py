"""Rows on their way into the files of a `MemmapStorage`: packed, with a checksum, written first.

Rows that hold something are overwritten in two steps: the new rows go into the log, then in place.
A process killed in the first step leaves the old rows, in the second a log from which the new rows
are written again.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from raffia.data.memmap_files import MappedFile
from raffia.data.rows import RowLayout, packed, unpacked, words_of
from raffia.data.siphash import siphash

SIZE = 1 << 20  # bytes of rows that are written at once: what stays in the cache of a core
HEAD = 64  # bytes before the rows: how many of them are valid, and the epoch
INTEGER = RowLayout(torch.int64, ())


def checksums(words: Tensor, out: Tensor | None = None) -> Tensor:  # int64 [n]
    """A checksum of each packed row.

    >>> from raffia.data.row_log import checksums
    >>> checksums(torch.tensor([[1, 2], [2, 1]])).unique().shape
    torch.Size([2])
    """
    return siphash(words, normalize=False, out=out)


def together(
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
        """Write rows down; gives their marks, int64 [n, 2]: stamps and checksums."""
        n = len(rows)
        marks = self._marks[:n]
        words = together(leaves, rows, stamps, self._words[:n])
        marks[:, 0] = stamps
        checksums(words, out=marks[:, 1])
        return marks

    def hold(self, n: int, epoch: int) -> None:
        """From now on, the `n` rows written down count: after a crash, `read` gives them."""
        self._head[1] = epoch
        self._head[0] = n  # last

    def clear(self) -> None:
        """Clear the log: the rows are written."""
        self._head[0] = 0

    def read(self, epoch: int) -> tuple[Tensor, Tensor, list[Tensor]] | None:
        """Rows, marks and tensors that may not be written yet; None if there are none.

        epoch: that of the header; what was flushed since is older than the row itself.
        """
        n, written = self._head.tolist()
        if not 0 < n <= len(self._marks) or written != epoch:
            return None
        marks, words = self._marks[:n].clone(), self._words[:n].clone()
        whole = checksums(words) == marks[:, 1]  # false, maybe, after a loss of power
        *leaves, rows, stamps = unpacked(words[whole], [*self._layouts, INTEGER, INTEGER])
        return rows, torch.stack([stamps, marks[whole, 1]], 1), leaves
