"""`SliceSampler`: batches of slices, which are runs of consecutive steps of one episode.

Legend: N live items, S slices, T steps in a slice.
"""

from typing import Any

import torch
from torch import Tensor

from raffia.data.samplers import Draw, Sampler
from raffia.data.storage import Storage
from raffia.tensordict.keys import NestedKey, dotted, unravel_key, unravel_key_to_tuple


class SliceSampler(Sampler):
    """Slices of episodes, each from an episode and a start drawn at random, one behind the other.

    A batch of S * T items is S slices of T steps each: `batch.reshape(S, T)` parts them. Steps of
    an episode follow each other in the buffer, so one environment writes it, or whole episodes.

    num_slices, slice_len: S or T; the batch size says the other.
    end_key: the entry that says which step ends an episode.
    traj_key: instead of it, an entry that is another number for each episode.
    truncated_key: where batches say that a slice ends; ("next", "done") is said beside it. None:
        batches say nothing of it.
    strict_length: whether slices are of T steps all. False takes episodes that are shorter as a
        whole, so that a batch may be smaller.

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

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: NestedKey | None = None,
        traj_key: NestedKey | None = None,
        truncated_key: NestedKey | None = ("next", "truncated"),
        strict_length: bool = True,
    ) -> None:
        if (num_slices is None) == (slice_len is None):
            raise ValueError(
                "pass num_slices, how many slices a batch has, or slice_len, how many steps each "
                f"has; got num_slices={num_slices} and slice_len={slice_len}"
            )
        if end_key is not None and traj_key is not None:
            raise ValueError("episodes are told apart by end_key or by traj_key: pass one of them")
        for name, value in (("num_slices", num_slices), ("slice_len", slice_len)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is at least 1, got {value}")
        self.num_slices, self.slice_len = num_slices, slice_len
        self.traj_key = None if traj_key is None else unravel_key(traj_key)
        self.end_key = unravel_key(("next", "done") if end_key is None else end_key)
        self.truncated_key = None if truncated_key is None else unravel_key(truncated_key)
        self.strict_length = strict_length
        self._storage: Storage | None = None
        self._known = range(0)
        self._value = torch.empty(0)  # [N, ...] what tells episodes apart, of the known items
        self._spans: tuple[Tensor, Tensor] | None = None  # first place and length of each episode

    def attach(self, storage: Storage) -> None:
        self._storage = storage

    def clear(self) -> None:
        self._known, self._spans = range(0), None
        self.version += 1

    def load_state_dict(self, state: Any) -> None:
        self.clear()  # what it knows is read from the storage

    def draw(self, n: int, live: range, generator: torch.Generator | None = None) -> Draw:
        num_slices, length = self._shape(n)
        first, steps = self._episodes(live)
        if self.strict_length:
            long = steps >= length
            if not bool(long.any()):
                raise ValueError(
                    f"no episode has {length} steps yet, as a slice has: the longest has "
                    f"{int(steps.max())}. Sample later, take a smaller slice_len, or "
                    "SliceSampler(strict_length=False)"
                )
            first, steps = first[long], steps[long]
        chosen = torch.randint(len(first), (num_slices,), generator=generator)
        u = torch.rand(num_slices, dtype=torch.float64, generator=generator)
        taken = steps[chosen].clamp(max=length)
        start = first[chosen] + (u * (steps[chosen] - taken + 1)).long()
        last = taken.cumsum(0) - 1  # the places of the slices' last steps in the batch
        within = torch.arange(int(taken.sum())) - (last + 1 - taken).repeat_interleave(taken)
        items = live.start + start.repeat_interleave(taken) + within
        return Draw(items, self._said(items, last))

    def _shape(self, n: int) -> tuple[int, int]:
        """How many slices a batch of n items has, and of how many steps."""
        one = self.num_slices or self.slice_len
        assert one is not None
        if n % one:
            what = "num_slices" if self.num_slices else "slice_len"
            raise ValueError(f"a batch of {n} items is no multiple of {what}={one}")
        return (one, n // one) if self.num_slices else (n // one, one)

    def _said(self, items: Tensor, last: Tensor) -> dict[Any, Tensor]:
        """That slices end, as entries of the batch: bool [n, 1]."""
        if self.truncated_key is None:
            return {}
        truncated = torch.zeros(len(items), 1, dtype=torch.bool)
        truncated[last] = True
        done_key = (*unravel_key_to_tuple(self.truncated_key)[:-1], "done")
        ended = self._entry((*done_key[:-1], "terminated"), items)
        done = (
            truncated if ended is None else truncated | ended.reshape(len(items), -1).any(1, True)
        )
        return {self.truncated_key: truncated, unravel_key(done_key): done}

    def _entry(self, path: tuple[str, ...], items: Tensor) -> Tensor | None:
        """An entry of items, or None if there is no such entry."""
        assert self._storage is not None
        structure, size = self._storage.structure, self._storage.max_size
        if structure is None or path not in structure.paths:
            return None
        return self._storage.entry(path, items if size is None else items % size).cpu()

    def _episodes(self, live: range) -> tuple[Tensor, Tensor]:
        """The first place and the length of each episode among the live items."""
        if self._spans is not None and self._known == live:
            return self._spans
        if self._storage is None:
            raise ValueError("a SliceSampler belongs to a buffer: ReplayBuffer(sampler=...)")
        key = self.end_key if self.traj_key is None else self.traj_key
        old = range(max(live.start, self._known.start), min(live.stop, self._known.stop))
        new = range(old.stop if old else live.start, live.stop)
        value = self._entry(unravel_key_to_tuple(key), torch.arange(new.start, new.stop))
        if value is None:
            raise KeyError(
                f'items have no entry "{dotted(key)}", by which episodes are told apart: pass '
                "SliceSampler(end_key=...) or SliceSampler(traj_key=...)"
            )
        value = value.reshape(len(new), -1)
        if old:
            at = old.start - self._known.start
            value = torch.cat([self._value[at : at + len(old)], value])
        ends = torch.ones(len(live), dtype=torch.bool)  # the newest step ends what there is of it
        ends[:-1] = (
            value[:-1].bool().any(1) if self.traj_key is None else (value[1:] != value[:-1]).any(1)
        )
        last = ends.nonzero()[:, 0]
        first = torch.cat([last.new_zeros(1), last[:-1] + 1])
        self._known, self._value, self._spans = live, value, (first, last - first + 1)
        return self._spans
