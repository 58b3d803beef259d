"""Replay buffers by TorchRL's names, which draw by priorities and read them in the items."""

from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor
from typing_extensions import TypeVar

from raffia.data.buffer import check_is_storage
from raffia.data.items import batch_of, rows_of, value_at, with_value, without_value
from raffia.data.prioritized import PrioritizedSampler
from raffia.data.replay import BufferOptions, ReplayBuffer, made
from raffia.data.samplers import Sampler
from raffia.data.storage import Storage
from raffia.data.torchrl_storages import ListStorage, refuse_others
from raffia.tensordict.keys import NestedKey, unravel_key_to_tuple
from raffia.tensordict.node import Node
from raffia.tensordict.signatures import shows_options_of
from raffia.tensordict.tensordict import TensorDict

Batch = TypeVar("Batch", default=TensorDict)  # `TensorDictReplayBuffer[Step]`: a tensorclass


class TensorDictReplayBuffer(ReplayBuffer[Batch]):
    """A replay buffer of TensorDicts, with the arguments that TorchRL's has.

    priority_key: the entry that holds the priority of an item, such as the size of the error of its
        last update, where the sampler is a `PrioritizedSampler`. Items that come with one start
        with it; `update_tensordict_priority` reads it from a batch.
    storage: `ListStorage(1000)` if None.

    The others are those of `ReplayBuffer`.

    >>> from raffia.data import LazyTensorStorage, TensorDictReplayBuffer
    >>> buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> _ = buffer.extend(TensorDict(obs=torch.arange(6.0), batch_size=[6]))
    >>> sorted(buffer.sample().keys())
    ['index', 'obs']
    """

    @shows_options_of(ReplayBuffer.__init__)
    def __init__(
        self,
        *,
        priority_key: NestedKey = "td_error",
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        **options: Unpack[BufferOptions],
    ) -> None:
        super().__init__(storage=storage, sampler=sampler, **options)
        self.priority_key = priority_key

    @property
    def priorities(self) -> PrioritizedSampler | None:
        """The sampler if it draws by priority, otherwise None."""
        return self.sampler if isinstance(self.sampler, PrioritizedSampler) else None

    def extend(self, data: Any) -> Tensor:
        """Add items, as in `ReplayBuffer`; those that come with a priority start with it.

        Items with and without one can be mixed: where it is stored, those without one get the one
        that they start with, the largest so far; where it is not, it is left out.

        >>> from raffia.data.storage import TensorStorage
        >>> sampler = PrioritizedSampler(9, alpha=1.0, beta=1.0, eps=0.0)
        >>> buffer = TensorDictReplayBuffer(storage=TensorStorage(9), sampler=sampler)
        >>> errors = torch.tensor([0.0, 3.0])
        >>> _ = buffer.extend(TensorDict(obs=torch.zeros(2, 4), td_error=errors, batch_size=[2]))
        >>> buffer.sample(3)["index"]  # the first is never drawn
        tensor([1, 1, 1])
        """
        if self.priorities is None:
            return super().extend(data)
        with self._lock:  # priorities are checked for the alpha that is there when they count
            self._before_change()
            if type(data) is list and data and isinstance(data[0], (Node, dict)):
                return self._extend_list(data)
            data, priority = self._with_priority(data, 1)
            numbers = super().extend(data)
            if priority is not None:
                size = self.storage.max_size or 0  # of more than these the last ones are here
                self.sampler.update_priority(numbers[-size:], priority[-size:])
        return numbers

    def _extend_list(self, data: list[Any]) -> Tensor:
        """Add the items of a list, each of which may come with a priority or without one."""
        fitted = [self._fitted(item, 0) for item in data]
        items = [item for item, _ in fitted]
        if self._differ_in_shape(items):
            for item, priority in fitted:
                self._check_priority(item, priority, 0)
            return torch.tensor([self.add(item) for item in data], device="cpu")
        rows = rows_of(items, self.storage.structure)
        given = {n: priority for n, (_, priority) in enumerate(fitted) if priority is not None}
        if not given or self.priorities is None:
            return super().extend(rows)
        priorities = torch.stack(list(given.values()))
        self.priorities.check_priority(priorities.shape[:1], priorities)
        numbers = super().extend(rows)
        first = max(0, len(data) - (self.storage.max_size or len(data)))  # the first that stays
        stays = [n for n in given if n >= first]
        if stays:
            self.sampler.update_priority(numbers[stays], priorities[-len(stays) :])
        return numbers

    def _differ_in_shape(self, items: list[Any]) -> bool:
        """Whether a `ListStorage` takes the items one by one, and no other storage does."""
        if not isinstance(self.storage, ListStorage):
            return False
        try:
            rows_of(items, self.storage.structure)
        except ValueError:
            self.storage.check(items)  # all of them, before one is added
            return True
        return False

    def add(self, item: Any) -> int:
        if self.priorities is None:
            return super().add(item)
        with self._lock:
            self._before_change()
            item, priority = self._with_priority(item, 0)
            number = super().add(item)
            if priority is not None:
                self.sampler.update_priority(number, priority)
        return number

    def update_tensordict_priority(self, data: TensorDict) -> int:
        """Change the priorities of items of a batch, to what it holds under `priority_key`.

        Returns how many were left out, as their items had been overwritten. Where the sampler has
        no priorities there is nothing to change, so a program can call it with any sampler.

        >>> from raffia.data.storage import TensorStorage
        >>> sampler = PrioritizedSampler(9, alpha=0.6, beta=0.4)
        >>> buffer = TensorDictReplayBuffer(storage=TensorStorage(9), sampler=sampler)
        >>> _ = buffer.extend(TensorDict(obs=torch.zeros(5), batch_size=[5]))
        >>> batch = buffer.sample(3)
        >>> buffer.update_tensordict_priority(batch.set("td_error", torch.rand(3)))
        0
        """
        if self.priorities is None:
            return 0
        index, priority = data["index"], data[self.priority_key]
        if index.ndim > 1 and len(index):
            each = index.reshape(len(index), -1)[:, 0]
            if torch.equal(each.view(-1, *[1] * (index.ndim - 1)).expand_as(index), index):
                index = each  # of items with a batch size: one priority is made of each one's
        return self.update_priority(index, priority)

    def _with_priority(self, data: Any, batch_dims: int) -> tuple[Any, Tensor | None]:
        """Items as they can be stored, and the priority that they come with, if any.

        Raises ValueError for an invalid priority.
        """
        fitted, priority = self._fitted(data, batch_dims)
        self._check_priority(data, priority, batch_dims)
        return fitted, priority

    def _check_priority(self, data: Any, priority: Tensor | None, batch_dims: int) -> None:
        if priority is not None and self.priorities is not None:
            self.priorities.check_priority(batch_of(data, batch_dims), priority)

    def _fitted(self, data: Any, batch_dims: int) -> tuple[Any, Tensor | None]:
        """Items as they can be stored, and the priority that they come with, unchecked."""
        priorities = self.priorities
        if priorities is None or not isinstance(data, (Node, dict)):
            return data, None
        path, structure = unravel_key_to_tuple(self.priority_key), self.storage.structure
        priority = value_at(data, path)
        if priority is not None:
            priority = torch.as_tensor(priority)
        if structure is None or (path in structure.paths) == (priority is not None):
            return data, priority
        if priority is not None:
            return without_value(data, path), priority
        layout = structure.layouts[structure.paths.index(path)]
        shape = (*batch_of(data, batch_dims), *layout.shape)
        start = torch.full(shape, priorities.default_priority, dtype=layout.dtype, device="cpu")
        return with_value(data, path, start), None


