"""Stopping a run by Ctrl-C, SIGTERM or a closed terminal: the loop is asked first, then left."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from raffia.interrupts import OF_TERMINALS

SIGNALS = (*OF_TERMINALS, signal.SIGTERM)


class Stop:
    """Whether somebody asked to stop.

    >>> stop = Stop()
    >>> stop.requested, stop.name
    (False, '')
    >>> stop.ask(signal.SIGTERM)
    >>> stop.requested, stop.name
    (True, 'SIGTERM')
    """

    def __init__(self) -> None:
        self.name = ""  # of the signal
        self.announce: Callable[[str], None] | None = None  # prints a line for the person who asked

    @property
    def requested(self) -> bool:
        """Whether a signal came."""
        return bool(self.name)

    def ask(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal: the first asks, the next one leaves with exit status 128 + number.

        >>> stop = Stop()
        >>> stop.ask(signal.SIGINT)
        >>> stop.ask(signal.SIGINT)
        Traceback (most recent call last):
        ...
        SystemExit: 130
        """
        if self.requested:
            if signal.Signals(number).name == "SIGHUP":
                return  # it comes from the shell and, as that ends, from the system
            raise SystemExit(128 + number)
        self.name = signal.Signals(number).name
        if self.announce is not None:  # by a thread: the interrupted code may be printing itself
            text = (
                f"{self.name}: saving and stopping after this update; a second signal stops "
                "immediately, and a resume then continues from the last checkpoint"
            )
            threading.Thread(target=self.announce, args=(text,), daemon=True).start()


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Only note the first SIGINT, SIGTERM or SIGHUP within the block; a second signal ends the
    process immediately, but for SIGHUP.

    The handlers from before are back afterwards. A signal that is ignored, as SIGINT and SIGHUP
    are behind `nohup ... &`, stays ignored. Handlers can be set in the main thread only: elsewhere
    nothing is done, and `requested` stays False. Ctrl-C reaches the processes that this one started
    too.

    >>> with stop_on_signals() as stop:
    ...     for update in range(1000):
    ...         if update == 3:
    ...             signal.raise_signal(signal.SIGINT)
    ...         if stop.requested:
    ...             break
    >>> update, stop.name
    (3, 'SIGINT')
    """
    stop, before = Stop(), {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, stop.ask)
        yield stop
    finally:
        for number, handler in before.items():
            # None: it was not set by Python, which can't set it again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
