"""Reading and writing entries by key: the dictionary side of the container, of every kind."""

from __future__ import annotations

import builtins
import enum
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from raffia.tensordict import modes
from raffia.tensordict.keys import (
    NestedKey,
    dotted,
    is_key,
    missing,
    raise_missing,
    through_leaf,
    unravel_key,
    unravel_key_to_tuple,
)
from raffia.tensordict.node import Node

IsLeaf = Callable[[type], bool]


class NoDefault(enum.Enum):
    """What stands for a default that is not given: an enum, because torch.compile knows these."""

    RAISE = "a missing key is an error"
    UNSET = "a missing key gives None, but one that leads through a leaf is an error"


NO_DEFAULT: Any = NoDefault.RAISE
UNSET: Any = NoDefault.UNSET


def default_is_leaf(cls: type) -> bool:
    """Whether entries of class `cls` are leaves: everything that is not a container.

    >>> default_is_leaf(torch.Tensor)
    True
    """
    return not issubclass(cls, Node) or issubclass(cls, Tensor)


def is_leaf_nontensor(cls: type) -> bool:
    """Whether entries of class `cls` are leaves when non-tensor values count as leaves too.

    >>> from raffia import NonTensorData
    >>> is_leaf_nontensor(NonTensorData), default_is_leaf(NonTensorData)
    (True, False)
    """
    return not issubclass(cls, Node) or getattr(cls, "_holds_data", False)


# ------------------------------------------------------------------------ walking


def collect(
    node: Node, prefix: tuple[str, ...], leaves_only: bool, is_leaf: IsLeaf | None, out: list[Any]
) -> None:
    """Append `(nested key, value)` for what lies below `node`; content comes before its node."""
    for name, value in node._entries().items():
        leaf = value.__class__ is Tensor or not isinstance(value, Node)
        leaf = leaf or (is_leaf is not None and is_leaf(type(value)))
        if not leaf:
            collect(value, (*prefix, name), leaves_only, is_leaf, out)
        if leaf or not leaves_only:
            out.append(((*prefix, name) if prefix else name, value))


def collect_leaves(node: Node, prefix: tuple[str, ...] | None, out: list[Any]) -> None:
    """`collect` for the tensors only."""
    append = out.append
    for name, value in node._entries().items():
        if value.__class__ is not Tensor and isinstance(value, Node):
            collect_leaves(value, (name,) if prefix is None else (*prefix, name), out)
        else:
            append((name if prefix is None else (*prefix, name), value))


def keys_list(
    td: Any, include_nested: bool, leaves_only: bool, is_leaf: IsLeaf | None
) -> list[Any]:
    """The keys alone, for which the members of a lazy stack need not be stacked."""
    out: list[Any] = []
    if include_nested:
        collect_keys(td, (), leaves_only, is_leaf, out)
        return out
    leaf = is_leaf or default_is_leaf
    for name, value in td._peek().items():
        if not leaves_only or not isinstance(value, Node) or leaf(type(value)):
            out.append(name)
    return out


def collect_keys(
    node: Any, prefix: tuple[str, ...], leaves_only: bool, is_leaf: IsLeaf | None, out: list[Any]
) -> None:
    """Append the nested keys of what lies below `node`; content comes before its node."""
    append = out.append
    for name, value in (node._d if node.__class__ is node._plain else node._peek()).items():
        key = prefix + (name,) if prefix else name  # noqa: RUF005 (faster than unpacking)
        if value.__class__ is Tensor:
            append(key)
            continue
        # an UnbatchedTensor is a node and a tensor: a leaf
        if not isinstance(value, Tensor) and (is_leaf is None or not is_leaf(type(value))):
            collect_keys(value, key if prefix else (name,), leaves_only, is_leaf, out)
            if leaves_only:
                continue
        append(key)


def every(node: Any, test: Callable[[Tensor], Any]) -> bool:
    """Whether `test` is true of all leaves; the first that it is false of is the last it sees."""
    if node.__class__ is not node._plain:
        members = getattr(node, "tensordicts", None)
        if members is None:
            return all(map(test, node._leaves([])))
        for member in members:
            if not every(member, test):
                return False
        return True
    for value in node._d.values():
        if value.__class__ is Tensor or not isinstance(value, Node):
            if not test(value):
                return False
        elif not every(value, test):
            return False
    return True


def some(node: Any, test: Callable[[Tensor], Any]) -> bool:
    """Whether `test` is true of any leaf; the first that it is true of is the last it sees."""
    if node.__class__ is not node._plain:
        members = getattr(node, "tensordicts", None)
        if members is None:
            return any(map(test, node._leaves([])))
        for member in members:
            if some(member, test):
                return True
        return False
    for value in node._d.values():
        if value.__class__ is Tensor or not isinstance(value, Node):
            if test(value):
                return True
        elif some(value, test):
            return True
    return False


def entries_list(
    td: Node, include_nested: bool, leaves_only: bool, is_leaf: IsLeaf | None, sort: bool
) -> list[tuple[Any, Any]]:
    """The `(key, value)` pairs that `keys`, `values` and `items` show for these flags."""
    out: list[tuple[Any, Any]] = []
    if include_nested and leaves_only and is_leaf is None:
        collect_leaves(td, None, out)
    elif include_nested:
        collect(td, (), leaves_only, is_leaf, out)
    else:
        leaf = is_leaf or default_is_leaf
        for name, value in td._entries().items():
            if not leaves_only or leaf(type(value)):
                out.append((name, value))
    if sort:
        out.sort(key=lambda pair: pair[0] if pair[0].__class__ is str else dotted(pair[0]))
    return out


class NestedView:
    """A live view of keys, values or items of a container, also of what is nested in it."""

    __slots__ = ("td", "flags", "part")

    def __init__(self, td: Node, flags: tuple[Any, ...], part: int | None) -> None:
        self.td, self.flags, self.part = td, flags, part  # part: 0 keys, 1 values, None both

    def _list(self) -> list[Any]:
        td = self.td
        cache = td._cache if td._locked else None
        pairs = None if cache is None else cache.get(self.flags)
        if pairs is None:
            pairs = entries_list(td, *self.flags)
            if cache is not None:
                cache[self.flags] = pairs
        return pairs

    def __iter__(self) -> Iterator[Any]:
        part = self.part
        return iter(self._list()) if part is None else iter([pair[part] for pair in self._list()])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"


