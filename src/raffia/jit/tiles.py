"""Products of a few rows with packed columns of weights, held in registers from first to last.

    out[r, n] = max(floor, start[r, n] + sum_k inputs[r, k] weights[k, n]) + added[r, n]

A *panel* is `PANEL` columns of the weights side by side, for each k one after another, so that the
inner loop reads it like a tape. A *tile* is what is computed in one go, rows by panels; on a
processor with 16 registers of 8 float32 six rows of one panel are 12 sums, two registers of weights
and one input: 12 multiply-adds for 8 loads. Each sum begins with `start` and goes through k in
order, in every tile the same way: a row's result does not depend on other rows.
"""

# llvmlite and numba give their builders no types, so little of this file has any.
from collections.abc import Callable, Iterable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from raffia.jit.kernel import instruction
from raffia.jit.vectors import FLOAT, VECTOR, WIDTH, fused, splat

PANEL = 2 * WIDTH
UNROLLED = 4  # steps of k in a round of the inner loop

_WORD = ir.IntType(64)


def _tile(name: str, rows_and_panels: list[tuple[int, int]]) -> Callable[..., Any]:
    """An instruction for tiles of several sizes; the number of rows is an argument."""
    word, real = types.int64, types.float64

    @instruction(types.void, *[word] * 8, real, *[word] * 4, name=name)
    def sized_tile(
        builder: Any,
        rows: Any,
        inputs: Any,  # address of the first row, `input_step` bytes before the next
        input_step: Any,
        weights: Any,  # address of the first panel, `panel_step` bytes before the next
        panel_step: Any,
        depth: Any,  # the number of k
        start: Any,
        start_step: Any,
        floor: Any,
        added: Any,  # 0: nothing is added
        added_step: Any,
        out: Any,  # may be where `start` or `added` is
        out_step: Any,
    ) -> None:
        floor = builder.fptrunc(floor, FLOAT)
        arguments = [inputs, input_step, weights, panel_step, depth, start, start_step, floor]
        arguments += [added, added_step, out, out_step]
        call_one(builder, "tile", rows, rows_and_panels, arguments, _body)

    return sized_tile


def call_one(
    builder: Any,
    name: str,  # of the functions, before their size
    rows: Any,  # a number known at run time
    sizes: Iterable[tuple[int, int]],  # rows and columns or panels that there is a function for
    arguments: list[Any],
    write: Callable[[Any, int, int], None],  # writes the body of the function of a size
) -> None:
    """Call the LLVM function for this number of rows; each function is made once in a module."""
    after = builder.append_basic_block()
    switch = builder.switch(rows, after)
    for size in sizes:
        block = builder.append_basic_block()
        switch.add_case(_WORD(size[0]), block)
        builder.position_at_end(block)
        builder.call(_function(builder.module, name, size, arguments, write), arguments)
        builder.branch(after)
    builder.position_at_end(after)


def _function(
    module: Any,
    name: str,
    size: tuple[int, int],
    arguments: list[Any],
    write: Callable[[Any, int, int], None],
) -> Any:
    name = f"{name}_{size[0]}x{size[1]}"
    function = module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in arguments])
        function = ir.Function(module, kind, name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        write(function, *size)
    return function


def _body(function: Any, rows: int, panels: int) -> None:
    """Build a tile's code, with its sums in variables that LLVM keeps in registers."""
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    inputs, input_step, weights, panel_step, depth, start, start_step, floor = function.args[:8]
    added, added_step, out, out_step = function.args[8:]
    cells = [(row, part) for row in range(rows) for part in range(2 * panels)]
    sums = {cell: cgutils.alloca_once(builder, VECTOR) for cell in cells}

    def after(address: Any, step: Any, count: int = 1) -> ir.Value:
        return builder.add(address, builder.mul(step, _WORD(count)))

    def pointer(address: Any, kind: Any, offset: int = 0) -> ir.Value:
        return builder.inttoptr(builder.add(address, _WORD(offset)), kind.as_pointer())

    def element(address: Any, step: Any, cell: tuple[int, int]) -> ir.Value:
        row, part = cell
        return pointer(after(address, step, row), VECTOR, 4 * WIDTH * part)

    def multiply(first: Any, steps: int) -> None:
        """Add the products of some successive k to the sums."""
        at = after(weights, first, 4 * PANEL)
        columns = [after(at, panel_step, panel) for panel in range(panels)]
        factors = [after(after(inputs, input_step, row), first, 4) for row in range(rows)]
        for k in range(steps):
            ws = [
                builder.load(pointer(column, VECTOR, 4 * (k * PANEL + half * WIDTH)), align=4)
                for column in columns
                for half in range(2)
            ]
            for row in range(rows):
                x = splat(builder, builder.load(pointer(factors[row], FLOAT, 4 * k), align=4))
                for part, w in enumerate(ws):
                    total = sums[row, part]
                    builder.store(fused(builder, x, w, builder.load(total)), total)

    for cell, total in sums.items():
        builder.store(builder.load(element(start, start_step, cell), align=4), total)
    rounds = builder.udiv(depth, _WORD(UNROLLED))
    with cgutils.for_range(builder, rounds) as loop:
        multiply(builder.mul(loop.index, _WORD(UNROLLED)), UNROLLED)
    rest = builder.mul(rounds, _WORD(UNROLLED))
    with cgutils.for_range(builder, builder.sub(depth, rest)) as loop:
        multiply(builder.add(rest, loop.index), 1)
    limit = splat(builder, floor)
    for total in sums.values():
        value = builder.load(total)
        below = builder.fcmp_ordered("<", value, limit)  # false for NaN
        builder.store(builder.select(below, limit, value), total)
    with builder.if_then(builder.icmp_signed("!=", added, _WORD(0))):
        for cell, total in sums.items():
            addend = builder.load(element(added, added_step, cell), align=4)
            builder.store(builder.fadd(builder.load(total), addend), total)
    for cell, total in sums.items():
        builder.store(builder.load(total), element(out, out_step, cell), align=4)
    builder.ret_void()


MOST_ROWS = 6
tile = _tile("tile", [(rows, 1) for rows in range(1, MOST_ROWS + 1)])
# With one panel, a single row's two sums would wait for each other.
tile_of_4_panels = _tile("tile_of_4_panels", [(1, 4)])
