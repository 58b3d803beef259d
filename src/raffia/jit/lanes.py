"""Operations on eight 64-bit words: `+ ^ | << >>` act on all eight, `>>` filling with zeros.

A loop written with lanes becomes vector instructions whether or not the compiler would have found
them: two AVX2 registers, one of AVX-512, four of NEON. Each lane usually holds a word of another
row of a matrix; `at` is then the addresses of the eight rows.

>>> from raffia.jit.kernel import kernel
>>> from raffia.jit.lanes import lane, spread, with_lane
>>> @kernel
... def sum_in_lane_3(a, b):
...     return lane(spread(a) + with_lane(spread(0), 3, b), 3)
>>> sum_in_lane_3(5, 2)
7
"""

# llvmlite and numba give their builders no types, so little of this file has any.
import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel.models import PrimitiveModel
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import register_model

from raffia.jit.kernel import Typed, instruction, intrinsic

LANES = 8
_INDEX = ir.IntType(32)
_WORD = ir.IntType(64)


class VectorType(types.Type):
    """The numba type of a register with `count` numbers, with operators such as `+`."""

    def __init__(self, name: str, content: str, count: int, **instructions: str) -> None:
        self.content, self.count = content, count
        super().__init__(name=f"{name}({count})")
        for symbol, code in instructions.items():
            _operator(self, getattr(operator, symbol), code)


