"""The process's environment: variables that hold within a block, and the cores it may use."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


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


def usable_cores() -> int:
    """The number of cores that this process may use: those it is bound to, and no more than its
    container's quota.

    >>> 1 <= usable_cores() <= os.cpu_count()
    True
    """
    bound = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return bound
    if quota == "max":
        return bound
    return max(1, min(bound, int(quota) // int(period)))
