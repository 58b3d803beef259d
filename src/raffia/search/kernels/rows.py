"""Rows of several arrays moved in one call.

`table` holds three numbers for each array: the address of its memory, that of the buffer,
and the bytes of a row.
"""

from raffia.jit.kernel import kernel, load_i64, load_u8
from raffia.jit.records import bytes_at, clear, copy


@kernel
def gather(table: int, num_arrays: int, rows: int, num_rows: int) -> None:
    """Copy memory[rows[i]] to buffer[i]."""
    for array in range(table, table + 24 * num_arrays, 24):
        memory, buffer, size = load_i64(array), load_i64(array + 8), load_i64(array + 16)
        for i in range(num_rows):
            row = memory + load_i64(rows + 8 * i) * size
            copy(bytes_at(buffer + i * size), bytes_at(row), size)


@kernel
def store(table: int, num_arrays: int, rows: int, num_rows: int, reset: int, zeroed: int) -> None:
    """Copy buffer[i] to memory[rows[i]]; zeros in arrays of the bits `zeroed` where reset[i]."""
    for number in range(num_arrays):
        array = table + 24 * number
        memory, buffer, size = load_i64(array), load_i64(array + 8), load_i64(array + 16)
        zeroes = (zeroed >> number) & 1
        for i in range(num_rows):
            row = bytes_at(memory + load_i64(rows + 8 * i) * size)
            if zeroes and load_u8(reset + i) != 0:
                clear(row, size)
            else:
                copy(row, bytes_at(buffer + i * size), size)