class PrioritizedReplayBuffer(TensorDictReplayBuffer[Batch]):
    """A replay buffer whose items are drawn in proportion to their priority.

    alpha, beta, eps, reduction, max_priority_within_buffer, stratified, importance: see
        `PrioritizedSampler`.
    priority_key: the entry of a TensorDict that holds its priority, such as the size of the error
        of its last update. Items that come with one start with it; `update_tensordict_priority`
        reads it from a batch.

    The others are those of `ReplayBuffer`. A state that is loaded brings its own alpha, beta and
    eps, which count from then on.

    >>> from raffia.data.tensordict_replay import PrioritizedReplayBuffer
    >>> from raffia.data.storage import TensorStorage
    >>> rng = torch.Generator().manual_seed(0)
    >>> buffer = PrioritizedReplayBuffer(1.0, 1.0, storage=TensorStorage(100), generator=rng)
    >>> _ = buffer.extend(TensorDict(obs=torch.arange(4.0), batch_size=[4]))
    >>> buffer.update_priority(torch.arange(4), torch.tensor([1.0, 1.0, 1.0, 3.0]))
    0
    >>> batch = buffer.sample(4)
    >>> batch["index"], batch["priority_weight"]
    (tensor([3, 3, 2, 3]), tensor([0.3333, 0.3333, 1.0000, 0.3333]))
    """

    @shows_options_of(TensorDictReplayBuffer.__init__, without="sampler")
    def __init__(
        self,
        alpha: float,
        beta: float,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        priority_key: NestedKey = "td_error",
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        stratified: bool = False,
        importance: str = "buffer",
        **options: Unpack[BufferOptions],
    ) -> None:
        storage = ListStorage(1000) if storage is None else made(storage, Storage)
        check_is_storage(storage)
        if storage.max_size is None:
            raise ValueError(
                "priorities need a storage of limited size: TensorStorage(max_size=1_000_000)"
            )
        sampler = PrioritizedSampler(
            storage.max_size,
            alpha,
            beta,
            eps,
            dtype,
            reduction,
            max_priority_within_buffer,
            stratified=stratified,
            importance=importance,
        )
        super().__init__(storage=storage, sampler=sampler, priority_key=priority_key, **options)

    @property
    def priorities(self) -> PrioritizedSampler:
        """The sampler, which holds the priorities."""
        assert isinstance(self.sampler, PrioritizedSampler)
        return self.sampler

    @property
    def alpha(self) -> float:
        """How much priorities count; setting it changes the chances of all items."""
        return self.priorities.alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        with self._lock:
            self._before_change()
            self.priorities.alpha = alpha

    @property
    def beta(self) -> float:
        """How much of the bias the weights undo."""
        return self.priorities.beta

    @beta.setter
    def beta(self, beta: float) -> None:
        with self._lock:
            self._before_change()
            self.priorities.beta = beta


