"""The view of a sweep: one live table in a terminal, lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TextIO

from raffia.hints import plural
from raffia.report.folder import RunSummary
from raffia.train.view import Output, duration, score


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a sweep.

    >>> print(Progress(num_runs=10, num_done=3, num_failed=1, seconds=62.0, seconds_left=190.0))
    1:02 | 3 of 10 runs done, 0 running | 1 failed | 3:10 left
    """

    num_runs: int
    num_done: int = 0
    num_failed: int = 0
    running: Sequence[tuple[str, RunSummary | None]] = ()  # by name; None: no file of it yet
    seconds: float = 0.0
    seconds_left: float | None = None

    def __str__(self) -> str:
        parts = [
            duration(self.seconds),
            f"{self.num_done} of {plural(self.num_runs, 'run')} done, {len(self.running)} running",
            *([f"{self.num_failed} failed"] if self.num_failed else []),
            *([] if self.seconds_left is None else [f"{duration(self.seconds_left)} left"]),
        ]
        return " | ".join(parts)

    def rows(self) -> list[list[str]]:
        """A row of each run that is running: name, step, latest and best score."""
        return [[name, *_figures(found)] for name, found in self.running]


def _figures(run: RunSummary | None) -> list[str]:
    if run is None or run.update is None:
        return ["starting", "-", "-"]
    step = f"update {run.update:,}" if run.env_step is None else f"step {run.env_step:,}"
    if run.last_loss is not None:
        return [step, f"loss {run.last_loss:.3f}", f"{run.best_loss:.3f}"]
    return [step, score(run.last_return), score(run.best_return)]


class SweepView:
    """Shows the progress of a sweep; used as a context manager.

    >>> with SweepView(sys.stdout) as view:
    ...     view.show(Progress(num_runs=2))
    ...     view.message("0-seed=0: finished")
    0:00 | 0 of 2 runs done, 0 running
    0-seed=0: finished
    """

    def __init__(self, stream: TextIO | None = None, every_seconds: float = 30.0) -> None:
        self._out = Output(sys.stdout if stream is None else stream)
        self._every, self._due = every_seconds, -math.inf
        self._live: Any = None
        if self._out.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._out.stream)
            self._live = Live(console=console, refresh_per_second=2, transient=True)

    @property
    def every_seconds(self) -> float:
        """The interval in seconds between updates of the view."""
        return 1.0 if self._live is not None else self._every

    def show(self, progress: Progress) -> None:
        """Show the latest state."""
        if self._live is not None:
            self._live.update(_table(progress))
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + self._every
            self._out.line(str(progress))
            for row in progress.rows():
                self._out.line("  " + " | ".join(row))

    def message(self, line: str) -> None:
        """Print a line that stays."""
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False)
        else:
            self._out.line(line)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.__exit__(*error)


def _table(progress: Progress) -> object:
    from rich.table import Table

    table = Table("run", "at", "latest", "best", title=str(progress), title_justify="left")
    for row in progress.rows():
        table.add_row(*row)
    return table
