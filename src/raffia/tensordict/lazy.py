"""Lazy stacks: containers that stay apart and are stacked when an entry is read.

A `LazyStackedTensorDict` shows its members as one container with a batch dimension more. Reading an
entry stacks it, writing one takes it apart; indexing and shape operations go to the members, so
that members whose entries differ in shape, or that have other entries, can be handled together.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack, overload

import torch
from torch import Tensor

from raffia.tensordict import build, copies, dim_names, entries, index, kinds, lazy_rows, printing
from raffia.tensordict.build import as_size
from raffia.tensordict.collection import TensorDictBase
from raffia.tensordict.entries import NO_DEFAULT
from raffia.tensordict.keys import NestedKey, is_key, missing
from raffia.tensordict.lazy_shape import (
    common_size,
    joined_tensors,
    member_shape,
    nested,
    padded,
    reshaped_lazily,
    size_mismatch,
)
from raffia.tensordict.lazy_write import LazyWrites
from raffia.tensordict.memmap import keep_mapped
from raffia.tensordict.node import Container, Device, Entries, LeafFn, Names, Node, Op, child_names
from raffia.tensordict.signatures import shows_options_of
from raffia.tensordict.tensordict import TensorDict

_new_object = object.__new__
_ALL = slice(None)


class StackDimError(IndexError, RuntimeError):
    """The error raised for a stack dimension that is out of range.

    >>> LazyStackedTensorDict(TensorDict(), stack_dim=1)
    Traceback (most recent call last):
    ...
    raffia.tensordict.lazy.StackDimError: stack dim 1 is out of range: members of batch size ()...
    """


@kinds.enter
class LazyStackedTensorDict(LazyWrites):
    """Containers presented as one with a new batch dimension; an entry is stacked when it is read.

    tensordicts: the members; their batch sizes have as many dimensions, and a dimension whose sizes
        differ shows as -1.
    stack_dim: the position of the new dimension.
    batch_size: that of the members, where there are none.
    device: the members are moved there.
    names, stack_dim_name: names of all dimensions, or of the new one.
    strict_shape: refuse members of different batch sizes.
    hook_in, hook_out: called on what is written to and read from the stack.

    >>> td = LazyStackedTensorDict(TensorDict(a=1), TensorDict(a=2, b=3))
    >>> td["a"], list(td.keys()), td[1]["b"]
    (tensor([1, 2]), ['a'], tensor(3))
    """

    hook_out: Callable[[Any], Any] | None = None
    _lazy = True

    def __init__(
        self,
        *tensordicts: Node,
        stack_dim: int = 0,
        hook_out: Callable[[Any], Any] | None = None,
        hook_in: Callable[[Any], Any] | None = None,
        batch_size: Sequence[int] | None = None,
        device: Device = None,
        names: Sequence[str | None] | None = None,
        stack_dim_name: str | None = None,
        strict_shape: bool = False,
    ) -> None:
        for td in tensordicts:
            if not isinstance(td, Node):
                raise TypeError(f"Expected all inputs to be containers, got {type(td).__name__}")
        members = _moved_members(tensordicts, device, strict_shape)
        size = as_size(batch_size) if batch_size is not None and not members else None
        self._setup(members, stack_dim, size, stack_dim_name)
        if self._mark is not None:  # made by hand, as a member is
            self._held = False
        if hook_in is not None:
            self.hook_in = hook_in
        if hook_out is not None:
            self.hook_out = hook_out
        if names is not None:
            dim_names.set_names(self, names)

    def _setup(
        self,
        members: list[Any],
        stack_dim: int,
        member_size: torch.Size | None = None,
        stack_dim_name: str | None = None,
    ) -> None:
        """Fill in a new object; `member_size` is a member's batch size if the list is empty."""
        names: Names = None
        device = None
        if members:
            first, same_size = members[0], True
            size, device, names = first._batch_size, first._device, first._names
            for td in members:
                if td._batch_size != size:
                    same_size = False
                if td._device != device:
                    device = None
                if td._names != names:
                    names = None
            if not same_size:
                size = common_size(members)
        else:
            size = torch.Size() if member_size is None else member_size
        ndim = len(size)
        if not -ndim - 1 <= stack_dim <= ndim:
            raise StackDimError(
                f"stack dim {stack_dim} is out of range: members of batch size {tuple(size)} can "
                f"be stacked along dims {-ndim - 1} to {ndim}"
            )
        if stack_dim < 0:
            stack_dim += ndim + 1
        self.tensordicts = members
        self._hold_members(members)
        self.stack_dim = stack_dim
        sizes = [*size]  # as a list, which is cut faster
        sizes.insert(stack_dim, len(members))
        self._batch_size = torch.Size(sizes)
        if device is not None:
            self._device = device
        if names is not None or stack_dim_name is not None:
            names = names or [None] * ndim
            self._names = [*names[:stack_dim], stack_dim_name, *names[stack_dim:]]

    @classmethod
    def _of(cls, members: list[Any], stack_dim: int, member_size: torch.Size | None = None) -> Any:
        """A lazy stack of these members, of this class."""
        td = _new_object(cls)
        td._setup(members, stack_dim, member_size)
        return td

    def _of_members(self, members: list[Any]) -> Any:
        """This stack over other members, with the same names."""
        td = _new_object(type(self))
        td._setup(members, self.stack_dim, self._member_size())
        if self.hook_in is not None or self.hook_out is not None:
            td.hook_in, td.hook_out = self.hook_in, self.hook_out
        if self._names is not None and td._batch_size == self._batch_size:
            dim = self.stack_dim
            rest = [*self._names[:dim], *self._names[dim + 1 :]]
            mine = rest if any(rest) else None
            if all([member._names == mine for member in members]):
                td._names = list(self._names)
        return td

    def _member_size(self) -> torch.Size:
        sizes = [*self._batch_size]
        del sizes[self.stack_dim]
        return torch.Size(sizes)

    # -- lock: a stack is locked if it was locked, or if all of its members are

    @property
    def _locked(self) -> bool:
        if self._own_lock:
            return True
        for td in self.tensordicts:
            if not td._locked:
                return False
        return bool(self.tensordicts)

    @_locked.setter
    def _locked(self, value: bool) -> None:
        self._own_lock = value

    def _children(self) -> list[Any]:
        return self.tensordicts

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_locked"] = state.pop("_own_lock", False)
        return state

    # -- reading

    def _get_str(self, name: str) -> Any:
        values = [td._get_str(name) for td in self.tensordicts]
        for value in values:
            if value is None:
                return None
        if not values:
            return None
        if isinstance(values[0], Tensor) and not isinstance(values[0], Node):
            try:
                out: Any = torch.stack(values, self.stack_dim)
            except (RuntimeError, TypeError) as error:
                if any([not isinstance(v, Tensor) or v.shape != values[0].shape for v in values]):
                    raise self._shape_mismatch(name) from error
                raise
        else:
            out = self._stacked_nodes(name, values)
        return out if self.hook_out is None else self.hook_out(out)

    def _stacked_nodes(self, name: str, values: list[Any]) -> Any:
        for value in values:
            if not isinstance(value, Node):
                raise self._shape_mismatch(name)
        stack = lazy_stack(values, self.stack_dim)
        if isinstance(stack, Tensor):
            return stack
        if self._names is not None:
            stack.names = [*self._names, *stack.names[len(self._names) :]]
        return stack

    def _shape_mismatch(self, name: str) -> RuntimeError:
        shapes = [member_shape(td, name) for td in self.tensordicts]
        return RuntimeError(
            f"Failed to stack tensors within a tensordict under the key {name!r}: their shapes "
            f"are {shapes}. td.get({name!r}, as_list=True) gives them one by one, "
            "as_padded_tensor=True padded to one shape, as_nested_tensor=True as a nested tensor."
        )

    def _peek_str(self, name: str) -> Any:
        """The entry under `name`, without stacking: for a tensor, the tensor of one member."""
        values = []
        for td in self.tensordicts:
            value = td._peek_str(name)
            if value is None:
                return None
            values.append(value)
        for value in values:
            if not isinstance(value, Node):
                return values[0]
        return lazy_stack(values, self.stack_dim) if values else None

    def _peek(self) -> Entries:
        members = self.tensordicts
        if members and all([td.__class__ is TensorDict for td in members]):
            first = members[0]._d
            if all([td._d.keys() == first.keys() for td in members]):  # no member has more
                return {
                    name: value
                    if value.__class__ is Tensor or not isinstance(value, Node)
                    else self._peek_str(name)
                    for name, value in first.items()
                }
        return {name: self._peek_str(name) for name in self._entry_names()}

    def _entries(self) -> Entries:
        return {name: self._get_str(name) for name in self._entry_names()}

    def _entry_names(self) -> list[str]:
        """Names of the entries that all members have, in the order of the first."""
        stores = [td._peek() for td in self.tensordicts]
        if not stores:
            return []
        first, names = stores[0].keys(), list(stores[0])
        for store in stores:
            if store.keys() != first:
                names = [name for name in names if name in store]
        return names

    def _get_lazy(  # type: ignore[override]
        self,
        name: str,
        *,
        as_list: bool = False,
        as_padded_tensor: bool = False,
        as_nested_tensor: bool = False,
        padding_value: float | bool = 0.0,
        padding_side: str = "right",
        layout: torch.layout | None = None,
    ) -> Any:
        """The entry `name` in a form that also holds tensors of different shape."""
        how: dict[str, Any] = dict(as_list=as_list, as_padded_tensor=as_padded_tensor)
        how |= dict(as_nested_tensor=as_nested_tensor, layout=layout)
        how |= dict(padding_value=padding_value, padding_side=padding_side)
        values = [td._get_lazy(name, **how) for td in self.tensordicts]
        if not values or any([value is None for value in values]):
            return None
        if as_list and not isinstance(values[0], Node):
            return values
        if isinstance(values[0], Node) or not (as_padded_tensor or as_nested_tensor):
            return self._get_str(name)
        if as_padded_tensor:
            return torch.stack(padded(values, padding_value, padding_side), self.stack_dim)
        return nested(values, layout)

    def get_nestedtensor(
        self, key: NestedKey, default: Any = NO_DEFAULT, *, layout: torch.layout | None = None
    ) -> Any:
        """The entry under `key` as a nested tensor, of strided layout if none is given.

        `get(key, as_nested_tensor=True)` makes a jagged one where it can.

        >>> td = lazy_stack([TensorDict(a=torch.ones(1)), TensorDict(a=torch.ones(2))])
        >>> td.get_nestedtensor("a", layout=torch.jagged).is_nested
        True
        """
        layout = torch.strided if layout is None else layout
        return entries.get(self, key, default, as_nested_tensor=True, layout=layout)

    def __getitem__(self, idx: Any) -> Any:
        if idx.__class__ is str:
            value = self._get_str(idx)
            if value is None:
                raise missing(idx, self)
            return value._unwrapped() if isinstance(value, Node) else value
        if idx.__class__ is tuple and idx and is_key(idx):
            return entries.getitem_key(self, idx)
        if -1 in self._batch_size:
            return self._index(index.normalise(idx, self._batch_size), self.ndim, None)
        return index.getitem(self, idx)

    @shows_options_of(entries.to_dict)
    def to_dict(self, **options: Any) -> dict[str, Any]:
        """Plain nested dicts; RuntimeError if a member has an entry that others lack.

        >>> LazyStackedTensorDict(TensorDict(a=1), TensorDict(a=2)).to_dict()
        {'a': tensor([1, 2])}
        """
        self._all_shared("to_dict")
        return entries.to_dict(self, **options)

    def _all_shared(self, method: str) -> None:
        extra = sorted({name for names in self._exclusive() for name in names})
        if extra:
            raise RuntimeError(
                f"{method} would lose entries: the sets of keys of the members are exclusive, not "
                f"all of them have {extra}; take the members one by one: "
                f"td.tensordicts[i].{method}()"
            )

    # -- the contract of Node: maps

    def _new(self, entries: Entries, batch_size: torch.Size, names: Names = None) -> Any:
        return TensorDict._make(entries, batch_size, self._device, names)

    def _map(self, fn: LeafFn) -> Any:
        return self._of_members([td._map(fn) for td in self.tensordicts])

    def _shallow(self) -> Any:
        return self._of_members([td._shallow() for td in self.tensordicts])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        out = memo[id(self)] = self._of_members(copies.deepcopy_members(self, memo))
        return out

    def _leaves(self, out: list[Tensor]) -> list[Tensor]:
        for td in self.tensordicts:
            td._leaves(out)
        return out

    def _rebuild(self, leaves: Iterator[Tensor]) -> Any:
        return self._of_members([td._rebuild(leaves) for td in self.tensordicts])

    def _spread(self, tensor: Tensor, out: list[Tensor]) -> list[Tensor]:
        for td, part in zip(self.tensordicts, self._tensor_parts(tensor), strict=True):
            td._spread(part, out)
        return out

    def _tensor_parts(self, tensor: Tensor) -> Sequence[Tensor]:
        """The part of a tensor over the first batch dimensions for each member."""
        dim = self.stack_dim
        if tensor.dim() <= dim:
            return [tensor] * len(self.tensordicts)
        if tensor.shape[dim] == 1:
            return [tensor.squeeze(dim)] * len(self.tensordicts)
        return tensor.unbind(dim)

    def _pairs(self, other: Any) -> list[tuple[Any, Any]]:
        parts = self._split(other)
        if parts is None:
            return [(self, other)]
        return list(zip(self.tensordicts, parts, strict=True))

    def _member_wise(self, others: tuple[Any, ...], default: Any) -> bool:
        for other in others:  # dynamo can't take `default` into a comprehension
            if other is not default and (not isinstance(other, Node) or self._split(other) is None):
                return False
        return True

    def _apply_members(
        self, run: Any, others: tuple[Any, ...], prefix: tuple[str, ...] = ()
    ) -> Any:
        """`apply` on each member; None if it left nothing of any."""
        rows = [self._split(o) if isinstance(o, Node) else None for o in others]
        results, found = [], False
        for i, td in enumerate(self.tensordicts):  # dynamo can't take `run` into a comprehension
            theirs = [o if row is None else row[i] for o, row in zip(others, rows, strict=True)]
            if td._member_wise(tuple(theirs), run.default):  # a lazy stack itself
                result = td._apply_members(run, tuple(theirs), prefix)
            else:
                result = run.node(td, tuple(theirs), prefix)
            found = found or result is not None
            results.append(td.empty() if result is None else result)
        return self._of_members(results) if found else None

    def _set_names(self, new: Names) -> None:
        dim = self.stack_dim
        self._names = None if new is None else list(new)
        mine = None if new is None else [*new[:dim], *new[dim + 1 :]]
        if mine is not None and not any(mine):
            mine = None
        for td in self.tensordicts:
            if td._names != mine:
                dim_names.store(td, mine)

    def _named_children(self) -> list[Any]:
        return []

    def _set_device(self, device: torch.device | None) -> None:
        self._device = device
        for td in self.tensordicts:
            td._set_device(device)

    @property
    def batch_size(self) -> torch.Size:
        """The members' batch size, with their number at `stack_dim`; -1 where sizes differ.

        >>> lazy_stack([TensorDict(batch_size=[2]), TensorDict(batch_size=[3])]).batch_size
        torch.Size([2, -1])
        """
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: Any) -> None:
        size = build.as_size(value)
        if size != self._batch_size:
            raise RuntimeError(
                f"Received a new batch size {list(size)} with an existing batch size "
                f"{self._batch_size} in a lazy stack. Modifying the batch size of a lazy "
                "representation of a tensordict is not permitted. Consider instantiating the "
                "tensordict first by calling `td = td.to_tensordict()` before resetting the "
                "batch size."
            )

    shape = batch_size

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        dim = self.stack_dim
        if len(batch_size) <= dim or batch_size[dim] != len(self.tensordicts):
            raise RuntimeError(
                f"a lazy stack of {len(self.tensordicts)} members along dim {dim} can't have the "
                f"batch size {tuple(batch_size)}; td.to_tensordict() gives a dense one, which can"
            )
        size = torch.Size((*batch_size[:dim], *batch_size[dim + 1 :]))
        build.resize(self.tensordicts, size)
        if self._names is not None:
            self._names = (self._names + [None] * len(batch_size))[: len(batch_size)]
        self._batch_size = batch_size

    # -- the contract of Node: shape

    def _batched(
        self, fn: LeafFn, ndim: int, batch_size: torch.Size, names: Names = None, op: Op = ()
    ) -> Any:
        if self.stack_dim >= ndim:
            moved = self.stack_dim + len(batch_size) - ndim
            members = [td._batched(fn, ndim, batch_size, None, op) for td in self.tensordicts]
            size = batch_size + self._member_size()[ndim:]
            out = self._of(members, moved, size)
        else:
            out = reshaped_lazily(self, ndim, batch_size, op)
            if out is None:
                out = self._batched_dense(fn, ndim, batch_size, names, op)
                if not out._is_data():
                    return out
        if names is not None or self._names is not None:
            names = child_names(self, ndim, batch_size, names)
            if names is not None:
                out._set_names(names)
        return out

    def _batched_dense(
        self, fn: LeafFn, ndim: int, batch_size: torch.Size, names: Names, op: Op
    ) -> Any:
        dense = TensorDict._make(self._entries(), self._batch_size, self._device, self._names)
        return dense._batched(fn, ndim, batch_size, names, op)

    # -- the contract of Node: rows

    def _index(self, idx: Any, ndim: int, batch_size: torch.Size | None) -> Any:
        if idx.__class__ is int and not self.stack_dim:
            return lazy_rows.row(self, idx, (), ndim)
        return lazy_rows.rows(self, idx, ndim)

    def _no_rows(self, plan: lazy_rows.Plan, ndim: int) -> Any:
        """A dense container without rows: with the entries of the first member, of size 0."""
        first = self._of([self.tensordicts[0]], self.stack_dim)
        dense = TensorDict._make(first._entries(), first._batch_size, self._device)
        return dense._index(plan.emptied, ndim, None)

    _set_index = lazy_rows.set_rows

    # -- operations that go to the members

    @classmethod
    @shows_options_of(TensorDict.from_dict)
    def from_dict(
        cls,
        input_dict: Any,
        *,
        stack_dim: int = 0,
        stack_dim_name: str | None = None,
        names: Sequence[str | None] | None = None,
        **options: Any,
    ) -> Any:
        """The lazy stack of containers made of the dicts in a list, or in a dict.

        A dict of tensors gives a dense container; the options are those of `TensorDict.from_dict`,
        for each dict.
        names: of all dimensions of the stack.

        >>> td = LazyStackedTensorDict.from_dict([{"a": [1]}, {"a": [2, 3]}])
        >>> td.get("a", as_list=True)
        [tensor([1]), tensor([2, 3])]
        """
        rows = list(input_dict.values() if isinstance(input_dict, Mapping) else input_dict)
        if not rows or not all([isinstance(row, Mapping) for row in rows]):
            return TensorDict.from_dict(input_dict, names=names, **options)
        members = [TensorDict.from_dict(row, **options) for row in rows]
        out = lazy_stack(members, stack_dim, stack_dim_name=stack_dim_name)
        if names is not None:
            out.names = names
        return out

    def contiguous(self, *, canonical: bool = False, inplace: bool = False) -> TensorDict:  # type: ignore[override]
        """The dense container: every entry stacked, which makes it contiguous in any sense.

        inplace: no effect, as the members can't become a dense container.
        Raises RuntimeError if entries differ in shape; `densify` makes nested tensors of these.

        >>> type(lazy_stack([TensorDict(a=1), TensorDict(a=2)]).contiguous()).__name__
        'TensorDict'
        """
        out = {
            name: value.contiguous() if isinstance(value, Node) else value
            for name, value in self._entries().items()
        }
        return TensorDict._make(out, self._batch_size, self._device, self._names)

    def is_memmap(self) -> bool:
        """Whether this, or each member, is a locked result of `memmap` or the like.

        >>> lazy_stack([TensorDict(a=1).memmap(), TensorDict(a=2).memmap()]).is_memmap()
        True
        """
        members = self.tensordicts
        return super().is_memmap() or bool(members) and all([td.is_memmap() for td in members])

    def is_contiguous(self) -> bool:
        """False: an entry of a lazy stack is not one contiguous tensor.

        >>> lazy_stack([TensorDict(a=1), TensorDict(a=2)]).is_contiguous()
        False
        """
        return False

    def densify(self, layout: torch.layout = torch.strided) -> TensorDict:  # type: ignore[override]
        """The dense container; entries of different shape become nested tensors of this layout.

        An entry that only some members have has no rows, or is None, in the others.

        >>> td = lazy_stack([TensorDict(a=torch.zeros(1)), TensorDict(a=torch.zeros(2))])
        >>> td.densify(layout=torch.jagged)["a"].is_nested
        True
        """
        out: Entries = {}
        whole = self._with_all_entries()
        for name, value in whole._peek().items():
            if isinstance(value, Node):
                out[name] = value if value._is_data() else value.densify(layout)
                continue
            try:
                out[name] = whole._get_str(name)
            except RuntimeError:
                if self.stack_dim:
                    raise NotImplementedError(
                        f"densify: {name!r} has different shapes in the members, and a nested "
                        "tensor has these along its first dimension, but they are stacked along "
                        f"dim {self.stack_dim}: td.transpose(0, {self.stack_dim}).densify()"
                    ) from None
                out[name] = whole._get_lazy(name, as_nested_tensor=True, layout=layout)
        return dim_names.passed_on(
            TensorDict._make(out, self._batch_size, self._device, self._names)
        )

    def _with_all_entries(self) -> Any:
        """The stack of members that have all entries of all: those that they lack have no rows."""
        names = {name for exclusive in self._exclusive() for name in exclusive}
        if not names:
            return self
        members, ndim = [td.copy() for td in self.tensordicts], len(self._batch_size) - 1
        for name in sorted(names):
            there = next(v for td in members if (v := td._peek_str(name)) is not None)
            if isinstance(there, Node):
                data = there._is_data()
                lacking = kinds.NonTensorData(None, there._batch_size) if data else there.empty()
            elif there.dim() > ndim:
                lacking = there.new_empty([*there.shape[:ndim], 0, *there.shape[ndim + 1 :]])
            else:
                raise RuntimeError(
                    f"densify: only some members have the entry {name!r}, and it has no dimension "
                    "that could be empty in the others: set it in all, or leave it out with "
                    f"td.exclude({name!r})"
                )
            for td in members:
                if td._peek_str(name) is None:
                    td._set_str(name, lacking)
        return self._of(members, self.stack_dim)

    def _cut(self, lengths: list[int], dim: int) -> tuple[Any, ...]:
        """Consecutive pieces along `dim`: along the stack dimension, lazy stacks of members."""
        members = self.tensordicts if dim == self.stack_dim and 0 not in lengths else None
        names, at, out = self._names, 0, []
        for n in lengths:
            rows = slice(at, at + n)
            if members is None:
                part = self._index((*(_ALL,) * dim, rows), len(self._batch_size), None)
            else:
                part = self._of(members[rows], dim)
            if names is not None:
                dim_names.store(part, list(names))
            out.append(part)
            at += n
        return tuple([keep_mapped(part, self).lock_() for part in out] if self._locked else out)

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """The rows along `dim`: along the stack dimension, the members themselves.

        >>> [td["a"].item() for td in lazy_stack([TensorDict(a=1), TensorDict(a=2)]).unbind(0)]
        [1, 2]
        """
        dim = build.batch_dim(self, dim)
        if dim == self.stack_dim:
            return tuple(self.tensordicts)
        lead = (_ALL,) * dim
        num = self._batch_size[dim]
        if num < 0:
            raise RuntimeError(
                f"the members differ in size along dim {dim}, so they have no rows there"
            )
        return tuple([self[(*lead, i)] for i in range(num)])

    def _where(self, condition: Tensor, other: Any) -> Any:
        parts = self._split(other) if isinstance(other, Node) else [other] * len(self.tensordicts)
        if parts is None:
            return index.chosen(self.contiguous(), condition, other)
        rows = zip(self.tensordicts, self._tensor_parts(condition), parts, strict=True)
        return self._of_members([td._where(row, part) for td, row, part in rows])

    # -- showing

    def _exclusive(self) -> list[list[str]]:
        """The names of the entries of each member that not all members have."""
        shared = set(self._entry_names())
        return [sorted(name for name in td.keys() if name not in shared) for td in self.tensordicts]

    def _extra_lines(self) -> list[str]:
        blocks = []
        for i, (td, names) in enumerate(zip(self.tensordicts, self._exclusive(), strict=True)):
            if names:
                lines = ",\n".join([f"{name}: {printing._describe(td, name)}" for name in names])
                blocks.append(f"    {i} ->\n" + textwrap.indent(lines, " " * 8))
        return ["exclusive_fields={\n" + (",\n".join(blocks) if blocks else "") + "}"]

    def _last_lines(self) -> list[str]:
        return [f"stack_dim={self.stack_dim}"]

    def _describe_differences(self, name: str) -> str:
        first = self
        while isinstance(first, LazyStackedTensorDict):
            first = first.tensordicts[0]
        value = first._get_str(name)
        if not isinstance(value, Tensor):
            return f"{type(value).__name__} and others"
        size = member_shape(self, name)
        return printing.describe_tensor(value).replace(f"shape={value.shape}", f"shape={size}")