class KeysView(NestedView):
    """Keys of a container: iterable, with a length, asked with `in`, and compared like a set.

    >>> from raffia import TensorDict
    >>> view = TensorDict(a=1, b=dict(c=2)).keys(True)
    >>> view == {"a", "b", ("b", "c")}, view - {"b", ("b", "c")}
    (True, {'a'})
    """

    __slots__ = ()

    def _names(self) -> list[Any]:
        td = self.td
        cache = td._cache if td._locked else None
        names = None if cache is None else cache.get(("keys", *self.flags))
        if names is None:
            *flags, sort = self.flags
            names = keys_list(td, *flags)
            if sort:
                names.sort(key=dotted)
            if cache is not None:
                cache[("keys", *self.flags)] = names
        return names

    def __iter__(self) -> Iterator[Any]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __contains__(self, key: object) -> bool:
        include_nested, leaves_only, is_leaf, _ = self.flags
        path: Any = key
        if path.__class__ is not str:
            path = unravel_key(path)
        if path.__class__ is str:
            value = self.td._peek_str(path)
        else:
            if not include_nested:
                return False
            value = self.td
            for name in path:
                if not isinstance(value, Node):
                    return False
                value = value._peek_str(name)
        if value is None:
            return False
        return not leaves_only or (is_leaf or default_is_leaf)(type(value))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Iterable):
            return NotImplemented
        return builtins.set(self) == builtins.set(other)  # `set` is the function below

    def __and__(self, other: Iterable[Any]) -> builtins.set[Any]:
        return builtins.set(self) & builtins.set(other)

    def __or__(self, other: Iterable[Any]) -> builtins.set[Any]:
        return builtins.set(self) | builtins.set(other)

    def __sub__(self, other: Iterable[Any]) -> builtins.set[Any]:
        return builtins.set(self) - builtins.set(other)

    def __rsub__(self, other: Iterable[Any]) -> builtins.set[Any]:
        return builtins.set(other) - builtins.set(self)

    def isdisjoint(self, other: Iterable[Any]) -> bool:
        return builtins.set(self).isdisjoint(other)


def keys(
    td: Any,
    include_nested: bool = False,
    leaves_only: bool = False,
    is_leaf: IsLeaf | None = None,
    *,
    sort: bool = False,
) -> Any:
    """A live view of the keys; nested ones are tuples.

    include_nested: also the keys of nested containers, each after its content.
    leaves_only: without the containers themselves.
    is_leaf: which classes count as leaves, `default_is_leaf` if not given.
    sort: in alphabetical order.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.zeros(2), b=dict(c=torch.ones(3)))
    >>> list(td.keys()), list(td.keys(True, True))
    (['a', 'b'], ['a', ('b', 'c')])
    """
    return KeysView(td, (include_nested, leaves_only, is_leaf, sort), 0)


def values(
    td: Any,
    include_nested: bool = False,
    leaves_only: bool = False,
    is_leaf: IsLeaf | None = None,
    *,
    sort: bool = False,
) -> Any:
    """A live view of the values; the flags are those of `keys`.

    >>> from raffia import TensorDict
    >>> [v.shape for v in TensorDict(a=torch.zeros(2), b=dict(c=torch.ones(3))).values(True, True)]
    [torch.Size([2]), torch.Size([3])]
    """
    return NestedView(td, (include_nested, leaves_only, is_leaf, sort), 1)


def items(
    td: Any,
    include_nested: bool = False,
    leaves_only: bool = False,
    is_leaf: IsLeaf | None = None,
    *,
    sort: bool = False,
) -> Any:
    """A live view of the `(key, value)` pairs; the flags are those of `keys`.

    >>> from raffia import TensorDict
    >>> list(TensorDict(a=1, b=dict(c=2)).items(True, True))
    [('a', tensor(1)), (('b', 'c'), tensor(2))]
    """
    return NestedView(td, (include_nested, leaves_only, is_leaf, sort), None)


# ------------------------------------------------------------------------ one entry


def get(td: Any, key: NestedKey, default: Any = UNSET, **lazy_options: Any) -> Any:
    """The entry under `key`, or `default` where there is none.

    A non-tensor entry is returned as its `NonTensorData`; `td[key]` gives the bare value.
    `as_list`, `as_padded_tensor`, `as_nested_tensor` (with `padding_value`, `padding_side`,
    `layout`) say what to do with entries of lazy stacks whose shapes differ.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=dict(b=torch.zeros(2)))
    >>> td.get(("a", "b")), td.get("missing"), td.get("missing", 0)
    (tensor([0., 0.]), None, 0)
    """
    if modes.get_raises and default is UNSET:
        default = NO_DEFAULT
    path = unravel_key_to_tuple(key)
    if not path:
        unravel_key(key)
    node, last = td, len(path) - 1
    for i, name in enumerate(path):
        if not isinstance(node, Node):
            if default is UNSET or default is NO_DEFAULT:
                raise through_leaf(path[i - 1], node, name)
            return default
        if lazy_options and i == last:
            value = node._get_lazy(name, **lazy_options)
        else:
            value = node._get_str(name)
        if value is None:
            if default is NO_DEFAULT:
                raise missing(name, node)
            return None if default is UNSET else default
        node = value
    return node


def getitem_key(td: Any, key: NestedKey) -> Any:
    """`td[key]` for a key."""
    value = get(td, key)
    if value is None:
        raise_missing(key, td)
    return value._unwrapped() if isinstance(value, Node) else value


def contains(td: Any, key: NestedKey) -> bool:
    """Whether there is an entry under `key`: `key in td`.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=dict(b=torch.zeros(2)))
    >>> "a" in td, ("a", "b") in td, "b" in td
    (True, True, False)
    """
    node = td
    if not is_key(key):
        raise TypeError(
            f"`in` asks whether a key is there, and {key!r} is no key: "
            "a string or a tuple of strings is needed"
        )
    for name in unravel_key_to_tuple(key):
        node = node._peek_str(name) if isinstance(node, Node) else None
        if node is None:
            return False
    return True


def set(
    td: Any, key: NestedKey, item: Any, inplace: bool = False, *, non_blocking: bool = False
) -> Any:
    """Store `item` under `key` and return the container.

    inplace: write into the tensor that is there already, if there is one.
    A nested key creates the levels that are missing. Numbers, sequences and arrays become tensors,
    dicts become containers, other values are kept as `NonTensorData`.
    Raises RuntimeError if the container is locked or the leading dimensions of `item` are not its
    batch size.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[3]).set(("next", "reward"), torch.zeros(3))["next", "reward"]
    tensor([0., 0., 0.])
    """
    path = unravel_key_to_tuple(key)
    if not path:
        unravel_key(key)
    if inplace and contains(td, path):
        return td.set_(path, item, non_blocking=non_blocking)
    set_path(td, path, item)
    return td


def set_path(td: Any, path: tuple[str, ...], item: Any) -> None:
    """Store at the end of `path`; missing levels are attached last, so a refused item adds none."""
    node, depth = td, len(path) - 1
    for i in range(depth):
        child = node._get_str(path[i])
        if child is None:
            fresh = node.empty()
            if node._locked:
                raise locked_error(node, path[i])
            set_path(fresh, path[i + 1 :], item)
            if node.__class__ is node._plain:  # of its batch size, device and names
                node._d[path[i]] = fresh
            else:
                node._set_str(path[i], fresh)
            return
        if not isinstance(child, Node) or child._is_data():
            raise KeyError(
                f"the entry {path[i]!r} is already present and is a {type(child).__name__}, not a "
                f"container, so {path[i + 1]!r} cannot be set in it; delete it first: del "
                f"td[{path[i]!r}]"
            )
        node = child
    node._set_str(path[depth], item)


def locked_error(td: Any, key: Any = None) -> RuntimeError:
    what = "" if key is None else f" (entry {key!r})"
    return RuntimeError(
        f"Cannot modify locked {type(td).__name__}{what}: "
        "entries of a locked container can't be set, replaced or removed. "
        "Write into what is there with td.set_(key, value), or unlock it first with td.unlock_()."
    )


