"""`SegmentReplayBuffer`: segments of consecutive steps out of a ring, for learning by unrolling.

Legend: T times, E environments, B segments, L rows in a segment, S frames in a stack.
"""

from __future__ import annotations

import contextlib
import operator
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raffia.data.buffer import Buffer, check_generator, check_options, own_generator
from raffia.data.buffer_state import BufferState, check_entries
from raffia.data.forking import survives_fork
from raffia.data.prefetch import Prefetcher
from raffia.data.ring import CLOSED_TERMINATED, EpisodeRing
from raffia.data.row_feed import RowFeed
from raffia.data.segment_batches import ADDED, SegmentMaker, frame_stacks
from raffia.data.segment_rows import StoredRows
from raffia.data.step_priorities import StepPriorities
from raffia.data.steps import (
    StepKeys,
    StoredSteps,
    different,
    in_parts,
    numbers,
    several,
    take_steps,
)
from raffia.data.storage import Storage, TensorStorage
from raffia.data.storage_state import StorageContents
from raffia.files.folder import Folder, load_folder, write_folder
from raffia.tensordict.collection import TensorDictBase
from raffia.tensordict.keys import NestedKey, unravel_key_to_tuple
from raffia.tensordict.tensordict import TensorDict

KIND, VERSION = "raffia.segments", 2


class LockedView(NamedTuple):
    """The contents of a segment buffer within `locked_view`: views, to be read before the block
    ends."""

    contents: StorageContents
    buffer_state: dict[str, Any]  # the state of sampling, copied
    observation_keys: list[tuple[str, ...]]


