"""Selection of entries of a container, and renaming of their keys."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from raffia.tensordict.atomic import all_or_nothing
from raffia.tensordict.entries import NO_DEFAULT, contains, del_, get, locate, set
from raffia.tensordict.keys import (
    NestedKey,
    missing,
    raise_missing,
    through_leaf,
    unravel_key,
    unravel_key_to_tuple,
)
from raffia.tensordict.lock import locked_error
from raffia.tensordict.node import Container, Node, Source
from raffia.tensordict.updates import merged
from raffia.tensordict.views import IsLeaf, entries_list, is_leaf_nontensor


def select(
    td: Container,
    *keys: NestedKey,
    inplace: bool = False,
    strict: bool = True,
    as_tensordict: bool = False,
) -> Container:
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
        found: list[tuple[Any, str]] = []
        left_out(td, td.select(*keys, strict=strict), found)
        # One container may stand in several places.
        surplus = {(id(node), name): (node, name) for node, name in found}.values()
        for node, name in surplus:
            if node._locked:
                raise locked_error(node, name)
        for node, name in surplus:
            node._del_str(name)
        return td
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
            elif name not in whole:
                continue
        entries[name] = value
    return td._new(entries, td._batch_size, td._names)


def left_out(node: Any, chosen: Any, out: list[tuple[Any, str]]) -> None:
    """Append the container and the name of each entry that `chosen` lacks."""
    if node._lazy:
        for member, part in zip(node.tensordicts, chosen.tensordicts, strict=True):
            left_out(member, part, out)
        return
    for name, mine in node._entries().items():
        left = chosen._get_str(name)
        if left is None:
            out.append((node, name))
        elif left is not mine and isinstance(mine, Node):
            left_out(mine, left, out)


def select_plain(td: Any, keys: tuple[Any, ...]) -> Any:
    """Like `select`, if all keys exist and are well-formed, nested ones of two names; else None."""
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


def exclude(td: Container, *keys: NestedKey, inplace: bool = False) -> Container:
    """A container without these entries (same tensors); missing keys are ignored.

    >>> from raffia import TensorDict
    >>> list(TensorDict(a=1, b=dict(c=2, d=3)).exclude("a", ("b", "c")).keys(True, True))
    [('b', 'd')]
    """
    if inplace and td._locked:
        raise locked_error(td)
    if inplace:
        found = [locate(td, key) for key in keys]
        if all([node is not None for node, _ in found]):
            for node, name in found:
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
    td: Container,
    *key_sets: Sequence[NestedKey]
    | Mapping[NestedKey, NestedKey]
    | Callable[[tuple[str, ...], Tensor], bool],
    inplace: bool = False,
    default: Any = NO_DEFAULT,
    strict: bool = True,
    reproduce_struct: bool = False,
) -> tuple[Container, ...]:
    """One container for each set of keys, and a last one with what is left.

    A dict stands for a set of keys and the names that they get; a function of key, a tuple, and
    tensor for the tensors, of those in no set before, for which it is true.
    inplace: the last one is this container, from which the others are taken out.
    default: what stands for keys that are not there (else KeyError; with strict=False, and None,
        they are left out).
    reproduce_struct: keep the empty levels of nested containers.

    >>> from raffia import TensorDict
    >>> first, rest = TensorDict(a=1, b=2, c=3).split_keys(["a"])
    >>> list(first.keys()), list(rest.keys())
    (['a'], ['b', 'c'])
    """
    if inplace and td._locked:
        raise locked_error(td)
    last = td if inplace else td.copy()
    if default is None and not strict:
        default = NO_DEFAULT
    return _split_keys(td, last, key_sets, default, strict, reproduce_struct)


def _split_keys(
    td: Any,
    last: Any,
    key_sets: Any,
    default: Any,
    strict: bool,
    reproduce_struct: bool,
    filter_empty: bool = True,
) -> tuple[Any, ...]:
    moved: dict[NestedKey, None] = {}
    out = []
    for key_set in key_sets:
        part = last.empty(recurse=reproduce_struct)
        if callable(key_set):
            key_set = _chosen(last, key_set, moved)
        moves = key_set if isinstance(key_set, Mapping) else None
        for given in [key_set] if isinstance(key_set, str) else key_set:
            key = unravel_key(given)
            new = key if moves is None else moves[given]
            if key in moved:
                raise KeyError(
                    f"key {key!r} is in two key sets; each key can go to one container only"
                )
            moved[key] = None
            value = get(last, key) if contains(last, key) else None
            if isinstance(value, Node):  # entries of it may be moved elsewhere
                value = value.copy()
            if value is None:
                if default is not NO_DEFAULT:
                    set(part, new, default)
                elif strict:
                    raise_missing(key, td)
                continue
            set(part, new, value)
        out.append(part)
    with all_or_nothing(last, paths=map(unravel_key_to_tuple, moved)):
        for key in moved:
            if contains(last, key):
                del_(last, key)
        if filter_empty and not reproduce_struct:
            prune(last)
    return (*out, last)


def _chosen(td: Any, chooses: Callable[[tuple[str, ...], Tensor], bool], moved: Any) -> list[Any]:
    """The keys of the tensors that a function chooses, of those that are not moved yet."""
    found = []
    for key, value in td.items(True, True):
        path = unravel_key_to_tuple(key)
        above = [unravel_key(path[: i + 1]) for i in range(len(path))]
        if isinstance(value, Tensor) and not any([each in moved for each in above]):
            if chooses(path, value):
                found.append(key)
    return found


def prune(td: Any) -> None:
    """Remove all empty nested containers, or none if one cannot be removed."""
    found: list[tuple[Any, str]] = []
    _find_empty(td, found)
    for node, name in found:
        if node._locked:
            raise locked_error(node, name)
    for node, name in found:
        node._del_str(name)


def _find_empty(td: Any, found: list[tuple[Any, str]]) -> bool:
    """Append nested containers that hold nothing, by what holds them; whether this one is such."""
    if td._lazy:
        # also what not all of them have
        return all([_find_empty(member, found) for member in td.tensordicts])
    holds = False
    for name, value in td._peek().items():
        if value.__class__ is Tensor or not isinstance(value, Node) or value._is_data():
            holds = True
        elif _find_empty(value, found):
            found.append((td, name))
        else:
            holds = True
    return not holds


def separates(
    td: Container,
    *keys: NestedKey,
    default: Any = NO_DEFAULT,
    strict: bool = True,
    filter_empty: bool = True,
) -> Container:
    """Remove these entries from this container and return them in another one.

    filter_empty: remove nested containers of which nothing is left.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=1, b=2)
    >>> list(td.separates("a").keys()), list(td.keys())
    (['a'], ['b'])
    """
    if td._locked:
        raise locked_error(td)
    return _split_keys(td, td, (keys,), default, strict, False, filter_empty)[0]


def flatten_keys(
    td: Container, separator: str = ".", inplace: bool = False, is_leaf: IsLeaf | None = None
) -> Container:
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
        out._origin = ("unflatten_keys", weakref.ref(td), separator)
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
        raise TypeError(f"the separator must be a string, got {separator!r}")
    return separator


def unflatten_keys(td: Container, separator: str = ".", inplace: bool = False) -> Container:
    """A nested container: each name is split at `separator`.

    Raises KeyError if a name would have to be both an entry and a container.

    >>> from raffia import TensorDict
    >>> TensorDict({"a.b": 1, "a.c": 2}).unflatten_keys(".").to_dict()
    {'a': {'b': tensor(1), 'c': tensor(2)}}
    """
    tree: dict[str, Any] = {}
    for name, value in td._entries().items():
        container = isinstance(value, Node) and not value._is_data()
        if container:
            value = value.unflatten_keys(separator)
        if text(separator) not in name:
            if name not in tree:
                tree[name] = value
            elif container and not tree[name].keys() & value.keys():
                tree[name].update(value._entries())
            else:
                raise KeyError(
                    f"unflatten_keys: {name!r} is an entry and would also be a container"
                )
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
        out._origin = ("flatten_keys", weakref.ref(td), separator)
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


def replace(td: Container, input_dict_or_td: Source | None = None, **entries: Any) -> Container:
    """A copy (same tensors) in which the given entries are stored.

    >>> from raffia import TensorDict
    >>> TensorDict(a=1, b=2).replace(a=5).to_dict()
    {'a': tensor(5), 'b': tensor(2)}
    """
    source = merged(input_dict_or_td, entries)
    if not isinstance(source, Node) and not source:
        return td
    return td.copy().update(source)


def filter_non_tensor_data(td: Container) -> Container:
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


def filter_empty_(td: Container) -> Container:
    """Remove empty nested containers.

    >>> from raffia import TensorDict
    >>> list(TensorDict(a=dict(), b=1).filter_empty_().keys())
    ['b']
    """
    prune(td)
    return td
