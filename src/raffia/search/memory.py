"""Memory of a search: new arrays, in large pages where the system has them; and arrays for kernels.

A search writes each row once, so most of the time that large arrays cost is the system's handing
out of pages, 4 KB at a time. Asking for pages of 2 MB makes that about five times cheaper.
"""

import math
import mmap
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

LARGE = 1 << 21  # bytes; below, the allocator's memory is warm and pages do not matter
ALIGNED = 64  # bytes; a cache line
CACHE_LIMIT = 1 << 26  # bytes in a thread; a larger search takes long for other reasons


def new_memory(shape: tuple[int, ...], dtype: torch.dtype, device: Any = "cpu") -> Tensor:
    """An uninitialised tensor, like torch.empty.

    >>> new_memory((2, 3), torch.float32).shape
    torch.Size([2, 3])
    >>> new_memory((1 << 20,), torch.float32).fill_(2.0).sum()
    tensor(2097152.)
    """
    num = math.prod(shape)
    pages = _pages(num * dtype.itemsize, device)
    if pages is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(pages, dtype=dtype, count=num).view(shape)


class Arena:
    """Uninitialised tensors side by side, in memory that the thread's next arena reuses.

    What is handed back by `release` must not be read any more. A thread keeps one arena of at most
    `CACHE_LIMIT` bytes, and none while it is used: a search within a search gets separate memory.

    >>> arena = Arena([((2, 3), torch.zeros(1)), ((4,), torch.zeros(1).int())])
    >>> [tensor.shape for tensor in arena.tensors]
    [torch.Size([2, 3]), torch.Size([4])]
    >>> arena.release()
    """

    def __init__(self, like: Sequence[tuple[tuple[int, ...], Tensor]]) -> None:
        sizes = [math.prod(shape) * other.element_size() for shape, other in like]
        starts = list(accumulate([-(-size // ALIGNED) * ALIGNED for size in sizes], initial=0))
        is_large = starts[-1] >= LARGE and all(other.device.type == "cpu" for _, other in like)
        self._pages = _cached_pages(starts[-1]) if is_large else None
        if self._pages is None:
            self.tensors = [other.new_empty(shape) for shape, other in like]
            return
        self.tensors = [
            torch.frombuffer(
                self._pages, dtype=other.dtype, count=math.prod(shape), offset=start
            ).view(shape)
            if size
            else other.new_empty(shape)
            for (shape, other), size, start in zip(like, sizes, starts[:-1], strict=True)
        ]

    def release(self) -> None:
        """Release the memory, so that the thread's next arena can reuse it."""
        if self._pages is not None and len(self._pages) <= CACHE_LIMIT:
            _thread.pages = self._pages
        self._pages, self.tensors = None, []


_thread = threading.local()


def _cached_pages(size: int) -> mmap.mmap | None:
    cached: mmap.mmap | None = getattr(_thread, "pages", None)
    if cached is not None and size <= len(cached) <= 4 * size:
        _thread.pages = None
        return cached
    return _pages(size, "cpu")


def _pages(size: int, device: Any) -> mmap.mmap | None:
    """Large pages; None where they would not pay or the system has none."""
    if size < LARGE or torch.device(device).type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        pages.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without large pages: the memory is as good, only slower to get
        return None
    return pages


def plain(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tensor itself if it is already plain, with this dtype and device; otherwise a copy.

    >>> plain(torch.ones(2, 3).t(), torch.float32, torch.device("cpu")).is_contiguous()
    True
    """
    if tensor.dtype == dtype and tensor.device == device and is_plain(tensor):
        return tensor
    return tensor.to(device, dtype).resolve_conj().resolve_neg().contiguous()


def is_plain(tensor: Tensor) -> bool:
    """Whether memory holds the final values: no strides, no pending sign or conjugate."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