class SegmentReplayBuffer(Buffer):
    """Windows of consecutive steps of one episode, drawn uniformly or by the priority of their
    start.

    storage: a `TensorStorage` or `MemmapStorage` with a `max_size`, which belongs to this buffer. A
        row of it is a step, or the closing row of an episode: its last observation.
    unroll_steps, n_step: a segment has L = unroll_steps + n_step + 1 rows: the start, the steps
        that are unrolled, and n_step more, from which values are bootstrapped.
    observation_keys: entries of a state, which there are after the last action too: the
        observation; or the legal actions, whose turn it is, a value ...
    terminated_key, truncated_key: the entries that mark the end of an episode. Where these lie
        under "next", as ("next", "terminated"), everything else that lies there is stored with the
        step too, as ("next", "reward"), but for the observation_keys.
    frame_stack: S. The newest frame is stored, once; segments have stacks of the S newest. Of
        several observation_keys name those to be stacked, with their numbers:
        frame_stack={"pixels": 4}.
    absorb: the ends, of "terminated" and "truncated", behind which the state is absorbing: rows
        there count in the loss, and nothing is bootstrapped from them. Rows behind other ends are
        masked. () masks both.
    alpha, beta: as in `PrioritizedSampler`; without them all steps are drawn uniformly. `beta` can
        be set at any time. eps is added to every priority.
    importance: "batch": the largest weight of each batch is 1, as in EfficientZero; "buffer": that
        of all steps that can be drawn is, as in `PrioritizedSampler`.
    replacement: False draws different starts for one batch; None does so where there are as many.
    reuse_memory: True draws each sample into the memory of the one before, if it had as many
        segments: for a loop that is done with one before it asks for the next. New memory of 100 MB
        costs twice the time of copying into it.
    batch_size, pin_memory, device, prefetch, generator: as in `ReplayBuffer`.

    Steps come in with `extend`, from several environments at once. A step holds the observation,
    the action chosen there and the reward that followed, terminated and truncated, and whatever
    else; where one ends an episode, ("next", "obs") is the observation after it.

    A step can be drawn when `unroll_steps + n_step` more rows of its episode are there, or the
    episode has ended. When the ring overwrites the first step of an ended episode, the whole
    episode can't be drawn any more. An episode that goes on loses only the steps that are
    overwritten (and S - 1 more, whose frames are incomplete), so one can be longer than the ring.

    A sample has the stored entries [B, L, ...], those with frames [B, L, S, ...], and

        index            [B]     number of the start, for `update_priority`
        step_index       [B, L]  numbers of all rows, for `update`; -1 where the row is not valid
        priority_weight  [B]     float32; 1 without priorities

    and of each row [B, L] what it is good for:

        row            stored entries                     valid  valid_step  mask          discount
        step           its own                            True   True        True          1
        the last step  its own                            True   True        True          0 | 1 (0)
        closing row    observation_keys; flags of the last step;  True   False       False (True)  0
                       0 in the others
        behind it      the closing row again              False  False       False (True)  0

        a | b: before a termination | before a truncation. In brackets: if `absorb` has that end.

    `valid`: the observation is one of the episode. `valid_step`: an action was taken there. `mask`:
    the row counts in the loss. `discount` (to be multiplied by gamma): what follows the row counts
    in its value. Stacks are views of the same frames, each copied once; in front of an episode its
    first frame is repeated, and behind it the last one.

    Source: Ye, Liu, Kurutach, Abbeel & Gao (2021), Mastering Atari games with limited data (what is
    unrolled and bootstrapped; the masks of time steps behind the end).

    >>> from raffia.data.segment import SegmentReplayBuffer
    >>> from raffia.data.storage import TensorStorage
    >>> buffer = SegmentReplayBuffer(TensorStorage(1000), unroll_steps=2, n_step=1)
    >>> steps = TensorDict(  # three steps of one environment; the last one ends the episode
    ...     observation=torch.tensor([10, 11, 12]),
    ...     action=torch.tensor([1, 0, 1]),
    ...     reward=torch.tensor([0.5, 0.25, 1.0]),
    ...     terminated=torch.tensor([False, False, True]),
    ...     truncated=torch.tensor([False, False, False]),
    ...     next=dict(observation=torch.tensor([11, 12, 13])),
    ...     batch_size=[3],
    ... )
    >>> buffer.extend(steps)
    tensor([0, 1, 2])
    >>> segment = buffer.read(torch.tensor([1]))
    >>> segment["observation"], segment["reward"]
    (tensor([[11, 12, 13, 13]]), tensor([[0.2500, 1.0000, 0.0000, 0.0000]]))
    >>> segment["valid"], segment["discount"]
    (tensor([[ True,  True,  True, False]]), tensor([[1., 0., 0., 0.]]))
    >>> buffer.sample(5)["observation"].shape
    torch.Size([5, 4])
    """

    def __init__(
        self,
        storage: Storage,
        *,
        unroll_steps: int,
        n_step: int = 0,
        observation_keys: Sequence[NestedKey] = ("observation",),
        terminated_key: NestedKey = "terminated",
        truncated_key: NestedKey = "truncated",
        frame_stack: int | Mapping[NestedKey, int] = 1,
        absorb: Collection[str] = ("terminated",),
        alpha: float | None = None,
        beta: float | None = None,
        eps: float = 1e-8,
        importance: str = "buffer",
        replacement: bool | None = True,
        reuse_memory: bool = False,
        batch_size: int | None = None,
        pin_memory: bool = False,
        device: torch.device | str | None = None,
        prefetch: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        if storage.max_size is None:
            raise ValueError(
                "a segment buffer overwrites its oldest steps, so it needs a storage with a "
                "max_size: TensorStorage(max_size=100_000)"
            )
        _check_length(unroll_steps, n_step, storage.max_size)
        check_options(batch_size, pin_memory, prefetch)
        if reuse_memory and (prefetch or device is not None):
            raise ValueError(
                f"reuse_memory=True with prefetch={prefetch} and device={device}: samples that are "
                "made ahead or moved have memory of their own. Leave these out, or reuse_memory"
            )
        check_generator(generator, prefetch=False)
        generator = own_generator(generator, prefetch)
        self.storage = storage
        self.unroll_steps, self.n_step = unroll_steps, n_step
        self.length = unroll_steps + n_step + 1
        self.batch_size, self.reuse_memory = batch_size, reuse_memory
        self._last: tuple[Any, TensorDict | None] = None, None  # structure, sample: to be reused
        self.num_ignored = 0  # priorities and updates that came too late
        self._keys = StepKeys(observation_keys, terminated_key, truncated_key)
        stacks = frame_stacks(frame_stack, self._keys.observation)
        self._rows = StoredRows(storage, self._keys)
        self._ring = EpisodeRing(
            storage.max_size,
            look_ahead=self.length - 1,
            look_back=max(stacks.values(), default=1) - 1,
        )
        self._priorities = StepPriorities(
            storage.max_size, alpha=alpha, beta=beta, eps=eps, importance=importance
        )
        self._maker = SegmentMaker(
            storage,
            self._ring,
            self._priorities,
            length=self.length,
            stacks=stacks,
            absorb=absorb,
            replacement=replacement,
            generator=generator,
            pin_memory=pin_memory,
            device=device,
        )
        self._buffer_state = BufferState(self._ring, self._priorities, self._maker)
        self._feeds: list[RowFeed] = []
        self._lock = threading.RLock()
        survives_fork(self)
        self._ahead = Prefetcher(self._maker, prefetch, self._lock) if prefetch else None

    def __getstate__(self) -> dict[str, Any]:
        if not isinstance(self.storage, TensorStorage):
            raise TypeError(
                "a segment buffer on disk can't be sent to another process, or copied: what "
                "belongs together there is known to this one only. Send batches"
            )
        return super().__getstate__() | {"_last": (None, None)}

    def __len__(self) -> int:
        """How many steps can be drawn."""
        return len(self._ring)

    def __repr__(self) -> str:
        return (
            f"SegmentReplayBuffer({len(self)} steps to draw from {self.num_episodes} episodes, "
            f"segments of {self.length} rows, {self.storage!r})"
        )

    @property
    def num_episodes(self) -> int:
        """How many episodes are here, ended or going on."""
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
        """Of what the largest weight is 1: "batch" or "buffer"."""
        return self._priorities.importance

    @property
    def stacks(self) -> dict[tuple[str, ...], int]:
        """How many frames are stacked in a sample, by the path of the entry, where it is more than
        1."""
        by_row = self._maker.by_row
        return {path: stack for path, stack in self._maker.stacks.items() if path not in by_row}

    def give_rows_of(self, key: NestedKey) -> RowFeed:
        """From now on samples have the numbers of an entry's rows in its place: int64 [B, L+S-1].

        For who has the rows of this entry elsewhere: what is given here tells such copies what
        comes in, and `RowMirror.read` of these numbers gives the frames [B, L+S-1, ...]. The entry
        must not be changed by `update`.

        >>> from raffia.data.segment import SegmentReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> buffer = SegmentReplayBuffer(TensorStorage(100), unroll_steps=1)
        >>> feed = buffer.give_rows_of("observation")
        >>> no = torch.zeros(3, dtype=torch.bool)
        >>> _ = buffer.extend(TensorDict(
        ...     observation=torch.tensor([7, 8, 9]), terminated=no, truncated=no, batch_size=[3]))
        >>> buffer.read(torch.tensor([1]))["observation"], feed.read(torch.tensor([[1, 2]]), 3)
        (tensor([[1, 2]]), tensor([[8, 9]]))
        """
        path = unravel_key_to_tuple(key)
        with self._lock:
            self._before_change()
            self._maker.by_row.add(path)
            self._last = None, None
            feed = RowFeed(self.storage, path)
            self._feeds.append(feed)
            return feed

    def probability(self, index: Tensor) -> Tensor:
        """The probability that one draw now gives each of these steps: float64, of index's shape.

        0 for steps that can't be drawn.

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
        """The least probability of all steps that can be drawn; inf where there are none.

        >>> from raffia.data.segment import SegmentReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> SegmentReplayBuffer(TensorStorage(100), unroll_steps=0).least_probability()
        inf
        """
        with self._lock:
            return self._priorities.least_probability()

    def check_priority(self, priority: Tensor) -> None:
        """Raise ValueError for what is no priority; TypeError for a buffer without priorities.

        >>> from raffia.data.segment import SegmentReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> buffer = SegmentReplayBuffer(TensorStorage(100), unroll_steps=0, alpha=1.0, beta=0.4)
        >>> buffer.check_priority(torch.tensor([-1.0]))
        Traceback (most recent call last):
        ...
        ValueError: a priority must be finite and >= 0 (and at most 9e+305), got -1; for errors ...
        """
        self._priorities.check(priority)

    def _before_change(self) -> None:
        super()._before_change()
        self._maker.num_changes += 1

    # -- steps come in

    def extend(
        self,
        steps: TensorDict,
        env: int | Sequence[int] | Tensor | None = None,
        *,
        priority: Tensor | None = None,
    ) -> Tensor:
        """Append steps; gives their numbers [T] or [T, E], which count up for ever.

        steps: [T], consecutive steps of one environment; or [T, E], of several at the same times.
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
        >>> len(buffer)  # the second steps can't be drawn until the third are there
        3
        """
        if not isinstance(steps, TensorDictBase):
            raise TypeError(f"steps are a TensorDict [T] or [T, E], not a {type(steps).__name__}")
        shape = steps.batch_size
        if len(shape) not in (1, 2):
            raise ValueError(
                f"steps have the batch size [T] or [T, E], got {list(shape)}: buffer.add(step) "
                "takes one step, of one environment or of several"
            )
        if len(shape) == 1:
            steps = steps.unsqueeze(1)
        envs = several(env, steps.batch_size[1])
        if priority is not None:
            if priority.shape != shape:
                raise ValueError(
                    f"steps {list(shape)} need as many priorities, got {list(priority.shape)}"
                )
            self._priorities.check(priority)
            priority = priority.detach().reshape(steps.batch_size).cpu()
        with self._lock:
            self._before_change()
            self._check(steps, len(envs))
            taken = take_steps(steps, self._keys, self.storage.structure)
            if not steps.numel():
                return torch.empty(shape, dtype=torch.int64)
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
                f"{self.storage.total} items were appended to the storage, and this buffer knows "
                f"of {self._ring.total}: a storage belongs to one buffer. One that was opened "
                "again needs buffer.load(folder) first, which holds which rows belong together, as "
                "of the last buffer.save(folder); if there was none, nobody knows: buffer.empty() "
                "starts over"
            )
        if 2 * num_envs > self._ring.num_rows:
            raise ValueError(
                f"{num_envs} environments can end at once, and take {2 * num_envs} rows then; the "
                f"storage has max_size={self._ring.num_rows}: take a larger one"
            )
        taken = [name for name in ADDED if name in steps.keys()]
        if taken:
            raise ValueError(
                f"samples have entries {', '.join(ADDED)} of their own; call yours other than "
                f"{', '.join(map(repr, taken))}, such as {'step_' + taken[0]!r}"
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
        """Append one step [] of one environment, or [E] of several; gives numbers [] or [E].

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
        """Break off episodes that go on, as after a resume, when environments start over.

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
        """Go on behind what the storage holds; steps between which some are missing are cut."""
        missed = self.storage.total - self._ring.total
        if missed > 0:
            self.cut()
            self._priorities.set(self._ring.skip(missed), 0.0)

    # -- segments go out

    def sample(self, batch_size: int | None = None, *, out: TensorDict | None = None) -> TensorDict:
        """Draw segments; the class documents what they hold.

        batch_size: B; without it the `batch_size` of the buffer.
        out: an earlier sample of as many, that is filled again: nothing large is allocated then,
            and what was pinned stays pinned.
        Raises ValueError if there is no step to draw yet, or if `out` is not such a sample.

        >>> from raffia.data.segment import SegmentReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> buffer = SegmentReplayBuffer(TensorStorage(100), unroll_steps=1, alpha=0.6, beta=0.4)
        >>> no = torch.zeros(9, dtype=torch.bool)
        >>> steps = TensorDict(
        ...     observation=torch.arange(9), terminated=no, truncated=no, batch_size=[9]
        ... )
        >>> _ = buffer.extend(steps)
        >>> batch = buffer.sample(256)
        >>> batch = buffer.sample(256, out=batch)
        >>> buffer.update_priority(batch["index"], (batch["observation"][:, 0] - 4.0).abs())
        0
        """
        n = self.batch_size if batch_size is None else batch_size
        if n is None or n < 1:
            raise ValueError(
                f"how many segments? Got {n}: buffer.sample(256), or "
                "SegmentReplayBuffer(batch_size=256) once for all"
            )
        if not self.reuse_memory or out is not None:
            return self._sample(n, out)
        structure, last = self._last
        fits = last is not None and len(last) == n and structure == self.storage.structure
        sample = self._sample(n, last if fits else None)
        self._last = self.storage.structure, sample
        return sample.copy()  # so that entries can be set without a change of what is reused

    def _sample(self, n: int, out: TensorDict | None) -> TensorDict:
        maker = self._maker
        if self._ahead is not None:
            copied = self._ahead.next(n)
        elif maker.on_cpu and out is not None:
            with self._lock:
                maker.draw(n, out)
            return out
        else:
            with self._lock:
                drawn = maker.draw(n)
            copied = maker.finish(drawn)
        return maker.build(copied) if out is None else maker.fill(out, copied)

    def __iter__(self) -> Iterator[TensorDict]:
        """Samples of `batch_size`, without end."""
        while True:
            yield self.sample()

    def read(self, index: Tensor, *, length: int | None = None) -> TensorDict:
        """The segments that start at these steps, as `sample` gives them, with weights 1.

        index: [B] numbers of steps that can be drawn; `contains` tells which these are.
        length: how many rows, if not the buffer's L.
        Raises IndexError for other numbers, and for a segment that is longer than what there is yet
        of an episode that goes on.

        >>> from raffia.data.segment import SegmentReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> buffer = SegmentReplayBuffer(TensorStorage(100), unroll_steps=1)
        >>> no = torch.zeros(9, dtype=torch.bool)
        >>> steps = TensorDict(
        ...     observation=torch.arange(9), terminated=no, truncated=no, batch_size=[9]
        ... )
        >>> _ = buffer.extend(steps)
        >>> buffer.read(torch.tensor([4, 2]), length=3)["observation"]
        tensor([[4, 5, 6],
                [2, 3, 4]])
        """
        index, length = numbers(index), self.length if length is None else length
        if index.ndim != 1 or length < 1:
            raise ValueError(
                f"index has the shape [B] and length is at least 1, got {list(index.shape)} and "
                f"{length}"
            )
        with self._lock:
            self._refuse_undrawable(index)
            start = self._ring.row(index)
            copied = self._maker.copy(start, torch.ones(len(start)), length)
        if length > self.length:
            _refuse_unfinished(index, copied.added)
        return self._maker.build(self._maker.finish(copied))

    def later(self, index: Tensor, fraction: Tensor) -> Tensor:
        """For each step [n] the number of a state after it in its episode, for `entry`.

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
                raise IndexError(f"row {int(gone[0])} (and {len(gone) - 1} more) is not here")
            return self.storage.entry(unravel_key_to_tuple(key), self._ring.row(index))

    def _refuse_undrawable(self, index: Tensor) -> None:
        unknown = index[~self._ring.can_draw(index)]
        if len(unknown):
            raise IndexError(
                f"step {int(unknown[0])} (and {len(unknown) - 1} more) can't be read: it was "
                "overwritten, or has too few rows after it yet, or is no step. "
                "buffer.contains(index) tells which can be"
            )

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

    # -- what is known better later

    def update_priority(self, index: Tensor, priority: Tensor | float) -> int:
        """Change the priorities of steps; returns how many were left out, as they are gone.

        index: numbers of steps, as a sample's "index". Where one stands twice, the last counts.
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
        index, priority = numbers(index), torch.as_tensor(priority).detach().cpu()
        if priority.ndim and priority.shape != index.shape:
            raise ValueError(
                f"index {list(index.shape)} needs priorities of that shape, or one for all; got "
                f"{list(priority.shape)}"
            )
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

    def update(self, index: Tensor, entries: TensorDict) -> int:
        """Write entries of stored rows; returns how many were left out, as they are gone.

        index: numbers of rows, such as a sample's "step_index" or a part of it; -1 is passed over.
            Where one stands twice, the last counts.
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
        index = numbers(index)
        if entries.batch_size != index.shape:
            raise ValueError(
                f"index has the shape {list(index.shape)}, and entries the batch size "
                f"{list(entries.batch_size)}: they should be the same"
            )
        with self._lock:
            self._before_change()
            values = self._rows.fitting(entries.reshape(-1))
            self._refuse_unknown(index, -1)
            index = index.reshape(-1)
            known = self._ring.holds(index)
            position = known.nonzero()[:, 0]
            if len(position):
                rows = self._ring.row(index[position])
                chosen = {path: value[position.to(value.device)] for path, value in values.items()}
                self._rows.write(rows, chosen, self._ring.kind[rows] < CLOSED_TERMINATED)
            return self._ignored(int((index >= 0).sum()) - int(known.sum()))

    def _ignored(self, count: int) -> int:
        self.num_ignored += count
        return count

    def _refuse_unknown(self, index: Tensor, least: int) -> None:
        wrong = index[(index < least) | (index >= self._ring.total)]
        if len(wrong):
            raise IndexError(
                f"there never was a step {int(wrong[0])}: {self._ring.total} rows came in so "
                'far. Pass the "index" or "step_index" of a sample. Nothing was changed'
            )

    # -- keeping

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

    def state_dict(self) -> dict[str, Any]:
        """All steps, and the state of sampling: nested dicts of tensors (copies) and numbers.

        >>> from raffia.data.segment import SegmentReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> buffer = SegmentReplayBuffer(TensorStorage(100), unroll_steps=1)
        >>> other = SegmentReplayBuffer(TensorStorage(100), unroll_steps=1)
        >>> other.load_state_dict(buffer.state_dict())
        """
        with self._lock:
            self._before_change()
            return {"storage": self.storage.state_dict(), "buffer": self._buffer_state.state()}

    @contextlib.contextmanager
    def locked_view(self) -> Iterator[LockedView]:
        """Rows as they lie in the storage, and the state of sampling, under the buffer's lock.

        >>> from raffia.data.segment import SegmentReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> with SegmentReplayBuffer(TensorStorage(100), unroll_steps=1).locked_view() as view:
        ...     view.contents.total, view.observation_keys
        (0, [('observation',)])
        """
        with self._lock:
            self._before_change()
            observation_keys = [unravel_key_to_tuple(key) for key in self._keys.observation]
            yield LockedView(self.storage._contents(), self._buffer_state.state(), observation_keys)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict`: resumes bit for bit, with the generator if it has one.

        Raises ValueError, and changes nothing, if the state is not of a buffer made like this one.
        """
        check_entries(state, ("buffer", "storage"), "a segment buffer")
        with self._lock:
            self._before_change()
            self._buffer_state.check(state["buffer"])
            self.storage.load_state_dict(state["storage"])
            self._buffer_state.load(state["buffer"])

    def save(self, folder: str | os.PathLike[str], *, rows: bool = True) -> None:
        """Write all steps, and the state of sampling, to a folder.

        Killed at any time, the folder holds the old or the new.

        rows: False leaves out the rows, for a `MemmapStorage`, which keeps them itself; they are
            flushed first. Give the storage, opened again, to a buffer made like this one, and call
            its `load`.

        >>> import tempfile
        >>> from raffia.data.segment import SegmentReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> buffer = SegmentReplayBuffer(TensorStorage(100), unroll_steps=1)
        >>> other = SegmentReplayBuffer(TensorStorage(100), unroll_steps=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     buffer.save(folder)
        ...     other.load(folder)
        """
        flush = getattr(self.storage, "flush", None)
        if not rows and flush is None:
            raise ValueError(
                f"a {type(self.storage).__name__} keeps its rows in memory only: save(folder) "
                "writes them too"
            )
        with self._lock:
            self._before_change()
            if flush is not None:
                flush()
            files = self.storage.files() if rows else {}
            write_folder(folder, KIND, VERSION, {**files, **self._buffer_state.files()})

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Load a folder of `save`: resumes bit for bit, in this process or another.

        Where the rows were left out and the storage went on since then, steps that came after the
        save are lost, as are those that they overwrote; episodes that went on are broken off.
        Raises DamagedFileError or ValueError, and changes nothing, if the folder does not hold what
        was saved, or not of a buffer made like this one.
        """
        load_folder(folder, KIND, VERSION, self._load)

    def _load(self, found: Folder) -> None:
        buffer_state = self._buffer_state.read(found)
        with self._lock:
            self._before_change()
            self._buffer_state.check(buffer_state)
            if len(found.files) > 1:
                self.storage.read_files(found)
            elif self.storage.total < int(buffer_state["episodes"]["total"]):
                raise ValueError(
                    f"{found.root} was saved without the rows of "
                    f"{int(buffer_state['episodes']['total'])} "
                    f"items, and to this storage {self.storage.total} were appended: it should be "
                    "the same one, opened again"
                )
            self._buffer_state.load(buffer_state)
            self._skip()
            gone = ~self.storage.contains(torch.arange(self._ring.num_rows)).cpu()
            self._priorities.set(self._ring.lose(gone.nonzero()[:, 0]), 0.0)


def _refuse_unfinished(index: Tensor, added: dict[str, Tensor]) -> None:
    """IndexError if a segment goes on behind the newest step of its episode."""
    valid = added["valid"]
    missing = added["valid_step"] & ~valid  # a step again, as there is no row behind it yet
    unfinished = missing.any(1).nonzero()[:, 0]
    if len(unfinished):
        length = int(valid[unfinished].sum(1).min())
        raise IndexError(
            f"step {int(index[unfinished[0]])} (and {len(unfinished) - 1} more) can't be read with "
            f"length={valid.shape[1]}: its episode goes on, and what comes after its newest step "
            f"is not known yet. length={length} can be read of all of these"
        )


def _check_length(unroll_steps: int, n_step: int, num_rows: int) -> None:
    for name, value in (("unroll_steps", unroll_steps), ("n_step", n_step)):
        try:
            operator.index(value)
        except TypeError as error:
            raise TypeError(f"{name}={value!r} is a number of rows: an int is needed") from error
    if unroll_steps < 0 or n_step < 0:
        raise ValueError(f"unroll_steps={unroll_steps} and n_step={n_step} must be at least 0")
    length = unroll_steps + n_step + 1
    if length > num_rows:
        raise ValueError(
            f"a segment of unroll_steps + n_step + 1 = {length} rows does not fit into a storage "
            f"with max_size={num_rows}: make that larger, or the segment shorter"
        )
