"""Samplers of the items of a batch: `Sampler`, the contract, and two samplers.

Items are known by their number: the first item ever added is 0, the next is 1, and so on for ever,
whatever row of the storage they lie in. Numbers of items that were overwritten are not used again.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raffia.data.processes import ByValue, by_value
from raffia.data.structure import check_entries


class Draw(NamedTuple):
    """The items of one batch."""

    items: Tensor  # int64 [n], the numbers of the items
    info: dict[Any, Tensor]  # key of an entry -> [n, ...], more about each of them
    ends_epoch: bool = False  # whether the next batch begins a new round


class Sampler(ByValue):
    """The contract of a sampler; this base knows the live items, and has no other state.

    Only `draw` must be written. A sampler that keeps something writes the methods that go with it:
    `added`, `follow`, `clear`, `state_dict` and `load_state_dict`; and `mark` and `rewind`, if
    drawing changes it. A replay buffer calls all of them under its lock, which it leaves in `lock`
    for what others call. Whatever changes later draws, but for `draw` itself, adds one to
    `version`, so that no batch drawn ahead is used afterwards.

    >>> class Newest(Sampler):
    ...     def draw(self, n, live, generator=None):
    ...         return Draw(torch.arange(live.stop - n, live.stop), {})
    >>> Newest().draw(2, range(7)).items
    tensor([5, 6])
    """

    version = 0
    lock: AbstractContextManager[Any] = nullcontext()
    max_capacity: Any = None  # how many items there may be, where that matters
    by_position = False  # whether items must stay where they were added

    def __getstate__(self) -> dict[str, Any]:
        """The state without the lock, which belongs to the buffer; tensors by value."""
        return by_value({name: value for name, value in self.__dict__.items() if name != "lock"})

    def attach(self, storage: Any) -> None:
        """Receive the storage that holds the items; called once, before all else.

        >>> from raffia.data.storage import TensorStorage
        >>> RandomSampler().attach(TensorStorage(5))
        """
        return None  # most need nothing of it

    def draw(self, n: int, live: range, generator: torch.Generator | None = None) -> Draw:
        """Choose n of the live items, of which there is at least one.

        >>> RandomSampler().draw(3, range(5, 6)).items
        tensor([5, 5, 5])
        """
        raise NotImplementedError(f"{type(self).__name__} must define draw(n, live, generator)")

    def added(self, items: range) -> None:
        """Receive the numbers of new items, which may have overwritten the oldest.

        >>> SamplerWithoutReplacement().added(range(4))
        """

    def follow(self, live: range) -> None:
        """Receive the live items, before each draw and addition; mostly they are known already.

        They are others where a state was loaded that is older than the storage, or where another
        process writes into it. Raises ValueError, and changes nothing, if there are fewer than it
        knows of.

        >>> SamplerWithoutReplacement().follow(range(4))
        """

    def update_priority(self, index: Tensor | int, priority: Tensor | float) -> int:
        """Change priorities; here an error, as there are none.

        >>> from raffia.data.prioritized import PrioritizedSampler
        >>> PrioritizedSampler(5, alpha=1.0, beta=1.0).update_priority(torch.tensor([]), 1.0)
        0
        """
        raise TypeError(
            f"{type(self).__name__} has no priorities; use PrioritizedReplayBuffer, or "
            "ReplayBuffer(sampler=PrioritizedSampler(max_capacity, alpha, beta))"
        )

    def clear(self) -> None:
        """Forget all items.

        >>> SamplerWithoutReplacement().clear()
        """

    def mark(self) -> object:
        """The state that draws change, for `rewind`.

        >>> RandomSampler().mark()
        """
        return None

    def rewind(self, mark: Any) -> None:
        """Restore the state at `mark`, which undoes the draws since then.

        A mark from before it was cleared, or another state loaded, has no meaning any more.

        >>> sampler = SamplerWithoutReplacement()
        >>> mark = sampler.mark()
        >>> first = sampler.draw(2, range(5)).items
        >>> sampler.rewind(mark)
        """

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state, as tensors and numbers.

        >>> RandomSampler().state_dict()
        {}
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict`.

        >>> RandomSampler().load_state_dict({})
        """
        self.version += 1


def too_few(known: int, live: range) -> ValueError:
    """The error about a storage that has fewer items than a sampler knows of.

    >>> too_few(7, range(4))
    ValueError('the sampler knows of 7 items, but the storage has 4: ...
    """
    return ValueError(
        f"the sampler knows of {known} items, but the storage has {live.stop}: the state of the "
        "sampler is newer, or the storage was cleared without the buffer. buffer.sampler.clear() "
        "resets the sampler"
    )


