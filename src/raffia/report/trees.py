"""A searched tree of a run: its picture, and a table of the root's actions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raffia.draw.markup import Html, clean_svg, el
from raffia.hints import plural
from raffia.report.episodes import natural
from raffia.report.folder import content, entries, read_json
from raffia.report.markup import table
from raffia.report.rows import number
from raffia.report.wording import count, figure

_MOST_ACTIONS = 12  # in the table
_LARGEST = 600_000  # bytes of a picture


@dataclass(frozen=True)
class TreeFiles:
    """The files of one tree, which are named after the environment step.

    >>> TreeFiles("1000", None, None).name
    '1000'
    """

    name: str
    svg: Path | None
    json: Path | None


def tree_files(run: Path) -> list[TreeFiles]:
    """All trees of a run, oldest first.

    >>> tree_files(Path("no such run"))
    []
    """
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(entries(run, "trees"), key=natural):
        if path.suffix in (".svg", ".json"):
            found.setdefault(path.stem, {})[path.suffix] = path
    return [TreeFiles(name, some.get(".svg"), some.get(".json")) for name, some in found.items()]


def shown(tree: TreeFiles, unit: str = "env steps") -> tuple[Html, list[str]]:
    """Picture and table of a tree, and what is wrong with its files; unit: what its name counts."""
    parts: list[Html] = []
    notes: list[str] = []
    if tree.svg is not None:
        try:
            drawing = content(tree.svg, _LARGEST).decode()
            parts.append(el("div.wide.tree", clean_svg(drawing)))
        except ValueError as error:  # UnicodeDecodeError is one
            notes.append(f"trees/{tree.svg.name} is not shown: {error}")
    if tree.json is not None:
        try:
            parts.append(_root_table(read_json(tree.json)))
        except ValueError as error:
            notes.append(f"trees/{tree.json.name} is not shown: {error}")
    at = f"after {count(float(tree.name))} {unit}" if tree.name.isdecimal() else tree.name
    return el("figure", el("figcaption", f"Searched {at}"), *parts), notes


def _root_table(data: Any) -> Html:
    edges = data.get("edges") if isinstance(data, dict) else None
    nodes = data.get("nodes") if isinstance(data, dict) else None
    if not isinstance(edges, list) or not isinstance(nodes, list):
        raise ValueError('it has no lists "nodes" and "edges"')
    first = [edge for edge in edges if isinstance(edge, dict) and edge.get("source") == 0]
    first.sort(key=lambda edge: -number(edge.get("visits")))
    rows = [
        [
            str(edge.get("name", edge.get("action", ""))),
            count(number(edge.get("visits"))),
            _bar(number(edge.get("share"))),
            figure(number(edge.get("q"))),
            _percent(number(edge.get("prior"))),
            figure(number(edge.get("reward"))),
        ]
        for edge in first[:_MOST_ACTIONS]
    ]
    caption = f"Actions at the root ({plural(len(nodes), 'node')} in the tree)"
    if len(first) > _MOST_ACTIONS:
        caption += f", the {_MOST_ACTIONS} most visited of {len(first):,}"
    heads = ["action", "visits", "share", "Q", "prior", "reward"]
    return table(heads, rows, numeric=[1, 3, 4, 5], caption=caption)


def _percent(fraction: float) -> str:
    return "–" if fraction != fraction else f"{100 * fraction:.0f} %"


def _bar(fraction: float) -> Html:
    width = 0.0 if fraction != fraction else min(max(fraction, 0.0), 1.0)
    return el("span.bar", el("i", style=f"width:{118 * width:.0f}px"), _percent(fraction))
