"""Lazy stacks: containers that stay apart and are stacked when an entry is read.

A `LazyStackedTensorDict` shows its members as one container with a batch dimension more. Reading an
entry stacks it, writing one takes it apart; indexing and shape operations go to the members, so
that members whose entries differ in shape, or that have other entries, can be handled together.
"""

from __future__ import annotations

import itertools
import math
import textwrap
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raffia.tensordict import build, convert, dim_names, entries, index, lock, shape
from raffia.tensordict.build import as_device, as_size
from raffia.tensordict.entries import NO_DEFAULT, KeysView, locked_error
from raffia.tensordict.keys import (
    NestedKey,
    is_key,
    missing,
    raise_missing,
    unravel_key,
    unravel_key_to_tuple,
)
from raffia.tensordict.memmap import keep_mapped
from raffia.tensordict.node import Entries, Node, child_names
from raffia.tensordict.tensordict import TensorDict, TensorDictBase
from raffia.tensordict.unbatched import UnbatchedTensor

Names = list[str | None] | None
_new_object = object.__new__
_ALL = slice(None)


class StackDimError(IndexError, RuntimeError):
    """There is no such dimension to stack along.

    >>> LazyStackedTensorDict(TensorDict(), stack_dim=1)
    Traceback (most recent call last):
    ...
    raffia.tensordict.lazy.StackDimError: stack dim 1 is out of range: members of batch size ()...
    """


