"""The public face: __all__, examples in docstrings, the map in docs/ARCHITECTURE.md."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import raffia

ROOT = Path(__file__).parents[1]
PACKAGES = [
    "raffia",
    *(
        m.name
        for m in pkgutil.walk_packages(raffia.__path__, "raffia.")
        if m.ispkg and "._" not in m.name
    ),
]
WITHOUT_EXAMPLE: dict[str, str] = {}  # name -> why it has none


def face_faults(package: ModuleType) -> list[str]:
    names = getattr(package, "__all__", None)
    if names is None:
        return ["no __all__"]
    missing = [n for n in names if not hasattr(package, n)]
    home = package.__name__.partition(".")[0]
    leaked = [  # what other projects define is imported to be used, not to be shown
        n
        for n, value in vars(package).items()
        if not n.startswith("_")
        and n not in [*names, "TYPE_CHECKING"]
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", home).partition(".")[0] == home
    ]
    twice = sorted({n for n in names if names.count(n) > 1})
    return [
        *(f"{n} is in __all__ and does not exist" for n in missing),
        *(f"{n} is public and not in __all__" for n in leaked),
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
    """Where the marks in the map and the files disagree."""
    block = architecture.split("## The map", 1)[1].split("\n## ", 1)[0]
    lines = re.findall(r"^ {4}([+ ]) ( *)([\w.]+(?:/[\w.]+)*/?)(?= |$)", block, re.M)
    marked, unmarked, room = set(), set(), ""
    for mark, indent, name in lines:
        room = room if indent else name
        path = room + name if indent else name
        (marked if mark == "+" else unmarked).add(path)
    files = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if path.name != "__init__.py" and "__pycache__" not in path.parts
    }
    folders = {f"{p.name}/" for p in source.iterdir() if (p / "__init__.py").exists()}
    return [
        *(f"{p} is marked and does not exist" for p in sorted(marked - files - folders)),
        *(f"{p} exists and its line has no +" for p in sorted(unmarked & (files | folders))),
        *(
            f"{p} exists and is not in the map"
            for p in sorted((files | folders) - marked - unmarked)
        ),
    ]


@pytest.mark.parametrize("name", PACKAGES)
def test_all_is_complete(name):
    assert face_faults(importlib.import_module(name)) == []


@pytest.mark.parametrize("name", PACKAGES)
def test_public_names_have_an_example(name):
    assert without_example(importlib.import_module(name)) == []


def test_the_map_is_true():
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    assert map_faults(text, ROOT / "src" / "raffia") == []


def test_version_is_public():
    from raffia._version import __version__

    assert raffia.__version__ == __version__
    assert re.fullmatch(r"\d+\.\d+\.\d+\w*", __version__)


def test_faults_of_a_face_are_seen():
    package = ModuleType("package")
    assert face_faults(package) == ["no __all__"]

    def shown():
        """Does nothing."""

    package.__all__ = ["gone", "shown", "shown"]
    package.shown = shown
    package.leaked = 1
    package.Path = Path
    package._hidden = 2
    package.module = re
    assert face_faults(package) == [
        "gone is in __all__ and does not exist",
        "leaked is public and not in __all__",
        "shown is in __all__ twice",
    ]
    package.__all__ = ["shown"]
    assert without_example(package) == ["shown"]
    shown.__doc__ = ">>> 1 + 1\n2"
    assert without_example(package) == []


def test_an_untrue_map_is_seen(tmp_path):
    for name in [
        "room/__init__.py",
        "room/here.py",
        "room/unmarked.py",
        "room/unknown.py",
        "top.py",
    ]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    text = "\n".join(
        [
            "## The map",
            "    + top.py        one file",
            "    + room/         A ROOM",
            "    +   here.py       is here",
            "        unmarked.py   is here too",
            "    +   gone.py       is not",
            "        later.py      is not, and does not say so",
            "      later/        ANOTHER",
            "## Next",
        ]
    )
    assert map_faults(text, tmp_path) == [
        "room/gone.py is marked and does not exist",
        "room/unmarked.py exists and its line has no +",
        "room/unknown.py exists and is not in the map",
    ]
