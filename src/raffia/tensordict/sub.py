"""Views of rows of a container that hold for any index: what is written goes to that container.

`td[index]` shares memory for integers and slices only, and an entry added to it is its own. A
`SubTensorDict` has no entries: it reads `parent[key][index]` and writes into these rows. Operations
without an effect on it run on what is read; inplace ones run on what is read, which is then
written back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from raffia.tensordict import convert, entries, gradients, index, kinds, lock, updates
from raffia.tensordict.collection import TensorDictBase
from raffia.tensordict.keys import NestedKey, is_key, unravel_key_to_tuple
from raffia.tensordict.lock import locked_error
from raffia.tensordict.node import Entries, Node, Source, hold
from raffia.tensordict.signatures import Function, documented_as
from raffia.tensordict.tensordict import TensorDict


@kinds.enter
class SubTensorDict(TensorDictBase):
    """Rows of a container, read from it and written to it at each access.

    parent: the container; what is nested in it shows as such a view too.
    idx: any index into its rows.
    A new entry is created in the parent, with zeros in its other rows, and a removed one is removed
    there. An entry that exists is written into: `td[key] = value`, `set_` and `update` do so, `set`
    refuses. Locks, device and names of dimensions are the parent's, and are changed there.

    >>> td = TensorDict(a=torch.zeros(3), batch_size=[3])
    >>> rows = td._get_sub_tensordict(torch.tensor([2, 0]))
    >>> rows["a"] = torch.tensor([1.0, 2.0])
    >>> rows["b"] = torch.tensor([3, 4])
    >>> td["a"], td["b"]
    (tensor([2., 0., 1.]), tensor([4, 0, 3]))
    """

    _plain: type[TensorDict]

    def __init__(self, parent: Any, idx: Any) -> None:
        hold(parent)
        self._parent = parent
        size = parent._batch_size
        self._idx = index.normalise(idx, size)
        varies = -1 in size  # as that of a lazy stack may
        self._batch_size = (
            parent[idx]._batch_size if varies else index.indexed_size(size, self._idx)
        )

    def _rows(self, *keys: NestedKey, strict: bool = True) -> Any:
        """What is read: the rows of the parent, or of these entries only."""
        source = self._parent
        if isinstance(source, SubTensorDict):
            source = source._rows(*keys, strict=strict)
        elif keys:
            source = source.select(*keys, strict=strict)
        return source[self._idx]

    def _write_rows(self, rows: Any) -> None:
        parent, rows = self._parent, rows._shallow()  # in which no view is read while it changes
        if parent.__class__ is not TensorDict and -1 not in parent._batch_size:
            new = [key for key in rows.keys(True) if key not in parent]
            if new:  # which a lazy stack would take into the members of these rows only
                whole = TensorDict._make({}, parent._batch_size)
                whole[self._idx] = rows.select(*new)
                parent.update(whole)
        parent[self._idx] = rows

    # -- the contract of Node

    @property
    def _locked(self) -> bool:
        return bool(self._parent._locked)

    @_locked.setter
    def _locked(self, value: bool) -> None:
        """Do nothing: a node is locked or unlocked with its `_children`, here the parent."""

    @property
    def _device(self) -> Any:  # type: ignore[override]
        return self._parent._device

    @property
    def _names(self) -> Any:  # type: ignore[override]
        return None if self._parent._names is None else self._parent.empty()[self._idx]._names

    def _children(self) -> list[Any]:
        return [self._parent]

    def _named_children(self) -> list[Any]:
        return []

    def _stores(self) -> list[Entries]:
        stores: list[Entries] = self._parent._stores()
        return stores

    def _entries(self) -> Entries:
        return {name: self._get_str(name) for name in self._parent._peek()}

    def _get_str(self, name: str) -> Any:
        value = self._parent._peek_str(name)
        if value.__class__ is Tensor and self._parent.__class__ is TensorDict:
            return value[self._idx]
        if isinstance(value, Node) and not value._is_data():
            return self._parent._get_str(name)._get_sub_tensordict(self._idx)
        return None if value is None else self._rows(name)._get_str(name)

    def _set_str(self, name: str, value: Any) -> None:
        if self._locked:
            raise locked_error(self, name)
        self._replace_str(name, value)

    def _replace_str(self, name: str, value: Any) -> None:
        rows = TensorDict._make({}, self._batch_size, self._device, self._names)
        rows._set_str(name, value)
        self._write_rows(rows)

    def _del_str(self, name: str) -> None:
        self._parent._del_str(name)

    def _new(self, entries: Entries, batch_size: torch.Size, names: Any = None) -> Any:
        for name, value in entries.items():
            if getattr(value, "_td", value).__class__ is SubTensorDict:
                entries[name] = value._shallow()  # a result is no view
        return TensorDict._make(entries, batch_size, self._device, names)

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        if batch_size != self._batch_size:
            raise self._unchanged("the batch size", f"batch_size = {list(batch_size)}")

    def _set_device(self, device: torch.device | None) -> None:
        if device != self._device:
            raise self._unchanged("the device", f"to({str(device)!r})")

    def _set_names(self, new: list[str | None] | None) -> None:
        if new != self._names:
            raise self._unchanged("the names", f"names = {new}")

    def _unchanged(self, what: str, call: str) -> RuntimeError:
        return RuntimeError(
            f"{what} of rows that are read from another container can't be changed; "
            f"td.to_tensordict() gives an independent container, for which {call} works"
        )

    # -- methods that change it

    @documented_as(entries.set)
    def set(
        self, key: NestedKey, item: Any, inplace: bool = False, *, non_blocking: bool = False
    ) -> Self:
        if not inplace and key in self:
            raise RuntimeError(
                f"set({key!r}, value) is prohibited for existing tensors of a {type(self).__name__}"
                f", which has only some of their rows; td.set_({key!r}, value) writes into these"
            )
        return entries.set(self, key, item, inplace, non_blocking=non_blocking)

    def _wrote(self, key: Any, item: Any) -> bool:
        """Write a tensor into that of the parent; False if it is not as simple as that."""
        parent = self._parent
        simple = key.__class__ is str and parent.__class__ is TensorDict
        dest = parent._d.get(key) if simple else None
        if dest.__class__ is not Tensor or item.__class__ is not Tensor or dest.requires_grad:
            return False
        rest = dest.shape[len(parent._batch_size) :]
        if item.dtype is not dest.dtype or item.device != dest.device:
            return False
        if item.shape != self._batch_size + rest:
            return False
        dest[self._idx] = item
        return True

    def __getitem__(self, idx: Any) -> Any:
        return entries.getitem_key(self, idx) if is_key(idx) else self._get_sub_tensordict(idx)

    def __setitem__(self, idx: Any, value: Any) -> None:
        if self._wrote(idx, value):
            return
        if is_key(idx):
            self.update({idx: value}, inplace=True)
        else:
            index.setitem(self, idx, value)

    @documented_as(updates.update)
    def update(
        self,
        input_dict_or_td: Source | None = None,
        clone: bool = False,
        inplace: bool = False,
        **options: Any,
    ) -> Self:
        if self._locked and not inplace:
            raise locked_error(self)
        given = updates.merged(input_dict_or_td, options if input_dict_or_td is None else {})
        names = [name for key in given.keys() for name in unravel_key_to_tuple(key)[:1]]
        rows = self._rows(*names, strict=False)
        rows.update(input_dict_or_td, clone, True, **options)
        self._write_rows(rows)
        return self

    data = property(gradients.data, lambda self, value: self.update_(value))

    # -- methods of what holds the tensors

    def _refused(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not available for rows that are read from another container: call it on that one."""
        raise RuntimeError(
            f"a {type(self).__name__} has no tensors that could be locked, detached or moved to "
            "other memory: call this on the container that it shows rows of, or on "
            "td.to_tensordict(), which is independent of it"
        )

    @documented_as(lock.lock_)
    def lock_(self) -> Self:
        return convert.unmoved(self) if self._locked else self._refused()

    @documented_as(lock.unlock_)
    def unlock_(self) -> Self:
        return self._refused() if self._locked else convert.unmoved(self)

    is_locked = property(
        lock.is_locked, lambda self, value: self.lock_() if value else self.unlock_()
    )
    detach_ = requires_grad_ = share_memory_ = pin_memory_ = irecv = arecv = _refused
    memmap_ = memmap_refresh_ = make_memmap = make_memmap_from_tensor = _refused
    make_memmap_from_storage = _refused