class LazyStackedTensorDict(TensorDictBase):
    """Containers shown as one with a new batch dimension; an entry is stacked when it is read.

    tensordicts: the members; their batch sizes have as many dimensions, and a dimension whose sizes
        differ shows as -1.
    stack_dim: where the new dimension stands.
    batch_size: that of the members, where there are none.
    device: the members are moved there.
    names, stack_dim_name: names of all dimensions, or of the new one.
    strict_shape: refuse members of unlike batch sizes.
    hook_in, hook_out: called on what is written to and read from the stack.

    >>> td = LazyStackedTensorDict(TensorDict(a=1), TensorDict(a=2, b=3))
    >>> td["a"], list(td.keys()), td[1]["b"]
    (tensor([1, 2]), ['a'], tensor(3))
    """

    tensordicts: list[Any]
    stack_dim: int
    hook_in: Callable[[Any], Any] | None = None
    hook_out: Callable[[Any], Any] | None = None
    _lazy = True
    _own_lock = False

    def __init__(
        self,
        *tensordicts: Any,
        stack_dim: int = 0,
        hook_out: Callable[[Any], Any] | None = None,
        hook_in: Callable[[Any], Any] | None = None,
        batch_size: Sequence[int] | None = None,
        device: Any = None,
        names: Sequence[str | None] | None = None,
        stack_dim_name: str | None = None,
        strict_shape: bool = False,
    ) -> None:
        for td in tensordicts:
            if not isinstance(td, Node):
                raise TypeError(f"Expected all inputs to be containers, got {type(td).__name__}")
        if device is not None:
            tensordicts = tuple([td.to(device) for td in tensordicts])
        if strict_shape:
            for i, td in enumerate(tensordicts):
                if td._batch_size != tensordicts[0]._batch_size:
                    raise _unlike_sizes(tensordicts[0]._batch_size, td._batch_size, i)
        size = as_size(batch_size) if batch_size is not None and not tensordicts else None
        self._setup(list(tensordicts), stack_dim, size, stack_dim_name)
        if hook_in is not None:
            self.hook_in = hook_in
        if hook_out is not None:
            self.hook_out = hook_out
        if names is not None:
            self.names = names

    def _setup(
        self,
        members: list[Any],
        stack_dim: int,
        member_size: torch.Size | None = None,
        stack_dim_name: str | None = None,
    ) -> None:
        """Fill in a new object; `member_size` is the batch size of a member where there is none."""
        names: Names = None
        device = None
        if members:
            first, alike = members[0], True
            size, device, names = first._batch_size, first._device, first._names
            for td in members:
                if td._batch_size != size:
                    alike = False
                if td._device != device:
                    device = None
                if td._names != names:
                    names = None
            if not alike:
                size = _common_size(members)
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
        """The same stack over other members, with the same names."""
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
                    raise self._unlike(name) from error
                raise
        else:
            out = self._stacked_nodes(name, values)
        return out if self.hook_out is None else self.hook_out(out)

    def _stacked_nodes(self, name: str, values: list[Any]) -> Any:
        for value in values:
            if not isinstance(value, Node):
                raise self._unlike(name)
        stack = lazy_stack(values, self.stack_dim)
        if isinstance(stack, Tensor):
            return stack
        if self._names is not None:
            stack.names = [*self._names, *stack.names[len(self._names) :]]
        return stack

    def _unlike(self, name: str) -> RuntimeError:
        shapes = [_member_shape(td, name) for td in self.tensordicts]
        return RuntimeError(
            f"Failed to stack tensors within a tensordict under the key {name!r}: their shapes "
            f"are {shapes}. td.get({name!r}, as_list=True) gives them one by one, "
            "as_padded_tensor=True padded to one shape, as_nested_tensor=True as a nested tensor."
        )

    def _peek_str(self, name: str) -> Any:
        """What stands under `name`, without stacking it: a tensor of one member for a tensor."""
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
        return {name: self._peek_str(name) for name in self._shared()}

    def _entries(self) -> Entries:
        return {name: self._get_str(name) for name in self._shared()}

    def _shared(self) -> list[str]:
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
        """The entry `name` in a form that also holds tensors of unlike shape."""
        values = [td._get_str(name) for td in self.tensordicts if td.__class__ is TensorDict]
        if len(values) != len(self.tensordicts):
            options: dict[str, Any] = dict(as_list=as_list, as_padded_tensor=as_padded_tensor)
            options |= dict(as_nested_tensor=as_nested_tensor, layout=layout)
            options |= dict(padding_value=padding_value, padding_side=padding_side)
            values = [td._get_lazy(name, **options) for td in self.tensordicts]
        if not values or any([value is None for value in values]):
            return None
        if isinstance(values[0], Node):
            return self._get_str(name)
        if as_list:
            return values
        if as_padded_tensor:
            return torch.stack(_padded(values, padding_value, padding_side), self.stack_dim)
        if as_nested_tensor:
            return _nested(values, layout)
        return self._get_str(name)

    def get_nestedtensor(
        self, key: NestedKey, default: Any = NO_DEFAULT, *, layout: Any = None
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

    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: Any = None,
        *,
        sort: bool = False,
    ) -> Any:
        """A live view of the keys that all members have; the flags are those of `TensorDict.keys`.

        >>> list(lazy_stack([TensorDict(a=1, b=2), TensorDict(a=3)]).keys())
        ['a']
        """
        return _Keys(self, (include_nested, leaves_only, is_leaf, sort), 0)

    def is_empty(self) -> bool:
        """Whether there is no leaf that all members have.

        >>> lazy_stack([TensorDict(), TensorDict()]).is_empty()
        True
        """
        for name in self._shared():
            value = self.tensordicts[0]._peek_str(name)
            if isinstance(value, Node):
                value = self._peek_str(name)
            if not isinstance(value, Node) or not value.is_empty():
                return False
        return True

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

    def get_item_shape(self, key: NestedKey) -> torch.Size:
        """The shape of the entry under `key`, with -1 for dimensions that differ.

        >>> td = lazy_stack([TensorDict(a=torch.zeros(1)), TensorDict(a=torch.zeros(2))])
        >>> td.get_item_shape("a")
        torch.Size([2, -1])
        """
        found = _member_shape(*entries.holder(self, key))
        if found is None:
            raise_missing(key, self)
        return found

    def entry_class(self, key: NestedKey) -> type:
        """The class of the entry under `key`, which all members have.

        >>> lazy_stack([TensorDict(a=dict(b=1)), TensorDict(a=dict(b=2))]).entry_class("a").__name__
        'LazyStackedTensorDict'
        """
        path = (key,) if key.__class__ is str else key
        found: Any = None
        try:
            for found in self.tensordicts:
                for name in path:
                    found = found._d[name]
                if found.__class__ is not Tensor:
                    break
        except (KeyError, AttributeError, TypeError):  # not in plain containers, or not in all
            found = None
        return Tensor if found.__class__ is Tensor else entries.entry_class(self, key)

    def non_tensor_items(self, include_nested: bool = False) -> tuple[tuple[Any, Any], ...]:
        """The `(key, entry)` pairs of the non-tensor entries that all members have.

        >>> td = lazy_stack([TensorDict(a="x", b=1), TensorDict(a="y", b=2)])
        >>> [(key, entry.tolist()) for key, entry in td.non_tensor_items()]
        [('a', ['x', 'y'])]
        """
        out: list[tuple[Any, Any]] = []
        for name, value in self.tensordicts[0]._peek().items() if self.tensordicts else ():
            if value.__class__ is Tensor or not include_nested and value.__class__ is TensorDict:
                continue
            entry = self._peek_str(name)
            if isinstance(entry, Node) and not isinstance(entry, Tensor):
                if entry._is_data():
                    out.append((name, entry))
                elif include_nested:
                    below = entries.non_tensor_items(entry, True)
                    out += [(unravel_key((name, key)), found) for key, found in below]
        return tuple(out)

    # -- writing

    def _set_str(self, name: str, value: Any) -> None:
        members = self.tensordicts
        self._check_open(name)
        if self.hook_in is not None:
            value = self.hook_in(value)
        parts = self._parts(name, value)
        if isinstance(value, Tensor) and self._device is None:  # of the right shape, so not refused
            for td, part in zip(members, parts, strict=True):
                td._set_str(name, part)
            return
        stores = [store for td in members for store in td._stores()]
        saved = [store.get(name) for store in stores]
        try:
            for td, part in zip(members, parts, strict=True):
                td._set_str(name, part)
        except BaseException:
            for store, value in zip(stores, saved, strict=True):
                store.pop(name, None)
                if value is not None:
                    store[name] = value
            raise

    def _parts(self, name: str, value: Any) -> Sequence[Any]:
        """What `value` is for each member."""
        num, dim, size = len(self.tensordicts), self.stack_dim, self._batch_size
        if isinstance(value, list) and dim == 0:
            if len(value) != num:
                raise self._mismatch(name, f"is a list of {len(value)} values")
            return value
        if not isinstance(value, (Tensor, Node)):
            value = build.as_entry(value, self, name)
        if isinstance(value, UnbatchedTensor):
            return [value] * num
        if isinstance(value, Tensor) and value.is_nested:
            parts: Any = value.unbind(0)
            if len(parts) != num:
                raise self._mismatch(name, f"is a nested tensor of {len(parts)} tensors")
            return parts
        given = value.shape[: len(size)]
        if given != size:
            if isinstance(value, Node) and len(given) < len(size) and _fits(given, size):
                value = build.promoted(value, size, name)
            elif len(given) < len(size) or not _fits(given, size):
                raise self._mismatch(name, f"has shape {value.shape}")
        return value.unbind(dim)

    def _mismatch(self, name: str, what: str) -> RuntimeError:
        return RuntimeError(
            f"batch dimension mismatch: the batch size is {self._batch_size} but the value {what} "
            f"for key {name!r}; the leading dimensions of a value must be the batch size"
        )

    def _split(self, other: Any) -> Sequence[Any] | None:
        """The part of another container for each member; None if it can't be taken apart so."""
        num, dim = len(self.tensordicts), self.stack_dim
        if isinstance(other, LazyStackedTensorDict) and other.stack_dim == dim:
            return other.tensordicts if len(other.tensordicts) == num else None
        size = other._batch_size
        if len(size) <= dim or size[dim] != num:
            return None
        return other.unbind(dim)

    def _parts_of(self, source: Any) -> Sequence[Any] | None:
        """`_split`, of a dict too; None unless there are only tensors and such containers in it."""
        if source.__class__ is type(self) or source.__class__ is TensorDict:
            return self._split(source)
        if source.__class__ is not dict:
            return None
        num, dim = len(self.tensordicts), self.stack_dim
        rows: list[dict[Any, Any]] = [{} for _ in range(num)]
        for name, value in source.items():
            if value.__class__ is not Tensor:
                parts: Any = self._parts_of(value)
            elif value.is_nested or value.dim() <= dim or value.shape[dim] != num:
                parts = None
            else:
                parts = value.unbind(dim)
            if parts is None:
                return None
            for row, part in zip(rows, parts, strict=True):
                row[name] = part
        return rows

    def _check_open(self, name: str) -> None:
        if self._own_lock or any([td._locked for td in self.tensordicts]):
            raise locked_error(self, name)

    def _del_str(self, name: str) -> None:
        self._check_open(name)
        for td in self.tensordicts:
            if td._peek_str(name) is not None:
                td._del_str(name)

    def _replace_str(self, name: str, value: Any) -> None:
        for td, part in zip(self.tensordicts, value.unbind(self.stack_dim), strict=True):
            td._replace_str(name, part)

    def _stores(self) -> list[Entries]:
        return [store for td in self.tensordicts for store in td._stores()]

    def del_(self, key: NestedKey) -> Any:
        """Remove the entry under `key` from all members that have it, and return the container.

        >>> list(lazy_stack([TensorDict(a=1, b=2), TensorDict(a=3)]).del_("b")[0].keys())
        ['a']
        """
        path = unravel_key_to_tuple(key)
        if len(path) > 1:
            entries.del_(self, key)
            return self
        if self._locked:
            raise locked_error(self, key)
        if all([td._peek_str(path[0]) is None for td in self.tensordicts]):
            raise missing(path[0], self)
        self._del_str(path[0])
        return self

    def rename_key_(self, old_key: NestedKey, new_key: NestedKey, safe: bool = False) -> Any:
        """Move an entry of all members to another key.

        safe: refuse to overwrite an entry that is there.

        >>> list(lazy_stack([TensorDict(a=1), TensorDict(a=2)]).rename_key_("a", "b").keys())
        ['b']
        """
        old_key, new_key = unravel_key(old_key), unravel_key(new_key)
        if not entries.contains(self, old_key):
            raise_missing(old_key, self)
        if self._locked:
            raise locked_error(self, old_key)
        if safe and entries.contains(self, new_key) and old_key != new_key:
            raise KeyError(
                f"key {new_key!r} already present in {type(self).__name__}; "
                "rename_key_(..., safe=False) overwrites it"
            )
        for td in self.tensordicts:
            td.rename_key_(old_key, new_key)
        return self

    def set(
        self, key: NestedKey, item: Any, inplace: bool = False, *, non_blocking: bool = False
    ) -> Any:
        """Store the parts of `item` under `key` in the members; see `TensorDict.set`.

        >>> td = lazy_stack([TensorDict(a=dict(b=1)), TensorDict(a=dict(b=2))])
        >>> td.set(("a", "c"), torch.tensor([3, 4]))[1]["a", "c"]
        tensor(4)
        """
        if not inplace and self._set_below(key, item):
            return self
        return entries.set(self, key, item, inplace, non_blocking=non_blocking)

    def _set_below(self, key: Any, item: Any) -> bool:
        """Store a tensor under a nested key; False if that is no such thing, or needs checks."""
        if key.__class__ is not tuple or item.__class__ is not Tensor or self.hook_in is not None:
            return False
        if not key or not all([name.__class__ is str for name in key]):
            return False
        nodes = []
        for td in self.tensordicts:
            node, rest = td, key
            while len(rest) > 1 and node.__class__ is TensorDict and rest[0] in node._d:
                node, rest = node._d[rest[0]], rest[1:]
                if node.__class__ is TensorDict and node._locked:
                    return False
            if node.__class__ is not TensorDict or td._locked or node._device is not None:
                return False
            if node._batch_size != td._batch_size:
                return False
            nodes.append((node, rest))
            if len(rest) != len(nodes[0][1]):  # a level that not all members have
                return False
        size = self._batch_size
        if item.is_nested or item.shape[: len(size)] != size:
            return False
        for (node, rest), part in zip(nodes, item.unbind(self.stack_dim), strict=True):
            value: Any = part
            for name in reversed(rest[1:]):  # levels that are missing
                value = node._new({name: value}, node._batch_size, node._names and [*node._names])
            node._d[rest[0]] = value
        return True

    def set_(self, key: NestedKey, item: Any, *, non_blocking: bool = False) -> Any:
        """Write `item` into the tensors of the members that stand under `key`; allowed when locked.

        Raises KeyError if a member has no such entry.

        >>> td = lazy_stack([TensorDict(a=1), TensorDict(a=2)])
        >>> td.set_("a", torch.zeros(2))[0]["a"]
        tensor(0)
        """
        into: list[Tensor] = []
        values: list[Tensor] = []
        if key.__class__ is tuple and entries.writes(self, _below(key, item), into, values):
            if entries.copied(into, values, non_blocking):
                return self
        key = unravel_key(key)
        for td in self.tensordicts:
            if not entries.contains(td, key):
                raise_missing(key, self)
        if isinstance(item, (int, float, complex, str)) or (
            isinstance(item, Tensor) and not item.dim()
        ):
            parts: Sequence[Any] = [item] * len(self.tensordicts)
        else:
            parts = self._parts(str(key), item)
        for td, part in zip(self.tensordicts, parts, strict=True):
            td.set_(key, part, non_blocking=non_blocking)
        return self

    def set_at_(self, key: NestedKey, value: Any, index: Any, *, non_blocking: bool = False) -> Any:
        """Write `value` into the rows `index` of the entry under `key`.

        >>> td = lazy_stack([TensorDict(a=1), TensorDict(a=2)])
        >>> td.set_at_("a", 5, 0)["a"]
        tensor([5, 2])
        """
        key = unravel_key(key)
        if not entries.contains(self, key):
            raise_missing(key, self)
        for td in self.tensordicts:  # the entry itself in containers of its own
            if isinstance(entries.get(td, key), Node):
                break
        else:
            if index.__class__ is int and self._wrote_row(key, value, index):
                return self
            if isinstance(value, (list, tuple, np.ndarray, np.generic)):
                value = torch.as_tensor(value)
                if value.shape == (1,) and isinstance(index, (int, np.integer)):
                    value = value[0]  # as a tensor takes it
            try:
                self.select(key)[index] = value
            except RuntimeError as error:
                raise RuntimeError(f"cannot write into rows of entry {key!r}: {error}") from error
            return self
        node, name = entries.holder(self, key)
        entry = node._get_str(name)
        if index.__class__ is int and not self.stack_dim and entry._is_data():
            self._row(index, (), self.ndim).set_(key, value)  # one value for the whole member
        elif entry._is_data():
            node._replace_str(name, entry._with_rows(index, value))
        else:
            entry[index] = value
        return self

    def _wrote_row(self, key: NestedKey, value: Any, at: int) -> bool:
        """Write a tensor into that of one member; False if it is not as simple as that."""
        if self.stack_dim or not -len(self.tensordicts) <= at < len(self.tensordicts):
            return False
        member = self.tensordicts[at]
        if value.__class__ is not Tensor or member.__class__ is not TensorDict:
            return False
        node, name = entries.place(member, key)
        dest = None if node is None else node._d[name]
        return dest.__class__ is Tensor and entries.copied([dest], [value])

    def fill_(self, key: NestedKey, value: float | bool) -> Any:
        """Fill the tensors of the members under `key` with `value`.

        >>> lazy_stack([TensorDict(a=1), TensorDict(a=2)]).fill_("a", 5)["a"]
        tensor([5, 5])
        """
        if not entries.contains(self, key):
            raise_missing(key, self)
        for td in self.tensordicts:
            td.fill_(key, value)
        return self

    def update(
        self,
        input_dict_or_td: Any = None,
        clone: bool = False,
        inplace: bool = False,
        *,
        keys_to_update: Sequence[NestedKey] | None = None,
        update_batch_size: bool = False,
        ignore_lock: bool = False,
        **options: Any,
    ) -> Any:
        """Store all entries of a container or dict in the members; see `TensorDict.update`.

        >>> td = lazy_stack([TensorDict(a=1), TensorDict(a=2)])
        >>> td.update({"b": torch.tensor([3, 4])})[1]["b"]
        tensor(4)
        """
        if self._locked and ignore_lock:
            with self.unlock_():
                return self.update(
                    input_dict_or_td,
                    clone,
                    inplace,
                    keys_to_update=keys_to_update,
                    update_batch_size=update_batch_size,
                    **options,
                )
        known = {k: options.pop(k) for k in ("non_blocking", "is_leaf") if k in options}
        source = entries.merged(input_dict_or_td, options)
        if source is self:
            return self
        resized = update_batch_size and isinstance(source, Node)
        if inplace and keys_to_update is None and not (resized or known.get("is_leaf")):
            into: list[Tensor] = []
            values: list[Tensor] = []
            if entries.writes_lazily(self, source, into, values):
                if entries.copied(into, values, known.get("non_blocking", False)):
                    return self
        if self._locked and not inplace:
            raise locked_error(self)
        if resized:
            return self._resized_by(source, clone, inplace, keys_to_update, known)
        if keys_to_update is None and self.hook_in is None and not (clone or inplace or known):
            if self._take_parts(source):
                return self
        parts = self._split(source) if isinstance(source, Node) else None
        with entries.all_or_nothing(self, source):
            if parts is not None:
                for td, part in zip(self.tensordicts, parts, strict=True):
                    td.update(part, clone, inplace, keys_to_update=keys_to_update, **known)
                return self
            if keys_to_update is not None:
                source = entries.restricted(source, keys_to_update)
            for key in list(source.keys()):
                value = source._get_str(key) if isinstance(source, Node) else source[key]
                self._update_one(unravel_key(key), value, clone, inplace, known)
        return self

    def _take_parts(self, source: Any) -> bool:
        """Store the entries of a container or dict, if that needs no further checks."""
        parts = self._parts_of(source)
        if parts is None:
            return False
        pairs = list(zip(self.tensordicts, parts, strict=True))
        for td, part in pairs:
            if td.__class__ is not TensorDict or part.__class__ not in (TensorDict, dict):
                return False
            if not td._fits(part):
                return False
        for td, part in pairs:
            td._take(part)
        return True

    def _resized_by(
        self, source: Any, clone: bool, inplace: bool, keys_to_update: Any, known: Any
    ) -> Any:
        """`update` by a container whose batch size is taken over, which the members must have."""
        dim, given = self.stack_dim, source._batch_size
        if len(given) <= dim or given[dim] != len(self.tensordicts):
            raise RuntimeError(
                f"update_batch_size=True: a lazy stack of {len(self.tensordicts)} members along "
                f"dim {dim} can't have the batch size {tuple(given)}; td.to_tensordict() can"
            )
        size = torch.Size((*given[:dim], *given[dim + 1 :]))
        options: Any = dict(keys_to_update=keys_to_update, update_batch_size=True, **known)
        with entries.all_or_nothing(self):
            for td, part in zip(self.tensordicts, source.unbind(dim), strict=True):
                td.update(part, clone, inplace, **options)
        name = None if self._names is None else self._names[dim]
        self._names = None
        self._setup(self.tensordicts, dim, size, name)
        return self

    def _update_one(self, key: Any, value: Any, clone: bool, inplace: bool, known: Any) -> None:
        if isinstance(value, Mapping) or (isinstance(value, Node) and not value._is_data()):
            node: Any = self
            for name in unravel_key_to_tuple(key):
                node = node._peek_str(name) if isinstance(node, Node) else None
            if isinstance(node, Node) and not node._is_data():
                node.update(value, clone, inplace, **known)
                return
        if clone and isinstance(value, (Tensor, Node)):
            value = value.clone()
        if inplace and entries.contains(self, key):
            self.set_(key, value)
        else:
            self.set(key, value)

    def update_at_(self, input_dict_or_td: Any, idx: Any, clone: bool = False, **o: Any) -> Any:
        """Write into the rows `idx`; one whole member is written like any other container.

        >>> td = lazy_stack([TensorDict(a=1), TensorDict(a=2, b=0)])
        >>> td.update_at_({"a": torch.tensor(5)}, 0)["a"]
        tensor([5, 2])
        """
        if idx.__class__ is int and not self.stack_dim and not self._is_data():
            self._row(idx, (), self.ndim).update_(input_dict_or_td, clone, **o)
            return self
        return entries.update_at_(self, input_dict_or_td, idx, clone, **o)

    def update_(
        self,
        input_dict_or_td: Any = None,
        clone: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: Sequence[NestedKey] | None = None,
        **entries_: Any,
    ) -> Any:
        """Write the entries of a container or dict into the members' tensors; allowed when locked.

        Raises KeyError, before anything is written, if a key is not there.

        >>> td = lazy_stack([TensorDict(a=1), TensorDict(a=2)]).lock_()
        >>> td.update_({"a": torch.tensor([3, 4])})["a"]
        tensor([3, 4])
        """
        source = entries.merged(input_dict_or_td, entries_)
        into: list[Tensor] = []
        values: list[Tensor] = []
        if keys_to_update is None and entries.writes_lazily(self, source, into, values):
            if entries.copied(into, values, non_blocking):
                return self
        parts = self._split(source) if isinstance(source, Node) and keys_to_update is None else None
        if parts is None:
            return entries.update_(
                self, source, clone, non_blocking=non_blocking, keys_to_update=keys_to_update
            )
        for td, part in zip(self.tensordicts, parts, strict=True):
            for key in part.keys():
                if not entries.contains(td, key):
                    raise_missing(key, td)
        for td, part in zip(self.tensordicts, parts, strict=True):
            td.update_(part, clone, non_blocking=non_blocking)
        return self

    def insert(self, index: int, tensordict: Any) -> None:
        """Put a container before the member `index`, as in a list.

        Raises ValueError if its batch size or device is not that of the members.

        >>> td = lazy_stack([TensorDict(a=1), TensorDict(a=2)])
        >>> td.insert(0, TensorDict(a=0))
        >>> td["a"]
        tensor([0, 1, 2])
        """
        self._insert(index, [tensordict])

    def _insert(self, index: int, new: list[Any]) -> None:
        """Put containers before the member `index`, all or none."""
        for td in new:
            if not isinstance(td, Node):
                raise TypeError(
                    "Expected new value to be TensorDictBase instance but got "
                    f"{type(td).__name__}; TensorDict(...) makes one of a dict"
                )
        if self._locked:
            raise locked_error(self)
        members = list(self.tensordicts)
        like = self if members else self._of(new[:1], self.stack_dim)
        size, device = like._member_size(), like._device
        for td in new:
            given = td._batch_size
            if given != size and not (len(given) == len(size) and _fits(given, size)):
                raise ValueError(
                    f"Batch sizes in tensordicts differs: stack has batch_size={size}, new_value "
                    f"has batch_size={given}."
                )
            if td._device != device:
                raise ValueError(
                    f"Devices differ: stack has device={device}, new value has "
                    f"device={td._device}; tensordict.to(device) moves it"
                )
        members[index:index] = new
        name = None if self._names is None else self._names[self.stack_dim]
        self._names = None
        self._setup(members, self.stack_dim, None, name)

    def append(self, tensordict: Any) -> None:
        """Put a container behind the last member.

        >>> td = lazy_stack([TensorDict(a=1)])
        >>> td.append(TensorDict(a=2))
        >>> td["a"]
        tensor([1, 2])
        """
        self._insert(len(self.tensordicts), [tensordict])

    def extend(self, tensordict: Any) -> None:
        """Put containers behind the last member: those of a list, or of another lazy stack.

        >>> td = lazy_stack([TensorDict(a=1)])
        >>> td.extend([TensorDict(a=2), TensorDict(a=3)])
        >>> td["a"]
        tensor([1, 2, 3])
        """
        if isinstance(tensordict, Node):
            tensordict = tensordict.unbind(self.stack_dim)
        if new := list(tensordict):
            self._insert(len(self.tensordicts), new)

    # -- the contract of Node: maps

    def _new(self, entries: Entries, batch_size: torch.Size, names: Names = None) -> Any:
        return TensorDict._make(entries, batch_size, self._device, names)

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Any:
        return self._of_members([td._map(fn) for td in self.tensordicts])

    def _shallow(self) -> Any:
        return self._of_members([td._shallow() for td in self.tensordicts])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        out = memo[id(self)] = self._of_members(convert.deepcopy_members(self, memo))
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
        before = [td._batch_size for td in self.tensordicts]
        try:
            for td in self.tensordicts:
                td._set_batch_size(size)
        except RuntimeError:
            for td, old in zip(self.tensordicts, before, strict=True):
                td._set_batch_size(old)
            raise
        if self._names is not None:
            self._names = (self._names + [None] * len(batch_size))[: len(batch_size)]
        self._batch_size = batch_size

    # -- the contract of Node: shape

    def _batched(
        self,
        fn: Callable[[Tensor], Tensor],
        ndim: int,
        batch_size: torch.Size,
        names: Names = None,
        op: tuple[Any, ...] = (),
    ) -> Any:
        if self.stack_dim >= ndim:
            moved = self.stack_dim + len(batch_size) - ndim
            members = [td._batched(fn, ndim, batch_size, None, op) for td in self.tensordicts]
            size = batch_size + self._member_size()[ndim:]
            out = self._of(members, moved, size)
        else:
            out = self._kept_lazy(ndim, batch_size, op)
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
        self,
        fn: Callable[[Tensor], Tensor],
        ndim: int,
        batch_size: torch.Size,
        names: Names,
        op: Any,
    ) -> Any:
        dense = TensorDict._make(self._entries(), self._batch_size, self._device, self._names)
        return dense._batched(fn, ndim, batch_size, names, op)

    def _kept_lazy(self, ndim: int, batch_size: torch.Size, op: tuple[Any, ...]) -> Any:
        """The result of a shape operation as a lazy stack; None where there is none."""
        name = op[0] if op else None
        if name == "transpose":
            order = list(range(ndim))
            order[op[1]], order[op[2]] = op[2], op[1]
            return self._permuted(tuple(order))
        if name == "permute":
            return self._permuted(op[1])
        if name == "unsqueeze":
            return self._unsqueezed(op[1], ndim)
        if name == "squeeze":
            return self._squeezed(op[1], ndim)
        if name == "expand":
            return self._expanded(op[1], ndim)
        if name in ("view", "reshape"):
            return self._reshaped(name, batch_size, ndim)
        if name == "repeat":
            return self._repeated(op[1])
        if name == "repeat_interleave" and len(op) == 3:
            return self._interleaved(op[1], op[2], ndim)
        return None

    def _on_members(
        self, fn: Callable[[Tensor], Tensor], ndim: int, size: torch.Size, op: tuple[Any, ...]
    ) -> list[Any]:
        """`fn` on the first `ndim - 1` dimensions of each member, which become `size`."""
        return [td._batched(fn, ndim - 1, size, None, op) for td in self.tensordicts]

    def _permuted(self, order: tuple[int, ...]) -> Any:
        dim, ndim = self.stack_dim, len(order)
        inner = tuple([d - (d > dim) for d in order if d != dim])
        old = self._member_size()
        size = torch.Size([old[d] for d in inner])

        def permuted(leaf: Tensor) -> Tensor:
            return leaf.permute(*inner, *range(ndim - 1, leaf.dim()))

        members: list[Any] = self.tensordicts
        if inner != tuple(range(ndim - 1)):
            members = self._on_members(permuted, ndim, size, ("permute", inner))
        return self._of(list(members), order.index(dim), size + old[ndim - 1 :])

    def _unsqueezed(self, at: int, ndim: int) -> Any:
        dim = self.stack_dim
        inner = at if at <= dim else at - 1
        old = self._member_size()
        size = torch.Size((*old[:inner], 1, *old[inner : ndim - 1]))
        members = self._on_members(
            lambda leaf: leaf.unsqueeze(inner), ndim, size, ("unsqueeze", inner)
        )
        return self._of(members, dim + (at <= dim), size + old[ndim - 1 :])

    def _squeezed(self, dims: tuple[int, ...], ndim: int) -> Any:
        dim = self.stack_dim
        inner = tuple([d - (d > dim) for d in dims if d != dim])
        old = self._member_size()
        size = torch.Size([old[d] for d in range(ndim - 1) if d not in inner])
        members: list[Any] = self.tensordicts
        if inner:
            members = self._on_members(
                lambda leaf: leaf.squeeze(inner), ndim, size, ("squeeze", inner)
            )
        if dim in dims:
            return members[0]
        moved = dim - len([d for d in dims if d < dim])
        return self._of(list(members), moved, size + old[ndim - 1 :])

    def _expanded(self, target: torch.Size, ndim: int) -> Any:
        lead = len(target) - ndim
        dim = self.stack_dim + lead
        size = torch.Size((*target[:dim], *target[dim + 1 :]))
        old = self._member_size()

        def expanded(leaf: Tensor) -> Tensor:
            return leaf.expand((*size, *leaf.shape[ndim - 1 :]))

        if size == old[: ndim - 1] and target[dim] == len(self.tensordicts):
            members = list(self.tensordicts)
        else:
            members = self._on_members(expanded, ndim, size, ("expand", size))
        if target[dim] != len(members):  # one member, shown several times
            members = members * target[dim]
        return self._of(members, dim, size + old[ndim - 1 :])

    def _reshaped(self, name: str, new: torch.Size, ndim: int) -> Any:
        """A reshape that members can do, or that merges the stack dimension with others into one.

        The old dimensions fall into three groups: those that the stack dimension is merged with,
        and those before and after; the new dimensions must fall into groups of the same sizes.
        """
        dim, old, mine = self.stack_dim, tuple(self._batch_size[:ndim]), self._member_size()
        if not math.prod(old) or -1 in old:
            return None
        for first, last in _spans(dim, ndim):
            cut = _cut_out(old, tuple(new), first, last)
            if cut is None:
                continue
            start, stop = cut
            if first == last:  # the stack dimension on its own, maybe split into several
                size = torch.Size((*new[:start], *new[stop:]))
                members = list(self.tensordicts)  # shown in another order of rows
                if size != mine[: ndim - 1]:
                    how = _reshaper(name, size, ndim - 1)
                    members = self._on_members(how, ndim, size, (name, size))
                return self._grid(members, new[start:stop], start)
            if stop - start != 1:
                return None
            lead, cells = (
                (_ALL,) * first,
                itertools.product(*[range(n) for n in old[first : last + 1]]),
            )
            out = self._of([self._index((*lead, *cell), ndim, None) for cell in cells], first)
            width = ndim - (last - first)
            return out if out._batch_size[:width] == new else out._reshaped(name, new, width)
        return None

    def _grid(self, members: list[Any], sizes: torch.Size, dim: int) -> Any:
        """Nested lazy stacks: members in row-major order over dimensions `sizes` at `dim`."""
        if not sizes:
            return members[0]
        for n in reversed(sizes[1:]):
            if not n:
                return None
            members = [self._of(members[i : i + n], dim) for i in range(0, len(members), n)]
        return self._of(members, dim)

    def _repeated(self, times: Sequence[int]) -> Any:
        dim, ndim = self.stack_dim, len(times)
        inner = (*times[:dim], *times[dim + 1 :])
        old = self._member_size()
        size = torch.Size([n * k for n, k in zip(old, inner, strict=False)])

        once = all([n == 1 for n in inner])  # a clone is a tenth of the time of such a repeat

        def repeated(leaf: Tensor) -> Tensor:
            if once:
                return leaf.clone(memory_format=torch.contiguous_format)
            return leaf.repeat((*inner, *[1] * (leaf.dim() - ndim + 1)))

        members = []
        for _ in range(times[dim]):
            members += self._on_members(repeated, ndim, size, ("repeat", inner))
        return self._of(members, dim, size + old[ndim - 1 :])

    def _interleaved(self, repeats: Any, at: int, ndim: int) -> Any:
        dim, old = self.stack_dim, self._member_size()
        if at == dim:
            counts = [repeats] * len(self.tensordicts)
            if isinstance(repeats, Tensor):
                counts = repeats.expand(len(self.tensordicts)).tolist()
            members = [
                td.clone() for td, n in zip(self.tensordicts, counts, strict=True) for _ in range(n)
            ]
            return self._of(members, dim, old)
        inner = at - (at > dim)
        total = int(repeats.sum()) if isinstance(repeats, Tensor) and repeats.numel() > 1 else None
        longer = old[inner] * int(repeats) if total is None else total
        size = torch.Size((*old[:inner], longer, *old[inner + 1 : ndim - 1]))
        members = self._on_members(
            lambda leaf: torch.repeat_interleave(leaf, repeats, dim=inner),
            ndim,
            size,
            ("repeat_interleave", repeats, inner),
        )
        return self._of(members, dim, size + old[ndim - 1 :])

    # -- the contract of Node: rows

    def _index(self, idx: Any, ndim: int, batch_size: torch.Size | None) -> Any:
        plan, ndim = _Plan(self, idx), max(ndim, self.stack_dim + 1)
        if plan.kind == "member":
            return self._row(plan.at, plan.rest, ndim)
        if not plan.rows:
            if not self.tensordicts:
                return self._emptied(plan, ndim)
            return self._no_rows(plan, ndim)
        members = [self._row(at, rest, ndim) for at, rest in plan.rows]
        if plan.spare is not None:
            members = [td._index((*(_ALL,) * plan.spare, 0), td.ndim, None) for td in members]
        if plan.kind == "rows":
            return self._of(members, plan.dim)
        return self._grid(members, plan.grid, plan.dim)

    def _row(self, at: int, rest: tuple[Any, ...], ndim: int) -> Any:
        try:
            td = self.tensordicts[at]
        except IndexError:
            raise IndexError(
                f"index {at} is out of bounds for dimension {self.stack_dim} with size "
                f"{len(self.tensordicts)}"
            ) from None
        if all([part.__class__ is slice and part == _ALL for part in rest]):
            return td
        return td._index(rest, ndim - 1, None)

    def _emptied(self, plan: _Plan, ndim: int) -> Any:
        """A lazy stack without members."""
        out = self._of([], plan.dim, plan.member_size(self, ndim))
        if self._device is not None:
            out._device = self._device
        return out

    def _no_rows(self, plan: _Plan, ndim: int) -> Any:
        """A dense container without rows: with the entries of the first member, of size 0."""
        first = self._of([self.tensordicts[0]], self.stack_dim)
        dense = TensorDict._make(first._entries(), first._batch_size, self._device)
        return dense._index(plan.emptied, ndim, None)

    def __setitem__(self, idx: Any, value: Any) -> None:
        if idx.__class__ is str:
            self._set_str(idx, value)
            return
        if idx.__class__ is tuple and idx:
            if self._set_below(idx, value):
                return
            if is_key(idx):
                self.set(idx, value)
                return
        ndim = self.ndim
        idx = index.normalise(idx, self._batch_size)
        if isinstance(value, (Node, Mapping)):
            if -1 in self._batch_size:
                size = self._index(idx, ndim, None)._batch_size
            else:
                size = index.indexed_size(self._batch_size, idx)
            if not isinstance(value, Node):
                value = TensorDict(value, batch_size=size, device=self._device)
            elif value._batch_size != size:
                value = self._broadcast(value, size, idx)
            if self._locked:
                for name in value.keys():
                    if all([td._peek_str(name) is None for td in self.tensordicts]):
                        raise locked_error(self, name)
        self._set_index(idx, value, ndim)

    def _broadcast(self, value: Any, size: torch.Size, idx: Any) -> Any:
        """A container for rows of batch size `size`: one row is written into all of them."""
        given = value._batch_size
        if len(given) <= len(size) and all(
            [n in (1, m) for n, m in zip(reversed(given), reversed(size), strict=False)]
        ):
            leaves = value._leaves([])
            if any([leaf.shape[: len(size)] != size for leaf in leaves]) or not leaves:
                return value.expand(size)
        return index._expanded(value, size, self._batch_size, idx)

    def _set_index(self, idx: Any, value: Any, ndim: int) -> Any:
        plan, ndim = _Plan(self, idx), max(ndim, self.stack_dim + 1)
        if isinstance(value, Tensor) and value.dim():
            value = _like_tensor(self._index(idx, ndim, None), value)
        if plan.kind == "member":
            self._set_row(plan.at, plan.rest, value, ndim)
            return None
        if isinstance(value, Node):
            if plan.kind == "rows":
                parts: Sequence[Any] = value.unbind(plan.dim) if plan.rows else ()
            else:
                lead, cells = (_ALL,) * plan.dim, itertools.product(*[range(n) for n in plan.grid])
                given = len(value._batch_size)
                parts = [value._index((*lead, *cell), given, None) for cell in cells]
            if plan.spare is not None:
                parts = [part.unsqueeze(plan.spare) for part in parts]
        else:
            parts = [value] * len(plan.rows)
        for (at, rest), part in zip(plan.rows, parts, strict=True):
            self._set_row(at, rest, part, ndim)
        return None

    def _set_row(self, at: int, rest: tuple[Any, ...], value: Any, ndim: int) -> None:
        if not -len(self.tensordicts) <= at < len(self.tensordicts):
            self._row(at, rest, ndim)  # raises
        replaced = self.tensordicts[at]._set_index(rest, value, ndim - 1)
        if replaced is not None:
            old, self.tensordicts[at] = self.tensordicts[at], replaced
            if self._own_lock:
                lock.relink(self, old, replaced)

    # -- operations that go to the members

    def select(
        self,
        *keys: NestedKey,
        inplace: bool = False,
        strict: bool = True,
        as_tensordict: bool = False,
    ) -> Any:
        """The lazy stack of the members with only these entries; see `TensorDict.select`.

        >>> list(lazy_stack([TensorDict(a=1, b=2), TensorDict(a=3, b=4)]).select("a").keys())
        ['a']
        """
        if inplace and self._locked:
            raise locked_error(self)
        options: Any = dict(strict=strict, as_tensordict=as_tensordict)
        chosen = [td.select(*keys, **options) for td in self.tensordicts]
        if not inplace:
            return self._of_members(chosen)
        return entries.keep_only(zip(self.tensordicts, chosen, strict=True), self)

    def exclude(self, *keys: NestedKey, inplace: bool = False) -> Any:
        """The lazy stack of the members without these entries; see `TensorDict.exclude`.

        >>> list(lazy_stack([TensorDict(a=1, b=2), TensorDict(a=3, b=4)]).exclude("a").keys())
        ['b']
        """
        if not inplace:
            return self._of_members([td.exclude(*keys) for td in self.tensordicts])
        if self._locked:
            raise locked_error(self)
        for td in self.tensordicts:
            td.exclude(*keys, inplace=True)
        return self

    def flatten_keys(self, separator: str = ".", inplace: bool = False, is_leaf: Any = None) -> Any:
        """The lazy stack of the members without nesting; see `TensorDict.flatten_keys`.

        >>> td = lazy_stack([TensorDict(a=dict(b=1)), TensorDict(a=dict(b=2))])
        >>> td.flatten_keys(".")["a.b"]
        tensor([1, 2])
        """
        return self._rekeyed("flatten_keys", "keys", separator, inplace, dict(is_leaf=is_leaf))

    def unflatten_keys(self, separator: str = ".", inplace: bool = False) -> Any:
        """The lazy stack of the members with nesting; see `TensorDict.unflatten_keys`.

        >>> td = lazy_stack([TensorDict({"a.b": 1}), TensorDict({"a.b": 2})])
        >>> td.unflatten_keys(".")["a", "b"]
        tensor([1, 2])
        """
        return self._rekeyed("unflatten_keys", "nested keys", separator, inplace, {})

    def _rekeyed(self, method: str, kind: str, separator: str, inplace: bool, options: Any) -> Any:
        if inplace and self._locked:
            raise locked_error(self)
        members = [getattr(td, method)(separator, **options) for td in self.tensordicts]
        if not inplace:
            out = self._of_members(members)
            out._origin = (kind, weakref.ref(self), separator)
            return out
        for td in self.tensordicts:
            getattr(td, method)(separator, inplace=True, **options)
        return self

    @classmethod
    def from_dict(
        cls,
        input_dict: Any,
        *,
        stack_dim: int = 0,
        stack_dim_name: str | None = None,
        **options: Any,
    ) -> Any:
        """The lazy stack of containers made of the dicts in a list, or in a dict.

        A dict of tensors gives a dense container; the options are those of `TensorDict.from_dict`.

        >>> td = LazyStackedTensorDict.from_dict([{"a": [1]}, {"a": [2, 3]}])
        >>> td.get("a", as_list=True)
        [tensor([1]), tensor([2, 3])]
        """
        rows = list(input_dict.values() if isinstance(input_dict, Mapping) else input_dict)
        if not rows or not all([isinstance(row, Mapping) for row in rows]):
            return TensorDict.from_dict(input_dict, **options)
        members = [TensorDict.from_dict(row, **options) for row in rows]
        return lazy_stack(members, stack_dim, stack_dim_name=stack_dim_name)

    def filter_non_tensor_data(self) -> Any:
        """The lazy stack of the members without their non-tensor entries.

        >>> td = lazy_stack([TensorDict(a=1, s="x"), TensorDict(a=2, s="y")])
        >>> list(td.filter_non_tensor_data().keys())
        ['a']
        """
        return self._of_members([td.filter_non_tensor_data() for td in self.tensordicts])

    def empty(
        self,
        recurse: bool = False,
        *,
        batch_size: Any = None,
        device: Any = NO_DEFAULT,
        names: Any = NO_DEFAULT,
    ) -> Any:
        """The lazy stack of the members without entries; dense for another batch size.

        >>> lazy_stack([TensorDict(a=1), TensorDict(a=2)]).empty().batch_size
        torch.Size([2])
        """
        if batch_size is not None:
            given = None if device is NO_DEFAULT else device
            return TensorDict({}, batch_size, self._device if device is NO_DEFAULT else given)
        out = self._of_members([td.empty(recurse=recurse) for td in self.tensordicts])
        if device is not NO_DEFAULT:
            out._set_device(None if device is None else as_device(device))
        if names is not NO_DEFAULT:
            out.names = names
        return out

    def contiguous(self, *, canonical: bool = False, inplace: bool = False) -> Any:
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

    def is_contiguous(self) -> bool:
        """False: the entries are not in one piece each.

        >>> lazy_stack([TensorDict(a=1), TensorDict(a=2)]).is_contiguous()
        False
        """
        return False

    def densify(self, layout: torch.layout = torch.strided) -> Any:
        """The dense container; entries of unlike shape become nested tensors of this layout.

        >>> td = lazy_stack([TensorDict(a=torch.zeros(1)), TensorDict(a=torch.zeros(2))])
        >>> td.densify(layout=torch.jagged)["a"].is_nested
        True
        """
        out: Entries = {}
        for name, value in self._peek().items():
            if isinstance(value, Node):
                out[name] = value if value._is_data() else value.densify(layout)
                continue
            try:
                out[name] = self._get_str(name)
            except RuntimeError:
                out[name] = self._get_lazy(name, as_nested_tensor=True, layout=layout)
        return dim_names.passed_on(
            TensorDict._make(out, self._batch_size, self._device, self._names)
        )

    def to_lazystack(self, dim: int = 0) -> Any:
        """A lazy stack along `dim`: itself if it is one.

        >>> lazy_stack([TensorDict(a=1), TensorDict(a=2)]).to_lazystack().stack_dim
        0
        """
        dim = shape._dim(self, dim)
        return self if dim == self.stack_dim else lazy_stack(list(self.unbind(dim)), dim)

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
                part._set_names(list(names))
            out.append(part)
            at += n
        return tuple([keep_mapped(part, self).lock_() for part in out] if self._locked else out)

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """The rows along `dim`: along the stack dimension, the members themselves.

        >>> [td["a"].item() for td in lazy_stack([TensorDict(a=1), TensorDict(a=2)]).unbind(0)]
        [1, 2]
        """
        dim = shape._dim(self, dim)
        if dim == self.stack_dim:
            return tuple(self.tensordicts)
        lead = (_ALL,) * dim
        num = self._batch_size[dim]
        if num < 0:
            raise RuntimeError(
                f"the members differ in size along dim {dim}, so they have no rows there"
            )
        return tuple([self[(*lead, i)] for i in range(num)])

    def where(
        self,
        condition: Tensor,
        other: Any,
        *,
        out: Any = None,
        pad: float | bool | None = None,
        update_batch_size: bool = False,
    ) -> Any:
        """This container where `condition` is true, `other` elsewhere; see `TensorDict.where`.

        >>> td = lazy_stack([TensorDict(a=1), TensorDict(a=2)])
        >>> td.where(torch.tensor([True, False]), 0)["a"]
        tensor([1, 0])
        """
        parts = self._split(other) if isinstance(other, Node) else [other] * len(self.tensordicts)
        if parts is None:
            options: Any = dict(out=out, pad=pad, update_batch_size=update_batch_size)
            return index.where(self.contiguous(), condition, other, **options)
        rows = zip(self.tensordicts, self._tensor_parts(condition), parts, strict=True)
        result = self._of_members([td.where(row, part, pad=pad) for td, row, part in rows])
        return index.written(result, out, update_batch_size)

    # -- showing

    def _exclusive(self) -> list[list[str]]:
        """Names of the entries of each member that not all of them have."""
        shared = set(self._shared())
        return [sorted(name for name in td.keys() if name not in shared) for td in self.tensordicts]

    def _extra_lines(self) -> list[str]:
        blocks = []
        for i, (td, names) in enumerate(zip(self.tensordicts, self._exclusive(), strict=True)):
            if names:
                lines = ",\n".join([f"{name}: {build._describe(td, name)}" for name in names])
                blocks.append(f"    {i} ->\n" + textwrap.indent(lines, " " * 8))
        return ["exclusive_fields={\n" + (",\n".join(blocks) if blocks else "") + "}"]

    def _last_lines(self) -> list[str]:
        return [f"stack_dim={self.stack_dim}"]

    def _describe_unlike(self, name: str) -> str:
        first = self
        while isinstance(first, LazyStackedTensorDict):
            first = first.tensordicts[0]
        value = first._get_str(name)
        if not isinstance(value, Tensor):
            return f"{type(value).__name__} and others"
        size = _member_shape(self, name)
        return build.describe_tensor(value).replace(f"shape={value.shape}", f"shape={size}")


