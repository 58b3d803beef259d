"""A container that is not there yet."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

Container = TypeVar("Container")


class TensorDictFuture(Generic[Container]):
    """A container that threads are still at work on; `result()` waits for it.

    >>> import tempfile, torch
    >>> from raffia import TensorDict
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     future = TensorDict(a=torch.ones(2)).memmap(folder, num_threads=2, return_early=True)
    ...     future.result()["a"]
    MemoryMappedTensor([1., 1.])
    """

    def __init__(self, work: Callable[[], Any], finish: Callable[[Any], Container]) -> None:
        background = ThreadPoolExecutor(1)
        self._work, self._finish = background.submit(work), finish
        background.shutdown(wait=False)
        self._td: Container | None = None

    def result(self) -> Container:
        """Wait until the work is done, and return the container."""
        done = self._work.result()
        if self._td is None:
            self._td = self._finish(done)
        return self._td
