"""Nested keys: normalise them, and clear errors for missing ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from raffia.hints import did_you_mean
from raffia.hints import nearest as nearest_of
from raffia.tensordict.node import Node


class _TypeOfKeys(type):
    def __instancecheck__(cls, value: object) -> bool:
        if isinstance(value, tuple):
            return bool(value) and all(isinstance(part, cls) for part in value)
        return isinstance(value, str)


if TYPE_CHECKING:
    NestedKey = str | tuple[Any, ...]
else:

    class NestedKey(metaclass=_TypeOfKeys):
        """The type of a key: a string, or a non-empty, possibly nested tuple of strings.

        >>> isinstance("a", NestedKey), isinstance(("a", ("b", "c")), NestedKey)
        (True, True)
        >>> isinstance((), NestedKey), isinstance(("a", 1), NestedKey)
        (False, False)
        """


class MissingKeyError(KeyError):
    """A key is not in the container; the message names the nearest one that is.

    >>> import torch
    >>> from raffia import TensorDict
    >>> TensorDict(action=torch.zeros(2))["acton"]
    Traceback (most recent call last):
    ...
    raffia.tensordict.keys.MissingKeyError: key "acton" not found in TensorDict
    with keys ['action']. Did you mean "action"?
    """

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class KeyThroughLeafError(MissingKeyError, ValueError):
    """A nested key leads through an entry that is a tensor, not a container.

    >>> import torch
    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2))["a", "b"]
    Traceback (most recent call last):
    ...
    raffia.tensordict.keys.KeyThroughLeafError: entry "a" is a Tensor, not a container,
    so it has no entry "b"
    """


class MalformedKeyError(KeyError, TypeError, RuntimeError, ValueError):
    """The error raised for a key that is not well-formed.

    >>> unravel_key(1)
    Traceback (most recent call last):
    ...
    raffia.tensordict.keys.MalformedKeyError: ...
    """


def malformed(key: Any) -> KeyError:
    return MalformedKeyError(
        "Only NestedKeys are supported: a key is a string or a non-empty, possibly nested "
        f"tuple of strings, such as 'obs' or ('next', 'obs'). Got {key!r}."
    )


def unravel_key(key: NestedKey) -> NestedKey:
    """Flatten a nested key: inner tuples are merged, a tuple of one is unwrapped.

    >>> unravel_key(("a", ("b", ("c",))))
    ('a', 'b', 'c')
    >>> unravel_key(("a",))
    'a'
    """
    if key.__class__ is str:
        return key
    flat = unravel_key_to_tuple(key)
    if not flat:
        raise malformed(key)
    return flat[0] if len(flat) == 1 else flat


def unravel_key_to_tuple(key: NestedKey) -> tuple[str, ...]:
    """Flatten a nested key to a tuple of strings.

    >>> unravel_key_to_tuple("a")
    ('a',)
    >>> unravel_key_to_tuple((("a",), "b"))
    ('a', 'b')
    """
    if isinstance(key, str):
        return (key,)
    if isinstance(key, tuple) and all([k.__class__ is str for k in key]):
        return key
    out: list[str] = []
    if not _unravel(key, out):
        raise malformed(key)
    return tuple(out)


def _unravel(key: Any, out: list[str]) -> bool:
    """Append the names in a nested key; False if it is malformed."""
    if isinstance(key, str):
        out.append(key)
        return True
    return isinstance(key, tuple) and bool(key) and all([_unravel(part, out) for part in key])


def unravel_key_list(keys: Sequence[NestedKey]) -> list[NestedKey]:
    """Flatten each key of a list or tuple of keys.

    >>> unravel_key_list(["a", ("b", ("c",))])
    ['a', ('b', 'c')]
    """
    if isinstance(keys, str) or not isinstance(keys, (list, tuple)):
        raise TypeError(
            f"unravel_key_list takes a list or a tuple of keys, got {type(keys).__name__}"
        )
    return [unravel_key(key) for key in keys]


def dotted(key: NestedKey) -> str:
    """The names of a nested key joined by dots, as in a state dict.

    >>> dotted("a"), dotted(("a", "b"))
    ('a', 'a.b')
    """
    return key if isinstance(key, str) else ".".join(key)


def is_under(key: NestedKey, root: NestedKey) -> bool:
    """Whether `key` is `root` or an entry of the container at `root`.

    >>> is_under(("a", "b"), "a"), is_under("a", ("a", "b"))
    (True, False)
    """
    if key.__class__ is str and root.__class__ is str:
        return key == root
    path, prefix = unravel_key_to_tuple(key), unravel_key_to_tuple(root)
    return path[: len(prefix)] == prefix


def overlap(key: NestedKey, other: NestedKey) -> bool:
    """Whether two keys are equal, or one of them leads to the other.

    >>> overlap("a", ("a", "b")), overlap(("a", "c"), ("a", "b"))
    (True, False)
    """
    return is_under(key, other) or is_under(other, key)


def is_key(index: Any) -> bool:
    """Whether `index` is a nested key, as opposed to an index into the batch."""
    if isinstance(index, str):
        return True
    return isinstance(index, tuple) and bool(index) and all([is_key(part) for part in index])


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint that names the entry whose spelling is closest, or nothing."""
    return did_you_mean(name, [n for n in names if isinstance(n, str)], '. Did you mean "{}"?')


def nearest_key(key: NestedKey, keys: Iterable[NestedKey]) -> str:
    """The nearest of keys that can be nested, with their names joined by dots."""
    return nearest(dotted(key), [dotted(k) for k in keys])


def missing(name: NestedKey, node: Any) -> MissingKeyError:
    """The error for a key that is not in `node`."""
    names = list(node.keys())
    hint = nearest(name, names) if isinstance(name, str) else ""
    if isinstance(name, str) and (not hint or "." in name):
        nested = [
            k for k in node.keys(True) if isinstance(k, tuple) and name in (k[-1], ".".join(k))
        ]
        if not nested and not hint:
            last = {k[-1]: k for k in reversed(list(node.keys(True))) if isinstance(k, tuple)}
            near = nearest_of(name, last)
            nested = [last[near]] if near is not None else []
        hint = f". Did you mean {nested[0]!r}?" if nested else hint
    return MissingKeyError(
        f'key "{name}" not found in {type(node).__name__} with keys {sorted(names)}{hint}'
    )


def through_leaf(name: str, value: Any, rest: str) -> KeyThroughLeafError:
    return KeyThroughLeafError(
        f'entry "{name}" is a {type(value).__name__}, not a container, so it has no entry "{rest}"'
    )


def raise_missing(key: NestedKey, td: Any) -> NoReturn:
    """Raise the error for the first part of `key` that is missing in the container."""
    path = unravel_key_to_tuple(key)
    node = td
    for i, name in enumerate(path):
        if not isinstance(node, Node):
            raise through_leaf(path[i - 1], node, name)
        child = node._get_str(name)
        if child is None:
            raise missing(name, node)
        node = child
    raise AssertionError(f"{key!r} is there")