def set_(td: Any, key: NestedKey, item: Any, *, non_blocking: bool = False) -> Any:
    """Write `item` into the tensor under `key`, cast to its dtype and device; allowed when locked.

    Raises KeyError if there is no such entry.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.zeros(2)).lock_()
    >>> td.set_("a", torch.ones(2, dtype=torch.int64))["a"]
    tensor([1., 1.])
    """
    node, name = holder(td, key)
    if node is not td and type(node) is not td._plain:
        node.set_(name, item, non_blocking=non_blocking)
        return td
    dest = get(node, name, NO_DEFAULT)
    if isinstance(dest, Node):
        if dest._is_data():
            dest._write(item)
        elif isinstance(item, (Node, Mapping)):
            dest.update_(item, non_blocking=non_blocking)
        else:
            raise TypeError(
                f"entry {key!r} is a container; set_ writes a container or dict into it, "
                f"not a {type(item).__name__}"
            )
    elif isinstance(item, (Node, Mapping)):
        raise TypeError(
            f"entry {key!r} is a tensor; set_ can't write a {type(item).__name__} into it"
        )
    else:
        write(dest, item, unravel_key(key), non_blocking)
    return td


def holder(td: Any, key: NestedKey) -> tuple[Any, str]:
    """The node that has (or would have) the entry `key` right below it, and the entry's name."""
    path = unravel_key_to_tuple(key)
    if not path:
        unravel_key(key)
    node = get(td, path[:-1], NO_DEFAULT) if len(path) > 1 else td
    if not isinstance(node, Node):
        raise through_leaf(path[-2], node, path[-1])
    return node, path[-1]


class WriteError(RuntimeError, ValueError):
    """A value does not fit the tensor that it is written into.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2)).set_("a", torch.zeros(3))
    Traceback (most recent call last):
    ...
    raffia.tensordict.entries.WriteError: Failed to update 'a' in tensordict: a value of shape...
    """


def write(dest: Tensor, item: Any, key: NestedKey, non_blocking: bool = False) -> None:
    """Copy `item` into the tensor `dest`; the error names the key."""
    source = item if isinstance(item, Tensor) else torch.as_tensor(item, device=dest.device)
    try:
        if dest.requires_grad and dest.is_leaf:
            dest.data.copy_(source, non_blocking=non_blocking)
        else:
            dest.copy_(source, non_blocking=non_blocking)
    except RuntimeError as error:
        raise WriteError(
            f"Failed to update {key!r} in tensordict: a value of shape {source.shape} "
            f"can't be written into a tensor of shape {dest.shape}: {error}"
        ) from error


def setdefault(td: Any, key: NestedKey, default: Any, inplace: bool = False) -> Any:
    """The entry under `key`; where there is none, `default` is stored first.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=1)
    >>> td.setdefault("a", 5), td.setdefault("b", 5)
    (tensor(1), tensor(5))
    """
    if not contains(td, key):
        set(td, key, default, inplace=inplace)
    return get(td, key)


def set_at_(td: Any, key: NestedKey, value: Any, index: Any, *, non_blocking: bool = False) -> Any:
    """Write `value` into the rows `index` of the entry under `key`.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(3), batch_size=[3]).set_at_("a", 1.0, slice(1, 3))["a"]
    tensor([0., 1., 1.])
    """
    node, name = holder(td, key)
    if node is not td and type(node) is not td._plain:
        node.set_at_(name, value, index, non_blocking=non_blocking)
        return td
    dest = get(node, name, NO_DEFAULT)
    if isinstance(dest, Node) and dest._is_data():
        node._replace_str(name, dest._with_rows(index, value))
        return td
    if isinstance(dest, Tensor):
        if isinstance(value, Tensor):
            value = value.to(dest.device, dest.dtype, non_blocking=non_blocking)
        elif not isinstance(value, (bool, int, float, complex)):
            value = torch.as_tensor(value, dtype=dest.dtype, device=dest.device)
    try:
        dest[index] = value
    except RuntimeError as error:
        raise RuntimeError(
            f"cannot write into rows of entry {key!r} of shape {dest.shape}: {error}"
        ) from error
    return td


def get_at(td: Any, key: NestedKey, index: Any, default: Any = UNSET) -> Any:
    """The rows `index` of the entry under `key`, or `default` where there is none.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.arange(3), batch_size=[3]).get_at("a", 1)
    tensor(1)
    """
    value = get(td, key, default)
    return value if value is None or value is default else value[index]


def pop(td: Any, key: NestedKey, default: Any = NO_DEFAULT) -> Any:
    """Remove the entry under `key` and return it, or `default` where there is none.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=1)
    >>> td.pop("a"), td.pop("a", None)
    (tensor(1), None)
    """
    value = get(td, key, default)
    if value is not default:
        td.del_(key)
    return value


def popitem(td: Any) -> tuple[str, Any]:
    """Remove the entry that was added last and return its key and value.

    >>> from raffia import TensorDict
    >>> TensorDict(a=1, b=2).popitem()
    ('b', tensor(2))
    """
    names = list(td.keys()) if td.__class__ is not td._plain else list(td._d)[-1:]
    if not names:
        raise KeyError("popitem: the container has no entries")
    return names[-1], pop(td, names[-1])


def del_(td: Any, key: NestedKey) -> Any:
    """Remove the entry under `key` and return the container; `del td[key]` does the same.

    >>> from raffia import TensorDict
    >>> list(TensorDict(a=1, b=2).del_("a").keys())
    ['b']
    """
    node, name = holder(td, key)
    if node._locked:
        raise locked_error(node, name)
    if node._peek_str(name) is None:
        raise missing(name, node)
    node._del_str(name)
    return td


def rename_key_(td: Any, old_key: NestedKey, new_key: NestedKey, safe: bool = False) -> Any:
    """Move an entry to another key.

    safe: refuse to overwrite an entry that is there.

    >>> from raffia import TensorDict
    >>> list(TensorDict(a=1).rename_key_("a", ("b", "c")).keys(True, True))
    [('b', 'c')]
    """
    old_key, new_key = unravel_key(old_key), unravel_key(new_key)
    value = get(td, old_key, NO_DEFAULT)
    if td._locked:
        raise locked_error(td, old_key)
    if old_key == new_key:
        return td
    if safe and contains(td, new_key):
        raise KeyError(
            f"key {new_key!r} already present in {type(td).__name__}; "
            "rename_key_(..., safe=False) overwrites it"
        )
    paths = (unravel_key_to_tuple(old_key), unravel_key_to_tuple(new_key))
    with all_or_nothing(td, paths=paths):
        td.del_(old_key)
        td.set(new_key, value)
    return td


