"""Device, dtype, memory, gradients; copies; and other forms of the same content."""

from __future__ import annotations

import collections
import copy as copier  # `copy` is a method here
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raffia.tensordict.build import as_device
from raffia.tensordict.entries import (
    NO_DEFAULT,
    converted,
    copied,
    every,
    get,
    holder,
    some,
    writes,
)
from raffia.tensordict.keys import NestedKey, dotted, unravel_key_to_tuple
from raffia.tensordict.node import Node
from raffia.tensordict.values import flat as flat_values

# ------------------------------------------------------------------------ device and dtype


CastFilter = Callable[[tuple[str, ...], Tensor], bool]


def to(
    td: Any,
    *args: Any,
    inplace: bool = False,
    batch_size: Any = None,
    cast_filter: CastFilter | None = None,
    non_blocking_pin: bool = False,
    num_threads: int | None = None,
    **kwargs: Any,
) -> Any:
    """The container on another device or with another dtype; itself if nothing changes.

    Called like `Tensor.to`: `to(device)`, `to(dtype)`, `to(device, dtype, non_blocking)`,
    `to(other)`; of another container it takes the device and, if all its entries have one dtype,
    that. In a `with` statement, changes are written back.

    batch_size: that of the result.
    inplace: replace the entries of this container.
    cast_filter: `cast_filter(key, tensor)`, with the key as a tuple, says which entries get another
        dtype; the others are only moved.
    non_blocking_pin: copy the entries to pinned memory first, on `num_threads` threads (this one,
        if None or 0), so that a GPU can fetch them while the CPU goes on.

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
                    "td.to_tensordict() gives a container of which it can be changed"
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
            kwargs = {"device": other._device, "dtype": other.dtype, **kwargs}
        elif isinstance(other, Tensor):
            args = (other, *args)
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        if not args and not kwargs.keys() - {"non_blocking"}:
            return _unmoved(td)
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None:
        device = as_device(device)
    if dtype is None and (device is None or device == td._device):
        return _unmoved(td)
    source = td
    if non_blocking_pin and device is not None and device.type == "cuda":
        source, non_blocking = pin_memory(td, num_threads or None), True
    if cast_filter is not None and dtype is not None:
        out = source.named_apply(
            lambda key, leaf: leaf.to(
                device,
                dtype if cast_filter(key if isinstance(key, tuple) else (key,), leaf) else None,
                non_blocking,
                **({} if memory_format is None else {"memory_format": memory_format}),
            ),
            nested_keys=True,
            filter_empty=False,
        )
    elif memory_format is not None:
        out = source._map(
            lambda leaf: leaf.to(device, dtype, non_blocking, memory_format=memory_format)
        )
    elif dtype is None and all([leaf.device == device for leaf in source._leaves([])]):
        out = source._shallow()
    elif dtype is None:
        out = source._map(
            lambda leaf: (
                leaf if leaf.device == device else leaf.to(device, non_blocking=non_blocking)
            )
        )
    elif device is None:
        out = source._cast(dtype)
    else:
        out = source._map(lambda leaf: leaf.to(device, dtype, non_blocking))
    if device is not None:
        out._set_device(device)
        if non_blocking and device.type == "cpu":
            synchronise(td)
    if inplace:
        if device is not None:
            td._set_device(device)
        for key, leaf in out.items(True, True):
            td.set(key, leaf)
        return td
    out._origin = ("to", weakref.ref(td))
    return out.lock_() if td._locked else out


def _unmoved(td: Any) -> Any:
    """The container itself, which can stand in a `with` statement as a moved one can."""
    td._origin = ("same",)
    return td


def synchronise(td: Any) -> None:
    """Wait for copies to the CPU that are under way, so that nobody reads half of one."""
    if torch.cuda.is_available() and any([leaf.is_cuda for leaf in td._leaves([])]):
        torch.cuda.current_stream().synchronize()


def cpu(td: Any, **options: Any) -> Any:
    """The container on the CPU.

    >>> from raffia import TensorDict
    >>> TensorDict(a=0).cpu().device
    device(type='cpu')
    """
    return to(td, torch.device("cpu"), **options)


def cuda(td: Any, device: Any = None, **options: Any) -> Any:
    """The container on a CUDA device, the current one if not given.

    >>> from raffia import TensorDict
    >>> TensorDict(a=0).cuda().is_cuda if torch.cuda.is_available() else True
    True
    """
    if device is None:
        return to(td, torch.device("cuda"), **options)
    return to(
        td,
        torch.device("cuda", device) if isinstance(device, int) else torch.device(device),
        **options,
    )


def type_(td: Any, dst_type: torch.dtype, *, cast_filter: CastFilter | None = None) -> Any:
    """The container with all entries cast to a dtype; `cast_filter(key, tensor)` says which.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2)).type(torch.int64)["a"].dtype
    torch.int64
    """
    if cast_filter is not None:
        return to(td, dst_type, cast_filter=cast_filter)
    out = td._cast(dst_type)
    return out.lock_() if td._locked else out


def caster(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    """The method `name`, which casts to `dtype`."""

    def cast(td: Any, *, cast_filter: CastFilter | None = None) -> Any:
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


def clear_device_(td: Any) -> Any:
    """Leave the device open, here and in what is nested; entries stay where they are.

    >>> from raffia import TensorDict
    >>> TensorDict(device="cpu").clear_device_().device is None
    True
    """
    td._set_device(None)
    return td


def auto_device_(td: Any) -> Any:
    """Set the device to the one of all entries, or leave it open if they have several.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2)).auto_device_().device
    device(type='cpu')
    """
    found = {leaf.device for leaf in td._leaves([])}
    td._set_device(found.pop() if len(found) == 1 else None)
    return td


# ------------------------------------------------------------------------ copies


def clone(td: Any, recurse: bool = True) -> Any:
    """A copy: of the tensors too, or with `recurse=False` of the structure only. Never locked.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.zeros(2))
    >>> td.clone()["a"] is td["a"], td.clone(recurse=False)["a"] is td["a"]
    (False, True)
    """
    return td._map(_clone) if recurse else td._shallow()


_clone = Tensor.clone


def copy(td: Any) -> Any:
    """A copy of the structure over the same tensors: `clone(recurse=False)`.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.zeros(2))
    >>> td.copy()["a"] is td["a"]
    True
    """
    return td._shallow()


def deepcopy(td: Any, memo: dict[Any, Any]) -> Any:
    if td.__class__ is td._plain:
        _clone_into(memo, [td])
    return _deep(td, memo)


def deepcopy_members(td: Any, memo: dict[Any, Any]) -> list[Any]:
    """Deep copies of the members of a lazy stack."""
    plain = [part.__class__ is td._plain for part in td.tensordicts]
    _clone_into(memo, [part for part, own in zip(td.tensordicts, plain, strict=True) if own])
    return [
        _deep(part, memo) if own and id(part) not in memo else copier.deepcopy(part, memo)
        for part, own in zip(td.tensordicts, plain, strict=True)
    ]


def _clone_into(memo: dict[Any, Any], tds: Iterable[Any]) -> None:
    """Enter copies of the plain tensors in these plain containers in the memo of a deep copy.

    Also those of their memory, where `Tensor.__deepcopy__` looks: views that are copied later share
    it. What a clone doesn't copy as `Tensor.__deepcopy__` would is left to that.
    """
    storages = memo.setdefault("torch", {})
    leaves: dict[int, Tensor] = {}  # by where their memory is
    for td in tds:
        _own_memory(td, memo, leaves)
    for place in storages.keys() & leaves.keys():  # copied already, or by another deep copy
        del leaves[place]
    values = [*leaves.values()]
    copies = _clones(values) if values else []
    memo.update(zip(map(id, values), copies, strict=True))
    storages.update(zip(leaves, map(Tensor.untyped_storage, copies), strict=True))


def _own_memory(td: Any, memo: dict[Any, Any], leaves: dict[int, Tensor]) -> None:
    """Find leaves that fill their memory, one for each memory."""
    for value in td._d.values():
        if value.__class__ is Tensor:
            if value.requires_grad or value.__dict__ or value.grad is not None:
                continue
            if id(value) in memo:
                continue
            try:
                storage = value.untyped_storage()
                if storage.nbytes() != value.nbytes or not value.is_contiguous():
                    continue
            except RuntimeError:  # of a layout that has no memory of its own
                continue
            if not value.dtype.is_complex or not value.is_conj():
                leaves.setdefault(storage._cdata, value)
        elif value.__class__ is td._plain and id(value) not in memo:
            _own_memory(value, memo, leaves)


def _deep(td: Any, memo: dict[Any, Any]) -> Any:
    entries: dict[str, Any] = {}
    for name, value in td._entries().items():
        found = memo.get(id(value))
        if found is None:
            plain = value.__class__ is td._plain
            found = _deep(value, memo) if plain else copier.deepcopy(value, memo)
        entries[name] = found
    out = memo[id(td)] = td._new(entries, td._batch_size, td._names)
    return out


_clones = getattr(torch, "_foreach_clone", lambda leaves: [leaf.clone() for leaf in leaves])


def contiguous(td: Any, *, canonical: bool = False, inplace: bool = False) -> Any:
    """A container whose tensors are contiguous; those that are already are not copied.

    canonical: copy also those with other strides in dimensions of size 1 than a fresh tensor has.
    inplace: put the copies in the place of the tensors of this container.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2, 3).t()).contiguous()["a"].is_contiguous()
    True
    """
    out = td._map(_canonical if canonical else Tensor.contiguous)
    return _replaced(td, out) if inplace else out


def _canonical(leaf: Tensor) -> Tensor:
    fresh = torch.empty(leaf.shape, device="meta").stride()
    return leaf if leaf.stride() == fresh else leaf.clone(memory_format=torch.contiguous_format)


def _replaced(td: Any, source: Any) -> Any:
    """Put the tensors of `source` in the place of those of `td`."""
    if hasattr(td, "tensordicts") and hasattr(source, "tensordicts"):
        for mine, new in zip(td.tensordicts, source.tensordicts, strict=True):
            _replaced(mine, new)
        return td
    for name, leaf in source._peek().items():
        mine = td._peek_str(name)
        if isinstance(leaf, Node) and not isinstance(leaf, Tensor):
            if not leaf._is_data():
                _replaced(mine, leaf)
        elif mine is not leaf:
            td.set(name, leaf)
    return td


def is_contiguous(td: Any) -> bool:
    """Whether all entries are contiguous.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2, 3).t()).is_contiguous()
    False
    """
    return every(td, Tensor.is_contiguous)


def empty(
    td: Any,
    recurse: bool = False,
    *,
    batch_size: Any = None,
    device: Any = NO_DEFAULT,
    names: Any = NO_DEFAULT,
) -> Any:
    """A container without entries, of the same batch size, device and names.

    recurse: with the nested containers, empty too.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2), batch_size=[2]).empty().batch_size
    torch.Size([2])
    """
    from raffia.tensordict.build import as_size

    entries = {}
    if recurse:
        for name, value in td._peek().items():
            if isinstance(value, Node) and not value._is_data():
                entries[name] = value.empty(recurse=True)
    out = td._new(entries, td._batch_size if batch_size is None else as_size(batch_size))
    if device is not NO_DEFAULT:
        out._set_device(None if device is None else as_device(device))
    if names is not NO_DEFAULT:
        out.names = names
    elif td._names is not None and out._batch_size == td._batch_size[: len(out._batch_size)]:
        out._set_names(list(td._names[: len(out._batch_size)]))
    return out


def to_tensordict(td: Any, *, retain_none: bool | None = None) -> Any:
    """A plain `TensorDict` with clones of all entries, nested containers too.

    retain_none: False leaves out entries that are None.

    >>> from raffia import TensorDict, lazy_stack
    >>> type(lazy_stack([TensorDict(a=1), TensorDict(a=2)]).to_tensordict()).__name__
    'TensorDict'
    """
    entries = {}
    for name, value in td._entries().items():
        if not isinstance(value, Node):
            entries[name] = value.clone()
        elif value._is_data():
            if retain_none is not False or value._unwrapped() is not None:
                entries[name] = value.clone()
        else:
            entries[name] = value.to_tensordict(retain_none=retain_none)
    return td._plain._make(entries, td._batch_size, td._device, td._names)


def to_lazystack(td: Any, dim: int = 0) -> Any:
    """The rows along `dim` as a lazy stack; views.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2), batch_size=[2]).to_lazystack().stack_dim
    0
    """
    ndim = len(td._batch_size)
    if not -ndim <= dim < ndim:
        raise IndexError(f"to_lazystack: dim {dim} is out of range for batch size {td._batch_size}")
    dim = dim % ndim
    return type(td).lazy_stack(list(td.unbind(dim)), dim)


def densify(td: Any, layout: torch.layout = torch.strided) -> Any:
    """The container with lazy stacks replaced by dense containers.

    Entries of unlike shape become nested tensors.

    >>> from raffia import TensorDict, lazy_stack
    >>> type(lazy_stack([TensorDict(a=1), TensorDict(a=2)]).densify()).__name__
    'TensorDict'
    """
    entries = {
        name: value
        if value.__class__ is Tensor or not isinstance(value, Node)
        else value.densify(layout)
        for name, value in td._entries().items()
    }
    if all([entries[name] is value for name, value in td._entries().items()]):
        return td
    return td._new(entries, td._batch_size, td._names)


def to_padded_tensor(td: Any, padding: float = 0.0, mask_key: NestedKey | None = None) -> Any:
    """The container with nested tensors padded to plain ones.

    mask_key: entry to which a mask of what is not padding is written, for each nested tensor below
        it.

    >>> from raffia import TensorDict
    >>> ragged = [torch.ones(1), torch.ones(2)]
    >>> nested = torch.nested.nested_tensor(ragged, layout=torch.jagged)
    >>> td = TensorDict(a=nested, batch_size=[2])
    >>> td.to_padded_tensor()["a"]
    tensor([[1., 0.],
            [1., 1.]])
    """
    masks: list[Tensor] = []

    def padded(leaf: Tensor) -> Tensor:
        if not leaf.is_nested:
            return leaf
        if mask_key is not None and not masks:
            ones = torch.nested.nested_tensor(
                [torch.ones_like(part, dtype=torch.bool) for part in leaf.unbind()],
                layout=leaf.layout,
            )
            masks.append(torch.nested.to_padded_tensor(ones.to(torch.uint8), 0).bool())
        return torch.nested.to_padded_tensor(leaf, padding)

    out = td._map(padded)
    if masks:
        mask = masks[0]
        out.set(mask_key, mask.flatten(2).any(-1) if mask.dim() > 2 else mask)
    return out


# ------------------------------------------------------------------------ gradients


def detach(td: Any) -> Any:
    """The container with its tensors cut off from the graph of gradients.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2, requires_grad=True)).detach().requires_grad
    False
    """
    out = td._map(Tensor.detach)
    return out.lock_() if td._locked else out


def detach_(td: Any) -> Any:
    """Cut the tensors off from the graph of gradients, in place.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2, requires_grad=True)).detach_().requires_grad
    False
    """
    for leaf in td._leaves([]):
        leaf.detach_()
    return td


def data(td: Any) -> Any:
    """The container of the tensors' `data`.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2, requires_grad=True)).data.requires_grad
    False
    """
    out = td._map(_data)
    return out.lock_() if td._locked else out


def _data(leaf: Tensor) -> Tensor:
    return leaf.data


def set_data(td: Any, value: Any) -> None:
    data(td).update_(value)


def grad(td: Any) -> Any:
    """The container of the tensors' gradients, without those that have none; None if there is none.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.zeros(2, requires_grad=True))
    >>> (3 * td["a"]).sum().backward()
    >>> td.grad["a"]
    tensor([3., 3.])
    """
    out = td.apply(lambda leaf: leaf.grad) if td._leaves([]) else None
    return out.lock_() if out is not None and td._locked else out


def requires_grad(td: Any) -> bool:
    """Whether any entry requires a gradient.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2)).requires_grad
    False
    """
    return some(td, _requires_grad)


def _requires_grad(leaf: Tensor) -> bool:
    return leaf.requires_grad


def requires_grad_(td: Any, requires_grad: bool = True) -> Any:
    """Say of all entries whether they require a gradient.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2)).requires_grad_().requires_grad
    True
    """
    for leaf in td._leaves([]):
        leaf.requires_grad_(requires_grad)
    return td


def zero_grad(td: Any, set_to_none: bool = True) -> Any:
    """Remove the gradients of all entries, or fill them with zeros.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2, requires_grad=True)).zero_grad().grad is None
    True
    """
    for leaf in td._leaves([]):
        if leaf.grad is not None:
            if set_to_none:
                leaf.grad = None
            else:
                leaf.grad.zero_()
    return td


def backward(
    td: Any,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Accumulate gradients of all entries, as `torch.autograd.backward` does.

    gradient: container with the gradient of each entry; not needed for entries of one element.
    inputs: tensors, or a container of them, to accumulate into.

    >>> from raffia import TensorDict
    >>> x = torch.ones(2, requires_grad=True)
    >>> TensorDict(a=x.sum()).backward()
    >>> x.grad
    tensor([1., 1.])
    """
    leaves = [leaf for leaf in td._leaves([]) if leaf.requires_grad]
    if not leaves:
        raise RuntimeError("backward: no entry requires a gradient, so there is nothing to compute")
    grads = None
    if gradient is not None:
        grads = [
            get(gradient, key, NO_DEFAULT)
            for key, leaf in td.items(True, True)
            if leaf.requires_grad
        ]
    if isinstance(inputs, Node):
        inputs = inputs._leaves([])
    torch.autograd.backward(leaves, grads, retain_graph, create_graph, inputs=inputs)


