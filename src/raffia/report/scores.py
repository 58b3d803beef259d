"""Configurations by their scores: interquartile mean and 95 % interval over runs, best first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raffia.draw.markup import Html, el, join
from raffia.report.folder import Run
from raffia.report.groups import Group, Groups, differing, written
from raffia.report.markup import NONE, between, column_format, figure, table, toned
from raffia.report.panel import bootstrap_band, interquartile_mean, tone

_MOST_SETTINGS = 8  # columns


@dataclass(frozen=True)
class Score:
    """The score of a configuration, over those of its runs that were evaluated."""

    group: Group
    num_runs: int  # that were evaluated
    last: float  # interquartile mean of the runs' newest evaluations; of losses, too
    low: float  # its 95 % interval by bootstrap; nan of fewer than two runs
    high: float
    best: float  # the best evaluation of all

    @property
    def of_runs(self) -> str:
        """The number of runs that were evaluated, with that of all where some were not."""
        planned = len(self.group.runs)
        return f"{self.num_runs} of {planned}" if self.num_runs < planned else str(planned)


def scores(groups: Sequence[Group]) -> list[Score]:
    """The configurations that were evaluated, the best first.

    >>> scores([])
    []
    """
    found: list[tuple[float, Score]] = []
    for group in groups:
        runs = [run for run in group.runs if run.last is not None and run.best is not None]
        if not runs:
            continue
        means = np.array([run.last.mean for run in runs if run.last])
        low = high = math.nan
        if len(runs) > 1:
            low, high = (float(end) for end in bootstrap_band(means))
        best = max((run.best for run in runs if run.best), key=lambda one: one.score)
        last = float(interquartile_mean(means))
        rank = float(interquartile_mean(np.array([run.last.score for run in runs if run.last])))
        found.append((rank, Score(group, len(runs), last, low, high, best.mean)))
    return [score for _, score in sorted(found, key=lambda one: -one[0])]


def ranking(groups: Groups) -> Html:
    """A ranking of the configurations, and a table of all runs; empty for a single run.

    >>> ranking(Groups())
    ''
    """
    if len(groups.runs) < 2:
        return Html("")
    names = differing(groups)[:_MOST_SETTINGS]
    return join(
        [
            el("h2", "Scores"),
            *([_by_configuration(groups, names)] if len(groups) > 1 else []),
            el("h3", "Runs"),
            _by_run(groups, names),
        ]
    )


def _by_configuration(groups: Groups, names: Sequence[str]) -> Html:
    found = scores(groups)
    if not found:
        return el("p.missing", "No evaluation has been written yet.")
    write = column_format([one.last for one in found])
    rows = []
    for one in found:
        label = toned(tone(groups.index(one.group)), one.group.label)
        interval = between(one.low, one.high, write)
        rows.append([label, one.of_runs, write(one.last), interval, write(one.best)])
    heads = ["configuration", "runs", "at the end", "95 % interval", "best evaluation"]
    text = (
        "Best first. At the end: interquartile mean over the runs' newest evaluations, with its "
        "95 % interval by bootstrap over runs. Best: the best of many evaluations, which is "
        "optimistic."
    )
    return join([table(heads, rows, [1, 2, 4]), el("p.faint", text)])


def _by_run(groups: Groups, names: Sequence[str]) -> Html:
    rows = []
    for index, group in enumerate(groups):
        for run in group.runs:
            name = toned(tone(index), run.name)
            values = [written((group.settings or {}).get(one)) for one in names]
            rows.append([name, *values, run.seed or NONE, *_end(run)])
    heads = [*[name.rpartition(".")[2] for name in names], "seed", "state", "at the end", "best"]
    return table(["run", *heads], rows, [len(names) + 1, len(names) + 3, len(names) + 4])


def _end(run: Run) -> list[str]:
    state = f"failed: {run.failure}" if run.failure else run.state
    means = [figure(one.mean) if one else NONE for one in (run.last, run.best)]
    return [state, *means]