class _Keys(KeysView):
    """Keys of a lazy stack, which need not look at the entries where only names are asked for."""

    __slots__ = ()

    def _names(self) -> list[Any]:
        return super()._names() if any(self.flags) else self.td._shared()  # type: ignore[attr-defined]


class _Plan:
    """How an index into a lazy stack goes to its members.

    kind: "member": one member, `at`, indexed by `rest`; the result is that of the member.
        "rows": the members and their indices in `rows`, stacked along `dim`.
        "grid": the same in row-major order over the new dimensions `grid`, which stand at `dim`.
    spare: a dimension of size 1 that the members' results have and the result has not.
    emptied: the index into a stack of one member that gives the result without rows.
    """

    __slots__ = ("kind", "at", "rest", "rows", "dim", "grid", "spare", "emptied")

    def __init__(self, td: LazyStackedTensorDict, idx: Any) -> None:
        parts = [_plain_part(part) for part in (idx if isinstance(idx, tuple) else (idx,))]
        place = self._place(parts, td.stack_dim)
        item = parts[place]
        self.rows: list[tuple[int, tuple[Any, ...]]] = []
        self.spare: int | None = None
        self.grid: Any = ()
        if isinstance(item, int):
            self.kind, self.at = "member", item
            self.rest = (*parts[:place], *parts[place + 1 :])
            return
        slots = [
            part for part in parts if not isinstance(part, int)
        ]  # each makes a dimension, or takes part in some
        arrays = [i for i, part in enumerate(slots) if isinstance(part, Tensor)]
        side_by_side = not arrays or arrays[-1] - arrays[0] == len(arrays) - 1
        if isinstance(item, Tensor):
            self.kind = "grid"
            self.dim = arrays[0] if side_by_side else 0
            self._rows_of_arrays(parts, place)
        else:
            self.kind = "rows"
            self._rows_of_slice(td, parts, place, slots, arrays, side_by_side)
        if not self.rows:
            none = torch.zeros(tuple(self.grid) if self.kind == "grid" else 0, dtype=torch.int64)
            cut: Any = slice(0, 0) if self.kind == "rows" else none
            self.emptied = (*parts[:place], cut, *parts[place + 1 :])

    @staticmethod
    def _place(parts: list[Any], stack_dim: int) -> int:
        """The part that indexes the stack dimension; `parts` is filled up to there."""
        used = 0
        for i, part in enumerate(parts):
            if part is None:
                continue
            if used == stack_dim:
                return i
            used += 1
        parts.extend([_ALL] * (stack_dim - used + 1))
        return len(parts) - 1

    def _rows_of_slice(
        self,
        td: LazyStackedTensorDict,
        parts: list[Any],
        place: int,
        slots: list[Any],
        arrays: list[int],
        side_by_side: bool,
    ) -> None:
        mine = place - len([part for part in parts[:place] if isinstance(part, int)])
        before = len([i for i in arrays if i < mine])
        if not arrays:
            self.dim = mine
        else:
            width = max([slots[i].dim() for i in arrays])
            lead = width if not side_by_side or before else 0
            self.dim = mine - before + lead
        rest = (*parts[:place], *parts[place + 1 :])
        if 0 < before < len(arrays):  # between arrays: keep them apart in the members too
            self.spare = self.dim
            rest = (*parts[:place], None, *parts[place + 1 :])
        self.rows = [(at, rest) for at in range(len(td.tensordicts))[parts[place]]]

    def _rows_of_arrays(self, parts: list[Any], place: int) -> None:
        where = [i for i, part in enumerate(parts) if isinstance(part, Tensor)]
        arrays = torch.broadcast_tensors(*[parts[i] for i in where])
        self.grid = arrays[0].shape
        columns = [array.reshape(-1).tolist() for array in arrays]
        for cell in zip(*columns, strict=True):
            filled = list(parts)
            for i, at in zip(where, cell, strict=True):
                filled[i] = at
            at = filled.pop(place)
            self.rows.append((at, tuple(filled)))

    def member_size(self, td: LazyStackedTensorDict, ndim: int) -> torch.Size:
        """The batch size of a row of the result, where there are no members."""
        size = index.indexed_size(td._batch_size[:ndim], self.emptied) + td._batch_size[ndim:]
        return torch.Size((*size[: self.dim], *size[self.dim + 1 :]))


