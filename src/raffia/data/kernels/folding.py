"""One zero and one NaN for the floating-point numbers in 64-bit words."""

from typing import Any

import numba

from raffia.jit.lanes import (
    folded_8,
    folded_16,
    folded_32,
    folded_64,
)

inline = numba.njit(forceinline=True)  # part of the kernel that calls it


@inline
def folded(
    words: Any,  # lanes of words, or one word as int64
    bits: int,  # size of a number: 8, 16, 32, 64; 0 leaves the words as they are
    largest: int,  # the bits of infinity in each number of a word
    nan: int,  # the bits of NaN in each number of a word
) -> Any:
    """The words with -0.0 as 0.0, and each NaN as `nan`."""
    if bits == 32:
        return folded_32(words, largest, nan)
    if bits == 64:
        return folded_64(words, largest, nan)
    if bits == 16:
        return folded_16(words, largest, nan)
    if bits == 8:
        return folded_8(words, largest, nan)
    return words
