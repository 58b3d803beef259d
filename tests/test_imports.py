"""What the source may import and call, read from its syntax trees: nothing here imports raffia."""

import ast
import functools
import re
import runpy
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "raffia"
STDLIB = {*sys.stdlib_module_names, "annotationlib"}  # the latter from Python 3.14 on
HOUSE = runpy.run_path(str(ROOT / "scripts" / "house.py"), run_name="house")

# "Who may import whom" of docs/ARCHITECTURE.md. A room may import itself and GROUND.
LAYER_0 = ["tensordict", "functional", "jit"]
LAYER_1 = ["learner", "nn", "data", "envs", "lm", "search"]
GROUND = ["_version", "environment", "files", "hints", "interrupts", "lazy"]
TABLE = {
    "_version": [],
    "environment": [],
    "files": [],
    "hints": [],
    "interrupts": [],
    "lazy": [],
    "draw": [],
    "__main__": ["cli"],
    "__init__": [  # for type checkers; at run time each when it is first used
        *(*LAYER_0, *LAYER_1, "algorithms", "base", "distributed", "evolution"),
        *("recipes", "report", "sweep", "train", "utils"),
    ],
    "tensordict": [],
    "functional": [],
    "jit": [],
    "learner": LAYER_0,
    "nn": [*LAYER_0, "draw"],
    "prototype": ["nn"],
    **dict.fromkeys(["base", "memmap", "tensorclass", "utils"], ["tensordict"]),
    "data": [*LAYER_0, "nn"],
    "envs": LAYER_0,
    "lm": [*LAYER_0, "nn", "data", "envs"],
    "search": [*LAYER_0, "draw", "nn", "data"],
    "algorithms": LAYER_0 + LAYER_1,
    "evolution": [*LAYER_0, "learner"],
    "distributed": [*LAYER_0, "learner"],
    "train": [*LAYER_0, *LAYER_1, "distributed"],
    "recipes": [*LAYER_0, *LAYER_1, "algorithms", "evolution", "distributed", "train"],
    "report": ["draw"],
    "sweep": [*LAYER_0, "distributed", "train", "recipes", "report"],
    "cli": ["recipes", "report", "sweep", "train.config", "envs"],
}

PICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {
    *("eval", "exec", "builtins.eval", "builtins.exec"),
    *("torch.load", "torch.save", "torch.serialization.load", "torch.serialization.save"),
    *("torch.hub.load", "torch.jit.load", "torch.package.PackageImporter"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all"),
    *("yaml.full_load", "yaml.full_load_all"),
}
FORBIDDEN_OPTIONS = {"allow_pickle": True, "weights_only": False}  # of numpy and torch
UNSAFE_WORDS = PICKLERS | {*FORBIDDEN_OPTIONS} | {n.rpartition(".")[2] for n in FORBIDDEN_CALLS}
UNSAFE = re.compile(rf"\b({'|'.join(sorted(UNSAFE_WORDS))})\b")  # files without need not be parsed
MODULE_OF = {  # project on PyPI -> what it is imported as, where the two differ
    "ale-py": "ale_py",
    "imageio-ffmpeg": "imageio_ffmpeg",
    "pillow": "PIL",
    "pyyaml": "yaml",
    "typing-extensions": "typing_extensions",
}
PEERS = {"tensordict", "torchrl", "lzero", "ding", "mctx", "jax", "agilerl"}


def source_files(source: Path) -> list[Path]:
    files = sorted(source.rglob("*.py"))
    assert files, f"no source under {source}"
    return files


@functools.lru_cache(maxsize=1)  # trees are large
def syntax(path: Path, text: str) -> ast.AST:
    return ast.parse(text, str(path))


@functools.cache
def imports(path: Path, source: Path) -> list[str]:
    """Absolute dotted names that a file imports, wherever in the file; `from a import b` is a.b."""
    return list(imported(syntax(path, path.read_text()), path, source))


def imported(tree: ast.AST, path: Path, source: Path) -> Iterator[str]:
    package = ["raffia", *path.relative_to(source).parent.parts]
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                base = package[: len(package) - node.level + 1] if node.level else []
                base = [*base, node.module] if node.module else base
                yield from (".".join([*base, alias.name]) for alias in node.names)
            case ast.Call(
                func=ast.Attribute(attr="import_module")
                | ast.Name(id="__import__" | "import_module")
            ):
                match node.args:
                    case [ast.Constant(value=str(name)), *_] if not name.startswith("."):
                        yield name
                    case _ if path != source / "lazy.py":  # whose users name what they import
                        where = f"{path}:{node.lineno}"
                        raise ValueError(f"{where}: name the imported module as a literal, in full")


def test_rooms_import_downward_only_and_use_no_private_member_of_another():
    assert layer_violations(SOURCE) == []
    assert HOUSE["cycles"](HOUSE["graph"](SOURCE)) == []
    assert HOUSE["private_uses"](SOURCE) == []


def test_only_declared_packages_are_imported_and_an_optional_one_in_one_file_of_a_room():
    (required, optional), found = declared(), foreign_packages(SOURCE)
    assert not found.keys() - required - optional, "add it to pyproject.toml, or do without"
    assert scattered(found, optional, SOURCE) == []
    assert not PEERS & (required | optional | found.keys())
    # The report reads files and draws without torch.
    assert not {room_of(path, SOURCE) for path in found["torch"]} & {"report", "draw"}


def inside(target: str, room: str) -> bool:
    return target == room or target.startswith(room + ".")


def layer_violations(source: Path) -> list[str]:
    found = []
    for path in source_files(source):
        parts = path.relative_to(source).with_suffix("").parts
        room = parts[0]
        if room not in TABLE:
            found.append(f"{path.name}: room {room!r} is not in the table")
            continue
        home = ".".join(parts[:2]) if room == "algorithms" else room
        for name in imports(path, source):
            if name == "raffia" or not name.startswith("raffia."):
                targets = [""] if name == "raffia" else []
            else:
                target = name.removeprefix("raffia.")
                first = target.partition(".")[0]
                targets = [target if first in TABLE else ""]  # "" is the front door
            for target in targets:
                if not any(
                    target and inside(target, allowed) for allowed in [home, *GROUND, *TABLE[room]]
                ):
                    found.append(f"{'/'.join(parts)}: {room} may not import raffia.{target}")
    return found


def foreign_packages(source: Path) -> dict[str, set[Path]]:
    """Third-party package -> files that import it."""
    found = defaultdict(set)
    for path in source_files(source):
        for name in imports(path, source):
            top = name.partition(".")[0]
            if top not in STDLIB and top != "raffia":
                found[top].add(path)
    return found


def unsafe_code(path: Path, source: Path) -> list[str]:
    if not UNSAFE.search(text := path.read_text()):
        return []
    nodes = list(ast.walk(syntax(path, text)))
    meaning = {}  # local name -> dotted name
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                meaning[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                meaning[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def dotted(node: ast.AST) -> str:
        match node:
            case ast.Name(id=name):
                return meaning.get(name, name)
            case ast.Attribute(value=value, attr=attr):
                return f"{dotted(value)}.{attr}"
        return "?"

    safe_calls = {id(node.func) for node in nodes if is_of_tensors_alone(node)}
    found = [f"imports {n}" for n in imports(path, source) if n.partition(".")[0] in PICKLERS]
    for node in nodes:
        match node:
            case ast.Name() | ast.Attribute() if dotted(node) in FORBIDDEN_CALLS:
                if dotted(node) == "torch.load" and id(node) in safe_calls:
                    continue
                found.append(f"line {node.lineno}: {dotted(node)}")
            case ast.keyword(arg=str(option), value=value) if option in FORBIDDEN_OPTIONS:
                safe = not FORBIDDEN_OPTIONS[option]
                if not (isinstance(value, ast.Constant) and value.value is safe):
                    found.append(f"line {value.lineno}: {option} other than {safe}")
    return found


def is_of_tensors_alone(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether a call says `weights_only=True`, by which torch runs no code of a file."""
    options = node.keywords if isinstance(node, ast.Call) else []
    return any(
        option.arg == "weights_only" and getattr(option.value, "value", None) is True
        for option in options
    )


def room_of(path: Path, source: Path) -> str:
    return path.relative_to(source).with_suffix("").parts[0]


def scattered(found: dict[str, set[Path]], optional: set[str], source: Path) -> list[str]:
    """Optional packages that several files of one room import, so that several must guard them."""
    files = defaultdict(set)
    for name in optional & found.keys():
        for path in found[name]:
            files[room_of(path, source), name].add(path.name)
    return [
        f"{room}: {', '.join(sorted(names))} import {package}"
        for (room, package), names in sorted(files.items())
        if len(names) > 1
    ]


def declared() -> tuple[set[str], set[str]]:
    """Modules of the projects that are needed, and of those that extras for users add."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def modules(requirements: list[str]) -> set[str]:
        names = {re.split(r"[\[;>=<~! ]", r)[0] for r in requirements}
        return {MODULE_OF.get(name, name) for name in names}

    extras = project["optional-dependencies"]
    for_us = ("dev", "bench", "bench-data", "all")
    optional = set().union(*(modules(extras[e]) for e in extras if e not in for_us))
    needed = modules(project["dependencies"])
    return needed, optional - needed  # box2d is an extra of gymnasium's, not a module of its own


def test_no_unsafe_code():
    found = {path: unsafe_code(path, SOURCE) for path in source_files(SOURCE)}
    assert {path: lines for path, lines in found.items() if lines} == {}


# Tests of the checks above: each must notice its violations.


def fake_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "raffia" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "raffia"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tensordict/tree.py", "from raffia.nn import module"),
        ("tensordict/tree.py", "from raffia import TensorDict"),
        ("tensordict/tree.py", "import raffia"),
        ("tensordict/tree.py", "def f():\n    from ..functional import losses"),
        ("functional/losses.py", "import raffia.tensordict.keys as k"),
        ("search/mcts.py", "from raffia import envs"),
        ("draw/scene.py", "from raffia.nn import module"),
        ("train/loop.py", "from raffia.draw import Scene"),
        ("nn/module.py", "import importlib\nimportlib.import_module('raffia.data')"),
        ("data/map.py", "from raffia.search.tree import Tree"),
        ("algorithms/ilql/loss.py", "from raffia.algorithms.efficientzero import loss"),
        ("algorithms/ilql/loss.py", "from .. import efficientzero"),
        ("evolution/generation.py", "from raffia.distributed import engine"),
        ("envs/gym.py", "from raffia.data.storage import TensorStorage"),
        ("learner.py", "from raffia.nn import TensorDictModule"),
        ("train/loop.py", "from raffia.evolution.population import Population"),
        ("train/loop.py", "from raffia.algorithms.efficientzero.learner import Key"),
        ("train/loop.py", "from raffia.recipes.efficientzero.config import EfficientZeroRun"),
        ("report/page.py", "from raffia.train.config import to_json"),
        ("recipes/efficientzero/experiment.py", "from raffia.report import write_report"),
        ("cli/__init__.py", "from raffia.train import loop"),
        ("cli/__init__.py", "from raffia.tensordict import TensorDict"),
        ("helpers/misc.py", "import os"),
    ],
)
def test_a_forbidden_import_is_noticed(tmp_path, name, text):
    assert layer_violations(fake_tree(tmp_path, {name: text})) != []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tensordict/tree.py", "from . import keys\nfrom .keys import nearest\nimport torch"),
        ("data/query.py", "from raffia.nn import TensorDictModule"),
        ("report/page.py", "from raffia.draw import Scene\nfrom raffia.draw.markup import el"),
        ("algorithms/ilql/loss.py", "from .model import Model\nfrom raffia.functional import loss"),
        ("train/collect.py", "from raffia.envs.env import BatchEnv\nfrom raffia import learner"),
        ("recipes/a/run.py", "from raffia.train import loop\nfrom raffia.algorithms import a"),
        ("cli/__init__.py", "from raffia.train.config import parse\nfrom raffia import recipes"),
        ("__init__.py", "from raffia.tensordict import TensorDict\nfrom raffia._version import v"),
    ],
)
def test_an_allowed_import_passes(tmp_path, name, text):
    assert layer_violations(fake_tree(tmp_path, {name: text})) == []


