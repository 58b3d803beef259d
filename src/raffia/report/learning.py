"""Panels of results: returns, losses of held-out rows, decodings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from raffia.report.folder import Run
from raffia.report.groups import Group
from raffia.report.markup import time_unit
from raffia.report.panel import Curve, Line, Panel, every, over_runs, quartiles, tone
from raffia.report.plots import is_game, restarts
from raffia.report.rows import number

_MOST_POINTS = 1200  # training episodes in a panel, of all runs together
_MOST_SHOWN = 4  # configurations of which decodings are shown
AS_SET = "decode"  # the decoding that the config has
_LABELS = {"env_step": "env steps", "update": "updates"}


def learning_panels(groups: Sequence[Group]) -> list[Panel]:
    """Panels of returns and losses of held-out rows, over what a run counts, and over wall time.

    Each environment has panels of its own: returns of two of them have no common scale.

    >>> [panel.x_label for panel in learning_panels([Group("a", ())])]
    ['env steps', 'wall time (s)']
    """
    runs = [run for group in groups for run in group.runs]
    panels = []
    envs = list(dict.fromkeys([run.env for run in runs if not run.of_loss]))
    for env in envs or ([] if runs else [""]):
        own = [_only(group, env) for group in groups]
        panels += _panels(own, of_loss=False, where=f": {env}" if len(envs) > 1 and env else "")
    if any(run.of_loss for run in runs):
        panels += _panels(groups, of_loss=True, where="")
    return panels


def _only(group: Group, env: str) -> Group:
    """The group's runs of one environment; an empty group stays, so that others keep their tone."""
    return replace(group, runs=tuple(run for run in group.runs if run.env == env))


def decoding_panels(groups: Sequence[Group]) -> list[Panel]:
    """Return and fraction of games won by each decoding, of each configuration.

    >>> decoding_panels([])
    []
    """
    panels = []
    names = decoding_names(groups)
    for group in groups[:_MOST_SHOWN]:
        own = decoding_names([group])
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


def decoding_names(groups: Sequence[Group]) -> list[str]:
    """The decodings that evaluations compare, in the order of their first appearance.

    >>> decoding_names([])
    []
    """
    runs = [run for group in groups for run in group.runs]
    return list(
        dict.fromkeys([n for run in runs for one in run.evaluations for n in one.decodings])
    )


def held_out_panels(groups: Sequence[Group]) -> list[Panel]:
    """Panels of the other measures on held-out rows, over updates.

    >>> held_out_panels([])
    []
    """
    runs = [run for group in groups for run in group.runs]
    names = dict.fromkeys([n for run in runs for one in run.evaluations for n in one.held_out])
    panels = []
    for name in names:
        if name == "loss":
            continue
        lines = _lines([[_held_out(run, name) for run in group.runs] for group in groups])
        decoding_label = name.replace("_", " ")
        panels.append(Panel(decoding_label, "updates", decoding_label, lines=lines))
    return [panel for panel in panels if not panel.empty]


def _panels(groups: Sequence[Group], *, of_loss: bool, where: str) -> list[Panel]:
    runs = [run for group in groups for run in group.runs if run.of_loss is of_loss]
    longest = max([run.seconds for run in runs if not math.isnan(run.seconds)], default=0.0)
    scale, unit = time_unit(longest)
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


def _counts(run: Run) -> str:
    """The column that counts how far a run is."""
    return "update" if run.by_updates else "env_step"


def _lines(of_groups: Sequence[Sequence[Curve]]) -> tuple[Line, ...]:
    """Lines of the runs, thin where there are several; and of each configuration that has
    several."""
    thin, thick = [], []
    for index, curves in enumerate(of_groups):
        colour = tone(index)
        middle = over_runs(curves)
        for curve in curves:
            line = Line(curve, colour, width=2.0, dots=True)
            if middle is not None:
                line = Line(Curve(curve.x, curve.y), colour, width=0.9, opacity=0.55)
            thin.append(line)
        thick += [Line(middle, colour, width=2.6, band=0.2)] if middle else []
    return (*thin, *thick)


def _episodes(run: Run, key: str, factor: float, colour: str, most: int) -> Line:
    rows = [(number(row.get(key)), number(row.get("return"))) for row in run.of("episode")]
    rows = [(x / factor, y) for x, y in rows if not math.isnan(x + y)]
    curve = Curve.of(rows[i] for i in every(len(rows), most))
    return Line(curve, colour, opacity=0.3 if run.evaluations else 0.7)


def _evaluations(run: Run, key: str, factor: float) -> Curve:
    found = [one for one in run.evaluations if not math.isnan(getattr(one, key))]
    xs, means = [getattr(one, key) / factor for one in found], [one.mean for one in found]
    if found and not any(math.isnan(one.low + one.high) for one in found):
        return Curve(xs, means, [one.low for one in found], [one.high for one in found])
    few = any(len(one.returns) < 4 for one in found)
    if not found or few or is_game([run]):  # quartiles of wins and losses tell little
        return Curve(xs, means)
    bands = [quartiles(one.returns) for one in found]
    return Curve(xs, means, [low for low, _ in bands], [high for _, high in bands])


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
        bands = not any(math.isnan(one.low + one.high) for _, one in pairs)
        curves.append(
            Curve(
                [x for x, _ in pairs],
                [one.mean for _, one in pairs],
                [one.low for _, one in pairs] if bands else (),
                [one.high for _, one in pairs] if bands else (),
            )
        )
    middle = over_runs(curves)
    if middle is not None:
        curves = [middle]
    width = 2.4 if name == AS_SET else 1.6
    return [Line(curve, colour, width=width, dots=middle is None, band=0.12) for curve in curves]
