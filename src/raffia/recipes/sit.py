"""A sitting of a run of any algorithm: its folder claimed, signals heard, progress shown."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from raffia.recipes.run_folder import claimed
from raffia.train.signals import stop_on_signals
from raffia.train.sitting import RunResult
from raffia.train.view import View, make_view

__all__ = ["Going", "nothing", "sit", "threads"]


class Going(Protocol):
    """A run that can be gone on with.

    >>> def finish(run: Going) -> str:
    ...     return run.go(lambda: False, nothing).reason
    """

    def go(self, stop: Callable[[], bool], begun: Callable[[], None]) -> RunResult:
        """Train until the end, the target, or `stop`; `begun` is called before the first update."""

    def close(self) -> None:
        """Close what it has opened."""


def sit(
    folder: Path,
    make: Callable[[View], Going],  # the run, which tells the view what there is to say
    *,
    num_threads: int,
    view: View | None,  # None: the terminal
    begun: Callable[[], None],  # called once the run stands where it is to go on
) -> RunResult:
    """Go on until the end, or until Ctrl-C or SIGTERM."""
    with (
        claimed(folder) as unclaimed,
        stop_on_signals() as signals,
        threads(num_threads),
        view or make_view() as shown,
        contextlib.closing(make(shown)) as run,
    ):
        if unclaimed:
            shown.say(unclaimed)
        signals.tell = shown.say
        result = run.go(lambda: signals.requested, begun)
    return replace(result, signal=signals.name)


@contextlib.contextmanager
def threads(num: int) -> Iterator[None]:
    """One or two threads differ in the last bits, so a run has its own number.

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


def nothing() -> None:
    """What is done where nothing is to be done.

    >>> nothing()
    """