def _below(key: tuple[Any, ...], value: Any) -> Any:
    """Nested dicts in which `value` stands under a nested key."""
    for name in reversed(key):
        value = {name: value}
    return value


def _plain_part(part: Any) -> Any:
    """A part of a normalised index: a tensor of one number as a number, True as a new dimension."""
    if isinstance(part, Tensor) and part.dim() == 0:
        part = part.item()
    if isinstance(part, bool):
        if not part:
            raise IndexError("False can't index a lazy stack; td[:0] gives no rows")
        return None
    return part


def _common_size(members: Sequence[Any]) -> torch.Size:
    """The batch size of members, with -1 where it differs."""
    first = members[0]._batch_size
    size = list(first)
    for i, td in enumerate(members):
        other = td._batch_size
        if len(other) != len(size):
            raise _unlike_sizes(first, other, i)
        size = [a if a == b else -1 for a, b in zip(size, other, strict=True)]
    return torch.Size(size)


def _unlike_sizes(first: torch.Size, other: torch.Size, i: int) -> RuntimeError:
    return RuntimeError(
        "batch sizes in tensordicts differs, LazyStackedTensorDict cannot be created. Got "
        f"td[0].batch_size={first} and td[{i}].batch_size={other}. If the length match and you "
        "wish to stack these tensordicts, set strict_shape to False."
    )


