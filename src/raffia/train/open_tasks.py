"""`OpenTasks`: what a loop has asked of workers and will take at a later update."""

from __future__ import annotations

from raffia.distributed.board import Board
from raffia.distributed.pool import Pool


class OpenTasks:
    """Tasks of a pool's workers, with the versions of weights that they name.

    Which task is asked for and taken when follows from the number of the update alone; so who does
    it, and how fast, changes no bit of a run.

    pool: the workers, which end with this; whoever made their engine closes it.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool, self.board = pool, Board(pool.engine)

    def _metrics(self, what: str, worker: str, num_open: int) -> dict[str, float]:
        """Open tasks, seconds waited and restarts so far."""
        return {f"{what}_open": float(num_open), **self.pool.metrics(what, worker)}

    def close(self) -> None:
        """End the workers."""
        self.pool.close()
        self.board.clear()
