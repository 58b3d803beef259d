"""Elements of arrays in kernels, by the address of the array and the element's number.

`raffia.jit.kernel` reads memory at an address that is recomputed for each element, which hides
from the compiler that a loop runs along an array. Here the address stays and the number runs, so
simple loops become vector code. Nothing is checked: numbers must lie within the array.
"""

# llvmlite and numba give their builders no types, so little of this file has any.
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_CONTENT = {
    types.float32: ir.FloatType(),
    types.float64: ir.DoubleType(),
    types.int32: ir.IntType(32),
    types.int64: ir.IntType(64),
    types.uint8: ir.IntType(8),
}


def _element(builder: Any, address: Any, index: Any, number: Any) -> Any:
    array = builder.inttoptr(address, _CONTENT[number].as_pointer())
    return builder.gep(array, [index])


def _get(name: str, number: Any) -> Any:
    def typed(typing_context: Any, address: Any, index: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            address, index = arguments
            return builder.load(_element(builder, address, index, number))

        return number(types.int64, types.int64), code

    typed.__name__ = typed.__qualname__ = name
    return intrinsic(typed)


def _put(name: str, number: Any) -> Any:
    def typed(typing_context: Any, address: Any, index: Any, value: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            address, index, value = arguments
            builder.store(value, _element(builder, address, index, number))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, number), code

    typed.__name__ = typed.__qualname__ = name
    return intrinsic(typed)


get_f32: Any = _get("get_f32", types.float32)
get_f64: Any = _get("get_f64", types.float64)
get_i32: Any = _get("get_i32", types.int32)
get_i64: Any = _get("get_i64", types.int64)
get_u8: Any = _get("get_u8", types.uint8)
put_f32: Any = _put("put_f32", types.float32)
put_f64: Any = _put("put_f64", types.float64)
put_i32: Any = _put("put_i32", types.int32)
put_i64: Any = _put("put_i64", types.int64)
put_u8: Any = _put("put_u8", types.uint8)


def _power_of_two(typing_context: Any, exponent: Any) -> Any:
    """2 ** exponent as float32, for -126 <= exponent <= 127."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        return builder.bitcast(
            builder.shl(builder.add(arguments[0], word(127)), word(23)), ir.FloatType()
        )

    return types.float32(types.int32), code


power_of_two: Any = intrinsic(_power_of_two)


def _ordered(typing_context: Any, x: Any) -> Any:
    """A whole number that orders float32 numbers as they are ordered; -0.0 lies below 0.0.

    The greatest of whole numbers is found by vector code, that of floats is not: NaN forbids it.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        bits = builder.bitcast(arguments[0], word)
        flip = builder.and_(builder.ashr(bits, word(31)), word(0x7FFFFFFF))
        return builder.xor(bits, flip)

    return types.int32(types.float32), code


ordered: Any = intrinsic(_ordered)


def _nearest(typing_context: Any, x: Any) -> Any:
    """The whole number nearest to x, halves to the even one, as torch.round has it."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        real = ir.FloatType()
        rint = builder.module.declare_intrinsic("llvm.rint", [real])
        return builder.call(rint, arguments)

    return types.float32(types.float32), code


nearest: Any = intrinsic(_nearest)


def _copy_bytes(typing_context: Any, target: Any, source: Any, num: Any) -> Any:
    """Copy `num` bytes from one address to another that does not overlap it."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        target, source, num = arguments
        cgutils.raw_memcpy(
            builder, builder.inttoptr(target, byte), builder.inttoptr(source, byte), num, 1
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), code


def _zero_bytes(typing_context: Any, target: Any, num: Any) -> Any:
    """Set `num` bytes to 0."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, num = arguments
        cgutils.memset(builder, builder.inttoptr(target, ir.IntType(8).as_pointer()), num, 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


copy_bytes: Any = intrinsic(_copy_bytes)
zero_bytes: Any = intrinsic(_zero_bytes)
