"""Functions on keys, types and shapes in `raffia`, for programs written for tensordict."""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Buffer as Buffer

from raffia import tensordict as container
from raffia.tensordict.index import EllipsisError, dims_of, indexed_size
from raffia.tensordict.keys import is_key
from raffia.tensordict.rows import isin as isin
from raffia.tensordict.rows import remove_duplicates as remove_duplicates
from raffia.tensordict.values import LinkedList as LinkedList

NestedKey = container.NestedKey
assert_allclose_td = container.assert_allclose_td
assert_close = container.assert_close
capture_non_tensor_stack = container.capture_non_tensor_stack
expand_as_right = container.expand_as_right
expand_right = container.expand_right
get_printoptions = container.get_printoptions
is_bool = container.is_bool
is_floating = container.is_floating
is_inexact = container.is_inexact
is_integer = container.is_integer
is_non_tensor = container.is_non_tensor
is_tensorclass = container.is_tensorclass
lazy_legacy = container.lazy_legacy
list_to_stack = container.list_to_stack
set_capture_non_tensor_stack = container.set_capture_non_tensor_stack
set_lazy_legacy = container.set_lazy_legacy
set_list_to_stack = container.set_list_to_stack
set_printoptions = container.set_printoptions
unravel_key = container.unravel_key
unravel_key_list = container.unravel_key_list
unravel_key_to_tuple = container.unravel_key_to_tuple

logger = logging.getLogger("raffia")

_is_non_tensor = is_non_tensor
_is_tensorclass = is_tensorclass
_unravel_key_to_tuple = unravel_key_to_tuple
is_nested_key = is_key
_zip_strict = functools.partial(zip, strict=True)


def is_seq_of_nested_key(seq: Any) -> bool:
    """Whether `seq` is a sequence of keys, each of them a string or a nested tuple of strings.

    >>> is_seq_of_nested_key(["a", ("b", "c")]), is_seq_of_nested_key([0])
    (True, False)
    """
    return isinstance(seq, Sequence) and all([is_key(key) for key in seq])


def _getitem_batch_size(batch_size: Sequence[int], index: Any) -> torch.Size:
    """The batch size of `td[index]` for a container `td` of the given batch size.

    >>> _getitem_batch_size([4, 3, 2], (None, ..., 0))
    torch.Size([1, 4, 3])
    """
    return indexed_size(torch.Size(batch_size), index)


def _maybe_correct_neg_dim(dim: int, shape: torch.Size | None, ndim: int | None = None) -> int:
    """A dimension counted from the front; `ndim` stands for the length of `shape`.

    >>> _maybe_correct_neg_dim(-1, torch.Size([2, 3]))
    1
    """
    count = len(shape) if shape is not None else ndim
    if count is None:
        raise TypeError("give the shape, or its number of dimensions as ndim")
    if not -count <= dim < count:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-count}, {count - 1}], "
            f"but got {dim})"
        )
    return dim % count


def unravel_keys(*keys: Any) -> NestedKey | tuple[NestedKey, ...]:
    """`unravel_key` of each of several keys; of one key, that key.

    >>> unravel_keys(("a", ("b",))), unravel_keys("a", ("b", ("c",)))
    (('a', 'b'), ('a', ('b', 'c')))
    """
    return unravel_key(keys[0]) if len(keys) == 1 else tuple([unravel_key(key) for key in keys])


def convert_ellipsis_to_idx(idx: Any, batch_size: Sequence[int]) -> Any:
    """Write out the `...` of an index.

    Raises RuntimeError for more indices than dimensions, or for a second `...`.

    >>> convert_ellipsis_to_idx((..., 0), [4, 3, 2])
    (slice(None, None, None), slice(None, None, None), 0)
    """
    parts = idx if isinstance(idx, tuple) else (idx,)
    dots = [i for i, part in enumerate(parts) if part is ...]
    if not dots:
        return idx
    missing = len(batch_size) - sum([dims_of(part) for part in parts if part is not ...])
    if len(dots) > 1:
        raise EllipsisError(f"An index can only have one ellipsis at most, got {idx!r}")
    if missing < 0:
        raise RuntimeError(f"{idx!r} is not an index of {len(batch_size)} dimensions")
    return (*parts[: dots[0]], *[slice(None)] * missing, *parts[dots[0] + 1 :])


def infer_size_impl(shape: Sequence[int], numel: int) -> list[int]:
    """Resolve a shape for `numel` elements, in which one size may be -1.

    Raises RuntimeError if no such shape exists.

    >>> infer_size_impl([2, -1], 6)
    [2, 3]
    """
    if not numel and -1 in shape and 0 in shape:
        raise RuntimeError(f"cannot reshape 0 elements to {list(shape)}: the -1 can be any size")
    return list(torch.empty(numel, device="meta").reshape(*shape).shape)


def strtobool(value: str) -> bool:
    """The truth value that a word stands for, such as of an environment variable.

    Raises ValueError for other words.

    >>> strtobool("yes"), strtobool("Off")
    (True, False)
    """
    word = value.lower()
    if word in ("y", "yes", "t", "true", "on", "1"):
        return True
    if word in ("n", "no", "f", "false", "off", "0"):
        return False
    raise ValueError(f"{value!r} is neither yes nor no")
