"""The live panel that a terminal shows during a run, drawn by rich.

╭─  EfficientZero on cartpole, seed 0  ──────────────────────────────╮
│ ━━━━━━━━━━━━━━━━━━━━━╸                       51 %  3:19  3:12 left │
│                                                                    │
│ env steps     5,412 / 10,000      82/s       latest return     187 │
│ updates        4,812 / 9,400      71/s       evaluated       195.2 │
│ simulations                    1,820/s       best              200 │
│                                                                    │
│ loss 2.310   policy 0.312   value 1.201                            │
╰────────────────────────────────────────────────────────────────────╯
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Self, TextIO, cast

from rich.align import Align
from rich.box import ROUNDED
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raffia.train.view import (
    Output,
    PlainView,
    Status,
    View,
    duration,
    label,
    percent,
    plain_parts,
    progress,
    rate,
    score,
    worker_parts,
)

MAX_WIDTH = 100  # wider lines are hard to read
TWO_COLUMNS = 66  # from this width on, numbers stand side by side
PANEL = 40  # in less there is no panel, only lines
REFRESHES_PER_SECOND = 4


class LiveView:
    """A panel below all other output, redrawn four times a second by its own thread.

    What is printed meanwhile, by anybody, appears above the panel. At the end it stays as it is.

    >>> import io
    >>> stream = io.StringIO()
    >>> with LiveView(stream) as view:
    ...     view.show(Status(title="EfficientZero on cartpole", update=50, num_updates=200))
    >>> "EfficientZero on cartpole" in stream.getvalue()
    True
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(
            file=cast(TextIO, Output(stream)),  # rich asks no more of a file than what Output has
            highlight=False,
            markup=False,  # what others print may hold brackets that mean nothing
            emoji=False,
        )
        self._latest: tuple[Status, float] | None = None  # and when it came
        self._live = Live(
            get_renderable=self._panel,
            console=self._console,
            refresh_per_second=REFRESHES_PER_SECOND,
            # what goes to a file is none of the terminal's business
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
            vertical_overflow="crop",
        )

    def show(self, status: Status) -> None:
        """Remember the state; the panel shows it when it is drawn next."""
        self._latest = status, time.monotonic()

    def message(self, line: str) -> None:
        """Print a line above the panel."""
        self._console.print(line, soft_wrap=True)

    def _panel(self) -> RenderableType:
        if self._latest is None:
            return Text("starting ...", style="dim")
        status, came = self._latest
        return StatusPanel(status, since=time.monotonic() - came if self._live.is_started else 0.0)

    def __enter__(self) -> Self:
        self._live.start()
        self._console.show_cursor(True)  # or a run that is killed would leave none
        return self

    def __exit__(self, *error: object) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, FileProxy):
                stream.flush()  # it keeps half a line back, and would forget it
        self._live.stop()


class StatusPanel:
    """A state as a panel, as wide as there is room.

    since: seconds that went by since; the clocks go on.

    >>> status = Status(title="a run", update=1, num_updates=4, latest_return=9.0)
    >>> Console(width=46, file=sys.stdout).print(StatusPanel(status, since=0.0))
    ╭─ a run ──────────────────────────────────╮
    │ ━━━━━━━                       25 %  0:00 │
    │                                          │
    │ env steps     0                          │
    │ updates   1 / 4                          │
    │ latest return 9                          │
    │ evaluated     -                          │
    │ best          -                          │
    ╰──────────────────────────────────────────╯
    """

    def __init__(self, status: Status, since: float) -> None:
        self._status, self._since = status, since

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # ^C, which terminals print where the cursor stands, must not begin a line below the panel
        width = min(options.max_width - len("^C"), MAX_WIDTH)
        if width < PANEL:
            yield Text("\n".join([self._status.title, *plain_parts(self._status)]))
            return
        wide = width >= 48
        counts, returns = self._counts(wide), self._returns(wide)
        numbers: RenderableType
        if width >= TWO_COLUMNS:
            numbers = Table.grid(expand=True)
            numbers.add_row(counts, Align.right(returns))
        else:
            numbers = Group(counts, returns)
        parts: list[RenderableType] = [self._bar(), Text(), numbers]
        if workers := worker_parts(self._status):
            parts += [Text(), Text(" · ".join(workers), style="dim")]
        if self._status.losses:
            parts += [Text(), *self._losses(width - 4)]
        yield Panel(
            Group(*parts),
            title=Text(self._status.title, style="bold"),
            title_align="left",
            border_style="dim",
            box=ROUNDED,
            width=width,
            padding=(0, 1),
        )

    def _bar(self) -> RenderableType:
        status = self._status
        left = status.seconds_left
        row: list[RenderableType] = [
            ProgressBar(total=1.0, completed=status.fraction_done, complete_style="cyan"),
            Text(percent(status.fraction_done), style="bold"),
            Text(duration(status.seconds + self._since)),
        ]
        if left is not None and status.fraction_done < 1:
            row.append(Text(f"{duration(left - self._since)} left", style="cyan"))
        grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
        grid.add_column(ratio=1)
        for _ in row[1:]:
            grid.add_column(justify="right", no_wrap=True)
        grid.add_row(*row)
        return grid

    def _counts(self, wide: bool) -> Table:
        status = self._status
        rows = []
        if status.env_step is not None:
            steps = progress(status.env_step, status.num_env_steps or 0)
            rows.append(("env steps", steps, _per_second(status.env_steps_per_second)))
        updates = progress(status.update, status.num_updates)
        rows.append(("updates", updates, _per_second(status.updates_per_second)))
        if status.simulations_per_second is not None:
            rows.append(("simulations", "", _per_second(status.simulations_per_second)))
        return _columns(rows, wide)

    def _returns(self, wide: bool) -> Table:
        status = self._status
        rows = [
            ("evaluated", score(status.evaluated_return)),
            ("best", score(status.best_return)),
        ]
        if status.env_step is not None:
            rows = [("latest return", score(status.latest_return)), *rows]
        return _columns(rows, wide, strong="green")

    def _losses(self, width: int) -> list[Text]:
        """Names with their numbers, in as many lines as they need."""
        lines = [Text()]
        for name, value in self._status.losses.items():
            words = label(name.removesuffix("_loss"))
            cell = Text.assemble((f"{words} ", "dim"), f"{value:.3f}")
            if lines[-1] and len(lines[-1]) + 3 + len(cell) > width:
                lines.append(Text())
            lines[-1] = Text("   ").join([lines[-1], cell]) if lines[-1] else cell
        return lines


def _per_second(value: float | None) -> str:
    return "" if value is None else f"{rate(value)}/s"


def _columns(rows: Sequence[tuple[str, ...]], wide: bool, strong: str = "") -> Table:
    """Names, and numbers that stand one below the other."""
    grid = Table.grid(padding=(0, 3, 0, 0) if wide else (0, 1, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    for _ in rows[0][1:]:
        grid.add_column(justify="right", no_wrap=True, style=strong)
    for row in rows:
        grid.add_row(*row)
    return grid


def make_view(stream: TextIO | None = None) -> View:
    """The view that fits a stream, `None` for the standard output.

    >>> import io
    >>> type(make_view(io.StringIO())).__name__
    'PlainView'
    """
    stream = sys.stdout if stream is None else stream
    if stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
        return LiveView(stream)
    return PlainView(stream)
