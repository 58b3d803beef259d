"""The layers of small networks, and the compiled loop over them; `raffia.jit.dense_program` picks.

Each layer works on a block of rows. Rows are float32, so many bytes apart, and as wide as whole
panels of `raffia.jit.tiles`: behind a row's end are zeros, unless stated otherwise.

`run` carries blocks of rows through a table of layers in one call, so that what flows between the
layers stays in the cache. What a row becomes does not depend, to the last bit, on other rows:
every sum is taken in an order that the layer's sizes alone decide.
"""

import math

from raffia.jit.kernel import kernel, load_f32, load_i64, store_f32
from raffia.jit.packing import Layer, LookUpLayer, ReadLayer, WriteLayer, look_up, read, write
from raffia.jit.records import I64s, Record, exists, fields_at
from raffia.jit.tiles import MOST_ROWS, PANEL, tile, tile_of_4_panels
from raffia.jit.vectors import (
    WIDTH,
    at_least,
    exp,
    gated,
    gated_tanh,
    greatest,
    load_floats,
    multiply_add,
    spread,
    store_floats,
    total,
)

PANEL_BYTES = 4 * PANEL
VECTOR_BYTES = 4 * WIDTH


@kernel
def dense(
    rows: int,
    inputs: int,  # float32 rows, `input_step` bytes apart
    input_step: int,
    depth: int,
    panels: int,
    weights: int,  # float32 [panels, depth, PANEL]
    start: int,
    start_step: int,  # 0: all rows have the same start
    floor: float,
    added: int,  # 0: nothing is added, and its step is 0
    added_step: int,
    out: int,
    out_step: int,
) -> None:
    """Multiply all rows with all columns of packed weights; see `raffia.jit.tiles`."""
    step = PANEL_BYTES * depth
    panel = 0
    while panel < panels:
        at, b, c, o = weights + panel * step, start, added, out
        done = 4 if rows == 1 and panel + 4 <= panels else 1
        if done == 4:
            tile_of_4_panels(1, inputs, 0, at, step, depth, b, 0, floor, c, 0, o, 0)
        else:
            a, left = inputs, rows
            while left > 0:
                # 8 rows are 4 and 4, and 7 are 4 and 3: one or two alone take as long as 4
                count = MOST_ROWS if left > 8 else (4 if left > MOST_ROWS else left)
                tile(
                    count, a, input_step, at, step, depth, b, start_step, floor, c, added_step, o,
                    out_step,
                )  # fmt: skip
                left -= count
                a += count * input_step
                b += count * start_step
                c += count * added_step
                o += count * out_step
        panel += done
        start += done * PANEL_BYTES
        out += done * PANEL_BYTES
        if added:
            added += done * PANEL_BYTES


class DenseLayer(Layer):
    """A dense layer of a program; offsets are bytes from the scratch memory or the weights on."""

    inputs: int  # in scratch memory, as all that has a step
    inputs_step: int
    depth: int
    panels: int
    weights: int
    bias: int  # -1: sums start with what is in the output already
    floor: float
    added: int  # -1: nothing is added
    added_step: int
    out: int
    out_step: int


@kernel
def dense_layer(layer: DenseLayer, rows: int, scratch: int, weights: int) -> None:
    """out = max(floor, inputs @ weights + bias) + added."""
    out = scratch + layer.out
    dense(
        rows,
        scratch + layer.inputs,
        layer.inputs_step,
        layer.depth,
        layer.panels,
        weights + layer.weights,
        weights + layer.bias if layer.bias >= 0 else out,
        0 if layer.bias >= 0 else layer.out_step,
        layer.floor,
        scratch + layer.added if layer.added >= 0 else 0,
        layer.added_step,
        out,
        layer.out_step,
    )


class LSTMLayer(Layer):
    """A step of an LSTM; offsets as of `DenseLayer`."""

    inputs: int  # rows of the input followed by h
    inputs_step: int
    depth: int
    groups: int  # of WIDTH units
    weights: int  # panels, of each group the four gates i, f, g, o of its units side by side
    bias: int
    c: int  # rows, overwritten
    c_step: int
    h: int  # rows to write, apart from the inputs
    h_step: int
    gates: int  # room for rows of 4 * PANEL float32