def _fits(given: Sequence[int], size: Sequence[int]) -> bool:
    """Whether a shape is, as far as it goes, `size`, in which -1 stands for anything."""
    return all([b in (-1, a) or a == -1 for a, b in zip(given, size, strict=False)])


def _member_shape(node: Any, name: str) -> torch.Size | None:
    """The shape of an entry, with -1 for dimensions that differ in the members of a lazy stack."""
    if not isinstance(node, LazyStackedTensorDict):
        value = node._get_str(name)
        return getattr(value, "shape", None)
    shapes = [_member_shape(td, name) for td in node.tensordicts]
    if not shapes or any([size is None for size in shapes]):
        return None
    width = min([len(size) for size in shapes])  # type: ignore[arg-type]
    same = [
        sizes[0] if len(dict.fromkeys(sizes)) == 1 else -1 for sizes in zip(*shapes, strict=False)
    ]
    dim = min(node.stack_dim, width)
    return torch.Size((*same[:dim], len(shapes), *same[dim:]))


def _padded(values: list[Tensor], fill: float | bool, side: str) -> list[Tensor]:
    """Tensors filled up to the largest size along each dimension."""
    if side not in ("left", "right"):
        raise ValueError(f"padding_side is 'left' or 'right', got {side!r}")
    target = [max(sizes) for sizes in zip(*[value.shape for value in values], strict=True)]
    out = []
    for value in values:
        widths: list[int] = []
        for n, size in zip(reversed(target), reversed(value.shape), strict=True):
            widths += [n - size, 0] if side == "left" else [0, n - size]
        out.append(torch.nn.functional.pad(value, widths, value=fill) if any(widths) else value)
    return out


