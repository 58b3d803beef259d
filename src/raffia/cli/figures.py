"""Figures of an evaluation: as a table for the terminal, and as JSON in a run's folder."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raffia._version import __version__
from raffia.cli.style import columns, digits_of, number, paint
from raffia.files import make_folder, write_json
from raffia.hints import plural

if TYPE_CHECKING:
    from raffia.recipes.running import Evaluation


def show_evaluation(
    run: Path,
    args: argparse.Namespace,
    found: Evaluation,
    more: Mapping[str, Any] | None = None,
    against: str = "",
    note: str = "",
) -> int:
    """Write an evaluation's figures as JSON, and show them.

    more: further entries of the JSON.
    note: a line below the figures.
    """
    as_first = list(found.as_first or [])
    figures = {
        **spread_of(found.returns),
        "returns": list(found.returns),
        "lengths": list(found.lengths),
        **({"as_first": as_first} if as_first else {}),
        **({"num_cut": found.num_cut} if found.num_cut else {}),
        "files": [os.path.relpath(file, run) for file in found.files],
    }
    played = f": {plural(len(found.returns), 'episode')}{against}"
    shown = table(found.returns, found.lengths, as_first) + (f"\n{note}" if note else "")
    figures = {**(more or {}), **figures}
    return show_figures(run, args, found.update, figures, shown, found.files, played)


def show_figures(
    run: Path,
    args: argparse.Namespace,
    update: int | None,
    figures: Mapping[str, Any],  # further entries of the JSON
    shown: str,  # the same for the terminal
    files: Sequence[Path] = (),  # that were written already
    remark: str = "",
) -> int:
    """Write what `raffia evaluate` found as JSON into the run's folder, and show it."""
    record = {
        "run": str(run),
        "checkpoint": args.checkpoint,
        "update": update,
        "seed": args.seed,
        "raffia": __version__,
        **figures,
    }
    path = run / "evaluations" / file_name(args, update)
    make_folder(path.parent)
    write_json(path, record, indent=1)
    if args.json:
        print(json.dumps(record))
        return 0
    print(f"{run}, {checkpoint_named(args.checkpoint, update)}{remark}")
    print(shown)
    for file in (path, *files):
        print(f"wrote {paint(str(file), 'cyan', sys.stdout)}")
    return 0


def spread_of(returns: Sequence[float]) -> dict[str, float | None]:
    """Mean and spread, as JSON has them; the standard error is that of the mean, None of one.

    >>> list(spread_of([1.0, 2.0, 6.0]).values())
    [3.0, 1.5275252316519468, 1.0, 2.0, 6.0]
    """
    several = len(returns) > 1
    return {
        "mean_return": statistics.fmean(returns),
        "standard_error": statistics.stdev(returns) / math.sqrt(len(returns)) if several else None,
        "min_return": min(returns),
        "median_return": statistics.median(returns),
        "max_return": max(returns),
    }


def table(returns: Sequence[float], lengths: Sequence[int], as_first: Sequence[bool]) -> str:
    """The figures as the terminal shows them.

    >>> print(table([1.0, 1.0, -1.0, 0.0], [5, 6, 7, 9], [True, True, False, False]))
      as       wins  draws  losses
      first       2      0       0
      second      0      1       1
    <BLANKLINE>
              mean    +-    min  median   max
      return  0.25  0.48  -1.00    0.50  1.00
      length  6.75  0.85   5.00    6.50  9.00
    """
    parts = []
    if as_first:
        rows = [["as", "wins", "draws", "losses"]]
        for name, first in (("first", True), ("second", False)):
            own = [r for r, side in zip(returns, as_first, strict=True) if side is first]
            counts = (sum(r > 0 for r in own), sum(r == 0 for r in own), sum(r < 0 for r in own))
            rows.append([name, *map(str, counts)])
        parts.append(columns(rows, right=[1, 2, 3]))
    rows = [["", "mean", "+-", "min", "median", "max"]]
    for name, values in (("return", returns), ("length", lengths)):
        mean, error, *extremes = spread_of([float(value) for value in values]).values()
        fine = digits_of(max(map(abs, values)))
        digits = 0 if all(float(value or 0).is_integer() for value in extremes) else fine
        cells = [number(mean, fine), number(error, fine)]
        rows.append([name, *cells, *(number(value, digits) for value in extremes)])
    parts.append(columns(rows, right=[1, 2, 3, 4, 5]))
    return "\n\n".join(parts)


def checkpoint_named(asked: str, update: int | None) -> str:
    """The checkpoint that was asked for, and the one that was used: the newest may be damaged.

    >>> checkpoint_named("best", 300), checkpoint_named("300", 300)
    ('checkpoint best (update 300)', 'checkpoint 300')
    """
    return f"checkpoint {asked}" + ("" if asked == str(update) else f" (update {update:,})")


def file_name(args: argparse.Namespace, update: int | None) -> str:
    """The file name of a record: words that change the episodes are part of it.

    update: of the checkpoint that was found, whatever was asked for.

    >>> file_name(
    ...     argparse.Namespace(
    ...         episodes=100, seed=3, num_simulations=None, opponent="rule", env=""), 300)
    'update-300-100-episodes-seed-3-rule.json'
    """
    thinks = f"-{args.num_simulations}-simulations" if args.num_simulations else ""
    against = f"-{args.opponent}" if args.opponent else ""
    where = f"-{re.sub(r'[^a-zA-Z0-9_.]+', '-', args.env)}" if args.env else ""
    more = f"{thinks}{against}{where}"
    return f"update-{update}-{args.episodes}-episodes-seed-{args.seed}{more}.json"
