"""`ReplayShards`: one replay of several segment buffers, each with some of the environments.

Legend: S shards, T times, E environments, B segments, L rows in a segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from raffia.data.priorities import importance_weights
from raffia.data.row_feed import RowFeed
from raffia.data.segment import SegmentReplayBuffer
from raffia.data.segment_batches import stacked, unstacked
from raffia.data.steps import numbers, with_entries, with_priorities
from raffia.tensordict.keys import NestedKey
from raffia.tensordict.stack import cat
from raffia.tensordict.tensordict import TensorDict


class ReplayShards:
    """Segments out of S shards, B / S of each batch by each shard's own priorities.

    shards: S equal buffers, each with a separate generator if draws are to be repeated, and
        without `batch_size` and `prefetch`. Shard s has the environments whose number % S is s.
    reuse_memory: as in `SegmentReplayBuffer`, whose own should be False here.

    It has the calls of `SegmentReplayBuffer`, and numbers steps as these do: step i of shard s is
    S * i + s. Samples have besides

        total            [B]     S * the rows that ever came into the segment's shard + s, so that
                                 total - index tells a segment's age in rows of all shards

    and the first B / S segments of a sample are those of shard 0, and so on.

    Weights undo what the draw prefers. With N steps in all, c_i = (p_i + eps)^alpha, and s the
    shard of step i, a segment of the batch begins at step i with the probability

        P(i) = 1/S * c_i / C_s,   C_s = sum_{k in shard s} c_k,

    where one buffer would have c_i / sum_s C_s; so the shards' sums take part in the weights,

        w_i = (N * P(i))^-beta / max_k (N * P(k))^-beta = (P(i) / min_k P(k))^-beta,

    k over the batch or over all steps, as the buffers' `importance` says. With beta = 1 and without
    the division by the maximum, the mean of w_i f(i) over the batch is in expectation the mean of f
    over all steps. Without priorities shards with fewer steps are still drawn from as often; then
    weights undo all of that, as with beta = 1, and are 1 where shards have as many steps.

    A new step has the largest priority of its shard. A shard that can draw fewer steps than
    B / S draws some twice (`replacement=None` or True). While one can draw none there is no
    batch, and `len` is 0: to wait for the first steps of a replay is to wait for those of each
    shard.

    Source: Schaul, Quan, Antonoglou & Silver (2016), Prioritized experience replay, section 3.4;
    Horgan et al. (2018), Distributed prioritized experience replay (shards of a replay).

    >>> from raffia.data.storage import TensorStorage
    >>> replay = ReplayShards(
    ...     [SegmentReplayBuffer(TensorStorage(100), unroll_steps=1) for _ in range(2)])
    >>> no = torch.zeros(4, 6, dtype=torch.bool)
    >>> steps = TensorDict(
    ...     observation=torch.arange(6).expand(4, 6), terminated=no, truncated=no,
    ...     batch_size=[4, 6])
    >>> replay.extend(steps)[:2]
    tensor([[ 0,  1,  2,  3,  4,  5],
            [ 6,  7,  8,  9, 10, 11]])
    >>> replay.sample(8)["observation"][:, 0] % 2
    tensor([0, 0, 0, 0, 1, 1, 1, 1])
    """

    def __init__(
        self, shards: Sequence[SegmentReplayBuffer], *, reuse_memory: bool = False
    ) -> None:
        if not shards:
            raise ValueError(
                "no shards were given: pass one buffer for each, ReplayShards([buffer, other])"
            )
        if len({id(shard) for shard in shards}) < len(shards):
            raise ValueError(
                f"some of the {len(shards)} shards are the same buffer: create a separate one for "
                "each, as in ReplayShards([make_buffer() for _ in range(2)])"
            )
        self.shards, self.reuse_memory = list(shards), reuse_memory
        self._last: tuple[Any, TensorDict | None] = None, None  # structure, sample: to be reused

    @property
    def num_shards(self) -> int:
        """Number of shards, S."""
        return len(self.shards)

    def __len__(self) -> int:
        """How many steps can be drawn; 0 as long as a shard has none."""
        sizes = [len(shard) for shard in self.shards]
        return sum(sizes) if all(sizes) else 0

    def __repr__(self) -> str:
        return f"ReplayShards({self.num_shards} of {self.shards[0]!r})"

    @property
    def beta(self) -> float | None:
        """How much of the bias the weights undo; None without priorities."""
        return self.shards[0].beta

    @beta.setter
    def beta(self, beta: float) -> None:
        for shard in self.shards:
            shard.beta = beta

    @property
    def num_ignored(self) -> int:
        """How many priorities and updates came too late."""
        return sum([shard.num_ignored for shard in self.shards])

    def extend(self, steps: TensorDict) -> Tensor:
        """Append steps [T, E] of environments 0 .. E - 1; returns their numbers [T, E].

        Raises what `SegmentReplayBuffer.extend` raises, and ValueError if S does not divide E.

        >>> from raffia.data.storage import TensorStorage
        >>> replay = ReplayShards(
        ...     [SegmentReplayBuffer(TensorStorage(9), unroll_steps=0) for _ in range(2)])
        >>> replay.extend(TensorDict(batch_size=[1, 3]))
        Traceback (most recent call last):
        ...
        ValueError: steps [1, 3] cannot be divided equally among 2 shards: pass ...
        """
        size, shape = self.num_shards, list(steps.batch_size)
        if len(shape) != 2 or shape[1] % size:
            raise ValueError(
                f"steps {shape} cannot be divided equally among {size} shards: pass [T, E] with E "
                f"a multiple of {size}"
            )
        index = torch.empty(shape, dtype=torch.int64, device="cpu")
        for number, shard in enumerate(self.shards):
            index[:, number::size] = self._of_all(shard.extend(steps[:, number::size]), number)
        return index

    def give_rows_of(self, key: NestedKey) -> list[RowFeed]:
        """Make samples hold row numbers instead of an entry from now on, each within its shard.

        See `SegmentReplayBuffer.give_rows_of`; a feed for each shard.

        >>> from raffia.data.storage import TensorStorage
        >>> replay = ReplayShards(
        ...     [SegmentReplayBuffer(TensorStorage(9), unroll_steps=0) for _ in range(2)])
        >>> feeds = replay.give_rows_of("observation")
        >>> no = torch.zeros(1, 2, dtype=torch.bool)
        >>> index = replay.extend(TensorDict(
        ...     observation=torch.tensor([[7, 8]]), terminated=no, truncated=no, batch_size=[1, 2]))
        >>> replay.read(index[0])["observation"]
        tensor([[0],
                [0]])
        >>> feeds[1].read(torch.tensor([0]), total=1)
        tensor([8])
        """
        self._last = None, None
        return [shard.give_rows_of(key) for shard in self.shards]

    # -- segments go out

    def sample(self, batch_size: int) -> TensorDict:
        """Draw segments [B], B / S of each shard; the class documents what they hold.

        Raises ValueError if S does not divide B, or a shard has no step to draw yet; nothing was
        drawn then.

        >>> from raffia.data.storage import TensorStorage
        >>> replay = ReplayShards(
        ...     [SegmentReplayBuffer(TensorStorage(9), unroll_steps=0) for _ in range(2)])
        >>> replay.sample(5)
        Traceback (most recent call last):
        ...
        ValueError: 5 segments cannot be divided equally among 2 shards: sample(6)
        """
        size = self.num_shards
        each, rest = divmod(batch_size, size)
        if rest or each < 1:
            raise ValueError(
                f"{batch_size} segments cannot be divided equally among {size} shards: "
                f"sample({(each + 1) * size})"
            )
        empty = [number for number, shard in enumerate(self.shards) if not len(shard)]
        if empty:
            raise ValueError(
                f"no step can be drawn yet from shard {empty[0]} of {size}: add steps until "
                "len(replay) is not 0"
            )
        structure, last = self._last
        fits = last is not None and len(last) == batch_size
        if self.reuse_memory and fits and structure == self.shards[0].storage.structure:
            assert last is not None
            for shard, part in zip(self.shards, last.split(each), strict=True):
                shard.sample(each, out=part)
            drawn = last
        else:
            drawn = self._joined([shard.sample(each) for shard in self.shards])
        if self.reuse_memory:
            self._last = self.shards[0].storage.structure, drawn
        sample = drawn.copy()  # what is set from here on is not set in what is reused
        sample["priority_weight"] = self._weights(sample["index"].split(each))
        return self._numbered(sample, [each] * size)

    def _weights(self, index: Sequence[Tensor]) -> Tensor:
        """The weights of drawn steps, which are given by their numbers in each shard."""
        pairs = list(zip(self.shards, index, strict=True))
        # Of P the factor 1/S is left out: it is not a step's own.
        chances = torch.cat([shard.probability(own.cpu()) for shard, own in pairs])
        least = None
        if self.shards[0].importance == "buffer":
            least = min([shard.least_probability() for shard in self.shards])
        beta = 1.0 if self.beta is None else self.beta
        return importance_weights(chances, least, beta).to(index[0].device)

    def read(self, index: Tensor) -> TensorDict:
        """The segments that start at these steps [B], in the form of `sample`, with weights 1.

        >>> from raffia.data.storage import TensorStorage
        >>> replay = ReplayShards(
        ...     [SegmentReplayBuffer(TensorStorage(9), unroll_steps=0) for _ in range(2)])
        >>> no = torch.zeros(1, 2, dtype=torch.bool)
        >>> _ = replay.extend(TensorDict(
        ...     observation=torch.tensor([[7, 8]]), terminated=no, truncated=no, batch_size=[1, 2]))
        >>> replay.read(torch.tensor([1, 0]))["observation"]
        tensor([[8],
                [7]])
        """
        index = numbers(index)
        if index.ndim != 1 or not len(index):
            raise ValueError(
                f"index must have shape [B] with B at least 1; got {list(index.shape)}"
            )
        parts, positions, sizes = [], [], []
        for shard, own, mine in self._parts(index):
            sizes.append(len(own))
            if len(own):
                parts.append(shard.read(own))
                positions.append(mine.nonzero()[:, 0])
        found = self._numbered(self._joined(parts), sizes)
        order = torch.cat(positions)
        if torch.equal(order, torch.arange(len(order), device="cpu")):
            return found
        return found[order.argsort()]

    def contains(self, index: Tensor) -> Tensor:
        """Whether these numbers are of steps that can be drawn and read: bool.

        >>> from raffia.data.storage import TensorStorage
        >>> replay = ReplayShards(
        ...     [SegmentReplayBuffer(TensorStorage(9), unroll_steps=0) for _ in range(2)])
        >>> replay.contains(torch.tensor([0, 1]))
        tensor([False, False])
        """
        index = numbers(index)
        found = torch.zeros_like(index, dtype=torch.bool)
        for shard, own, mine in self._parts(index):
            found[mine] = shard.contains(own)
        return found

    def _joined(self, parts: Sequence[TensorDict]) -> TensorDict:
        """Parts of a sample as one, stacks over their frames as ever."""
        stacks = self.shards[0].stacks
        joined: TensorDict = cat([part.exclude(*stacks) for part in parts])
        for path, stack in stacks.items():
            frames = [unstacked(part[path]) for part in parts]
            known = [one for one in frames if one is not None]
            assert len(known) == len(parts)
            joined[path] = stacked(torch.cat(known), stack)
        return joined

    def _numbered(self, sample: TensorDict, sizes: Sequence[int]) -> TensorDict:
        """A sample with the numbers of all shards instead of each shard's."""
        number = torch.arange(self.num_shards, device="cpu")
        number = number.repeat_interleave(number.new_tensor(sizes))
        total = torch.tensor([shard.storage.total for shard in self.shards], device="cpu")[number]
        device = sample["index"].device
        number, total = number.to(device), total.to(device)
        sample["total"] = self._of_all(total, number)
        sample["index"] = self._of_all(sample["index"], number)
        rows = sample["step_index"]
        sample["step_index"] = torch.where(rows < 0, -1, self._of_all(rows, number.unsqueeze(1)))
        return sample

    def _of_all(self, own: Tensor, shard: Tensor | int) -> Tensor:
        return own * self.num_shards + shard

    def _own(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers that steps have in their shards, and these; of -1 it is -1 in the last."""
        return index.div(self.num_shards, rounding_mode="floor"), index % self.num_shards

    def _parts(self, index: Tensor) -> Iterator[tuple[SegmentReplayBuffer, Tensor, Tensor]]:
        """For each shard the numbers that its steps have in it, and which ones of `index` they are.

        The latter is a mask: bool, of the shape of `index`.
        """
        own, number = self._own(index)
        for shard, buffer in enumerate(self.shards):
            mine = number == shard
            yield buffer, own[mine], mine

    # -- what is known better later

    def update_priority(self, index: Tensor, priority: Tensor | float) -> int:
        """Change the priorities of steps; see `SegmentReplayBuffer.update_priority`.

        >>> from raffia.data.storage import TensorStorage
        >>> replay = ReplayShards([SegmentReplayBuffer(
        ...     TensorStorage(9), unroll_steps=0, alpha=0.6, beta=0.4) for _ in range(2)])
        >>> no = torch.zeros(1, 2, dtype=torch.bool)
        >>> index = replay.extend(TensorDict(
        ...     observation=torch.tensor([[7, 8]]), terminated=no, truncated=no, batch_size=[1, 2]))
        >>> replay.update_priority(index[0], torch.tensor([1.0, 2.0]))
        0
        """
        index, priority = with_priorities(index, priority)
        self._refuse_unknown(index, 0)
        self.shards[0].check_priority(priority)
        priority = priority.expand(index.shape)
        parts = self._parts(index)
        return sum([shard.update_priority(own, priority[mine]) for shard, own, mine in parts])

    def update(self, index: Tensor, entries: Any) -> int:
        """Write entries of stored rows; see `SegmentReplayBuffer.update`.

        >>> from raffia.data.storage import TensorStorage
        >>> replay = ReplayShards(
        ...     [SegmentReplayBuffer(TensorStorage(9), unroll_steps=0) for _ in range(2)])
        >>> no = torch.zeros(1, 2, dtype=torch.bool)
        >>> index = replay.extend(TensorDict(
        ...     observation=torch.tensor([[7, 8]]), terminated=no, truncated=no, batch_size=[1, 2]))
        >>> replay.update(index[0], TensorDict(observation=torch.tensor([1, 2]), batch_size=[2]))
        0
        >>> replay.read(index[0])["observation"].tolist()
        [[1], [2]]
        """
        index = with_entries(index, entries)
        self._refuse_unknown(index, -1)
        parts = self._parts(index)
        return sum([shard.update(own, entries[mine]) for shard, own, mine in parts])

    def _refuse_unknown(self, index: Tensor, least: int) -> None:
        own, number = self._own(index)
        totals = torch.tensor([shard.storage.total for shard in self.shards], device="cpu")
        wrong = index[(index < least) | (own >= totals[number])]
        if len(wrong):
            raise IndexError(
                f"there is no step {int(wrong[0])}: only {totals.tolist()} rows have been added "
                f'to the {self.num_shards} shards so far. Pass the "index" or "step_index" of a '
                "sample. Nothing was changed"
            )

    # -- keeping

    def empty(self) -> None:
        """Discard all steps; numbers start at 0 again.

        >>> from raffia.data.storage import TensorStorage
        >>> replay = ReplayShards(
        ...     [SegmentReplayBuffer(TensorStorage(9), unroll_steps=0) for _ in range(2)])
        >>> replay.empty()
        """
        for shard in self.shards:
            shard.empty()

    def state_dict(self) -> dict[str, Any]:
        """The states of all shards, by their numbers.

        >>> from raffia.data.storage import TensorStorage
        >>> replay = ReplayShards(
        ...     [SegmentReplayBuffer(TensorStorage(9), unroll_steps=0) for _ in range(2)])
        >>> sorted(replay.state_dict())
        ['0', '1']
        """
        return {str(number): shard.state_dict() for number, shard in enumerate(self.shards)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict`, of as many shards: resumes bit for bit.

        >>> from raffia.data.storage import TensorStorage
        >>> one, two = (ReplayShards(
        ...     [SegmentReplayBuffer(TensorStorage(9), unroll_steps=0) for _ in range(num)])
        ...     for num in (1, 2))
        >>> one.load_state_dict(two.state_dict())
        Traceback (most recent call last):
        ...
        ValueError: the state has 2 shards, but here there are 1: create the replay ...
        """
        if sorted(state) != sorted(map(str, range(self.num_shards))):
            raise ValueError(
                f"the state has {len(state)} shards, but here there are {self.num_shards}: create "
                "the replay with the same settings as the saved one"
            )
        for number, shard in enumerate(self.shards):
            shard.load_state_dict(state[str(number)])
