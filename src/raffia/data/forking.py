"""Locks across `os.fork`: a child, as a worker that loads data, finds them free and all in order.

A child has no other thread than the one that forked, so a lock that another thread held would never
be free there. The thread that forks takes all locks first, and both processes give them back.
"""

import os
import threading
import time
import weakref
from typing import Any, Protocol

PATIENCE = 10.0  # seconds to wait for the locks, before the child is made without them
EACH = 0.1  # seconds to wait for one of them, before all are given back and tried again

_owners: weakref.WeakSet[Any] = weakref.WeakSet()
_taken: list[Any] = []  # by the thread that is just forking; it alone runs meanwhile
_registering = threading.Lock()
_registered = False


class HasLock(Protocol):
    """What is guarded by a lock of its own."""

    _lock: Any


def survives_fork(owner: HasLock) -> None:
    """See to it that the lock of this object is free in a child that is forked.

    >>> from raffia.data.forking import survives_fork
    >>> class Counter:
    ...     def __init__(self):
    ...         self._lock = threading.Lock()
    ...         survives_fork(self)
    >>> counter = Counter()
    """
    global _registered
    with _registering:
        _owners.add(owner)
        if not _registered:
            os.register_at_fork(before=_take, after_in_parent=_give, after_in_child=_renew)
            _registered = True


def _take() -> None:
    """Take all locks, whatever the order in which others take them."""
    deadline = time.monotonic() + PATIENCE
    _registering.acquire()
    locks = [owner._lock for owner in list(_owners)]
    while time.monotonic() < deadline:
        for lock in locks:
            if not lock.acquire(timeout=EACH):
                break  # who has it may wait for one that we have
            _taken.append(lock)
        if len(_taken) == len(locks):
            return
        _release()
        time.sleep(0.001)


def _release() -> None:
    while _taken:
        _taken.pop().release()


def _give() -> None:
    _release()
    _registering.release()


def _renew() -> None:
    """In the child: locks that could not be taken are free too, whoever held them."""
    taken = {id(lock) for lock in _taken}
    for owner in list(_owners):
        if id(owner._lock) not in taken:
            owner._lock._at_fork_reinit()
    _give()
