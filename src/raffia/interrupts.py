"""Ctrl-C put off or ignored, as by worker processes: their parent acts upon it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

# What all processes of a terminal's job receive; Windows has no SIGHUP.
OF_TERMINALS = [getattr(signal, name) for name in ("SIGINT", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer Ctrl-C, also in processes that are started here, until they can ignore it.

    >>> with interrupts_deferred():
    ...     signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    True
    """
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # before, since its own start takes the block away
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_terminal() -> None:
    """Ignore Ctrl-C and the closing of the terminal, which this process's parent acts upon.

    >>> handlers = [signal.getsignal(number) for number in OF_TERMINALS]
    >>> ignore_terminal()
    >>> signal.raise_signal(signal.SIGINT)
    >>> _ = [signal.signal(*pair) for pair in zip(OF_TERMINALS, handlers, strict=True)]
    """
    for number in OF_TERMINALS:
        signal.signal(number, signal.SIG_IGN)