def rename_keys(td: Any, mapping: Mapping[NestedKey, NestedKey], *, strict: bool = True) -> Any:
    """A copy (same tensors) in which each key of `mapping` has its new name.

    strict: raise KeyError for a key that is not there.

    >>> from raffia import TensorDict
    >>> list(TensorDict(a=1, b=2).rename_keys({"a": "b", "b": "a"}).items())
    [('b', tensor(1)), ('a', tensor(2))]
    """
    moves = [(unravel_key_to_tuple(old), unravel_key_to_tuple(new)) for old, new in mapping.items()]
    moves = [(old, new) for old, new in moves if strict or contains(td, old)]
    for i, (old, _) in enumerate(moves):
        for other, _ in moves[:i]:
            if old[: len(other)] == other[: len(old)]:
                raise ValueError(f"rename_keys: {other!r} and {old!r} are not separate entries")
    values = [get(td, old, NO_DEFAULT) for old, _ in moves]
    out = td._map(lambda leaf: leaf)
    for old, _ in moves:
        out.del_(old)
    for (_, new), value in zip(moves, values, strict=True):
        if contains(out, new):
            raise ValueError(f"rename_keys: {new!r} is already taken")
        out.set(new, value)
    return out


# ------------------------------------------------------------------------ many entries


def update(
    td: Any,
    input_dict_or_td: Any = None,
    clone: bool = False,
    inplace: bool = False,
    *,
    non_blocking: bool = False,
    keys_to_update: Sequence[NestedKey] | None = None,
    is_leaf: IsLeaf | None = None,
    update_batch_size: bool = False,
    ignore_lock: bool = False,
    **entries: Any,
) -> Any:
    """Store all entries of a container or dict; nested ones are merged, not replaced.

    clone: store clones of the tensors.
    inplace: write into the tensors that are there already.
    keys_to_update: only these keys.
    update_batch_size: take over the batch size of the input.
    If an entry is refused, none is stored.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=dict(b=1))
    >>> td.update({"a": {"c": 2}, "d": 3}).to_dict()
    {'a': {'b': tensor(1), 'c': tensor(2)}, 'd': tensor(3)}
    """
    source = merged(input_dict_or_td, entries)
    if source is td:
        return td
    like = source if update_batch_size and isinstance(source, Node) else None
    if keys_to_update is not None:
        source = restricted(source, keys_to_update)
    if td._locked and ignore_lock:
        with td.unlock_():
            return update(
                td,
                source,
                clone,
                inplace,
                non_blocking=non_blocking,
                is_leaf=is_leaf,
                update_batch_size=update_batch_size,
            )
    if td._locked and not inplace:
        raise locked_error(td)
    if inplace and is_leaf is None:
        into: list[Tensor] = []
        given: list[Tensor] = []
        if not update_batch_size and writes(td, source, into, given):
            if copied(into, given, non_blocking):
                return td
    if like is None:
        with all_or_nothing(td, source):
            merge(td, source, clone, inplace, non_blocking, is_leaf)
        return td
    resized = both_have(td, like)
    before = [node._batch_size for node, _ in resized]
    try:
        with all_or_nothing(td, source):
            for node, _ in resized:
                node._batch_size = torch.Size()
            merge(td, source, clone, inplace, non_blocking, is_leaf)
            for node, theirs in reversed(resized):
                node._set_batch_size(theirs._batch_size)
    except BaseException:
        for (node, _), size in zip(resized, before, strict=True):
            node._batch_size = size
        raise
    return td


def both_have(td: Any, source: Any) -> list[tuple[Any, Any]]:
    """The plain containers in both, at any depth, whose batch size is to be that of `source`."""
    out = [(td, source)]
    for mine, theirs in out:
        for name, value in theirs._entries().items():
            below = mine._get_str(name)
            if type(below) is td._plain and isinstance(value, Node) and not value._is_data():
                out.append((below, value))
    return out


def merged(source: Any, entries: Mapping[str, Any]) -> Any:
    if source is None:
        return entries
    if entries:
        raise ValueError("update takes a container or dict, or keyword entries, not both")
    if not isinstance(source, (Node, Mapping)) and not hasattr(source, "items"):
        raise TypeError(
            f"update takes a container, a dict or keyword entries, got {type(source).__name__}"
        )
    return source


def restricted(source: Any, keys_to_update: Sequence[NestedKey]) -> dict[NestedKey, Any]:
    """The entries of `source` under these keys."""
    if isinstance(keys_to_update, str):
        raise TypeError(
            f"keys_to_update is a sequence of keys, got str: keys_to_update=[{keys_to_update!r}]"
        )
    out: dict[NestedKey, Any] = {}
    for key in keys_to_update:
        value: Any = source
        for name in unravel_key_to_tuple(key):
            value = (
                value._get_str(name)
                if isinstance(value, Node)
                else value.get(name)
                if value is not None
                else None
            )
        if value is not None:
            out[key] = value
    return out


Saved = list[tuple[dict[str, Any], dict[str, Any]]]  # the dict of a node, and what it held


def save(node: Any, out: Saved) -> None:
    """Append shallow copies of the dicts in which a node keeps its entries."""
    for store in node._stores():
        if not out or out[-1][0] is not store:  # as it often is for one key after the other
            out.append((store, store.copy()))


def save_tree(td: Any, out: Saved) -> None:
    """`save` for a container and for what is nested in it."""
    for store in td._stores():
        out.append((store, store.copy()))
        for value in store.values():
            if value.__class__ is not Tensor and isinstance(value, Node):
                save_tree(value, out)


def save_path(td: Any, path: tuple[str, ...], out: Saved) -> Any:
    """`save` for each container on the way to the entry `path`; returns what stands there."""
    node = td
    for name in path:
        if not isinstance(node, Node):
            return None
        save(node, out)
        node = node._peek_str(name)
    return node


def save_targets(td: Any, source: Any, out: Saved) -> None:
    """`save` for each container in which storing the entries of `source` changes something."""
    save(td, out)
    for key, value in source._peek().items() if isinstance(source, Node) else source.items():
        below = value.__class__ is not Tensor and isinstance(value, (Node, Mapping))
        if below or key.__class__ is not str:
            mine = save_path(td, unravel_key_to_tuple(key), out)
            if below and isinstance(mine, Node):
                save_targets(mine, value, out)


class all_or_nothing:
    """A block that puts the entries back as they were if it raises.

    source: it stores no entries but these, so that the rest of `td` need not be saved.
    paths: it stores or removes only these entries.
    """

    __slots__ = ("saved",)

    def __init__(
        self, td: Any, source: Any = None, paths: Iterable[tuple[str, ...]] | None = None
    ) -> None:
        self.saved: Saved = []
        if source is not None:
            save_targets(td, source, self.saved)
        elif paths is not None:
            for path in paths:
                save_path(td, path, self.saved)
        else:
            save_tree(td, self.saved)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is not None:
            for store, content in self.saved:
                store.clear()
                store.update(content)


