"""Learning curves of finished runs, kept beside the docs: a picture and the numbers in it.

    python -m benchmarks.curves docs/curves/lunarlander runs/lunarlander-0 --level 200
    python -m benchmarks.curves docs/curves/cartpole runs/cartpole-*

writes `lunarlander.svg` and `lunarlander.csv`: one row for each evaluation of each run.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

from raffia.report.folder import Evaluated, Run, read_run

COLOURS = ("#2f6fb3", "#c8553d", "#3a8f6a", "#8a63b0", "#b8892b", "#5d6d7e")
COLUMNS = ("run", "env_step", "seconds", "episodes", "mean_return", "least", "greatest")


def rows_of(run: Run) -> list[tuple[str, float, float, int, float, float, float]]:
    """The evaluations of a run, as the CSV has them."""
    return [
        (
            run.name,
            one.env_step,
            round(one.seconds, 1),
            len(one.returns),
            round(one.mean, 3),
            round(min(one.returns), 3),
            round(max(one.returns), 3),
        )
        for one in run.evaluations
    ]


def draw(path: Path, runs: Sequence[Run], title: str, level: float | None) -> None:
    """Mean returns over steps and over wall time; of one run, the middle half of episodes, too."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "raffia", "font.size": 9, "axes.grid": True})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.1), sharey=True, layout="constrained")
    for index, run in enumerate(runs):
        found, colour = run.evaluations, COLOURS[index % len(COLOURS)]
        means = [one.mean for one in found]
        places = ([one.env_step for one in found], [one.seconds / 60 for one in found])
        for side, x in zip(axes, places, strict=True):
            side.plot(x, means, color=colour, linewidth=1.6, marker="o", markersize=2.5)
            if len(runs) == 1:
                low, high = zip(*map(_quartiles, found), strict=True)
                side.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    for side, label in zip(axes, ("environment steps", "minutes of wall time"), strict=True):
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


def _quartiles(one: Evaluated) -> tuple[float, float]:
    ordered = sorted(one.returns)
    return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the runs, write the two files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="where to write, without a suffix")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    parser.add_argument("--level", type=float, help="a dashed line at this return")
    parser.add_argument("--title", default="", help="above the picture")
    asked = parser.parse_args(arguments)
    runs = [read_run(folder) for folder in asked.runs]
    if not any(run.evaluations for run in runs):
        parser.error("none of these runs was evaluated yet")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    with open(asked.out.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(row for run in runs for row in rows_of(run))
    title = asked.title or f"{runs[0].env}: {len(runs)} run{'s' * (len(runs) > 1)}"
    draw(asked.out.with_suffix(".svg"), runs, title, asked.level)


if __name__ == "__main__":
    main()
