"""The layout of a row (`RowLayout`), its bytes, and rows as words (`packed`) that are equal iff
they are.

Two rows are equal content if their bytes are. Floating-point numbers are equal sooner than their
bits: -0.0 == 0.0, and what made a NaN is no part of a state. So both are made one before bytes are
taken, unless the caller asks for the bits as they are.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from raffia.data import kernels
from raffia.tensordict.memmap import MemoryMappedTensor


@dataclass(frozen=True)
class RowLayout:
    """The dtype and shape of one row: what its bytes mean.

    >>> from raffia.data.rows import RowLayout
    >>> layout = RowLayout(torch.float32, (2, 3))
    >>> layout.nbytes
    24
    >>> RowLayout.from_json(layout.to_json()) == layout
    True
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in a row."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @functools.cached_property
    def tag(self) -> int:
        """A signed 64-bit integer that differs between dtypes and shapes, and never changes.

        >>> from raffia.data.rows import RowLayout
        >>> RowLayout(torch.float32, (2,)).tag == RowLayout(torch.int32, (2,)).tag
        False
        """
        digest = hashlib.blake2b(str(self).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def __str__(self) -> str:
        return f"{self.to_json()['dtype']}{list(self.shape)}"

    def to_json(self) -> dict[str, Any]:
        """The layout as JSON can hold it.

        >>> from raffia.data.rows import RowLayout
        >>> RowLayout(torch.bool, ()).to_json()
        {'dtype': 'bool', 'shape': []}
        """
        return {"dtype": str(self.dtype).removeprefix("torch."), "shape": list(self.shape)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "RowLayout":
        """The layout that `to_json` wrote.

        >>> from raffia.data.rows import RowLayout
        >>> print(RowLayout.from_json({"dtype": "uint8", "shape": [2, 3]}))
        uint8[2, 3]
        """
        dtype = getattr(torch, str(data["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"torch {torch.__version__} has no dtype {data['dtype']!r}")
        return cls(dtype, tuple(int(size) for size in data["shape"]))


def row_layout(x: Tensor, batch_dims: int) -> RowLayout:
    """The layout of the rows of `x`, whose first `batch_dims` dimensions count rows.

    >>> from raffia.data.rows import row_layout
    >>> print(row_layout(torch.zeros(5, 2, 3), batch_dims=1))
    float32[2, 3]
    """
    return _layout(x.dtype, x.shape[batch_dims:])


@functools.lru_cache(maxsize=4096)
def _layout(dtype: torch.dtype, shape: torch.Size) -> RowLayout:
    return RowLayout(dtype, tuple(shape))


def packed(
    values: Sequence[Tensor],  # [N, ...] each
    *,
    normalize: bool = True,
    out: Tensor | None = None,
) -> Tensor:  # int64 [N, words]
    """The bytes of each row of several tensors side by side, filled up with zeros to whole words.

    Rows of the same layouts are equal content iff their words are equal: with `normalize`, -0.0 is
    written as 0.0 and every NaN as the same one.

    >>> from raffia.data.rows import packed
    >>> packed([torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), torch.tensor([True, False])])
    tensor([[ 8589934593,           1],
            [17179869187,           0]])
    """
    rows = [plain(value) for value in values]
    count, device = _count_and_device(rows)
    widths = [row.shape[1:].numel() * row.itemsize for row in rows]
    shape = count, -(-sum(widths) // 8)
    if out is None:
        out = torch.empty(shape, dtype=torch.int64, device=device)
    elif out.dtype != torch.int64 or out.shape != shape or out.device != device:
        raise ValueError(
            f"out must be int64 {list(shape)} on {device}; got {out.dtype} {list(out.shape)} on "
            f"{out.device}"
        )
    compiled = _kernels_for(*rows, out)
    if compiled is None or (shape[1] > 1 and out.stride(1) != 1):
        parts = [row_bytes(row, normalize=normalize) for row in rows]
        return out.copy_(as_words(torch.cat(parts, 1)))
    _copy_side_by_side(compiled, rows, widths, normalize, out)
    return out


def _copy_side_by_side(
    compiled: ModuleType, rows: list[Tensor], widths: list[int], normalize: bool, out: Tensor
) -> None:
    chunk = 4096  # rows of `out` that stay in the cache until the last tensor has come
    step = 8 * out.stride(0)
    for first in range(0, len(out), chunk):
        count = min(chunk, len(out) - first)
        target = out.data_ptr() + first * step
        missing = 8 * out.shape[1]
        for number, (row, width) in enumerate(zip(rows, widths, strict=True), 1):
            missing -= width
            stride = row.stride(0) * row.itemsize
            compiled.copy_rows(
                row.data_ptr() + first * stride,
                stride,
                count,
                width,
                *folding(row.dtype, normalize),
                target,
                step,
                missing if number == len(rows) else 0,
            )
            target += width


def unpacked(
    words: Tensor,  # int64 [N, words]
    layouts: Sequence[RowLayout],
) -> list[Tensor]:
    """The tensors whose rows were `packed`, as `normalize` left them.

    >>> from raffia.data.rows import RowLayout, packed, unpacked
    >>> words = packed([torch.tensor([[1, 2], [3, 4]])])
    >>> unpacked(words, [RowLayout(torch.int64, (2,))])
    [tensor([[1, 2],
            [3, 4]])]
    """
    needed = words_of(layouts)
    if words.dtype != torch.int64 or words.shape[1:] != (needed,):
        raise ValueError(
            f"rows of {', '.join(map(str, layouts))} are packed as int64 [N, {needed}]; got "
            f"{words.dtype} {list(words.shape)}"
        )
    words = words.contiguous()
    compiled = _kernels_for(words)
    values, start = [], 0
    for layout in layouts:
        value = torch.empty(len(words), *layout.shape, dtype=layout.dtype, device=words.device)
        if compiled is not None:
            source, step = words.data_ptr() + start, 8 * words.shape[1]
            compiled.copy_rows(
                source, step, len(words), layout.nbytes, 0, 0, 0, value.data_ptr(), layout.nbytes, 0
            )
        elif value.numel():
            part = words.view(torch.uint8)[:, start : start + layout.nbytes]
            value.view(len(words), -1).view(torch.uint8).copy_(part)
        values.append(value)
        start += layout.nbytes
    return values


def _count_and_device(rows: list[Tensor]) -> tuple[int, torch.device]:
    if not rows:
        raise ValueError("there are no rows to pack; pass at least one tensor [N, ...]")
    count, device = rows[0].shape[0], rows[0].device
    if any(row.shape[0] != count or row.device != device for row in rows[1:]):
        found = ", ".join(f"{list(row.shape)} on {row.device}" for row in rows)
        raise ValueError(
            f"the tensors must have the same number of rows and be on one device; got {found}"
        )
    return count, device


def _kernels_for(*tensors: Tensor) -> ModuleType | None:
    return kernels.rows if all(map(has_address, tensors)) else None


def words_of(layouts: Sequence[RowLayout]) -> int:
    """How many words `packed` rows of these layouts have."""
    return -(-sum(layout.nbytes for layout in layouts) // 8)


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
    """The kernel constants of a dtype: bits of a number, then words full of `largest` and of `nan`.

    >>> from raffia.data.rows import folding
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

    >>> from raffia.data.rows import has_address
    >>> has_address(torch.zeros(2)), has_address(torch.zeros(2, device="meta"))
    (True, False)
    """
    return type(x) in _IN_MEMORY and x.is_cpu and not torch.compiler.is_compiling()


def plain(rows: Tensor) -> Tensor:
    """Return `rows`, copied unless each row's elements are adjacent in memory and stored literally.

    >>> from raffia.data.rows import plain
    >>> plain(torch.zeros(3, 4)[:, :2]).stride(), plain(torch.zeros(4, 3).T).stride()
    ((4, 1), (4, 1))
    """
    if not rows.dim():
        raise ValueError("a tensor without dimensions has no rows; pass x.unsqueeze(0) for one row")
    if rows.layout is not torch.strided or rows.is_quantized:
        raise TypeError(
            f"rows must be dense tensors; got {rows.layout} of {rows.dtype}: pass rows.to_dense() "
            "or rows.dequantize()"
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

    >>> from raffia.data.rows import row_bytes
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

    >>> from raffia.data.rows import row_words
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
