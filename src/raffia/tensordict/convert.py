"""Device, dtype, memory, gradients; copies; and other forms of the same content."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from raffia.tensordict import consolidated, kinds
from raffia.tensordict.build import as_device
from raffia.tensordict.copies import _replaced, synchronise
from raffia.tensordict.node import BatchSize, Container, Device, Node
from raffia.tensordict.printing import in_shared_memory
from raffia.tensordict.views import every

CastFilter = Callable[[tuple[str, ...], Tensor], bool]


def to(
    td: Container,
    *args: Any,
    inplace: bool = False,
    batch_size: BatchSize = None,
    cast_filter: CastFilter | None = None,
    non_blocking_pin: bool = False,
    num_threads: int | None = None,
    **kwargs: Any,
) -> Container:
    """The container on another device or with another dtype; itself if nothing changes.

    Called like `Tensor.to`: `to(device)`, `to(dtype)`, `to(device, dtype, non_blocking)`,
    `to(other)`; of another container it takes the device and, if all its entries have one dtype,
    that. In a `with` statement, changes are written back.

    batch_size: that of the result.
    inplace: replace the entries of this container.
    cast_filter: `cast_filter(key, tensor)`, with the key as a tuple, selects the entries that get
        another dtype; the others are only moved.
    non_blocking_pin: copy the entries to pinned memory first, on `num_threads` threads (this one,
        if None or 0), so that a GPU can fetch them while the CPU works on.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2)).to(torch.float64)["a"].dtype, TensorDict(a=0).to("cpu").device
    (torch.float64, device(type='cpu'))
    """
    if len(args) == 1 and not kwargs and args[0].__class__ is torch.dtype and batch_size is None:
        device, dtype, non_blocking, memory_format = None, args[0], False, None
    else:
        if args and isinstance(args[0], type) and issubclass(args[0], Node):
            return td if isinstance(td, args[0]) else args[0]._from_entries(td, None, None)
        if batch_size is not None:
            if hasattr(td, "tensordicts"):
                raise TypeError(
                    "to(batch_size=...): the batch size of a lazy stack is that of its members; "
                    "td.to_tensordict() returns a container whose batch size can be changed"
                )
            pin: dict[str, Any] = dict(non_blocking_pin=non_blocking_pin, num_threads=num_threads)
            out = to(td, *args, cast_filter=cast_filter, **pin, **kwargs)
            out = out.copy() if out is td else out
            out.batch_size = batch_size
            return out
        other = kwargs.pop("other", None)
        if other is None and args and isinstance(args[0], Node):
            other, args = args[0], args[1:]
        if isinstance(other, Node):
            like: Any = other
            kwargs = {"device": like._device, "dtype": like.dtype, **kwargs}
        elif isinstance(other, Tensor):
            args = (other, *args)
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        if not args and not kwargs.keys() - {"non_blocking"}:
            return unmoved(td)
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None:
        device = as_device(device)
    if dtype is None and (device is None or device == td._device):
        return unmoved(td)
    source = td
    if non_blocking_pin and device is not None and device.type == "cuda":
        source, non_blocking = pin_memory(td, num_threads or None), True
    form: Any = {} if memory_format is None else {"memory_format": memory_format}

    def moved(leaf: Tensor, dtype: torch.dtype | None = dtype) -> Tensor:
        return leaf.to(device, dtype, non_blocking, **form)

    if cast_filter is not None and dtype is not None:
        out = source.named_apply(
            lambda key, leaf: moved(
                leaf,
                dtype if cast_filter(key if isinstance(key, tuple) else (key,), leaf) else None,
            ),
            nested_keys=True,
            filter_empty=False,
        )
    elif form or device is not None and dtype is not None:
        out = source._map(moved)
    elif device is None:
        out = source._cast(dtype)
    elif all([leaf.device == device for leaf in source._leaves([])]):
        out = source._shallow()
        out._buffer = source._buffer
    elif source._locked and (spans := consolidated.spans(source)) is not None:
        block = source._buffer.to(device, non_blocking=non_blocking)
        out = consolidated.from_buffer(source, block, spans)
    else:
        out = source._map(moved)
    if device is not None:
        out._set_device(device)
        if non_blocking and device.type == "cpu":
            synchronise(td)
    if inplace:
        if device is not None:
            td._set_device(device)
        return _replaced(td, out)
    out._origin = ("to", weakref.ref(td))
    return out.lock_() if td._locked else out


def unmoved(td: Container) -> Container:
    """The container itself, usable in a `with` statement like a moved one."""
    td._origin = ("same",)
    return td


def cpu(td: Container, **options: Any) -> Container:
    """The container on the CPU.

    >>> from raffia import TensorDict
    >>> TensorDict(a=0).cpu().device
    device(type='cpu')
    """
    return td.to(torch.device("cpu"), **options)


def cuda(td: Container, device: Device = None, **options: Any) -> Container:
    """The container on a CUDA device, the current one if not given.

    >>> from raffia import TensorDict
    >>> TensorDict(a=0).cuda().is_cuda if torch.cuda.is_available() else True
    True
    """
    index = (device,) if isinstance(device, int) else ()
    name: Any = "cuda" if device is None or index else device
    return td.to(torch.device(name, *index), **options)


def type_(
    td: Container, dst_type: torch.dtype, *, cast_filter: CastFilter | None = None
) -> Container:
    """The container with all entries cast to a dtype; `cast_filter(key, tensor)` selects them.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2)).type(torch.int64)["a"].dtype
    torch.int64
    """
    if cast_filter is not None:
        return to(td, dst_type, cast_filter=cast_filter)
    out = td._cast(dst_type)
    return out.lock_() if td._locked else out


CASTS = """float float16 float32 float64 half double bfloat16 complex32 complex64 complex128
int int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool""".split()


def caster(name: str) -> Callable[..., Any]:
    """The method `name`, which casts to the dtype that torch calls so."""
    dtype = getattr(torch, name)

    def cast(td: Container, *, cast_filter: CastFilter | None = None) -> Container:
        return type_(td, dtype, cast_filter=cast_filter)

    cast.__name__ = cast.__qualname__ = name
    cast.__doc__ = (
        f"The container with all entries, or those for which `cast_filter(key, tensor)` is true, "
        f"cast to {dtype}.\n\n"
        f"    >>> from raffia import TensorDict\n"
        f"    >>> TensorDict(a=torch.zeros(2)).{name}()['a'].dtype\n    {dtype}\n    "
    )
    return cast


def dtype(td: Any) -> torch.dtype | None:
    """The dtype of all entries, None if they have several.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2)).dtype
    torch.float32
    """
    found = {leaf.dtype for leaf in td._leaves([])}
    return found.pop() if len(found) == 1 else None


def is_floating_point(td: Any) -> bool:
    """Whether all entries have a floating point dtype.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2)).is_floating_point()
    True
    """
    return all([leaf.is_floating_point() for leaf in td._leaves([])])


def is_cuda(td: Any) -> bool:
    """Whether the device is a CUDA device.

    >>> from raffia import TensorDict
    >>> TensorDict().is_cuda
    False
    """
    return td._device is not None and td._device.type == "cuda"


def is_cpu(td: Any) -> bool:
    """Whether the device is the CPU.

    >>> from raffia import TensorDict
    >>> TensorDict(device="cpu").is_cpu
    True
    """
    return td._device is not None and td._device.type == "cpu"


def is_meta(td: Any) -> bool:
    """Whether the device is "meta", where tensors have a shape but no content.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2), device="meta").is_meta
    True
    """
    return td._device is not None and td._device.type == "meta"


def clear_device_(td: Container) -> Container:
    """Set the device to None, also in nested containers; entries stay where they are.

    >>> from raffia import TensorDict
    >>> TensorDict(device="cpu").clear_device_().device is None
    True
    """
    td._set_device(None)
    return td


def auto_device_(td: Container) -> Container:
    """Set the device to the one of all entries, or to None if they are on several.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2)).auto_device_().device
    device(type='cpu')
    """
    found = {leaf.device for leaf in td._leaves([])}
    td._set_device(found.pop() if len(found) == 1 else None)
    return td


def zero_(td: Container) -> Container:
    """Fill all entries with zeros.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.ones(2)).zero_()["a"]
    tensor([0., 0.])
    """
    for leaf in td._leaves([]):
        leaf.zero_()
    return td


def copy_(td: Container, tensordict: Node, non_blocking: bool = False) -> Container:
    """Write the entries of another container into the tensors of this one.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.ones(2)).copy_(TensorDict(a=torch.zeros(2)))["a"]
    tensor([0., 0.])
    """
    return td.update_(tensordict, non_blocking=non_blocking)


def pin_memory(td: Container, num_threads: int | None = None, inplace: bool = False) -> Container:
    """A copy in page-locked memory, from which copies to a GPU are faster.

    Where there is no GPU to pin for, the container itself.

    num_threads: so many threads copy.
    inplace: replace the tensors of this container by the copies.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.ones(2))
    >>> (td.pin_memory() if torch.cuda.is_available() else td)["a"]
    tensor([1., 1.])
    """
    if num_threads:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(num_threads) as threads:
            leaves = list(threads.map(Tensor.pin_memory, td._leaves([])))
        out = td._rebuild(iter(leaves))
    else:
        out = td._map(Tensor.pin_memory)
    return _replaced(td, out) if inplace else out


def pin_memory_(td: Container, num_threads: int | None = None) -> Container:
    """Replace all entries by copies in page-locked memory.

    >>> from raffia import TensorDict
    >>> TensorDict().pin_memory_().is_empty()
    True
    """
    return pin_memory(td, num_threads, inplace=True)


def share_memory_(td: Container) -> Container:
    """Move all entries to shared memory, visible to other processes; locks the container.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.ones(2)).share_memory_().is_shared()
    True
    """
    if td.is_memmap():
        raise RuntimeError(
            "shared memory and memory-mapped files are mutually exclusive; this container is mapped"
        )
    for leaf in td._leaves([]):
        if leaf.device.type == "cpu":
            leaf.share_memory_()
    return td.lock_()


def is_shared(td: Any) -> bool:
    """Whether all entries are in shared memory (those on a GPU always are).

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.ones(2)).is_shared()
    False
    """
    if td._device is not None and td._device.type != "cpu":
        return td._device.type == "cuda"
    try:
        for value in td._d.values() if td.__class__ is td._plain else ():
            if value.__class__ is Tensor and not value.untyped_storage().is_shared():
                return False
            break  # mostly the first one decides
    except RuntimeError:  # it has no memory
        return False
    return every(td, in_shared_memory) and bool(td._leaves([])) and not td.is_memmap()


def record_stream(td: Container, stream: Any) -> Container:
    """Tell the memory allocator that the entries are used on a CUDA stream.

    >>> from raffia import TensorDict
    >>> TensorDict().record_stream(None).is_empty()
    True
    """
    for leaf in td._leaves([]):
        leaf.record_stream(stream)
    return td


def data_ptr(td: Any, *, storage: bool = False) -> Node:
    """A container of the addresses of all entries as integers; `storage`: of their storages.

    It has no batch dimensions. The members of a lazy stack are nested in it as "0", "1", ...

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.ones(2))
    >>> td.data_ptr()["a"] == td["a"].data_ptr()
    tensor(True)
    """

    def addresses(node: Any) -> dict[str, Any]:
        members = getattr(node, "tensordicts", None)
        entries = node._entries() if members is None else {str(i): m for i, m in enumerate(members)}
        out: dict[str, Any] = {}
        for name, value in entries.items():
            if isinstance(value, Tensor):
                start = value.untyped_storage() if storage else value
                out[name] = start.data_ptr()
            elif not value._is_data() and (nested := addresses(value)):
                out[name] = nested
        return out

    out: Node = kinds.TensorDict(addresses(td), device="cpu")
    return out


def numel(td: Any) -> int:
    """The number of rows: the product of the batch size, at least 1.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[2, 3]).numel()
    6
    """
    return max(1, math.prod(td._batch_size))


def bytes_(td: Any, *, count_duplicates: bool = True) -> int:
    """The size of all entries in bytes.

    count_duplicates: count a tensor that is stored under two keys twice.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.ones(2)).bytes()
    8
    """
    return sum([leaf.numel() * leaf.element_size() for leaf in _distinct(td, count_duplicates)])


def param_count(td: Any, *, count_duplicates: bool = True) -> int:
    """The number of elements of all entries.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.ones(2, 3)).param_count()
    6
    """
    return sum([leaf.numel() for leaf in _distinct(td, count_duplicates)])


def _distinct(td: Any, count_duplicates: bool) -> list[Tensor]:
    leaves = td._leaves([])
    return leaves if count_duplicates else list({id(leaf): leaf for leaf in leaves}.values())
