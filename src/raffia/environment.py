"""Variables of the process's environment that hold within a block."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment within the block.

    >>> with environment({"RAFFIA_EXAMPLE": "1"}):
    ...     os.environ["RAFFIA_EXAMPLE"]
    '1'
    >>> "RAFFIA_EXAMPLE" in os.environ
    False
    """
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
