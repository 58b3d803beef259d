"""Rows copied to where layers work on them and back, and weights into panels."""

from raffia.jit.kernel import kernel, load_f32, load_i64, load_u8, store_f32
from raffia.jit.tiles import PANEL
from raffia.jit.vectors import WIDTH, load_floats, store_floats

PACKING = 10  # 64-bit words of a piece of work for `pack`
PANEL_BYTES = 4 * PANEL
VECTOR_BYTES = 4 * WIDTH


@kernel
def read(
    rows: int,
    source: int,  # float32 rows
    index: int,  # address of int64: the rows to read; 0: they follow each other
    first: int,  # row of `index`, or of the source
    width: int,
    padded: int,  # zeros are written behind `width`, up to here
    out: int,
    step: int,
) -> None:
    """Copy chosen rows side by side."""
    for row in range(rows):
        number = load_i64(index + 8 * (first + row)) if index else first + row
        to = out + row * step
        _copy(source + 4 * width * number, width, to)
        for k in range(4 * width, 4 * padded, 4):
            store_f32(to + k, 0.0)


@kernel
def look_up(
    rows: int,
    weights: int,  # panels of `depth` times PANEL float32
    index: int,  # address of int64: which k
    depth: int,
    panels: int,
    out: int,
    step: int,
) -> None:
    """Copy chosen rows out of panels."""
    for row in range(rows):
        at = weights + PANEL_BYTES * load_i64(index + 8 * row)
        for panel in range(panels):
            from_panel = at + panel * PANEL_BYTES * depth
            _copy(from_panel, PANEL, out + row * step + panel * PANEL_BYTES)


@kernel
def write(
    rows: int,
    target: int,
    index: int,  # address of int64: the rows to write; 0: they follow each other
    first: int,
    width: int,
    values: int,
    step: int,
    zero: int,  # address of bool: rows for which zeros are written; 0: none
) -> None:
    """Copy contiguous rows to chosen rows."""
    for row in range(rows):
        number = load_i64(index + 8 * (first + row)) if index else first + row
        to = target + 4 * width * number
        if zero and load_u8(zero + first + row):
            for k in range(0, 4 * width, 4):
                store_f32(to + k, 0.0)
        else:
            _copy(values + row * step, width, to)


@kernel
def pack(
    table: int,  # address of the arguments of `pack_columns`, piece after piece
    pieces: int,
    weights: int,
) -> None:
    """Copy parameters into panels."""
    for number in range(pieces):
        record = table + 8 * PACKING * number
        pack_columns(
            load_i64(record),
            load_i64(record + 8),
            load_i64(record + 16),
            load_i64(record + 24),
            load_i64(record + 32),
            weights + load_i64(record + 40),
            load_i64(record + 48),
            load_i64(record + 56),
            load_i64(record + 64),
            load_i64(record + 72),
        )


@kernel
def pack_columns(
    source: int,  # float32: each column's numbers, for each k
    columns: int,
    column_step: int,  # bytes
    depth: int,
    depth_step: int,
    out: int,  # panels of `out_depth` times PANEL float32, from the position of the first k on
    out_depth: int,
    offset: int,  # the first column
    chunk: int,  # columns that stay together ...
    spacing: int,  # ... and from one such chunk to the next
) -> None:
    """Write columns of weights into panels."""
    for column in range(columns):
        to = column // chunk * spacing + column % chunk + offset
        at = out + PANEL_BYTES * (to // PANEL * out_depth) + 4 * (to % PANEL)
        for k in range(depth):
            number = load_f32(source + column * column_step + k * depth_step)
            store_f32(at + k * PANEL_BYTES, number)


@kernel
def _copy(source: int, count: int, target: int) -> None:
    whole = count // WIDTH * WIDTH
    for k in range(0, 4 * whole, VECTOR_BYTES):
        store_floats(target + k, load_floats(source + k))
    for k in range(4 * whole, 4 * count, 4):
        store_f32(target + k, load_f32(source + k))
