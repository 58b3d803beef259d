"""`SegmentSteps`: the steps of a segment buffer, as they come in and by their numbers.

Legend: T times, E environments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raffia.data.buffer import Buffer
from raffia.data.priorities import StepPriorities
from raffia.data.ring import EpisodeRing
from raffia.data.row_feed import RowFeed
from raffia.data.segment_batches import ADDED, StoredRows
from raffia.data.steps import (
    StepKeys,
    StoredSteps,
    different,
    in_parts,
    numbers,
    several,
    take_steps,
    with_entries,
    with_priorities,
)
from raffia.data.storage import Storage
from raffia.tensordict.collection import TensorDictBase
from raffia.tensordict.keys import NestedKey, unravel_key_to_tuple
from raffia.tensordict.tensordict import TensorDict


class SegmentSteps(Buffer):
    """Steps of episodes in a ring: appended, and read or changed by number; a subclass draws them.

    >>> from raffia.data.segment import SegmentReplayBuffer
    >>> issubclass(SegmentReplayBuffer, SegmentSteps)
    True
    """

    storage: Storage
    num_ignored: int  # priorities and updates that came too late
    _keys: StepKeys
    _rows: StoredRows
    _ring: EpisodeRing
    _priorities: StepPriorities
    _feeds: list[RowFeed]  # copies of an entry elsewhere, notified before rows are overwritten

    def __len__(self) -> int:
        """How many steps can be drawn."""
        return len(self._ring)

    @property
    def num_episodes(self) -> int:
        """The number of stored episodes, finished or not."""
        return self._ring.num_episodes

    @property
    def beta(self) -> float | None:
        """How much of the bias the weights undo; None without priorities."""
        return self._priorities.beta

    @beta.setter
    def beta(self, beta: float) -> None:
        with self._lock:
            self._before_change()
            self._priorities.raise_beta(beta)

    @property
    def importance(self) -> str:
        """The set in which the largest weight is 1: "batch" or "buffer"."""
        return self._priorities.importance

    # -- steps come in

    def extend(
        self,
        steps: TensorDict,
        env: int | Sequence[int] | Tensor | None = None,
        *,
        priority: Tensor | None = None,
    ) -> Tensor:
        """Append steps; returns their numbers [T] or [T, E], which count up for ever.

        steps: [T], consecutive steps of one environment; or [T, E], of several at the same times,
            as a `Collector` gives them: flattened they would pass for those of one.
        env: which ones, any numbers from 0 on: one, or E different ones. Without it they are 0 to
            E - 1. An environment's steps continue those of the call before.
        priority: [T] or [T, E], of the steps; without it new steps have the largest so far.
        Raises KeyError, ValueError or TypeError, and changes nothing, if the steps are not as they
        should be.

        >>> from raffia.data.segment import SegmentReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> buffer = SegmentReplayBuffer(TensorStorage(100), unroll_steps=1)
        >>> no = torch.zeros(2, 3, dtype=torch.bool)
        >>> obs = torch.arange(6).view(2, 3)  # two steps of each of three environments
        >>> buffer.extend(TensorDict(
        ...     observation=obs, terminated=no, truncated=no, batch_size=[2, 3]
        ... ))
        tensor([[0, 1, 2],
                [3, 4, 5]])
        >>> len(buffer)  # the second steps cannot be drawn until the third are there
        3
        """
        if not isinstance(steps, TensorDictBase):
            raise TypeError(
                f"steps must be a TensorDict [T] or [T, E]; got a {type(steps).__name__}"
            )
        shape = steps.batch_size
        if len(shape) not in (1, 2):
            raise ValueError(
                f"steps must have the batch size [T] or [T, E]; got {list(shape)}: to add one "
                "step, of one environment or of several, call buffer.add(step)"
            )
        if len(shape) == 1:
            steps = steps.unsqueeze(1)
        envs = several(env, steps.batch_size[1])
        if priority is not None:
            if priority.shape != shape:
                raise ValueError(
                    f"steps {list(shape)} need priorities of the same shape; got "
                    f"{list(priority.shape)}"
                )
            self._priorities.check(priority)
            priority = priority.detach().reshape(steps.batch_size).cpu()
        with self._lock:
            self._before_change()
            self._check(steps, len(envs))
            taken = take_steps(steps, self._keys, self.storage.structure)
            if not steps.numel():
                return torch.empty(shape, dtype=torch.int64, device="cpu")
            for feed in self._feeds:
                feed.before_extend(steps.numel() + int(taken.ends.sum()))
            try:
                return self._extend(taken, envs, priority).view(shape)
            except BaseException:  # such as a full disk
                self._skip()
                raise

    def _check(self, steps: TensorDict, num_envs: int) -> None:
        """Raise what keeps any steps of these names from being stored."""
        if self.storage.total != self._ring.total:
            raise RuntimeError(
                f"{self.storage.total} items have been appended to the storage, but this buffer "
                f"knows of {self._ring.total}: a storage belongs to one buffer. For a storage "
                "that was opened again, call buffer.load(folder) first, which restores which rows "
                "belong together as of the last buffer.save(folder); if it was never saved, start "
                "over with buffer.empty()"
            )
        if 2 * num_envs > self._ring.num_rows:
            raise ValueError(
                f"{num_envs} environments can end at the same time, which takes {2 * num_envs} "
                f"rows, but the storage has max_size={self._ring.num_rows}: use a larger one"
            )
        taken = [name for name in ADDED if name in steps.keys()]
        if taken:
            raise ValueError(
                f"the entry names {', '.join(ADDED)} are reserved for samples: rename your "
                f"{', '.join(map(repr, taken))}, for example to {'step_' + taken[0]!r}"
            )

    def _extend(self, steps: StoredSteps, env: Tensor, priority: Tensor | None) -> Tensor:
        num_closed, items = 0, []
        for part in in_parts(steps.ends, self._ring.num_rows):
            ends = steps.ends[part]
            num_ends, rows = int(ends.sum()), slice(part.start * len(env), part.stop * len(env))
            self.storage.append(steps.structure, [leaf[rows] for leaf in steps.rows])
            if num_ends:
                closing = [leaf[num_closed : num_closed + num_ends] for leaf in steps.closing]
                self.storage.append(steps.structure, closing)
                num_closed += num_ends
            change = self._ring.append(steps.terminated[part], steps.truncated[part], env)
            if priority is not None or self._priorities.expects:
                given = None if priority is None else priority[part].reshape(-1)
                self._priorities.expect(self._ring.row(change.item.view(-1)), given)
            self._priorities.set(change.lost, 0.0)
            self._priorities.admit(change.won)
            items.append(change.item)
        return torch.cat(items) if len(items) > 1 else items[0]

    def add(
        self,
        step: TensorDict,
        env: int | Sequence[int] | Tensor | None = None,
        *,
        priority: Tensor | None = None,
    ) -> Tensor:
        """Append one step [] of one environment, or [E] of several; returns numbers [] or [E].

        >>> from raffia.data.segment import SegmentReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> buffer = SegmentReplayBuffer(TensorStorage(100), unroll_steps=1)
        >>> no = torch.tensor([False, False])
        >>> step = TensorDict(
        ...     observation=torch.randn(2, 3), terminated=no, truncated=no, batch_size=[2]
        ... )
        >>> buffer.add(step), buffer.add(step[0], env=1)
        (tensor([0, 1]), tensor(2))
        """
        if priority is not None:
            priority = priority.unsqueeze(0)
        return self.extend(step.unsqueeze(0), env, priority=priority)[0]

    def cut(self, env: int | Sequence[int] | Tensor | None = None) -> int:
        """Cut off unfinished episodes, as after a resume, when environments start over.

        env: of which environments; without it of all. Returns how many episodes were broken off.

        The newest step of each becomes the closing row, as the observation after it is not known.
        The episode is truncated there.

        >>> from raffia.data.segment import SegmentReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> buffer = SegmentReplayBuffer(TensorStorage(100), unroll_steps=5)
        >>> no = torch.zeros(3, dtype=torch.bool)
        >>> steps = TensorDict(
        ...     observation=torch.arange(3), terminated=no, truncated=no, batch_size=[3]
        ... )
        >>> _ = buffer.extend(steps)
        >>> buffer.cut(), len(buffer)
        (1, 2)
        """
        with self._lock:
            self._before_change()
            cut = self._ring.cut(None if env is None else different(env))
            self._priorities.set(cut.lost, 0.0)
            self._priorities.admit(cut.won)
            self._rows.close(cut.closing, cut.before[cut.before != cut.closing])
            return len(cut.closing)

    def _skip(self) -> None:
        """Continue after the stored items; episodes with missing steps are cut there."""
        missed = self.storage.total - self._ring.total
        if missed > 0:
            self.cut()
            self._priorities.set(self._ring.skip(missed), 0.0)

    # -- steps by their numbers

    def contains(self, index: Tensor) -> Tensor:
        """Whether these numbers are of steps that can be drawn and read: bool, of the shape of
        index.

        >>> from raffia.data.segment import SegmentReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> SegmentReplayBuffer(TensorStorage(100), unroll_steps=1).contains(torch.tensor([0]))
        tensor([False])
        """
        with self._lock:
            return self._ring.can_draw(numbers(index))

    def entry(self, key: NestedKey, index: Tensor) -> Tensor:
        """A stored entry of some rows [n] by their numbers: a copy [n, ...].

        >>> from raffia.data.segment import SegmentReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> buffer = SegmentReplayBuffer(TensorStorage(100), unroll_steps=1)
        >>> no = torch.zeros(3, dtype=torch.bool)
        >>> index = buffer.extend(TensorDict(
        ...     observation=torch.arange(3), terminated=no, truncated=no, batch_size=[3]))
        >>> buffer.entry("observation", index[1:])
        tensor([1, 2])
        """
        index = numbers(index)
        with self._lock:
            gone = index[~self._ring.holds(index)]
            if len(gone):
                raise IndexError(
                    f"row {int(gone[0])} (and {len(gone) - 1} more) is not in the buffer"
                )
            return self.storage.entry(unravel_key_to_tuple(key), self._ring.row(index))

    def later(self, index: Tensor, fraction: Tensor) -> Tensor:
        """The number of a later state in the episode of each step [n], for `entry`.

        index: numbers of steps that can be drawn.
        fraction: [n] float64 in [0, 1), how far on: 0 gives the next state, and uniform numbers
            give those after with equal probability, the closing row included.
        Raises IndexError for other numbers.

        >>> from raffia.data.segment import SegmentReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> buffer = SegmentReplayBuffer(TensorStorage(100), unroll_steps=1)
        >>> no = torch.zeros(9, dtype=torch.bool)
        >>> _ = buffer.extend(TensorDict(
        ...     observation=torch.arange(9), terminated=no, truncated=no, batch_size=[9]))
        >>> later = buffer.later(torch.tensor([2, 2]), torch.tensor([0, 0.9], dtype=torch.float64))
        >>> buffer.entry("observation", later)
        tensor([3, 8])
        """
        index = numbers(index)
        with self._lock:
            self._refuse_undrawable(index)
            return self._ring.item(self._ring.later(self._ring.row(index), fraction))

    def _refuse_undrawable(self, index: Tensor) -> None:
        unknown = index[~self._ring.can_draw(index)]
        if len(unknown):
            raise IndexError(
                f"step {int(unknown[0])} (and {len(unknown) - 1} more) cannot be read: it was "
                "overwritten, or has too few rows after it yet, or is not a step. "
                "buffer.contains(index) tells which can be read"
            )

    # -- what is known better later

    def update_priority(self, index: Tensor, priority: Tensor | float) -> int:
        """Change the priorities of steps; returns how many were left out, as they are gone.

        index: numbers of steps, as a sample's "index". Of a number that occurs twice, the last
            counts.
        priority: of the same shape, or one for all; finite and >= 0.
        Raises ValueError for another priority, IndexError for a number that there never was;
        nothing is changed then.

        >>> from raffia.data.segment import SegmentReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> buffer = SegmentReplayBuffer(TensorStorage(100), unroll_steps=0, alpha=0.6, beta=0.4)
        >>> no = torch.zeros(9, dtype=torch.bool)
        >>> steps = TensorDict(
        ...     observation=torch.arange(9), terminated=no, truncated=no, batch_size=[9]
        ... )
        >>> _ = buffer.extend(steps)
        >>> buffer.update_priority(torch.tensor([3, 5]), torch.tensor([0.5, 2.0]))
        0
        """
        index, priority = with_priorities(index, priority)
        self._priorities.require()
        with self._lock:
            self._before_change()
            try:
                gone = self._priorities.update(
                    index, priority, self._ring.live, self._ring.drawable
                )
            except IndexError:
                self._refuse_unknown(index, 0)
                raise
            return self._ignored(gone)

    def probability(self, index: Tensor) -> Tensor:
        """The current probability of drawing each of these steps: float64, of index's shape.

        0 for steps that cannot be drawn.

        >>> from raffia.data.segment import SegmentReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> buffer = SegmentReplayBuffer(
        ...     TensorStorage(100), unroll_steps=0, alpha=1.0, beta=0.4, eps=0.0)
        >>> no = torch.zeros(2, dtype=torch.bool)
        >>> steps = TensorDict(
        ...     observation=torch.arange(2), terminated=no, truncated=no, batch_size=[2]
        ... )
        >>> index = buffer.extend(steps, priority=torch.tensor([1.0, 3.0]))
        >>> buffer.probability(index)
        tensor([0.2500, 0.7500], dtype=torch.float64)
        """
        index = numbers(index)
        with self._lock:
            here = self._ring.can_draw(index)
            found = self._priorities.probability(self._ring.row(index))
        return torch.where(here, found, 0.0)

    def least_probability(self) -> float:
        """The least probability of all steps that can be drawn; inf if no step can be drawn.

        >>> from raffia.data.segment import SegmentReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> SegmentReplayBuffer(TensorStorage(100), unroll_steps=0).least_probability()
        inf
        """
        with self._lock:
            return self._priorities.least_probability()

    def check_priority(self, priority: Tensor) -> None:
        """Raise ValueError for an invalid priority; TypeError for a buffer without priorities.

        >>> from raffia.data.segment import SegmentReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> buffer = SegmentReplayBuffer(TensorStorage(100), unroll_steps=0, alpha=1.0, beta=0.4)
        >>> buffer.check_priority(torch.tensor([-1.0]))
        Traceback (most recent call last):
        ...
        ValueError: a priority must be finite and >= 0 (and at most 9e+305); got -1. For errors ...
        """
        self._priorities.check(priority)

    def update(self, index: Tensor, entries: TensorDict) -> int:
        """Write entries of stored rows; returns how many were left out, as they are gone.

        index: numbers of rows, such as a sample's "step_index" or a part of it; -1 is passed over.
            Of a number that occurs twice, the last counts.
        entries: of the batch size `index.shape`: any of the stored ones, but for the flags that
            mark where episodes end. To closing rows only those of `observation_keys` are written.
            Of stacked frames it is the newest one that is stored.
        Raises KeyError, ValueError or IndexError, and changes nothing, if they don't fit.

        >>> from raffia.data.segment import SegmentReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> buffer = SegmentReplayBuffer(TensorStorage(100), unroll_steps=1)
        >>> no = torch.zeros(9, dtype=torch.bool)
        >>> steps = TensorDict(observation=torch.arange(9), value=torch.zeros(9), batch_size=[9])
        >>> _ = buffer.extend(steps.update(dict(terminated=no, truncated=no)))
        >>> index = buffer.read(torch.tensor([4]))["step_index"]
        >>> buffer.update(index, TensorDict(value=torch.tensor([[0.5, 0.25]]), batch_size=[1, 2]))
        0
        >>> buffer.read(torch.tensor([3, 4]))["value"]
        tensor([[0.0000, 0.5000],
                [0.5000, 0.2500]])
        """
        index = with_entries(index, entries)
        with self._lock:
            self._before_change()
            values = self._rows.fitting(entries.reshape(-1))
            found = self._ring.find(index.reshape(-1))
            if found is None:
                self._refuse_unknown(index, -1)
            assert found is not None
            position, rows, is_step = found
            if len(rows) < index.numel():
                values = {path: value[position.to(value.device)] for path, value in values.items()}
            if len(rows):
                self._rows.write(rows, values, is_step)
            return self._ignored(int((index >= 0).sum()) - len(rows))

    def _ignored(self, count: int) -> int:
        self.num_ignored += count
        return count

    def _refuse_unknown(self, index: Tensor, least: int) -> None:
        wrong = index[(index < least) | (index >= self._ring.total)]
        if len(wrong):
            raise IndexError(
                f"there is no step {int(wrong[0])}: only {self._ring.total} rows have been added "
                'so far. Pass the "index" or "step_index" of a sample. Nothing was changed'
            )

    def empty(self) -> None:
        """Throw all steps away; numbers start at 0 again.

        >>> from raffia.data.segment import SegmentReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> SegmentReplayBuffer(TensorStorage(100), unroll_steps=1).empty()
        """
        with self._lock:
            self._before_change()
            self.storage.clear()
            self._ring.clear()
            self._priorities.clear()
