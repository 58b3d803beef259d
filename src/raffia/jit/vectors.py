"""Vectors of float32, as many as this processor's registers hold: `+ - * /`, fused products, exp.

A kernel written with them does the same arithmetic for every element, in the order in which it is
written; nothing depends on what the compiler makes of a loop. `WIDTH` elements form a vector: 16
with AVX-512, else 8 (processors with narrower registers work on parts of it). Where the processor
multiplies and adds with one rounding `multiply_add` does so, else with two.

>>> from raffia.jit.kernel import kernel
>>> from raffia.jit.vectors import WIDTH, spread, total
>>> @kernel
... def repeated_sum(x):
...     return total(spread(x) * spread(2.0))
>>> repeated_sum(1.5) == 3.0 * WIDTH
True
"""

# llvmlite and numba give their builders no types, so little of this file has any.
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target

from raffia.jit.kernel import instruction, kernel
from raffia.jit.lanes import VectorType, shuffled

# What numba compiles for, which can be set to less than this processor has.
_TRIPLE, _, _FEATURES = cpu_target.target_context.codegen().magic_tuple()
_HAS = set(_FEATURES.split(","))
WIDTH = 16 if "+avx512f" in _HAS else 8
# LLVM calls a function of the C library for each element where there is no such instruction.
FUSES = "+fma" in _HAS if _TRIPLE.startswith(("x86_64", "i386", "i686")) else True

FLOAT = ir.FloatType()
_INDEX = ir.IntType(32)
VECTOR = ir.VectorType(FLOAT, WIDTH)
_WORDS = ir.VectorType(_INDEX, WIDTH)


floats = VectorType("floats", "float", WIDTH, add="fadd", sub="fsub", mul="fmul", truediv="fdiv")


def splat(builder: Any, number: Any, width: int = WIDTH) -> ir.Value:
    """Return an LLVM vector with the same number in every element."""
    empty = ir.Constant(ir.VectorType(number.type, width), ir.Undefined)
    first = builder.insert_element(empty, number, _INDEX(0))
    zeros = ir.Constant(ir.VectorType(_INDEX, width), [_INDEX(0)] * width)
    return builder.shuffle_vector(first, empty, zeros)


def fused(builder: Any, a: Any, b: Any, c: Any) -> ir.Value:
    """Return the LLVM value of a * b + c."""
    if not FUSES:
        return builder.fadd(builder.fmul(a, b), c)
    operation = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(a.type, [a.type] * 3), f"llvm.fma.v{a.type.count}f32"
    )
    return builder.call(operation, [a, b, c])


@instruction(floats, types.float64)
def spread(builder: Any, number: Any) -> ir.Value:
    """Spread a number, rounded to float32, to all elements."""
    return splat(builder, builder.fptrunc(number, FLOAT))


@instruction(floats, types.int64)
def load_floats(builder: Any, address: Any) -> ir.Value:
    """`WIDTH` successive float32."""
    return builder.load(builder.inttoptr(address, VECTOR.as_pointer()), align=4)


@instruction(types.void, types.int64, floats)
def store_floats(builder: Any, address: Any, vector: Any) -> None:
    """Write `WIDTH` successive float32."""
    builder.store(vector, builder.inttoptr(address, VECTOR.as_pointer()), align=4)


@instruction(floats, floats, floats, floats)
def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> ir.Value:
    """a * b + c."""
    return fused(builder, a, b, c)


def _limit(name: str, comparison: str) -> Callable[..., Any]:
    @instruction(floats, floats, floats, name=name)
    def limited(builder: Any, vector: Any, limit: Any) -> ir.Value:
        beyond = builder.fcmp_ordered(comparison, vector, limit)
        return builder.select(beyond, limit, vector)  # what is not a number stays so

    return limited


at_least = _limit("at_least", "<")
at_most = _limit("at_most", ">")


def _folded(name: str, fold: Any) -> Callable[..., Any]:
    """Halves are folded on each other until one element is left: an order that never changes."""

    @instruction(types.float64, floats, name=name)
    def folded(builder: Any, vector: Any) -> ir.Value:
        width = WIDTH
        while width > 1:
            width //= 2
            halves = [
                shuffled(builder, vector, vector, *range(start, start + width))
                for start in (0, width)
            ]
            vector = fold(builder, *halves)
        return builder.fpext(builder.extract_element(vector, _INDEX(0)), ir.DoubleType())

    return folded


total = _folded("total", lambda builder, a, b: builder.fadd(a, b))
# Another order than `at_least`: here a number wins over what is none.
greatest = _folded(
    "greatest", lambda builder, a, b: builder.select(builder.fcmp_unordered(">", a, b), a, b)
)


@instruction(floats, floats)
def _power_of_two(builder: Any, shifted: Any) -> ir.Value:
    """2**n, where `shifted` is n + 1.5 * 2**23: n then stands in the lowest bits."""
    bits = builder.bitcast(shifted, _WORDS)
    exponent = builder.shl(bits, ir.Constant(_WORDS, [23] * WIDTH))
    one = ir.Constant(_WORDS, [127 << 23] * WIDTH)
    return builder.bitcast(builder.add(exponent, one), VECTOR)


@kernel
def _exp_parts(x):  # type: ignore[no-untyped-def]
    """2**n and exp(r) - 1, where x = n log(2) + r with |r| at most log(2) / 2."""
    shift = spread(12582912.0)
    shifted = multiply_add(x, spread(1.4426950408889634), shift)
    n = shifted - shift
    # log(2) in two parts, of which the first has so few bits that its product with n is exact.
    r = multiply_add(n, spread(-0.693359375), x)
    r = multiply_add(n, spread(2.12194440054690583e-4), r)
    # (exp(r) - 1 - r) / r**2, fitted here so that the largest relative error of exp is least: 3e-9.
    q = multiply_add(spread(0.0013814466886901359), r, spread(0.008368780414534975))
    q = multiply_add(q, r, spread(0.04166839421432103))
    q = multiply_add(q, r, spread(0.166665201077831))
    q = multiply_add(q, r, spread(0.4999999341248519))
    return _power_of_two(shifted), multiply_add(q * r, r, r)


@kernel
def exp(x):  # type: ignore[no-untyped-def]
    """exp(x), relative error 2e-7; as if x lay in -87..88, so it is never 0 nor infinite."""
    # within these limits 2**n is a normal number
    scale, p = _exp_parts(at_most(at_least(x, spread(-87.0)), spread(88.0)))
    return multiply_add(scale, p, scale)


@kernel
def _twice_less_one(x):  # type: ignore[no-untyped-def]
    """exp(2 x) - 1, right also near 0; as if |x| were at most 10, where tanh is 1 in float32."""
    x = at_most(at_least(x, spread(-10.0)), spread(10.0))
    scale, p = _exp_parts(x + x)
    return multiply_add(scale, p, scale - spread(1.0))


@kernel
def gated(gate, x):  # type: ignore[no-untyped-def]
    """x / (1 + exp(-gate)), relative error 3e-7."""
    return x / (spread(1.0) + exp(spread(0.0) - gate))


@kernel
def gated_tanh(gate, x):  # type: ignore[no-untyped-def]
    """tanh(x) / (1 + exp(-gate)), relative error 6e-7 also near 0, by one division.

    tanh(x) is (e - 1) / (e + 1), e = exp(2 x).
    """
    e_less_one = _twice_less_one(x)
    opened = spread(1.0) + exp(spread(0.0) - gate)
    return e_less_one / (opened * (e_less_one + spread(2.0)))
