"""The API reference as web pages, one for each package: python scripts/api.py FOLDER

pdoc, which the extra `dev` installs, writes them from signatures and docstrings, and from the
comments at arguments and fields.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import io
import pkgutil
import re
import textwrap
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pdoc
import pdoc.render

# A line of a docstring that is about one or several arguments: "low, high: the bounds."
ARGUMENTS = re.compile(r"(?P<names>[a-z_]\w*(?:, [a-z_.]\w*)*): (?P<text>.*)")
# Packages of compiled loops and commands, and of names that raffia itself has.
LEFT_OUT = re.compile(r"raffia\.(cli|prototype|tensordict)|.*\.kernels")


def packages() -> list[str]:
    """The names of the packages whose public names programs use: raffia, and those below it.

    >>> "raffia.nn" in packages(), "raffia.data.readers" in packages(), "raffia.jit" in packages()
    (True, True, False)
    """
    top = importlib.import_module("raffia")
    found = [top.__name__]
    for _, name, is_package in pkgutil.walk_packages(top.__path__, f"{top.__name__}."):
        if is_package and not LEFT_OUT.fullmatch(name):
            found += [name] if getattr(importlib.import_module(name), "__all__", None) else []
    return found


def comments_at(source: str) -> dict[str, str]:
    """The comments at the arguments of a function, or at the fields of a class, by name.

    >>> comments_at("def f(\\n    x: int,  # [N]\\n    # in seconds\\n    y: float = 1.0,\\n): ...")
    {'x': '[N]', 'y': 'in seconds'}
    """
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    own, behind = dict[int, str](), dict[int, str]()  # by the number of the line
    for token in tokens:
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            (own if alone else behind)[token.start[0]] = token.string.lstrip("# ")
    found = {}
    for name, first, last in _places(ast.parse(source).body[0]):
        above = []
        while first - 1 in own:
            first -= 1
            above.insert(0, own[first])
        found[name] = " ".join([*above, *([behind[last]] if last in behind else [])])
    return {name: text for name, text in found.items() if text and "noqa" not in text}


def _places(node: ast.stmt) -> Iterator[tuple[str, int, int]]:
    """The name, the first and the last line of each argument or field."""
    if isinstance(node, ast.ClassDef):
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                yield field.target.id, field.lineno, field.end_lineno or field.lineno
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        given = node.args
        plain = [*given.posonlyargs, *given.args]
        defaults = [None] * (len(plain) - len(given.defaults)) + [*given.defaults]
        for arg, default in [
            *zip(plain, defaults, strict=True),
            *zip(given.kwonlyargs, given.kw_defaults, strict=True),
        ]:
            yield arg.arg, arg.lineno, (default or arg).end_lineno or arg.lineno
        for arg in [given.vararg, given.kwarg]:
            if arg is not None:
                yield arg.arg, arg.lineno, arg.end_lineno or arg.lineno


def add_comments(thing: Any) -> None:
    """Put the comments at a function's or class's arguments and fields into its docstring."""
    try:
        comments = comments_at(textwrap.dedent(inspect.getsource(thing)))
    except (OSError, SyntaxError, TypeError):  # made by a program, or not of Python
        return
    text = inspect.getdoc(thing) or ""
    lines = [f"{name}: {comment}" for name, comment in comments.items() if f"{name}:" not in text]
    if lines:
        first, _, rest = text.partition("\n\n")
        thing.__doc__ = "\n\n".join(part for part in (first, "\n".join(lines), rest) if part)


def with_lists(text: str) -> str:
    """A docstring as Markdown: arguments, of which each begins a line, become a list.

    >>> print(with_lists("The way.\\n\\nlow: the least.\\n    Not 0.\\nSource: a book."))
    The way.
    <BLANKLINE>
    - `low`: the least.
        Not 0.
    <BLANKLINE>
    Source: a book.
    """
    out: list[str] = []
    is_in_list = False
    for line in text.splitlines():
        found = ARGUMENTS.fullmatch(line)
        if found:
            if not is_in_list and out and out[-1]:
                out.append("")
            out.append(f"- `{found['names']}`: {found['text']}")
            is_in_list = True
            continue
        if is_in_list and line and not line.startswith(" "):
            out.append("")
            is_in_list = False
        is_in_list = is_in_list and bool(line)
        out.append(line)
    return "\n".join(out)


def main(words: Sequence[str] | None = None) -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args(words).folder
    pdoc.render.configure(docformat="markdown", show_source=False)
    to_markdown = pdoc.render.env.filters["to_markdown"]

    def filtered(context: object, docstring: str) -> str:
        return to_markdown(context, with_lists(docstring))

    # pdoc's filter takes the page, by this attribute of jinja's.
    filtered.jinja_pass_arg = to_markdown.jinja_pass_arg  # type: ignore[attr-defined]
    pdoc.render.env.filters["to_markdown"] = filtered
    warnings.simplefilter("ignore", UserWarning)  # of annotations that need no evaluation
    for name in packages():
        module = importlib.import_module(name)
        for thing in [getattr(module, public) for public in module.__all__]:
            methods = vars(thing).values() if inspect.isclass(thing) else ()
            for one in (thing, *methods):
                if inspect.isfunction(one) or inspect.isclass(one):
                    add_comments(one)
    pdoc.pdoc(*packages(), output_directory=folder)
    print(f"wrote {folder / 'index.html'}")


if __name__ == "__main__":
    main()