# ------------------------------------------------------------------------ content in place


def zero_(td: Any) -> Any:
    """Fill all entries with zeros.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.ones(2)).zero_()["a"]
    tensor([0., 0.])
    """
    for leaf in td._leaves([]):
        leaf.zero_()
    return td


def copy_(td: Any, tensordict: Any, non_blocking: bool = False) -> Any:
    """Write the entries of another container into the tensors of this one.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.ones(2)).copy_(TensorDict(a=torch.zeros(2)))["a"]
    tensor([0., 0.])
    """
    return td.update_(tensordict, non_blocking=non_blocking)


# ------------------------------------------------------------------------ memory


def pin_memory(td: Any, num_threads: int | None = None, inplace: bool = False) -> Any:
    """A copy in page-locked memory, from which copies to a GPU are faster.

    Where there is no GPU to pin for, the container itself.

    num_threads: so many threads copy.
    inplace: put the copies in the place of the tensors of this container.

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


def pin_memory_(td: Any, num_threads: int | None = None) -> Any:
    """Replace all entries by copies in page-locked memory.

    >>> from raffia import TensorDict
    >>> TensorDict().pin_memory_().is_empty()
    True
    """
    return pin_memory(td, num_threads, inplace=True)


def share_memory_(td: Any) -> Any:
    """Move all entries to shared memory, where other processes see the same; locks the container.

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
    return every(td, _shared) and bool(td._leaves([])) and not td.is_memmap()


