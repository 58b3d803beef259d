"""The sections of a page below its head. Each names what is missing where it has nothing to
show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from raffia.draw.markup import Html, el, join
from raffia.hints import plural
from raffia.report import figures
from raffia.report.folder import Run
from raffia.report.groups import Groups, differing, leading, written
from raffia.report.lineage import has_population
from raffia.report.markup import (
    NONE,
    decoding_label,
    duration,
    figure,
    legend_chip,
    percent,
    table,
    toned,
)
from raffia.report.panel import RESAMPLES, SEED, Panel, tone
from raffia.report.plots import (
    decoding_names,
    decoding_panels,
    held_out_panels,
    is_game,
    learning_panels,
    part_tone,
    rate_panels,
    spent,
    time_panel,
    training_panels,
)
from raffia.report.rows import number

_MOST_SHOWN = 4  # configurations of which stretches of time are shown
_MOST_SETTINGS = 24  # that differ, as they stand; those of other algorithms fill pages

_WAITED, _RESTARTS, _STALENESS = "waited_for_", "_restarts", "staleness"


def learning(groups: Groups, notes: list[str]) -> Html:
    """The section of learning curves, and of the differences of configurations."""
    runs = groups.runs
    parts = [el("h2", "Learning")]
    panels = learning_panels(groups)
    evaluated = any(run.evaluations for run in runs)
    played = any(run.of("episode") for run in runs)
    if not evaluated:
        parts.append(el("p.missing", "No evaluation has been written yet."))
    if evaluated or played:
        parts += [
            _curve_legend(groups, panels, evaluated, played),
            el("p.faint", _curve_text(groups)),
        ]
        parts.append(_grid(panels, "learning"))
    parts.append(_decodings(groups))
    if held_out := held_out_panels(groups):
        parts += [el("h3", "Held-out rows"), _grid(held_out, "held-out")]
    if is_game(runs):
        parts += [el("h3", "Games of the last evaluation"), _games(runs)]
    if len(groups) > 1:
        parts += [el("h3", "Differences between the configurations"), _differences(groups)]
    if not played and not all(run.by_updates for run in runs):
        notes.append("no training episodes were logged")
    return join(parts)


def training(groups: Groups, notes: list[str]) -> Html:
    """The section of losses, and of the other measures at updates."""
    panels, missing = training_panels(groups)
    notes += missing
    parts = [el("h2", "Training")]
    if not panels:
        return join([*parts, el("p.missing", "No training row has been written yet.")])
    parts.append(_run_legend(groups))
    if any(len(group.runs) > 1 for group in groups):
        text = "Thick lines are interquartile means over the runs of a configuration."
        parts.append(el("p.faint", text))
    if any(line.curve.low for panel in panels for line in panel.lines):
        text = "Lines are means of adjacent rows, bands their minimum and maximum."
        parts.append(el("p.faint", text))
    return join([*parts, _grid(panels, "training")])


def speed(groups: Groups) -> Html:
    """The section of rates, and of where the wall time went."""
    runs = groups.runs
    parts = [el("h2", "Speed")]
    rates = rate_panels(groups)
    times = {run: spent(run) for run in runs}
    names = list(dict.fromkeys([n for some in times.values() for n in some if n != "other"]))
    names = [*names, "other"] if names else []
    if not rates and not names:
        return join([*parts, el("p.missing", "No rates have been written yet.")])
    if rates:
        parts += [_run_legend(groups), _grid(rates, "rates")]
    if names:
        tones = [part_tone(name, index) for index, name in enumerate(names)]
        chips = [legend_chip("area", t, name) for t, name in zip(tones, names, strict=True)]
        parts += [el("h3", "Wall time by activity"), el("div.legend", *chips)]
        for index, run in enumerate(leading(groups)[:_MOST_SHOWN]):
            caption = el("figcaption", el("b", run.name)) if len(runs) > 1 else Html("")
            panel = time_panel(run, names)
            if not panel.empty:
                drawn = Html(figures.draw(panel, f"time-{index}"))
                parts.append(el("figure", caption, drawn))
        rows = [_time_row(run, times[run], names) for run in runs]
        parts.append(table(["run", *names, "total"], rows, numeric=range(1, len(names) + 2)))
    if keys := _worker_keys(runs):
        rows = [[run.name, *(_cell(run, key) for key in keys)] for run in runs]
        names = ["run", *map(_head_of, keys)]
        parts += [el("h3", "Workers"), table(names, rows, numeric=range(1, len(names)))]
    return join(parts)


def _decodings(groups: Groups) -> Html:
    """Panels that compare decodings over a run."""
    panels = decoding_panels(groups)
    if not panels:
        return Html("")
    names = decoding_names(groups)
    chips = [legend_chip("line", tone(i), decoding_label(name)) for i, name in enumerate(names)]
    text = (
        "The same agents with other decodings: the policy alone, or with the advantage of each "
        "token added to its logits, times the given weight. All play the same games. "
    )
    text += (
        "Lines are interquartile means over runs, bands their 95 % interval."
        if any(len(group.runs) > 1 for group in groups)
        else "Bands are 95 % intervals of the mean over the games of an evaluation."
    )
    return join(
        [
            el("h3", "Decodings"),
            el("div.legend", *chips),
            el("p.faint", text),
            _grid(panels, "decodings"),
        ]
    )


def _grid(panels: Sequence[Panel], name: str) -> Html:
    drawn = [figures.figure_of(panel, f"{name}-{i}") for i, panel in enumerate(panels)]
    return el("div.panels", *drawn) if drawn else Html("")


def _run_legend(groups: Groups, others: Sequence[Html] = ()) -> Html:
    """The configurations, if there are several runs, other chips, and the mark of restarts."""
    runs, chips = groups.runs, [*others]
    if len(runs) > 1:
        chips[:0] = [
            legend_chip("line", tone(i), f"{group.label} ({plural(len(group.runs), 'run')})")
            for i, group in enumerate(groups)
        ]
    elif any(run.num_restarts for run in runs):
        chips.append(legend_chip("dash", "muted", "restart"))
    return el("div.legend", *chips) if chips else Html("")


def _curve_legend(groups: Groups, panels: Sequence[Panel], evaluated: bool, played: bool) -> Html:
    runs = groups.runs
    chips, colour = [], "c0" if len(groups) == 1 else "muted"
    if any(len(group.runs) > 1 for group in groups):
        chips += [
            legend_chip("thin", colour, "single run"),
            legend_chip("band", colour, "95 % interval"),
        ]
    elif len(runs) == 1 and evaluated:
        what = "loss of held-out rows" if runs[0].of_loss else "mean return of an evaluation"
        chips.append(legend_chip("line", "c0", what))
        if any(panel.lines[0].curve.low for panel in panels if panel.lines):
            of_mean = not math.isnan(runs[0].evaluations[0].low)
            band = "95 % interval of the mean" if of_mean else "middle half of its episodes"
            chips.append(legend_chip("band", "c0", band))
    if played:
        text = "game of self-play (1: not drawn)" if is_game(runs) else "training episode"
        chips.append(legend_chip("dot", colour, text))
    targets = {run.target_return for run in runs if not math.isnan(run.target_return)}
    chips += [legend_chip("dash", "ink", f"target {figure(target)}") for target in sorted(targets)]
    return _run_legend(groups, chips)


def _curve_text(groups: Groups) -> str:
    of_members = any(has_population(run) for run in groups.runs)
    best = " For a population, an evaluation is that of its best member." if of_members else ""
    if all(len(group.runs) == 1 for group in groups):
        if all(run.of_dialogues for run in groups.runs):
            return (
                "The agent learns from logged dialogues alone. Evaluations play games for this "
                "purpose, or use held-out rows; neither is learnt from. Losses on such rows do "
                "not measure how well the agent speaks; the estimated return weights logged "
                "dialogues by the agent's probability of their answers." + best
            )
        return "Evaluations act without noise; training episodes explore." + best
    return (
        "Thin lines are single runs. Thick lines are the interquartile mean over the runs of a "
        "configuration (without the lowest and the highest quarter; all runs if there are fewer "
        f"than four), bands its 95 % interval: percentiles of a bootstrap of {RESAMPLES:,} draws "
        "of whole runs with replacement, stratified by configuration (generator PCG64, seed "
        f"{SEED}). Values between evaluations are interpolated; curves end where the first run "
        "ends." + best
    )


def _games(runs: Sequence[Run]) -> Html:
    rows = []
    for run in runs:
        last = run.last
        if last is None or len(last.as_first) != len(last.returns):
            continue
        for side, first in (("first", True), ("second", False)):
            pairs = zip(last.returns, last.as_first, strict=True)
            found = [value for value, was_first in pairs if was_first is first]
            won, lost = sum(v > 0 for v in found), sum(v < 0 for v in found)
            drawn = len(found) - won - lost
            rows.append([run.name, side, *map(str, (len(found), won, drawn, lost))])
    return table(["run", "agent moves", "games", "won", "drawn", "lost"], rows, range(2, 6))


def _differences(groups: Groups) -> Html:
    names = differing(groups)
    if not names:
        return el("p.missing", "Their config.json files do not differ.")
    rows = [
        [
            el("code", name),
            *[
                written(group.settings[name])
                if group.settings is not None and name in group.settings
                else NONE
                for group in groups
            ],
        ]
        for name in names
    ]
    heads = [toned(tone(i), group.label) for i, group in enumerate(groups)]
    shown = table(["setting", *heads], rows)
    if len(rows) <= _MOST_SETTINGS:
        return shown
    return el("details", el("summary", f"In {plural(len(rows), 'setting')}"), shown)


def _time_row(run: Run, parts: Mapping[str, float], names: Sequence[str]) -> list[str]:
    total = sum(parts.values())
    if not total:
        return [run.name, *[NONE for _ in names], NONE]
    cells = [percent(parts.get(name, 0.0) / total) for name in names]
    return [run.name, *cells, duration(total)]


def _worker_keys(runs: Sequence[Run]) -> list[str]:
    """The keys of training rows that tell of workers, in the order of the table's columns.

    >>> from pathlib import Path
    >>> row = {"kind": "train", "actor_restarts": 0, "waited_for_actors_seconds": 1.5}
    >>> _worker_keys([Run(Path("x"), rows=(row,))])
    ['waited_for_actors_seconds', 'actor_restarts']
    """
    keys = dict.fromkeys(key for run in runs for row in run.of("train") for key in row)
    kinds = (
        lambda key: key.startswith(_WAITED),
        lambda key: key == _STALENESS,
        lambda key: key.endswith(_RESTARTS),
    )
    return [key for is_one in kinds for key in keys if is_one(key)]


def _head_of(key: str) -> str:
    """The head of a column.

    >>> _head_of("waited_for_actors_seconds"), _head_of("staleness"), _head_of("actor_restarts")
    ('waited for actors', 'staleness (updates)', 'actor restarts')
    """
    if key == _STALENESS:
        return "staleness (updates)"
    return key.removesuffix("_seconds").replace("_", " ")


def _cell(run: Run, key: str) -> str:
    """A cell of the table: seconds with their share of the wall time, a mean, or a count.

    >>> from pathlib import Path
    >>> rows = ({"kind": "train", "seconds": 10, "waited_for_actors_seconds": 2, "staleness": 8},)
    >>> run = Run(Path("x"), rows=rows)
    >>> _cell(run, "waited_for_actors_seconds"), _cell(run, "staleness")
    ('20.0 % (2 s)', '8')
    """
    values = [number(row.get(key)) for row in run.of("train")]
    values = [value for value in values if not math.isnan(value)]
    if not values:
        return NONE
    if key == _STALENESS:
        return figure(sum(values) / len(values))
    total = _counted(values)
    if not key.startswith(_WAITED):
        return f"{total:,.0f}"
    share = f"{percent(total / run.seconds)} " if run.seconds > 0 else ""
    return f"{share}({duration(total)})"


def _counted(values: Sequence[float]) -> float:
    """The sum over sessions of a count that each session begins at 0."""
    pairs = zip([0.0, *values], values, strict=False)
    return sum([value - before if value >= before else value for before, value in pairs])
