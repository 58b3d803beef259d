"""Rows in memory: copied with one zero and one NaN, and the SipHash of each.

Eight rows are hashed together: each lane is the state of one row.
"""

from typing import Any

import numba

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
from raffia.jit.lanes import (
    LANES,
    folded_8,
    folded_16,
    folded_32,
    folded_64,
    gather_2,
    gather_u8,
    gather_u16,
    gather_u32,
    gather_u64,
    lane,
    load_lanes_u8,
    load_lanes_u16,
    load_lanes_u32,
    load_lanes_u64,
    replaced,
    rotated,
    spread,
    store_lanes,
    with_lane,
)

SipState = tuple[Any, Any, Any, Any]  # of SipHash: four lanes

inline = numba.njit(forceinline=True)  # part of the kernel that calls it


@inline
def folded(
    words: Any,  # lanes of words, or one word as int64
    bits: int,  # size of a number: 8, 16, 32, 64; 0 leaves the words as they are
    largest: int,  # the bits of infinity in each number of a word
    nan: int,  # the bits of NaN in each number of a word
) -> Any:
    """The words with -0.0 as 0.0, and each NaN as `nan`."""
    if bits == 32:
        return folded_32(words, largest, nan)
    if bits == 64:
        return folded_64(words, largest, nan)
    if bits == 16:
        return folded_16(words, largest, nan)
    if bits == 8:
        return folded_8(words, largest, nan)
    return words


@kernel
def hash_rows(
    rows: int,  # address of the first row
    stride: int,  # bytes from row to row
    count: int,  # rows, at least 1
    num_bytes: int,  # in a row
    bits: int,  # for `folded`, also the next two
    largest: int,
    nan: int,
    k0: int,
    k1: int,
    compressions: int,  # rounds for each word of a row
    finishing: int,  # rounds at the end
    out: int,  # address of the first hash
    out_stride: int,  # bytes from hash to hash
) -> None:
    """Write the hash of each row. Where eight do not divide the rows, some are done twice."""
    offsets: Any = spread(0)
    for number in range(LANES):  # lanes beyond the last row do that row
        offsets = with_lane(offsets, number, min(number, count - 1) * stride)
    start0 = spread(k0 ^ 0x736F6D6570736575)  # "somepseudorandomlygeneratedbytes"
    start1 = spread(k1 ^ 0x646F72616E646F6D)
    start2 = spread(k0 ^ 0x6C7967656E657261)
    start3 = spread(k1 ^ 0x7465646279746573)
    length = spread(num_bytes << 56)
    whole = num_bytes - num_bytes % 8
    dense = stride == num_bytes and count >= LANES
    for group in range(0, count, LANES):
        first = min(group, max(count - LANES, 0))
        at = spread(rows + first * stride) + offsets
        v0, v1, v2, v3 = start0, start1, start2, start3
        for offset in range(0, whole - 8, 16):
            a, b = gather_2(at, offset)
            if bits:
                a = folded(a, bits, largest, nan)
                b = folded(b, bits, largest, nan)
            v0, v1, v2, v3 = absorbed(v0, v1, v2, v3, a, compressions)
            v0, v1, v2, v3 = absorbed(v0, v1, v2, v3, b, compressions)
        if whole & 8:
            if dense and num_bytes == 8:
                a = load_lanes_u64(rows + 8 * first)
            else:
                a = gather_u64(at, whole - 8)
            a = folded(a, bits, largest, nan)
            v0, v1, v2, v3 = absorbed(v0, v1, v2, v3, a, compressions)
        last = length
        if whole < num_bytes:
            if dense and num_bytes < 8:
                a = short_rows(at, rows + first * num_bytes, num_bytes)
            else:
                a = tails(at, num_bytes)
            last = last | folded(a, bits, largest, nan)
        v0, v1, v2, v3 = absorbed(v0, v1, v2, v3, last, compressions)
        v2 = v2 ^ spread(0xFF)
        for _ in range(finishing):
            v0, v1, v2, v3 = sip_round(v0, v1, v2, v3)
        hashes = replaced(v0 ^ v1 ^ v2 ^ v3, -1, -2)  # as CPython does
        if out_stride == 8 and count >= LANES:
            store_lanes(out + 8 * first, hashes)
        else:
            for number in range(min(count, LANES)):
                store_i64(out + (first + number) * out_stride, lane(hashes, number))


@inline
def sip_round(v0: Any, v1: Any, v2: Any, v3: Any) -> SipState:
    """One SipRound.  Source: Aumasson and Bernstein (2012), section 2."""
    v0 = v0 + v1
    v2 = v2 + v3
    v1 = rotated(v1, 13) ^ v0
    v3 = rotated(v3, 16) ^ v2
    v0 = rotated(v0, 32) + v3
    v2 = v2 + v1
    v3 = rotated(v3, 21) ^ v0
    v1 = rotated(v1, 17) ^ v2
    return v0, v1, rotated(v2, 32), v3


@inline
def absorbed(v0: Any, v1: Any, v2: Any, v3: Any, word: Any, rounds: int) -> SipState:
    """The state after one more word of each row."""
    v3 = v3 ^ word
    for _ in range(rounds):
        v0, v1, v2, v3 = sip_round(v0, v1, v2, v3)
    return v0 ^ word, v1, v2, v3


@inline
def short_rows(at: Any, start: int, num_bytes: int) -> Any:
    """Load rows shorter than a word that are adjacent in memory, each as a word."""
    if num_bytes == 4:
        return load_lanes_u32(start)
    if num_bytes == 1:
        return load_lanes_u8(start)
    if num_bytes == 2:
        return load_lanes_u16(start)
    return tails(at, num_bytes)


@inline
def tails(at: Any, num_bytes: int) -> Any:
    """The last bytes of each row, which fill no word; nothing outside the row is read."""
    tail = num_bytes % 8
    if num_bytes > 8:
        return gather_u64(at, num_bytes - 8) >> spread(64 - 8 * tail)
    if tail >= 4:  # the two halves overlap in equal bytes
        return gather_u32(at, 0) | gather_u32(at, tail - 4) << spread(8 * (tail - 4))
    if tail >= 2:
        return gather_u16(at, 0) | gather_u16(at, tail - 2) << spread(8 * (tail - 2))
    return gather_u8(at, 0)


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
    """Copy each row, and write nothing after it but zeros."""
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
