"""The API reference as web pages, one for each package: python scripts/api.py FOLDER

pdoc, which the extra `dev` installs, writes them from signatures and docstrings.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

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
    pdoc.pdoc(*packages(), output_directory=folder)
    print(f"wrote {folder / 'index.html'}")


if __name__ == "__main__":
    main()
