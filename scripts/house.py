"""Figures of the source: python scripts/house.py [ROOT]

Code lines of each room (no docstrings, comments, blank lines), cycles between files (imports within
functions counted), and private members that a room uses of another one.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

# Members of named tuples, of torch and of its modules, and of multiprocessing's shared memory: no
# room's, though one may have a member of the same name.
PUBLIC = {"_replace", "_fields", "_asdict", "_parameters", "_buffers", "_modules"}
PUBLIC |= {"_forward_pre_hooks", "_version", "_base", "_fd"}
NAMING = (ast.FunctionDef, ast.ClassDef, ast.Attribute, ast.Name, ast.Constant, ast.ImportFrom)
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def source_files(source: Path) -> dict[str, Path]:
    """The files of a package by the names that they are imported by."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = [source.name, *path.relative_to(source).with_suffix("").parts]
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def room_of(path: Path, source: Path) -> str:
    """The first part of a file's path within the package."""
    return path.relative_to(source).with_suffix("").parts[0]


def code_lines(text: str) -> int:
    """Lines that hold code: no docstring, no comment, not blank."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        holds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, holds) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def graph(source: Path) -> dict[Path, set[Path]]:
    """Which files each file imports, wherever in it, for type checkers too."""
    files = source_files(source)
    found = {}
    for path in files.values():
        tree = ast.parse(path.read_text())
        found[path] = {files[name] for name in _imported(tree, path, source, files)} - {path}
    return found


def _imported(tree: ast.AST, path: Path, source: Path, files: dict[str, Path]) -> Iterator[str]:
    package = [source.name, *path.relative_to(source).parent.parts]
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            home = ".".join([*base, node.module] if node.module else base)
            for alias in node.names:
                for name in (f"{home}.{alias.name}", home):
                    if name in files:
                        yield name
                        break


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements, without a look into their expressions, which are most nodes of a tree."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, name, ()):
            yield node
            yield from _statements(node)


def cycles(imports: dict[Path, set[Path]]) -> list[list[Path]]:
    """Files that import each other, by whatever detour (Tarjan 1972)."""
    index: dict[Path, int] = {}
    low: dict[Path, int] = {}
    stack: list[Path] = []
    found = []

    def visit(path: Path) -> None:
        index[path] = low[path] = len(index)
        stack.append(path)
        for other in sorted(imports.get(path, ())):
            if other not in index:
                visit(other)
                low[path] = min(low[path], low[other])
            elif other in stack:
                low[path] = min(low[path], index[other])
        if low[path] == index[path]:
            at = stack.index(path)
            part = stack[at:]
            del stack[at:]
            if len(part) > 1:
                found.append(sorted(part))

    sys.setrecursionlimit(10_000)
    for path in imports:
        if path not in index:
            visit(path)
    return sorted(found, key=len, reverse=True)


def private_uses(source: Path) -> list[str]:
    """Members with a leading underscore that a room uses and does not define: another room's."""
    uses, defined = [], defaultdict(set)
    for path in source_files(source).values():
        room = room_of(path, source)
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, NAMING):  # asked first, since a match is slow
                continue
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    defined[room].add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                    defined[room].add(name)
                case ast.Constant(value=str(name)):  # __slots__, setattr, fields of a tuple
                    defined[room].add(name)
                case ast.Attribute(attr=name, value=value):
                    if not (isinstance(value, ast.Name) and value.id in ("self", "cls")):
                        uses.append((path, node.lineno, name))
                case ast.ImportFrom(module=str(home), names=names) if home.startswith("raffia"):
                    for alias in names:
                        own = home.split(".")[1:2] == [room]
                        if not own and alias.name not in ("_version", "_C"):
                            uses.append((path, node.lineno, alias.name))
    return [
        f"{path.relative_to(source)}:{line}: {name}"
        for path, line, name in uses
        if name.startswith("_")
        and not name.endswith("__")
        and name not in PUBLIC
        and name not in defined[room_of(path, source)]
        and any(name in names for names in defined.values())
    ]


def main() -> None:
    """Print all figures."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1])
    source = root / "src" / "raffia"
    rooms: Counter[str] = Counter()
    for path in source_files(source).values():
        rooms[room_of(path, source)] += code_lines(path.read_text())
    print(f"code lines: {rooms.total():,} in {len(source_files(source))} files")
    for room, count in rooms.most_common():
        print(f"  {count:>7,}  {room}")
    print("cycles between files:")
    for part in cycles(graph(source)):
        names = ", ".join(str(path.relative_to(source)) for path in part[:4])
        print(f"  {len(part)}: {names}{' ...' if len(part) > 4 else ''}")
    private: Counter[str] = Counter(use.split("/")[0] for use in private_uses(source))
    print("private members of other rooms used:")
    for room, count in private.most_common():
        print(f"  {count:>7,}  {room}")


if __name__ == "__main__":
    main()
