"""Buffers and processes: what another process is sent is a copy, and a forked one finds locks free.

Tensors that torch.multiprocessing sends are shared memory; a buffer's rows would then change under
the other process, whose state would not tell: `by_value` sends their bytes.

A child of `os.fork`, as a worker that loads data, has no other thread than the one that forked, so
a lock that another thread held would never be free there. The thread that forks takes all locks
first, and both processes give them back.
"""

import copy
import os
import threading
import time
import weakref
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor


class Bytes(NamedTuple):
    """A tensor by value."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device
    content: np.ndarray  # uint8


class State(NamedTuple):
    """A generator by value."""

    device: torch.device
    content: Bytes


def by_value(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of an object with its tensors and generators as bytes, also in lists.

    >>> from raffia.data.processes import by_value, from_value
    >>> from_value(by_value({"x": torch.tensor([1, 2]), "n": 3}))
    {'x': tensor([1, 2]), 'n': 3}
    """
    return {name: _packed(value) for name, value in fields.items()}


def from_value(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that `by_value` was given."""
    return {name: _unpacked(value) for name, value in fields.items()}


class ByValue:
    """The base of objects that are pickled with their tensors and generators as bytes.

    >>> class Rows(ByValue):
    ...     def __init__(self):
    ...         self.x = torch.tensor([1, 2])
    >>> Rows().__getstate__()["x"].shape
    (2,)
    """

    def __getstate__(self) -> dict[str, Any]:
        return by_value(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(from_value(state))


def _packed(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return State(value.device, _packed(value.get_state()))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_packed(part) for part in value])
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return Bytes(value.dtype, tuple(value.shape), value.device, flat.numpy().copy())
    return [_packed(part) for part in value] if type(value) is list else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, State):
        return torch.Generator(value.device).set_state(_unpacked(value.content))
    if isinstance(value, Bytes):
        if not len(value.content):
            return torch.empty(value.shape, dtype=value.dtype, device=value.device)
        flat = torch.from_numpy(value.content.copy()).view(value.dtype)
        return flat.view(value.shape).to(value.device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_unpacked(part) for part in value])
    return [_unpacked(part) for part in value] if type(value) is list else value


PATIENCE = 10.0  # seconds to wait for the locks, before the child is made without them
EACH = 0.1  # seconds to wait for one of them, before all are given back and tried again

_owners: weakref.WeakSet[Any] = weakref.WeakSet()
_taken: list[Any] = []  # by the thread that is just forking; it alone runs meanwhile
_registering = threading.Lock()
_registered = False


class Locked:
    """The base of what a lock guards: copies are of one moment, whatever other threads do.

    `copy.copy` shares everything, the lock too; `copy.deepcopy` and pickle give a copy apart. The
    lock is free in a child that is forked.

    >>> class Counter(Locked):
    ...     def __init__(self):
    ...         self.counts = [1, 2]
    ...         self._make_lock()
    >>> counter = Counter()
    >>> copy.deepcopy(counter).counts is counter.counts, copy.copy(counter).counts is counter.counts
    (False, True)
    """

    _lock: Any

    def _make_lock(self) -> None:
        global _registered
        self._lock = threading.RLock()
        with _registering:
            _owners.add(self)
            if not _registered and hasattr(os, "register_at_fork"):  # Windows cannot fork
                os.register_at_fork(before=_take, after_in_parent=_give, after_in_child=_renew)
                _registered = True

    def _copied(self) -> dict[str, Any]:
        """The fields that a copy gets, without the lock; called under it."""
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def _borrowed(self) -> list[Any]:
        """Functions of the user, which may hold this object, and which a lock does not guard."""
        return []

    def __copy__(self) -> Self:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        with _registering:
            _owners.add(twin)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = memo[id(self)] = type(self).__new__(type(self))
        with self._lock:
            state = copy.deepcopy(self._copied(), memo)
        new.__setstate__(state)
        return new

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:  # others change what pickle comes to after this
            return copy.deepcopy(self._copied(), {id(one): one for one in self._borrowed()})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_lock()


def _take() -> None:
    """Acquire all locks before a fork, whatever order other threads acquire them in."""
    deadline = time.monotonic() + PATIENCE
    _registering.acquire()
    locks = [owner._lock for owner in list(_owners)]
    while time.monotonic() < deadline:
        for lock in locks:
            if not lock.acquire(timeout=EACH):
                break  # the thread that holds it may wait for one of ours
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
    """Renew the locks in a forked child, also those that other threads held."""
    taken = {id(lock) for lock in _taken}
    for owner in list(_owners):
        if id(owner._lock) not in taken:
            owner._lock._at_fork_reinit()
    _give()