# ------------------------------------------------------------------------------------- functions


@overload
def lazy_stack(
    input: Sequence[TensorDictBase], dim: int = 0, **options: Unpack[build.LazyStackOptions]
) -> LazyStackedTensorDict: ...
@overload
def lazy_stack(
    input: Sequence[Container], dim: int = 0, **options: Unpack[build.LazyStackOptions]
) -> Container: ...
@kinds.enter
def lazy_stack(
    input: Sequence[Any],
    dim: int = 0,
    *,
    out: Any = None,
    device: Device = None,
    stack_dim_name: str | None = None,
    strict_shape: bool = False,
    as_list: bool = False,
    as_padded_tensor: bool = False,
    as_nested_tensor: bool = False,
    padding_side: str = "right",
    layout: torch.layout | None = None,
    padding_value: float | bool = 0.0,
) -> Node | Tensor | list[Tensor]:
    """Stack containers without copying; entries are stacked when they are read.

    out: container that the stacked entries are written to.
    strict_shape: refuse containers of different batch sizes.
    as_list, as_padded_tensor, as_nested_tensor: what to make of a list of tensors, instead of one
        tensor by `torch.stack`; for entries of a lazy stack these are options of `get`.

    >>> td = lazy_stack([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(3))])
    >>> td.get("a", as_list=True)
    [tensor([0., 0.]), tensor([0., 0., 0.])]
    """
    members = input if input.__class__ is list else list(input)
    if not members:
        raise RuntimeError(
            "lazy_stack: the list of containers to stack is empty; items cannot be empty"
        )
    first, forms = members[0], (as_list, as_padded_tensor, as_nested_tensor)
    if any(forms):
        return joined_tensors(
            members, dim, forms, padding_side=padding_side, layout=layout, fill=padding_value
        )
    for td in members:
        if not isinstance(td, Node):
            if all([isinstance(other, Tensor) for other in members]):
                return torch.stack(members, dim, out=out)
            raise TypeError(
                f"Expected all inputs to be containers, got {type(td).__name__}; torch.stack "
                "stacks tensors"
            )
    if device is not None or strict_shape:
        members = _moved_members(members, device, strict_shape)
        first = members[0]
    plain = first.__class__ is TensorDict
    if not plain and first._is_data() and all([td._is_data() for td in members]):
        result = first._stack_data(members, dim)
    elif not plain and hasattr(first, "_wrap"):
        result = first._wrap(lazy_stack([_contents(td, type(first)) for td in members], dim))
    else:
        result = _new_object(LazyStackedTensorDict)
        result._setup(list(members), dim, None, stack_dim_name)
        if result._mark is not None:  # made by hand, as a member is
            result._held = False
    return result if out is None else out.update(result, inplace=True)


def _moved_members(tds: Sequence[Any], device: Any, strict_shape: bool) -> list[Any]:
    """Containers on the device, if one is given; RuntimeError if their sizes differ and may not."""
    for i, td in enumerate(tds if strict_shape else ()):
        if td._batch_size != tds[0]._batch_size:
            raise size_mismatch(tds[0]._batch_size, td._batch_size, i)
    return list(tds) if device is None else [td.to(device) for td in tds]


def _contents(td: Any, cls: type) -> Any:
    """The container that a tensorclass instance wraps."""
    if not hasattr(td, "_td"):
        raise TypeError(
            f"stacking a {cls.__name__} with a {type(td).__name__} is ambiguous: make all of one "
            "class"
        )
    return td._td
