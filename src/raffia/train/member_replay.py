"""Replay for a population: all members learn from one, or each from its own.

Legend: P members, B segments of each, T times, E environments, of which each member has E / P.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raffia.data.segment import SegmentReplayBuffer
from raffia.tensordict.stack import stack
from raffia.tensordict.tensordict import TensorDict


class SharedReplay:
    """One replay of all members' steps; they learn from the same segments.

    A segment's priority is the mean of its members' priorities, and what is searched again is that
    of the member that is named.

    >>> from raffia.data.storage import TensorStorage
    >>> buffer = SegmentReplayBuffer(TensorStorage(100), unroll_steps=1)
    >>> replay = SharedReplay(buffer, size=3)
    >>> no = torch.zeros(4, 6, dtype=torch.bool)
    >>> _ = replay.extend(TensorDict(
    ...     observation=no.int(), terminated=no, truncated=no, batch_size=[4, 6]
    ... ))
    >>> replay.sample(5)["observation"].shape
    torch.Size([3, 5, 2])
    """

    def __init__(self, buffer: SegmentReplayBuffer, size: int) -> None:
        self.buffers, self.size = [buffer], size
        self._buffer = buffer

    def __len__(self) -> int:
        """How many steps can be drawn."""
        return len(self._buffer)

    @property
    def beta(self) -> float | None:
        """Beta of the priorities; see `SegmentReplayBuffer`."""
        return self._buffer.beta

    @beta.setter
    def beta(self, beta: float) -> None:
        self._buffer.beta = beta

    def extend(self, steps: TensorDict) -> Tensor:
        """Append steps [T, E] of all members."""
        return self._buffer.extend(steps)

    def sample(self, batch_size: int) -> TensorDict:
        """Draw the same segments for each member [P, B]; "total" [P, B] is how many rows have come
        into the replay."""
        segments = _dated(self._buffer, batch_size)
        return segments.expand(self.size, *segments.batch_size)

    def contains(self, index: Tensor) -> Tensor:
        """Whether these numbers [P, B] are of steps that can be drawn and read."""
        return self._buffer.contains(index)

    def read(self, index: Tensor) -> TensorDict:
        """The segments [P, B] that start at these steps, the same for each member."""
        segments = self._buffer.read(index[0])
        return segments.expand(self.size, *segments.batch_size)

    def update_priority(self, index: Tensor, priority: Tensor) -> None:
        """index, priority: [P, B]; a member whose priority of a segment is NaN does not count
        there."""
        finite = priority.isfinite()
        mean = priority.where(finite, torch.nan).nanmean(0)
        known = finite.any(0)
        self._buffer.update_priority(index[0][known], mean[known])

    def update(self, fresh: TensorDict, best: int) -> None:
        """Write what a member's search found about its steps: "member", "step_index" [M] and the
        entries."""
        _update(self._buffer, fresh[fresh["member"] == best])


class OwnReplays:
    """A replay for each member, which learns from its own steps alone.

    >>> from raffia.data.storage import TensorStorage
    >>> buffers = [SegmentReplayBuffer(TensorStorage(100), unroll_steps=1) for _ in range(2)]
    >>> replay = OwnReplays(buffers)
    >>> no, row = torch.zeros(4, 6, dtype=torch.bool), torch.arange(6).expand(4, 6)
    >>> _ = replay.extend(TensorDict(
    ...     observation=row, terminated=no, truncated=no, batch_size=[4, 6]
    ... ))
    >>> replay.sample(50)["observation"].amin((1, 2))
    tensor([0, 3])
    """

    def __init__(self, buffers: Sequence[SegmentReplayBuffer]) -> None:
        self.buffers, self.size = list(buffers), len(buffers)

    def __len__(self) -> int:
        """How many steps can be drawn by the member that can draw the fewest."""
        return min(len(buffer) for buffer in self.buffers)

    @property
    def beta(self) -> float | None:
        """Beta of the priorities; see `SegmentReplayBuffer`."""
        return self.buffers[0].beta

    @beta.setter
    def beta(self, beta: float) -> None:
        for buffer in self.buffers:
            buffer.beta = beta

    def extend(self, steps: TensorDict) -> Tensor:
        """Append steps [T, E]: the first E / P environments are the first member's, and so on."""
        parts = steps.split(steps.batch_size[1] // self.size, 1)
        pairs = zip(self.buffers, parts, strict=True)
        return torch.cat([buffer.extend(part) for buffer, part in pairs], 1)

    def sample(self, batch_size: int) -> TensorDict:
        """Segments [P, B]; see `SharedReplay`. Each has a "total" by which total - index tells its
        age in rows of all members: of P rows that come in, one is its member's."""
        segments = stack([_dated(buffer, batch_size) for buffer in self.buffers])
        index = segments["index"]
        return segments.set("total", index + self.size * (segments["total"] - index))

    def contains(self, index: Tensor) -> Tensor:
        """Whether these numbers [P, B] are of steps that can be drawn and read."""
        pairs = zip(self.buffers, index, strict=True)
        return torch.stack([buffer.contains(at) for buffer, at in pairs])

    def read(self, index: Tensor) -> TensorDict:
        """The segments [P, B] that start at these steps, of each member its own."""
        return stack([buffer.read(at) for buffer, at in zip(self.buffers, index, strict=True)])

    def update_priority(self, index: Tensor, priority: Tensor) -> None:
        """index, priority: [P, B]; NaN leaves one as it was."""
        for buffer, at, new in zip(self.buffers, index, priority, strict=True):
            known = new.isfinite()
            buffer.update_priority(at[known], new[known])

    def update(self, fresh: TensorDict, best: int) -> None:
        """Write what each member's search found about its own steps."""
        for member, buffer in enumerate(self.buffers):
            _update(buffer, fresh[fresh["member"] == member])


def _dated(buffer: SegmentReplayBuffer, batch_size: int) -> TensorDict:
    segments = buffer.sample(batch_size)
    return segments.set("total", torch.full_like(segments["index"], buffer.storage.total))


def _update(buffer: SegmentReplayBuffer, fresh: TensorDict) -> None:
    if len(fresh):
        buffer.update(fresh["step_index"], fresh.exclude("step_index", "member"))
