"""What a row is (`RowLayout`), and rows as words (`packed`) that are equal iff the rows are."""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from raffia.data import kernels
from raffia.data.row_bytes import as_words, folding, has_address, plain, row_bytes


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
        """A signed 64-bit integer, another for another dtype or shape, the same for ever.

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
            f"out must be int64 {list(shape)} on {device}, "
            f"not {out.dtype} {list(out.shape)} on {out.device}"
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
            f"rows of {', '.join(map(str, layouts))} are packed as int64 [N, {needed}], "
            f"not {words.dtype} {list(words.shape)}"
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
        raise ValueError(f"the tensors must have equally many rows on one device, not {found}")
    return count, device


def _kernels_for(*tensors: Tensor) -> ModuleType | None:
    return kernels.rows if all(map(has_address, tensors)) else None


def words_of(layouts: Sequence[RowLayout]) -> int:
    """How many words `packed` rows of these layouts have."""
    return -(-sum(layout.nbytes for layout in layouts) // 8)