def merge(
    td: Any, source: Any, clone: bool, inplace: bool, non_blocking: bool, is_leaf: IsLeaf | None
) -> None:
    """Store every entry of `source`, descending where both sides are containers."""
    pairs = source._entries().items() if isinstance(source, Node) else source.items()
    for key, value in list(pairs):
        key = unravel_key(key)
        mine: Any = (
            td._peek_str(key)
            if key.__class__ is str
            else get(td, key)
            if contains(td, key)
            else None
        )
        nested = isinstance(mine, Node) and not mine._is_data()
        if nested and is_leaf is not None and is_leaf(type(value)):
            nested = False
        if (
            nested
            and isinstance(value, (Node, Mapping))
            and not (isinstance(value, Node) and value._is_data())
        ):
            if type(mine) is td._plain and type(value) in (td._plain, dict):
                merge(mine, value, clone, inplace, non_blocking, is_leaf)
            else:
                mine.update(value, clone, inplace, non_blocking=non_blocking, is_leaf=is_leaf)
            continue
        if clone and isinstance(value, (Tensor, Node)):
            value = value.clone()
        td.set(key, value, inplace=inplace, non_blocking=non_blocking)


def update_(
    td: Any,
    input_dict_or_td: Any = None,
    clone: bool = False,
    *,
    non_blocking: bool = False,
    keys_to_update: Sequence[NestedKey] | None = None,
    **entries: Any,
) -> Any:
    """Write the entries of a container or dict into the tensors there; allowed when locked.

    Raises KeyError if a key is not there and RuntimeError if a shape does not fit, before anything
    is written.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2)).lock_().update_({"a": torch.ones(2)})["a"]
    tensor([1., 1.])
    """
    source = merged(input_dict_or_td, entries)
    if keys_to_update is not None:
        source = restricted(source, keys_to_update)
    into: list[Tensor] = []
    values: list[Tensor] = []
    if writes(td, source, into, values):
        if copied(into, values, non_blocking):
            return td
    pairs = list(source._entries().items() if isinstance(source, Node) else source.items())
    check_writes(td, pairs)
    for key, value in pairs:
        td.set_(key, value, non_blocking=non_blocking)
    return td


def writes(
    td: Any, source: Any, into: list[Tensor], values: list[Tensor], lazily: bool = True
) -> bool:
    """Append the pairs of tensors that writing `source` into `td` copies, where that is all of it.

    False if a key is not there, or one of a pair is no plain tensor.
    """
    plain = td._plain
    if td.__class__ is not plain:
        return lazily and writes_lazily(td, source, into, values)
    if source.__class__ is plain:
        source = source._d
    elif source.__class__ is not dict:
        return False
    d = td._d
    for name, value in source.items():
        mine = d.get(name)
        if value.__class__ is Tensor:
            if mine.__class__ is not Tensor:
                return False
            into.append(mine)
            values.append(value)
        elif not isinstance(mine, Node) or not writes(mine, value, into, values, lazily):
            return False
    return True


def writes_lazily(td: Any, source: Any, into: list[Tensor], values: list[Tensor]) -> bool:
    """`writes` for a lazy stack: each part of a tensor goes into one member's."""
    if not getattr(td, "_lazy", False) or td._is_data() or td.hook_in is not None:
        return False
    parts = td._parts_of(source)
    if parts is None:
        return False
    for member, part in zip(td.tensordicts, parts, strict=True):
        if not writes(member, part, into, values):
            return False
    return True


def copied(into: list[Tensor], values: list[Tensor], non_blocking: bool = False) -> bool:
    """Write tensors into others, all or none; False where they are not alike, or torch refuses.

    The general way then writes them one by one, and its error names the key.
    """
    alone = len(into) < 2
    try:
        for leaf, value in zip(into, values, strict=True):
            if leaf.shape != value.shape or leaf.requires_grad:
                return False
            if value.requires_grad:
                alone = True
        if not alone and torch._C._functorch.peek_interpreter_stack() is None:
            torch._foreach_copy_(into, values, non_blocking=non_blocking)
        else:
            for leaf, value in zip(into, values, strict=True):
                leaf.copy_(value, non_blocking=non_blocking)
    except RuntimeError:  # a nested tensor has no shape; memory that is shown twice takes no write
        return False
    return True


def check_writes(td: Any, pairs: Iterable[tuple[Any, Any]]) -> None:
    """Raise what a later write would raise, so that none is done if one of them can't be."""
    for key, value in pairs:
        if not contains(td, key):
            raise_missing(key, td)
        node, name = holder(td, key)
        mine = node._peek_str(name)
        if isinstance(mine, Node) and type(value) in (td._plain, dict):
            if not mine._is_data():
                check_writes(mine, (value if type(value) is dict else value._d).items())
        elif getattr(node, "_lazy", False) and type(value) is Tensor and value.dim():
            for member, part in zip(node.tensordicts, node._parts(name, value), strict=True):
                check_writes(member, [(name, part)])
        elif isinstance(mine, Tensor) and isinstance(value, Tensor) and type(node) is td._plain:
            sizes = zip(reversed(value.shape), reversed(mine.shape), strict=False)
            if value.dim() > mine.dim() or any([n not in (1, size) for n, size in sizes]):
                write(mine, value, unravel_key(key))  # which refuses


def update_at_(
    td: Any,
    input_dict_or_td: Any,
    idx: Any,
    clone: bool = False,
    *,
    non_blocking: bool = False,
    keys_to_update: Sequence[NestedKey] | None = None,
) -> Any:
    """Write the entries of a container or dict into the rows `idx` of the tensors that are there.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.zeros(3), batch_size=[3])
    >>> td.update_at_({"a": torch.ones(2)}, slice(1, 3))["a"]
    tensor([0., 1., 1.])
    """
    source = merged(input_dict_or_td, {})
    if keys_to_update is not None:
        source = restricted(source, keys_to_update)
    into: list[Tensor] = []
    given: list[Tensor] = []
    if td.__class__ is td._plain and writes(td, source, into, given, lazily=False):
        if fit_rows(td, into, given, idx):
            for leaf, value in zip(into, given, strict=True):
                leaf[idx] = value
            return td
    pairs = list(source._entries().items() if isinstance(source, Node) else source.items())
    for key, _ in pairs:
        if not contains(td, key):
            raise_missing(key, td)
    check_rows(td, pairs, idx)
    for key, value in pairs:
        mine: Any = td
        for name in unravel_key_to_tuple(key):
            mine = mine._peek_str(name)
        nested = isinstance(mine, Node) and not mine._is_data()
        if nested and isinstance(value, (Node, Mapping)):
            mine.update_at_(value, idx, non_blocking=non_blocking)
        else:
            td.set_at_(key, value, idx, non_blocking=non_blocking)
    return td


def fit_rows(td: Any, into: list[Tensor], values: list[Tensor], idx: Any) -> bool:
    """Whether each tensor can be written into the rows `idx` of another as it is."""
    for leaf, value in zip(into, values, strict=True):
        if leaf.dtype is not value.dtype or leaf.requires_grad or leaf.device != value.device:
            return False
    size = td._batch_size
    if idx.__class__ is int and size:
        ndim = len(size)
        row, pairs = size[1:], zip(into, values, strict=True)
        if all([value.shape == row + leaf.shape[ndim:] for leaf, value in pairs]):
            return -size[0] <= idx < size[0]
    return all([fits_rows(*pair, idx) for pair in zip(into, values, strict=True)])


