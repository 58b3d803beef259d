"""A run in one line, for lists of runs."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from raffia.report.folder import read_key_rows


@dataclass(frozen=True)
class RunSummary:
    """The figures of a run that a list shows; None where no file has them.

    >>> RunSummary(Path("runs/a"), state="running").best_return is None
    True
    """

    folder: Path
    state: str  # "finished", "target" (reached), "stopped", "failed", "running" (or killed) ...
    algorithm: str = ""
    preset: str = ""
    env: str = ""
    seed: str = ""
    last_return: float | None = None  # mean of the newest evaluation
    best_return: float | None = None  # mean of the best one
    env_step: int | None = None
    update: int | None = None
    seconds: float | None = None  # wall time over all sessions
    last_loss: float | None = None  # of the newest evaluation, where held-out rows are evaluated
    best_loss: float | None = None  # ... and the least
    notes: tuple[str, ...] = ()  # what is missing or damaged


def summarise(run: str | os.PathLike[str]) -> RunSummary:
    """Read what a list shows of a run: of long files a few lines only.

    Raises FileNotFoundError, with the runs nearby, if the folder is no run's.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = '{"kind": "start"}\\n{"kind": "evaluate", "env_step": 9, "mean_return": 7}\\n'
    ...     _ = Path(folder, "metrics.jsonl").write_text(rows)
    ...     found = summarise(folder)
    >>> found.state, found.best_return, found.env_step, found.seconds
    ('running', 7.0, 9, None)
    """
    found = read_key_rows(run)
    env_step, update, seconds = _there(found.env_step), _there(found.update), found.seconds
    means = [one.mean if one else None for one in (found.last, found.best)]
    returns, losses = ([None, None], means) if found.of_loss else (means, [None, None])
    return RunSummary(
        folder=found.folder,
        state=found.state,
        algorithm=found.algorithm,
        preset=found.preset,
        env=found.env,
        seed=found.seed,
        last_return=returns[0],
        best_return=returns[1],
        env_step=None if env_step is None else int(env_step),
        update=None if update is None else int(update),
        seconds=_there(seconds),
        last_loss=losses[0],
        best_loss=losses[1],
        notes=found.notes,
    )


def _there(value: float) -> float | None:
    return None if math.isnan(value) else value
