"""Checks of settings, made where a config is made. Imports no torch, so that `--help` is fast.

A field's type says which values it may have: `num_envs: PositiveInt = 8`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from itertools import chain
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from raffia.hints import check_choice, check_range

# Limits that infinity switches off; all other numbers are finite.
MAY_BE_INFINITE = ("max_grad_norm", "step_timeout_seconds", "patience_seconds")
_KINDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a text"}


def at_least(low: float) -> Callable[[str, float], None]:
    """The check, in `Annotated`, of numbers that must not be below `low`."""
    return partial(check_range, low=low)


def above_zero(name: str, value: float) -> None:
    """Raise ValueError unless a number is above 0; to be used in `Annotated`.

    >>> from raffia.algorithms.efficientzero.config import OptimizerConfig
    >>> OptimizerConfig(max_grad_norm=0.0)
    Traceback (most recent call last):
    ...
    ValueError: max_grad_norm=0.0 must be above 0
    """
    if not value > 0:
        raise ValueError(f"{name}={value} must be above 0")


def named_pair(example: str) -> Callable[[str, str], None]:
    """The check, in `Annotated`, of texts of the form NAME=MEANING, such as this one.

    >>> named_pair("state=obs")("columns", "obs")
    Traceback (most recent call last):
    ...
    ValueError: columns: 'obs' is not NAME=MEANING, such as state=obs
    """

    def check(name: str, value: str) -> None:
        if value.find("=") < 1:
            raise ValueError(f"{name}: {value!r} is not NAME=MEANING, such as {example}")

    return check


def _below_one(name: str, value: float) -> None:
    if not value < 1:
        raise ValueError(f"{name}={value} must be below 1")


PositiveInt = Annotated[int, at_least(1)]
NonNegativeInt = Annotated[int, at_least(0)]
PositiveFloat = Annotated[float, above_zero]
NonNegativeFloat = Annotated[float, at_least(0)]
Fraction = Annotated[float, partial(check_range, low=0, high=1)]
PositiveFraction = Annotated[Fraction, above_zero]
FractionBelowOne = Annotated[Fraction, _below_one]


class Checked:
    """The base of configs: their values are checked when they are made."""

    def __post_init__(self) -> None:
        check_types(self)


def check_types(config: Any) -> None:
    """Raise ValueError for a value that is not of its field's type, that its `Literal` does not
    list, or that is out of its range, in a config and in those that it holds.

    A whole number may stand where a number is wanted; True is not a number. A `Literal`, or a type
    with a range, may stand by itself, in a tuple, or with None.

    >>> from dataclasses import replace
    >>> from raffia.recipes.efficientzero.presets import PRESETS
    >>> replace(PRESETS["smoke"], seed="a")
    Traceback (most recent call last):
    ...
    ValueError: seed='a' must be a whole number
    >>> from raffia.envs.config import AtariConfig
    >>> AtariConfig(size=80)
    Traceback (most recent call last):
    ...
    ValueError: size=80 must be one of 64, 84, 96
    >>> from raffia.envs.config import EnvConfig
    >>> EnvConfig(num_envs=0)
    Traceback (most recent call last):
    ...
    ValueError: num_envs=0 must be at least 1
    >>> from raffia.algorithms.efficientzero.config import SearchConfig
    >>> SearchConfig(dirichlet_fraction=25.0)
    Traceback (most recent call last):
    ...
    ValueError: dirichlet_fraction=25.0 must be in 0..1
    """
    kind: type = type(config)
    choices, ranges = _choices(kind), _ranges(kind)
    for field in fields(config):
        value, hint = getattr(config, field.name), _hint(config, field.name)
        if not _is_of(hint, value):
            raise ValueError(f"{field.name}={value!r} must be {_described(hint)}{_near(value)}")
        _check_finite(field.name, value)
        if field.name in choices:
            for one in value if get_origin(hint) is tuple else (value,):
                check_choice(field.name, one, choices[field.name])
        for one in _each(value):
            for check in ranges[field.name] if one is not None else ():
                check(field.name, one)
        if is_dataclass(value):
            check_types(value)


def _check_finite(name: str, value: Any) -> None:
    for one in _each(value):
        is_endless = name in MAY_BE_INFINITE and one == math.inf
        if isinstance(one, float) and not (math.isfinite(one) or is_endless):
            raise ValueError(f"{name}={value} must be finite")


def _each(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def short_repr(config: Any) -> str:
    """The call that makes a config, with only those settings that differ from their defaults.

    >>> from raffia.envs.config import AtariConfig, EnvConfig
    >>> short_repr(EnvConfig(num_envs=2, atari=AtariConfig(size=84)))
    'EnvConfig(num_envs=2, atari=AtariConfig(size=84))'
    """
    given = []
    for field in fields(config):
        value, factory = getattr(config, field.name), field.default_factory
        if value != (field.default if factory is MISSING else factory()):
            given.append(
                f"{field.name}={short_repr(value) if is_dataclass(value) else repr(value)}"
            )
    return f"{type(config).__name__}({', '.join(given)})"


def check_alone(setting: str, why: str, others: Mapping[str, bool]) -> None:
    """Raise ValueError if another setting is set with which this one cannot be combined.

    setting: as it was given; others: whether each of the other settings is set.

    >>> check_alone("compile=True", "it compiles one agent", {"population.size=4": True})
    Traceback (most recent call last):
    ...
    ValueError: compile=True cannot be combined with population.size=4: it compiles one agent.
    Leave one of the two out
    """
    for what, is_set in others.items():
        if is_set:
            raise ValueError(
                f"{setting} cannot be combined with {what}: {why}. Leave one of the two out"
            )


def check_divisible(name: str, value: int, parts: str, num: int, of: str = "") -> None:
    """Raise ValueError unless a number can be divided equally among the parts of another setting.

    of: what is divided, where the name of the setting does not tell.

    >>> check_divisible("env.num_envs", 7, "actors.num", 3, of="environments")
    Traceback (most recent call last):
    ...
    ValueError: env.num_envs=7 environments cannot be divided equally among actors.num=3: set
    env.num_envs=9
    """
    if value % num:
        raise ValueError(
            f"{name}={value}{f' {of}' if of else ''} cannot be divided equally among "
            f"{parts}={num}: set {name}={(value // num + 1) * num}"
        )


def _is_of(hint: Any, value: Any) -> bool:
    """Whether a value is of a type of settings; other hints accept anything."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is_of(part, value) for part in parts)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        wanted = parts[:1] * len(value) if parts[-1] is ... else parts
        return len(wanted) == len(value) and all(map(_is_of, wanted, value))
    if hint in (int, float):
        numbers = (int,) if hint is int else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool)
    if hint in (bool, str, NoneType) or is_dataclass(hint):
        return isinstance(value, hint)
    return True  # `check_choice` checks a Literal


