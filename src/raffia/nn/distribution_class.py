"""The class of a module's distributions: found by its name, with errors that explain what went
wrong."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import distributions

from raffia.nn.dispatch import missing_inputs
from raffia.tensordict.keys import MissingKeyError, NestedKey, nearest

_AS_THEY_ARE = (ValueError, TypeError, RuntimeError, NotImplementedError)  # made of one text


class MissingEntryError(MissingKeyError, ValueError):
    """A distribution could not be made or asked because an entry is not there.

    >>> from torch.distributions import Normal
    >>> from raffia.nn import ProbabilisticTensorDictModule
    >>> act = ProbabilisticTensorDictModule(["loc", "scale"], ["act"], distribution_class=Normal)
    >>> act(TensorDict(loc=torch.zeros(3), scales=torch.ones(3)))
    Traceback (most recent call last):
    ...
    raffia.nn.distribution_class.MissingEntryError: Some tensors that are necessary for the
    module call were not found in the input: ProbabilisticTensorDictModule(Normal) reads 'scale'.
    Did you mean "scales"? (None was passed for it). The entries are ['loc', 'scales']
    """


def class_of(chosen: Any) -> Any:
    """The class or function that makes the distributions; a name stands for a class.

    >>> from raffia.nn.distribution_class import class_of
    >>> class_of("normal")
    <class 'torch.distributions.normal.Normal'>
    """
    if callable(chosen):
        return chosen
    if not isinstance(chosen, str):
        raise TypeError(
            "distribution_class is a class, a function that gives a distribution, or the name of "
            f"a class; got {chosen!r}"
        )
    from raffia.nn import distributions as ours  # which import this package

    classes = {
        name.lower(): made
        for room in (distributions, ours)
        for name, made in vars(room).items()
        if inspect.isclass(made) and issubclass(made, distributions.Distribution)
    }
    if chosen.lower() not in classes:
        raise ValueError(
            "distribution_class is a class, or the name of one of torch.distributions or "
            f"raffia.nn.distributions; none is named {chosen!r}{nearest(chosen.lower(), classes)}"
        )
    return classes[chosen.lower()]


def may_check(make: Any) -> bool:
    """Whether `make` takes `validate_args`."""
    code = getattr(getattr(make, "__init__", None), "__code__", None)
    return code is not None and "validate_args" in code.co_varnames


def explained(
    error: Exception,
    title: str,  # of the module
    make: Any,  # the class or function
    keys: dict[str, NestedKey],  # keyword -> key
    constants: Any,  # further keywords
    tensordict: Any,
) -> Exception:
    """The error of a distribution that could not be made, with the keys it came from."""
    mismatch = _mismatch(make, list(keys), list(constants)) if isinstance(error, TypeError) else ""
    if mismatch:
        return TypeError(
            f"distribution keywords and tensordict keys indicated by {title}.dist_keys must match, "
            f"and the keys are read as {keys}: {mismatch} To name the keyword that a key feeds: "
            f"in_keys={{keyword: key}}. ({error})"
        )
    missing = [key for key in keys.values() if tensordict.get(key, None) is None]
    if missing:
        return MissingEntryError(missing_inputs(title, missing, tensordict))
    blamed = [name for name in keys if re.search(rf"\bparameter {name}\b", str(error))]
    read = ", ".join(f"{name} from {keys[name]!r}" for name in blamed or keys)
    text = f"{title} can't make its distribution with {read}: {error}"
    if type(error) in _AS_THEY_ARE:
        return type(error)(text)
    error.add_note(text)
    return error


def _mismatch(make: Any, read: list[str], constants: list[str]) -> str:
    """The differences between the keywords and those that `make` takes, or nothing."""
    twice = [name for name in read if name in constants]
    if twice:
        return f"{twice} are given by in_keys and by distribution_kwargs."
    try:
        signature = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # a callable without one
        return ""
    named = [p for p in signature if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    takes, given = [p.name for p in named], [*read, *constants]
    name = getattr(make, "__name__", repr(make))
    unknown = [k for k in given if k not in takes] if len(named) == len(signature) else []
    if unknown:
        hint = nearest(unknown[0], takes) or "."
        return f"{name} takes {takes}, not {unknown[0]!r}{hint}"
    needed = [p.name for p in named if p.default is p.empty and p.name not in given]
    return f"{name} takes {takes} and needs {needed[0]!r}." if needed else ""