def fits_rows(leaf: Tensor, value: Tensor, idx: Any) -> bool:
    """Whether `leaf[idx] = value` is possible."""
    shape, rows = value.shape, leaf[idx].shape
    if shape == rows:
        return True
    sizes = zip(reversed(shape), reversed(rows), strict=False)
    return all([n in (1, size) for n, size in sizes]) and all(
        [n == 1 for n in shape[: max(0, len(shape) - len(rows))]]
    )


def check_rows(td: Any, pairs: Iterable[tuple[Any, Any]], idx: Any) -> None:
    """Raise what a later write into rows would raise, so that none is done if one can't be."""
    for key, value in pairs:
        node, name = holder(td, key)
        mine = node._peek_str(name)
        if type(mine) is td._plain and type(value) in (td._plain, dict):
            check_rows(mine, (value if type(value) is dict else value._d).items(), idx)
        elif type(mine) is Tensor and type(value) is Tensor and type(node) is td._plain:
            if not fits_rows(mine, value, idx):
                node.set_at_(name, value, idx)  # which refuses


def select(
    td: Any,
    *keys: NestedKey,
    inplace: bool = False,
    strict: bool = True,
    as_tensordict: bool = False,
) -> Any:
    """A container with only these entries (same tensors).

    inplace: remove the other entries from this container.
    strict: raise KeyError for a key that is not there.
    as_tensordict: of a tensorclass, a `TensorDict`, without the fields that are not selected.

    >>> from raffia import TensorDict
    >>> list(TensorDict(a=1, b=dict(c=2, d=3)).select("a", ("b", "c")).keys(True, True))
    ['a', ('b', 'c')]
    """
    if inplace:
        if td._locked:
            raise locked_error(td)
        return keep_only([(td, select(td, *keys, strict=strict))], td)
    if td.__class__ is td._plain:
        chosen = select_plain(td, keys)
        if chosen is not None:
            return chosen
    entries: dict[str, Any] = {}
    whole, parts = grouped(keys)
    for name in dict.fromkeys([*whole, *parts]) if parts else whole:
        value = td._get_str(name)
        if value is None:
            if strict:
                raise missing(name, td)
            continue
        if parts and name in parts:
            if isinstance(value, Node):
                value = value if name in whole else value.select(*parts[name], strict=strict)
            elif strict:
                raise through_leaf(name, value, str(parts[name][0][0]))
        entries[name] = value
    return td._new(entries, td._batch_size, td._names)


def keep_only(pairs: Iterable[tuple[Any, Any]], td: Any) -> Any:
    """Remove from each container what `select` left out of the other of its pair; returns `td`."""
    surplus: list[tuple[Any, str]] = []
    for node, chosen in pairs:
        left_out(node, chosen, surplus)
    for node, name in surplus:
        if node._locked:
            raise locked_error(node, name)
    for node, name in surplus:
        node._del_str(name)
    return td


def left_out(node: Any, chosen: Any, out: list[tuple[Any, str]]) -> None:
    """Append the container and the name of each entry that `chosen` lacks."""
    if node.__class__ is not node._plain and getattr(node, "_lazy", False):
        for member, part in zip(node.tensordicts, chosen.tensordicts, strict=True):
            left_out(member, part, out)
        return
    for name, mine in node._entries().items():
        kept = chosen._get_str(name)
        if kept is None:
            out.append((node, name))
        elif kept is not mine and isinstance(mine, Node):
            left_out(mine, kept, out)


def select_plain(td: Any, keys: tuple[Any, ...]) -> Any:
    """`select` where every key is there and well-formed, nested ones of two names; else None."""
    d = td._d
    entries: dict[str, Any] = {}
    below: dict[str, list[str]] = {}
    for key in keys:
        if key.__class__ is str:
            value = d.get(key)
            if value is None:
                return None
            entries[key] = value
        elif key.__class__ is tuple and len(key) == 2 and key[0].__class__ is str:
            below.setdefault(key[0], []).append(key[1])
        else:
            return None
    for name, rest in below.items():
        value = d.get(name)
        if value.__class__ is not td._plain or name in entries:
            return None
        entries[name] = select_plain(value, tuple(rest))
        if entries[name] is None:
            return None
    return td._new(entries, td._batch_size, td._names)


def place(td: Any, key: NestedKey) -> tuple[Any, Any]:
    """The container right around an entry and the entry's name; None for it unless all is plain.

    That is: `key` is well-formed, and each container on the way is an unlocked `TensorDict`.
    """
    if key.__class__ is str:
        return td, key
    if key.__class__ is not tuple or not key or key[-1].__class__ is not str:
        return None, key
    node, plain = td, td._plain
    for name in key[:-1]:
        if name.__class__ is not str:
            return None, key
        node = node._d.get(name)
        if node.__class__ is not plain or node._locked:
            return None, key
    return node, key[-1]


def exclude(td: Any, *keys: NestedKey, inplace: bool = False) -> Any:
    """A container without these entries (same tensors); keys that are not there are passed over.

    >>> from raffia import TensorDict
    >>> list(TensorDict(a=1, b=dict(c=2, d=3)).exclude("a", ("b", "c")).keys(True, True))
    [('b', 'd')]
    """
    if inplace and td._locked:
        raise locked_error(td)
    if inplace and td.__class__ is td._plain:
        places = [place(td, key) for key in keys]
        if all([node is not None for node, _ in places]):
            for node, name in places:
                node._d.pop(name, None)
            return td
    whole, parts = grouped(keys)
    if inplace:
        for name in list(td.keys()):
            if name in whole:
                td._del_str(name)
            elif name in parts and isinstance(td._get_str(name), Node):
                td._get_str(name).exclude(*parts[name], inplace=True)
        return td
    entries = {}
    for name, value in td._entries().items():
        if name in whole:
            continue
        if name in parts and isinstance(value, Node):
            value = value.exclude(*parts[name])
        entries[name] = value
    return td._new(entries, td._batch_size, td._names)


def grouped(keys: Iterable[NestedKey]) -> tuple[dict[str, None], dict[str, list[Any]]]:
    """Keys by their first part: names taken whole, and for the others the rest of each key."""
    whole: dict[str, None] = {}
    parts: dict[str, list[Any]] = {}
    for key in keys:
        if key.__class__ is not str:
            key = unravel_key(key)
        if key.__class__ is str:
            whole[key] = None
        else:
            parts.setdefault(key[0], []).append(key[1:])
    return whole, parts


def split_keys(
    td: Any,
    *key_sets: Sequence[NestedKey],
    inplace: bool = False,
    default: Any = NO_DEFAULT,
    strict: bool = True,
    reproduce_struct: bool = False,
) -> tuple[Any, ...]:
    """One container for each set of keys, and a last one with what is left.

    A dict stands for a set of keys and the names that they get.
    inplace: the last one is this container, from which the others are taken out.
    default: what stands for keys that are not there (else KeyError, unless strict=False).
    reproduce_struct: keep the empty levels of nested containers.

    >>> from raffia import TensorDict
    >>> first, rest = TensorDict(a=1, b=2, c=3).split_keys(["a"])
    >>> list(first.keys()), list(rest.keys())
    (['a'], ['b', 'c'])
    """
    if inplace and td._locked:
        raise locked_error(td)
    if inplace:
        with all_or_nothing(td):
            return _split_keys(td, td, key_sets, default, strict, reproduce_struct)
    return _split_keys(td, td.copy(), key_sets, default, strict, reproduce_struct)


