"""The panels of a page, made of runs: results, training, rates, and where the wall time went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from raffia.hints import plural
from raffia.report.folder import Run
from raffia.report.groups import Group, Groups
from raffia.report.markup import time_unit
from raffia.report.panel import Area, Curve, Line, Panel, every, over_runs, quartiles, thinned, tone
from raffia.report.rows import Decoding, EvaluationRow, Row, number

_MOST_POINTS = 1200  # training episodes in a panel, of all runs together
_MOST_SHOWN = 4  # configurations of which decodings are shown
AS_SET = "decode"  # the decoding that the config has
_LABELS = {"env_step": "env steps", "update": "updates"}

_MOST_PIECES = 120  # stretches of wall time in a stacked panel
_PROGRESS_KEYS = ("update", "env_step", "seconds")
_UNITS = {
    **{f"{of}_loss": "loss (nats)" for of in ("policy", "value", "value_prefix", "token", "cql")},
    "num_tokens": "tokens of a batch",
    "policy_entropy": "entropy (nats)",
    "grad_norm": "L2 norm",
    **{f"{of}_clipped": "fraction of targets" for of in ("value", "value_prefix")},
    "learning_rate": "per update",
}
_FIRST = ("loss", "policy_loss", "value_loss", "value_prefix_loss", "consistency_loss")
_NEXT = ("policy_entropy", "grad_norm")
_MOST_PANELS = 60
_LAST = ("learning_rate", "temperature")


def is_game(runs: Sequence[Run]) -> bool:
    """Whether two players meet: returns are then wins and losses.

    >>> is_game([])
    False
    """
    return any(one.as_first for run in runs for one in run.evaluations)


def learning_panels(groups: Groups) -> list[Panel]:
    """Panels of returns and losses of held-out rows, over what a run counts, and over wall time.

    Each environment has panels of its own: returns of two of them have no common scale.

    >>> [panel.x_label for panel in learning_panels(Groups([Group("a", ())]))]
    ['env steps', 'wall time (s)']
    """
    runs = groups.runs
    panels = []
    envs = list(dict.fromkeys([run.env for run in runs if not run.of_loss]))
    for env in envs or ([] if runs else [""]):
        own = Groups([_only(group, env) for group in groups])
        panels += _panels(own, of_loss=False, where=f": {env}" if len(envs) > 1 and env else "")
    if any(run.of_loss for run in runs):
        panels += _panels(groups, of_loss=True, where="")
    return panels


def _only(group: Group, env: str) -> Group:
    """The group's runs of one environment; an empty group stays, so that others keep their tone."""
    return replace(group, runs=tuple(run for run in group.runs if run.env == env))


def decoding_panels(groups: Groups) -> list[Panel]:
    """Return and fraction of games won by each decoding, of each configuration.

    >>> decoding_panels(Groups())
    []
    """
    panels = []
    names = decoding_names(groups)
    for group in groups[:_MOST_SHOWN]:
        own = decoding_names(Groups([group]))
        if len(own) < 2:
            continue
        where = f": {group.label}" if len(groups) > 1 else ""
        for title, unit, of in (
            ("Return by decoding", "return", "mean"),
            ("Games won by decoding", "share won (%)", "share_won"),
        ):
            lines = [line for n in own for line in _decoding(group, n, of, tone(names.index(n)))]
            panels.append(Panel(f"{title}{where}", "updates", unit, lines=tuple(lines)))
    return [panel for panel in panels if not panel.empty]


def decoding_names(groups: Groups) -> list[str]:
    """The decodings that evaluations compare, in the order of their first appearance.

    >>> decoding_names(Groups())
    []
    """
    return list(
        dict.fromkeys([n for run in groups.runs for one in run.evaluations for n in one.decodings])
    )


def held_out_panels(groups: Groups) -> list[Panel]:
    """Panels of the other measures on held-out rows, over updates.

    >>> held_out_panels(Groups())
    []
    """
    names = dict.fromkeys(
        [n for run in groups.runs for one in run.evaluations for n in one.held_out]
    )
    panels = []
    for name in names:
        if name == "loss":
            continue
        lines = _lines([[_held_out(run, name) for run in group.runs] for group in groups])
        decoding_label = name.replace("_", " ")
        panels.append(Panel(decoding_label, "updates", decoding_label, lines=lines))
    return [panel for panel in panels if not panel.empty]


