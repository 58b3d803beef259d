"""raffia list: presets, environments and runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from raffia.cli.algorithm import commands_of
from raffia.cli.parser import Parser, UsageError, nearest
from raffia.cli.runs import HOME
from raffia.cli.style import call, columns, number, paint, printable, width_of
from raffia.cli.sweep import HOME as SWEEPS
from raffia.recipes.algorithm import ALGORITHMS
from raffia.report.folder import RunSummary, find_runs, summarise
from raffia.report.markup import duration

ABOUT = """\
List presets, environments, and the runs below a folder with their state and their latest and best
mean return, or held-out loss for runs on dialogues without an environment.

  presets       named settings for training
  environments  names for --env.id (imports Gymnasium, which takes a moment)
  runs          below ./runs and ./sweeps, or below the folder given by --in

Without arguments, presets and runs are listed. Nothing is written."""
EXAMPLES = [
    "raffia list",
    "raffia list environments | grep -i lander",
    "raffia list runs --in /data/runs",
]
KINDS = ("presets", "environments", "runs")


def list_all(words: Sequence[str]) -> int:
    """`raffia list [presets] [environments] [runs]`

    >>> list_all(["preset"])
    Traceback (most recent call last):
        ...
    raffia.cli.parser.UsageError: 'preset' is not a kind of things to list; did you mean presets?
    """
    parser = Parser("raffia list", ABOUT, EXAMPLES)
    parser.add_argument("kinds", metavar="WHAT", nargs="*", help=", ".join(KINDS))
    about = f"where to look for runs (default: {HOME} and {SWEEPS})"
    parser.flag("--in FOLDER", about, Path, dest="home")
    args = parser.read(words)
    for kind in args.kinds:
        if kind not in KINDS:
            if Path(kind).is_dir():
                below = call("raffia", "list", "runs", "--in", kind)
                raise UsageError(f"{kind!r} is a folder, not a kind of things to list", below)
            raise UsageError(
                f"{kind!r} is not a kind of things to list{nearest(kind, KINDS)}",
                *[call("raffia", "list", known) for known in KINDS],
            )
    if args.kinds == ["environments"]:  # bare names, for grep
        print("\n".join(_environments()))
        return 0
    if args.home and not args.home.is_dir():
        raise UsageError(f"--in {args.home} is not a folder", call("raffia", "list", "runs"))
    homes = [args.home] if args.home else [HOME, SWEEPS]
    parts = {
        "presets": lambda: [_title("presets", "--preset NAME"), presets()],
        "environments": lambda: [_title("environments", "--env.id NAME"), *_environments()],
        "runs": lambda: [_title("runs", f"below {' and '.join(map(str, homes))}"), runs(*homes)],
    }
    blocks = ["\n".join(parts[kind]()) for kind in args.kinds or ("presets", "runs")]
    print("\n\n".join(blocks))
    return 0


def presets() -> str:
    """One line of each preset.

    >>> print(presets().splitlines()[1])  # doctest: +ELLIPSIS
      smoke ...
    """
    rows = [["", "environment", "steps", ""]]
    for algorithm in ALGORITHMS.values():
        commands = commands_of(algorithm)
        for name, config in algorithm.presets.items():
            rows.append([name, *commands.listed(config), algorithm.summaries[name]])
    return columns(rows, right=[2], width=width_of(sys.stdout))


def runs(*homes: Path) -> str:
    """One line of each run below these folders.

    >>> print(runs(Path("gone")))
      none yet; start with raffia train efficientzero --preset cartpole
    """
    found = [summarise(folder) for home in homes for folder in find_runs(home)]
    if not found:
        return "  none yet; start with raffia train efficientzero --preset cartpole"
    head = ["", "environment", "seed", "state", "steps", "updates", "time", "latest", "best"]
    return columns([head, *(_row(run) for run in found)], right=[2, 4, 5, 6, 7, 8])


def _row(run: RunSummary) -> list[str]:
    return [
        printable(str(run.folder)),
        printable(run.env or "?"),
        printable(run.seed or "?"),
        "running, or killed" if run.state == "running" else printable(run.state),
        number(run.env_step, 0),
        number(run.update, 0),
        "-" if run.seconds is None else duration(run.seconds),
        _result(run.last_return, run.last_loss),
        _result(run.best_return, run.best_loss),
    ]


def _result(mean_return: float | None, loss: float | None) -> str:
    return number(mean_return) if loss is None else f"loss {number(loss, 3)}"


def _title(title: str, remark: str) -> str:
    return f"{paint(title, 'bold', sys.stdout)}  {paint(remark, 'dim', sys.stdout)}"


def _environments() -> list[str]:
    from raffia.envs.make import env_names

    return env_names()
