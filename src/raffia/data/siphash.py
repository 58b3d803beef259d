"""The SipHash of the content of each row of a tensor: the same everywhere, for ever."""

from collections.abc import Sequence

import torch
from torch import Tensor

from raffia.data import kernels
from raffia.data.rows import folding, has_address, plain, row_width, row_words

_WORD = (1 << 64) - 1
_VARIANTS = ((1, 3), (2, 4))
_START = (  # "somepseudorandomlygeneratedbytes"
    0x736F6D6570736575,
    0x646F72616E646F6D,
    0x6C7967656E657261,
    0x7465646279746573,
)


def siphash(
    rows: Tensor,  # [N, ...] of any dtype: rows[i] is hashed
    *,
    key: tuple[int, int] = (0, 0),
    rounds: tuple[int, int] = (1, 3),
    normalize: bool = True,
    out: Tensor | None = None,
) -> Tensor:  # int64 [N], on the device of rows
    """SipHash of the bytes of each row, as signed 64-bit integers.

    The value depends on the bytes of the row, key and rounds only: never on strides, device,
    process or release, nor on dtype where the bytes are the same (`RowLayout.tag` tells dtypes and
    shapes apart). With `normalize`, -0.0 counts as 0.0 and all NaNs as one; without, each bit
    counts. `rounds` are (1, 3), which CPython uses for `hash(bytes)`, or (2, 4), the authors' first
    choice. As in CPython -1 becomes -2, so that -1 is free to mean that there is no hash.
    Source: Aumasson and Bernstein (2012), "SipHash: a fast short-input PRF".

    >>> from raffia.data.siphash import siphash
    >>> siphash(torch.tensor([[0.1, 0.2], [0.3, 0.4]]))
    tensor([-4669941682990263259, -3778166555168484291])
    >>> bool(siphash(torch.tensor([0.0])) == siphash(torch.tensor([-0.0])))
    True

    Several hashes of each row, written side by side:

    >>> hashes = torch.empty(2, 2, dtype=torch.int64)
    >>> _ = siphash(torch.tensor([1, 2]), out=hashes[:, 0])
    >>> _ = siphash(torch.tensor([True, True]), out=hashes[:, 1])
    """
    k0, k1 = checked_key(key)
    return hashed(rows, k0, k1, checked_rounds(rounds)[0], normalize, out)


def hashed(
    rows: Tensor, k0: int, k1: int, compressions: int, normalize: bool, out: Tensor | None = None
) -> Tensor:
    """`siphash` with arguments known to be right: a key of signed halves, one of the variants."""
    if has_address(rows):
        return _hashed(rows, k0, k1, compressions, normalize, out)
    # Graphs and fake tensors know the operator by its declared result. The key goes as text, for a
    # graph would take integers for sizes that may change.
    hashes = torch.ops.raffia.siphash(rows, f"{k0} {k1} {compressions}", normalize)
    if out is None:
        return hashes
    _check_out(out, rows)
    return out.copy_(hashes)


def _hashed(
    rows: Tensor, k0: int, k1: int, compressions: int, normalize: bool, out: Tensor | None = None
) -> Tensor:
    rows = plain(rows)
    count = rows.shape[0]
    if out is None:
        out = rows.new_empty(count, dtype=torch.int64)
    else:
        _check_out(out, rows)
    if not count or rows.is_meta:
        return out
    compiled = kernels.rows if rows.is_cpu else None
    if compiled is None:
        return _tensor_hashes(rows, k0, k1, compressions, normalize, out)
    size = rows.itemsize
    bits, largest, nan = folding(rows.dtype, normalize)
    compiled.hash_rows(
        rows.data_ptr(),
        rows.stride()[0] * size,
        count,
        rows.numel() // count * size,
        bits,
        largest,
        nan,
        k0,
        k1,
        compressions,
        compressions + 2,
        out.data_ptr(),
        8 * out.stride()[0],
    )
    return out


