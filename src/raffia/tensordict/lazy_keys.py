"""Keys of lazy stacks and selection of their entries, all derived from the members."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from raffia.tensordict import entries, selection
from raffia.tensordict.build import as_device
from raffia.tensordict.collection import TensorDictBase
from raffia.tensordict.entries import NO_DEFAULT
from raffia.tensordict.keys import NestedKey, raise_missing, unravel_key
from raffia.tensordict.lazy_shape import member_shape
from raffia.tensordict.lock import locked_error
from raffia.tensordict.node import BatchSize, Device, Node
from raffia.tensordict.tensordict import TensorDict
from raffia.tensordict.views import IsLeaf, KeysView


class LazyKeysView(KeysView):
    """Keys of a lazy stack, which need not look at the entries where only names are asked for.

    >>> from raffia import lazy_stack
    >>> td = lazy_stack([TensorDict(a=1), TensorDict(a=2)])
    >>> list(LazyKeysView(td, (False, False, None, False), 0))
    ['a']
    """

    __slots__ = ()

    def _names(self) -> list[Any]:
        return super()._names() if any(self.flags) else self.td._shared()  # type: ignore[attr-defined]


class LazyKeys(TensorDictBase):
    """Keys of a lazy stack, and which entries are selected.

    >>> from raffia import lazy_stack
    >>> isinstance(lazy_stack([TensorDict(a=1), TensorDict(a=2)]), LazyKeys)
    True
    """

    tensordicts: list[Any]

    if TYPE_CHECKING:
        _of_members: Any
        _shared: Any

    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> KeysView:
        """A live view of the keys that all members have; the flags are those of `TensorDict.keys`.

        >>> from raffia import lazy_stack
        >>> list(lazy_stack([TensorDict(a=1, b=2), TensorDict(a=3)]).keys())
        ['a']
        """
        return LazyKeysView(self, (include_nested, leaves_only, is_leaf, sort), 0)

    def is_empty(self) -> bool:
        """Whether there is no leaf that all members have.

        >>> from raffia import lazy_stack
        >>> lazy_stack([TensorDict(), TensorDict()]).is_empty()
        True
        """
        for name in self._shared():
            value = self.tensordicts[0]._peek_str(name)
            if not isinstance(value, Node) or not self._peek_str(name).is_empty():
                return False
        return True

    def get_item_shape(self, key: NestedKey) -> torch.Size:
        """The shape of the entry under `key`, with -1 for dimensions that differ.

        >>> from raffia import lazy_stack
        >>> td = lazy_stack([TensorDict(a=torch.zeros(1)), TensorDict(a=torch.zeros(2))])
        >>> td.get_item_shape("a")
        torch.Size([2, -1])
        """
        found = member_shape(*entries.holder(self, key))
        if found is None:
            raise_missing(key, self)
        return found

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

    def non_tensor_items(self, include_nested: bool = False) -> tuple[tuple[NestedKey, Any], ...]:
        """The `(key, entry)` pairs of the non-tensor entries that all members have.

        >>> from raffia import lazy_stack
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
        if inplace and self._locked:
            raise locked_error(self)
        options: Any = dict(strict=strict, as_tensordict=as_tensordict)
        chosen = [member.select(*keys, **options) for member in self.tensordicts]
        if inplace:
            return selection.keep_only(zip(self.tensordicts, chosen, strict=True), self)
        return self._of_members(chosen)

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
        return self._renamed("flatten_keys", "keys", separator, inplace, is_leaf=is_leaf)

    def unflatten_keys(self, separator: str = ".", inplace: bool = False) -> Self:
        """The lazy stack of the members with nesting; see `TensorDict.unflatten_keys`.

        >>> from raffia import lazy_stack
        >>> td = lazy_stack([TensorDict({"a.b": 1}), TensorDict({"a.b": 2})])
        >>> td.unflatten_keys(".")["a", "b"]
        tensor([1, 2])
        """
        return self._renamed("unflatten_keys", "nested keys", separator, inplace)

    def _renamed(
        self, method: str, origin: str, separator: str, inplace: bool, **options: Any
    ) -> Any:
        """`flatten_keys` or `unflatten_keys` of the members."""
        if inplace:  # a name that would be there twice is found before anything changes
            getattr(self, method)(separator, **options)
        out = self._each(method, separator, inplace=inplace, **options)
        if not inplace:
            out._origin = (origin, weakref.ref(self), separator)
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

    def empty(
        self,
        recurse: bool = False,
        *,
        batch_size: BatchSize = None,
        device: Device = NO_DEFAULT,
        names: Sequence[str | None] | None = NO_DEFAULT,
    ) -> Any:
        """The lazy stack of the members without entries; dense for another batch size.

        >>> from raffia import lazy_stack
        >>> lazy_stack([TensorDict(a=1), TensorDict(a=2)]).empty().batch_size
        torch.Size([2])
        """
        if batch_size is not None:
            return TensorDict({}, batch_size, self._device if device is NO_DEFAULT else device)
        out = self._of_members([member.empty(recurse=recurse) for member in self.tensordicts])
        if device is not NO_DEFAULT:
            out._set_device(None if device is None else as_device(device))
        if names is not NO_DEFAULT:
            out.names = names
        return out
