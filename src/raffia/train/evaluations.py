"""Evaluations that are played by workers while the loop continues, and joined at a later update.

What is evaluated are the weights after update u, and what comes of it is that update's: its row,
its score, and its checkpoint, which is saved at u. After update u + join_after it is waited for; so
who plays, and how fast, changes no bit of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from raffia.distributed.pool import Pool
from raffia.learner import step_of
from raffia.tensordict.tensordict import TensorDict
from raffia.train.ahead import OpenTasks

SLICE = 0.2  # seconds between two looks at whether the run is to stop


class Joined(NamedTuple):
    """An evaluation that was waited for.

    >>> Joined(500, 2_000, Evaluated(1.0, {})).update
    500
    """

    update: int  # whose weights were evaluated
    at: int  # steps of the environments then, or updates where none are played
    outcome: Outcome


class Evaluations(OpenTasks):
    """Open evaluations: asked for with the weights of an update, joined in their order.

    pool: the workers. The answer to a task {"count"} with an update's weights is what
        `outcome(update, count, answer)` makes an `Outcome` of.
    join_after: updates from the one that is evaluated to the one that waits for it.
    acting: of a learner's state what an evaluation needs of it.
    is_used: whether evaluations begin here; else those that an earlier session began are joined.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        join_after: int,
        acting: Callable[[TensorDict], TensorDict],
        outcome: Callable[[int, int, TensorDict], Outcome],
        is_used: bool = True,
    ) -> None:
        super().__init__(pool)
        self.is_used = is_used
        self.join_after, self._acting, self._outcome = join_after, acting, outcome
        self._open: dict[int, int] = {}  # update -> count, rising
        self._worker_of: dict[int, int] = {}
        self._num_asked = 0

    @property
    def is_on(self) -> bool:
        """Whether workers play evaluations, or evaluations of an earlier session are open."""
        return self.is_used or bool(self._open)

    @property
    def updates(self) -> list[int]:
        """The updates whose evaluations are open."""
        return list(self._open)

    @property
    def latest_count(self) -> int | None:
        """The count of the newest open evaluation."""
        return next(reversed(self._open.values()), None)

    def begin(self, state: TensorDict, count: int) -> None:
        """Ask for the evaluation of this state."""
        self.board.publish(step_of(state), self._acting(state))
        self._ask(step_of(state), count)

    def _ask(self, update: int, count: int) -> None:
        worker = self._num_asked % self.pool.num_workers
        self._num_asked += 1
        self._open[update], self._worker_of[update] = count, worker
        asked = TensorDict(count=torch.tensor(count, device="cpu"))
        self.pool.ask(worker, update, asked, self.board.ref(update))

    def is_due(self, update: int) -> bool:
        """Whether the oldest evaluation must be joined before the loop continues."""
        oldest = next(iter(self._open), None)
        return oldest is not None and oldest + self.join_after <= update

    def join(self, stop: Callable[[], bool] = lambda: False) -> Joined | None:
        """Wait for the oldest; None if `stop` asked to stop meanwhile, and it stays open."""
        update, count = next(iter(self._open.items()))
        worker = self._worker_of[update]
        answer = None
        while answer is None:
            if stop():
                return None
            answer = self.pool.try_to_take(worker, update, SLICE)
        del self._open[update], self._worker_of[update]
        self.board.drop_below(next(iter(self._open), update + 1))
        return Joined(update, count, self._outcome(update, count, answer))

    def metrics(self) -> dict[str, float]:
        """Open evaluations and seconds waited for them; empty if evaluations are not played
        elsewhere.
        """
        return self._metrics("evaluations", "evaluator", len(self._open)) if self.is_on else {}

    def state(self) -> TensorDict:
        """The open evaluations with their weights; nothing if there are none."""
        if not self._open:
            return TensorDict()
        counts = torch.tensor(list(self._open.values()), device="cpu")
        return TensorDict(counts=counts, weights=self.board.state())

    def load_state(self, state: TensorDict) -> None:
        """Ask again for the evaluations that were open."""
        self.pool.reset()
        self._open, self._worker_of, self._num_asked = {}, {}, 0
        if state.is_empty():
            self.board.clear()
            return
        self.board.load_state(state["weights"])
        for update, count in zip(self.board.versions, state["counts"].tolist(), strict=True):
            self._ask(update, count)


class Outcome(Protocol):
    """The outcome of an evaluation: `Episodes`, `Evaluated` ...

    >>> from raffia.train.evaluate import Episodes
    >>> outcome: Outcome = Episodes([1.0, 3.0], [5, 6])
    >>> outcome.score
    2.0
    """

    @property
    def score(self) -> float:
        """The outcome's score: the larger the better."""

    @property
    def values(self) -> Mapping[str, Any]:
        """The values of its row."""


@dataclass(frozen=True)
class Evaluated:
    """An outcome of any kind.

    >>> Evaluated(score=-0.25, values={"loss": 0.25}).score
    -0.25
    """

    score: float  # the larger the better
    values: Mapping[str, Any]  # values of its row
