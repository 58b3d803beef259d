"""Whether kernels are being compiled: that takes seconds in the first run on a machine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from numba.core import event


@contextlib.contextmanager
def compiling(enter: Callable[[], object], leave: Callable[[], object]) -> Iterator[None]:
    """Within this, `enter` is called when this thread begins to compile a kernel, `leave` after.

    Kernels that are found compiled on disk are none of these, nor are those that a kernel calls.

    >>> from raffia.jit.kernel import kernel
    >>> with compiling(lambda: print("compiling ..."), lambda: print("compiled")):
    ...     kernel(sum_of_three := lambda a, b, c: a + b + c)(1, 2, 3)
    compiling ...
    compiled
    6
    """
    with event.install_listener("numba:compile", _CompileListener(enter, leave)):
        yield


class _CompileListener(event.Listener):
    def __init__(self, enter: Callable[[], object], leave: Callable[[], object]) -> None:
        self._enter, self._leave = enter, leave
        self._thread, self._depth = threading.get_ident(), 0

    def on_start(self, event: Any) -> None:
        if threading.get_ident() == self._thread:
            self._depth += 1
            if self._depth == 1:
                self._enter()

    def on_end(self, event: Any) -> None:
        if threading.get_ident() == self._thread:
            self._depth -= 1
            if self._depth == 0:
                self._leave()
