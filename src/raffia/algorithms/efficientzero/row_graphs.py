"""A function of rows as CUDA graphs: the networks of a search, whose kernels are small and many.

A search calls its networks once for each simulation, with as many rows as it has roots. On a GPU
starting the kernels takes longer than the kernels do; a graph starts all of them at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from raffia.nn.cudagraphs import Card, copy_each

Rows = tuple[Tensor, ...]


class _Graph(NamedTuple):
    given: Rows  # what it reads, [size, ...] each
    output: Rows  # what it writes
    replay: Callable[[], None]


class RowGraphs:
    """Records a function of rows as a CUDA graph, for each number of rows that there is room for.

    A call copies its rows into the smallest graph that holds them, replays it, and gives copies of
    as many rows. What the function reads besides, such as weights, stays where it is in memory.

    function: rows [B, ...] to rows [B, ...], none of which depends on the others.
    Raises ValueError where there is no GPU, and at a call for rows that are not on the current one.
    """

    def __init__(self, function: Callable[..., Rows]) -> None:
        if not torch.cuda.is_available():
            raise ValueError("cudagraphs=True records kernels of a GPU, and there is none here")
        self.function = function
        self._card = Card(None)
        self._graphs: dict[int, _Graph] = {}
        # What lies in a graph's memory is one call's until it is copied from there.
        self._lock = threading.Lock()

    @property
    def sizes(self) -> list[int]:
        """For how many rows there are graphs."""
        return sorted(self._graphs)

    @torch.no_grad()
    def __call__(self, *rows: Tensor) -> Rows:  # [B, ...] each
        """The function's outputs [B, ...]."""
        num = len(rows[0])
        size = room_for(num)
        with self._lock:
            graph = self._graphs.get(size)
            if graph is None:
                graph = self._graphs[size] = self._recorded(size, rows)
            copy_each([own[:num] for own in graph.given], rows)
            graph.replay()
            return tuple([part[:num].clone() for part in graph.output])

    def _recorded(self, size: int, rows: Rows) -> _Graph:
        if not self._card.holds(rows[0]):
            raise ValueError(
                "cudagraphs=True records kernels of a GPU, and these rows are on "
                f'{rows[0].device}: make it of model.to("cuda"), or leave cudagraphs out'
            )
        given = tuple([row.new_zeros(size, *row.shape[1:]) for row in rows])

        def run() -> Rows:
            return self.function(*given)

        self._card.warm(run)
        output, replay = self._card.record(run)
        return _Graph(given, output, replay)


def room_for(num: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, 24 ... that is at least `num`.

    >>> [room_for(num) for num in (1, 5, 9, 16, 17, 1000)]
    [1, 6, 12, 16, 24, 1024]
    """
    power = 1 << max(0, num - 1).bit_length()  # the least power of two
    return power * 3 // 4 if power >= 4 and num <= power * 3 // 4 else power