class RandomSampler(Sampler):
    """Every item with equal probability, each batch on its own.

    replacement: whether an item can stand in one batch several times. False needs at least as many
        items as the batch has; to see each item once before any comes again, over several batches,
        use `SamplerWithoutReplacement`.

    >>> sorted(RandomSampler(replacement=False).draw(3, range(10, 13)).items.tolist())
    [10, 11, 12]
    """

    def __init__(self, *, replacement: bool = True) -> None:
        self.replacement = replacement

    def draw(self, n: int, live: range, generator: torch.Generator | None = None) -> Draw:
        if self.replacement:
            drawn = torch.randint(live.start, live.stop, (n,), generator=generator, device="cpu")
            return Draw(drawn, {})
        if n > len(live):
            raise ValueError(
                f"{n} different items cannot be drawn from {len(live)}: sample fewer, or use "
                "RandomSampler(replacement=True)"
            )
        return Draw(distinct(n, len(live), generator) + live.start, {})


def distinct(n: int, end: int, generator: torch.Generator | None = None) -> Tensor:
    """n distinct numbers below `end`, every choice and order equally likely; int64 [n].

    Takes time in proportion to n, not to `end`.

    >>> sorted(distinct(4, 4).tolist())
    [0, 1, 2, 3]
    """
    if 2 * n >= end:
        return torch.randperm(end, generator=generator, device="cpu")[:n]
    # Numbers that came before are drawn again: the first n different ones of a sequence.
    drawn = torch.randint(end, (n,), generator=generator, device="cpu")
    while True:
        ordered, order = torch.sort(drawn, stable=True)
        again = order[1:][ordered[1:] == ordered[:-1]]
        if not len(again):
            return drawn
        fresh = torch.ones_like(drawn, dtype=torch.bool)
        fresh[again] = False
        more = torch.randint(end, (len(again),), generator=generator, device="cpu")
        drawn = torch.cat([drawn[fresh], more])


class SamplerWithoutReplacement(Sampler):
    """A sampler that draws every item once per epoch, in a different order for each epoch.

    drop_last: the last batch of an epoch has the items that are left, which can be fewer than
        asked for. True leaves them out instead, so that all batches are of the same size.
    shuffle: False goes from the oldest item to the newest.

    An epoch is over the items that were there when it began. Items added meanwhile come in the
    next one; items overwritten meanwhile are left out. (So after a buffer has been filled again as
    a whole the next batch begins an epoch over the new content.) Where all that is left is
    overwritten the epoch ends without notice: `ends_epoch` of the batch before was False.

    >>> sampler = SamplerWithoutReplacement(shuffle=False)
    >>> [sampler.draw(2, range(3)).items.tolist() for _ in range(4)]
    [[0, 1], [2], [0, 1], [2]]
    """

    def __init__(self, drop_last: bool = False, shuffle: bool = True) -> None:
        self.drop_last = drop_last
        self.shuffle = shuffle
        # Left of this epoch; never written to.
        self._order = torch.empty(0, dtype=torch.int64, device="cpu")
        self._oldest = 0  # none of them is older
        self._end = 0  # all of them are below

    def draw(self, n: int, live: range, generator: torch.Generator | None = None) -> Draw:
        if self.drop_last and n > len(live):
            raise ValueError(
                f"{len(live)} items do not fill a batch of {n}, and drop_last=True leaves smaller "
                "batches out: sample fewer, or use SamplerWithoutReplacement(drop_last=False)"
            )
        least = n if self.drop_last else 1  # to continue this epoch
        order = self._order
        if live.start > self._oldest:
            order = order[order >= live.start]
        if len(order) < least:
            order, self._end = torch.arange(live.start, live.stop, device="cpu"), live.stop
            if self.shuffle:
                order = order[torch.randperm(len(live), generator=generator, device="cpu")]
        self._order, self._oldest = order[n:], live.start
        return Draw(order[:n].clone(), {}, ends_epoch=len(self._order) < least)

    def follow(self, live: range) -> None:
        if live.stop < self._end:
            raise too_few(self._end, live)

    def clear(self) -> None:
        with self.lock:
            self._order, self._end = self._order[:0], 0
            self.version += 1

    def mark(self) -> object:
        return self._order, self._oldest, self._end, self.version

    def rewind(self, mark: Any) -> None:
        if mark[-1] == self.version:
            self._order, self._oldest, self._end, _ = mark

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_entries(state, ("order",), "a SamplerWithoutReplacement")
        with self.lock:
            self._order, self._oldest = state["order"].clone(), 0
            self._end = int(self._order.max()) + 1 if len(self._order) else 0
            self.version += 1