def training_panels(groups: Groups) -> tuple[list[Panel], list[str]]:
    """Panels of the losses and other keys of training rows, over updates; and the keys without
    numbers.

    >>> training_panels(Groups())
    ([], [])
    """
    keys = _measured(groups.runs)
    others = [key for key in keys if key not in (*_FIRST, *_NEXT, *_LAST)]
    losses = [key for key in others if key.endswith("_loss")]
    rest = [key for key in others if not key.endswith("_loss")]
    order = [*_FIRST, *losses, *_NEXT, *rest, *_LAST]
    with_numbers = [key for key in order if key in keys]
    shown = with_numbers[:_MOST_PANELS]
    panels = [_over_rows(groups, key, "update", 1.0, "updates") for key in shown]
    blank = [panel.title for panel in panels if panel.empty]
    notes = [f"no numbers were logged for: {', '.join(blank)}"] if blank else []
    if len(with_numbers) > len(shown):
        more = len(with_numbers) - len(shown)
        notes.append(
            f"training rows have {len(with_numbers):,} keys, of which {more:,} are not plotted here"
        )
    return [panel for panel in panels if not panel.empty], notes


def rate_panels(groups: Groups) -> list[Panel]:
    """Rates over wall time.

    >>> rate_panels(Groups())
    []
    """
    scale, unit = _wall_time(groups.runs)
    rates = [key for key in _keys(groups.runs) if key.endswith("_per_second")]
    panels = [_over_rows(groups, k, "seconds", scale, f"wall time ({unit})") for k in rates]
    return [replace(panel, from_zero=True) for panel in panels if not panel.empty]


def spent(run: Run) -> dict[str, float]:
    """Seconds of wall time by activity, over all training rows; the rest is "other".

    >>> from pathlib import Path
    >>> row = {"kind": "train", "seconds": 10, "seconds_learn": 6, "seconds_collect": 3}
    >>> spent(Run(Path("x"), rows=(row,)))
    {'learn': 6.0, 'collect': 3.0, 'other': 1.0}
    """
    total: dict[str, float] = {}
    for _, _, parts in _stretches(run):
        for name, seconds in parts.items():
            total[name] = total.get(name, 0.0) + seconds
    other = total.pop("other", 0.0)
    return {**total, "other": other} if total else {}


def time_panel(run: Run, names: Sequence[str]) -> Panel:
    """A panel of where the wall time went, as fractions of each interval between training rows.

    >>> from pathlib import Path
    >>> time_panel(Run(Path("x")), ["learn"]).empty
    True
    """
    stretches = _stretches(run)
    scale, unit = time_unit(stretches[-1][1] if stretches else 0.0)
    pieces = _merged(stretches, _MOST_PIECES)
    x = [edge / scale for start, end, _ in pieces for edge in (start, end)]
    areas = []
    for index, name in enumerate(names):
        fractions = [
            100 * parts.get(name, 0.0) / max(sum(parts.values()), 1e-12) for _, _, parts in pieces
        ]
        areas.append(
            Area([fraction for fraction in fractions for _ in range(2)], part_tone(name, index))
        )
    return Panel(
        title="Wall time by activity",
        x_label=f"wall time ({unit})",
        y_label="share of time (%)",
        areas=tuple(areas) if x else (),
        area_x=x,
        marks=restarts([run], "seconds", scale),
        y_limits=(0, 100),
        wide=True,
    )


def part_tone(name: str, index: int) -> str:
    """The tone of a part of the time: grey for the rest.

    >>> part_tone("other", 1), part_tone("learn", 0)
    ('c7', 'c0')
    """
    return "c7" if name == "other" else tone(index)


def restarts(runs: Sequence[Run], key: str, factor: float) -> tuple[float, ...]:
    """Positions of restarts, of a run alone: those of several would be a fence.

    >>> from pathlib import Path
    >>> restarts([Run(Path("x"), rows=({"kind": "resume", "update": 30},))], "update", 10.0)
    (3.0,)
    """
    if len(runs) != 1:
        return ()
    xs = [number(row.get(key)) / factor for row in runs[0].of("resume")]
    return tuple([x for x in xs if not math.isnan(x)])


