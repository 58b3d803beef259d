"""Ctrl-C put off within a block, also for the processes that are started in it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


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