TYPED = "from typing import *\nif TYPE_CHECKING:\n    from .a import y"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"nn/a.py": "from raffia.nn import b", "nn/b.py": "import raffia.nn.a"}, ["a", "b"]),
        ({"nn/a.py": "def f():\n    from .b import x", "nn/b.py": "from . import a"}, ["a", "b"]),
        ({"nn/a.py": "from .b import x", "nn/b.py": "import torch"}, []),
        ({"nn/a.py": "from .b import x", "nn/b.py": TYPED}, ["a", "b"]),
    ],
)
def test_import_cycles_are_noticed(tmp_path, files, expected):
    source = fake_tree(tmp_path, {"__init__.py": "", "nn/__init__.py": "", **files})
    found = HOUSE["cycles"](HOUSE["graph"](source))
    assert [path.stem for part in found for path in part] == expected


def test_a_private_member_of_another_room_is_noticed(tmp_path):
    files = {
        "nn/a.py": "class A:\n    def _mine(self): ...\n    def f(self): self._mine()",
        "data/b.py": "def f(a):\n    return a._mine()",
        "data/c.py": "from raffia.nn.a import _mine",
        "data/d.py": "class D:\n    _own = 1\ndef g(d):\n    return d._own, d.__len__, d._theirs",
    }
    source = fake_tree(tmp_path, files)
    assert HOUSE["private_uses"](source) == ["data/b.py:2: _mine", "data/c.py:1: _mine"]


