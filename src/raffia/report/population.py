"""The section about a population: fitness by member, lineage, hyper-parameters, what made the best.

Legend: P slots, each of which holds one member at a time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from raffia.draw.markup import Html, el, join
from raffia.draw.scene import Point, bent, path_data
from raffia.hints import plural
from raffia.report.figures import figure_of
from raffia.report.folder import Run
from raffia.report.groups import Groups, leading
from raffia.report.lineage import Lineage, LineageColumn, has_population, read_lineage
from raffia.report.markup import NONE, column_format, figure, legend_chip, table, toned
from raffia.report.panel import SERIES, Curve, Line, Panel

_MOST_SHOWN = 4  # runs
_MOST_POINTS = 3000  # of the lines of a panel
_MOST_DOTS = 300  # of a panel: each is an element of the page
_MOST_PANELS = 12  # hyper-parameters
_FEW = 12  # rows of a table that stand open
_MOST_ROWS = 200
_SAME = 1e-4  # relative: a change names a number with six digits
_OTHER = SERIES[-1]  # the tone of all lines of descent that have none of their own
_MOST_MEMBERS, _MOST_NODES = 128, 800  # of a lineage that is drawn
_WIDTH, _LEFT, _RIGHT, _ABOVE, _BELOW = 970, 66, 46, 10, 34  # of its drawing, in pixels

Value = Callable[[LineageColumn, int], float]


def populations(groups: Groups, notes: list[str]) -> Html:
    """The section about populations: of each configuration its best run."""
    found = [run for run in leading(groups) if has_population(run)][:_MOST_SHOWN]
    if not found:
        return Html("")
    several = sum(len(group.runs) for group in groups) > 1
    parts = [_of_run(run, f"population-{i}", several, notes) for i, run in enumerate(found)]
    return join([el("h2", "Population"), *parts])


def _of_run(run: Run, name: str, several: bool, notes: list[str]) -> Html:
    before = f"{run.name}: " if several else ""
    lineage, faults = read_lineage(run)
    notes += [f"{before}{fault}" for fault in faults]
    title = [el("h3", run.name)] if several else []
    if not any(column.fitness for column in lineage.columns):
        return join([*title, el("p.missing", "No evaluation of its members has been written yet.")])
    tones = _tones(lineage)
    panel = _fitness_panel(lineage, tones, "updates" if run.by_updates else "env steps")
    parts = [*title, el("p", _summary_text(run, lineage)), _legend(lineage, tones)]
    if not panel.empty:
        parts.append(figure_of(panel, f"{name}-fitness"))
    parts += [el("h3", f"{before}Lineage"), *_lineage_tree(lineage, tones)]
    panels, constant = _drift_panels(lineage, tones)
    names = [panel.title for panel in panels[:_MOST_PANELS]]
    parts += [el("h3", f"{before}Hyper-parameters"), *_drift(panels, constant, name)]
    parts += [el("h3", f"{before}The last generation"), _members(lineage, tones, names)]
    return join([*parts, el("h3", f"{before}History of the best member"), *_changes(lineage)])


# -- in words


def _summary_text(run: Run, lineage: Lineage) -> str:
    last, num = lineage.columns[-1], plural(lineage.size, "member")
    parts = [f"{num}, {plural(len(lineage.columns) - 1, 'generation')} after the first."]
    parts.append(
        "After each evaluation the better members continue, most of them with a change. Elsewhere "
        "on this page, an evaluation is that of the best member, training episodes are those of "
        "all members, and training rows are means over members."
    )
    if lineage.best is not None:
        best, first = last.members[lineage.best], last.founders[lineage.best]
        parts.append(
            f"The best is {_called(best)}, "
            + (
                "which was there from the start."
                if best == first
                else f"a descendant of {_called(first)}."
            )
        )
    lines = len(set(last.founders))
    if len(lineage.columns) > 1:
        parts.append(f"All living members descend from {lines} of the initial {lineage.size}.")
    fallen = sum(len(column.fallen) for column in lineage.columns)
    if fallen:
        parts.append(f"{plural(fallen, 'member')} diverged: numbers were no longer finite.")
    loops = run.setting("population", "eval_loop")
    if isinstance(loops, int) and loops > 1:
        parts.append(
            f"Members are selected by their fitness, the mean of the last {loops} evaluations; "
            "for the last generation it is the last evaluation alone."
        )
    return " ".join(parts)


def _legend(lineage: Lineage, tones: Mapping[int, str]) -> Html:
    """The legend: lines of descent that have a tone of their own."""
    last = lineage.columns[-1]
    best = last.founders[lineage.best] if lineage.best is not None else None
    own = [first for first, tone in tones.items() if tone != _OTHER]
    chips = []
    for first in own:
        label = f"from {_called(first)}" + (", with the best in bold" if first == best else "")
        chips.append(legend_chip("line", tones[first], label))
    if len(own) < len(tones):
        chips.append(legend_chip("line", _OTHER, f"from {plural(len(tones) - len(own), 'other')}"))
    return el("div.legend", *chips)


def _tones(lineage: Lineage) -> dict[int, str]:
    """Tones by founder: the best member's first, then those that have most descendants."""
    counts = Counter([one for column in lineage.columns for one in column.founders])
    best = None if lineage.best is None else lineage.columns[-1].founders[lineage.best]
    order = sorted(counts, key=lambda one: (one != best, -counts[one], one))
    free = len(SERIES) - (len(order) > len(SERIES))
    return {one: SERIES[i] if i < free else _OTHER for i, one in enumerate(order)}


