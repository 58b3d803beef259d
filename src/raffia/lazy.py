"""Names of a package that are imported when first asked for: help and configs come at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module, util
from pathlib import Path
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


def imported(reference: Any, *, here: bool = False) -> Any:
    """What "module:name" or "path/file.py:name" names; anything but a text is given back.

    here: modules are looked for in the current folder, too.
    Raises ImportError or AttributeError if it is not there, OSError for a file that can't be read.

    >>> imported("math:sqrt")(9.0), imported(len)([1, 2])
    (3.0, 2)
    """
    if not isinstance(reference, str):
        return reference
    home, _, name = reference.rpartition(":")
    if not home.endswith(".py"):
        if here and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return getattr(import_module(home), name)
    path = Path(home).resolve()
    for known in (path.stem, f"{path.stem} of {path.parent}"):
        if getattr(sys.modules.get(known), "__file__", None) == str(path):
            return getattr(sys.modules[known], name)
    module = path.stem if path.stem not in sys.modules else f"{path.stem} of {path.parent}"
    spec = util.spec_from_file_location(module, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{home} is no file of Python")
    sys.modules[module] = found = util.module_from_spec(spec)  # dataclasses look for it there
    try:
        spec.loader.exec_module(found)
    except BaseException:
        del sys.modules[module]
        raise
    return getattr(found, name)
