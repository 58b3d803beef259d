"""Reading and writing entries by key: the dictionary side of the container, of every kind."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from raffia.tensordict import kinds, modes
from raffia.tensordict.atomic import all_or_nothing
from raffia.tensordict.keys import (
    NestedKey,
    is_key,
    malformed,
    missing,
    raise_missing,
    through_leaf,
    unravel_key,
    unravel_key_to_tuple,
)
from raffia.tensordict.lazy_shape import member_shape
from raffia.tensordict.lock import locked_error
from raffia.tensordict.node import Container, Node


class NoDefault(enum.Enum):
    """Markers for a default that is not given; an enum, because torch.compile supports these."""

    RAISE = "a missing key is an error"
    UNSET = "a missing key gives None, but one that leads through a leaf is an error"

    def __repr__(self) -> str:  # as signatures show it
        return "<not given>"


NO_DEFAULT: Any = NoDefault.RAISE

UNSET: Any = NoDefault.UNSET


def get(td: Any, key: NestedKey, default: Any = UNSET, **lazy_options: Any) -> Any:
    """The entry under `key`, or `default` if it is missing.

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
        raise malformed(key)
    for name in unravel_key_to_tuple(key):
        node = node._peek_str(name) if isinstance(node, Node) else None
        if node is None:
            return False
    return True


def set(
    td: Container, key: NestedKey, item: Any, inplace: bool = False, *, non_blocking: bool = False
) -> Container:
    """Store `item` under `key` and return the container.

    inplace: write into the tensor that is there already, if there is one.
    A nested key creates the levels that are missing. Numbers, sequences and arrays become tensors,
    dicts become containers, other values are stored as `NonTensorData`.
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
        if node._lazy and not node._is_data():  # whose members may differ in their levels
            node._set_path(path[i:], item)
            return
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


def set_(td: Container, key: NestedKey, item: Any, *, non_blocking: bool = False) -> Container:
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
    source = item
    try:
        if not isinstance(item, Tensor):
            source = torch.as_tensor(item, device=dest.device)
        if dest.requires_grad and dest.is_leaf:
            dest.data.copy_(source, non_blocking=non_blocking)
        else:
            dest.copy_(source, non_blocking=non_blocking)
    except (RuntimeError, TypeError, ValueError) as error:
        what = f"a value of shape {source.shape}" if isinstance(source, Tensor) else repr(item)
        raise WriteError(
            f"Failed to update {key!r} in tensordict: {what} "
            f"can't be written into a tensor of shape {dest.shape}: {error}"
        ) from error


def setdefault(td: Any, key: NestedKey, default: Any, inplace: bool = False) -> Any:
    """The entry under `key`; if it is missing, `default` is stored first.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=1)
    >>> td.setdefault("a", 5), td.setdefault("b", 5)
    (tensor(1), tensor(5))
    """
    if not contains(td, key):
        set(td, key, default, inplace=inplace)
    return get(td, key)


def set_at_(
    td: Container, key: NestedKey, value: Any, index: Any, *, non_blocking: bool = False
) -> Container:
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
    """The rows `index` of the entry under `key`, or `default` if it is missing.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.arange(3), batch_size=[3]).get_at("a", 1)
    tensor(1)
    """
    value = get(td, key, default)
    return value if value is None or value is default else value[index]


def pop(td: Any, key: NestedKey, default: Any = NO_DEFAULT) -> Any:
    """Remove the entry under `key` and return it, or return `default` if it is missing.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=1)
    >>> td.pop("a"), td.pop("a", None)
    (tensor(1), None)
    """
    node, name = locate(td, key)
    if node is not None and name in node._d:
        return node._d.pop(name)
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


def del_(td: Container, key: NestedKey) -> Container:
    """Remove the entry under `key` and return the container; `del td[key]` does the same.

    It is removed from each member of a lazy stack that has it.

    >>> from raffia import TensorDict, lazy_stack
    >>> list(TensorDict(a=1, b=2).del_("a").keys())
    ['b']
    >>> list(lazy_stack([TensorDict(a=1, b=2), TensorDict(a=3)]).del_("b")[0].keys())
    ['a']
    """
    node, name = locate(td, key)
    if node is not None and name in node._d:
        del node._d[name]
        return td
    node, name = holder(td, key)
    if node._locked:
        raise locked_error(node, name)
    holders = node._children() if node._lazy else [node]
    if all([one._peek_str(name) is None for one in holders]):
        raise missing(name, node)
    node._del_str(name)
    return td


def rename_key_(
    td: Container, old_key: NestedKey, new_key: NestedKey, safe: bool = False
) -> Container:
    """Move an entry to another key.

    safe: refuse to overwrite an entry that is there.

    >>> from raffia import TensorDict
    >>> list(TensorDict(a=1).rename_key_("a", ("b", "c")).keys(True, True))
    [('b', 'c')]
    """
    (node, name), (into, new) = locate(td, old_key), locate(td, new_key)
    if node is not None and node is into and name in node._d and not (safe and new in node._d):
        if name != new:
            node._d[new] = node._d.pop(name)
        return td
    old_key, new_key = unravel_key(old_key), unravel_key(new_key)
    if td._locked:
        raise locked_error(td, old_key)
    if not contains(td, old_key):
        raise_missing(old_key, td)
    if old_key == new_key:
        return td
    if safe and contains(td, new_key):
        raise KeyError(
            f"key {new_key!r} already present in {type(td).__name__}; "
            "rename_key_(..., safe=False) overwrites it"
        )
    if td._lazy:  # one may be a member twice
        for member in {id(member): member for member in td._children()}.values():
            member.rename_key_(old_key, new_key)
        return td
    value = get(td, old_key, NO_DEFAULT)
    paths = (unravel_key_to_tuple(old_key), unravel_key_to_tuple(new_key))
    with all_or_nothing(td, paths=paths):
        td.del_(old_key)
        td.set(new_key, value)
    return td


def rename_keys(
    td: Container, mapping: Mapping[NestedKey, NestedKey], *, strict: bool = True
) -> Container:
    """A copy (same tensors) in which each key of `mapping` has its new name.

    A nested container of which nothing is left is removed.
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
    for old, _ in moves:
        for end in range(len(old) - 1, 0, -1):
            level = get(out, old[:end])
            if not isinstance(level, Node) or level._is_data() or len(level.keys()):
                break
            out.del_(old[:end])
    return out


