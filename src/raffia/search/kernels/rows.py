"""Rows of several arrays moved in one call.

`table` holds three numbers for each array: the address of its memory, that of the rows beside it,
and the bytes of a row.
"""

# Everything here is a number to numba: types would only repeat that.
from typing import Any

from raffia.jit.arrays import copy_bytes, get_i64, get_u8, zero_bytes
from raffia.jit.kernel import kernel


@kernel
def gather(table: Any, num_arrays: Any, rows: Any, num_rows: Any) -> None:
    """memory[rows[i]] -> beside[i]."""
    for array in range(num_arrays):
        memory, beside = get_i64(table, 3 * array), get_i64(table, 3 * array + 1)
        size = get_i64(table, 3 * array + 2)
        for i in range(num_rows):
            copy_bytes(beside + i * size, memory + get_i64(rows, i) * size, size)


@kernel
def store(table: Any, num_arrays: Any, rows: Any, num_rows: Any, reset: Any, zeroed: Any) -> None:
    """beside[i] -> memory[rows[i]]; zeros in the arrays of the bits `zeroed` where reset[i]."""
    for array in range(num_arrays):
        memory, beside = get_i64(table, 3 * array), get_i64(table, 3 * array + 1)
        size = get_i64(table, 3 * array + 2)
        zeroes = (zeroed >> array) & 1
        for i in range(num_rows):
            if zeroes and get_u8(reset, i) != 0:
                zero_bytes(memory + get_i64(rows, i) * size, size)
            else:
                copy_bytes(memory + get_i64(rows, i) * size, beside + i * size, size)
