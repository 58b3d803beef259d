"""The error that ends a command early."""

from __future__ import annotations


class UsageError(Exception):
    """A wrong call: what was wrong, and the calls that work.

    >>> error = UsageError("there is no preset 'cartpol'", "raffia list presets")
    >>> print(error, error.calls)
    there is no preset 'cartpol' ('raffia list presets',)
    """

    def __init__(self, message: str, *calls: str) -> None:
        super().__init__(message)
        self.calls = calls