class TensorDictPrioritizedReplayBuffer(PrioritizedReplayBuffer[Batch]):
    """`PrioritizedReplayBuffer` with the arguments that TorchRL's has.

    storage: `ListStorage(1000)` if None.

    >>> from raffia import TensorDict
    >>> from raffia.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
    >>> buffer = TensorDictPrioritizedReplayBuffer(
    ...     alpha=0.7, beta=0.5, storage=LazyTensorStorage(100), batch_size=4
    ... )
    >>> _ = buffer.extend(TensorDict(obs=torch.arange(6.0), batch_size=[6]))
    >>> sorted(buffer.sample().keys())
    ['index', 'obs', 'priority_weight']
    """

    @shows_options_of(
        PrioritizedReplayBuffer.__init__, without="max_priority_within_buffer stratified dtype"
    )
    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        priority_key: NestedKey = "td_error",
        eps: float = 1e-8,
        storage: Storage | Callable[[], Storage] | None = None,
        reduction: str = "max",
        importance: str = "buffer",
        sync: bool = True,
        **options: Unpack[BufferOptions],
    ) -> None:
        refuse_others(sync=sync)
        super().__init__(
            alpha,
            beta,
            storage=storage,
            eps=eps,
            priority_key=priority_key,
            reduction=reduction,
            importance=importance,
            **options,
        )