def _described(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_described, parts))
    if origin is tuple and parts[-1] is ...:
        return f"a tuple, each {_described(parts[0])}"
    if origin is tuple:
        return f"a tuple ({', '.join(map(_described, parts))})"
    if is_dataclass(hint) and isinstance(hint, type):
        return f"a {hint.__name__}"
    return "None" if hint is NoneType else _KINDS.get(hint, str(hint))


def _near(value: Any) -> str:
    """A hint at the call that was probably meant: a list for a tuple, numpy's for a number."""
    if isinstance(value, list):
        return f"; write {tuple(value)!r}"
    item = getattr(value, "item", None)  # numpy's and torch's numbers
    if callable(item) and getattr(value, "ndim", 1) == 0:
        return f"; write {item()!r}"
    return ""


def _hint(config: Any, name: str) -> Any:
    kind: type = type(config)
    return _hints(kind)[name]


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def _ranges(kind: type) -> dict[str, tuple[Callable[[str, Any], None], ...]]:
    """The checks of the numbers in each field."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: _checks_in(hint) for name, hint in hints.items()}


def _checks_in(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is Annotated:
        return (*_checks_in(hint.__origin__), *hint.__metadata__)
    return tuple(chain.from_iterable(map(_checks_in, get_args(hint))))


@cache
def _choices(kind: type) -> dict[str, tuple[object, ...]]:
    """The allowed values of each field that is a Literal, a tuple of Literals, or these or None."""
    found = {name: _chosen_from(hint) for name, hint in _hints(kind).items()}
    return {name: choices for name, choices in found.items() if choices}


def _chosen_from(hint: Any) -> tuple[object, ...]:
    """The values that a type hint allows; empty if it allows anything else too."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (tuple, Union, UnionType):
        parts = [part for part in get_args(hint) if part not in (..., NoneType)]
        choices = [_chosen_from(part) for part in parts]
        if all(choices):
            none = (None,) if NoneType in get_args(hint) else ()
            return (*none, *dict.fromkeys(chain.from_iterable(choices)))
    return ()
