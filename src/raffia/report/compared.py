"""The section of a page that compares methods, decodings, and the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from raffia.draw.markup import Html, el, join
from raffia.hints import plural
from raffia.report.episodes import read_evaluations
from raffia.report.evaluated import decodings_of
from raffia.report.folder import Run
from raffia.report.groups import Group
from raffia.report.markup import table, toned
from raffia.report.methods import MethodRow, method_of, over, tables
from raffia.report.panel import tone
from raffia.report.wording import NONE, column_format, count, decoding_label, figure

_WIDTH = 170  # pixels of the drawn interval


def methods(groups: Sequence[Group], notes: list[str]) -> Html:
    """Methods, decodings and data in a table; nothing of runs that compare none."""
    found = tables(groups)
    held_out = _held_out(groups)
    if not found and not held_out:
        return Html("")
    parts = [el("h2", "Methods")]
    for name, rows in found:
        if len(found) > 1:
            parts.append(el("h3", name))
        parts.append(_table(rows))
    if found:
        parts.append(el("p.faint", _explained([row for _, rows in found for row in rows])))
    if held_out:
        parts.append(held_out)
    files = _files([run for group in groups for run in group.runs], notes)
    return join([*parts, files])


def _table(rows: Sequence[MethodRow]) -> Html:
    heads = ["method", "decoding", "mean return", "95 % interval", "", "games won", "runs", "of"]
    sources = list(dict.fromkeys([row.source for row in rows if row.num_runs]))
    without = [*([] if max(row.num_runs for row in rows) > 1 else ["runs"])]
    without += [] if len(sources) > 1 else ["of"]
    ends = [x for row in rows for x in (row.score.mean, row.score.low, row.score.high)]
    known = [x for x in ends if not math.isnan(x)]
    write = column_format(known)
    level = next((row.score.mean for row in rows if not row.num_runs), math.nan)
    body = [
        [
            toned(tone(row.tone), row.method) if row.num_runs else join([el("i.chip"), row.method]),
            row.decoding or NONE,
            write(row.score.mean),
            _between(row, write),
            _drawn(row, min(known), max(known), level),
            NONE if math.isnan(row.share_won) else f"{100 * row.share_won:.1f} %",
            str(row.num_runs) if row.num_runs else NONE,
            row.source or NONE,
        ]
        for row in rows
    ]
    shown = table(heads, body, numeric=[2, 5, 6], without=without)
    return shown if len(sources) > 1 else join([shown, el("p.faint", f"Of {sources[0]}.")])


def _between(row: MethodRow, write: Callable[[float], str]) -> str:
    low, high = row.score.low, row.score.high
    return NONE if math.isnan(low + high) else f"{write(low)} to {write(high)}"


def _drawn(row: MethodRow, low: float, high: float, level: float) -> Html:
    """The interval as a line with the mean on it; dashed, the return of the data."""
    span = max(high - low, 1e-9)

    def x(value: float) -> str:
        return f"{4 + (_WIDTH - 8) * (value - low) / span:.1f}"

    parts = []
    if not math.isnan(level):
        parts.append(el("line.level", x1=x(level), x2=x(level), y1="0", y2="20"))
    if not math.isnan(row.score.low + row.score.high):
        parts.append(el("line", x1=x(row.score.low), x2=x(row.score.high), y1="10", y2="10"))
    parts.append(el("circle", cx=x(row.score.mean), cy="10", r="3.6"))
    colour = tone(row.tone) if row.num_runs else "muted"
    text = f"{figure(row.score.mean)}, {_between(row, figure)}"
    size = {"width": str(_WIDTH), "height": "20", "viewBox": f"0 0 {_WIDTH} 20"}
    return el(
        "svg.interval", *parts, role="img", aria_label=text, style=f"color:var(--{colour})", **size
    )


def _explained(rows: Sequence[MethodRow]) -> str:
    several, alone = (any(t(row.num_runs) for row in rows) for t in ((1).__lt__, (1).__eq__))
    text = []
    if several:
        text.append("Intervals of several runs are over their means (Student's t).")
    if alone:
        text.append("Intervals of one run are over its games, and tell nothing about other seeds.")
    if any("in training" in row.source for row in rows):
        text.append(
            "Figures from training are those of the run's best evaluation, which looks better than "
            "it is; raffia evaluate RUN --episodes 1000 plays other games, and then these count."
        )
    if any(not row.num_runs for row in rows):
        text.append("The dashed line is the return of the logged dialogues.")
    return " ".join(text)


def _held_out(groups: Sequence[Group]) -> Html:
    """Losses and values on held-out rows at the best evaluation, by configuration."""
    found = [
        (index, group, [dict(run.best.held_out) for run in group.runs if run.best and run.of_loss])
        for index, group in enumerate(groups)
    ]
    found = [one for one in found if one[2]]
    if not found:
        return Html("")
    names = list(dict.fromkeys([name for *_, runs in found for means in runs for name in means]))
    rows = []
    for index, group, runs in found:
        name = method_of(group.settings or {})
        label = group.label if len(found) > 1 and group.label != name else ""
        title = " · ".join([part for part in (name, label) if part])
        means = [_mean(runs, key) for key in names]
        rows.append([toned(tone(index), title), str(len(runs)), *means])
    heads = ["method", "runs", *[name.replace("_", " ") for name in names]]
    text = "Rows that were held out, at the best evaluation of each run"
    return table(heads, rows, range(1, len(heads)), text)


def _mean(runs: Sequence[dict[str, float]], name: str) -> str:
    score = over(found) if (found := [means[name] for means in runs if name in means]) else None
    if score is None:
        return NONE
    error = "" if math.isnan(score.high) else f" ± {figure(score.high - score.mean)}"
    return f"{figure(score.mean)}{error}"


def _files(runs: Sequence[Run], notes: list[str]) -> Html:
    """The files that `raffia evaluate` left."""
    rows = []
    write = column_format([10.0])
    for run in [run for run in runs if run.of_dialogues]:
        files, missing = read_evaluations(run.folder)
        notes += missing
        for file in files:
            for name, one in decodings_of(file.data.get("decodings")).items():
                won = NONE if math.isnan(one.share_won) else f"{100 * one.share_won:.1f} %"
                low_high = f"{write(one.low)} to {write(one.high)}"
                rows.append(
                    [run.name, file.name, decoding_label(name), count(float(len(one.returns)))]
                    + [write(one.mean), NONE if math.isnan(one.low) else low_high, won]
                )
    if not rows:
        return Html("")
    heads = ["run", "evaluation", "decoding", "games", "mean return", "95 % interval", "games won"]
    text = f"{plural(len({(row[0], row[1]) for row in rows}), 'file')} by raffia evaluate"
    return el("details", el("summary", text), table(heads, rows, [3, 4, 6]))
