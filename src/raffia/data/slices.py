"""Batches of slices, runs of consecutive steps of one episode: drawn uniformly, once, or by
priority.

Legend: N live items, S slices, T steps in a slice.
"""

from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from raffia.data.priorities import importance_weights
from raffia.data.prioritized import PrioritizedSampler
from raffia.data.samplers import Draw, Sampler, SamplerWithoutReplacement
from raffia.data.storage import Storage
from raffia.data.structure import check_entries
from raffia.data.torchrl_storages import refuse_others
from raffia.hints import check_count
from raffia.tensordict.keys import NestedKey, dotted, unravel_key, unravel_key_to_tuple
from raffia.tensordict.signatures import shows_options_of

TRAJ_PATHS = ("collector", "traj_ids"), ("episode",)  # what TorchRL looks for


class SliceOptions(TypedDict, total=False):
    """Options of a `SliceSampler`, documented there.

    >>> options: SliceOptions = {"slice_len": 8, "end_key": "done"}
    """

    num_slices: int | None
    slice_len: int | None
    end_key: NestedKey | None
    traj_key: NestedKey | None
    truncated_key: NestedKey | None
    strict_length: bool
    cache_values: bool
    compile: bool
    span: bool
    pad_output: bool
    use_gpu: bool


class SliceSampler(Sampler):
    """A sampler of slices of episodes, each with a random episode and start, one after another.

    A batch of S * T items is S slices of T steps each: `batch.reshape(S, T)` parts them. Steps of
    an episode follow each other in the buffer, so one environment writes it, or whole episodes.

    num_slices, slice_len: S or T; the batch size gives the other.
    end_key: the entry that marks the last step of an episode.
    traj_key: instead of it, an entry that is another number for each episode. Where neither is
        given it is ("collector", "traj_ids") or "episode", if items have it, and ("next", "done")
        marks the last step else.
    truncated_key: where batches mark the end of a slice; ("next", "done") is marked next to it, and
        ("next", "terminated") is false if the steps have no such entry.
        None: batches do not mark it.
    strict_length: whether slices are of T steps all. False takes episodes that are shorter as a
        whole, so that a batch may be smaller.
    cache_values: TorchRL's; of no effect, as episodes are found again only where items are new.
    compile, span, pad_output, use_gpu: TorchRL's; False only.

    >>> from raffia import TensorDict
    >>> from raffia.data import ReplayBuffer, SliceSampler, TensorStorage
    >>> sampler = SliceSampler(slice_len=3, traj_key="episode", truncated_key=None)
    >>> rng = torch.Generator().manual_seed(0)
    >>> buffer = ReplayBuffer(storage=TensorStorage(100), sampler=sampler, generator=rng)
    >>> episode = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    >>> _ = buffer.extend(TensorDict(step=torch.arange(8), episode=episode, batch_size=[8]))
    >>> buffer.sample(6).reshape(2, 3)["step"]
    tensor([[1, 2, 3],
            [4, 5, 6]])
    """

    by_position = True  # as the next step of an episode is found by it

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: NestedKey | None = None,
        traj_key: NestedKey | None = None,
        truncated_key: NestedKey | None = ("next", "truncated"),
        strict_length: bool = True,
        cache_values: bool = False,
        compile: bool = False,
        span: bool = False,
        pad_output: bool = False,
        use_gpu: bool = False,
    ) -> None:
        refuse_others(compile=compile, span=span, pad_output=pad_output, use_gpu=use_gpu)
        if (num_slices is None) == (slice_len is None):
            raise ValueError(
                "pass either num_slices, the number of slices in a batch, or slice_len, the "
                f"number of steps in each; got num_slices={num_slices} and slice_len={slice_len}"
            )
        if end_key is not None and traj_key is not None:
            raise ValueError("pass either end_key or traj_key, by which episodes are identified")
        for name, value in (("num_slices", num_slices), ("slice_len", slice_len)):
            if value is not None:
                check_count(name, value, 1)
        self.num_slices, self.slice_len = num_slices, slice_len
        self.traj_key = None if traj_key is None else unravel_key(traj_key)
        self.end_key = None if end_key is None else unravel_key(end_key)
        self.truncated_key = None if truncated_key is None else unravel_key(truncated_key)
        self.strict_length = strict_length
        self._storage: Storage | None = None
        self._known = range(0)
        # [N, ...] what tells episodes apart, of the known items.
        self._value = torch.empty(0, device="cpu")
        # First position and length of each episode.
        self._spans: tuple[Tensor, Tensor] | None = None

    def attach(self, storage: Storage) -> None:
        self._storage = storage

    def clear(self) -> None:
        self._known, self._spans = range(0), None
        self.version += 1

    def load_state_dict(self, state: Any) -> None:
        self.clear()  # what it knows is read from the storage

    def draw(self, n: int, live: range, generator: torch.Generator | None = None) -> Draw:
        num_slices, length = self.shape(n)
        first, steps = self._long_episodes(live, length)
        chosen = torch.randint(len(first), (num_slices,), generator=generator, device="cpu")
        return self._slices_of(first[chosen], steps[chosen], length, live, generator)

    def _slices_of(
        self,
        first: Tensor,
        steps: Tensor,
        length: int,
        live: range,
        generator: torch.Generator | None,
    ) -> Draw:
        """One slice of each of some episodes, from a start drawn at random."""
        u = torch.rand(len(first), dtype=torch.float64, generator=generator, device="cpu")
        taken = steps.clamp(max=length)
        start = first + (u * (steps - taken + 1)).long()
        return self.slices_from(live.start + start, taken)

    def slices_from(self, start: Tensor, taken: Tensor) -> Draw:
        """The slices that begin with the given items and have the given numbers of steps.

        start, taken: int64 [S]

        >>> sampler = SliceSampler(num_slices=2, truncated_key=None)
        >>> sampler.slices_from(torch.tensor([4, 1]), torch.tensor([2, 3])).items
        tensor([4, 5, 1, 2, 3])
        """
        last = taken.cumsum(0) - 1  # the indices of the slices' last steps in the batch
        first = last + 1 - taken
        items = torch.arange(int(taken.sum()), device="cpu")
        items += (start - first).repeat_interleave(taken)
        return Draw(items, self._end_entries(items, last))

    def _long_episodes(self, live: range, length: int) -> tuple[Tensor, Tensor]:
        """The first position and the length of each episode that slices can be of."""
        first, steps = self.episodes(live)
        if not self.strict_length:
            return first, steps
        long = steps >= length
        if not bool(long.any()):
            raise _too_short(self, steps, length)
        return first[long], steps[long]

    def shape(self, n: int) -> tuple[int, int]:
        """How many slices a batch of n items has, and of how many steps.

        >>> SliceSampler(slice_len=3).shape(12)
        (4, 3)
        """
        one = self.num_slices or self.slice_len
        assert one is not None
        if n % one:
            what = "num_slices" if self.num_slices else "slice_len"
            raise ValueError(f"a batch of {n} items is not a multiple of {what}={one}")
        return (one, n // one) if self.num_slices else (n // one, one)

    def _episode_key(self) -> tuple[NestedKey, bool]:
        """The entry that identifies episodes, and whether it is another number for each."""
        if self.traj_key is not None:
            return self.traj_key, True
        if self.end_key is not None:
            return self.end_key, False
        assert self._storage is not None
        structure = self._storage.structure
        for path in TRAJ_PATHS:
            if structure is not None and path in structure.paths:
                return unravel_key(path), True
        return ("next", "done"), False

    def _end_entries(self, items: Tensor, last: Tensor) -> dict[Any, Tensor]:
        """The ends of slices, as entries of the batch: bool [n, 1]."""
        if self.truncated_key is None:
            return {}
        truncated = torch.zeros(len(items), 1, dtype=torch.bool, device="cpu")
        truncated[last] = True
        parent = unravel_key_to_tuple(self.truncated_key)[:-1]
        ended, marks = self._entry((*parent, "terminated"), items), {self.truncated_key: truncated}
        if ended is None:
            done = marks[unravel_key((*parent, "terminated"))] = torch.zeros_like(truncated)
        else:
            done = ended.reshape(len(items), -1).any(1, True)
        return {**marks, unravel_key((*parent, "done")): truncated | done}

    def _entry(self, path: tuple[str, ...], items: Tensor) -> Tensor | None:
        """An entry of items, or None if there is no such entry."""
        assert self._storage is not None
        structure, size = self._storage.structure, self._storage.max_size
        if structure is None or path not in structure.paths:
            return None
        return self._storage.entry(path, items if size is None else items % size).cpu()

    def episodes(self, live: range) -> tuple[Tensor, Tensor]:
        """The first position and the length of each episode among the live items: int64
        [episodes]."""
        if self._spans is not None and self._known == live:
            return self._spans
        if self._storage is None:
            raise ValueError("a SliceSampler works only in a buffer: ReplayBuffer(sampler=...)")
        key, numbered = self._episode_key()
        old = range(max(live.start, self._known.start), min(live.stop, self._known.stop))
        new = range(old.stop if old else live.start, live.stop)
        items = torch.arange(new.start, new.stop, device="cpu")
        value = self._entry(unravel_key_to_tuple(key), items)
        if value is None:
            raise KeyError(
                f'items have no entry "{dotted(key)}" to identify episodes by: pass '
                "SliceSampler(end_key=...) or SliceSampler(traj_key=...)"
            )
        value = value.reshape(len(new), value.shape[1:].numel())
        if old:
            at = old.start - self._known.start
            value = torch.cat([self._value[at : at + len(old)], value])
        # The newest step ends what there is of it.
        ends = torch.ones(len(live), dtype=torch.bool, device="cpu")
        ends[:-1] = (value[1:] != value[:-1]).any(1) if numbered else value[:-1].bool().any(1)
        last = ends.nonzero()[:, 0]
        first = torch.cat([last.new_zeros(1), last[:-1] + 1])
        self._known, self._value, self._spans = live, value, (first, last - first + 1)
        return self._spans


class SliceSamplerWithoutReplacement(SliceSampler):
    """One slice of each episode, from a start drawn at random, then one of each once again.

    So no step occurs twice in a batch, or in an epoch. What is added to the buffer begins a new
    epoch. The last batch of an epoch has fewer slices where fewer episodes are left.

    drop_last: True leaves that smaller batch out.
    shuffle: False takes the episodes from the oldest to the newest.

    The others are those of `SliceSampler`.

    >>> from raffia import TensorDict
    >>> from raffia.data import ReplayBuffer, SliceSamplerWithoutReplacement, TensorStorage
    >>> sampler = SliceSamplerWithoutReplacement(
    ...     slice_len=2, traj_key="episode", truncated_key=None, shuffle=False
    ... )
    >>> buffer = ReplayBuffer(storage=TensorStorage(100), sampler=sampler, batch_size=4)
    >>> episode = torch.tensor([5, 5, 6, 6, 6, 7, 7, 7, 7])
    >>> _ = buffer.extend(TensorDict(episode=episode, batch_size=[9]))
    >>> [batch["episode"].tolist() for batch in buffer]
    [[5, 5, 6, 6], [7, 7]]
    """

    @shows_options_of(SliceSampler.__init__)
    def __init__(
        self,
        *,
        drop_last: bool = False,
        shuffle: bool = True,
        **options: Unpack[SliceOptions],
    ) -> None:
        super().__init__(**options)
        self.drop_last, self.shuffle = drop_last, shuffle
        self._left = SamplerWithoutReplacement(drop_last, shuffle)  # of the episodes
        self._of = range(0), 0  # the items and the length of slices that these are for

    def clear(self) -> None:
        super().clear()
        self._left.clear()

    def draw(self, n: int, live: range, generator: torch.Generator | None = None) -> Draw:
        num_slices, length = self.shape(n)
        first, steps = self._long_episodes(live, length)
        if self.drop_last and num_slices > len(first):
            raise ValueError(
                f"a batch of {n} items needs {num_slices} slices, but there are only {len(first)} "
                "episodes, and drop_last=True leaves smaller batches out: sample fewer, or use "
                "SliceSamplerWithoutReplacement(drop_last=False)"
            )
        if self._of != (live, length):
            self._left.clear()
            self._of = live, length
        chosen = self._left.draw(num_slices, range(len(first)), generator)
        at = chosen.items
        draw = self._slices_of(first[at], steps[at], length, live, generator)
        return draw._replace(ends_epoch=chosen.ends_epoch)

    def mark(self) -> object:
        return self._of, self._left.mark(), self.version

    def rewind(self, mark: Any) -> None:
        of, left, version = mark
        if version == self.version:
            # the inner one's version counts epochs begun meanwhile, which are undone as well
            self._of = of
            self._left.version = left[-1]
            self._left.rewind(left)

    def state_dict(self) -> dict[str, Any]:
        live, length = self._of
        of = torch.tensor([live.start, live.stop, length], device="cpu")
        return {"left": self._left.state_dict(), "of": of}

    def load_state_dict(self, state: Any) -> None:
        check_entries(state, ("left", "of"), "a SliceSamplerWithoutReplacement")
        super().load_state_dict(state)
        start, stop, length = state["of"].tolist()
        self._left.load_state_dict(state["left"])
        self._of = range(start, stop), length


class PrioritizedSliceSampler(PrioritizedSampler):
    """Slices of episodes that begin with a step drawn by its priority, as TorchRL has them.

    A slice has the importance weight of its first step, which stands at each of its steps.
    Priorities are those of single steps: one that can begin no slice, as its episode ends too
    early, does not count. To learn from segments that continue over the ends of episodes, with
    masks, use `SegmentReplayBuffer`.

    max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer, importance: as in
        `PrioritizedSampler`.
    num_slices, slice_len, end_key, traj_key, truncated_key and more: as in `SliceSampler`.
    strict_length: whether slices are of the same length all. False lets a slice begin with any step
        but the last of its episode, and end with it.

    >>> from raffia import TensorDict
    >>> from raffia.data import PrioritizedSliceSampler, ReplayBuffer, TensorStorage
    >>> sampler = PrioritizedSliceSampler(
    ...     6, alpha=1.0, beta=1.0, eps=0.0, slice_len=2, traj_key="episode", truncated_key=None
    ... )
    >>> buffer = ReplayBuffer(storage=TensorStorage(6), sampler=sampler)
    >>> episode = torch.tensor([0, 0, 0, 1, 1, 1])
    >>> numbers = buffer.extend(TensorDict(episode=episode, batch_size=[6]))
    >>> buffer.update_priority(numbers, torch.tensor([0.0, 2.0, 9.0, 0.0, 0.0, 9.0]))
    0
    >>> buffer.sample(4)["index"]  # items 2 and 5 begin no slice
    tensor([1, 2, 1, 2])
    """

    @shows_options_of(SliceSampler.__init__)
    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        reduction: str = "max",
        *,
        max_priority_within_buffer: bool = False,
        importance: str = "buffer",
        **options: Unpack[SliceOptions],
    ) -> None:
        super().__init__(
            max_capacity,
            alpha,
            beta,
            eps,
            dtype,
            reduction,
            max_priority_within_buffer,
            importance=importance,
        )
        self._slices = SliceSampler(**options)
        self._starts_of = range(0), 0  # the items and the length that these are for
        # Rows of items that begin no slice.
        self._barred = torch.empty(0, dtype=torch.int64, device="cpu")
        # [N] how many steps a slice would have.
        self._taken = torch.empty(0, dtype=torch.int64, device="cpu")

    def attach(self, storage: Storage) -> None:
        super().attach(storage)
        self._slices.attach(storage)

    def clear(self) -> None:
        super().clear()
        self._slices.clear()
        self._starts_of = range(0), 0

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self._slices.clear()
        self._starts_of = range(0), 0

    def draw(self, n: int, live: range, generator: torch.Generator | None = None) -> Draw:
        num_slices, length = self._slices.shape(n)
        if self._starts_of != (live, length):
            self._find_starts(live, length)
        least, tree = self.priorities.least(), self.priorities.tree
        chances = tree.get(self._barred)
        tree.set(self._barred, 0.0)
        try:
            starts = super().draw(num_slices, live, generator).items
        finally:
            tree.set(self._barred, chances)
        taken = self._taken[starts - live.start]
        drawn = tree.get(starts % self.max_capacity)
        weight = importance_weights(drawn, least, self.beta).repeat_interleave(taken)
        draw = self._slices.slices_from(starts, taken)
        return draw._replace(info={"priority_weight": weight, **draw.info})

    def _find_starts(self, live: range, length: int) -> None:
        """Mark the items that begin a slice of this length."""
        first, steps = self._slices.episodes(live)
        left = (first + steps).repeat_interleave(steps) - torch.arange(len(live), device="cpu")
        if self._slices.strict_length:
            begins = left >= length
        else:
            begins = (left > 1) | (steps == 1).repeat_interleave(steps)
        if not bool(begins.any()):
            raise _too_short(self, steps, length)
        items = live.start + (~begins).nonzero()[:, 0]
        self._barred, self._taken = items % self.max_capacity, left.clamp(max=length)
        self._starts_of = live, length


def _too_short(sampler: Sampler, steps: Tensor, length: int) -> ValueError:
    return ValueError(
        f"no episode has the {length} steps of a slice yet; the longest has {int(steps.max())}. "
        f"Sample later, use a smaller slice_len, or {type(sampler).__name__}(strict_length=False)"
    )
