"""All entries in one buffer: one copy to a device, one block to share or to send."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from raffia.tensordict.build import as_device
from raffia.tensordict.consolidated import mapped_block, padded, pieces, put_together, write_block
from raffia.tensordict.convert import synchronise
from raffia.tensordict.copies import _replaced
from raffia.tensordict.disk import TensorDictFuture
from raffia.tensordict.node import Device


def consolidate(
    td: Any,
    filename: Any = None,
    *,
    num_threads: int = 0,
    device: Device = None,
    non_blocking: bool = False,
    inplace: bool = False,
    return_early: bool = False,
    use_buffer: bool = False,
    share_memory: bool = False,
    pin_memory: bool = False,
    metadata: bool = False,
) -> Any:
    """The container with all its entries in one buffer, locked; itself, if it is so already.

    It takes one copy to a device, and is one block to share or to send.

    filename: a file for the buffer, which is mapped: what is written into the entries is in it.
        `TensorDict.from_consolidated(filename)` reads it.
    num_threads: so many threads copy.
    device: where the buffer is made.
    inplace: replace the entries of this container.
    return_early: with more than one thread, return a future at once, whose `result()` is the
        container.
    use_buffer: keep the buffer in memory, and write the file once.
    share_memory, pin_memory: where on the CPU the buffer lies.
    metadata: keep what it takes to pickle the container as one buffer.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.ones(2), b=dict(c=[1, 2])).consolidate()
    >>> td["a"].untyped_storage().data_ptr() == td["b", "c"].untyped_storage().data_ptr()
    True
    """
    early = return_early and num_threads > 1
    if early and (use_buffer or non_blocking):
        raise ValueError("consolidate: return_early goes with neither use_buffer nor non_blocking")
    options = (filename, num_threads, device, non_blocking, use_buffer, share_memory, pin_memory)
    if _is_block(td, filename, device, share_memory, pin_memory, metadata):
        return td
    kept = metadata or filename is not None
    if not early:
        return _finished(td, _block(td, *options), device, inplace, kept)
    background = ThreadPoolExecutor(1)
    made: Any = background.submit(_block, td, *options)
    background.shutdown(wait=False)
    return TensorDictFuture(made, lambda: _finished(td, made.result(), device, inplace, kept))


def _is_block(
    td: Any, filename: Any, device: Any, share_memory: bool, pin_memory: bool, metadata: bool
) -> bool:
    """Whether a container is consolidated already, in the way that is asked for."""
    if filename is not None or not td._locked or not is_consolidated(td):
        return False
    buffer = td._buffer
    if device is not None and as_device(device) != buffer.device:
        return False
    if metadata and td._spans is None and not any([x.is_nested for x in td._leaves([])]):
        return False
    return not (share_memory and not buffer.is_shared() or pin_memory and not buffer.is_pinned())


def _block(
    td: Any,
    filename: Any,
    num_threads: int,
    device: Any,
    non_blocking: bool,
    use_buffer: bool,
    share_memory: bool,
    pin_memory: bool,
) -> tuple[Tensor, list[int] | None, list[Tensor]]:
    """A buffer with all entries, where each begins in it, and the entries as views of it.

    None where one is nested, and has several places: a container of such is pickled entry by entry.
    """
    whole = [leaf.detach() for leaf in td._leaves([])]
    leaves, places = pieces(whole)
    for leaf in leaves:
        if leaf.layout is not torch.strided:
            raise TypeError(
                f"consolidate: an entry is a tensor of layout {leaf.layout}, which is not one "
                "block of memory; to_dense() makes a plain tensor of it"
            )
    spans = []
    total = 0
    for leaf in leaves:
        spans.append(total)
        total += padded(leaf.numel() * leaf.element_size())
    sources = {leaf.device for leaf in leaves}
    where = (
        as_device(device)
        if device is not None
        else sources.pop()
        if len(sources) == 1 and filename is None
        else torch.device("cpu")
    )
    if filename is not None:
        if where.type != "cpu":
            raise ValueError(f"consolidate: a file is mapped on the CPU, not on {where}")
        assert write_block(td, filename) == spans
    if filename is not None and not use_buffer:
        buffer = mapped_block(filename, total, shared=True)
    else:
        buffer = torch.zeros(total, dtype=torch.uint8, device=where, pin_memory=pin_memory)
        if share_memory:
            buffer.share_memory_()
    parts = []
    for leaf, start in zip(leaves, spans, strict=True):
        size = leaf.numel() * leaf.element_size()
        parts.append(buffer[start : start + size].view(leaf.dtype).view(leaf.shape))

    def fill(part: Tensor, leaf: Tensor) -> None:
        part.copy_(leaf, non_blocking=non_blocking)

    def made() -> tuple[Tensor, list[int] | None, list[Tensor]]:
        if len(leaves) == len(whole):
            return buffer, spans, parts
        return buffer, None, list(put_together(whole, places, parts))

    if filename is not None and not use_buffer:
        return made()
    if num_threads > 1:
        with ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(fill, parts, leaves))
    else:
        for part, leaf in zip(parts, leaves, strict=True):
            fill(part, leaf)
    if non_blocking and where.type == "cpu":
        synchronise(td)
    return made()


def _finished(
    td: Any,
    block: tuple[Tensor, list[int] | None, list[Tensor]],
    device: Any,
    inplace: bool,
    metadata: bool,
) -> Any:
    """The container over the parts of a buffer."""
    buffer, spans, parts = block
    out = td._rebuild(iter(parts))
    if device is not None:
        out._set_device(buffer.device)
    if inplace:
        out = _replaced(td, out)
    out._buffer = buffer
    out._spans = spans if metadata else None
    return out.lock_()


def in_spans(td: Any) -> bool:
    """Whether each leaf of a consolidated container still lies where its span says."""
    leaves = td._leaves([])
    if len(leaves) != len(td._spans):
        return False
    start = td._buffer.data_ptr()
    return all(
        [
            leaf.is_contiguous() and (not leaf.numel() or leaf.data_ptr() == start + at)
            for leaf, at in zip(leaves, td._spans, strict=True)
        ]
    )


def reduce_consolidated(td: Any) -> Any:
    """How a container consolidated with its metadata is pickled: its buffer, and the empty tree."""
    tree = td._rebuild(iter([torch.empty_like(leaf, device="meta") for leaf in td._leaves([])]))
    return from_buffer, (tree, td._buffer, td._spans)


def from_buffer(tree: Any, buffer: Tensor, spans: list[int]) -> Any:
    """A consolidated container from its buffer, and a tree that says the shapes and dtypes."""
    parts = []
    for leaf, start in zip(tree._leaves([]), spans, strict=True):
        size = leaf.numel() * leaf.element_size()
        parts.append(buffer[start : start + size].view(leaf.dtype).view(leaf.shape))
    out = tree._rebuild(iter(parts))
    out._buffer, out._spans = buffer, spans
    return out.lock_()


def is_consolidated(td: Any) -> bool:
    """Whether all entries lie in one buffer.

    >>> from raffia import TensorDict
    >>> TensorDict(a=0).is_consolidated(), TensorDict(a=0).consolidate().is_consolidated()
    (False, True)
    """
    if td._buffer is None:
        return False
    pointer = td._buffer.untyped_storage().data_ptr()
    parts = pieces(td._leaves([]))[0]
    return all([leaf.untyped_storage().data_ptr() == pointer for leaf in parts])
