"""The container that stores its entries in one dict.

Its methods are those of all containers (collection.py); it has its own way only where that is
faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, overload

import torch
from torch import Tensor, nn

from raffia.tensordict import (
    build,
    copies,
    dim_names,
    entries,
    index,
    kinds,
    lock,
    modes,
    updates,
    views,
)
from raffia.tensordict.collection import TensorCollection, TensorDictBase
from raffia.tensordict.entries import UNSET
from raffia.tensordict.keys import NestedKey, is_key, missing
from raffia.tensordict.lock import locked_error
from raffia.tensordict.node import (
    BatchSize,
    Device,
    Entries,
    LeafFn,
    Names,
    Node,
    Source,
    child_names,
    hold,
)
from raffia.tensordict.signatures import documented_as
from raffia.tensordict.unbatched import UnbatchedTensor

_new_object = object.__new__


def _lacks_batch_size(value: Tensor, batch_size: torch.Size) -> bool:
    """Whether a shape does not begin with the batch size; slices are made only where needed."""
    try:
        shape = value.shape
    except RuntimeError:
        shape = build.shape_of(value)
    if not shape or shape[0] != batch_size[0]:
        return True
    ndim = len(batch_size)
    return ndim > 1 and shape[:ndim] != batch_size


_CASTS: dict[torch.dtype, LeafFn] = {  # faster than `to`
    torch.float32: Tensor.float, torch.float64: Tensor.double, torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16, torch.bool: Tensor.bool, torch.uint8: Tensor.byte,
    torch.int8: Tensor.char, torch.int16: Tensor.short, torch.int32: Tensor.int,
    torch.int64: Tensor.long,
}  # fmt: skip

Parameter = nn.Parameter


@kinds.enter
class TensorDict(TensorDictBase):
    """Named tensors, and nested containers, whose leading dimensions are the batch size.

    source: (nested) dict or other container; or give the entries as keywords.
    batch_size: leading dimensions shared by all entries; [] if not given.
    device: every entry is moved there.
    names: one for each batch dimension.
    lock: lock the new container.
    Raises RuntimeError if an entry does not have the leading dimensions `batch_size`.

    >>> reward = torch.ones(3)
    >>> td = TensorDict({"obs": torch.zeros(3, 4), "next": {"reward": reward}}, batch_size=[3])
    >>> td["next", "reward"].shape, td[0]["obs"].shape
    (torch.Size([3]), torch.Size([4]))
    >>> td
    TensorDict(
        fields={
            next: TensorDict(
                fields={
                    reward: Tensor(shape=torch.Size([3]), device=cpu, dtype=torch.float32,
                                   is_shared=False)},
                batch_size=torch.Size([3]),
                device=None,
                is_shared=False),
            obs: Tensor(shape=torch.Size([3, 4]), device=cpu, dtype=torch.float32,
                        is_shared=False)},
        batch_size=torch.Size([3]),
        device=None,
        is_shared=False)
    """

    _plain: type[TensorDict]
    _d: Entries
    _lasting = True

    def __init_subclass__(cls, **options: Any) -> None:
        """Results of a subclass's methods are of that class; `TensorDict` itself pays nothing."""
        super().__init_subclass__(**options)
        for name in ("_new", "_shallow"):
            if getattr(cls, name) is getattr(TensorDict, name):
                setattr(cls, name, _of_own_class(getattr(TensorDict, name)))
        kinds.register_subclass(cls)

    def __init__(
        self,
        source: Source | None = None,
        batch_size: BatchSize = None,
        device: Device = None,
        names: Sequence[str | None] | None = None,
        non_blocking: bool | None = None,
        lock: bool = False,
        **entries: Any,
    ) -> None:
        if source is None:
            source = entries
        elif entries:
            raise ValueError(
                f"pass entries as a dict or as keywords, not both: got {type(source).__name__} "
                f"and {sorted(entries)}"
            )
        self._d, self._held = {}, False
        self._batch_size = (
            batch_size if batch_size.__class__ is torch.Size else build.as_size(batch_size)
        )
        self._device = None if device is None else build.as_device(device)
        if source.__class__ is dict:
            if source:
                self._fill(source)
        elif isinstance(source, (Node, Mapping)):
            self._fill(source._entries() if isinstance(source, Node) else source)
        else:
            raise ValueError(
                "a TensorDict is made from a dict or another container, got "
                f"{type(source).__name__}; TensorDict.from_any(obj) takes other structures"
            )
        if names is not None:
            dim_names.take(self, dim_names.checked(self, names))
        if lock:
            self.lock_()

    def _fill(self, source: Mapping[Any, Any]) -> None:
        """Store the entries of a dict in a container that is being made."""
        d, batch_size, device = self._d, self._batch_size, self._device
        ndim = len(batch_size)
        rows = batch_size[0] if ndim else 0
        for key, value in source.items():
            kind = value.__class__
            if key.__class__ is not str or key in d:
                self.set(key, value)
            elif kind is Tensor or kind is Parameter:
                if ndim:
                    try:
                        shape = value.shape
                    except RuntimeError:
                        shape = build.shape_of(value)
                    if not shape or shape[0] != rows or (ndim > 1 and shape[:ndim] != batch_size):
                        raise build.mismatch(batch_size, value, key)
                d[key] = value if device is None or value.device == device else value.to(device)
            elif kind is dict:
                child = _new_object(TensorDict)
                child._d, child._batch_size = {}, batch_size
                child._device = device
                child._fill(value)
                d[key] = child
            else:
                d[key] = self._accept(key, value, True)

    def __reduce_ex__(self, protocol: Any) -> Any:
        tied = self._buffer is not None or self._mapped_to is not None
        if tied or self.__class__ is not TensorDict:
            return super().__reduce_ex__(protocol)
        size, device, names = tuple(self._batch_size), self._device, self._names
        return _restored, (self._d, size, device, names, self._locked)

    @classmethod
    def _from_entries(cls, entries: Any, batch_size: Any, device: Any) -> Any:
        td = TensorDict(entries, batch_size=batch_size, device=device)
        if cls is not TensorDict:  # which torch.compile knows
            td.__class__ = cls
        return td

    @staticmethod
    def _make(
        entries: Entries,
        batch_size: torch.Size,
        device: torch.device | None = None,
        names: Names = None,
    ) -> TensorDict:
        """A container over `entries`, unchecked."""
        td = _new_object(TensorDict)
        td._d = entries
        td._batch_size = batch_size
        td._device = device
        if names is not None:
            td._names = names
        return td

    # -- the contract of Node

    def _entries(self) -> Entries:
        return self._d

    def _get_str(self, name: str) -> Any:
        return self._d.get(name)

    _peek, _peek_str = _entries, _get_str

    def _set_str(self, name: str, value: Any) -> None:
        if self._locked:
            raise locked_error(self, name)
        kind = value.__class__
        if (kind is Tensor or kind is Parameter) and self._device is None:
            batch_size = self._batch_size
            if batch_size:
                n = len(batch_size)
                try:  # as `_lacks_batch_size`, without the call
                    shape = value.shape
                except RuntimeError:
                    shape = build.shape_of(value)
                if not shape or shape[0] != batch_size[0] or n > 1 and shape[:n] != batch_size:
                    raise build.mismatch(batch_size, value, name)
            self._d[name] = value
        else:
            self._d[name] = self._accept(name, value)

    def _del_str(self, name: str) -> None:
        if self._locked:
            raise locked_error(self, name)
        del self._d[name]

    def _stores(self) -> list[Entries]:
        return [self._d]

    def _children(self) -> list[Any]:
        found = [v for v in self._d.values() if v.__class__ is not Tensor and isinstance(v, Node)]
        if found:  # of a tensorclass what it wraps
            return [v if v.__class__ is TensorDict else getattr(v, "_td", v) for v in found]
        return found

    def _shallow(self) -> TensorDict:
        entries = {
            k: v if v.__class__ is Tensor or not isinstance(v, Node) else v._shallow()
            for k, v in self._d.items()
        }
        td = _new_object(TensorDict)
        td._d = entries
        td._batch_size = self._batch_size
        td._device = self._device
        if self._names is not None:
            td._names = list(self._names)
        return td

    def _replace_str(self, name: str, value: Any) -> None:
        if self._names is not None and isinstance(value, Node):
            value = dim_names.adopt(value, self._names)
        old = self._d.get(name)
        if self._locked and old is not value and isinstance(old, Node) and old._home is not None:
            old._home.moved_to(value)
        self._d[name] = value
        if self._locked:
            lock.relink(self, old, value)

    def _new(self, entries: Entries, batch_size: torch.Size, names: Names = None) -> TensorDict:
        td = _new_object(TensorDict)
        td._d = entries
        td._batch_size = batch_size
        td._device = self._device
        if names is not None:
            td._names = names
        return td

    def _map(self, fn: Any) -> TensorDict:
        entries = {
            k: fn(v) if v.__class__ is Tensor or not isinstance(v, Node) else v._map(fn)
            for k, v in self._d.items()
        }
        return self._new(entries, self._batch_size, self._names)

    def _batched(
        self, fn: Any, ndim: int, batch_size: torch.Size, names: Any = None, op: Any = ()
    ) -> TensorDict:
        entries = {
            k: fn(v)
            if v.__class__ is Tensor or not isinstance(v, Node)
            else v._batched(fn, ndim, batch_size, names, op)
            for k, v in self._d.items()
        }
        if names is not None or self._names is not None:
            names = child_names(self, ndim, batch_size, names)
        mine = self._batch_size
        return self._new(
            entries, batch_size if len(mine) == ndim else batch_size + mine[ndim:], names
        )

    def _index(self, idx: Any, ndim: int, batch_size: torch.Size | None) -> TensorDict:
        entries: Entries = {}
        nested = False
        for name, value in self._d.items():
            if value.__class__ is not Tensor and isinstance(value, Node):
                entries[name] = value
                nested = True
            else:
                row = entries[name] = value[idx]
                if batch_size is None:
                    batch_size = row.shape[: row.dim() - value.dim() + ndim]
        if batch_size is None:
            batch_size = index.indexed_size(self._batch_size[:ndim], idx)
        if nested:
            for name, value in entries.items():
                if isinstance(value, Node):
                    entries[name] = value._index(idx, ndim, batch_size)
        mine = self._batch_size
        if len(mine) == ndim:
            return self._new(entries, batch_size)
        return self._new(
            entries, batch_size + mine[ndim:], child_names(self, ndim, batch_size, None)
        )

    def _leaves(self, out: list[Tensor]) -> list[Tensor]:
        for value in self._d.values():
            if value.__class__ is Tensor or not isinstance(value, Node):
                out.append(value)
            else:
                value._leaves(out)
        return out

    def _rebuild(self, leaves: Iterator[Tensor]) -> TensorDict:
        entries = {
            k: next(leaves)
            if v.__class__ is Tensor or not isinstance(v, Node)
            else v._rebuild(leaves)
            for k, v in self._d.items()
        }
        return self._new(entries, self._batch_size, self._names)

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        ndim = len(batch_size)
        for name, value in self._d.items():
            if build.shape_of(value)[:ndim] != batch_size and not (
                isinstance(value, Node)
                and (isinstance(value, Tensor) or len(value._batch_size) < ndim)
            ):
                raise RuntimeError(
                    f"entry {name!r} has shape {value.shape}, "
                    f"which is incompatible with the batch-size {batch_size}; "
                    f"the batch_size stays {self._batch_size}"
                )
        grown = [
            v
            for v in self._d.values()
            if isinstance(v, Node)
            and (v._batch_size[:ndim] != batch_size or isinstance(v, UnbatchedTensor))
        ]
        build.resize(grown, batch_size)
        if self._names is not None:
            self._names = (self._names + [None] * ndim)[:ndim]
        self._batch_size = batch_size

    def _set_device(self, device: torch.device | None) -> None:
        self._device = device
        for value in self._d.values():
            if value.__class__ is not Tensor and isinstance(value, Node):
                value._set_device(device)

    def _accept(self, name: str, value: Any, fresh: bool = False) -> Any:
        """The stored form of `value`: a tensor or node with our leading dimensions and device.

        fresh: this container is in the making, so that no other one holds it.
        """
        if not isinstance(value, (Tensor, Node)):
            value = build.as_entry(value, self, name)
        batch_size = self._batch_size
        ndim = len(batch_size)
        if isinstance(value, UnbatchedTensor):  # has no batch dimensions
            device = self._device
            moved = value if device is None or value.device == device else value.to(device)
            return moved._like(batch_size)  # type: ignore[attr-defined]
        if ndim and build.shape_of(value)[:ndim] != batch_size:
            if not isinstance(value, Node):
                raise build.mismatch(batch_size, value, name)
            value = build.promoted(value, batch_size, name)
        if isinstance(value, Node):
            if not fresh and (self._held is not False or value is self):
                if build.holds(value, self):
                    raise ValueError(
                        f"a container can't hold itself: the value for key {name!r} is this "
                        "container or has it nested in it"
                    )
            hold(value)
        device = self._device
        if device is not None and value.device != device:
            value = value.to(device)
        return dim_names.agreed(self, value) if isinstance(value, Node) else value

    # -- own ways, because they are hot

    @overload
    def __getitem__(self, idx: str | tuple[str, ...]) -> Any: ...
    @overload
    def __getitem__(self, idx: Any) -> Self: ...

    def __getitem__(self, idx: Any) -> Any:
        """Read an entry by key, or rows by index."""
        if idx.__class__ is str:
            try:
                value = self._d[idx]
            except KeyError:
                raise missing(idx, self) from None
            if value.__class__ is Tensor or not isinstance(value, Node):
                return value
            return value._unwrapped()
        if idx.__class__ is tuple and idx:
            try:  # as a nested key: no part of an index into the rows is the name of an entry
                value = self
                for name in idx:
                    value = value._d[name]
            except (KeyError, AttributeError, TypeError):
                if is_key(idx):
                    return entries.getitem_key(self, idx)
            else:
                return value._unwrapped() if isinstance(value, Node) else value
        return index.getitem(self, idx)

    def __setitem__(self, idx: Any, value: Any) -> None:
        """Write an entry by key, or rows by index."""
        if idx.__class__ is str:
            if not self._locked and value.__class__ is Tensor and self._device is None:
                batch_size = self._batch_size
                if batch_size and _lacks_batch_size(value, batch_size):
                    raise build.mismatch(batch_size, value, idx)
                self._d[idx] = value
            else:
                self._set_str(idx, value)
        elif idx.__class__ is tuple and idx and idx[0].__class__ is str:
            try:  # the levels are there
                node: Any = self
                for name in idx[:-1]:
                    node = node._d[name]
                put = node.set
            except (KeyError, AttributeError, TypeError):
                self.set(idx, value)
            else:
                put(idx[-1], value)
        elif is_key(idx):
            self.set(idx, value)
        else:
            index.setitem(self, idx, value)

    @documented_as(entries.get)
    def get(self, key: NestedKey, default: Any = UNSET, **lazy_options: Any) -> Any:
        if key.__class__ is str and not lazy_options:
            value = self._d.get(key)
            if value is None and (default is not UNSET or modes.get_raises):
                return entries.get(self, key, default)
            return value
        if key.__class__ is tuple and key and not lazy_options:
            try:
                found: Any = self
                for name in key:
                    found = found._d[name]
                return found
            except (KeyError, AttributeError, TypeError):
                pass
        return entries.get(self, key, default, **lazy_options)

    @documented_as(entries.set)
    def set(
        self, key: NestedKey, item: Any, inplace: bool = False, *, non_blocking: bool = False
    ) -> Self:
        if inplace:
            if key.__class__ is str and item.__class__ is Tensor:
                dest = self._d.get(key)
                if dest.__class__ is Tensor:
                    entries.write(dest, item, key, non_blocking)
                    return self
            return entries.set(self, key, item, True, non_blocking=non_blocking)
        if key.__class__ is str:
            if not self._locked and item.__class__ is Tensor and self._device is None:
                batch_size = self._batch_size
                if batch_size and _lacks_batch_size(item, batch_size):
                    raise build.mismatch(batch_size, item, key)
                self._d[key] = item
            else:
                self._set_str(key, item)
            return self
        if key.__class__ is tuple and key:
            try:  # the levels are there
                node: Any = self
                for name in key[:-1]:
                    node = node._d[name]
                _, last = node._d, key[-1]
            except (KeyError, AttributeError, TypeError):
                return entries.set(self, key, item)
            if last.__class__ is str:
                node._set_str(last, item)
                return self
        return entries.set(self, key, item)

    @documented_as(entries.set_)
    def set_(self, key: NestedKey, item: Any, *, non_blocking: bool = False) -> Self:
        if item.__class__ is Tensor:
            dest: Any = None
            if key.__class__ is str:
                dest = self._d.get(key)
            elif key.__class__ is tuple and key:
                try:
                    dest = self
                    for name in key:
                        dest = dest._d[name]
                except (KeyError, AttributeError, TypeError):
                    dest = None
            if dest.__class__ is Tensor:
                entries.write(dest, item, key, non_blocking)
                return self
        return entries.set_(self, key, item, non_blocking=non_blocking)

    def _cast(self, dtype: torch.dtype) -> TensorDict:
        cast = _CASTS.get(dtype)
        made = {
            k: (v if v.dtype is dtype else v.to(dtype) if cast is None else cast(v))
            if v.__class__ is Tensor or not isinstance(v, Node)
            else v._cast(dtype)
            for k, v in self._d.items()
        }
        return self._new(made, self._batch_size, self._names)

    @documented_as(copies.empty)
    def empty(self, recurse: bool = False, **options: Any) -> Self:
        if recurse or options:
            return copies.empty(self, recurse, **options)
        names = self._names
        made: Any = self._new({}, self._batch_size, None if names is None else list(names))
        return made

    @documented_as(entries.contains)
    def __contains__(self, key: NestedKey) -> bool:
        if key.__class__ is str:
            return key in self._d
        if key.__class__ is tuple and key:
            try:
                found: Any = self
                for name in key:
                    found = found._d[name]
                return True
            except (KeyError, AttributeError, TypeError):
                pass
        return entries.contains(self, key)

    keys = views.of_dict(views.keys)
    values = views.of_dict(views.values)
    items = views.of_dict(views.items)

    @documented_as(updates.update)
    def update(
        self,
        input_dict_or_td: Source | None = None,
        clone: bool = False,
        inplace: bool = False,
        **options: Any,
    ) -> Self:
        source = input_dict_or_td
        kind = source.__class__
        plain = (kind is TensorDict or kind is dict) and not (clone or inplace or options)
        if plain and self._fits(source):
            self._take(source)
            return self
        return updates.update(self, source, clone, inplace, **options)

    def _fits(self, source: Any) -> bool:
        """Whether the entries of a `TensorDict` or dict can be stored without further checks."""
        if self._locked or self._names is not None:
            return False
        batch_size, device, d = self._batch_size, self._device, self._d
        checked = source.__class__ is not dict  # its tensors have its batch size and device
        if checked:
            if source._batch_size != batch_size or source is self:
                return False
            if device is not None and source._device != device:
                return False
            source = source._d
        for name, value in source.items():
            kind = value.__class__
            if kind is Tensor or not checked and kind is Parameter:
                if checked:
                    continue
                if name.__class__ is not str or batch_size and _lacks_batch_size(value, batch_size):
                    return False
                if device is not None and value.device != device:
                    return False
            elif kind is TensorDict or kind is dict:
                if not checked and name.__class__ is not str:
                    return False
                mine = d.get(name)
                if mine.__class__ is TensorDict:
                    if not TensorDict._fits(mine, value):
                        return False
                elif not checked or isinstance(mine, Node):
                    return False
                elif self._held is not False and build.holds(value, self):
                    return False
            elif isinstance(value, Node) or not checked:
                return False
        return True

    def _take(self, source: Any) -> None:
        """Store the entries of what fits; nested ones are merged."""
        mine = self._d
        for name, value in (source if source.__class__ is dict else source._d).items():
            if value.__class__ is TensorDict or value.__class__ is dict:
                below = mine.get(name)
                if below.__class__ is TensorDict:
                    below._take(value)
                    continue
            mine[name] = value


TensorCollection._plain = TensorDict


def _restored(
    entries: Entries, size: tuple[int, ...], device: Any, names: Any, locked: bool
) -> TensorDict:
    """A container from what it was pickled as."""
    td = TensorDict._make(entries, torch.Size(size), device, names)
    return td.lock_() if locked else td


torch.serialization.add_safe_globals([_restored])


def _of_own_class(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(self: Any, *args: Any, **kwargs: Any) -> Any:
        td = make(self, *args, **kwargs)
        td.__class__ = self.__class__
        return td

    return made