@kernel
def lstm(layer: LSTMLayer, rows: int, scratch: int, weights: int) -> None:
    """Compute an LSTM's h and c one step later."""
    at_weights, bias, gates = weights + layer.weights, weights + layer.bias, scratch + layer.gates
    # fields are read here once: behind a store the compiler would read them again
    groups, depth, gates_step = layer.groups, layer.depth, 4 * PANEL_BYTES
    all_c, c_step, all_h, h_step = scratch + layer.c, layer.c_step, scratch + layer.h, layer.h_step
    group = 0
    while group < groups:
        count = min(2, groups - group)
        panels = 2 * count
        dense(
            rows, scratch + layer.inputs, layer.inputs_step, depth, panels, at_weights, bias, 0,
            -math.inf, 0, 0, gates, gates_step,
        )  # fmt: skip
        for row in range(rows):
            for k in range(count):
                at = gates + row * gates_step + k * 2 * PANEL_BYTES
                to = (group + k) * VECTOR_BYTES
                i, f = load_floats(at), load_floats(at + VECTOR_BYTES)
                g, o = load_floats(at + 2 * VECTOR_BYTES), load_floats(at + 3 * VECTOR_BYTES)
                c = all_c + row * c_step + to
                new = gated(f, load_floats(c)) + gated_tanh(i, g)
                store_floats(c, new)
                store_floats(all_h + row * h_step + to, gated_tanh(o, new))
        group += count
        at_weights += panels * PANEL_BYTES * depth
        bias += panels * PANEL_BYTES


class NormLayer(Layer):
    """A layer normalisation; offsets as of `DenseLayer`."""

    values: int  # rows, overwritten; zeros behind `width`
    step: int
    width: int
    gain: int  # in the weights; zeros behind `width`
    bias: int
    eps: float
    floor: float
    added: int  # -1: nothing is added
    added_step: int