def test_lines_of_code_are_counted():
    text = '"""Doc."""\n\n# why\nx = """a\nb"""\ndef f():\n    """Doc.\n\n    More."""\n    pass\n'
    assert HOUSE["code_lines"](text) == 4


def test_a_foreign_package_is_found_and_our_own_room_of_that_name_is_not(tmp_path):
    files = {
        "nn/a.py": "def f():\n    import gymnasium.spaces",
        "nn/b.py": "from tensordict import TensorDict",
        "data/c.py": "from ..tensordict import TensorDict\nimport os",
    }
    found = foreign_packages(fake_tree(tmp_path, files))
    names = {top: [path.name for path in paths] for top, paths in found.items()}
    assert names == {"gymnasium": ["a.py"], "tensordict": ["b.py"]}
    computed = {"nn/module.py": "import importlib\nimportlib.import_module(name)"}
    with pytest.raises(ValueError, match="as a literal"):
        layer_violations(fake_tree(tmp_path, computed))


def test_an_optional_package_in_two_files_of_a_room_is_noticed(tmp_path):
    draws = "from matplotlib import pyplot"
    files = {"report/a.py": draws, "search/b.py": draws, "search/c.py": "import torch"}
    for more, expected in (
        ({}, []),
        ({"search/d.py": f"def f():\n    {draws}"}, ["search: b.py, d.py import matplotlib"]),
    ):
        source = fake_tree(tmp_path, files | more)
        assert scattered(foreign_packages(source), {"matplotlib"}, source) == expected


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=flag)",
        "import torch\nread = torch.load",
        "import torch as t\nt.save(x, path)",
        "from torch import load as read\nread(path)",
        "from torch.serialization import load\nload(path)",
        "eval('1 + 1')",
        "f = exec",
        "import builtins\nbuiltins.eval('1')",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "read(path, allow_pickle=flag)",
        "read(path, weights_only=False)",
        "import yaml\nyaml.load(text)",
        "from yaml import unsafe_load\nunsafe_load(text)",
    ],
)
def test_unsafe_code_is_noticed(tmp_path, text):
    source = fake_tree(tmp_path, {"nn/a.py": text})
    assert unsafe_code(source / "nn/a.py", source) != []


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "import torch\ntorch.compile(model)",
        "import torch\ntorch.load(path, weights_only=True)",
        "import numpy as np\nnp.load(path, allow_pickle=False)",
        "import yaml\nyaml.safe_load(text)",
        "def load(path): ...\nload(path)",
        "from safetensors.torch import save_file, load_file",
    ],
)
def test_safe_code_passes(tmp_path, text):
    source = fake_tree(tmp_path, {"nn/a.py": text})
    assert unsafe_code(source / "nn/a.py", source) == []