# -- panels


def _fitness_panel(lineage: Lineage, tones: Mapping[int, str], label: str) -> Panel:
    """Fitness of each member over time; a new one's line begins at its parent.

    >>> column = LineageColumn(0, (0, 1), (None, None), (0, 1), fitness=(2.0, 3.0), at=10.0)
    >>> panel = _fitness_panel(Lineage(2, (column,)), {0: "c1", 1: "c0"}, "updates")
    >>> [(line.tone, line.curve.y) for line in panel.lines]
    [('c1', [2.0]), ('c0', [3.0]), ('c0', [3.0])]
    """
    shown = lineage.thinned(max(24, _MOST_POINTS // lineage.size))
    lines = _lines(shown, tones, lambda column, _: column.at, LineageColumn.fitness_of)
    return Panel("Fitness by member", label, "fitness", lines=tuple(lines), wide=True)


def _drift_panels(
    lineage: Lineage, tones: Mapping[int, str]
) -> tuple[list[Panel], dict[str, float]]:
    """Each hyper-parameter that ever differed, over generations; and those that did not.

    >>> hyper = {"a": (1.0, 20.0), "b": (5.0, 5.0)}
    >>> column = LineageColumn(0, (0, 1), (None, None), (0, 1), hyper=hyper)
    >>> panels, constant = _drift_panels(Lineage(2, (column,)), {0: "c1", 1: "c0"})
    >>> [(panel.title, panel.log) for panel in panels], constant
    ([('a', True)], {'b': 5.0})
    """
    shown = lineage.thinned(max(24, _MOST_POINTS // lineage.size))
    panels, constant = [], {}
    for name in dict.fromkeys([name for column in lineage.columns for name in column.hyper]):
        values = [one for column in lineage.columns for one in column.hyper.get(name, ())]
        values = [one for one in values if not math.isnan(one)]
        if not values:
            continue
        low, high = min(values), max(values)
        if high - low <= _SAME * max(abs(low), abs(high)):
            constant[name] = values[-1]
            continue

        def height(column: LineageColumn, slot: int, name: str = name) -> float:
            return column.hyper[name][slot] if name in column.hyper else math.nan

        lines = _lines(shown, tones, lambda column, _: float(column.number), height)
        log = low > 1e-30 and high > 10 * low
        panels.append(Panel(name, "generation", "value", lines=tuple(lines), log=log, whole_x=True))
    return panels, constant


def _lines(
    lineage: Lineage, tones: Mapping[int, str], across: Value, height: Value
) -> Iterator[Line]:
    """Faint lines, of each tone one with gaps for many members; and the best member's descent,
    strong."""
    columns, dots = lineage.columns, len(lineage.columns) * lineage.size <= _MOST_DOTS

    def points(cells: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
        found = [(across(columns[i], slot), height(columns[i], slot)) for i, slot in cells]
        return found if any(not math.isnan(x + y) for x, y in found) else []

    def tone_at(index: int, slot: int) -> str:
        return tones[columns[index].founders[slot]]

    of_tone: dict[str, list[tuple[float, float]]] = {}
    for life in lineage.lives():
        if found := points(life):
            of_tone.setdefault(tone_at(*life[-1]), []).extend([*found, (math.nan, math.nan)])
    for tone in sorted(of_tone, reverse=True):  # the best member's is c0: it lies above
        yield Line(_curve(of_tone[tone][:-1]), tone, width=1.0, opacity=0.5, dots=dots)
    if found := points(lineage.path):
        yield Line(_curve(found), tone_at(*lineage.path[-1]), width=2.8, dots=dots)


def _curve(points: Sequence[tuple[float, float]]) -> Curve:
    return Curve([x for x, _ in points], [y for _, y in points])


def _drift(panels: Sequence[Panel], constant: Mapping[str, float], name: str) -> list[Html]:
    if not panels and not constant:
        return [el("p.missing", "None has been logged.")]
    alone = len(panels) == 1  # in a grid it would be drawn twice as large
    shown = [replace(panel, wide=alone) for panel in panels[:_MOST_PANELS]]
    drawn = [figure_of(panel, f"{name}-{i}") for i, panel in enumerate(shown)]
    parts = drawn if alone else [el("div.panels", *drawn)] if drawn else []
    if len(panels) > _MOST_PANELS:
        others = ", ".join([panel.title for panel in panels[_MOST_PANELS:]])
        parts.append(el("p.faint", f"Not plotted, although they differ: {others}."))
    if constant:
        values = ", ".join([f"{key} {figure(value)}" for key, value in constant.items()])
        parts.append(el("p.faint", f"The same in all members at all times: {values}."))
    return parts


# -- tables


def _members(lineage: Lineage, tones: Mapping[int, str], names: Sequence[str]) -> Html:
    """The members of the last generation, with these hyper-parameters."""
    last = lineage.columns[-1]
    before = lineage.columns[-2] if len(lineage.columns) > 1 else None
    order = sorted(
        range(lineage.size),
        key=lambda p: (p != lineage.best, math.isnan(last.fitness_of(p)), -_or_0(last, p), p),
    )
    rows = []
    for slot in order[:_MOST_ROWS]:
        parent, newest = last.parents[slot], lineage.last_change(slot)
        known = before if parent is not None else None
        whom = str(known.members[parent]) if known and parent is not None else NONE
        theirs = _fitness_text(known, parent) if known and parent is not None else NONE
        row = [
            toned(
                tones[last.founders[slot]],
                str(last.members[slot]) + (" (best)" if slot == lineage.best else ""),
            ),
            _fitness_text(last, slot),
            whom if whom != str(last.members[slot]) else "itself",
            theirs,
            f"{newest[1]} (generation {newest[0]:,})" if newest else "none",
        ]
        row += [figure(last.hyper[n][slot]) if n in last.hyper else NONE for n in names]
        rows.append(row)
    heads = ["member", "fitness", "from", "its fitness", "latest change in its line", *names]
    parts = [table(heads, rows[:_FEW], numeric := [1, 3, *range(5, len(heads))])]
    if not last.fitness:
        text = "They have not been evaluated since selection: the best is the heir of the best."
        parts.append(el("p.faint", text))
    if len(rows) > _FEW:
        parts.append(_more(heads, rows[_FEW:], numeric, lineage.size - _FEW, "members"))
    return join(parts)


def _or_0(column: LineageColumn, slot: int) -> float:
    fitness = column.fitness_of(slot)
    return 0.0 if math.isnan(fitness) else fitness


def _changes(lineage: Lineage) -> list[Html]:
    """The changes in the best member's descent, the newest above."""
    way = lineage.path
    if not way:
        return [el("p.missing", "No fitness is known.")]
    rows = []
    for index, slot in reversed(way):
        column = lineage.columns[index]
        for generation, what in reversed(column.changes[slot] if column.changes else ()):
            rows.append([f"{generation:,}", str(column.members[slot]), what])
    start = lineage.columns[way[0][0]]
    first = _called(start.members[way[0][1]])
    if not rows:
        return [el("p", f"No change was made: it began as {first} and has only learnt since.")]
    text = f"From {first} to the best, newest first: {plural(len(rows), 'change')}."
    heads = ["generation", "member", "what changed"]
    parts = [el("p.faint", text), table(heads, rows[:_FEW], [0, 1])]
    if len(rows) > _FEW:
        parts.append(_more(heads, rows[_FEW:_MOST_ROWS], [0, 1], len(rows) - _FEW, "changes"))
    return parts


def _more(
    heads: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int], num: int, of: str
) -> Html:
    shown = "" if len(rows) == num else f", of which {len(rows)} are shown"
    return el("details", el("summary", f"{num:,} more {of}{shown}"), table(heads, rows, numeric))


# -- the drawing of a lineage: generations from left to right, a row for each slot


def _called(member: int) -> str:
    """The name of a member.

    >>> _called(4), _called(-1)
    ('member 4', 'a member that no row mentions')
    """
    return f"member {member}" if member >= 0 else "a member that no row mentions"


def _fitness_text(column: LineageColumn, slot: int) -> str:
    """The fitness of the member at a slot, in words.

    >>> _fitness_text(LineageColumn(0, (4,), (None,), (4,), fitness=(1.5,)), 0)
    '1.50'
    """
    if slot in column.fallen:
        return "diverged"
    return column_format([10.0])(column.fitness_of(slot))


def _lineage_tree(lineage: Lineage, tones: Mapping[int, str]) -> list[Html]:
    """The drawing of a lineage, and above it a text that explains it.

    tones: by founder.

    >>> column = LineageColumn(0, (4, 7), (None, None), (4, 7))
    >>> text, svg = _lineage_tree(Lineage(2, (column,)), {4: "c0", 7: "c1"})
    >>> svg.count("<circle"), "<title>member 7, generation 0" in svg
    (2, True)
    """
    if lineage.size > _MOST_MEMBERS:
        text = f"The tree of {lineage.size:,} members is not drawn: the limit is {_MOST_MEMBERS}."
        return [el("p.missing", text)]
    shown = lineage.thinned(max(8, min(64, _MOST_NODES // lineage.size)))
    text = (
        "Generations run from left to right, with a row for each slot; a line leads to the parent "
        "of a member. A ring marks the best of an evaluation that continues unchanged, a cross a "
        "member that diverged. Hover over a member for its figures and changes."
    )
    if len(shown.columns) < len(lineage.columns):
        text += (
            f" {len(shown.columns)} of the {len(lineage.columns):,} generations are drawn, evenly "
            "spaced: lines span the ones between and show all their changes, but rings are "
            "missing there."
        )
    return [el("p.faint", text), _Drawing(shown, tones).svg()]


class _Drawing:
    """A lineage, drawn."""

    def __init__(self, lineage: Lineage, tones: Mapping[int, str]) -> None:
        self.lineage, self.columns, self.tones = lineage, lineage.columns, tones
        self.step = min(30.0, max(7.0, 480 / lineage.size))
        self.across = (_WIDTH - _LEFT - _RIGHT) / max(len(self.columns) - 1, 5)
        self.bottom = _ABOVE + self.step * lineage.size
        self.radius = min(4.2, self.step * 0.3, self.across * 0.3)

    def svg(self) -> Html:
        """The drawing: lines, the best member's descent, members, labels."""
        return el(
            "svg.figure",
            *(*self._lines(), *self._nodes(), *self._names()),
            viewBox=f"0 0 {_WIDTH} {self.bottom + _BELOW:.0f}",
            role="img",
            aria_label="Lineage",
            font_size="10.5",
        )

    def _at(self, index: int, slot: int) -> Point:
        return _LEFT + self.across * index, _ABOVE + self.step * (slot + 0.5)

    def _tone(self, index: int, slot: int) -> str:
        return self.tones[self.columns[index].founders[slot]]

    def _bent(self, start: tuple[int, int], end: tuple[int, int]) -> str:
        first, last = self._at(*start), self._at(*end)
        is_flat = first[1] == last[1]
        return path_data([("M", (first,)), ("L", (last,)) if is_flat else bent(first, last)])

    def _lines(self) -> Iterator[Html]:
        faint: dict[str, list[str]] = {}
        for index, column in enumerate(self.columns):
            for slot, parent in enumerate(column.parents):
                if parent is not None:
                    line = self._bent((index - 1, parent), (index, slot))
                    faint.setdefault(self._tone(index, slot), []).append(line)
        for tone, lines in sorted(faint.items(), reverse=True):
            style = f"stroke:var(--{tone})"
            yield el("path", d="".join(lines), fill="none", opacity=".5", style=style)
        way = self.lineage.path
        if len(way) > 1:
            strong = [self._bent(a, b) for a, b in pairwise(way)]
            style = f"stroke:var(--{self._tone(*way[-1])});stroke-width:3.2px;stroke-linecap:round"
            yield el("path", d="".join(strong), fill="none", style=style)

    def _nodes(self) -> Iterator[Html]:
        on_way, nodes = set(self.lineage.path), dict[str, list[Html]]()
        for index in range(len(self.columns)):
            for slot in range(self.lineage.size):
                mark = self._node(index, slot, (index, slot) in on_way)
                nodes.setdefault(self._tone(index, slot), []).append(mark)
        for tone, marks in sorted(nodes.items(), reverse=True):
            yield el("g", *marks, style=f"color:var(--{tone});fill:currentColor")

    def _node(self, index: int, slot: int, strong: bool) -> Html:
        column, (x, y), radius = self.columns[index], self._at(index, slot), self.radius
        title = el("title", self._text(index, slot))
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

    def _text(self, index: int, slot: int) -> str:
        """The figures and changes of a member, for its tooltip."""
        column = self.columns[index]
        parts = [f"{_called(column.members[slot])}, generation {column.number}"]
        parts.append(f"fitness {_fitness_text(column, slot)}")
        parent = column.parents[slot]
        if parent is not None:
            before = self.columns[index - 1].members[parent]
            same = before == column.members[slot]
            parts.append("unchanged" if same else f"from {_called(before)}")
        changes = [what for _, what in column.changes[slot]] if column.changes else []
        shown = [f"{len(changes) - 2} changes", *changes[-2:]] if len(changes) > 3 else changes
        return "; ".join([*parts, *shown])

    def _names(self) -> Iterator[Html]:
        """Labels: members at either end, generations below."""
        newest, grey = len(self.columns) - 1, "fill:var(--muted)"
        if self.step >= 10:
            ends = [(0, "end", -9), (newest, "start", 9)]
            for index, anchor, by in ends if newest else ends[:1]:
                for slot, member in enumerate(self.columns[index].members):
                    x, y = self._at(index, slot)
                    best = index == newest and slot == self.lineage.best
                    style = "fill:var(--ink);font-weight:650" if best else grey
                    text = str(member) if member >= 0 else "?"
                    where = {"x": f"{x + by:.1f}", "y": f"{y + 3.6:.1f}"}
                    yield el("text", text, text_anchor=anchor, style=style, **where)
        labels = [
            (self._at(index, 0)[0], 12, f"{self.columns[index].number:,}")
            for index in range(0, len(self.columns), max(1, math.ceil(34 / self.across)))
        ]
        labels.append((_LEFT + self.across * newest / 2, 28, "generation"))
        for x, below, text in labels:
            where = {"x": f"{x:.1f}", "y": f"{self.bottom + below:.1f}"}
            yield el("text", text, text_anchor="middle", style=grey, **where)
