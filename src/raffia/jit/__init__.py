"""Compiled inner loops: whether numba is here, asked without importing it (import takes 0.3 s)."""

import functools
import importlib.util

__all__ = ["available"]


@functools.cache
def available() -> bool:
    """Whether kernels can be compiled here; where not, rooms use their tensor versions instead.

    >>> available() in (True, False)
    True
    """
    return importlib.util.find_spec("numba") is not None
