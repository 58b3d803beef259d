"""Copies of a container: of all, of the structure, dense, contiguous, padded."""

from __future__ import annotations

import copy as copier  # `copy` is a method here
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from raffia.tensordict.build import as_device, as_size, batch_dim
from raffia.tensordict.entries import NO_DEFAULT
from raffia.tensordict.keys import NestedKey
from raffia.tensordict.node import BatchSize, Container, Device, HasPlain, LeafFn, Node, Plain
from raffia.tensordict.views import every, paired


def clone(td: Container, recurse: bool = True) -> Container:
    """A copy: of the tensors too, or with `recurse=False` of the structure only. Never locked.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.zeros(2))
    >>> td.clone()["a"] is td["a"], td.clone(recurse=False)["a"] is td["a"]
    (False, True)
    """
    return td._map(_clone) if recurse else td._shallow()


_clone = Tensor.clone


def copy(td: Container) -> Container:
    """A copy of the structure over the same tensors: `clone(recurse=False)`.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.zeros(2))
    >>> td.copy()["a"] is td["a"]
    True
    """
    return td._shallow()


def deepcopy(td: Container, memo: dict[Any, Any]) -> Container:
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


def _clone_into(memo: dict[Any, Any], tds: list[Any]) -> None:
    """Enter copies of the plain tensors in these plain containers in the memo of a deep copy.

    Also those of their memory, where `Tensor.__deepcopy__` looks: views that are copied later share
    it. What a clone doesn't copy as `Tensor.__deepcopy__` would is left to that.
    """
    leaves: list[Tensor] = []
    for td in tds:
        td._leaves(leaves)
    if not _cloned(memo, leaves):
        known = memo.get("torch", {})
        found = [x for x in leaves if _fills_memory(x) and id(x) not in memo]
        alone = {_storage(x)._cdata: x for x in found}
        _cloned(memo, [x for address, x in alone.items() if address not in known])


def _fills_memory(leaf: Tensor) -> bool:
    """Whether a leaf is a plain tensor of all values in its memory, as `_cloned` asks of all."""
    if leaf.__class__ is not Tensor or leaf.requires_grad or leaf.grad is not None or vars(leaf):
        return False
    try:
        whole = _storage(leaf).nbytes() == leaf.nbytes
    except RuntimeError:  # of a layout without one block of memory
        return False
    return whole and leaf.is_contiguous() and not leaf.is_conj()


def _cloned(memo: dict[Any, Any], leaves: list[Tensor]) -> bool:
    """`_clone_into` where each leaf is plain and fills a memory that no other has, as it mostly is.

    False, and nothing done, if not. To see that of all takes half as long as to look at one after
    the other.
    """
    if {*map(type, leaves)} != {Tensor} or memo and not memo.keys().isdisjoint(map(id, leaves)):
        return False
    try:
        storages = [*map(_storage, leaves)]
    except RuntimeError:  # of a layout without one block of memory
        return False
    if (
        any(map(_with_grad, leaves))
        or [*map(_grad, leaves)].count(None) < len(leaves)
        or any(map(vars, leaves))
        or [*map(_num_bytes, leaves)] != [*map(UntypedStorage.nbytes, storages)]
        or not all(map(Tensor.is_contiguous, leaves))
        or any(map(Tensor.is_conj, leaves))
    ):
        return False
    addresses = [*map(_address, storages)]
    known = memo.get("torch", ())
    if len({*addresses}) < len(leaves) or known and not known.keys().isdisjoint(addresses):
        return False  # two share their memory, or it has been copied already
    copies = _clones(leaves)
    if known.__class__ is not _Storages:
        known = memo["torch"] = _Storages(known)
    memo.setdefault(id(memo), []).extend(leaves)  # alive: another's id could be one of theirs
    memo.update(zip(map(id, leaves), copies, strict=True))
    known.update(zip(addresses, copies, strict=True))
    return True


class _Storages(dict[int, Any]):
    """Copies by where their source's memory is; torch, which looks here, finds their storages."""

    def __getitem__(self, address: int) -> Any:
        found = super().__getitem__(address)
        return _storage(found) if found.__class__ is Tensor else found


_storage = Tensor.untyped_storage
_address, _num_bytes = attrgetter("_cdata"), attrgetter("nbytes")
_with_grad, _grad = attrgetter("requires_grad"), attrgetter("grad")


