"""Buffers and processes: what another process is sent is a copy, and a forked one finds locks free.

Tensors that torch.multiprocessing sends are shared memory; a buffer's rows would then change under
the other process, whose state would not tell: `by_value` sends their bytes.

A child of `os.fork`, as a worker that loads data, has no other thread than the one that forked, so
a lock that another thread held would never be free there. The thread that forks takes all locks
first, and both processes give them back: `survives_fork`.
"""

import os
import threading
import time
import weakref
from typing import Any, NamedTuple, Protocol

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


class HasLock(Protocol):
    """An object guarded by its own `_lock`."""

    _lock: Any


def survives_fork(owner: HasLock) -> None:
    """See to it that the lock of this object is free in a child that is forked.

    >>> from raffia.data.processes import survives_fork
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
