"""Values that are not tensors as JSON, and back: what the records of containers hold of them."""

from __future__ import annotations

import base64
import enum
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from raffia.files import dump_json, shown

Json = None | bool | int | float | str | list[Any] | dict[str, Any]


def encode(value: Any, key: tuple[str, ...]) -> Json:
    """Encode a non-tensor value as JSON, so that `decode` returns an equal one of the same types.

    >>> encode({"a": (1, None)}, ())
    {'a': {'$tuple': [1, None]}}
    """
    kind = type(value)
    if value is None or kind in (str, bool, int, float):
        return value
    if kind is list:
        return [encode(item, key) for item in value]
    if kind is tuple:
        return {"$tuple": [encode(item, key) for item in value]}
    if kind is dict:
        if not all([type(name) is str for name in value]):
            return {"$items": [[encode(k, key), encode(v, key)] for k, v in value.items()]}
        items = {name: encode(item, key) for name, item in value.items()}
        return {"$dict": items} if any([name.startswith("$") for name in items]) else items
    if kind in (set, frozenset):
        return {f"${kind.__name__}": sorted([encode(item, key) for item in value], key=dump_json)}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in ARRAY_KINDS:
        text = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        tag = "$array" if isinstance(value, np.ndarray) else "$number"
        return {tag: [value.dtype.str, list(value.shape), text]}
    if isinstance(value, enum.Enum):
        if "<locals>" not in kind.__qualname__:
            return {"$enum": [kind.__module__, kind.__qualname__, value.name]}
    elif isinstance(value, pathlib.Path):
        return {"$path": str(value)}
    elif kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    elif kind is complex:
        return {"$complex": [value.real, value.imag]}
    elif isinstance(value, (str, int, float)):
        return value
    raise TypeError(
        f"entry {'.'.join(key)!r} is a {kind.__name__}, which can't be stored on disk: a "
        "non-tensor value must be None, a bool, a number, a string, bytes, a numpy array, a path, "
        "a member of an enum defined at the top level of a module, or a list, tuple, set or dict "
        "of these. Convert it, or leave it out: td.exclude(...)"
    )


ARRAY_KINDS = "biufcmMSU"  # all but Python objects and records


def decode(value: Any) -> object:
    """Decode a value from `encode`; ValueError if `encode` can't have made it.

    >>> decode({"a": {"$tuple": [1, None]}})
    {'a': (1, None)}
    """
    if type(value) is list:
        return [decode(item) for item in value]
    if type(value) is not dict:
        return value
    if len(value) == 1:
        tag, content = next(iter(value.items()))
        if tag == "$dict" and type(content) is dict:
            return {name: decode(item) for name, item in content.items()}
        if tag in DECODERS:
            try:
                return DECODERS[tag](content)
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                raise ValueError(f"{shown(value)} is not a value: {error}") from None
    return {name: decode(item) for name, item in value.items()}


def _items(content: Any) -> Any:
    if type(content) is not list:
        raise ValueError("it is not a list")
    return [decode(item) for item in content]


def _array(content: Any) -> np.ndarray:
    name, shape, text = content
    dtype = np.dtype(name)
    if dtype.kind not in ARRAY_KINDS or not all([type(n) is int and n >= 0 for n in shape]):
        raise ValueError("there is no such array")
    return np.frombuffer(base64.b64decode(text, validate=True), dtype).reshape(shape).copy()


def _member(content: Any) -> Any:
    """A member of an enum; only those are found whose module is imported already."""
    module, name, member = content
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found)[part] if found is not None else None
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        raise ValueError("there is no such enum: import the module that defines it before loading")
    return found[member]


DECODERS: dict[str, Callable[[Any], Any]] = {
    "$tuple": lambda content: tuple(_items(content)),
    "$set": lambda content: set(_items(content)),
    "$frozenset": lambda content: frozenset(_items(content)),
    "$items": lambda content: {decode(name): decode(item) for name, item in content},
    "$array": _array,
    "$number": lambda content: _array(content)[()],
    "$enum": _member,
    "$path": pathlib.Path,
    "$bytes": lambda content: base64.b64decode(content, validate=True),
    "$complex": lambda content: complex(*content),
}