def once_each(fn: LeafFn) -> LeafFn:
    """`fn`, called once for each tensor: one under two keys stays one.

    >>> from raffia import TensorDict
    >>> tied = torch.zeros(2)
    >>> td = TensorDict(a=tied, b=tied).apply(once_each(torch.clone))
    >>> td["a"] is td["b"], td["a"] is tied
    (True, False)
    """
    # With the tensors themselves: an id is a tensor's own only as long as it lives.
    done: dict[int, tuple[Tensor, Tensor]] = {}

    def once(leaf: Tensor) -> Tensor:
        if id(leaf) not in done:
            done[id(leaf)] = leaf, fn(leaf)
        return done[id(leaf)][1]

    return once


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


def contiguous(td: Container, *, canonical: bool = False, inplace: bool = False) -> Container:
    """A container whose tensors are contiguous; those that are already are not copied.

    canonical: copy also those with other strides in dimensions of size 1 than a fresh tensor has.
    inplace: replace the tensors of this container by the copies.

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
    """Replace the tensors of `td` by those of `source`."""
    for node, name, mine, leaf in paired(td, source):
        if isinstance(leaf, Tensor) and mine is not leaf:
            node.set(name, leaf)
    return td


def is_contiguous(td: Any) -> bool:
    """Whether all entries are contiguous.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2, 3).t()).is_contiguous()
    False
    """
    return every(td, Tensor.is_contiguous)


def empty(
    td: Container,
    recurse: bool = False,
    *,
    batch_size: BatchSize = None,
    device: Device = NO_DEFAULT,
    names: Sequence[str | None] | None = NO_DEFAULT,
) -> Container:
    """A container without entries, of the same batch size, device and names.

    recurse: with the nested containers, empty too.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2), batch_size=[2]).empty().batch_size
    torch.Size([2])
    """
    out = td._emptied(recurse, None if batch_size is None else as_size(batch_size))
    if device is not NO_DEFAULT:
        out._set_device(None if device is None else as_device(device))
    if names is not NO_DEFAULT:
        out.names = names
    elif td._names is not None and out._batch_size == td._batch_size[: len(out._batch_size)]:
        out._set_names(list(td._names[: len(out._batch_size)]))
    return out


def to_tensordict(td: HasPlain[Plain], *, retain_none: bool | None = None) -> Plain:
    """A plain `TensorDict` with clones of all entries, nested containers too.

    retain_none: False leaves out entries that are None.

    >>> from raffia import TensorDict, lazy_stack
    >>> type(lazy_stack([TensorDict(a=1), TensorDict(a=2)]).to_tensordict()).__name__
    'TensorDict'
    """
    node: Any = td
    entries = {}
    for name, value in node._entries().items():
        if not isinstance(value, Node):
            entries[name] = value.clone()
        elif value._is_data():
            if retain_none is not False or value._unwrapped() is not None:
                entries[name] = value.clone()
        else:
            entries[name] = value.to_tensordict(retain_none=retain_none)
    return node._plain._make(entries, node._batch_size, node._device, node._names)


def to_lazystack(td: Any, dim: int = 0) -> Any:
    """The rows along `dim` as a lazy stack; views.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2), batch_size=[2]).to_lazystack().stack_dim
    0
    """
    dim = batch_dim(td, dim)
    if td._lazy and dim == td.stack_dim:
        return td
    return type(td).lazy_stack(list(td.unbind(dim)), dim)


def densify(td: Container, layout: torch.layout = torch.strided) -> Container:
    """The container with lazy stacks replaced by dense containers.

    Entries of different shape become nested tensors.

    >>> from raffia import TensorDict, lazy_stack
    >>> type(lazy_stack([TensorDict(a=1), TensorDict(a=2)]).densify()).__name__
    'TensorDict'
    """
    entries = {
        name: value if isinstance(value, Tensor) else value.densify(layout)
        for name, value in td._entries().items()
    }
    if all([entries[name] is value for name, value in td._entries().items()]):
        return td
    return td._new(entries, td._batch_size, td._names)


def to_padded_tensor(
    td: Container, padding: float = 0.0, mask_key: NestedKey | None = None
) -> Container:
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
    if -1 in out._batch_size:  # the length of rows, which is one now
        leaf = next(leaf for leaf in out._leaves([]) if not leaf.is_nested)
        out.batch_size = leaf.shape[: len(out._batch_size)]
    if masks:
        mask = masks[0]
        out.set(mask_key, mask.flatten(2).any(-1) if mask.dim() > 2 else mask)
    return out


def synchronise(td: Any) -> None:
    """Wait for pending copies from GPUs to the CPU, so that nobody reads incomplete data."""
    for device in {leaf.device for leaf in td._leaves([]) if leaf.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