def _nested(values: list[Tensor], layout: torch.layout | None) -> Tensor:
    """A nested tensor: jagged if at most one dimension differs and no layout is asked for."""
    if any([value.is_nested for value in values]):
        raise ValueError(
            "a nested tensor of nested tensors is not possible: flatten the lazy stack of lazy "
            "stacks first with td.view(-1), or pass as_padded_tensor=True"
        )
    if layout is torch.strided:
        return torch.nested.as_nested_tensor(values, layout=torch.strided)
    sizes = list(zip(*[value.shape for value in values], strict=True))
    ragged = [i for i, column in enumerate(sizes) if len(dict.fromkeys(column)) > 1]
    if layout is None and len(ragged) > 1:
        return torch.nested.as_nested_tensor(values, layout=torch.strided)
    at = ragged[0] if ragged else 0
    if at == 0:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)
    turned = torch.nested.as_nested_tensor(
        [v.transpose(0, at) for v in values], layout=torch.jagged
    )
    return turned.transpose(1, at + 1)


def _like_tensor(rows: Any, tensor: Tensor) -> Any:
    """A container like `rows` with `tensor`, broadcast, under every key."""
    out = {
        name: _like_tensor(value, tensor) if isinstance(value, Node) else tensor.expand(value.shape)
        for name, value in rows._entries().items()
        if not (isinstance(value, Node) and value._is_data())
    }
    return TensorDict._make(out, rows._batch_size)


