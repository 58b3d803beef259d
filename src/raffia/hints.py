"""Words of messages: the nearest known name, a value that is no choice or out of range, nouns."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Mapping
from typing import Any


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name that is most similar to this one; None if no name is similar.

    cutoff: how similar it must be, 0..1, as `difflib.get_close_matches` has it.

    >>> nearest("cartpol", ["smoke", "cartpole"])
    'cartpole'
    """
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(
    name: str,
    names: Iterable[str] | Mapping[str, Any],
    hint: str = "; did you mean {!r}?",
    cutoff: float = 0.6,
) -> str:
    """The end of an error: a hint at the nearest name, or nothing.

    names: a mapping says for each name what is to be shown for it.
    hint: with `{!r}` for the nearest.

    >>> did_you_mean("cartpol", ["smoke", "cartpole"]), did_you_mean("xyz", ["smoke"])
    ("; did you mean 'cartpole'?", '')
    """
    near = nearest(name, names, cutoff)
    if near is None:
        return ""
    return hint.format(names[near] if isinstance(names, Mapping) else near)


def check_choice(name: str, value: object, choices: Iterable[object], hint: str = "") -> None:
    """Raise ValueError unless a value is one of the choices.

    hint: the end of the error; without it, the nearest choice.

    >>> check_choice("missing", "eror", ("error", "ignore"))
    Traceback (most recent call last):
    ...
    ValueError: missing='eror' must be one of 'error', 'ignore'; did you mean 'error'?
    """
    known = list(choices)
    if value not in known:
        hint = hint or did_you_mean(str(value), map(str, known))
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, known))}{hint}")


def check_range(name: str, value: float, low: float, high: float | None = None) -> None:
    """Raise ValueError unless a number is at least `low` and, where it is given, at most `high`.

    >>> check_range("fraction", 1.5, 0, 1)
    Traceback (most recent call last):
    ...
    ValueError: fraction=1.5 must be in 0..1
    """
    is_number = value is not None
    if not (is_number and value >= low and (high is None or value <= high)):  # a NaN is not
        wanted = f"at least {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name}={value!r} must be {wanted}")


def check_count(name: str, value: object, low: int) -> None:
    """Raise TypeError unless a value is a whole number, and ValueError if it is below `low`.

    >>> check_count("batch_size", 2.5, 1)
    Traceback (most recent call last):
    ...
    TypeError: batch_size=2.5 must be a whole number
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be a whole number")
    check_range(name, number, low)


def plural(number: int, noun: str) -> str:
    """A number with its noun.

    >>> plural(1, "run"), plural(1200, "run")
    ('1 run', '1,200 runs')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def error_text(error: BaseException) -> str:
    """The class and message of an error, and each of its notes on a line.

    >>> error = ValueError("the motor is hot")
    >>> error.add_note("let it cool down")
    >>> error_text(error).splitlines()
    ['ValueError: the motor is hot', 'let it cool down']
    """
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