def _split_keys(
    td: Any,
    last: Any,
    key_sets: Any,
    default: Any,
    strict: bool,
    reproduce_struct: bool,
    filter_empty: bool = True,
) -> tuple[Any, ...]:
    present = last.copy()
    seen: dict[NestedKey, None] = {}
    out = []
    for key_set in key_sets:
        part = last.empty(recurse=reproduce_struct)
        moves = key_set if isinstance(key_set, Mapping) else None
        for given in [key_set] if isinstance(key_set, str) else key_set:
            key = unravel_key(given)
            new = key if moves is None else moves[given]
            if key in seen:
                raise KeyError(
                    f"key {key!r} is in two key sets; each key can go to one container only"
                )
            seen[key] = None
            value = get(present, key) if contains(present, key) else None
            if value is None:
                if default is not NO_DEFAULT:
                    set(part, new, default)
                elif strict:
                    raise_missing(key, td)
                continue
            set(part, new, value)
        out.append(part)
    for key in seen:
        if contains(last, key):
            del_(last, key)
    if filter_empty and not reproduce_struct:
        prune(last)
    return (*out, last)


def prune(td: Any) -> bool:
    """Remove nested containers that hold nothing; whether nothing is left then."""
    if td.__class__ is not td._plain and getattr(td, "_lazy", False):
        return all([prune(member) for member in td.tensordicts])  # also what not all of them have
    kept = False
    for name, value in list(td._peek().items()):
        if value.__class__ is Tensor or not isinstance(value, Node) or value._is_data():
            kept = True
        elif prune(value):
            td._del_str(name)
        else:
            kept = True
    return not kept


def separates(
    td: Any,
    *keys: NestedKey,
    default: Any = NO_DEFAULT,
    strict: bool = True,
    filter_empty: bool = True,
) -> Any:
    """Take these entries out of this container and return them in another one.

    filter_empty: remove nested containers of which nothing is left.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=1, b=2)
    >>> list(td.separates("a").keys()), list(td.keys())
    (['a'], ['b'])
    """
    if td._locked:
        raise locked_error(td)
    with all_or_nothing(td):
        return _split_keys(td, td, (keys,), default, strict, False, filter_empty)[0]


def flatten_keys(
    td: Any, separator: str = ".", inplace: bool = False, is_leaf: IsLeaf | None = None
) -> Any:
    """A container without nesting: the names of a nested key are joined by `separator`.

    Raises KeyError if two entries would get the same name.

    >>> from raffia import TensorDict
    >>> list(TensorDict(a=dict(b=1, c=2)).flatten_keys(".").keys())
    ['a.b', 'a.c']
    """
    entries: dict[str, Any] = {}
    for key, value in entries_list(td, True, True, is_leaf or is_leaf_nontensor, False):
        name = key if key.__class__ is str else text(separator).join(key)
        if name in entries:
            raise KeyError(
                f"flatten_keys: two entries would be named {name!r}; "
                f"use another separator than {separator!r}"
            )
        entries[name] = value
    if not inplace:
        out = td._new(entries, td._batch_size, td._names)
        out._origin = ("keys", weakref.ref(td), separator)
        return out
    replace_entries(td, entries)
    return td


def replace_entries(td: Any, entries: dict[str, Any]) -> None:
    if td._locked:
        raise locked_error(td)
    with all_or_nothing(td, {}):
        for name in list(td.keys()):
            td._del_str(name)
        for name, value in entries.items():
            td._set_str(name, value)


def text(separator: Any) -> str:
    if not isinstance(separator, str):
        raise TypeError(f"the separator is a string, got {separator!r}")
    return separator


def unflatten_keys(td: Any, separator: str = ".", inplace: bool = False) -> Any:
    """A nested container: each name is split at `separator`.

    Raises KeyError if a name would have to be an entry and a container at once.

    >>> from raffia import TensorDict
    >>> TensorDict({"a.b": 1, "a.c": 2}).unflatten_keys(".").to_dict()
    {'a': {'b': tensor(1), 'c': tensor(2)}}
    """
    tree: dict[str, Any] = {}
    for name, value in td._entries().items():
        if isinstance(value, Node) and not value._is_data():
            value = value.unflatten_keys(separator)
        if text(separator) not in name:
            if name in tree:
                raise KeyError(
                    f"unflatten_keys: {name!r} is an entry and would also be a container"
                )
            tree[name] = value
            continue
        *path, last = name.split(separator)
        level = tree
        for part in path:
            below = level.setdefault(part, {})
            if isinstance(below, Node) and not below._is_data():
                below = level[part] = dict(below._entries())
            if not isinstance(below, dict):
                raise KeyError(
                    f"unflatten_keys: {part!r} is an entry and would also be a container, "
                    f"for {name!r}"
                )
            level = below
        if last in level:
            raise KeyError(f"unflatten_keys: {name!r} is already there, as an entry or a container")
        level[last] = value
    entries = built(td, tree)
    if not inplace:
        out = td._new(entries, td._batch_size, td._names)
        out._origin = ("nested keys", weakref.ref(td), separator)
        return out
    replace_entries(td, entries)
    return td


def built(td: Any, tree: dict[str, Any]) -> dict[str, Any]:
    """Nodes for the plain dicts in `tree`."""
    return {
        name: td._new(built(td, value), td._batch_size, td._names)
        if isinstance(value, dict)
        else value
        for name, value in tree.items()
    }


def replace(td: Any, input_dict_or_td: Any = None, **entries: Any) -> Any:
    """A copy (same tensors) in which the given entries are stored.

    >>> from raffia import TensorDict
    >>> TensorDict(a=1, b=2).replace(a=5).to_dict()
    {'a': tensor(5), 'b': tensor(2)}
    """
    source = merged(input_dict_or_td, entries)
    if not isinstance(source, Node) and not source:
        return td
    return td.copy().update(source)


def is_empty(td: Any) -> bool:
    """Whether there is no leaf, neither here nor in what is nested.

    >>> from raffia import TensorDict
    >>> TensorDict(a=dict()).is_empty(), TensorDict(a=1).is_empty()
    (True, False)
    """
    for value in td._peek().values():
        if value.__class__ is Tensor or not isinstance(value, Node):
            return False
        if value._is_data() or not value.is_empty():
            return False
    return True


def clear(td: Any) -> Any:
    """Remove all entries.

    >>> from raffia import TensorDict
    >>> TensorDict(a=1).clear().is_empty()
    True
    """
    if td._locked:
        raise locked_error(td)
    for name in list(td.keys()):
        td._del_str(name)
    return td


def create_nested(td: Any, key: NestedKey) -> Any:
    """Store an empty container under `key`.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[3]).create_nested("a")["a"].batch_size
    torch.Size([3])
    """
    if td.__class__ is td._plain and key.__class__ is str and not td._locked:
        td._d[key] = td.empty()
        return td
    return set(td, key, td.empty())