def _shown_as(method: Any) -> Callable[[Function], Function]:
    """Give a function the signature of a method, and the first line of its docstring."""

    def shown(function: Function) -> Function:
        function.__doc__ = (method.__doc__ or "").partition("\n")[0]
        function.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
        return function

    return shown


def _on_rows(name: str) -> Callable[..., Any]:
    """A method that is that of what is read."""
    method = getattr(TensorDictBase, name)

    @_shown_as(method)
    def read(self: SubTensorDict, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._rows(), name)(*args, **kwargs)

    return read


def _in_parent(name: str) -> Callable[..., Any]:
    """A method that removes or renames entries, and so does it in the parent."""
    method = getattr(TensorDictBase, name)
    signature = inspect.signature(method)

    @_shown_as(method)
    def change(self: SubTensorDict, *args: Any, **kwargs: Any) -> Any:
        if not signature.bind(self, *args, **kwargs).arguments.get(
            "inplace", name == "rename_key_"
        ):
            return method(self, *args, **kwargs)
        getattr(self._parent, name)(*args, **kwargs)
        return self

    return change


def _written_back(name: str) -> Callable[..., Any]:
    """An inplace method that runs on what is read, which is then written back."""
    method = getattr(TensorDictBase, name)

    @_shown_as(method)
    def write(self: SubTensorDict, *args: Any, **kwargs: Any) -> Any:
        if name == "set_" and len(args) == 2 and self._wrote(*args):
            return self
        if name in _IF_INPLACE and not kwargs.get("inplace"):
            return method(self, *args, **kwargs)
        keys = args[:1] if name in _OF_KEY else ()
        if name in _OF_SOURCE and args and hasattr(args[0], "keys"):
            given = tuple(args[0].keys())
            keys = given if all([key in self for key in given]) else ()
        rows = self._rows(*keys)
        result = getattr(rows, name)(*args, **kwargs)
        self._write_rows(rows)
        return self if result is rows else result

    return write


