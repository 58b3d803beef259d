"""Compiled arithmetic of scores: what raffia.search.softmax and raffia.functional.draws do.

Each number is found by the operations, in the order and in the precision of the tensor version: the
results are the same bit for bit. Loops keep to what becomes vector code.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from raffia.functional.draws import FIRST, SECOND
from raffia.jit.kernel import instruction, kernel
from raffia.jit.records import Numbers
from raffia.search.softmax import COEFFICIENTS, LEAST, LN2_HIGH, LN2_LOW, LOG2_E

F0, F1 = np.float32(0.0), np.float32(1.0)
INFINITY = np.float32(np.inf)
GREATEST = np.float32(np.finfo(np.float32).max)
LEAST_I32 = np.int32(-(2**31))
_LEAST, _LOG2_E = np.float32(LEAST), np.float32(LOG2_E)
_LN2_HIGH, _LN2_LOW = np.float32(LN2_HIGH), np.float32(LN2_LOW)
_C0, _C1, _C2, _C3, _C4, _C5 = (np.float32(c) for c in COEFFICIENTS)
_FIRST, _SECOND = np.uint64(FIRST + 2**64), np.uint64(SECOND + 2**64)
_FLOAT, _WORD = ir.FloatType(), ir.IntType(32)


@instruction(types.float32, types.int32)
def power_of_two(builder: Any, exponent: Any) -> ir.Value:
    """2 ** exponent, for -126 <= exponent <= 127."""
    return builder.bitcast(builder.shl(builder.add(exponent, _WORD(127)), _WORD(23)), _FLOAT)


@instruction(types.int32, types.float32)
def ordered(builder: Any, x: Any) -> ir.Value:
    """An integer that has the same order as the float32 numbers; -0.0 is below 0.0.

    The greatest of whole numbers is found by vector code, that of floats is not: NaN forbids it.
    """
    bits = builder.bitcast(x, _WORD)
    flip = builder.and_(builder.ashr(bits, _WORD(31)), _WORD(0x7FFFFFFF))
    return builder.xor(bits, flip)


@instruction(types.float32, types.float32)
def nearest(builder: Any, x: Any) -> ir.Value:
    """The integer nearest to x, halves rounded to even, as in torch.round."""
    return builder.call(builder.module.declare_intrinsic("llvm.rint", [_FLOAT]), [x])


@kernel
def exp(x: np.float32) -> np.float32:
    clamped = x if x > _LEAST else _LEAST
    whole = nearest(clamped * _LOG2_E)
    r = clamped - whole * _LN2_HIGH
    r = r - whole * _LN2_LOW
    y = _C0
    y = y * r + _C1
    y = y * r + _C2
    y = y * r + _C3
    y = y * r + _C4
    y = y * r + _C5
    y = y * (r * r)
    y = y + r
    y = y + F1
    y = y * power_of_two(np.int32(whole))
    return y if x >= _LEAST else F0


@kernel
def greatest(numbers: Numbers, num: int) -> int:
    """The index of the largest number, the first one among equals."""
    top = LEAST_I32
    for a in range(num):
        x = ordered(numbers[a] + F0)  # -0.0 counts as 0.0
        top = x if x > top else top
    for a in range(num):
        if ordered(numbers[a] + F0) == top:
            return a
    return 0


@kernel
def softmax(numbers: Numbers, num: int) -> bool:
    """Replace logits by their softmax, inplace: with a second array the loops would not vectorise.

    False if all are -inf.
    """
    top = numbers[greatest(numbers, num)]
    if top == -INFINITY:
        for a in range(num):
            numbers[a] = F0
        return False
    for a in range(num):
        numbers[a] = exp(numbers[a] - top)
    total = 0.0
    for a in range(num):
        total += np.float64(numbers[a])
    divisor = np.float32(total)
    for a in range(num):
        numbers[a] = numbers[a] / divisor
    return True


@kernel
def mix(x: np.uint64) -> np.uint64:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


@kernel
def unfit(x: np.float32) -> bool:
    return not (x <= GREATEST and x >= -GREATEST)
