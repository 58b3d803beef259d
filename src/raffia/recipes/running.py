"""A session of a run of any algorithm: its folder claimed, signals heard, progress shown."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from raffia.recipes.run_folder import claimed
from raffia.train.experiment import Experiment
from raffia.train.session import RunResult, TrainingSession
from raffia.train.signals import stop_on_signals
from raffia.train.view import View, make_view

__all__ = ["run_session", "threads"]


def run_session(
    folder: Path,
    make: Callable[[View], Experiment],
    *,
    num_threads: int,
    view: View | None,
    on_start: Callable[[], None] = lambda: None,
) -> RunResult:
    """Train what `make` builds, until the run's end, its target, Ctrl-C or SIGTERM.

    view: where progress is shown; None: the terminal.
    on_start: called once the run is restored or initialised, before the first update.
    """
    with (
        claimed(folder) as unclaimed,
        stop_on_signals() as signals,
        threads(num_threads),
        view or make_view() as shown,
        contextlib.closing(make(shown)) as experiment,
        contextlib.closing(TrainingSession(experiment)) as session,
    ):
        if unclaimed:
            shown.message(unclaimed)
        signals.tell = shown.message
        result = session.run(lambda: signals.requested, on_start)
    return replace(result, signal=signals.name)


@contextlib.contextmanager
def threads(num: int) -> Iterator[None]:
    """Compute with this number of threads: one or two differ in the last bits of results.

    >>> with threads(1):
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)