def _shared(leaf: Tensor) -> bool:
    try:
        return leaf.untyped_storage().is_shared()
    except RuntimeError:  # it has no memory of its own, as in vmap
        return False


def record_stream(td: Any, stream: Any) -> Any:
    """Tell the memory allocator that the entries are used on a CUDA stream.

    >>> from raffia import TensorDict
    >>> TensorDict().record_stream(None).is_empty()
    True
    """
    for leaf in td._leaves([]):
        leaf.record_stream(stream)
    return td


def consolidate(
    td: Any,
    filename: Any = None,
    *,
    num_threads: int = 0,
    device: Any = None,
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
    from concurrent.futures import ThreadPoolExecutor

    from raffia.tensordict.disk import TensorDictFuture

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
    from raffia.tensordict.consolidated import (
        mapped_block,
        padded,
        pieces,
        put_together,
        write_block,
    )

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
        from concurrent.futures import ThreadPoolExecutor

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
    from raffia.tensordict.consolidated import pieces

    pointer = td._buffer.untyped_storage().data_ptr()
    parts = pieces(td._leaves([]))[0]
    return all([leaf.untyped_storage().data_ptr() == pointer for leaf in parts])


def data_ptr(td: Any, *, storage: bool = False) -> Any:
    """A container-shaped dict of the addresses of all entries, or of their storages.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.ones(2))
    >>> td.data_ptr() == {"a": td["a"].data_ptr()}
    True
    """
    return {
        key: value.untyped_storage().data_ptr() if storage else value.data_ptr()
        for key, value in td.items(True, True)
    }


def numel(td: Any) -> int:
    """How many rows there are: the product of the batch size, at least 1.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[2, 3]).numel()
    6
    """
    return max(1, math.prod(td._batch_size))


def bytes_(td: Any, *, count_duplicates: bool = True) -> int:
    """How many bytes all entries take.

    count_duplicates: count a tensor that stands under two keys twice.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.ones(2)).bytes()
    8
    """
    return sum([leaf.numel() * leaf.element_size() for leaf in _distinct(td, count_duplicates)])


def param_count(td: Any, *, count_duplicates: bool = True) -> int:
    """How many numbers all entries hold.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.ones(2, 3)).param_count()
    6
    """
    return sum([leaf.numel() for leaf in _distinct(td, count_duplicates)])


def _distinct(td: Any, count_duplicates: bool) -> list[Tensor]:
    leaves = td._leaves([])
    return leaves if count_duplicates else list({id(leaf): leaf for leaf in leaves}.values())


# ------------------------------------------------------------------------ other forms


def as_tensor(td: Any) -> Any:
    """The container with memory-mapped and other special tensors as plain ones; same memory.

    >>> from raffia import TensorDict
    >>> type(TensorDict(a=torch.zeros(2)).memmap()["a"]).__name__
    'MemoryMappedTensor'
    >>> type(TensorDict(a=torch.zeros(2)).memmap().as_tensor()["a"]).__name__
    'Tensor'
    """
    return td._map(
        lambda leaf: leaf if type(leaf) in (Tensor, nn.Parameter) else leaf.as_subclass(Tensor)
    )


def numpy(td: Any) -> Any:
    """Nested dicts of numpy arrays.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2)).numpy()
    {'a': array([0., 0.], dtype=float32)}
    """
    return td.to_dict(convert_tensors="numpy")


def tolist(
    td: Any,
    *,
    convert_nodes: bool = True,
    convert_tensors: bool | str = False,
    tolist_first: bool = False,
) -> Any:
    """Nested lists over the batch dimensions, of dicts.

    convert_nodes: False gives containers instead of dicts.
    convert_tensors: True turns tensors into lists, "numpy" into arrays.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.tensor([1, 2]), batch_size=[2]).tolist()
    [{'a': tensor(1)}, {'a': tensor(2)}]
    """
    options = dict(convert_nodes=convert_nodes, convert_tensors=convert_tensors)
    if td._batch_size:
        return [tolist(row, **options, tolist_first=tolist_first) for row in td.unbind(0)]  # type: ignore[arg-type]
    if not convert_nodes:
        return td
    if tolist_first:
        return {
            name: value.tolist() if isinstance(value, Node) else converted(value, convert_tensors)
            for name, value in td._entries().items()
        }
    return td.to_dict(convert_tensors=convert_tensors)


def to_namedtuple(td: Any, dest_cls: Any = None) -> Any:
    """A named tuple with these entries, nested ones too.

    dest_cls: class of the named tuple; made from the keys if not given.

    >>> from raffia import TensorDict
    >>> TensorDict(a=1, b=dict(c=2)).to_namedtuple().b.c
    tensor(2)
    """
    values = {}
    for name, value in td._entries().items():
        if isinstance(value, Node):
            value = value._unwrapped() if value._is_data() else to_namedtuple(value)
        values[name] = value
    cls = dest_cls or collections.namedtuple("GenericDict", list(values))
    return cls(**values)


def to_struct_array(td: Any) -> np.ndarray:
    """A structured numpy array whose shape is the batch size.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.tensor([1, 2]), batch_size=[2]).to_struct_array()["a"]
    array([1, 2])
    """
    columns = {}
    for name, value in td._entries().items():
        if isinstance(value, Node):
            columns[name] = (
                np.asarray(value._unwrapped()) if value._is_data() else to_struct_array(value)
            )
        else:
            columns[name] = value.detach().numpy()
    shape = tuple(td._batch_size)
    fields = [(name, column.dtype, column.shape[len(shape) :]) for name, column in columns.items()]
    out = np.zeros(shape, dtype=fields)
    for name, column in columns.items():
        out[name] = column
    return out


def _keyed(td: Any, sorted: Any) -> list[Tensor]:
    if isinstance(sorted, (list, tuple)):
        return [get(td, key, NO_DEFAULT) for key in sorted]
    sort = True if sorted is None else bool(sorted)
    return [leaf for _, leaf in td.items(True, True, sort=sort)]


def stack_from_tensordict(
    td: Any, dim: int = 0, *, sorted: Any = None, out: Tensor | None = None
) -> Tensor:
    """All entries stacked to one tensor.

    sorted: in alphabetical order of the keys (the default), as stored (False), or in the order of
        this list of keys.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2), b=torch.ones(2)).stack_from_tensordict()
    tensor([[0., 0.],
            [1., 1.]])
    """
    return torch.stack(_keyed(td, sorted), dim, out=out)


def cat_from_tensordict(
    td: Any, dim: int = 0, *, sorted: Any = None, out: Tensor | None = None
) -> Tensor:
    """All entries concatenated to one tensor; `sorted` as in `stack_from_tensordict`.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2), b=torch.ones(1)).cat_from_tensordict()
    tensor([0., 0., 1.])
    """
    return torch.cat(_keyed(td, sorted), dim, out=out)


# ------------------------------------------------------------------------ state dict


def state_dict(
    td: Any,
    destination: Any = None,
    prefix: str = "",
    keep_vars: bool = False,
    flatten: bool = True,
) -> Any:
    """An ordered dict of all tensors, for `load_state_dict`.

    Its attribute `_metadata` holds the batch sizes, and the values of non-tensor entries.

    destination: dict to write into; prefix: what the keys begin with.
    keep_vars: do not detach the tensors.
    flatten: names of nested keys joined by "."; else nested dicts.
    Raises KeyError if the joined names of two entries are the same.

    >>> from raffia import TensorDict
    >>> list(TensorDict(a=dict(b=1)).state_dict())
    ['a.b']
    """
    out: Any = collections.OrderedDict()
    out._metadata = {}
    _write_state(td, out, prefix, keep_vars, flatten)
    if destination is None:
        return out
    if not hasattr(destination, "_metadata"):
        destination._metadata = {}
    destination.update(out)
    destination._metadata.update(out._metadata)
    return destination


def _write_state(td: Any, out: Any, prefix: str, keep_vars: bool, flatten: bool) -> None:
    if td.__class__ is not td._plain and hasattr(td, "tensordicts"):
        td._all_shared("state_dict")
    out._metadata[prefix.rstrip(".")] = {"batch_size": tuple(td._batch_size)}
    for name, value in td._entries().items():
        if value.__class__ is not Tensor and isinstance(value, Node):
            if flatten and not value._is_data():
                _write_state(value, out, f"{prefix}{name}.", keep_vars, flatten)
                continue
        full = prefix + name
        if full in out:
            raise KeyError(
                f"two entries would be named {full!r} in the state dict; "
                "flatten=False gives nested dicts, in which they stay apart"
            )
        if isinstance(value, Tensor):
            out[full] = value if keep_vars else value.detach()
        elif value._is_data():
            out._metadata[full] = _data_state(value)
        else:
            out[full] = value.state_dict(None, "", keep_vars, False)


def _data_state(node: Any) -> dict[str, Any]:
    """A non-tensor entry in the metadata of a state dict: one value, or one for each row."""
    size = tuple(node._batch_size)
    if not hasattr(node, "tensordicts"):
        return {"batch_size": size, "data": node._data}
    return {"batch_size": size, "rows": flat_values(node.tolist(), len(size))}


def load_state_dict(
    td: Any,
    state_dict: Any,
    strict: bool = True,
    assign: bool = False,
    from_flatten: bool | None = None,
) -> Any:
    """Take over the tensors of a `state_dict`, and the non-tensor values of its metadata.

    strict: RuntimeError if the keys of its tensors are not those of this container; False adds
        those that are new. Values that are no tensors are added in either case.
    assign: take its tensors themselves, instead of writing into these.
    from_flatten: whether it has flat keys; found out if not given.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2)).load_state_dict(TensorDict(a=torch.ones(2)).state_dict())["a"]
    tensor([1., 1.])
    """
    flat: dict[str, Any] = {}
    data: dict[str, Any] = {}
    _flat_state(state_dict, from_flatten, "", flat, data)
    mine = {dotted(key): key for key in td.keys(True, True)}
    mine_data = {dotted(key): key for key in _data_keys(td)}
    if strict and flat.keys() != mine.keys():
        raise RuntimeError(
            "the key sets of the state dict and of this container differ: "
            f"missing keys {sorted(mine.keys() - flat.keys())}, unexpected keys "
            f"{sorted(flat.keys() - mine.keys())}; strict=False loads the others"
        )
    size = getattr(state_dict, "_metadata", {}).get("", {}).get("batch_size")
    if not assign and flat.keys() == mine.keys() and _written_at_once(td, mine, flat):
        flat = {}
    for name, value in flat.items():
        key = mine.get(name, tuple(name.split(".")))
        old = td.get(key) if name in mine else None
        if old is None or assign:
            td.set(key, value)
        elif old.shape != value.shape:
            raise RuntimeError(
                f"entry {key!r} has shape {tuple(old.shape)}, the state dict {tuple(value.shape)}; "
                "assign=True replaces it"
            )
        else:
            td.set_(key, value)
    if size is not None and not mine:
        td._set_batch_size(torch.Size(size))
    for name, saved in data.items():
        _load_data(td, mine_data.get(name, tuple(name.split("."))), saved)
    return td


def _written_at_once(td: Any, keys: dict[str, Any], flat: dict[str, Any]) -> bool:
    """Write the tensors of a state dict into those with these keys; False if one does not fit."""
    source: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = unravel_key_to_tuple(keys[name])
        level = source
        for step in path:
            level = level.setdefault(step, {})
        level[last] = value
    into: list[Tensor] = []
    values: list[Tensor] = []
    return writes(td, source, into, values) and copied(into, values)


def _load_data(td: Any, key: Any, saved: dict[str, Any]) -> None:
    """Store a non-tensor value of a state dict; as for tensors, also where it is locked."""
    from raffia.tensordict.nontensor import NonTensorData, shaped

    size = torch.Size(saved["batch_size"])
    value = (
        NonTensorData(saved["data"], size)
        if "data" in saved
        else shaped([NonTensorData(row) for row in saved["rows"]], size)
    )
    old = get(td, key)
    if old is None:
        td.set(key, value)
        return
    node, name = holder(td, key)
    ndim = len(node._batch_size)
    if size[:ndim] != node._batch_size:
        if "rows" in saved:
            raise RuntimeError(
                f"the values of entry {key!r} in the state dict have the batch size {tuple(size)}, "
                f"the container {tuple(node._batch_size)}"
            )
        value = value.empty_like(old._batch_size)
    if node._device is not None:
        value._set_device(node._device)
    node._replace_str(name, value)


def _data_keys(td: Any) -> list[Any]:
    return [key for key, _ in td.non_tensor_items(include_nested=True)]


def _flat_state(
    state: Any,
    from_flatten: bool | None,
    prefix: str,
    flat: dict[str, Any],
    data: dict[str, Any],
) -> None:
    """The tensors of a state dict by flat name, and what its metadata says of other values."""
    for name, saved in getattr(state, "_metadata", {}).items():
        if "data" in saved or "rows" in saved:
            data[prefix + name] = saved
    for name, value in state.items():
        if isinstance(value, dict) and from_flatten is not True:
            _flat_state(value, from_flatten, prefix + name + ".", flat, data)
        else:
            flat[prefix + name] = value