def _operator(rows: Tensor, parameters: str, normalize: bool) -> Tensor:
    k0, k1, compressions = map(int, parameters.split())
    return _hashed(rows, _signed(k0), _signed(k1), compressions, normalize)


def _fake(rows: Tensor, parameters: str, normalize: bool) -> Tensor:
    return rows.new_empty(rows.shape[:1], dtype=torch.int64)


torch.library.define("raffia::siphash", "(Tensor rows, str parameters, bool normalize) -> Tensor")
torch.library.impl("raffia::siphash", "CompositeExplicitAutograd", _operator)
torch.library.register_fake("raffia::siphash", _fake)


def _check_out(out: Tensor, rows: Tensor) -> None:
    if out.dtype != torch.int64 or out.shape != rows.shape[:1] or out.device != rows.device:
        raise ValueError(
            f"out must be int64 [{len(rows)}] on {rows.device}; got {out.dtype} {list(out.shape)} "
            f"on {out.device}"
        )


def checked_key(key: tuple[int, int]) -> tuple[int, int]:
    """The two halves of a 128-bit key as signed integers.

    >>> from raffia.data.siphash import checked_key
    >>> checked_key((0, 2**64 - 1))
    (0, -1)
    """
    halves = tuple(key) if isinstance(key, Sequence) else ()
    if len(halves) != 2 or not all(
        isinstance(half, int) and -(1 << 63) <= half <= _WORD for half in halves
    ):
        raise ValueError(f"key must be two 64-bit integers, such as key=(0, 0); got {key!r}")
    return _signed(halves[0]), _signed(halves[1])


def checked_rounds(rounds: tuple[int, int]) -> tuple[int, int]:
    """The numbers of rounds for each word and at the end, if they are one of the two variants.

    >>> from raffia.data.siphash import checked_rounds
    >>> checked_rounds((2, 4))
    (2, 4)
    """
    for variant in _VARIANTS:
        if rounds == variant:
            return variant
    raise ValueError(f"rounds must be (1, 3) or (2, 4); got {rounds!r}")


def _signed(word: int) -> int:
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


# The version in tensor operations: sums of int64 are modulo 2^64, as they must be.


def _tensor_hashes(
    rows: Tensor, k0: int, k1: int, compressions: int, normalize: bool, out: Tensor
) -> Tensor:
    chunk = 1 << 13 if rows.is_cpu else 1 << 20  # keeps the state in the cache; bounds the memory
    for part, hashes in zip(rows.split(chunk), out.split(chunk), strict=True):
        words = list(row_words(part, normalize=normalize).unbind(1))
        num_bytes = row_width(part)
        length = torch.full_like(hashes, _signed(num_bytes << 56))
        words.append(length | words.pop() if num_bytes % 8 else length)
        keys = (k0, k1, k0, k1)
        v = [torch.full_like(length, _signed(a ^ k)) for a, k in zip(_START, keys, strict=True)]
        for word in words:
            v[3] ^= word
            v = _rounds(v, compressions)
            v[0] ^= word
        v[2] ^= 0xFF
        v = _rounds(v, compressions + 2)
        hashes.copy_(v[0] ^ v[1] ^ v[2] ^ v[3])
        hashes.masked_fill_(hashes == -1, -2)
    return out


def _rounds(v: list[Tensor], rounds: int) -> list[Tensor]:
    v0, v1, v2, v3 = v
    for _ in range(rounds):
        v0 += v1
        v2 += v3
        v1, v3 = _rotated(v1, 13), _rotated(v3, 16)
        v1 ^= v0
        v3 ^= v2
        v0 = _rotated(v0, 32)
        v0 += v3
        v2 += v1
        v3, v1 = _rotated(v3, 21), _rotated(v1, 17)
        v3 ^= v0
        v1 ^= v2
        v2 = _rotated(v2, 32)
    return [v0, v1, v2, v3]


def _rotated(x: Tensor, left: int) -> Tensor:
    """`x` rotated to the left; its memory is used up."""
    high = x << left
    x >>= 64 - left
    x &= (1 << left) - 1  # the shift filled up with the sign
    high |= x
    return high
