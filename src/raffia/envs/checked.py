"""Settings that can't be: refused where a config is made. Imports no torch: help comes at once."""

from __future__ import annotations

import difflib
from functools import cache
from itertools import chain
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def check_choices(config: Any) -> None:
    """Refuse a value that its `Literal` does not list, by itself, in a tuple, or beside None.

    >>> from raffia.envs.config import AtariConfig
    >>> AtariConfig(size=80)
    Traceback (most recent call last):
    ...
    ValueError: size=80 is none of 64, 84, 96
    """
    kind: type = type(config)
    for name, choices in _choices(kind).items():
        value = getattr(config, name)
        for one in value if isinstance(value, tuple) else (value,):
            if one not in choices:
                near = difflib.get_close_matches(str(one), map(str, choices), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                listed = ", ".join(map(repr, choices))
                raise ValueError(f"{name}={value!r} is none of {listed}{hint}")


def check_least(config: Any, least: float, *names: str) -> None:
    """Refuse numbers of these names that are smaller, or NaN.

    >>> from raffia.envs.config import EnvConfig
    >>> EnvConfig(num_envs=0)
    Traceback (most recent call last):
    ...
    ValueError: num_envs=0 must be at least 1
    """
    for name in names:
        value = getattr(config, name)
        if not value >= least:
            raise ValueError(f"{name}={value} must be at least {least}")


def check_above_zero(config: Any, *names: str) -> None:
    """Refuse numbers of these names that are not above 0.

    >>> from raffia.algorithms.efficientzero.config import OptimizerConfig
    >>> OptimizerConfig(max_grad_norm=0.0)
    Traceback (most recent call last):
    ...
    ValueError: max_grad_norm=0.0 must be above 0
    """
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise ValueError(f"{name}={value} must be above 0")


def check_share(config: Any, *names: str) -> None:
    """Refuse numbers of these names that do not lie in 0..1.

    >>> from raffia.algorithms.efficientzero.config import SearchConfig
    >>> SearchConfig(dirichlet_fraction=25.0)
    Traceback (most recent call last):
    ...
    ValueError: dirichlet_fraction=25.0 must lie in 0..1
    """
    for name in names:
        value = getattr(config, name)
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value} must lie in 0..1")


@cache
def _choices(kind: type) -> dict[str, tuple[object, ...]]:
    """What each field may be that is a Literal, a tuple of them, or one of these or None."""
    found = {name: _chosen_from(hint) for name, hint in get_type_hints(kind).items()}
    return {name: choices for name, choices in found.items() if choices}


def _chosen_from(hint: Any) -> tuple[object, ...]:
    """Nothing where that may be anything else, too."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (tuple, Union, UnionType):
        parts = [part for part in get_args(hint) if part not in (..., NoneType)]
        choices = [_chosen_from(part) for part in parts]
        if all(choices):
            none = (None,) if NoneType in get_args(hint) else ()
            return (*none, *dict.fromkeys(chain.from_iterable(choices)))
    return ()