def locate(td: Any, key: NestedKey) -> tuple[Any, Any]:
    """The container right around an entry and the entry's name; None for it unless all is plain.

    That is: `key` is well-formed, and `td` and those on the way are unlocked `TensorDict`s.
    """
    if td.__class__ is not td._plain or td._locked:
        return None, key
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


def is_empty(td: Any) -> bool:
    """Whether there is no leaf, neither here nor in what is nested.

    >>> from raffia import TensorDict
    >>> TensorDict(a=dict()).is_empty(), TensorDict(a=1).is_empty()
    (True, False)
    """
    for value in map(td._peek_str, td._entry_names()) if td._lazy else td._peek().values():
        if value.__class__ is Tensor or not isinstance(value, Node):
            return False
        if value._is_data() or not value.is_empty():
            return False
    return True


def clear(td: Container) -> Container:
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


def create_nested(td: Container, key: NestedKey) -> Container:
    """Store an empty container under `key`.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[3]).create_nested("a")["a"].batch_size
    torch.Size([3])
    """
    if td.__class__ is td._plain and key.__class__ is str and not td._locked:
        stored: Any = td
        stored._d[key] = td.empty()
        return td
    return set(td, key, td.empty())


def fill_(td: Container, key: NestedKey, value: float | bool) -> Container:
    """Fill the tensor (or all tensors of the container) under `key` with `value`.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2)).fill_("a", 3)["a"]
    tensor([3., 3.])
    """
    if not contains(td, key):
        raise_missing(key, td)
    node: Any
    node, name = holder(td, key)
    if node is not td or td._lazy:  # what is read from a lazy stack is a copy
        for holds in td._children() if node is td else [node]:
            holds.fill_(name, value)
        return td
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
    tolist_first: nested containers become what `tolist` gives: a list of dicts, one per row.

    >>> from raffia import TensorDict
    >>> TensorDict(a=dict(b=torch.ones(2)), c="text").to_dict()
    {'a': {'b': tensor([1., 1.])}, 'c': 'text'}
    """
    out: dict[str, Any] = {}
    for name, value in td._entries().items():
        if value.__class__ is Tensor or not isinstance(value, Node):
            out[name] = converted(value, convert_tensors) if convert_tensors else value
        elif value._is_data():
            rows = tolist_first or hasattr(value, "tensordicts")
            data = value.tolist() if rows else value._unwrapped()
            if convert_tensors and isinstance(data, Tensor) and isinstance(value, Tensor):
                data = converted(data, convert_tensors)
            if retain_none or data is not None:
                out[name] = data
        elif tolist_first:
            out[name] = value.tolist(convert_tensors=convert_tensors, tolist_first=True)
        else:
            out[name] = value.to_dict(retain_none=retain_none, convert_tensors=convert_tensors)
    return out


def converted(leaf: Tensor, how: bool | str) -> object:
    return leaf.numpy() if how == "numpy" else leaf.tolist() if how else leaf


def get_item_shape(td: Any, key: NestedKey) -> torch.Size:
    """The shape of the entry under `key`; in a lazy stack with -1 for dimensions that differ.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2, 3)).get_item_shape("a")
    torch.Size([2, 3])
    """
    if not td._lazy:
        return get(td, key, NO_DEFAULT).shape
    found = member_shape(*holder(td, key))
    if found is None:
        raise_missing(key, td)
    return found


def entry_class(td: Any, key: NestedKey) -> type:
    """The class of the entry under `key`.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2)).entry_class("a")
    <class 'torch.Tensor'>
    """
    node, name = holder(td, key)
    value = node._peek_str(name)
    if value is None:
        raise missing(name, node)
    return type(value)


def depth(td: Any) -> int:
    """The depth to which containers are nested: 0 for a flat one.

    >>> from raffia import TensorDict
    >>> TensorDict(a=dict(b=dict(c=1))).depth
    2
    """
    below = [
        1 + depth(value)
        for value in td._peek().values()
        if isinstance(value, Node) and not value._is_data()
    ]
    return max(below, default=0)


def cat_tensors(
    td: Container, *keys: NestedKey, out_key: NestedKey, dim: int = 0, keep_entries: bool = False
) -> Container:
    """Concatenate these entries along `dim` into a new entry `out_key`.

    keep_entries: do not remove them.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2), b=torch.ones(1)).cat_tensors("a", "b", out_key="c")["c"]
    tensor([0., 0., 1.])
    """
    return _joined(td, torch.cat, keys, out_key, dim, keep_entries)


def stack_tensors(
    td: Container, *keys: NestedKey, out_key: NestedKey, dim: int = 0, keep_entries: bool = False
) -> Container:
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


def set_non_tensor(td: Container, key: NestedKey, value: Any) -> Container:
    """Store any Python value under `key`, unchanged.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[2]).set_non_tensor("a", [1, 2, 3])["a"]
    [1, 2, 3]
    """
    path = unravel_key_to_tuple(key)
    node = td if len(path) == 1 else get(td, path[:-1])
    batch_size = td._batch_size if node is None else node._batch_size
    return set(td, path, kinds.NonTensorData(value, batch_size=batch_size, device=td.device))


def non_tensor_items(td: Any, include_nested: bool = False) -> tuple[tuple[NestedKey, Any], ...]:
    """The `(key, entry)` pairs of the non-tensor entries.

    >>> from raffia import TensorDict
    >>> [(key, entry.data) for key, entry in TensorDict(a="text", b=1).non_tensor_items()]
    [('a', 'text')]
    """
    out: list[tuple[Any, Any]] = []
    for name, value in td._peek().items():
        if value.__class__ is Tensor or not isinstance(value, Node) or isinstance(value, Tensor):
            continue
        if value._is_data():
            out.append((name, value))
        elif include_nested:
            below = non_tensor_items(value, True)
            out += [(unravel_key((name, key)), entry) for key, entry in below]
    return tuple(out)
