"""A session's texts in a terminal: its start, its end, and the next calls."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raffia.cli.errors import UsageError
from raffia.cli.style import columns, duration, number, paint, printable, width_of
from raffia.hints import plural

if TYPE_CHECKING:
    from raffia.recipes.efficientzero import RunResult

ENDS = {"target": "reached its target return", "finished": "finished", "stopped": "stopped"}


def print_start(config: Any, folder: Path, remark: str = "") -> None:
    """Print what starts, before seconds go into loading torch.

    >>> from raffia.recipes.efficientzero.presets import PRESETS
    >>> print_start(PRESETS["smoke"], Path("runs/a"))
    EfficientZero on CartPole-v1, seed 0, in runs/a; Ctrl-C saves and leaves
    """
    what = f"{config.title}, seed {config.seed}, in {folder}{remark}"
    print(f"{printable(what)}; Ctrl-C saves and leaves", flush=True)


def require_device(name: str) -> None:
    """UsageError where torch cannot compute on a device.

    >>> require_device("cpu")
    >>> require_device("gpu")
    Traceback (most recent call last):
        ...
    raffia.cli.errors.UsageError: torch cannot compute on --device gpu: it knows no such device
    """
    from raffia.recipes.devices import device_trouble

    if why := device_trouble(name):
        raise UsageError(f"torch cannot compute on --device {name}: {why}", "raffia doctor")


def end_line(result: RunResult) -> str:
    """The line at a session's end: reason, length, result."""
    played = result.env_step is not None
    steps = f"{number(result.env_step, 0)} environment steps, " if played else ""
    updates = f"{plural(result.update, 'update')} in {duration(result.seconds)}"
    best = "" if result.best_return is None else f"; best mean return {number(result.best_return)}"
    return f"{result.folder} {ENDS[result.reason]}: {steps}{updates}{best}"


def exit_status(result: RunResult) -> int:
    """0, or 128 and the number of the signal that stopped the run, as shells have it."""
    if result.reason != "stopped":
        return 0
    return 128 + signal.Signals[result.signal].value


def print_next(calls: Sequence[Sequence[str]]) -> None:
    """Print calls to copy, with what each does."""
    print(paint("next", "bold", sys.stdout))
    print(columns(calls, width=width_of(sys.stdout)))
