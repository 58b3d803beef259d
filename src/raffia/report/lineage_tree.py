"""The drawing of a lineage: generations from left to right, a row for each slot."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from raffia.draw.markup import Html, el
from raffia.draw.scene import Point, bent, path_data
from raffia.report.lineage import Lineage, LineageColumn
from raffia.report.markup import column_format

_MOST_MEMBERS, _MOST_NODES = 128, 800
_WIDTH, _LEFT, _RIGHT, _ABOVE, _BELOW = 970, 66, 46, 10, 34  # in pixels


def called(member: int) -> str:
    """The name of a member.

    >>> called(4), called(-1)
    ('member 4', 'a member that no row names')
    """
    return f"member {member}" if member >= 0 else "a member that no row names"


def fitness_text(column: LineageColumn, slot: int) -> str:
    """The fitness of the member at a slot, in words.

    >>> fitness_text(LineageColumn(0, (4,), (None,), (4,), fitness=(1.5,)), 0)
    '1.50'
    """
    if slot in column.fallen:
        return "diverged"
    return column_format([10.0])(column.fitness_of(slot))


def lineage_tree(lineage: Lineage, tones: Mapping[int, str]) -> list[Html]:
    """The drawing of a lineage, and above it a text that explains it.

    tones: by founder.

    >>> column = LineageColumn(0, (4, 7), (None, None), (4, 7))
    >>> text, svg = lineage_tree(Lineage(2, (column,)), {4: "c0", 7: "c1"})
    >>> svg.count("<circle"), "<title>member 7, generation 0" in svg
    (2, True)
    """
    if lineage.size > _MOST_MEMBERS:
        text = f"The tree of {lineage.size:,} members is not drawn: {_MOST_MEMBERS} at the most."
        return [el("p.missing", text)]
    shown = lineage.thinned(max(8, min(64, _MOST_NODES // lineage.size)))
    text = (
        "Generations from left to right, a row for each slot; a line leads to the parent of a "
        "member. A ring is the best of an evaluation that continues unchanged, a cross a member "
        "that diverged. A member's figures and changes are shown where the pointer rests."
    )
    if len(shown.columns) < len(lineage.columns):
        text += (
            f" {len(shown.columns)} of the {len(lineage.columns):,} generations are drawn, evenly "
            "spread: lines span those between, and show all their changes; rings "
            "are missing there."
        )
    return [el("p.faint", text), _drawn(shown, tones)]


def _drawn(lineage: Lineage, tones: Mapping[int, str]) -> Html:
    columns, size = lineage.columns, lineage.size
    step = min(30.0, max(7.0, 480 / size))
    across = (_WIDTH - _LEFT - _RIGHT) / max(len(columns) - 1, 5)
    bottom = _ABOVE + step * size

    def at(index: int, slot: int) -> Point:
        return _LEFT + across * index, _ABOVE + step * (slot + 0.5)

    way = lineage.path
    on_way = set(way)
    faint: dict[str, list[str]] = {}
    for index, column in enumerate(columns):
        for slot, parent in enumerate(column.parents):
            if parent is not None:
                tone = tones[column.founders[slot]]
                faint.setdefault(tone, []).append(_bent(at(index - 1, parent), at(index, slot)))
    parts = [
        el("path", d="".join(ways), fill="none", opacity=".5", style=f"stroke:var(--{tone})")
        for tone, ways in sorted(faint.items(), reverse=True)
    ]
    if len(way) > 1:
        strong = [_bent(at(*a), at(*b)) for a, b in zip(way, way[1:], strict=False)]
        tone = tones[columns[-1].founders[way[-1][1]]]
        style = f"stroke:var(--{tone});stroke-width:3.2px;stroke-linecap:round"
        parts.append(el("path", d="".join(strong), fill="none", style=style))
    radius = min(4.2, step * 0.3, across * 0.3)
    nodes: dict[str, list[Html]] = {}
    for index, column in enumerate(columns):
        for slot in range(size):
            mark = _node(lineage, index, slot, at(index, slot), radius, (index, slot) in on_way)
            nodes.setdefault(tones[column.founders[slot]], []).append(mark)
    for tone, marks in sorted(nodes.items(), reverse=True):
        parts.append(el("g", *marks, style=f"color:var(--{tone});fill:currentColor"))
    parts += _names(lineage, at, step, across, bottom)
    return el(
        "svg.figure",
        *parts,
        viewBox=f"0 0 {_WIDTH} {bottom + _BELOW:.0f}",
        role="img",
        aria_label="Who comes from whom",
        font_size="10.5",
    )


def _bent(start: Point, end: Point) -> str:
    return path_data([("M", (start,)), bent(start, end) if start[1] != end[1] else ("L", (end,))])


def _node(lineage: Lineage, index: int, slot: int, at: Point, radius: float, strong: bool) -> Html:
    column, (x, y) = lineage.columns[index], at
    title = el("title", _of_node(lineage, index, slot))
    if slot in column.fallen:
        r = radius * 1.1
        far = f"{2 * r:.1f}"
        d = f"M{x - r:.1f} {y - r:.1f}l{far} {far}m0 -{far}l-{far} {far}"
        return el("path", title, d=d, style="stroke:currentColor;stroke-width:2px")
    where = {"cx": f"{x:.1f}", "cy": f"{y:.1f}"}
    if slot == column.elite:
        width = min(2.4, radius * 0.7)
        style = f"fill:var(--paper);stroke:currentColor;stroke-width:{width:.1f}px"
        return el("circle", title, r=f"{radius * 1.2:.1f}", style=style, **where)
    return el("circle", title, r=f"{radius if strong else radius * 0.75:.1f}", **where)


def _of_node(lineage: Lineage, index: int, slot: int) -> str:
    column = lineage.columns[index]
    parts = [f"{called(column.members[slot])}, generation {column.number}"]
    parts.append(f"fitness {fitness_text(column, slot)}")
    parent = column.parents[slot]
    if parent is not None:
        before = lineage.columns[index - 1].members[parent]
        same = before == column.members[slot]
        parts.append("unchanged" if same else f"from {called(before)}")
    changes = [what for _, what in column.changes[slot]] if column.changes else []
    shown = [f"{len(changes) - 2} changes", *changes[-2:]] if len(changes) > 3 else changes
    return "; ".join([*parts, *shown])


def _names(
    lineage: Lineage,
    at: Callable[[int, int], Point],
    step: float,
    across: float,
    bottom: float,
) -> Iterator[Html]:
    """Labels: members at either end, generations below."""
    columns, grey = lineage.columns, "fill:var(--muted)"
    if step >= 10:
        ends = [(0, "end", -9)] + ([(len(columns) - 1, "start", 9)] if len(columns) > 1 else [])
        for index, anchor, by in ends:
            for slot, member in enumerate(columns[index].members):
                x, y = at(index, slot)
                best = index == len(columns) - 1 and slot == lineage.best
                style = "fill:var(--ink);font-weight:650" if best else grey
                text = str(member) if member >= 0 else "?"
                where = {"x": f"{x + by:.1f}", "y": f"{y + 3.6:.1f}"}
                yield el("text", text, text_anchor=anchor, style=style, **where)
    every = max(1, math.ceil(34 / across))
    for index in range(0, len(columns), every):
        x, _ = at(index, 0)
        where = {"x": f"{x:.1f}", "y": f"{bottom + 12:.1f}"}
        text = f"{columns[index].number:,}"
        yield el("text", text, text_anchor="middle", style=grey, **where)
    where = {"x": f"{_LEFT + across * (len(columns) - 1) / 2:.1f}", "y": f"{bottom + 28:.1f}"}
    yield el("text", "generation", text_anchor="middle", style=grey, **where)