_ON_ROWS = """_map _batched _index _leaves _rebuild _shallow _cast _spread memmap memmap_like save
dumps consolidate is_memmap is_contiguous send isend asend init_remote all_gather
gather_and_stack""".split()
_IN_PARENT = "select exclude flatten_keys unflatten_keys rename_key_".split()
_IF_INPLACE = "apply named_apply".split()
_OF_KEY = "set_ set_at_ fill_".split()  # their first argument
_OF_SOURCE = "update_ update_at_ copy_".split()  # of those of their first argument
_OTHERS_IN_PLACE = "_set_index recv broadcast all_reduce reduce scatter load_state_dict".split()
_AS_EVERYWHERE = "del_ filter_empty_ rename_ auto_batch_size_ auto_device_ clear_device_".split()

for _name in _ON_ROWS:
    setattr(SubTensorDict, _name, _on_rows(_name))
for _name in _IN_PARENT:
    setattr(SubTensorDict, _name, _in_parent(_name))
for _name in dir(TensorDictBase):
    _in_place = _name.endswith("_") and not _name.endswith("__") and _name not in _AS_EVERYWHERE
    if _name in (*_IF_INPLACE, *_OTHERS_IN_PLACE) or _in_place:
        if _name not in vars(SubTensorDict):
            setattr(SubTensorDict, _name, _written_back(_name))
