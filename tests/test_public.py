"""The public API: __all__, examples in docstrings, the map in docs/ARCHITECTURE.md."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import raffia

ROOT = Path(__file__).parents[1]
MODULES = pkgutil.walk_packages(raffia.__path__, "raffia.")
PACKAGES = ["raffia", *[m.name for m in MODULES if m.ispkg and "._" not in m.name]]
WITHOUT_EXAMPLE: dict[str, str] = {}  # name -> why it has none


def api_faults(package: ModuleType) -> list[str]:
    names = getattr(package, "__all__", None)
    if names is None:
        return ["no __all__"]
    missing = [n for n in names if not hasattr(package, n)]
    home = package.__name__.partition(".")[0]
    leaked = [  # names of other projects are imported for use, not for export
        n
        for n, value in vars(package).items()
        if not n.startswith("_")
        and n not in [*names, "TYPE_CHECKING"]
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", home).partition(".")[0] == home
    ]
    ours = (home, "types", "builtins", "typing")  # aliases of types are of the latter three
    foreign = [
        n
        for n in names
        if n == "TYPE_CHECKING"
        or getattr(getattr(package, n, None), "__module__", home).partition(".")[0] not in ours
    ]
    twice = sorted({n for n in names if names.count(n) > 1})
    return [
        *(f"{n} is in __all__ and does not exist" for n in missing),
        *(f"{n} is public and not in __all__" for n in leaked),
        *(f"{n} is in __all__ and of another project" for n in foreign),
        *(f"{n} is in __all__ twice" for n in twice),
    ]


def without_example(package: ModuleType) -> list[str]:
    return [
        name
        for name in package.__all__
        if (inspect.isclass(value := getattr(package, name)) or inspect.isroutine(value))
        and ">>> " not in (value.__doc__ or "")
        and name not in WITHOUT_EXAMPLE
    ]


def map_faults(architecture: str, source: Path) -> list[str]:
    """Where the list of rooms and the source tree disagree."""
    block = architecture.split("## The rooms", 1)[1].split("\n## ", 1)[0]
    lines = re.findall(r"^ {4}((?:\S+ )+)", block, re.M)
    named = [name for line in lines for name in line.split()]
    folders = {f"{p.name}/" for p in source.iterdir() if (p / "__init__.py").exists()}
    rooms = folders | {p.name for p in source.glob("*.py") if p.name != "__init__.py"}
    return [
        *(f"{name} is listed and does not exist" for name in sorted(set(named) - rooms)),
        *(f"{name} is listed twice" for name in sorted(rooms) if named.count(name) > 1),
        *(f"{name} exists and is not listed" for name in sorted(rooms - set(named))),
    ]


@pytest.mark.parametrize("name", PACKAGES)
def test_all_is_complete_and_has_examples(name):
    package = importlib.import_module(name)
    assert api_faults(package) == [] == without_example(package)


def test_the_map_is_correct():
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    assert map_faults(text, ROOT / "src" / "raffia") == []


def test_version_is_public():
    from raffia._version import __version__

    assert raffia.__version__ == __version__
    assert re.fullmatch(r"\d+\.\d+\.\d+\w*", __version__)


def test_faults_of_an_api_are_noticed():
    package = ModuleType("package")
    assert api_faults(package) == ["no __all__"]

    def shown():
        """Does nothing."""

    package.__all__ = ["gone", "shown", "shown"]
    package.shown, shown.__module__ = shown, "package"
    package.leaked = 1
    package.Path = Path
    package._hidden = 2
    package.module = re
    assert api_faults(package) == [
        "gone is in __all__ and does not exist",
        "leaked is public and not in __all__",
        "shown is in __all__ twice",
    ]
    package.__all__ = ["shown", "leaked", "Path"]
    assert api_faults(package) == ["Path is in __all__ and of another project"]
    package.__all__ = ["shown"]
    assert without_example(package) == ["shown"]
    shown.__doc__ = ">>> 1 + 1\n2"
    assert without_example(package) == []


def test_a_wrong_map_is_noticed(tmp_path):
    for name in ["room/__init__.py", "unknown/__init__.py", "top.py", "other.py"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    lines = ["top.py other.py    two files", "room/              A ROOM: with words"]
    lines += ["top.py             again", "gone/              is not"]
    block = "\n".join([f"    {line}" for line in lines])
    text = f"## The rooms\n{block}\n## Next\n    unknown/           elsewhere"
    assert map_faults(text, tmp_path) == [
        "gone/ is listed and does not exist",
        "top.py is listed twice",
        "unknown/ exists and is not listed",
    ]