def bad_numbers(run: Run) -> list[str]:
    """Training rows whose entries are not numbers, one note for each entry.

    >>> from pathlib import Path
    >>> rows = ({"kind": "train", "update": 3, "loss": None}, {"kind": "train", "loss": 1})
    >>> bad_numbers(Run(Path("x"), rows=rows))
    ['loss is not a number in 1 row of training, first at update 3']
    """
    notes = []
    for key in _keys([run]):
        bad = [r for r in run.of("train") if key in r and math.isnan(number(r[key]))]
        if bad:
            at = number(bad[0].get("update"))
            first = "" if math.isnan(at) else f", first at update {at:,.0f}"
            notes.append(f"{key} is not a number in {plural(len(bad), 'row')} of training{first}")
    return notes


def _keys(runs: Sequence[Run]) -> list[str]:
    """Keys of training rows, in the order of their first appearance."""
    rows = [row for run in runs for row in run.of("train")]
    return [key for key in dict.fromkeys(k for row in rows for k in row) if key != "kind"]


def _measured(runs: Sequence[Run]) -> list[str]:
    return [
        key
        for key in _keys(runs)
        if key not in _PROGRESS_KEYS
        and not key.startswith("seconds_")
        and not key.endswith("_per_second")
    ]


def _over_rows(groups: Groups, key: str, x_key: str, factor: float, label: str) -> Panel:
    of_groups: list[list[Curve]] = []
    for group in groups:
        of_groups.append(curves := [])
        for run in group.runs:
            rows = [row for row in run.of("train") if key in row]
            x = [number(row.get(x_key)) / factor for row in rows]
            y = [number(row[key]) for row in rows]
            if not all(math.isnan(a + b) for a, b in zip(x, y, strict=True)):
                curves.append(thinned(x, y, 300 if len(groups.runs) <= 4 else 120))
    lines = _lines(of_groups, of_rows=True)
    heights = [y for line in lines for y in line.curve.y if not math.isnan(y)]
    may_log = key.endswith("loss") or key == "grad_norm"
    heights += [
        low for line in lines for low in line.curve.low
    ]  # a band to 0 cannot be drawn there
    least, most = min(heights, default=0.0), max(heights, default=0.0)
    log = may_log and least > 1e-30 and most > 50 * least
    words = key.replace("_per_second", " / s").replace("_", " ")
    default = "loss" if key.endswith("loss") else words
    return Panel(
        title=key.replace("_", " "),
        x_label=label,
        y_label=_UNITS.get(key, default),
        lines=lines,
        marks=restarts(groups.runs, x_key, factor),
        log=log,
    )


Stretch = tuple[float, float, dict[str, float]]  # start, end, seconds of each part


def _stretches(run: Run) -> list[Stretch]:
    found: list[Stretch] = []
    before = 0.0
    for row in run.of("train"):
        end, parts = number(row.get("seconds")), _parts(row)
        if math.isnan(end) or end <= before or not parts:
            continue
        other = end - before - sum(parts.values())
        found.append((before, end, {**parts, "other": max(other, 0.0)}))
        before = end
    return found


def _parts(row: Row) -> dict[str, float]:
    named = {k.removeprefix("seconds_"): number(v) for k, v in row.items() if k[:8] == "seconds_"}
    return {name: max(value, 0.0) for name, value in named.items() if not math.isnan(value)}