def _reshaper(name: str, size: torch.Size, ndim: int) -> Callable[[Tensor], Tensor]:
    op = Tensor.view if name == "view" else Tensor.reshape
    return lambda leaf: op(leaf, (*size, *leaf.shape[ndim:]))


def _spans(dim: int, ndim: int) -> list[tuple[int, int]]:
    """Runs of dimensions that contain `dim`, as (first, last), the short ones first."""
    runs = [(a, b) for a in range(dim + 1) for b in range(dim, ndim)]
    return sorted(runs, key=lambda run: run[1] - run[0])


def _cut_out(
    old: tuple[int, ...], new: tuple[int, ...], first: int, last: int
) -> tuple[int, int] | None:
    """Where in `new` the dimensions `first` to `last` of `old` stand, if none joins them."""
    before, inside = math.prod(old[:first]), math.prod(old[first : last + 1])
    for start in range(len(new) + 1):
        if math.prod(new[:start]) != before:
            continue
        for stop in range(start, len(new) + 1):
            if math.prod(new[start:stop]) == inside:
                while inside == 1 and stop == start and stop < len(new) and new[stop] == 1:
                    stop += 1
                return start, stop
    return None


# ------------------------------------------------------------------------------------- functions


def lazy_stack(
    input: Sequence[Any],
    dim: int = 0,
    *,
    out: Any = None,
    device: Any = None,
    stack_dim_name: str | None = None,
    strict_shape: bool = False,
) -> Any:
    """Stack containers without copying; entries are stacked when they are read.

    out: container that the stacked entries are written to.
    strict_shape: refuse containers of unlike batch sizes.

    >>> td = lazy_stack([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(3))])
    >>> td.get("a", as_list=True)
    [tensor([0., 0.]), tensor([0., 0., 0.])]
    """
    members = input if input.__class__ is list else list(input)
    if not members:
        raise RuntimeError(
            "lazy_stack: the list of containers to stack is empty; items cannot be empty"
        )
    first = members[0]
    for td in members:
        if not isinstance(td, Node):
            if all([isinstance(other, Tensor) for other in members]):
                return torch.stack(members, dim, out=out)
            raise TypeError(
                f"Expected all inputs to be containers, got {type(td).__name__}; torch.stack "
                "stacks tensors"
            )
    if device is not None:
        members = [td.to(device) for td in members]
    if strict_shape:
        for i, td in enumerate(members):
            if td._batch_size != first._batch_size:
                raise _unlike_sizes(first._batch_size, td._batch_size, i)
    plain = first.__class__ is TensorDict
    if not plain and first._is_data() and all([td._is_data() for td in members]):
        from raffia.tensordict.nontensor import stack_data

        result = stack_data(members, dim)
    elif not plain and hasattr(first, "_wrap"):
        result = first._wrap(lazy_stack([_contents(td, type(first)) for td in members], dim))
    else:
        result = _new_object(LazyStackedTensorDict)
        result._setup(list(members), dim, None, stack_dim_name)
    return result if out is None else out.update(result, inplace=True)