@register_model(VectorType)
class _VectorModel(PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        content = ir.FloatType() if kind.content == "float" else _WORD
        super().__init__(manager, kind, ir.VectorType(content, kind.count))


def _operator(kind: VectorType, symbol: Any, instruction: str) -> None:
    @infer_global(symbol)
    class _VectorTemplate(ConcreteTemplate):
        cases = (signature(kind, kind, kind),)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> ir.Value:
        return getattr(builder, instruction)(*arguments)

    lower_builtin(symbol, kind, kind)(code)


lanes = VectorType(
    "lanes", "word", LANES, add="add", xor="xor", or_="or_", lshift="shl", rshift="lshr"
)


def _vector(bits: int, count: int) -> Any:
    return ir.VectorType(ir.IntType(bits), count)


def shuffled(builder: Any, a: Any, b: Any, *indices: int) -> ir.Value:
    """Return a vector of elements of `a` and `b`, numbered through both; LLVM's `shufflevector`."""
    mask = ir.Constant(ir.VectorType(_INDEX, len(indices)), [_INDEX(index) for index in indices])
    return builder.shuffle_vector(a, b, mask)


def _spread(builder: Any, word: Any) -> ir.Value:
    empty = ir.Constant(_vector(64, LANES), ir.Undefined)
    first = builder.insert_element(empty, word, _INDEX(0))
    return shuffled(builder, first, empty, *[0] * LANES)


def _read(builder: Any, kind: Any, address: Any) -> ir.Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _row(builder: Any, at: Any, lane: int, offset: Any) -> ir.Value:
    return builder.add(builder.extract_element(at, _INDEX(lane)), offset)


@instruction(lanes, types.int64)
def spread(builder: Any, word: Any) -> ir.Value:
    """Spread a word to all lanes."""
    return _spread(builder, word)


@instruction(types.int64, lanes, types.int64)
def lane(builder: Any, words: Any, number: Any) -> ir.Value:
    """The word in one lane, as int64."""
    return builder.extract_element(words, number)


@instruction(lanes, lanes, types.int64, types.int64)
def with_lane(builder: Any, words: Any, number: Any, word: Any) -> ir.Value:
    """The lanes with the word in one lane replaced."""
    return builder.insert_element(words, word, number)


@instruction(lanes, lanes, types.int64)
def rotated(builder: Any, words: Any, left: Any) -> ir.Value:
    """The words, each rotated to the left by a literal number of bits."""
    right = builder.sub(_WORD(64), left)
    return builder.or_(
        builder.shl(words, _spread(builder, left)), builder.lshr(words, _spread(builder, right))
    )


@instruction(types.void, types.int64, lanes)
def store_lanes(builder: Any, address: Any, words: Any) -> None:
    """Write eight words side by side."""
    builder.store(words, builder.inttoptr(address, words.type.as_pointer()), align=1)


def _load_lanes(bits: int) -> Callable[..., Any]:
    @instruction(lanes, types.int64, name=f"load_lanes_u{bits}")
    def load(builder: Any, address: Any) -> ir.Value:
        numbers = _read(builder, _vector(bits, LANES), address)
        return numbers if bits == 64 else builder.zext(numbers, _vector(64, LANES))

    return load


load_lanes_u8, load_lanes_u16 = _load_lanes(8), _load_lanes(16)
load_lanes_u32, load_lanes_u64 = _load_lanes(32), _load_lanes(64)


def _gather(bits: int) -> Callable[..., Any]:
    @instruction(lanes, lanes, types.int64, name=f"gather_u{bits}")
    def gather(builder: Any, at: Any, offset: Any) -> ir.Value:
        words = ir.Constant(_vector(64, LANES), ir.Undefined)
        for number in range(LANES):
            word = _read(builder, ir.IntType(bits), _row(builder, at, number, offset))
            word = word if bits == 64 else builder.zext(word, _WORD)
            words = builder.insert_element(words, word, _INDEX(number))
        return words

    return gather


gather_u8, gather_u16, gather_u32, gather_u64 = (_gather(bits) for bits in (8, 16, 32, 64))


@intrinsic
def gather_2(typing_context: Any, at: Any, offset: Any) -> Typed:
    """Two successive words of each row, as two lanes."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> ir.Value:
        at, offset = arguments
        rows = [
            _read(builder, _vector(64, 2), _row(builder, at, number, offset))
            for number in range(LANES)
        ]
        # Of four rows the first and third in one register, the second and fourth in another: what
        # is exchanged then stays within halves of a register, which is the cheap kind of exchange.
        words: Any = [[], []]
        for i in range(0, LANES, 4):
            even, odd = (shuffled(builder, rows[k], rows[k + 2], 0, 1, 2, 3) for k in (i, i + 1))
            words[0].append(shuffled(builder, even, odd, 0, 4, 2, 6))
            words[1].append(shuffled(builder, even, odd, 1, 5, 3, 7))
        words = [shuffled(builder, *halves, *range(LANES)) for halves in words]
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(lanes, 2)(lanes, types.int64), code


@instruction(lanes, lanes, types.int64, types.int64)
def replaced(builder: Any, words: Any, old: Any, new: Any) -> ir.Value:
    """The words, with `new` instead of each that equals `old`."""
    is_old = builder.icmp_signed("==", words, _spread(builder, old))
    return builder.select(is_old, _spread(builder, new), words)


def _folded(name: str, bits: int, real: Any = None) -> Callable[..., Any]:
    """An instruction that folds numbers; with a float type `real`, one comparison detects NaNs."""

    def typed(typing_context: Any, words: Any, largest: Any, nan: Any) -> Typed:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> ir.Value:
            words = arguments[0]
            size = 64 * LANES if isinstance(words.type, ir.VectorType) else 64
            count = size // bits
            kind = _vector(bits, count)
            numbers = builder.bitcast(words, kind)
            largest, nan = (
                builder.bitcast(_repeated(builder, word, words.type), kind)
                for word in arguments[1:]
            )
            if real is None:
                unsigned = ir.Constant(kind, [(1 << (bits - 1)) - 1] * count)
                is_nan = builder.icmp_signed(">", builder.and_(numbers, unsigned), largest)
            else:
                reals = builder.bitcast(numbers, ir.VectorType(real, count))
                is_nan = builder.fcmp_unordered("uno", reals, reals)
            is_minus_zero = builder.icmp_signed(
                "==", numbers, ir.Constant(kind, [-1 << (bits - 1)] * count)
            )
            numbers = builder.select(is_nan, nan, numbers)
            numbers = builder.select(is_minus_zero, ir.Constant(kind, None), numbers)
            return builder.bitcast(numbers, words.type)

        kind = lanes if words == lanes else types.int64
        return kind(kind, types.int64, types.int64), code

    typed.__name__ = typed.__qualname__ = name
    return intrinsic(typed)


def _repeated(builder: Any, word: Any, kind: Any) -> ir.Value:
    return _spread(builder, word) if isinstance(kind, ir.VectorType) else word


# Floating-point numbers of so many bits, in lanes of words or in one word: -0.0 becomes 0.0, and
# what is above `largest` without its sign becomes `nan`. Those are words of several numbers, too.
folded_8 = _folded("folded_8", 8)
folded_16 = _folded("folded_16", 16)
folded_32 = _folded("folded_32", 32, ir.FloatType())
folded_64 = _folded("folded_64", 64, ir.DoubleType())
