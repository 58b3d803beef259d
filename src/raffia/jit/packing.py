"""Rows copied to where layers work on them and back, and weights into panels."""

from raffia.jit.kernel import kernel, load_f32, load_i64, load_u8, store_f32
from raffia.jit.records import Record, field_types, fields_at
from raffia.jit.tiles import PANEL
from raffia.jit.vectors import WIDTH, load_floats, store_floats

PANEL_BYTES = 4 * PANEL
VECTOR_BYTES = 4 * WIDTH


class Layer(Record):
    """The first field of each layer's record."""

    kind: int  # its position in `raffia.jit.layers.KINDS`


class ReadLayer(Layer):
    """Rows of a caller's array copied side by side into scratch memory."""

    array: int  # slot of the array, float32 rows
    index: int  # ... of int64: the rows to read; -1: they follow each other
    width: int
    padded: int  # zeros are written behind `width`, up to here
    out: int
    step: int


@kernel
def read(layer: ReadLayer, rows: int, scratch: int, source: int, index: int, first: int) -> None:
    """Copy chosen rows side by side; `first` is a row of `index`, or of the source without one."""
    width, padded = layer.width, 4 * layer.padded
    for row in range(rows):
        number = load_i64(index + 8 * (first + row)) if index else first + row
        to = scratch + layer.out + row * layer.step
        _copy(source + 4 * width * number, width, to)
        for k in range(4 * width, padded, 4):
            store_f32(to + k, 0.0)


class LookUpLayer(Layer):
    """Columns of a parameter copied side by side: a dense layer of a one-hot input."""

    weights: int  # panels of `depth` times PANEL float32
    index: int  # slot of int64: which k
    depth: int
    panels: int
    out: int
    step: int


@kernel
def look_up(layer: LookUpLayer, rows: int, scratch: int, weights: int, index: int) -> None:
    """Copy chosen rows out of panels; `index` is the address of the first row's number."""
    for row in range(rows):
        at = weights + layer.weights + PANEL_BYTES * load_i64(index + 8 * row)
        to = scratch + layer.out + row * layer.step
        for panel in range(layer.panels):
            _copy(at + panel * PANEL_BYTES * layer.depth, PANEL, to + panel * PANEL_BYTES)


class WriteLayer(Layer):
    """Rows of scratch memory copied into a caller's array."""

    array: int  # slot of the array, float32 rows
    index: int  # ... of int64: the rows to write; -1: they follow each other
    width: int
    values: int
    step: int
    zero: int  # slot of bool: rows for which zeros are written; -1: none


@kernel
def write(
    layer: WriteLayer, rows: int, scratch: int, target: int, index: int, zero: int, first: int
) -> None:
    """Copy contiguous rows to chosen rows; `index` and `zero` are addresses, 0 for none."""
    width = layer.width
    for row in range(rows):
        number = load_i64(index + 8 * (first + row)) if index else first + row
        to = target + 4 * width * number
        if zero and load_u8(zero + first + row):
            for k in range(0, 4 * width, 4):
                store_f32(to + k, 0.0)
        else:
            _copy(scratch + layer.values + row * layer.step, width, to)


class Piece(Record):
    """Columns of a parameter, with their destination in the packed weights."""

    source: int  # address of float32: each column's numbers, for each k
    columns: int
    column_step: int  # bytes
    depth: int
    depth_step: int
    out: int  # bytes before panels of `out_depth` times PANEL float32, at the first k
    out_depth: int
    offset: int  # the first column
    chunk: int  # columns that stay together ...
    spacing: int  # ... and from one such chunk to the next


PIECE_BYTES = 8 * len(field_types(Piece))
_piece_at = fields_at(Piece)


@kernel
def pack(pieces: int, num: int, weights: int) -> None:
    """Copy parameters into panels; `pieces` is the address of so many `Piece`s side by side."""
    for number in range(num):
        piece = _piece_at(pieces + PIECE_BYTES * number)
        for column in range(piece.columns):
            to = column // piece.chunk * piece.spacing + column % piece.chunk + piece.offset
            at = weights + piece.out + PANEL_BYTES * (to // PANEL * piece.out_depth)
            at += 4 * (to % PANEL)
            for k in range(piece.depth):
                source = piece.source + column * piece.column_step + k * piece.depth_step
                store_f32(at + k * PANEL_BYTES, load_f32(source))


@kernel
def _copy(source: int, count: int, target: int) -> None:
    whole = count // WIDTH * WIDTH
    for k in range(0, 4 * whole, VECTOR_BYTES):
        store_floats(target + k, load_floats(source + k))
    for k in range(4 * whole, 4 * count, 4):
        store_f32(target + k, load_f32(source + k))
