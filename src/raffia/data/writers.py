"""Writers, by the names of TorchRL: over the oldest items, over the least ones, or none."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from raffia.data.items import rows_of
from raffia.data.prioritized import REDUCTIONS as PRIORITY_REDUCTIONS
from raffia.data.storage import Storage
from raffia.data.torchrl_storages import refuse_others
from raffia.hints import check_choice
from raffia.tensordict.functions import is_tensor_collection
from raffia.tensordict.keys import MissingKeyError, NestedKey, dotted, unravel_key_to_tuple
from raffia.tensordict.lazy import lazy_stack


class Writer:
    """Decides whether items are added; this one takes all, over the oldest where it is full.

    compilable, track_generations: TorchRL's; False only.

    >>> Writer().check()
    """

    chooses = False  # whether `chosen` leaves items out, and moves others

    def __init__(self, compilable: bool = False, *, track_generations: bool = False) -> None:
        refuse_others(compilable=compilable, track_generations=track_generations)

    def check(self) -> None:
        """Raise RuntimeError if nothing may be written."""

    def chosen(self, data: Any, storage: Storage) -> tuple[Any, Tensor]:
        """Make room for those of new items that are stored; called only of one that `chooses`.

        returns: these items, to be appended, and their indices among the new ones, int64 [n]
        """
        raise NotImplementedError(f"{type(self).__name__} must define chosen()")


class RoundRobinWriter(Writer):
    """Writes new items over the oldest, as a buffer does without a writer.

    >>> from raffia.data import LazyTensorStorage, ReplayBuffer, RoundRobinWriter
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(3), writer=RoundRobinWriter())
    """


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """`RoundRobinWriter` by TorchRL's other name: numbers of items are in batches in any case.

    >>> TensorDictRoundRobinWriter().check()
    """


class ImmutableDatasetWriter(Writer):
    """Refuses all items: the buffer gives batches of what its storage held before.

    >>> from raffia.data import ImmutableDatasetWriter, LazyTensorStorage, ReplayBuffer
    >>> storage = LazyTensorStorage(3)
    >>> _ = storage.extend([1.0, 2.0])
    >>> buffer = ReplayBuffer(storage=storage, writer=ImmutableDatasetWriter())
    >>> buffer.add(3.0)
    Traceback (most recent call last):
    ...
    RuntimeError: this buffer has an ImmutableDatasetWriter, so nothing can be added to it: ...
    """

    def check(self) -> None:
        raise RuntimeError(
            "this buffer has an ImmutableDatasetWriter, so nothing can be added to it: create it "
            "without a writer to add items"
        )


REDUCTIONS = {**PRIORITY_REDUCTIONS, "sum": lambda rank: rank.sum(-1)}


class TensorDictMaxValueWriter(Writer):
    """The buffer keeps the items of the largest ranks: of a full one the least makes room.

    `extend` gives -1 as the number of an item that is not stored, and so does `add`. Of equal ranks
    the older item stays. Items that stay may get other numbers, so it goes with samplers that have
    no priorities and no slices.

    rank_key: the entry by which items are ranked; ("next", "reward") if None.
    reduction: "max", "min", "mean", "median" or "sum": makes one rank of several, as of the rewards
        of an item that is a whole rollout.

    >>> from raffia import TensorDict
    >>> from raffia.data import LazyTensorStorage, TensorDictMaxValueWriter, TensorDictReplayBuffer
    >>> writer = TensorDictMaxValueWriter(rank_key="score")
    >>> buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(2), writer=writer)
    >>> buffer.extend(TensorDict(score=torch.tensor([3, 9, 5, 1]), batch_size=[4]))
    tensor([-1,  0,  1, -1])
    >>> buffer.add(TensorDict(score=torch.tensor(6)))
    2
    >>> buffer[:]["score"]
    tensor([9, 6])
    """

    chooses = True

    def __init__(self, rank_key: NestedKey | None = None, reduction: str = "sum") -> None:
        check_choice("reduction", reduction, REDUCTIONS)
        self.rank_key = ("next", "reward") if rank_key is None else rank_key
        self.reduction = reduction

    def chosen(self, data: Any, storage: Storage) -> tuple[Any, Tensor]:
        size = storage.max_size
        if size is None:
            raise ValueError("a writer that holds the best items needs a storage with a max_size")
        if storage.mixes_shapes and type(data) is list and all(map(is_tensor_collection, data)):
            data = lazy_stack(data) if data else rows_of(data, storage.structure)
        else:
            data = rows_of(data, storage.structure)
        if not is_tensor_collection(data):
            raise TypeError(
                "items that are ranked by an entry must be containers; got a "
                f"{type(data).__name__}: pass TensorDict({{...}}, batch_size=[n])"
            )
        storage.check(data)
        path = unravel_key_to_tuple(self.rank_key)
        if path not in data.keys(True):
            raise MissingKeyError(
                f'the items have no entry "{dotted(self.rank_key)}" to rank them by: pass '
                "TensorDictMaxValueWriter(rank_key=...)"
            )
        given = data.select(path)
        new = self._ranks(
            lambda items: given[items].get(path), torch.arange(len(data), device="cpu")
        )
        if bool(new.isnan().any()):
            raise ValueError(
                f'"{dotted(self.rank_key)}" is NaN, which cannot be ranked. Nothing was changed'
            )
        num_old = len(storage)
        # The oldest first.
        old_rows = torch.arange(storage.total - num_old, storage.total, device="cpu") % size
        old = self._ranks(partial(storage.entry, path), old_rows) if num_old else new[:0]
        ranks = torch.cat([old, new])
        too_many = len(ranks) - size
        if too_many <= 0:
            return data, torch.arange(len(data), device="cpu")
        bound = ranks.kthvalue(too_many).values
        leaves = ranks < bound
        equal = (ranks == bound).nonzero()[:, 0]  # of which the newer ones leave
        leaves[equal[len(equal) + int(leaves.sum()) - too_many :]] = True
        stored = (~leaves[num_old:]).nonzero()[:, 0]
        gone = leaves[:num_old].nonzero()[:, 0]
        # As many of the oldest are overwritten: those that stay move to where others leave.
        stays = (~leaves[: len(gone)]).nonzero()[:, 0]
        if len(stays):
            moves = [(old_rows[gone[gone >= len(gone)]], old_rows[stays])]
            if storage.mixes_shapes:
                moves = list(zip(*moves[0], strict=True))
            for to, source in moves:
                storage.set(to, storage.read(source))
        return data[stored], stored

    def _ranks(self, read: Callable[[Tensor], Tensor], items: Tensor) -> Tensor:
        """The ranks of items, whose entry is read at once, or one by one if their shapes differ."""
        try:
            entry = read(items).detach().cpu().double()
        except (ValueError, RuntimeError):
            if len(items) < 2:
                raise
            return torch.cat([self._ranks(read, one) for one in items.split(1)])
        each = entry.shape[1:].numel()
        ranks: Tensor = REDUCTIONS[self.reduction](entry.reshape(len(entry), each))
        return ranks