def _contents(td: Any, cls: type) -> Any:
    """The container that a tensorclass instance wraps."""
    if not hasattr(td, "_td"):
        raise TypeError(
            f"stacking a {cls.__name__} with a {type(td).__name__} is ambiguous: make all of one "
            "class"
        )
    return td._td


def maybe_dense_stack(
    input: Sequence[Any], dim: int = 0, *, out: Any = None, strict: bool = False, **options: Any
) -> Any:
    """Stack containers densely if keys and shapes are alike, else lazily; so at each level.

    strict: refuse containers of unlike batch sizes.

    >>> type(maybe_dense_stack([TensorDict(a=1), TensorDict(a=2)])).__name__
    'TensorDict'
    >>> type(maybe_dense_stack([TensorDict(a=1), TensorDict(b=2)])).__name__
    'LazyStackedTensorDict'
    """
    from raffia.tensordict.stack import stack_alike

    if strict:
        options["strict_shape"] = True
    items = list(input)
    if not items or options or not all([isinstance(td, Node) for td in items]):
        return lazy_stack(items, dim, out=out, **options)
    result = stack_alike(items, dim)
    return result if out is None else out.update(result, inplace=True)


def dense_stack_tds(td_list: Any, dim: int | None = None) -> Any:
    """The dense stack of containers: those of a list, or the members of a lazy stack.

    Lazy stacks in the list stay lazy: their members are stacked, so that shapes may be unlike.
    dim: needed for a list; that of the lazy stack otherwise.

    >>> type(dense_stack_tds(lazy_stack([TensorDict(a=1), TensorDict(a=2)]))).__name__
    'TensorDict'
    """
    if isinstance(td_list, LazyStackedTensorDict):
        dim = td_list.stack_dim if dim is None else dim
        td_list = td_list.tensordicts
    elif dim is None:
        raise ValueError(
            "dense_stack_tds: a list of containers needs the dim along which to stack it"
        )
    return maybe_dense_stack(td_list, dim)
