"""Streams of batches: the only part where learning online and from a fixed data set differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

from raffia.learner import step_of
from raffia.tensordict.tensordict import TensorDict
from raffia.train.ahead import BatchesAhead
from raffia.train.collect import Act
from raffia.train.ledger import EndedEpisode
from raffia.train.metrics import PhaseClock

BeginRollout = Callable[[TensorDict], Act]  # a learner's state -> how to act from now on
MakeBatch = Callable[[TensorDict, TensorDict], TensorDict]  # a learner's state, segments -> batch


class Stream(Protocol):
    """The source of the loop's batches."""

    @property
    def num_env_steps(self) -> int:
        """How many steps were played so far; 0 if none are."""

    def next(self, state: TensorDict) -> TensorDict:
        """The batch of the update that comes next; `state` is the learner's."""

    def on_update(self, batch: TensorDict, metrics: TensorDict) -> None:
        """Take note that the update of this batch was made."""

    def take_ended(self) -> list[EndedEpisode]:
        """The episodes that have ended since the last call."""

    def state(self) -> TensorDict:
        """The state of the stream, but for the replay's own."""

    def load_state(self, state: TensorDict) -> None:
        """Load a state that `state` gave."""


class Replay(Protocol):
    """The replay of a stream: steps go in, segments come out: `SegmentReplayBuffer` and others."""

    beta: Any  # beta of the priorities; None where there are none

    def __len__(self) -> int:
        """How many steps can be drawn."""

    def extend(self, steps: TensorDict) -> Tensor:
        """Append steps [T, E]."""

    def sample(self, batch_size: int) -> TensorDict:
        """Windows."""

    def update_priority(self, index: Tensor, priority: Tensor) -> Any:
        """Update the priorities of segments that were learnt from."""


class Source(Protocol):
    """Where steps come from: a `Collector`, or `Turns` of actors."""

    @property
    def num_env_steps(self) -> int:
        """How many steps were played so far, of all environments together."""

    def take_ended(self) -> list[EndedEpisode]:
        """The episodes that have ended since the last call."""

    def state(self) -> TensorDict:
        """The state of the environments."""

    def load_state(self, state: TensorDict) -> None:
        """Load a state of `state`."""


