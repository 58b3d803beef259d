"""The views of a run: a live panel in a terminal, a plain line now and then elsewhere.

A view hears of every update and decides itself what to show; it never stops a run, not even when
the terminal is gone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self, TextIO

from raffia.hints import plural


@dataclass(frozen=True, kw_only=True)
class Status:
    """The progress of a run and its latest figures; `None` is what is not known yet.

    >>> Status(title="EfficientZero on cartpole", update=25, num_updates=100).fraction_done
    0.25
    """

    title: str = ""
    update: int = 0
    num_updates: int = 0
    env_step: int | None = 0  # None: none are played
    num_env_steps: int | None = 0
    seconds: float = 0.0  # wall time of the run so far, over all its sessions
    seconds_left: float | None = None
    env_steps_per_second: float | None = None
    updates_per_second: float | None = None
    simulations_per_second: float | None = None
    latest_return: float | None = None  # return of the latest training episode
    best_return: float | None = None  # the best mean return of all evaluations
    evaluated_return: float | None = None  # mean return of the latest evaluation
    losses: Mapping[str, float] = field(default_factory=dict)
    waiting: float | None = None  # fraction of the latest time that went by waiting for workers
    staleness: float | None = None  # updates that acting weights are behind; None: no actors
    worker_restarts: int = 0  # in this session

    @property
    def fraction_done(self) -> float:
        """Fraction of the run that is done, 0..1."""
        done, whole = self.update, self.num_updates
        if not whole:
            done, whole = self.env_step or 0, self.num_env_steps or 0
        return min(1.0, max(0.0, done / whole)) if whole else 0.0


class View(Protocol):
    """The display of a run's progress; used as a context manager.

    >>> def watched(view: View) -> None:
    ...     with view as shown:
    ...         shown.message("resumed from update 100")
    ...         shown.show(Status(update=101, num_updates=200))
    """

    def show(self, status: Status) -> None:
        """Show the latest state; cheap, since it is called after every update."""

    def message(self, line: str) -> None:
        """Print a line that stays."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class PlainView:
    """Lines of text: one at the start, one each `every_seconds`, and the last state at the end.

    >>> import sys
    >>> with PlainView(sys.stdout) as view:
    ...     for update in range(1000):
    ...         view.show(Status(update=update, num_updates=999, updates_per_second=50.0))
    0:00 |   0 % | update 0/999 | 50 updates/s
    0:00 | 100 % | update 999/999 | 50 updates/s
    """

    def __init__(
        self,
        stream: TextIO,
        every_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out, self._every, self._clock = Output(stream), every_seconds, clock
        self._due = -math.inf
        self._waiting: Status | None = None  # the latest, where it was not printed

    def show(self, status: Status) -> None:
        """Print the state if it is time to."""
        self._waiting = status
        if self._clock() >= self._due:
            self._print()

    def message(self, line: str) -> None:
        """Print a line."""
        self._out.line(line)

    def _print(self) -> None:
        if self._waiting is not None:
            self._out.line(" | ".join(plain_parts(self._waiting)))
            self._waiting, self._due = None, self._clock() + self._every

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._print()


def plain_parts(status: Status) -> list[str]:
    """The parts of a status line, the most important first.

    >>> plain_parts(Status(update=50, num_updates=200, seconds=61, seconds_left=190.0,
    ...     latest_return=9.0, evaluated_return=187.3, losses={"value_loss": 0.5}))
    ['1:01', ' 25 %', 'update 50/200', '3:10 left', 'return 9, evaluated 187.3', 'value loss 0.500']
    """
    parts = [duration(status.seconds), f"{percent(status.fraction_done):>5}"]
    parts.append(f"update {progress(status.update, status.num_updates, '')}")
    if status.env_step or status.num_env_steps:
        step = progress(status.env_step or 0, status.num_env_steps or 0, "")
        parts.append(f"env step {step}")
    if status.seconds_left is not None:
        parts.append(f"{duration(status.seconds_left)} left")
    returns = [
        ("return", status.latest_return),
        ("evaluated", status.evaluated_return),
        ("best", status.best_return),
    ]
    known = [f"{name} {score(value)}" for name, value in returns if value is not None]
    parts += [", ".join(known)] if known else []
    rates = [
        ("env steps/s", status.env_steps_per_second),
        ("updates/s", status.updates_per_second),
        ("simulations/s", status.simulations_per_second),
    ]
    parts += [f"{rate(value)} {name}" for name, value in rates if value is not None]
    parts += [", ".join(worker_parts(status))] if status.waiting is not None else []
    known = [f"{label(name)} {value:.3f}" for name, value in status.losses.items()]
    return parts + ([", ".join(known)] if known else [])


def worker_parts(status: Status) -> list[str]:
    """The parts of a line that describe workers; empty for a run without any.

    >>> worker_parts(Status(waiting=0.125, staleness=1.0, worker_restarts=1))
    ['12 % waiting for workers', '1 update stale', '1 restart']
    """
    if status.waiting is None:
        return []
    parts = [f"{percent(status.waiting)} waiting for workers"]
    if status.staleness is not None:
        parts.append(f"{plural(round(status.staleness), 'update')} stale")
    if num := status.worker_restarts:
        parts.append(plural(num, "restart"))
    return parts


def duration(seconds: float | None) -> str:
    """Format a duration, such as 1:01 or 2 d 02:00.

    >>> [duration(seconds) for seconds in (9.9, 61, 3 * 3600 + 5, 50 * 3600, None)]
    ['0:09', '1:01', '3:00:05', '2 d 02:00', '?']
    """
    if seconds is None or not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(int(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def progress(done: int, whole: int, between: str = " ") -> str:
    """Format a count, with its total if that is known.

    >>> progress(1200, 9000), progress(7, 0)
    ('1,200 / 9,000', '7')
    """
    return f"{done:,}{between}/{between}{whole:,}" if whole else f"{done:,}"


def percent(fraction_done: float) -> str:
    """Format a fraction in percent; 100 % is shown only for 1.

    >>> percent(0.999)
    '99 %'
    """
    return f"{int(fraction_done * 100 + 1e-9)} %"


def score(value: float | None) -> str:
    """Format a return, with one decimal if it has a fraction; below 10 with three digits.

    >>> score(200.0), score(-21.25), score(0.0125), score(None)
    ('200', '-21.2', '0.0125', '-')
    """
    if value is None or abs(value) < 10:
        return "-" if value is None else f"{value:.3g}"
    return f"{value:,.1f}".removesuffix(".0")


def rate(value: float) -> str:
    """A number per second.

    >>> rate(1234.5), rate(2.345)
    ('1,234', '2.3')
    """
    return f"{value:,.1f}" if abs(value) < 10 else f"{value:,.0f}"


def label(name: str) -> str:
    """The name of a metric in words.

    >>> label("value_prefix_loss")
    'value prefix loss'
    """
    return name.replace("_", " ")


class Output:
    """A stream whose errors are ignored, for when its reader has gone.

    What is written after the terminal or the pipe is gone is lost, as it must be; letters that the
    stream's encoding lacks come out as question marks.

    >>> import io
    >>> gone = Output(io.StringIO())
    >>> gone.stream.close()
    >>> gone.line("nothing happens"), gone.is_open
    (None, False)
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.is_open = True
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write, if that is possible still."""
        self._try(self.stream.write, text.encode(self.encoding, "replace").decode(self.encoding))
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._try(self.stream.flush)

    def line(self, text: str) -> None:
        """Write a line and flush the stream."""
        self.write(f"{text}\n")
        self.flush()

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self.is_open and self.stream.isatty()

    def fileno(self) -> int:
        """The file descriptor of the stream."""
        return self.stream.fileno()

    def _try(self, call: Callable[..., object], *args: str) -> None:
        if not self.is_open:
            return
        try:
            call(*args)
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) and not self.stream.closed:
                raise
            self.is_open = False
