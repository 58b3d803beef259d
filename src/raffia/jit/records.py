"""Records: numbers and addresses of arrays in a fixed order in memory, which kernels read by name.

A record is a class with annotations; in Python it is made of tensors and numbers, and kernels are
given its address.

>>> import torch
>>> from raffia.jit.kernel import kernel
>>> class Rows(Record):
...     values: F32s
...     num: int
>>> rows_at = fields_at(Rows)
>>> @kernel
... def total(address):
...     rows = rows_at(address)
...     found = 0.0
...     for i in range(rows.num):
...         found += rows.values[i]
...     return found
>>> three = Rows(values=torch.ones(3), num=3)
>>> total(three.address)
3.0
"""

# llvmlite and numba give their builders no types, so little of this file has any.
import functools
import struct
from array import array
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar, get_args, get_type_hints

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, lower_getattr_generic, models, register_model
from torch import Tensor

from raffia.jit.kernel import Typed, instruction, intrinsic


class Numbers(Protocol):
    """Numbers of one type side by side in memory; nothing tells how many there are."""

    def __getitem__(self, index: Any) -> Any: ...
    def __setitem__(self, index: Any, number: Any) -> None: ...


U8s = Annotated[Numbers, types.CPointer(types.uint8)]
I32s = Annotated[Numbers, types.CPointer(types.int32)]
I64s = Annotated[Numbers, types.CPointer(types.int64)]
F32s = Annotated[Numbers, types.CPointer(types.float32)]
F64s = Annotated[Numbers, types.CPointer(types.float64)]
_NUMBERS = {int: types.int64, float: types.float64}
_WORD = ir.IntType(64)


class Record:
    """Fields by name, `int`, `float` or arrays of numbers; what is not given is 0."""

    def __init__(self, **fields: Tensor | float | None) -> None:
        record: Any = type(self)
        layout = _layout(record)
        self._memory = layout.zeros[:]
        self._referenced: dict[str, Any] = {}  # alive as long as the addresses
        self._words = layout.unset.copy()
        self.address = self._memory.buffer_info()[0]
        # all fields in order, arrays by their addresses; the caller keeps them alive
        self.set: Callable[..., None] = functools.partial(layout.form.pack_into, self._memory, 0)
        if fields:
            self.update(**fields)

    def update(self, **fields: Tensor | float | None) -> None:
        """Change some fields of a record that was made by name."""
        words, num = self._words, len(self._words)
        for name, field in fields.items():
            words[name] = field.data_ptr() if isinstance(field, Tensor) else field or 0
        if len(words) > num:
            unknown = sorted([*words][num:])
            raise TypeError(f"{type(self).__name__} has no fields {unknown}")
        self._referenced |= fields
        self.set(*words.values())


@functools.cache
def field_types(record: Any) -> dict[str, Any]:
    """The types of a record's fields in kernels, in order."""
    hints = get_type_hints(record, include_extras=True)
    return {
        name: _NUMBERS[hint] if hint in _NUMBERS else get_args(hint)[1]
        for name, hint in hints.items()
    }


class _Layout(NamedTuple):
    """The layout and the initial contents of the records of a class."""

    form: struct.Struct  # of all fields
    zeros: "array[int]"  # as many words
    unset: dict[str, float]  # 0 for each field, in order


@functools.cache
def _layout(record: Any) -> _Layout:
    kinds = field_types(record)
    letters = ["d" if kind is types.float64 else "q" for kind in kinds.values()]
    return _Layout(
        struct.Struct("".join(letters)), array("q", bytes(8 * len(kinds))), dict.fromkeys(kinds, 0)
    )


class _RecordType(types.Type):
    def __init__(self, record: Any) -> None:
        self.fields = field_types(record)
        fields = [f"{name} {kind}" for name, kind in self.fields.items()]
        super().__init__(name=f"{record.__qualname__}({', '.join(fields)})")


@register_model(_RecordType)
class _RecordModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _WORD)  # its address


@infer_getattr
class _RecordAttributes(AttributeTemplate):
    key = _RecordType

    def generic_resolve(self, record: Any, name: str) -> types.Type | None:  # type: ignore[override]
        return record.fields.get(name)


def _read_field(context: Any, builder: Any, record: Any, address: Any, name: str) -> ir.Value:
    kind = context.get_value_type(record.fields[name])
    at = builder.add(address, _WORD(8 * list(record.fields).index(name)))
    return builder.load(builder.inttoptr(at, kind.as_pointer()))


lower_getattr_generic(_RecordType)(_read_field)


Fields = TypeVar("Fields", bound=Record)


def fields_at(record: type[Fields]) -> Callable[[int], Fields]:
    """The record at an address, in kernels; a module binds this to a name."""

    @instruction(_RecordType(record), types.int64)
    def record_at(builder: Any, address: Any) -> ir.Value:
        return address

    return record_at


@instruction(types.CPointer(types.float32), types.int64)
def floats_at(builder: Any, address: Any) -> ir.Value:
    """The float32 numbers from an address on."""
    return builder.inttoptr(address, ir.FloatType().as_pointer())


@instruction(types.CPointer(types.uint8), types.int64)
def bytes_at(builder: Any, address: Any) -> ir.Value:
    """The bytes from an address on."""
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


@intrinsic
def exists(typing_context: Any, array: Any) -> Typed:
    """Whether the array was given."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> ir.Value:
        return cgutils.is_not_null(builder, arguments[0])

    return types.boolean(array), code


@intrinsic
def tail(typing_context: Any, array: Any, start: Any) -> Typed:
    """The array from an element on; of one that was not given, nothing."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> ir.Value:
        array, start = arguments
        moved = builder.gep(array, [start])
        return builder.select(cgutils.is_null(builder, array), array, moved)

    return array(array, types.int64), code


@intrinsic
def copy(typing_context: Any, target: Any, source: Any, num: Any) -> Typed:
    """Copy `num` numbers to an array that does not overlap."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> ir.Value:
        to, start, count = arguments
        cgutils.raw_memcpy(builder, to, start, count, target.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(target, target, types.int64), code


@intrinsic
def clear(typing_context: Any, target: Any, num: Any) -> Typed:
    """Set `num` numbers to 0, of an array that may not have been given."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> ir.Value:
        target_array, num = arguments
        with builder.if_then(cgutils.is_not_null(builder, target_array)):
            size = builder.mul(num, _WORD(target.dtype.bitwidth // 8))
            cgutils.memset(builder, target_array, size, 0)
        return context.get_dummy_value()

    return types.void(target, types.int64), code
