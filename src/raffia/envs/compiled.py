"""Inner loops that are compiled where numba is, and run as plain Python where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raffia import jit

__all__ = ["compiled"]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A module-level function of whole numbers and arrays, compiled at its first call.

    The lines must mean the same in both: no number beyond 63 bits, as Python's do not wrap around.

    >>> compiled(abs_difference := lambda a, b: abs(a - b))(2, 5)
    3
    """
    if not jit.available():
        return function
    from raffia.jit.kernel import kernel

    return kernel(function)
