"""Names of a package that are imported when first asked for: help and configs come at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package whose names lie in modules imported on demand.

    homes: the module of each name; `{"nn": "raffia.nn"}` of the package raffia is a module itself.

    >>> get, names = lazy_names("raffia", {"TensorDict": "raffia.tensordict"})
    >>> get("TensorDict").__name__, "TensorDict" in names()
    ('TensorDict', True)
    >>> get("TensorDic")
    Traceback (most recent call last):
        ...
    AttributeError: module 'raffia' has no attribute 'TensorDic'
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = import_module(homes[name])
        if homes[name] != f"{package}.{name}":
            found = getattr(found, name)
        vars(sys.modules[package])[name] = found  # found at once from now on
        return found

    return get, lambda: sorted({*vars(sys.modules[package]), *homes})
