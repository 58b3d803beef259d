"""Names of a package that are imported when first asked for: help and configs come quickly."""

from __future__ import annotations

import ast
import gc
import os
import site
import sys
import sysconfig
from collections.abc import Callable
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any


def lazy_names(
    package: str,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The `__getattr__`, `__dir__` and `__all__` of a package whose names are imported when used.

    Its file names each of them, and where it lies, once: in the imports below `if TYPE_CHECKING:`,
    which are read from there. Modules of the package itself are not among what `*` imports.

    >>> get, names, exported = lazy_names("raffia")
    >>> get("TensorDict").__name__, {"TensorDict", "nn"} <= set(names())
    ('TensorDict', True)
    >>> "TensorDict" in exported, "nn" in exported
    (True, False)
    >>> get("TensorDic")
    Traceback (most recent call last):
        ...
    AttributeError: module 'raffia' has no attribute 'TensorDic'
    """
    homes = imported_for_types(package)

    def get(name: str) -> object:
        if homes.get(name) == package:
            found = _module(f"{package}.{name}")
        elif name in homes:
            found = getattr(_module(homes[name]), name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        vars(sys.modules[package])[name] = found  # found without this function from now on
        return found

    exported = sorted(name for name, home in homes.items() if home != package)
    return get, lambda: sorted({*vars(sys.modules[package]), *homes}), exported


def _module(name: str) -> ModuleType:
    """Import a module, and what it imports, without collecting garbage meanwhile.

    Nearly all that is made there stays; to look through it again and again takes a sixth of the
    time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        if collects:
            gc.enable()


def imported_for_types(package: str) -> dict[str, str]:
    """The module of each name that a package imports for type checkers only.

    Where it imports `*`, these are the names that the module imports as themselves.

    >>> homes = imported_for_types("raffia")
    >>> homes["TensorDict"], homes["as_tensordict_module"]
    ('raffia.tensordict', 'raffia.nn')
    """
    homes: dict[str, str] = {}
    for node in _program(package):
        match node:
            case ast.If(test=ast.Name("TYPE_CHECKING"), body=lines):
                imports = [line for line in lines if isinstance(line, ast.ImportFrom)]
                homes |= {name.name: line.module or "" for line in imports for name in line.names}
    if (rest := homes.pop("*", None)) is None:
        return homes
    for node in _program(rest):
        match node:
            case ast.ImportFrom(module=home, names=names) if home != rest:
                homes |= {name.name: rest for name in names if name.asname == name.name}
    return homes


def _program(module: str) -> list[ast.stmt]:
    """The statements of a module, which is not imported."""
    spec = sys.modules[module].__spec__ if module in sys.modules else util.find_spec(module)
    source = spec.loader.get_source(module) if spec and spec.loader else None  # type: ignore[attr-defined]
    if source is None:
        raise ImportError(f"{module} is installed without its source, which names what it exports")
    return ast.parse(source).body


def public_names(package: str) -> list[str]:
    """The names that a package has so far, for the `__all__` at the end of its file: no modules.

    >>> {"TensorDictModule", "prototype"} & {*public_names("raffia.nn")}
    {'TensorDictModule'}
    """
    items = vars(sys.modules[package]).items()
    found = {k for k, v in items if k[0] != "_" and not isinstance(v, ModuleType)}
    return sorted(found - {"TYPE_CHECKING"})


def imported(reference: Any, *, here: bool = False) -> Any:
    """The object named by "module:name" or "path/file.py:name"; a non-string is returned unchanged.

    here: modules are looked for in the current folder, too.
    Raises ImportError or AttributeError if it is not there, OSError for a file that cannot be read.

    >>> imported("math:sqrt")(9.0), imported(len)([1, 2])
    (3.0, 2)
    """
    if not isinstance(reference, str):
        return reference
    home, _, name = reference.rpartition(":")
    if not home.endswith(".py"):
        if here and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return getattr(_module(home), name)
    path = Path(home).resolve()
    for known in (path.stem, f"{path.stem} of {path.parent}"):
        if getattr(sys.modules.get(known), "__file__", None) == str(path):
            return getattr(sys.modules[known], name)
    module = path.stem if path.stem not in sys.modules else f"{path.stem} of {path.parent}"
    spec = util.spec_from_file_location(module, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{home} is not a Python file")
    sys.modules[module] = found = util.module_from_spec(spec)  # dataclasses look for it there
    try:
        spec.loader.exec_module(found)
    except BaseException:
        del sys.modules[module]
        raise
    return getattr(found, name)


def named(reference: str, what: str) -> Any:
    """Import an object by the reference that the user gave, also from a file or a module of the
    current folder.

    The code of the object runs: only a reference that the user vouches for may be given.

    what: the kind of object, such as "a raffia.recipes.Algorithm"; for the error.
    Raises ImportError if it cannot be imported.

    >>> named("math:tau", "a number")
    6.283185307179586
    """
    try:
        return imported(reference, here=True)
    except (ImportError, AttributeError, OSError, SyntaxError) as error:
        raise ImportError(
            f"{reference} cannot be imported: {error}. It must be package.module:name or "
            f"path/file.py:name, and name {what}"
        ) from error


def absolute(reference: str) -> str:
    """The reference with the whole path of its file: other processes may run in another folder.

    >>> absolute("math:tau"), absolute("/a/b/../own.py:tau")
    ('math:tau', '/a/own.py:tau')
    """
    file, _, name = reference.rpartition(":")
    return f"{Path(file).resolve()}:{name}" if file.endswith(".py") else reference


def is_outside(reference: str) -> bool:
    """Whether it names a file of Python, or a module that no installed package has: one of the
    current folder, of a script's, or of another that a program has put on `sys.path`.

    Nothing is imported: what lies there may come from elsewhere.

    >>> is_outside("own.py:tau"), is_outside("not_there:tau")
    (True, True)
    >>> is_outside("math:tau"), is_outside("CartPole-v1")
    (False, False)
    """
    home = reference.rpartition(":")[0]
    if not home or home.endswith(".py"):
        return bool(home)
    top, folders = home.partition(".")[0], _installed_folders()
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    there = next(filter(None, (finder.find_spec(top, folders) for finder in finders)), None)
    try:
        found = util.find_spec(top)  # which an import gives
    except ValueError:  # __main__
        return True
    if there is None or found is None:
        return True
    places = [[*(spec.submodule_search_locations or ()), spec.origin] for spec in (there, found)]
    return places[0] != places[1]


def _installed_folders() -> list[str]:
    """The entries of `sys.path` that Python itself has, those of installed packages (.pth files
    name editable ones), and those of PYTHONPATH but the current folder."""
    sites = [*site.getsitepackages(), site.getusersitepackages()]
    files = [file for home in sites for file in Path(home).glob("*.pth")]
    lines = [(file, file.read_text("utf8", "replace").splitlines()) for file in files]
    known = {os.path.realpath(home) for home in sites}
    known |= {os.path.realpath(file.parent / line) for file, of in lines for line in of}
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    known |= {os.path.realpath(folder) for folder in given} - {os.path.realpath("")}
    python = Path(os.path.realpath(sysconfig.get_path("stdlib")))
    real = {entry: os.path.realpath(entry) for entry in sys.path}
    return [e for e in sys.path if real[e] in known or Path(real[e]).is_relative_to(python)]
