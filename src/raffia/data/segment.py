"""`SegmentReplayBuffer`: segments of consecutive steps out of a ring, for learning by unrolling.

Legend: T times, E environments, B segments, L rows in a segment, S frames in a stack.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raffia.data.buffer import (
    check_is_storage,
    check_options,
    check_same_generator,
    own_generator,
)
from raffia.data.priorities import StepPriorities
from raffia.data.ring import EpisodeRing
from raffia.data.row_feed import RowFeed
from raffia.data.segment_batches import (
    SegmentMaker,
    StoredRows,
    frame_stacks,
    kinds_of_rows,
)
from raffia.data.segment_steps import SegmentSteps
from raffia.data.steps import StepKeys, numbers
from raffia.data.storage import Storage
from raffia.data.structure import StorageContents, check_entries
from raffia.files.folder import Content, Folder, load_folder, write_folder
from raffia.hints import check_count
from raffia.tensordict.keys import NestedKey, unravel_key_to_tuple
from raffia.tensordict.safetensors_file import save_file
from raffia.tensordict.tensordict import TensorDict

KIND, VERSION = "raffia.segments", 2
FILE = "buffer.safetensors"


class LockedView(NamedTuple):
    """The contents of a segment buffer within `locked_view`: views, to be read before the block
    ends."""

    contents: StorageContents
    buffer_state: dict[str, Any]  # the state of sampling, copied
    observation_keys: list[tuple[str, ...]]


class SegmentReplayBuffer(SegmentSteps):
    """Segments: consecutive steps of one episode, drawn uniformly or by the priority of their
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
        of all steps that can be drawn is, as in `PrioritizedSampler`, so that one step of priority
        0, as of a segment that is masked altogether, makes all weights tiny.
    replacement: False draws different starts for one batch; None does so where there are as many.
    reuse_memory: True draws each sample into the memory of the one before, if it had as many
        segments: for a loop that is done with one before it asks for the next. New memory of 100 MB
        costs twice the time of copying into it.
    batch_size, pin_memory, device, prefetch, generator: as in `ReplayBuffer`.

    Steps come in with `extend`, from several environments in one call. A step holds the
    observation, the action chosen there and the reward that followed, terminated and truncated, and
    whatever else; where one ends an episode, ("next", "obs") is the observation after it.

    A step can be drawn when `unroll_steps + n_step` more rows of its episode are there, or the
    episode has ended. When the ring overwrites the first step of an ended episode, the whole
    episode cannot be drawn any more. An unfinished episode loses only the steps that are
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
        importance: str = "batch",
        replacement: bool | None = True,
        reuse_memory: bool = False,
        batch_size: int | None = None,
        pin_memory: bool = False,
        device: torch.device | str | None = None,
        prefetch: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        check_is_storage(storage)
        if storage.max_size is None:
            raise ValueError(
                "a segment buffer overwrites its oldest steps, so its storage needs a max_size: "
                "TensorStorage(max_size=100_000)"
            )
        _check_length(unroll_steps, n_step, storage.max_size)
        check_options(batch_size, pin_memory, prefetch)
        if reuse_memory and (prefetch or device is not None):
            raise ValueError(
                f"reuse_memory=True cannot be combined with prefetch={prefetch} and "
                f"device={device}, because samples that are prefetched or moved need their own "
                "memory. Leave these out, or reuse_memory"
            )
        generator = own_generator(generator, prefetch)
        self.storage = storage
        self.unroll_steps, self.n_step = unroll_steps, n_step
        self.length = unroll_steps + n_step + 1
        self.batch_size, self.reuse_memory = batch_size, reuse_memory
        self._last: tuple[Any, TensorDict | None] = None, None  # structure, sample: to be reused
        self.num_ignored = 0
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
            storage=storage,
            ring=self._ring,
            priorities=self._priorities,
            length=self.length,
            stacks=stacks,
            kinds=kinds_of_rows(absorb),
            replacement=replacement,
            generator=generator,
            pin_memory=pin_memory,
            device=device,
        )
        self._feeds: list[RowFeed] = []
        self._start(prefetch)

    def _copied(self) -> dict[str, Any]:
        if not self.storage.in_memory:
            raise TypeError(
                "a segment buffer on disk cannot be sent to another process or copied, because "
                "only this process knows which rows belong together. Send batches instead"
            )
        return super()._copied() | {"_last": (None, None)}

    def __repr__(self) -> str:
        return (
            f"SegmentReplayBuffer({len(self)} steps to draw from {self.num_episodes} episodes, "
            f"segments of {self.length} rows, {self.storage!r})"
        )

    @property
    def stacks(self) -> dict[tuple[str, ...], int]:
        """The number of stacked frames in a sample by entry path, for entries with more than 1."""
        by_row = self._maker.by_row
        return {path: stack for path, stack in self._maker.stacks.items() if path not in by_row}

    def give_rows_of(self, key: NestedKey) -> RowFeed:
        """Make samples hold an entry's row numbers instead of the entry: int64 [B, L+S-1].

        For processes that have copies of the rows of this entry: the feed returned here tells them
        what comes in, and `RowMirror.read` of these numbers gives the frames [B, L+S-1, ...]. The
        entry must not be changed by `update`.

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

    def _before_change(self) -> None:
        super()._before_change()
        self._maker.num_changes += 1

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
                f"the number of segments to draw is unknown; got {n}: pass buffer.sample(256), or "
                "SegmentReplayBuffer(batch_size=256) for all calls"
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
        """The segments that start at these steps, in the form of `sample`, with weights 1.

        index: [B] numbers of steps that can be drawn; `contains` tells which these are.
        length: how many rows, if not the buffer's L.
        Raises IndexError for other numbers, and for a segment that is longer than what there is yet
        of an unfinished episode.

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
                "index must have shape [B] and length must be at least 1; got "
                f"{list(index.shape)} and {length}"
            )
        with self._lock:
            self._refuse_undrawable(index)
            start = self._ring.row(index)
            weight = start.new_ones(len(start), dtype=torch.float32)
            copied = self._maker.copy(start, weight, length)
        if length > self.length:
            _refuse_unfinished(index, copied.added)
        return self._maker.build(self._maker.finish(copied))

    # -- saving

    def state_dict(self) -> dict[str, Any]:
        """All steps and the state of sampling: nested dicts of tensors (copies) and numbers.

        >>> from raffia.data.segment import SegmentReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> buffer = SegmentReplayBuffer(TensorStorage(100), unroll_steps=1)
        >>> other = SegmentReplayBuffer(TensorStorage(100), unroll_steps=1)
        >>> other.load_state_dict(buffer.state_dict())
        """
        with self._lock:
            self._before_change()
            return {"storage": self.storage.state_dict(), "buffer": self._sampling_state()}

    @contextlib.contextmanager
    def locked_view(self) -> Iterator[LockedView]:
        """A view of the stored rows and the state of sampling, under the buffer's lock.

        >>> from raffia.data.segment import SegmentReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> with SegmentReplayBuffer(TensorStorage(100), unroll_steps=1).locked_view() as view:
        ...     view.contents.total, view.observation_keys
        (0, [('observation',)])
        """
        with self._lock:
            self._before_change()
            observation_keys = [unravel_key_to_tuple(key) for key in self._keys.observation]
            yield LockedView(self.storage._contents(), self._sampling_state(), observation_keys)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict`: resumes bit for bit, with the generator if it has one.

        Raises ValueError, and changes nothing, if the state is not of a buffer made like this one.
        """
        check_entries(state, ("buffer", "storage"), "a segment buffer")
        with self._lock:
            self._before_change()
            self._check_sampling_state(state["buffer"])
            self.storage.load_state_dict(state["storage"])
            self._load_sampling_state(state["buffer"])

    def _sampling_state(self) -> dict[str, Any]:
        """A copy of the episodes, priorities and generator, as nested dicts of tensors."""
        state = {"episodes": self._ring.state(), "priorities": self._priorities.state()}
        if self.generator is not None:
            state["generator"] = {"state": self.generator.get_state()}
        return state

    def _check_sampling_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless `_load_sampling_state(state)` is possible."""
        check_entries(state, ("episodes", "priorities"), "a segment buffer")
        self._ring.check_state(state["episodes"])
        self._priorities.check_state(state["priorities"])
        check_same_generator(state, self.generator)

    def _load_sampling_state(self, state: Mapping[str, Any]) -> None:
        self._ring.load_state(state["episodes"])
        self._priorities.load_state(state["priorities"])
        if self.generator is not None:
            self.generator.set_state(state["generator"]["state"])

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
                f"a {type(self.storage).__name__} holds its rows in memory only: save them too "
                "with save(folder)"
            )
        with self._lock:
            self._before_change()
            if flush is not None:
                flush()
            state = TensorDict(self._sampling_state())
            files: dict[str, Content] = {FILE: lambda path: save_file(state, path)}
            stored = self.storage.files() if rows else {}
            write_folder(folder, KIND, VERSION, {**stored, **files})

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Load a folder of `save`: resumes bit for bit, in this process or another.

        Where the rows were left out and the storage went on since then, steps that came after the
        save are lost, as are those that they overwrote; episodes that went on are broken off.
        Raises DamagedFileError or ValueError, and changes nothing, if the folder does not hold what
        was saved, or not of a buffer made like this one.
        """
        load_folder(folder, KIND, VERSION, self._load)

    def _load(self, found: Folder) -> None:
        state = TensorDict.load(found.path(FILE)).to_dict()
        with self._lock:
            self._before_change()
            self._check_sampling_state(state)
            if len(found.files) > 1:
                self.storage.load_state_dict(self.storage.state_in(found))
            elif self.storage.total < (total := int(state["episodes"]["total"])):
                raise ValueError(
                    f"{found.root} was saved without the rows of {total} items, but "
                    f"{self.storage.total} have been appended to this storage: pass the storage of "
                    "the saved buffer, opened again"
                )
            self._load_sampling_state(state)
            self._skip()
            gone = ~self.storage.contains(torch.arange(self._ring.num_rows, device="cpu")).cpu()
            self._priorities.set(self._ring.lose(gone.nonzero()[:, 0]), 0.0)


def _refuse_unfinished(index: Tensor, added: dict[str, Tensor]) -> None:
    """Raise IndexError if a segment extends past the newest step of its episode."""
    valid = added["valid"]
    missing = added["valid_step"] & ~valid  # a step again, as there is no row behind it yet
    unfinished = missing.any(1).nonzero()[:, 0]
    if len(unfinished):
        length = int(valid[unfinished].sum(1).min())
        raise IndexError(
            f"step {int(index[unfinished[0]])} (and {len(unfinished) - 1} more) cannot be read "
            f"with length={valid.shape[1]}: its episode continues, and the steps after its newest "
            f"one are not known yet. length={length} can be read for all of these"
        )


def _check_length(unroll_steps: int, n_step: int, num_rows: int) -> None:
    check_count("unroll_steps", unroll_steps, 0)
    check_count("n_step", n_step, 0)
    length = unroll_steps + n_step + 1
    if length > num_rows:
        raise ValueError(
            f"a segment of unroll_steps + n_step + 1 = {length} rows does not fit into a storage "
            f"with max_size={num_rows}: make the storage larger, or the segment shorter"
        )