class OnlineStream:
    """Batches of played steps: plays, stores the steps, and draws so many batches for each step.

    begin_rollout: from the learner's state to how its agent acts; asked before each turn.
    act_first: how to act in the first `random_env_steps`.
    make_batch: from the learner's state and segments of the replay to a batch.
    ahead: makes the batches instead, elsewhere and before they are due.
    updates_per_env_step: update u comes after random_env_steps + u / updates_per_env_step steps of
        all environments together, or after num_env_steps if that is less.
    beta: of the priorities, by the number of the update.

    >>> from raffia.data.segment import SegmentReplayBuffer
    >>> from raffia.data.storage import TensorStorage
    >>> from raffia.envs.batch import SerialBatch
    >>> from raffia.envs.probe import ValueProbe
    >>> from raffia.train.collect import Collector
    >>> from raffia.train.metrics import PhaseClock
    >>> def first(state):
    ...     return TensorDict(action=torch.zeros(2, dtype=torch.int64), batch_size=[2])
    >>> replay = SegmentReplayBuffer(
    ...     TensorStorage(100), unroll_steps=1, observation_keys=["observation"],
    ...     generator=torch.Generator().manual_seed(0))
    >>> stream = OnlineStream(
    ...     Collector(SerialBatch([ValueProbe(), ValueProbe()]), seed=0), replay,
    ...     begin_rollout=lambda state: first, act_first=first,
    ...     make_batch=lambda state, segments: segments, batch_size=3, updates_per_env_step=0.5,
    ...     random_env_steps=4, num_env_steps=10, rollout_length=1, clock=PhaseClock())
    >>> state = TensorDict(step=torch.tensor(0))
    >>> stream.next(state)["reward"][:, 0], stream.num_env_steps
    (tensor([1., 1., 1.]), 6)
    """

    def __init__(
        self,
        collector: Source,
        replay: Replay,
        *,
        begin_rollout: BeginRollout,
        act_first: Act,
        make_batch: MakeBatch,
        ahead: BatchesAhead | None = None,
        batch_size: int,
        updates_per_env_step: float,
        random_env_steps: int,
        num_env_steps: int,
        rollout_length: int = 1,
        clock: PhaseClock,
        beta: Callable[[int], float] | None = None,
    ) -> None:
        self.collector: Any = collector
        self.replay = replay
        self._begin_rollout, self._act_first, self._make_batch = (
            begin_rollout,
            act_first,
            make_batch,
        )
        self._batch_size, self._ratio = batch_size, updates_per_env_step
        self._first, self._last = random_env_steps, num_env_steps
        self._rollout_length = rollout_length
        self._clock, self._beta, self._ahead = clock, beta, ahead

    @property
    def num_env_steps(self) -> int:
        """How many steps were played so far, of all environments together."""
        num: int = self.collector.num_env_steps
        return num

    def next(self, state: TensorDict) -> TensorDict:
        """Play what is due, then draw segments and make a batch of them."""
        update = step_of(state)
        if self._ahead is not None:
            self._ahead.ask_again()  # before the ring overwrites what was drawn
        due = min(self._last, self._first + math.ceil((update + 1) / self._ratio))
        with self._clock.phase("collect"):
            while self.num_env_steps < due or not len(self.replay):
                self._turn(state)
        with self._clock.phase("targets"):
            if self._ahead is not None:
                return self._ahead.next(state, self._draw)
            return self._make_batch(state, self._draw(update))

    def _draw(self, update: int) -> TensorDict:
        """The segments of an update's batch."""
        if self._beta is not None:
            self.replay.beta = self._beta(update)
        return self.replay.sample(self._batch_size)

    def _turn(self, state: TensorDict) -> None:
        act = self._act_first if self.num_env_steps < self._first else self._begin_rollout(state)
        self._extend(self.collector.collect(act, self._rollout_length))

    def _extend(self, steps: TensorDict) -> None:
        self.replay.extend(steps.exclude("continues"))

    def on_update(self, batch: TensorDict, metrics: TensorDict) -> None:
        """Write the batch's priorities back to the replay."""
        if self.replay.beta is not None:
            self.replay.update_priority(batch["index"].cpu(), metrics["priority"].cpu())

    def take_ended(self) -> list[EndedEpisode]:
        """The episodes that have ended since the last call."""
        ended: list[EndedEpisode] = self.collector.take_ended()
        return ended

    def state(self) -> TensorDict:
        """The state of the environments and of open batches; the replay is saved by itself."""
        state = TensorDict(collector=self.collector.state())
        ahead = TensorDict() if self._ahead is None else self._ahead.state()
        return state if ahead.is_empty() else state.set("ahead", ahead)

    def load_state(self, state: TensorDict) -> None:
        """Restore the environments, and what was drawn ahead; else it is drawn again when due."""
        self.collector.load_state(state["collector"])
        if self._ahead is not None:
            self._ahead.load_state(state["ahead"] if "ahead" in state.keys() else TensorDict())


class OfflineStream:
    """Batches of a fixed data set.

    batches: from the number of an update to the batches from there on; so a resume needs nothing
        but the number.

    >>> def batches(update):
    ...     while True:
    ...         yield TensorDict(x=torch.tensor([float(update)]), batch_size=[1])
    ...         update += 1
    >>> stream = OfflineStream(batches)
    >>> stream.next(TensorDict(step=torch.tensor(3)))["x"]
    tensor([3.])
    """

    def __init__(self, batches: Callable[[int], Iterator[TensorDict]]) -> None:
        self._batches = batches
        self._going: Iterator[TensorDict] | None = None

    @property
    def num_env_steps(self) -> int:
        """0: no environment is played."""
        return 0

    def next(self, state: TensorDict) -> TensorDict:
        """The batch of this update."""
        if self._going is None:
            self._going = self._batches(step_of(state))
        return next(self._going)

    def on_update(self, batch: TensorDict, metrics: TensorDict) -> None:
        """A fixed data set has no priorities."""

    def take_ended(self) -> list[EndedEpisode]:
        """No episodes are played."""
        return []

    def state(self) -> TensorDict:
        """The empty state: the number of the update is all of it."""
        return TensorDict()

    def load_state(self, state: TensorDict) -> None:
        """Continue at the update of the learner's state."""
        self._going = None


__all__ = ["BeginRollout", "MakeBatch", "OfflineStream", "OnlineStream", "Replay", "Stream"]