@kernel
def norm(layer: NormLayer, rows: int, scratch: int, weights: int) -> None:
    """Layer normalisation: mean 0 and variance 1 over the row, times gain plus bias, floored."""
    width, gain, bias = layer.width, weights + layer.gain, weights + layer.bias
    eps, floor, is_added = layer.eps, layer.floor, layer.added >= 0
    for row in range(rows):
        at = scratch + layer.values + row * layer.step
        added = scratch + layer.added + row * layer.added_step
        sums = spread(0.0)
        for k in range(0, 4 * width, VECTOR_BYTES):
            sums = sums + load_floats(at + k)
        mean = total(sums) / width
        mean_vector = spread(mean)
        # What stands behind the row's end deviates by nothing then.
        for k in range(4 * width, -(-width // WIDTH) * VECTOR_BYTES, 4):
            store_f32(at + k, mean)
        squares = spread(0.0)
        for k in range(0, 4 * width, VECTOR_BYTES):
            deviation = load_floats(at + k) - mean_vector
            squares = multiply_add(deviation, deviation, squares)
        variance = total(squares) / width
        scale = spread(1.0 / math.sqrt(variance + eps))
        for k in range(0, 4 * width, VECTOR_BYTES):
            deviation = (load_floats(at + k) - mean_vector) * scale
            result = multiply_add(deviation, load_floats(gain + k), load_floats(bias + k))
            result = at_least(result, spread(floor))
            if is_added:
                result = result + load_floats(added + k)
            store_floats(at + k, result)


@kernel
def gelu(
    rows: int,
    values: int,  # rows, overwritten
    step: int,
    width: int,
    added: int = 0,  # rows, added to the result; 0: nothing is
    added_step: int = 0,
) -> None:
    """x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).

    Source: Hendrycks & Gimpel (2016), arXiv 1606.08415, section 2.
    """
    twice = spread(2.0 * math.sqrt(2.0 / math.pi))
    cubic = spread(2.0 * math.sqrt(2.0 / math.pi) * 0.044715)
    for row in range(rows):
        at = values + row * step
        for k in range(0, 4 * width, VECTOR_BYTES):
            x = load_floats(at + k)
            result = gated(x * multiply_add(x * x, cubic, twice), x)
            if added:
                result = result + load_floats(added + row * added_step + k)
            store_floats(at + k, result)


class GELULayer(Layer):
    """GELU of rows, which it overwrites; offsets as of `DenseLayer`."""

    values: int
    step: int
    width: int
    added: int  # -1: nothing is added
    added_step: int


class GaussianLayer(Layer):
    """The deviations of normal distributions, behind their means; offsets as of `DenseLayer`."""

    values: int  # rows of `size` means, then the deviations, or what they are the exponential of
    step: int
    size: int
    least: float  # of the exponents
    most: float
    fixed: float  # 0.0: exponents are there, else the deviation of all


@kernel
def gaussian(layer: GaussianLayer, rows: int, scratch: int) -> None:
    """Replace the exponents of deviations by the deviations, or write the fixed one."""
    least, most = layer.least, layer.most
    for row in range(rows):
        at = scratch + layer.values + row * layer.step + 4 * layer.size
        for k in range(0, 4 * layer.size, 4):
            deviation = layer.fixed
            if deviation == 0.0:
                exponent = float(load_f32(at + k))
                # what is not a number stays so
                exponent = least if exponent < least else (most if exponent > most else exponent)
                deviation = math.exp(exponent)
            store_f32(at + k, deviation)


class DecodeLayer(Layer):
    """The value that logits stand for; offsets as of `DenseLayer`."""

    logits: int  # rows, -inf behind the last logit
    step: int
    padded: int  # bytes; 0: the one number that stands there is the value itself
    support: int  # in the weights: the transformed value of each logit, zeros behind
    eps: float
    array: int  # the slot of the caller's array, float32 [rows]


@kernel
def decode(layer: DecodeLayer, rows: int, scratch: int, weights: int, out: int) -> None:
    """The inverse signed-hyperbolic transform of the softmax expectation.

    Source: Pohlen et al. (2018), arXiv 1805.11593, proposition A.2.
    """
    padded, support, eps = layer.padded, weights + layer.support, layer.eps
    for row in range(rows):
        at = scratch + layer.logits + row * layer.step
        v = float(load_f32(at))
        if padded > 0:
            largest = load_floats(at)
            for k in range(VECTOR_BYTES, padded, VECTOR_BYTES):
                largest = at_least(largest, load_floats(at + k))
            top = spread(greatest(largest))
            sums, products = spread(0.0), spread(0.0)
            for k in range(0, padded, VECTOR_BYTES):
                weight = exp(load_floats(at + k) - top)
                sums = sums + weight
                products = multiply_add(weight, load_floats(support + k), products)
            v = total(products) / total(sums)
        size = abs(v) + 1.0 + eps
        # not (sqrt(..) - 1) / (2 eps), which loses all digits near 0
        root = 2.0 * size / (math.sqrt(1.0 + 4.0 * eps * size) + 1.0)
        store_f32(out + 4 * row, math.copysign(root * root - 1.0, v) if v != 0.0 else 0.0)


KINDS = (
    *(ReadLayer, LookUpLayer, DenseLayer, NormLayer, GELULayer),
    *(LSTMLayer, GaussianLayer, DecodeLayer, WriteLayer),
)
READ, LOOK_UP, DENSE, NORM, GELU, LSTM, GAUSSIAN, DECODE, WRITE = range(9)
_read_at, _look_up_at = fields_at(ReadLayer), fields_at(LookUpLayer)
_dense_at, _norm_at, _gelu_at = fields_at(DenseLayer), fields_at(NormLayer), fields_at(GELULayer)
_lstm_at, _decode_at = fields_at(LSTMLayer), fields_at(DecodeLayer)
_gaussian_at, _write_at = fields_at(GaussianLayer), fields_at(WriteLayer)


class ProgramRecord(Record):
    """A program and the arrays that it works on."""

    layers: I64s  # addresses of the layers' records
    num_layers: int
    weights: int  # address of what the layers' offsets of weights count from, bytes
    slots: int  # address of the addresses of the caller's arrays
    block: int  # rows that go through all layers together


_program_at = fields_at(ProgramRecord)


@kernel
def run(
    program: int,  # address of its record
    scratch: int,  # address of room for the buffers of one block of rows
    num_rows: int,
) -> None:
    """Carry rows through all layers of the program, a block at a time."""
    p = _program_at(program)
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
                added = scratch + layer.added if layer.added >= 0 else 0
                gelu(rows, scratch + layer.values, layer.step, layer.width, added, layer.added_step)
            elif kind == GAUSSIAN:
                gaussian(_gaussian_at(record), rows, scratch)
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


class BoundRecord(Record):
    """Programs of one form for the rows of one batch, and what tells which row is whose."""

    programs: I64s  # addresses of the programs' records
    member: I64s  # of what is chosen from; not given: all rows are the first program's
    read: I64s  # which of `member` a row belongs to
    written: I64s  # ... and in which it is noted
    num_slots: int
    slots: I64s  # addresses of the caller's arrays
    steps: I64s  # bytes from a row to the next in each, 0 where rows are chosen
    reloaded: I64s  # the addresses that the programs read: those of a run's first row
    scratch: int  # that of a step: see `run_bound`


_bound_at = fields_at(BoundRecord)


@kernel
def run_bound(
    bound: int,  # address of its record
    scratch: int,  # address of room for the buffers of one block of rows
    num_rows: int,
) -> None:
    """Carry rows through their program, those of one member that lie side by side together."""
    g, start = _bound_at(bound), 0
    if not exists(g.member):
        run(g.programs[0], scratch, num_rows)
        return
    while start < num_rows:
        who = g.member[g.read[start]]
        stop = start + 1
        while stop < num_rows and g.member[g.read[stop]] == who:
            stop += 1
        for row in range(start, stop):
            g.member[g.written[row]] = who
        for number in range(g.num_slots):
            g.reloaded[number] = g.slots[number] + start * g.steps[number]
        run(g.programs[who], scratch, stop - start)
        start = stop


def run_as_step(bound: int, rows: int) -> None:
    """`run_bound` with the record's scratch memory, to be compiled by `raffia.jit.kernel.step`."""
    run_bound(bound, _bound_at(bound).scratch, rows)
