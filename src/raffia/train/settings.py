"""Settings of a config: names, types, and errors for values that do not fit."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Sequence
from dataclasses import Field, fields, is_dataclass
from functools import cache
from typing import (
    Any,
    ClassVar,
    Literal,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from raffia.hints import did_you_mean, nearest

Config = TypeVar("Config")
LONGEST = 200  # characters of a value that errors show
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


class AnyConfig(Protocol):
    """Any dataclass.

    >>> from raffia.envs.config import EnvConfig
    >>> "num_envs" in EnvConfig.__dataclass_fields__
    True
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


class ConfigError(ValueError):
    """A setting that does not exist, or a value that it cannot have.

    >>> value_from_json(int, "x", "seed")
    Traceback (most recent call last):
        ...
    raffia.train.settings.ConfigError: seed must be a whole number; got "x"
    """


def setting_names(kind: type[AnyConfig]) -> list[str]:
    """The names of all settings, with the path to each.

    >>> from raffia.envs.config import EnvConfig
    >>> setting_names(EnvConfig)[:2]
    ['id', 'num_envs']
    """
    return [path for path, _ in settings(kind)]


def unknown_setting(name: str, names: Sequence[str]) -> ConfigError:
    """The error for a name that no setting has, with the nearest one.

    >>> print(unknown_setting("num_simulations", ["seed", "search.num_simulations"]))
    there is no setting num_simulations; did you mean search.num_simulations?
    """
    name = _printed(name if len(name) <= LONGEST else f"{name[:LONGEST]} ...")
    near = nearest_name(name, names)
    hint = f"did you mean {near}?" if near else f"there are {', '.join(names)}"
    return ConfigError(f"there is no setting {name}; {hint}")


def _printed(text: str) -> str:
    """The text in a printable form: half a surrogate pair is written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def nearest_name(name: str, names: Sequence[str]) -> str | None:
    """The name that is nearest to `name`, whole or in its last part; None where none is near.

    >>> nearest_name("targets.discont", ["seed", "targets.discount"])
    'targets.discount'
    """
    last = name.rpartition(".")[2]
    ends = {known.rpartition(".")[2]: known for known in reversed(names)}
    like_end = nearest(last, ends)
    return ends.get(last) or nearest(name, names) or (ends[like_end] if like_end else None)


class Presets(dict[str, Config]):
    """Settings by name; the KeyError of an unknown name suggests the nearest one.

    >>> Presets({"cartpole": 1})["cartpol"]
    Traceback (most recent call last):
        ...
    KeyError: "there is no preset 'cartpol'; did you mean 'cartpole'?"
    """

    def __missing__(self, name: object) -> Config:
        near = nearest_name(str(name), list(self))
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(self)}"
        raise KeyError(f"there is no preset {name!r}; {hint}")


@cache
def type_hints(kind: type[AnyConfig]) -> dict[str, Any]:
    """The types of a config's fields, by name; a TypeError for one that no setting can have."""
    hints = get_type_hints(kind)
    hints = {field.name: hints[field.name] for field in fields(kind)}
    for name, hint in hints.items():
        if not (isinstance(hint, type) and is_dataclass(hint)) and not _readable(hint):
            raise TypeError(
                f"{kind.__name__}.{name} has the type {_type_name(hint)}, which no setting "
                "can have: a setting is an int, float, bool, str, Literal, a tuple of these, one "
                "of them or None, or a dataclass of settings"
            )
    return hints


def _readable(hint: Any) -> bool:
    inner = one_or_none(hint)
    if get_origin(inner) is tuple:
        return all(part is Ellipsis or _readable(part) for part in get_args(inner))
    return get_origin(inner) is Literal or (isinstance(inner, type) and inner in _WORDS)


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)


def one_or_none(hint: Any) -> Any:
    """T for the type `T | None`, any other as it is.

    >>> one_or_none(int | None), one_or_none(int)
    (<class 'int'>, <class 'int'>)
    """
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    inner = [part for part in get_args(hint) if part is not type(None)]
    return inner[0] if len(inner) == 1 else hint


def settings(kind: type[AnyConfig], path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and type of each setting, in the order of the fields.

    >>> from raffia.envs.config import EnvConfig
    >>> next(settings(EnvConfig))
    ('id', <class 'str'>)
    """
    for name, hint in type_hints(kind).items():
        if is_dataclass(hint) and isinstance(hint, type):
            yield from settings(hint, f"{path}{name}.")
        else:
            yield f"{path}{name}", hint


def value_from_json(hint: Any, value: object, path: str) -> object:
    """Convert `value` to the type; raises a ConfigError that says why if that is impossible.

    >>> value_from_json(tuple[float, ...], [1, 2], "search.temperatures")
    (1.0, 2.0)
    """
    origin, parts, inner = get_origin(hint), get_args(hint), one_or_none(hint)
    if inner is not hint:
        if value is None:
            return None
        if inner in _WORDS and not _fits(inner, value):
            raise wrong_value(path, hint, value)
        return value_from_json(inner, value, path)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise wrong_value(path, hint, value)
        if parts[-1] is Ellipsis:
            parts = parts[:1] * len(value)
        if len(parts) != len(value):
            raise wrong_value(path, hint, value)
        numbered = enumerate(zip(parts, value, strict=True))
        return tuple(value_from_json(part, v, f"{path}[{i}]") for i, (part, v) in numbered)
    if origin is Literal:
        # 1 == True == 1.0 in Python, so the type is asked too
        if not any(value == choice and type(value) is type(choice) for choice in parts):
            raise wrong_value(path, hint, value)
        return value
    if not _fits(hint, value):
        raise wrong_value(path, hint, value)
    return hint(value)


def _fits(hint: type, value: object) -> bool:
    """Whether the value is one of this simple type; True is not a number."""
    if hint is float and type(value) is int:
        return abs(value) < 2**1023  # the next ones are beyond floats
    return type(value) is hint or (hint is float and value in ("inf", "-inf", "nan"))


def wrong_value(path: str, hint: Any, value: object) -> ConfigError:
    """The error for a value of the wrong type: what the setting takes, and what was given.

    >>> print(wrong_value("checkpoint.keep", int, 2.5))
    checkpoint.keep must be a whole number; got 2.5
    """
    text, near = as_json(value), ""
    if get_origin(hint) is Literal and isinstance(value, str):
        near = did_you_mean(value[:LONGEST], map(str, get_args(hint)), "; did you mean {}?")
    return ConfigError(f"{path} must be {_described(hint)}; got {text}{near}")


def as_json(value: object) -> str:
    """Format a value as JSON, shortened if it is long.

    >>> as_json([1, "a"]), len(as_json("a" * 1000))
    ('[1, "a"]', 204)
    """
    try:
        text = json.dumps(value, default=str)
    except (ValueError, TypeError, RecursionError):  # whole numbers of thousands of digits; loops
        text = f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _described(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else _described(part) for part in parts)
    if origin is Literal:
        return f"one of {', '.join(json.dumps(part) for part in parts)}"
    if origin is tuple and parts[-1] is Ellipsis:
        return f"a list, each {_described(parts[0])}"
    if origin is tuple:
        return f"a list of {len(parts)}: {', '.join(_described(part) for part in parts)}"
    return _WORDS[hint]