def _merged(stretches: Sequence[Stretch], most: int) -> list[Stretch]:
    """Neighbouring stretches put together until there are few enough."""
    size = -(-len(stretches) // most) if stretches else 1
    merged = []
    for first in range(0, len(stretches), size):
        some = stretches[first : first + size]
        parts: dict[str, float] = {}
        for _, _, more in some:
            for name, seconds in more.items():
                parts[name] = parts.get(name, 0.0) + seconds
        merged.append((some[0][0], some[-1][1], parts))
    return merged


def _panels(groups: Groups, *, of_loss: bool, where: str) -> list[Panel]:
    runs = [run for run in groups.runs if run.of_loss is of_loss]
    scale, unit = _wall_time(runs)
    game = is_game(runs)
    targets = {run.target_return for run in runs if not math.isnan(run.target_return)}
    shown = [run for run in runs if run.evaluations or run.of("episode")]
    counted = [key for key in _LABELS if any(_counts(run) == key for run in runs)]
    what, height = ("Held-out loss", "loss") if of_loss else ("Return", "return")
    panels = []
    for key in (*(counted or ["env_step"]), "seconds"):
        label = _LABELS.get(key, f"wall time ({unit})")
        factor = scale if key == "seconds" else 1.0
        there = [run for run in runs if key in ("seconds", _counts(run))]
        points = [
            _episodes(run, key, factor, tone(index), _MOST_POINTS // max(len(shown), 1))
            for index, group in enumerate(groups)
            for run in group.runs
            if run in there
        ]
        curves = [
            [_evaluations(run, key, factor) for run in group.runs if run in there]
            for group in groups
        ]
        panels.append(
            Panel(
                title=f"{what} over {label.partition(' (')[0]}{where}",
                x_label=label,
                y_label="mean outcome (win 1, loss −1)" if game else height,
                lines=_lines(curves),
                points=tuple(points),
                marks=restarts(there, key, factor),
                levels=() if of_loss else tuple(sorted(targets)),
                y_limits=(-1.08, 1.08) if game else None,
            )
        )
    return panels


def _wall_time(runs: Sequence[Run]) -> tuple[float, str]:
    """The unit for the wall time of these runs; see `time_unit`."""
    return time_unit(max([run.seconds for run in runs if not math.isnan(run.seconds)], default=0.0))


def _counts(run: Run) -> str:
    """The column that counts how far a run is."""
    return "update" if run.by_updates else "env_step"


def _lines(of_groups: Sequence[Sequence[Curve]], of_rows: bool = False) -> tuple[Line, ...]:
    """A line for each run, thin if its configuration has several, and one for each such
    configuration.

    of_rows: of training, which are many: without dots, and without a band over several runs.
    """
    thin, thick = [], []
    for index, curves in enumerate(of_groups):
        colour = tone(index)
        middle = over_runs(curves, band=not of_rows)
        for curve in curves:
            line = Line(curve, colour, width=1.5 if of_rows else 2.0, dots=not of_rows)
            if middle is not None:
                line = Line(Curve(curve.x, curve.y), colour, width=0.9, opacity=0.45)
            thin.append(line)
        thick += [Line(middle, colour, width=2.4, band=0.2)] if middle else []
    return (*thin, *thick)


def _episodes(run: Run, key: str, factor: float, colour: str, most: int) -> Line:
    rows = [(number(row.get(key)), number(row.get("return"))) for row in run.of("episode")]
    rows = [(x / factor, y) for x, y in rows if not math.isnan(x + y)]
    curve = Curve.of(rows[i] for i in every(len(rows), most))
    return Line(curve, colour, opacity=0.3 if run.evaluations else 0.7)


def _evaluations(run: Run, key: str, factor: float) -> Curve:
    found = [one for one in run.evaluations if not math.isnan(getattr(one, key))]
    curve = _with_intervals([getattr(one, key) / factor for one in found], found)
    few = any(len(one.returns) < 4 for one in found)
    if not found or curve.low or few or is_game([run]):  # quartiles of wins and losses tell little
        return curve
    low, high = zip(*[quartiles(one.returns) for one in found], strict=True)
    return Curve(curve.x, curve.y, low, high)


def _with_intervals(x: Sequence[float], results: Sequence[EvaluationRow | Decoding]) -> Curve:
    """The means of results, with their intervals as a band where all have one."""
    known = [] if any(math.isnan(one.low + one.high) for one in results) else results
    low, high = [one.low for one in known], [one.high for one in known]
    return Curve(x, [one.mean for one in results], low, high)


def _held_out(run: Run, name: str) -> Curve:
    return Curve.of((one.update, one.held_out.get(name, math.nan)) for one in run.evaluations)


def _decoding(group: Group, name: str, of: str, colour: str) -> list[Line]:
    """The curve of a decoding: of one run with the interval of its episodes; of several their mean
    and band."""
    curves = []
    for run in group.runs:
        found = [(one.update, one.decodings.get(name)) for one in run.evaluations]
        pairs = [(x, one) for x, one in found if one is not None and not math.isnan(x)]
        if of == "share_won":
            curves.append(
                Curve.of((x, 100 * one.share_won) for x, one in pairs if one.share_won >= 0)
            )
            continue
        curves.append(_with_intervals([x for x, _ in pairs], [one for _, one in pairs]))
    middle = over_runs(curves)
    if middle is not None:
        curves = [middle]
    width = 2.4 if name == AS_SET else 1.6
    return [Line(curve, colour, width=width, dots=middle is None, band=0.12) for curve in curves]
