"""The bytes by which rows are compared: one zero, one NaN, then the raw memory of each row.

Two rows are equal content if their bytes are. Floating-point numbers are equal sooner than their
bits: -0.0 == 0.0, and what made a NaN is no part of a state. So both are made one before bytes are
taken, unless the caller asks for the bits as they are.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from raffia.tensordict.memmap import MemoryMappedTensor

_IN_MEMORY = (Tensor, Parameter, MemoryMappedTensor)  # unlike fake tensors and other subclasses
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FloatFormat(NamedTuple):
    """The bits of a number without its sign: what is above `largest` is a NaN, `nan` is ours."""

    bits: int
    largest: int  # the bits of infinity, or of the largest number where there is no infinity
    nan: int  # the bits of torch.tensor(nan)


# Not here: formats that have one NaN and one zero (float8_*fnuz, float8_e8m0fnu).
FLOAT_FORMATS = {
    torch.float64: FloatFormat(64, 0x7FF0_0000_0000_0000, 0x7FF8_0000_0000_0000),
    torch.float32: FloatFormat(32, 0x7F80_0000, 0x7FC0_0000),
    torch.float16: FloatFormat(16, 0x7C00, 0x7E00),
    torch.bfloat16: FloatFormat(16, 0x7F80, 0x7FC0),
    torch.float8_e5m2: FloatFormat(8, 0x7C, 0x7F),
    torch.float8_e4m3fn: FloatFormat(8, 0x7E, 0x7F),
}
FLOAT_FORMATS |= {  # a complex number is two real ones
    torch.complex128: FLOAT_FORMATS[torch.float64],
    torch.complex64: FLOAT_FORMATS[torch.float32],
    torch.complex32: FLOAT_FORMATS[torch.float16],
}


@functools.cache
def folding(dtype: torch.dtype, normalize: bool) -> tuple[int, int, int]:
    """What kernels need of a dtype: bits of a number, then words full of `largest` and of `nan`.

    >>> from raffia.data.row_bytes import folding
    >>> [hex(number) for number in folding(torch.bfloat16, True)]
    ['0x10', '0x7f807f807f807f80', '0x7fc07fc07fc07fc0']
    >>> folding(torch.int32, True)
    (0, 0, 0)
    """
    if not normalize or dtype not in FLOAT_FORMATS:
        return 0, 0, 0
    bits, largest, nan = FLOAT_FORMATS[dtype]
    repeat = sum(1 << shift for shift in range(0, 64, bits))
    return bits, largest * repeat, nan * repeat


def has_address(x: Tensor) -> bool:
    """Whether kernels can be given the memory of `x`, or of a copy: not in a graph, nor if fake.

    >>> from raffia.data.row_bytes import has_address
    >>> has_address(torch.zeros(2)), has_address(torch.zeros(2, device="meta"))
    (True, False)
    """
    return type(x) in _IN_MEMORY and x.is_cpu and not torch.compiler.is_compiling()


def plain(rows: Tensor) -> Tensor:
    """`rows`, copied if the elements of a row do not lie side by side in memory as they are meant.

    >>> from raffia.data.row_bytes import plain
    >>> plain(torch.zeros(3, 4)[:, :2]).stride(), plain(torch.zeros(4, 3).T).stride()
    ((4, 1), (4, 1))
    """
    if not rows.dim():
        raise ValueError("a tensor without dimensions has no rows; pass x.unsqueeze(0) for one row")
    if rows.layout is not torch.strided or rows.is_quantized:
        raise TypeError(
            f"rows must lie in dense memory, not in {rows.layout} of {rows.dtype}; "
            "pass rows.to_dense() or rows.dequantize()"
        )
    if type(rows) is not Tensor and type(rows) in _IN_MEMORY:
        rows = rows.detach().as_subclass(Tensor)
    if rows.is_neg() or rows.is_conj():  # a view of memory that holds other numbers
        rows = rows.resolve_conj().resolve_neg()
    if rows.is_contiguous() or (rows.shape[0] and rows[0].is_contiguous()):
        return rows
    return rows.contiguous()


def row_width(rows: Tensor) -> int:
    """Bytes in a row."""
    return rows.shape[1:].numel() * rows.itemsize


def row_bytes(rows: Tensor, *, normalize: bool = True) -> Tensor:
    """The bytes of each row.  rows [N, ...] -> uint8 [N, bytes in a row].

    >>> from raffia.data.row_bytes import row_bytes
    >>> row_bytes(torch.tensor([[1, 2], [3, 4]], dtype=torch.int16))
    tensor([[1, 0, 2, 0],
            [3, 0, 4, 0]], dtype=torch.uint8)
    >>> row_bytes(torch.tensor([-0.0, 1.0]))
    tensor([[  0,   0,   0,   0],
            [  0,   0, 128,  63]], dtype=torch.uint8)
    """
    rows = plain(rows.detach())
    shape = len(rows), row_width(rows)
    if 0 in shape:
        return torch.empty(shape, dtype=torch.uint8, device=rows.device)
    if rows.dtype.is_complex:
        rows = torch.view_as_real(rows)
    data = rows.reshape(len(rows), -1)
    if normalize and rows.dtype in FLOAT_FORMATS:
        data = _folded(data.view(_INTEGER_OF_SIZE[rows.itemsize]), FLOAT_FORMATS[rows.dtype])
    return data.contiguous().view(torch.uint8)


def row_words(rows: Tensor, *, normalize: bool = True) -> Tensor:
    """`row_bytes` as little-endian words, the last filled up with zeros.  -> int64 [N, words].

    >>> from raffia.data.row_bytes import row_words
    >>> row_words(torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32))
    tensor([[ 8589934593,           3],
            [21474836484,           6]])
    """
    return as_words(row_bytes(rows, normalize=normalize))


def as_words(data: Tensor) -> Tensor:
    """Bytes uint8 [N, bytes in a row] as `row_words` has them."""
    data = torch.nn.functional.pad(data, (0, -data.shape[1] % 8))
    if not data.numel():  # which has no view of another dtype
        return torch.empty(len(data), data.shape[1] // 8, dtype=torch.int64, device=data.device)
    return data.view(torch.int64)


def _folded(bits: Tensor, float_format: FloatFormat) -> Tensor:
    magnitude = bits & ((1 << (float_format.bits - 1)) - 1)
    bits = bits.masked_fill(magnitude == 0, 0)
    return bits.masked_fill_(magnitude > float_format.largest, float_format.nan)
