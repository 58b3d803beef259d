"""Changes of lazy stacks: what is written is taken apart, and each member takes its part."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from raffia.tensordict import atomic, build, entries, index, lazy_rows, selection, updates
from raffia.tensordict.collection import TensorDictBase
from raffia.tensordict.keys import (
    MissingKeyError,
    NestedKey,
    raise_missing,
    unravel_key,
    unravel_key_to_tuple,
)
from raffia.tensordict.lock import locked_error
from raffia.tensordict.node import Entries, Node, Source
from raffia.tensordict.signatures import shows_options_of
from raffia.tensordict.tensordict import TensorDict
from raffia.tensordict.unbatched import UnbatchedTensor
from raffia.tensordict.views import IsLeaf


class StackSizeError(ValueError, RuntimeError):
    """A lazy stack is updated with one that has another number of members.

    >>> from raffia import lazy_stack
    >>> lazy_stack([TensorDict(a=1)]).update(lazy_stack([TensorDict(a=1), TensorDict(a=2)]))
    Traceback (most recent call last):
    ...
    raffia.tensordict.lazy_write.StackSizeError: this lazy stack has 1 members, and the source 2:
    update(source, update_batch_size=True) takes over their number
    """


class LazyWrites(TensorDictBase):
    """The methods of a lazy stack that change it, or select its entries.

    >>> from raffia import lazy_stack
    >>> isinstance(lazy_stack([TensorDict(a=1), TensorDict(a=2)]), LazyWrites)
    True
    """

    tensordicts: list[Any]
    stack_dim: int
    hook_in: Callable[[Any], Any] | None = None
    _own_lock = False
    _mark: list[Any] | None = None  # `_held` of members that no other container holds

    if TYPE_CHECKING:
        _plain: type[TensorDict]
        _of: Any
        _of_members: Any
        _setup: Any
        _member_size: Any

    # -- parts of what is written, one for each member

    def _parts(self, name: str, value: Any) -> Sequence[Any]:
        """Split `value` into its parts for the members."""
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
            if isinstance(value, Node) and len(given) < len(size) and fits(given, size):
                value = build.promoted(value, size, name)
            elif len(given) < len(size) or not fits(given, size):
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
        if isinstance(other, LazyWrites) and other.stack_dim == dim:
            return other.tensordicts if len(other.tensordicts) == num else None
        size = other._batch_size
        return other.unbind(dim) if len(size) > dim and size[dim] == num else None

    def _own_parts(self, source: Any) -> Sequence[Any] | None:
        """`_split`; StackSizeError for a lazy stack that has another number of members."""
        parts = self._split(source)
        if parts is None and isinstance(source, LazyWrites) and source.stack_dim == self.stack_dim:
            raise StackSizeError(
                f"this lazy stack has {len(self.tensordicts)} members, and the source "
                f"{len(source.tensordicts)}: update(source, update_batch_size=True) takes over "
                "their number"
            )
        return parts

    def _parts_of(self, source: Any) -> Sequence[Any] | None:
        """`_split`, of a dict too; None unless there are only tensors and such containers in it."""
        if source.__class__ is type(self) or source.__class__ is TensorDict:
            return self._split(source)
        if source.__class__ is not dict:
            return None
        rows: list[dict[Any, Any]] = [{} for _ in self.tensordicts]
        for name, value in source.items():
            whole = self._is_whole(value)
            parts: Any = value.unbind(self.stack_dim) if whole else self._parts_of(value)
            if parts is None:
                return None
            for row, part in zip(rows, parts, strict=True):
                row[name] = part
        return rows

    # -- the contract of Node

    def _check_open(self, name: str) -> None:
        if self._own_lock or any([td._locked for td in self.tensordicts]):
            raise locked_error(self, name)

    def _hold_members(self, members: list[Any]) -> None:
        """Note that this stack holds these containers."""
        for td in members:
            if td._held is False:
                if self._mark is None:
                    self._mark = []
                td._held = self._mark
            elif td._held is not True and td._held is not self._mark:
                td._held = True

    def _holds_alone(self) -> bool:
        """Whether nothing else holds the members, which are plain, and nothing holds this stack."""
        if self._held is not False or self._mark is None:
            return False
        mark = self._mark
        return all([td._held is mark and td.__class__ is TensorDict for td in self.tensordicts])

    def _set_str(self, name: str, value: Any) -> None:
        self._check_open(name)
        if self.hook_in is not None:
            value = self.hook_in(value)
        parts = self._parts(name, value)
        members = zip(self.tensordicts, parts, strict=True)
        if self._device is None and self._is_whole(value):  # so that no member refuses its part
            for td, part in members:
                td._set_str(name, part)
            return
        alone = isinstance(value, Node) and value is not self and self._holds_alone()
        with atomic.all_or_nothing(self, {}):
            for td, part in members:
                if alone:
                    td._d[name] = td._accept(name, part, True)  # which need not be searched
                else:
                    td._set_str(name, part)

    def _is_whole(self, value: Any) -> bool:
        """Whether a value is a tensor that has the batch size of the stack."""
        size = self._batch_size
        return (
            value.__class__ is Tensor and not value.is_nested and value.shape[: len(size)] == size
        )

    def _set_path(self, path: tuple[str, ...], value: Any) -> None:
        """Store each member's part of a value under a nested key of it, or none of them."""
        parts = self._parts(path[-1], value)
        levels = self._levels(path) if self._is_whole(value) else None
        if levels is None:
            with atomic.all_or_nothing(self, paths=[path]):
                for td, part in zip(self.tensordicts, parts, strict=True):
                    td.set(path, part)
            return
        for (node, rest), part in zip(levels, parts, strict=True):
            for name in reversed(rest[1:]):  # levels that are missing
                part = node._new({name: part}, node._batch_size, node._names and [*node._names])
            node._d[rest[0]] = part

    def _levels(self, path: tuple[str, ...]) -> list[tuple[TensorDict, tuple[str, ...]]] | None:
        """Of each member the last level of a path, and the rest of it; None if one may refuse."""
        levels = []
        for td in self.tensordicts:
            node, rest = td, path
            while len(rest) > 1 and node.__class__ is TensorDict and rest[0] in node._d:
                node, rest = node._d[rest[0]], rest[1:]
            if node.__class__ is not TensorDict or td._locked or node._locked:
                return None
            if node._device is not None or node._batch_size != td._batch_size:
                return None
            levels.append((node, rest))
        return levels

    def _del_str(self, name: str) -> None:
        self._check_open(name)
        for td in self.tensordicts:
            if td._peek_str(name) is not None:
                td._del_str(name)

    def _replace_str(self, name: str, value: Any) -> None:
        for td, part in zip(self.tensordicts, self._parts(name, value), strict=True):
            td._replace_str(name, part)

    def _stores(self) -> list[Entries]:
        return [store for td in self.tensordicts for store in td._stores()]

    # -- one entry

    def set(
        self, key: NestedKey, item: Any, inplace: bool = False, *, non_blocking: bool = False
    ) -> Self:
        """Store the parts of `item` under `key` in the members; see `TensorDict.set`.

        >>> from raffia import lazy_stack
        >>> td = lazy_stack([TensorDict(a=dict(b=1)), TensorDict(a=dict(b=2))])
        >>> td.set(("a", "c"), torch.tensor([3, 4]))[1]["a", "c"]
        tensor(4)
        """
        if not inplace and key.__class__ is str:
            self._set_str(key, item)
            return self
        return entries.set(self, key, item, inplace, non_blocking=non_blocking)

    def set_(self, key: NestedKey, item: Any, *, non_blocking: bool = False) -> Self:
        """Write `item` into the tensors of the members that stand under `key`; allowed when locked.

        Raises KeyError if a member has no such entry.

        >>> from raffia import lazy_stack
        >>> td = lazy_stack([TensorDict(a=1), TensorDict(a=2)])
        >>> td.set_("a", torch.zeros(2))[0]["a"]
        tensor(0)
        """
        source = item
        for name in reversed(unravel_key_to_tuple(key)):
            source = {name: source}
        if updates.written_at_once(self, source, non_blocking):
            return self
        key = unravel_key(key)
        have = [entries.contains(td, key) for td in self.tensordicts]
        if not all(have):
            if any(have):
                raise MissingKeyError(
                    f"the entry {key!r} is missing in members "
                    f"{[i for i, there in enumerate(have) if not there]} of this lazy stack: "
                    "td.set(key, value) creates it in all of them"
                )
            raise_missing(key, self)
        scalar = isinstance(item, (int, float, complex, str))
        if scalar or isinstance(item, Tensor) and not item.dim():
            parts: Sequence[Any] = [item] * len(self.tensordicts)
        else:
            parts = self._parts(str(key), item)
        for td, part in zip(self.tensordicts, parts, strict=True):
            td.set_(key, part, non_blocking=non_blocking)
        return self

    def set_at_(
        self, key: NestedKey, value: Any, index: Any, *, non_blocking: bool = False
    ) -> Self:
        """Write `value` into the rows `index` of the entry under `key`.

        >>> from raffia import lazy_stack
        >>> td = lazy_stack([TensorDict(a=1), TensorDict(a=2)])
        >>> td.set_at_("a", 5, 0)["a"]
        tensor([5, 2])
        """
        key = unravel_key(key)
        if not entries.contains(self, key):
            raise_missing(key, self)
        if any([isinstance(entries.get(td, key), Node) for td in self.tensordicts]):
            node, name = entries.holder(self, key)
            entry = node._get_str(name)
            if not entry._is_data():
                entry[index] = value
            elif index.__class__ is int and not self.stack_dim:  # one value for the whole member
                lazy_rows.row(self, index, (), self.ndim).set_(key, value)
            else:
                node._replace_str(name, entry._with_rows(index, value))
            return self
        if index.__class__ is int and not self.stack_dim:
            lazy_rows.row(self, index, (), self.ndim).set_at_(
                key, value, ..., non_blocking=non_blocking
            )
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

    def rename_keys(self, mapping: Mapping[NestedKey, NestedKey], *, strict: bool = True) -> Self:
        """A copy (same tensors) in which each key of `mapping` has its new name in all members.

        >>> from raffia import lazy_stack
        >>> list(lazy_stack([TensorDict(a=1), TensorDict(a=2)]).rename_keys({"a": "b"}).keys())
        ['b']
        """
        members = [td.rename_keys(mapping, strict=strict) for td in self.tensordicts]
        return self._of_members(members)

    # -- several entries

    def _update_members(self, source: Any, options: dict[str, Any], is_sized: bool) -> bool:
        """`update` member by member; False if the source can't be taken apart.

        is_sized: the batch size of the source is taken over, which the members must have.
        """
        dim, num, parts = self.stack_dim, len(self.tensordicts), None
        members = self.tensordicts
        options = {name: value for name, value in options.items() if value not in (None, False)}
        if is_sized:
            given = source._batch_size
            if len(given) <= dim:
                raise RuntimeError(
                    f"update_batch_size=True: a lazy stack along dim {dim} can't have the batch "
                    f"size {tuple(given)}; td.to_tensordict() can"
                )
            parts = source.unbind(dim)
            if given[dim] != num:
                self._check_regrown(source, options)
                new = [part.copy() for part in parts[num:]]
                members, parts = [*members[: len(parts)], *new], parts[:num]
            options["update_batch_size"] = True
        elif isinstance(source, Node):
            parts = self._own_parts(source)
        elif self.hook_in is None:
            parts = self._parts_of(source)
        if parts is None:
            return False
        pairs = list(zip(self.tensordicts, parts, strict=not is_sized))
        if not options and _are_fitting(pairs):
            for td, part in pairs:
                td._take(part)
            return True
        with atomic.all_or_nothing(self, None if is_sized else source):
            for td, part in pairs:
                td.update(part, **options)
        if is_sized:
            self._set_members(members)
        return True

    def _check_regrown(self, source: Any, options: dict[str, Any]) -> None:
        """Whether `update` can give the stack as many members as the source has rows."""
        if self._locked:
            raise locked_error(self)
        if "inplace" in options or "keys_to_update" in options:
            raise RuntimeError(
                "update_batch_size=True changes the number of members of this lazy stack, which "
                "inplace=True and keys_to_update do not allow"
            )
        if absent := self.keys(True) - source.keys(True):
            raise updates.absent_keys(absent, self._batch_size, source)

    @shows_options_of(updates.update_at_)
    def update_at_(self, input_dict_or_td: Source, idx: Any, clone: bool = False, **o: Any) -> Self:
        """Write into the rows `idx`; whole members are written like any other container.

        >>> from raffia import lazy_stack
        >>> td = lazy_stack([TensorDict(a=1), TensorDict(a=2, b=0)])
        >>> td.update_at_({"a": torch.tensor(5)}, 0)["a"]
        tensor([5, 2])
        """
        if idx.__class__ is int and not self.stack_dim and not self._is_data():
            lazy_rows.row(self, idx, (), self.ndim).update_(input_dict_or_td, clone, **o)
            return self
        source = updates.merged(input_dict_or_td, {})
        if self._is_data() or _has_unbatched(source):  # which is one for all members
            return updates.update_at_(self, source, idx, clone, **o)
        members = self._members_at(idx, source)
        if members is not None:
            members.update_(source, clone, **o)
            return self
        if self._differs_by_member(source):
            return self._update_members_at(source, idx, clone, **o)
        return updates.update_at_(self, source, idx, clone, **o)

    def _members_at(self, idx: Any, source: Any) -> Any:
        """The rows `idx`, if they are whole members and `source` has a part for each; else None."""
        plan = lazy_rows.Plan(self, index.normalise(idx, self._batch_size))
        if not plan.rows or not all([lazy_rows.is_whole(rest) for _, rest in plan.rows]):
            return None
        members = self[idx]
        if isinstance(source, Node):
            return members if source._batch_size == members._batch_size else None
        return members if members._lazy and members._parts_of(source) is not None else None

    def _differs_by_member(self, source: Any) -> bool:
        """Whether entries can't be written through stacked ones: not all members have them."""
        if isinstance(source, LazyWrites):
            return not source._is_data()
        return not all([entries.contains(self, key) for key, _ in updates.pairs_of(source)])

    def _update_members_at(self, source: Any, idx: Any, clone: bool, **o: Any) -> Self:
        """`update_at_` member by member; nothing is written if an entry can't be."""
        at = index.normalise(idx, self._batch_size)
        size = index.indexed_size(self._batch_size, at)
        if not isinstance(source, Node):
            source = TensorDict(source, batch_size=size, device=self._device)
        if source._batch_size != size:
            return updates.update_at_(self, source, idx, clone, **o)
        rows = [
            (self.tensordicts[number], rest, updates.restricted(part, o.get("keys_to_update")))
            for number, rest, part in lazy_rows.parts_of_rows(self, at, source, self.ndim)
        ]
        for member, rest, part in rows:
            updates.check_writes(member, updates.pairs_of(part), (rest,))
        for member, rest, part in rows:
            member.update_at_(part, rest, clone, non_blocking=o.get("non_blocking", False))
        return self

    # -- selection of entries, and their keys

    def entry_class(self, key: NestedKey) -> type:
        """The class of the entry under `key`, which all members have.

        >>> from raffia import lazy_stack
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

    def select(
        self,
        *keys: NestedKey,
        inplace: bool = False,
        strict: bool = True,
        as_tensordict: bool = False,
    ) -> Self:
        """The lazy stack of the members with only these entries; see `TensorDict.select`.

        >>> from raffia import lazy_stack
        >>> list(lazy_stack([TensorDict(a=1, b=2), TensorDict(a=3, b=4)]).select("a").keys())
        ['a']
        """
        if inplace:
            return selection.select(self, *keys, inplace=True, strict=strict)
        options: Any = dict(strict=strict, as_tensordict=as_tensordict)
        return self._of_members([td.select(*keys, **options) for td in self.tensordicts])

    def exclude(self, *keys: NestedKey, inplace: bool = False) -> Self:
        """The lazy stack of the members without these entries; see `TensorDict.exclude`.

        >>> from raffia import lazy_stack
        >>> list(lazy_stack([TensorDict(a=1, b=2), TensorDict(a=3, b=4)]).exclude("a").keys())
        ['b']
        """
        return self._each("exclude", *keys, inplace=inplace)

    def flatten_keys(
        self, separator: str = ".", inplace: bool = False, is_leaf: IsLeaf | None = None
    ) -> Self:
        """The lazy stack of the members without nesting; see `TensorDict.flatten_keys`.

        >>> from raffia import lazy_stack
        >>> td = lazy_stack([TensorDict(a=dict(b=1)), TensorDict(a=dict(b=2))])
        >>> td.flatten_keys(".")["a.b"]
        tensor([1, 2])
        """
        return self._renamed("flatten_keys", "unflatten_keys", separator, inplace, is_leaf=is_leaf)

    def unflatten_keys(self, separator: str = ".", inplace: bool = False) -> Self:
        """The lazy stack of the members with nesting; see `TensorDict.unflatten_keys`.

        >>> from raffia import lazy_stack
        >>> td = lazy_stack([TensorDict({"a.b": 1}), TensorDict({"a.b": 2})])
        >>> td.unflatten_keys(".")["a", "b"]
        tensor([1, 2])
        """
        return self._renamed("unflatten_keys", "flatten_keys", separator, inplace)

    def _renamed(
        self, method: str, back: str, separator: str, inplace: bool, **options: Any
    ) -> Any:
        """`flatten_keys` or `unflatten_keys` of the members."""
        if inplace:  # a name that would be there twice is found before anything changes
            getattr(self, method)(separator, **options)
        out = self._each(method, separator, inplace=inplace, **options)
        if not inplace:
            out._origin = (back, weakref.ref(self), separator)
        return out

    def _each(self, method: str, *args: Any, inplace: bool, **options: Any) -> Any:
        """A method of the members: the lazy stack of the results, or itself (inplace)."""
        if inplace and self._locked:
            raise locked_error(self)
        results = [
            getattr(member, method)(*args, inplace=inplace, **options)
            for member in self.tensordicts
        ]
        return self if inplace else self._of_members(results)

    def filter_non_tensor_data(self) -> Self:
        """The lazy stack of the members without their non-tensor entries.

        >>> from raffia import lazy_stack
        >>> td = lazy_stack([TensorDict(a=1, s="x"), TensorDict(a=2, s="y")])
        >>> list(td.filter_non_tensor_data().keys())
        ['a']
        """
        return self._of_members([member.filter_non_tensor_data() for member in self.tensordicts])

    def _emptied(self, recurse: bool, batch_size: torch.Size | None) -> Any:
        if batch_size is not None:
            return self._new({}, batch_size)
        return self._of_members([member.empty(recurse=recurse) for member in self.tensordicts])

    # -- members

    def _set_members(self, members: list[Any]) -> None:
        """Replace the members, keeping the stack dimension and its name."""
        name = None if self._names is None else self._names[self.stack_dim]
        self._names = None
        self._setup(members, self.stack_dim, None, name)

    def insert(self, index: int, tensordict: Node) -> None:
        """Insert a container before the member `index`, as in a list.

        Raises ValueError if its batch size or device is not that of the members.

        >>> from raffia import lazy_stack
        >>> td = lazy_stack([TensorDict(a=1), TensorDict(a=2)])
        >>> td.insert(0, TensorDict(a=0))
        >>> td["a"]
        tensor([0, 1, 2])
        """
        self._insert(index, [tensordict])

    def _insert(self, index: int, new: list[Any]) -> None:
        """Insert containers before the member `index`, all or none."""
        for td in new:
            if not isinstance(td, Node):
                raise TypeError(
                    "Expected new value to be TensorDictBase instance but got "
                    f"{type(td).__name__}; TensorDict(...) makes one of a dict"
                )
        if self._locked:
            raise locked_error(self)
        if self._put_in(index, new):
            return
        members = list(self.tensordicts)
        like = self if members else self._of(new[:1], self.stack_dim)
        size, device = like._member_size(), like._device
        for td in new:
            given = td._batch_size
            if given != size and not (len(given) == len(size) and fits(given, size)):
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
        self._set_members(members)

    def _put_in(self, index: int, new: list[Any]) -> bool:
        """`_insert` of containers just like the members, which need not be looked at again."""
        members = self.tensordicts
        if not members or self._names is not None or self._home is not None:
            return False
        if members[0]._names is not None:
            return False
        size, device = self._member_size(), self._device
        for td in new:
            if td._batch_size != size or td._device != device or td._names is not None:
                return False
        sizes = [*self._batch_size]
        sizes[self.stack_dim] += len(new)
        self._hold_members(new)
        self.tensordicts = [*members[:index], *new, *members[index:]]
        self._batch_size = torch.Size(sizes)
        return True

    def append(self, tensordict: Node) -> None:
        """Append a container as the last member.

        >>> from raffia import lazy_stack
        >>> td = lazy_stack([TensorDict(a=1)])
        >>> td.append(TensorDict(a=2))
        >>> td["a"]
        tensor([1, 2])
        """
        self._insert(len(self.tensordicts), [tensordict])

    def extend(self, tensordict: Node | Sequence[Node]) -> None:
        """Append containers as the last members: those of a list, or of another lazy stack.

        >>> from raffia import lazy_stack
        >>> td = lazy_stack([TensorDict(a=1)])
        >>> td.extend([TensorDict(a=2), TensorDict(a=3)])
        >>> td["a"]
        tensor([1, 2, 3])
        """
        if isinstance(tensordict, Node):
            tensordict = tensordict.unbind(self.stack_dim)
        if new := list(tensordict):
            self._insert(len(self.tensordicts), new)


def fits(given: Sequence[int], size: Sequence[int]) -> bool:
    """Whether a shape is the beginning of `size`, in which -1 stands for any number."""
    return all([b in (-1, a) or a == -1 for a, b in zip(given, size, strict=False)])


def _has_unbatched(source: Any) -> bool:
    if not isinstance(source, Node):
        return False
    nodes: list[Any] = source._children() if source._lazy else [source]
    return any([isinstance(x, UnbatchedTensor) for td in nodes for x in td.values(True, True)])


def _are_fitting(pairs: list[tuple[Any, Any]]) -> bool:
    """Whether plain members can store all entries of their parts without further checks."""
    for td, part in pairs:
        if td.__class__ is not TensorDict or part.__class__ not in (TensorDict, dict):
            return False
        if not td._fits(part):
            return False
    return True
