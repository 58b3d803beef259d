"""Metrics of a run, on their way to files: means since the last row, and times."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from raffia.tensordict.tensordict import TensorDict

MOST_PENDING = 256  # additions that are collected before they are summed


class RunningMeans:
    """Means of values since they were last taken; no tensor is waited for before.

    >>> means = RunningMeans()
    >>> means.add({"loss": torch.tensor(1.0), "length": 4})
    >>> means.add({"loss": torch.tensor(2.0)})
    >>> sorted(means.take().items()), means.take()
    ([('length', 4.0), ('loss', 1.5)], {})
    """

    def __init__(self) -> None:
        self._new: list[tuple[list[tuple[str, int]], Tensor]] = []  # names and sizes, values
        self._sums: dict[str, tuple[float, int]] = {}  # sum, and number of values

    def add(self, values: TensorDict | Mapping[str, Tensor | float]) -> None:
        """Add values; each element of a tensor counts as one.

        values: numbers, and tensors, which are on one device.

        >>> means = RunningMeans()
        >>> means.add(TensorDict(priority=torch.tensor([1.0, 4.0])))
        >>> means.take()
        {'priority': 2.5}
        """
        layout, tensors = [], []
        for name, value in values.items():
            if isinstance(value, Tensor):
                layout.append((name, value.numel()))
                tensors.append(value.detach().reshape(-1))
            else:
                self._count(name, float(value), 1)
        if tensors:
            # A copy: a compiled learner may write its next metrics to the same memory.
            self._new.append((layout, torch.cat(tensors)))
        if len(self._new) == MOST_PENDING:
            self._sum()

    def take(self) -> dict[str, float]:
        """The means by name; it starts again."""
        self._sum()
        means = {name: total / count for name, (total, count) in self._sums.items() if count}
        self._sums = {}
        return means

    def state(self) -> dict[str, list[float]]:
        """The values that were not taken yet, as JSON can hold them; for `load_state`.

        >>> means, other = RunningMeans(), RunningMeans()
        >>> means.add({"loss": 0.5})
        >>> other.load_state(means.state())
        >>> other.take()
        {'loss': 0.5}
        """
        self._sum()
        return {name: [total, count] for name, (total, count) in self._sums.items()}

    def load_state(self, state: Mapping[str, list[float]]) -> None:
        """Load the state that `state` gave."""
        self._new = []
        self._sums = {name: (float(total), int(count)) for name, (total, count) in state.items()}

    def _count(self, name: str, total: float, count: int) -> None:
        before, counted = self._sums.get(name, (0.0, 0))
        self._sums[name] = before + total, counted + count

    def _sum(self) -> None:
        """Fetch the values since the last time, in one transfer."""
        if not self._new:
            return
        values = torch.cat([tensor for _, tensor in self._new]).to("cpu", torch.float64).tolist()
        start = 0
        for layout, _ in self._new:
            for name, size in layout:
                self._count(name, sum(values[start : start + size]), size)
                start += size
        self._new = []


class PhaseClock:
    """A clock of the seconds that each phase of the loop took since they were last taken.

    A phase within another takes its time away from that one. On a GPU, work counts for the phase
    that waits for it.

    >>> ticks = iter([0.0, 1.0, 3.0, 4.5]).__next__  # seconds; by default the clock of the system
    >>> clock = PhaseClock(now=ticks)
    >>> with clock.phase("learn"):
    ...     with clock.phase("targets"):
    ...         pass
    >>> clock.take()
    {'seconds_learn': 2.5, 'seconds_targets': 2.0}
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._spent: dict[str, float] = {}
        self._inside: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time within the block for the phase of this name.

        >>> clock = PhaseClock()
        >>> with clock.phase("learn"):
        ...     pass
        >>> list(clock.take())
        ['seconds_learn']
        """
        self._spent.setdefault(name, 0.0)
        self._count()
        self._inside.append(name)
        try:
            yield
        finally:
            self._count()
            self._inside.pop()

    def take(self) -> dict[str, float]:
        """Seconds by "seconds_" and the phase; it starts again."""
        if self._inside:
            self._count()
        spent = {f"seconds_{name}": seconds for name, seconds in self._spent.items()}
        self._spent = dict.fromkeys(self._spent, 0.0)
        return spent

    def _count(self) -> None:
        now = self._now()
        if self._inside:
            self._spent[self._inside[-1]] += now - self._since
        self._since = now
