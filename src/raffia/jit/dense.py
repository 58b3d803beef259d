"""The compiled loop over the layers of small networks; `raffia.jit.dense_program` chooses them.

`run` carries blocks of rows through a table of layers in one call, so that what flows between the
layers stays in the cache. What a row becomes does not depend, to the last bit, on the rows beside
it: every sum is taken in an order that the layer's sizes alone decide.
"""

import functools

from raffia.jit.calls import step
from raffia.jit.kernel import kernel, load_f64, load_i64
from raffia.jit.layers import decode, dense, gelu, lstm, norm
from raffia.jit.packing import look_up, read, write

FIELDS = 16  # 64-bit words of a layer in the table
READ, LOOK_UP, DENSE, NORM, GELU, LSTM, DECODE, WRITE = range(8)


@kernel
def run(
    table: int,  # address of `layers` records; see the functions that write them
    layers: int,
    weights: int,  # address of what the records' offsets of weights count from, bytes
    scratch: int,  # address of room for the buffers of one block of rows
    slots: int,  # address of the addresses of the caller's arrays
    num_rows: int,
    block: int,  # rows at once
) -> None:
    """Carry rows through all layers, a block at a time."""
    for start in range(0, num_rows, block):
        rows = min(block, num_rows - start)
        for number in range(layers):
            record = table + 8 * FIELDS * number
            kind = load_i64(record)
            if kind == DENSE:
                bias, added = load_i64(record + 48), load_i64(record + 64)
                out, out_step = scratch + load_i64(record + 80), load_i64(record + 88)
                dense(
                    rows,
                    scratch + load_i64(record + 8),
                    load_i64(record + 16),
                    load_i64(record + 24),
                    load_i64(record + 32),
                    weights + load_i64(record + 40),
                    # sums start with the bias, or with what is in the output already
                    weights + bias if bias >= 0 else out,
                    0 if bias >= 0 else out_step,
                    load_f64(record + 56),
                    scratch + added if added >= 0 else 0,
                    load_i64(record + 72),
                    out,
                    out_step,
                )
            elif kind == LSTM:
                lstm(
                    rows,
                    scratch + load_i64(record + 8),
                    load_i64(record + 16),
                    load_i64(record + 24),
                    load_i64(record + 32),
                    weights + load_i64(record + 40),
                    weights + load_i64(record + 48),
                    scratch + load_i64(record + 56),
                    load_i64(record + 64),
                    scratch + load_i64(record + 72),
                    load_i64(record + 80),
                    scratch + load_i64(record + 88),
                )
            elif kind == DECODE:
                decode(
                    rows,
                    scratch + load_i64(record + 8),
                    load_i64(record + 16),
                    load_i64(record + 24),
                    weights + load_i64(record + 32),
                    load_f64(record + 40),
                    load_i64(slots + 8 * load_i64(record + 48)) + 4 * start,
                )
            elif kind == NORM:
                added = load_i64(record + 64)
                norm(
                    rows,
                    scratch + load_i64(record + 8),
                    load_i64(record + 16),
                    load_i64(record + 24),
                    weights + load_i64(record + 32),
                    weights + load_i64(record + 40),
                    load_f64(record + 48),
                    load_f64(record + 56),
                    scratch + added if added >= 0 else 0,
                    load_i64(record + 72),
                )
            elif kind == GELU:
                gelu(
                    rows,
                    scratch + load_i64(record + 8),
                    load_i64(record + 16),
                    load_i64(record + 24),
                )
            elif kind == READ:
                index = load_i64(record + 16)
                read(
                    rows,
                    load_i64(slots + 8 * load_i64(record + 8)),
                    load_i64(slots + 8 * index) if index >= 0 else 0,
                    start,
                    load_i64(record + 24),
                    load_i64(record + 32),
                    scratch + load_i64(record + 40),
                    load_i64(record + 48),
                )
            elif kind == LOOK_UP:
                look_up(
                    rows,
                    weights + load_i64(record + 8),
                    load_i64(slots + 8 * load_i64(record + 16)) + 8 * start,
                    load_i64(record + 24),
                    load_i64(record + 32),
                    scratch + load_i64(record + 40),
                    load_i64(record + 48),
                )
            else:
                index, zero = load_i64(record + 16), load_i64(record + 48)
                write(
                    rows,
                    load_i64(slots + 8 * load_i64(record + 8)),
                    load_i64(slots + 8 * index) if index >= 0 else 0,
                    start,
                    load_i64(record + 24),
                    scratch + load_i64(record + 32),
                    load_i64(record + 40),
                    load_i64(slots + 8 * zero) if zero >= 0 else 0,
                )


def _run_from(context: int, rows: int) -> None:
    """`run` with its other arguments in six words at an address."""
    run(
        load_i64(context),
        load_i64(context + 8),
        load_i64(context + 16),
        load_i64(context + 24),
        load_i64(context + 32),
        rows,
        load_i64(context + 40),
    )


@functools.cache
def step_address() -> int:
    """The address of `run` as a step: see raffia.jit.calls."""
    return step(_run_from)
