"""Products of a few rows with weights as torch keeps them, each output's numbers side by side.

    out[r, n] = max(floor, bias[n] + sum_k inputs[r, k] weights[n, k]) + added[r, n]

Nothing is packed first, as it is for `raffia.jit.tiles`: weights are read where they lie, which
pays where a few rows are all that they are read for. A sum is taken in `WIDTH` parts, k by k, which
are then added in an order that never changes: a row's result does not depend on other rows.

Weights larger than the cache are read as quickly as memory gives them, which four parallel streams
are not by themselves: a tile asks for the next tile's weights, line by line, into the second cache.
"""

# llvmlite and numba give their builders no types, so little of this file has any.
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from raffia.jit.kernel import emit_prefetch, instruction, kernel
from raffia.jit.lanes import shuffled
from raffia.jit.tiles import call_one
from raffia.jit.vectors import FLOAT, VECTOR, WIDTH, fused, splat

MOST_ROWS = 3  # of a tile: with 4 columns 12 sums, which 16 registers hold with what is read
COLUMNS = 4
LINE = 64  # bytes that memory gives in one piece
SECOND_CACHE = 2  # the first one is too small for a tile's weights

_NUMBER = ir.IntType(32)
_WORD = ir.IntType(64)
_FOUR = ir.VectorType(FLOAT, COLUMNS)


def _tile(name: str, columns: int) -> Callable[..., Any]:
    """An instruction for `columns` outputs; the row count, 1 to `MOST_ROWS`, is an argument."""
    word, real = types.int64, types.float64

    @instruction(types.void, *[word] * 6, real, *[word] * 4, name=name)
    def tile(
        builder: Any,
        rows: Any,
        inputs: Any,  # address of the first row, `input_step` bytes before the next
        input_step: Any,
        weights: Any,  # address of the first output's numbers
        depth: Any,  # the number of k, a multiple of WIDTH
        bias: Any,  # address; 0: none
        floor: Any,
        added: Any,  # 0: nothing is added
        added_step: Any,
        out: Any,  # may be where `added` is
        out_step: Any,
    ) -> None:
        floor = builder.fptrunc(floor, FLOAT)
        arguments = [inputs, input_step, weights, depth, bias, floor, added, added_step]
        sizes = [(count, columns) for count in range(1, MOST_ROWS + 1)]
        call_one(builder, "dots", rows, sizes, [*arguments, out, out_step], _body)

    return tile


def _body(function: Any, rows: int, columns: int) -> None:
    """Build a tile's code, with its sums in variables that LLVM keeps in registers."""
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    inputs, input_step, weights, depth, bias, floor = function.args[:6]
    added, added_step, out, out_step = function.args[6:]
    kind = _FOUR if columns == COLUMNS else FLOAT
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    sums = {cell: cgutils.alloca_once(builder, VECTOR) for cell in cells}

    def pointer(address: Any, to: Any) -> ir.Value:
        return builder.inttoptr(address, to.as_pointer())

    def after(address: Any, step: Any, count: int) -> ir.Value:
        return builder.add(address, builder.mul(step, _WORD(count)))

    def vector(address: Any) -> ir.Value:
        return builder.load(pointer(address, VECTOR), align=4)

    for total in sums.values():
        builder.store(ir.Constant(VECTOR, [FLOAT(0.0)] * WIDTH), total)
    depth_bytes = builder.mul(depth, _WORD(4))
    next_tile = after(weights, depth_bytes, columns)
    with cgutils.for_range(builder, builder.udiv(depth, _WORD(WIDTH))) as loop:
        at = builder.mul(loop.index, _WORD(4 * WIDTH))
        for line in range(0, 4 * WIDTH * columns, LINE):
            emit_prefetch(
                builder, builder.add(after(next_tile, at, columns), _WORD(line)), SECOND_CACHE
            )
        xs = [vector(builder.add(after(inputs, input_step, row), at)) for row in range(rows)]
        for column in range(columns):
            w = vector(builder.add(after(weights, depth_bytes, column), at))
            for row, x in enumerate(xs):
                total = sums[row, column]
                builder.store(fused(builder, x, w, builder.load(total)), total)
    has_bias = builder.icmp_signed("!=", bias, _WORD(0))
    start = cgutils.alloca_once_value(builder, ir.Constant(kind, None))
    with builder.if_then(has_bias):
        builder.store(builder.load(pointer(bias, kind), align=4), start)
    limit = splat(builder, floor, COLUMNS) if columns == COLUMNS else floor
    for row in range(rows):
        parts = [builder.load(sums[row, column]) for column in range(columns)]
        value = builder.fadd(_sums(builder, parts), builder.load(start))
        below = builder.fcmp_ordered("<", value, limit)  # false for NaN
        result = cgutils.alloca_once_value(builder, builder.select(below, limit, value))
        with builder.if_then(builder.icmp_signed("!=", added, _WORD(0))):
            addend = builder.load(pointer(after(added, added_step, row), kind), align=4)
            builder.store(builder.fadd(builder.load(result), addend), result)
        target = pointer(after(out, out_step, row), kind)
        builder.store(builder.load(result), target, align=4)
    builder.ret_void()


def _sums(builder: Any, parts: list[Any]) -> ir.Value:
    """The sum over each of these vectors: of four vectors as a vector, of one as a number."""
    width = WIDTH
    while width > COLUMNS:
        width //= 2
        parts = [_folded(builder, part, width) for part in parts]
    if len(parts) == 1:
        (part,) = parts
        for width in (2, 1):
            part = _folded(builder, part, width)
        return builder.extract_element(part, _NUMBER(0))
    pairs = [
        builder.fadd(shuffled(builder, a, b, 0, 4, 1, 5), shuffled(builder, a, b, 2, 6, 3, 7))
        for a, b in (parts[:2], parts[2:])
    ]  # a0 + a2, b0 + b2, a1 + a3, b1 + b3
    return builder.fadd(
        shuffled(builder, *pairs, 0, 1, 4, 5), shuffled(builder, *pairs, 2, 3, 6, 7)
    )


def _folded(builder: Any, part: Any, width: int) -> Any:
    """The upper half of a vector on the lower one."""
    low = shuffled(builder, part, part, *range(width))
    return builder.fadd(low, shuffled(builder, part, part, *range(width, 2 * width)))


_tile_of_4 = _tile("tile_of_4", COLUMNS)
_tile_of_1 = _tile("tile_of_1", 1)


@kernel
def dots(
    rows: int,
    inputs: int,  # float32 rows, `input_step` bytes apart
    input_step: int,
    depth: int,  # numbers of a row that count, a multiple of WIDTH
    outputs: int,
    weights: int,  # float32 [outputs, depth]
    bias: int,  # float32 [outputs]; 0: none
    floor: float,
    added: int,  # 0: nothing is added
    added_step: int,
    out: int,
    out_step: int,
) -> None:
    """Multiply all rows with all outputs' weights; see the top of this file."""
    column = 0
    while column < outputs:
        count = 4 if column + 4 <= outputs else 1
        at = weights + 4 * column * depth
        start = bias + 4 * column if bias else 0
        row = 0
        while row < rows:
            left = rows - row
            num = 2 if left == 4 else min(left, MOST_ROWS)  # one alone takes nearly as long as 2
            a, o = inputs + row * input_step, out + row * out_step + 4 * column
            c = added + row * added_step + 4 * column if added else 0
            if count == 4:
                _tile_of_4(num, a, input_step, at, depth, start, floor, c, added_step, o, out_step)
            else:
                _tile_of_1(num, a, input_step, at, depth, start, floor, c, added_step, o, out_step)
            row += num
        column += count
