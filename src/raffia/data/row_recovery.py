"""The repair of a `MemmapStorage`'s rows after a crash.

A killed process leaves at most a log to be finished. After a loss of power, of the rows that were
written since the last flush any part may be on the disk: those that do not fit their checksums are
dropped, and of the items that were appended those from the first gap on.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from raffia.data.row_files import RowFiles

Ranges = Sequence[Sequence[int]]  # of rows: first, and after the last


def repair(files: RowFiles, ranges: Ranges, flushed: int, epoch: int) -> tuple[int, int]:
    """Drop what is not whole; gives how many items were appended, and how many rows were dropped.

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
    none from before the flush is left, it is the longest run. An erased item is no gap.
    """
    size = len(files.marks)
    marks = [files.marks[start:stop] for start, stop in ranges]
    last = max([flushed, *[int(item_stamps(part).max()) for part in marks]])
    items = torch.arange(max(flushed, last - size), last)
    there = item_stamps(files.marks[items % size]) == items + 1
    if last - size < flushed:
        run = int(there.long().cumprod(0).sum())
        return max(0, last - size), flushed + run
    gaps = torch.cat([torch.tensor([-1]), (~there).nonzero().view(-1), torch.tensor([len(items)])])
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