def fill_(td: Any, key: NestedKey, value: float | bool) -> Any:
    """Fill the tensor (or all tensors of the container) under `key` with `value`.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2)).fill_("a", 3)["a"]
    tensor([3., 3.])
    """
    entry = get(td, key, NO_DEFAULT)
    for leaf in entry._leaves([]) if isinstance(entry, Node) else [entry]:
        leaf.fill_(value)
    return td


def to_dict(
    td: Any,
    *,
    retain_none: bool = True,
    convert_tensors: bool | str = False,
    tolist_first: bool = False,
) -> dict[str, Any]:
    """Plain nested dicts; non-tensor entries become their values.

    convert_tensors: True turns tensors into lists, "numpy" into arrays.
    retain_none: keep entries that are None.

    >>> from raffia import TensorDict
    >>> TensorDict(a=dict(b=torch.ones(2)), c="text").to_dict()
    {'a': {'b': tensor([1., 1.])}, 'c': 'text'}
    """
    if tolist_first:
        return td.tolist(convert_nodes=True, convert_tensors=convert_tensors, tolist_first=True)
    out: dict[str, Any] = {}
    for name, value in td._entries().items():
        if value.__class__ is Tensor or not isinstance(value, Node):
            out[name] = converted(value, convert_tensors) if convert_tensors else value
        elif value._is_data():
            data = value.tolist() if hasattr(value, "tensordicts") else value._unwrapped()
            if convert_tensors and isinstance(data, Tensor) and isinstance(value, Tensor):
                data = converted(data, convert_tensors)
            if retain_none or data is not None:
                out[name] = data
        else:
            out[name] = value.to_dict(retain_none=retain_none, convert_tensors=convert_tensors)
    return out


def converted(leaf: Tensor, how: bool | str) -> Any:
    return leaf.numpy() if how == "numpy" else leaf.tolist() if how else leaf


def get_item_shape(td: Any, key: NestedKey) -> torch.Size:
    """The shape of the entry under `key`.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2, 3)).get_item_shape("a")
    torch.Size([2, 3])
    """
    return get(td, key, NO_DEFAULT).shape


def entry_class(td: Any, key: NestedKey) -> type:
    """The class of the entry under `key`.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2)).entry_class("a")
    <class 'torch.Tensor'>
    """
    if td.__class__ is td._plain:
        return type(td.get(key, NO_DEFAULT))
    node, name = holder(td, key)
    value = node._peek_str(name)
    if value is None:
        raise missing(name, node)
    return type(value)


def depth(td: Any) -> int:
    """How deep containers are nested: 0 for a flat one.

    >>> from raffia import TensorDict
    >>> TensorDict(a=dict(b=dict(c=1))).depth
    2
    """
    below = [
        1 + value.depth
        for value in td._peek().values()
        if isinstance(value, Node) and not value._is_data()
    ]
    return max(below, default=0)


def cat_tensors(
    td: Any, *keys: NestedKey, out_key: NestedKey, dim: int = 0, keep_entries: bool = False
) -> Any:
    """Concatenate these entries along `dim` into a new entry `out_key`.

    keep_entries: do not remove them.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2), b=torch.ones(1)).cat_tensors("a", "b", out_key="c")["c"]
    tensor([0., 0., 1.])
    """
    return _joined(td, torch.cat, keys, out_key, dim, keep_entries)


def stack_tensors(
    td: Any, *keys: NestedKey, out_key: NestedKey, dim: int = 0, keep_entries: bool = False
) -> Any:
    """Stack these entries along `dim` into a new entry `out_key`.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.zeros(2), b=torch.ones(2))
    >>> td.stack_tensors("a", "b", out_key="c")["c"].shape
    torch.Size([2, 2])
    """
    return _joined(td, torch.stack, keys, out_key, dim, keep_entries)


def _joined(
    td: Any, join: Any, keys: Sequence[NestedKey], out_key: NestedKey, dim: int, keep: bool
) -> Any:
    # A tensorclass gives its fields' defaults; the tree within names what is missing.
    tree = td if td.__class__ is td._plain else getattr(td, "_td", td)
    joined = join([tree.get(key, NO_DEFAULT) for key in keys], dim)
    paths = [unravel_key_to_tuple(key) for key in (*keys, out_key)]
    with all_or_nothing(td, paths=paths):
        if not keep:
            for key in keys:
                td.del_(key)
        return td.set(out_key, joined)


def is_non_tensor(td: Any, key: NestedKey) -> bool:
    """Whether the entry under `key` is a non-tensor value.

    >>> from raffia import TensorDict
    >>> TensorDict(a="text").is_non_tensor("a")
    True
    """
    value = td._peek_str(key) if key.__class__ is str else None
    if value is None:
        value = get(td, key, NO_DEFAULT)
    return isinstance(value, Node) and not isinstance(value, Tensor) and value._is_data()


def get_non_tensor(td: Any, key: NestedKey, default: Any = NO_DEFAULT) -> Any:
    """The bare value of the non-tensor entry under `key`.

    >>> from raffia import TensorDict
    >>> TensorDict(a="text").get_non_tensor("a")
    'text'
    """
    value = get(td, key, default)
    return value._unwrapped() if isinstance(value, Node) else value


def set_non_tensor(td: Any, key: NestedKey, value: Any) -> Any:
    """Store any Python value under `key`, as it is.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[2]).set_non_tensor("a", [1, 2, 3])["a"]
    [1, 2, 3]
    """
    from raffia.tensordict.nontensor import NonTensorData

    path = unravel_key_to_tuple(key)
    node = td if len(path) == 1 else get(td, path[:-1])
    batch_size = td._batch_size if node is None else node._batch_size
    return set(td, path, NonTensorData(value, batch_size=batch_size, device=td.device))


def non_tensor_items(td: Any, include_nested: bool = False) -> tuple[tuple[Any, Any], ...]:
    """The `(key, entry)` pairs of the non-tensor entries.

    >>> from raffia import TensorDict
    >>> [(key, entry.data) for key, entry in TensorDict(a="text", b=1).non_tensor_items()]
    [('a', 'text')]
    """
    out: list[tuple[Any, Any]] = []
    for name, value in td._peek().items():
        if isinstance(value, Tensor):
            continue
        if isinstance(value, Node) and value._is_data():
            out.append((name, td._get_str(name)))
        elif include_nested and isinstance(value, Node):
            below = non_tensor_items(td._get_str(name), True)
            out += [(unravel_key((name, key)), entry) for key, entry in below]
    return tuple(out)


def filter_non_tensor_data(td: Any) -> Any:
    """A copy (same tensors) without the non-tensor entries.

    >>> from raffia import TensorDict
    >>> list(TensorDict(a="text", b=1).filter_non_tensor_data().keys())
    ['b']
    """
    entries = {}
    for name, value in td._entries().items():
        if isinstance(value, Node) and not isinstance(value, Tensor):
            if value._is_data():
                continue
            value = value.filter_non_tensor_data()
        entries[name] = value
    return td._new(entries, td._batch_size, td._names)


def filter_empty_(td: Any) -> Any:
    """Remove nested containers that hold nothing.

    >>> from raffia import TensorDict
    >>> list(TensorDict(a=dict(), b=1).filter_empty_().keys())
    ['b']
    """
    prune(td)
    return td
