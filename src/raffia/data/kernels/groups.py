"""The loop of `groups`: equal numbers of a batch."""

from typing import Any

import numpy as np

from raffia.jit.kernel import kernel, load_i64, prefetch, store_i64

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: multiplicative hashing
AHEAD = 16


@kernel
def _home(value: int, shift: int) -> Any:
    return np.int64((np.uint64(value) * GOLDEN) >> np.uint64(shift))


@kernel
def groups(
    n: int,
    values: int,
    slots: int,
    shift: int,
    distinct: int,
    group: int,
    first: int,
    last: int,
) -> int:
    """Number equal values by first appearance; the result is how many there are.

    slots: 2^(64 - shift) zeros; a slot gets the number of a group plus one.
    """
    mask = (1 << (64 - shift)) - 1
    found = 0
    for i in range(n):
        prefetch(slots + 8 * _home(load_i64(values + 8 * min(i + AHEAD, n - 1)), shift))
        value = load_i64(values + 8 * i)
        slot = _home(value, shift)
        while True:
            number = load_i64(slots + 8 * slot) - 1
            if number < 0:
                number = found
                found += 1
                store_i64(slots + 8 * slot, found)
                store_i64(distinct + 8 * number, value)
                store_i64(first + 8 * number, i)
                break
            if load_i64(distinct + 8 * number) == value:
                break
            slot = (slot + 1) & mask
        store_i64(group + 8 * i, number)
        store_i64(last + 8 * number, i)
    return found
