"""Rows of one matrix copied into the rows of another, with one zero and one NaN."""

from raffia.data.kernels.folding import folded
from raffia.jit.kernel import (
    kernel,
    load_i64,
    load_u8,
    load_u16,
    load_u32,
    store_i64,
    store_u8,
    store_u16,
    store_u32,
)
from raffia.jit.lanes import LANES, load_lanes_u64, store_lanes


@kernel
def copy_rows(
    source: int,  # address of the first row
    stride: int,  # bytes from row to row
    count: int,  # rows
    num_bytes: int,  # in a row
    bits: int,  # for `folded`, also the next two
    largest: int,
    nan: int,
    target: int,  # address of where the first row goes
    target_stride: int,
    zeros: int,  # bytes after each row to set to zero
) -> None:
    """Copy each row, and write nothing beside it but zeros."""
    if stride == num_bytes == target_stride:  # one long row
        num_bytes *= count
        count = 1
    for row in range(count):
        at = source + row * stride
        to = target + row * target_stride
        end = at + num_bytes
        while at + 8 * LANES <= end:
            store_lanes(to, folded(load_lanes_u64(at), bits, largest, nan))
            at += 8 * LANES
            to += 8 * LANES
        while at + 8 <= end:
            store_i64(to, folded(load_i64(at), bits, largest, nan))
            at += 8
            to += 8
        if at + 4 <= end:
            store_u32(to, folded(load_u32(at), bits, largest, nan))
            at += 4
            to += 4
        if at + 2 <= end:
            store_u16(to, folded(load_u16(at), bits, largest, nan))
            at += 2
            to += 2
        if at < end:
            store_u8(to, folded(load_u8(at), bits, largest, nan))
            to += 1
        for byte in range(zeros):
            store_u8(to + byte, 0)
