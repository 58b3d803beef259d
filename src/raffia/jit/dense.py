"""The compiled loop over the layers of small networks; `raffia.jit.dense_program` chooses them.

`run` carries blocks of rows through a table of layers in one call, so that what flows between the
layers stays in the cache. What a row becomes does not depend, to the last bit, on the rows beside
it: every sum is taken in an order that the layer's sizes alone decide.
"""

import functools

from raffia.jit.calls import step
from raffia.jit.kernel import kernel, load_i64
from raffia.jit.layers import (
    DecodeLayer,
    DenseLayer,
    GELULayer,
    LSTMLayer,
    NormLayer,
    decode,
    dense_layer,
    gelu,
    lstm,
    norm,
)
from raffia.jit.packing import LookUpLayer, ReadLayer, WriteLayer, look_up, read, write
from raffia.jit.records import I64s, Record, fields_at

# The first word of a layer's record tells its kind: the position here.
KINDS = (
    *(ReadLayer, LookUpLayer, DenseLayer, NormLayer),
    *(GELULayer, LSTMLayer, DecodeLayer, WriteLayer),
)
READ, LOOK_UP, DENSE, NORM, GELU, LSTM, DECODE, WRITE = range(8)
_read_at, _look_up_at, _dense_at, _norm_at, _gelu_at, _lstm_at, _decode_at, _write_at = (
    fields_at(kind) for kind in KINDS
)


class ProgramRecord(Record):
    """A program and the arrays that it works on."""

    layers: I64s  # addresses of the layers' records
    num_layers: int
    weights: int  # address of what the layers' offsets of weights count from, bytes
    slots: int  # address of the addresses of the caller's arrays
    block: int  # rows at once
    scratch: int  # that of a step: see `run`


program_at = fields_at(ProgramRecord)


@kernel
def run(
    program: int,  # address of its record
    scratch: int,  # address of room for the buffers of one block of rows
    num_rows: int,
) -> None:
    """Carry rows through all layers of the program, a block at a time."""
    p = program_at(program)
    weights = p.weights
    for start in range(0, num_rows, p.block):
        rows = min(p.block, num_rows - start)
        for number in range(p.num_layers):
            record = p.layers[number]
            kind = load_i64(record)
            if kind == DENSE:
                dense_layer(_dense_at(record), rows, scratch, weights)
            elif kind == LSTM:
                lstm(_lstm_at(record), rows, scratch, weights)
            elif kind == DECODE:
                decoding = _decode_at(record)
                decode(decoding, rows, scratch, weights, slot(p.slots, decoding.array) + 4 * start)
            elif kind == NORM:
                norm(_norm_at(record), rows, scratch, weights)
            elif kind == GELU:
                layer = _gelu_at(record)
                gelu(rows, scratch + layer.values, layer.step, layer.width)
            elif kind == READ:
                reading = _read_at(record)
                source, index = slot(p.slots, reading.array), slot(p.slots, reading.index)
                read(reading, rows, scratch, source, index, start)
            elif kind == LOOK_UP:
                looking = _look_up_at(record)
                look_up(looking, rows, scratch, weights, slot(p.slots, looking.index) + 8 * start)
            else:
                writing = _write_at(record)
                target, index = slot(p.slots, writing.array), slot(p.slots, writing.index)
                write(writing, rows, scratch, target, index, slot(p.slots, writing.zero), start)


@kernel
def slot(slots: int, number: int) -> int:
    """The address of one of the caller's arrays; 0 for number -1, none of them."""
    return load_i64(slots + 8 * number) if number >= 0 else 0


def _run_as_step(program: int, rows: int) -> None:
    run(program, program_at(program).scratch, rows)


@functools.cache
def step_address() -> int:
    """The address of `run` as a step: see raffia.jit.calls."""
    return step(_run_as_step)
