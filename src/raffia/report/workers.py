"""What a run's workers cost it: waiting, staleness and restarts, of its training rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from raffia.report.folder import Run
from raffia.report.rows import number
from raffia.report.wording import NONE, duration, figure

_WAITED, _RESTARTS, _STALENESS = "waited_for_", "_restarts", "staleness"


def worker_heads(runs: Sequence[Run]) -> list[str]:
    """The keys of training rows that tell of workers, in the order of the table's columns.

    >>> from pathlib import Path
    >>> row = {"kind": "train", "actor_restarts": 0, "waited_for_actors_seconds": 1.5}
    >>> worker_heads([Run(Path("x"), rows=(row,))])
    ['waited_for_actors_seconds', 'actor_restarts']
    """
    keys = dict.fromkeys(key for run in runs for row in run.of("train") for key in row)
    kinds = (
        lambda key: key.startswith(_WAITED),
        lambda key: key == _STALENESS,
        lambda key: key.endswith(_RESTARTS),
    )
    return [key for is_one in kinds for key in keys if is_one(key)]


def head_of(key: str) -> str:
    """The head of a column.

    >>> head_of("waited_for_actors_seconds"), head_of("staleness"), head_of("actor_restarts")
    ('waited for actors', 'staleness (updates)', 'actor restarts')
    """
    if key == _STALENESS:
        return "staleness (updates)"
    return key.removesuffix("_seconds").replace("_", " ")


def worker_row(run: Run, keys: Sequence[str]) -> list[str]:
    """A run's row of the table: seconds with their share of the wall time, means, counts.

    >>> from pathlib import Path
    >>> rows = ({"kind": "train", "seconds": 10, "waited_for_actors_seconds": 2, "staleness": 8},)
    >>> worker_row(Run(Path("x"), rows=rows), ["waited_for_actors_seconds", "staleness"])
    ['x', '20.0 % (2 s)', '8']
    """
    return [run.name, *(_cell(run, key) for key in keys)]


def _cell(run: Run, key: str) -> str:
    values = [number(row.get(key)) for row in run.of("train")]
    values = [value for value in values if not math.isnan(value)]
    if not values:
        return NONE
    if key == _STALENESS:
        return figure(sum(values) / len(values))
    total = _counted(values)
    if not key.startswith(_WAITED):
        return f"{total:,.0f}"
    share = f"{100 * total / run.seconds:.1f} % " if run.seconds > 0 else ""
    return f"{share}({duration(total)})"


def _counted(values: Sequence[float]) -> float:
    """The sum over sessions of a count that each session begins at 0."""
    pairs = zip([0.0, *values], values, strict=False)
    return sum([value - before if value >= before else value for before, value in pairs])
