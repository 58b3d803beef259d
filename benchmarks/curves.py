"""Learning curves of finished runs, stored with the docs: a figure and its numbers.

    python -m benchmarks.curves docs/curves/lunarlander runs/lunarlander-0 --level 200
    python -m benchmarks.curves docs/curves/cartpole runs/cartpole-*
    python -m benchmarks.curves docs/curves/wordle runs/wordle-? runs/bc-?

writes `lunarlander.svg` and `lunarlander.csv`: one row for each evaluation of each run. Runs of
several presets have a colour for each preset, other runs one each; with --names each has a colour
and its folder's name. The steps of runs that play none are updates.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Sequence
from pathlib import Path

from raffia.report.folder import Run, read_run
from raffia.report.rows import EvaluationRow

COLOURS = ("#2f6fb3", "#c8553d", "#3a8f6a", "#8a63b0", "#b8892b", "#5d6d7e")
COLUMNS = ("run", "step", "seconds", "episodes", "mean_return", "least", "greatest")


def rows_of(run: Run) -> list[tuple[str, float, float, int, float, float, float]]:
    """The evaluations of a run, as the CSV has them."""
    return [
        (
            run.name,
            _step(one),
            round(one.seconds, 1),
            len(one.returns),
            round(one.mean, 3),
            round(min(one.returns), 3),
            round(max(one.returns), 3),
        )
        for one in run.evaluations
    ]


def draw(
    path: Path, runs: Sequence[Run], title: str, level: float | None, names: bool = False
) -> None:
    """Mean returns over steps and over wall time; of one run, the middle half of episodes, too."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "raffia", "font.size": 9, "axes.grid": True})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.1), sharey=True, layout="constrained")
    presets = list(dict.fromkeys(run.preset for run in runs))
    several = len(presets) > 1 and not names
    for index, run in enumerate(runs):
        of = presets.index(run.preset) if several else index
        found, colour = run.evaluations, COLOURS[of % len(COLOURS)]
        means = [one.mean for one in found]
        label = run.preset if several and run is _first(runs, run.preset) else None
        label = run.name if names else label
        x_values = ([_step(one) for one in found], [one.seconds / 60 for one in found])
        for side, x in zip(axes, x_values, strict=True):
            side.plot(x, means, "o-", color=colour, linewidth=1.6, markersize=2.5, label=label)
            if len(runs) == 1:
                low, high = zip(*map(_quartiles, found), strict=True)
                side.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    played = any(not math.isnan(one.env_step) for run in runs for one in run.evaluations)
    steps = "environment steps" if played else "updates"
    if several or names:
        axes[0].legend(fontsize=7, frameon=False)
    for side, label in zip(axes, (steps, "minutes of wall time"), strict=True):
        side.set_xlabel(label)
        side.grid(color="#dddddd", linewidth=0.6)
        side.spines[["top", "right"]].set_visible(False)
        if level is not None:
            side.axhline(level, color="#888888", linewidth=0.9, linestyle="--")
    axes[0].set_ylabel("return, mean of an evaluation")
    axes[0].xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5))
    axes[0].xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _step(one: EvaluationRow) -> float:
    return one.update if math.isnan(one.env_step) else one.env_step


def _first(runs: Sequence[Run], preset: str) -> Run:
    return next(run for run in runs if run.preset == preset)


def _quartiles(one: EvaluationRow) -> tuple[float, float]:
    ordered = sorted(one.returns)
    return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the runs, write the two files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="where to write, without a suffix")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    parser.add_argument("--level", type=float, help="a dashed line at this return")
    parser.add_argument("--names", action="store_true", help="tell the runs apart by folder")
    parser.add_argument("--title", default="", help="above the picture")
    options = parser.parse_args(arguments)
    runs = [read_run(folder) for folder in options.runs]
    if not any(run.evaluations for run in runs):
        parser.error("none of these runs was evaluated yet")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with open(options.out.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(row for run in runs for row in rows_of(run))
    title = options.title or f"{runs[0].env}: {len(runs)} run{'s' * (len(runs) > 1)}"
    draw(options.out.with_suffix(".svg"), runs, title, options.level, options.names)


if __name__ == "__main__":
    main()
