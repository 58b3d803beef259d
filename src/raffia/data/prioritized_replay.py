"""`PrioritizedReplayBuffer`: a replay buffer that draws items by their priority."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from raffia.data.buffer import check_is_storage
from raffia.data.prioritized import PrioritizedSampler
from raffia.data.replay import ReplayBuffer
from raffia.data.storage import Storage
from raffia.tensordict.keys import NestedKey
from raffia.tensordict.tensordict import TensorDict


class PrioritizedReplayBuffer(ReplayBuffer):
    """A replay buffer whose items are drawn in proportion to their priority.

    alpha, beta, eps, reduction, max_priority_within_buffer, stratified, importance: see
        `PrioritizedSampler`.
    priority_key: the entry of a TensorDict that holds its priority, such as the size of the error
        of its last update. Items that come with one start with it; `update_tensordict_priority`
        reads it from a batch.

    The others are those of `ReplayBuffer`. A state that is loaded brings its own alpha, beta and
    eps, which count from then on.

    >>> from raffia.data.prioritized_replay import PrioritizedReplayBuffer
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

    def __init__(
        self,
        alpha: float,
        beta: float,
        *,
        storage: Storage,
        eps: float = 1e-8,
        priority_key: NestedKey = "td_error",
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        stratified: bool = False,
        importance: str = "buffer",
        collate_fn: Callable[[Any], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        batch_size: int | None = None,
        pin_memory: bool = False,
        device: torch.device | str | None = None,
        prefetch: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        check_is_storage(storage)
        if storage.max_size is None:
            raise ValueError(
                "priorities need a storage of limited size: TensorStorage(max_size=1_000_000)"
            )
        self.priorities = PrioritizedSampler(
            storage.max_size,
            alpha,
            beta,
            eps,
            reduction=reduction,
            max_priority_within_buffer=max_priority_within_buffer,
            stratified=stratified,
            importance=importance,
        )
        super().__init__(
            storage=storage,
            sampler=self.priorities,
            collate_fn=collate_fn,
            transform=transform,
            batch_size=batch_size,
            pin_memory=pin_memory,
            device=device,
            prefetch=prefetch,
            generator=generator,
        )
        self.priority_key = priority_key

    @property
    def alpha(self) -> float:
        """How much priorities count; setting it changes the chances of all items."""
        return self.priorities.alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        with self._changing():
            self.priorities.alpha = alpha

    @property
    def beta(self) -> float:
        """How much of the bias the weights undo."""
        return self.priorities.beta

    @beta.setter
    def beta(self, beta: float) -> None:
        with self._changing():
            self.priorities.beta = beta

    def extend(self, data: Any) -> Tensor:
        """Add items, as in `ReplayBuffer`; those that come with a priority start with it.

        >>> from raffia.data.storage import TensorStorage
        >>> buffer = PrioritizedReplayBuffer(1.0, 1.0, eps=0.0, storage=TensorStorage(9))
        >>> errors = torch.tensor([0.0, 3.0])
        >>> _ = buffer.extend(TensorDict(obs=torch.zeros(2, 4), td_error=errors, batch_size=[2]))
        >>> buffer.sample(3)["index"]  # the first is never drawn
        tensor([1, 1, 1])
        """
        with self._changing():  # priorities are checked for the alpha that is there when they count
            priority = self._priority_of(data, 1)
            if priority is None:
                return super().extend(data)
            numbers = super().extend(data)
            size = self.priorities.max_capacity  # of more than these the last ones are here
            self.sampler.update_priority(numbers[-size:], priority[-size:])
        return numbers

    def add(self, item: Any) -> int:
        with self._changing():
            priority = self._priority_of(item, 0)
            if priority is None:
                return super().add(item)
            number = super().add(item)
            self.sampler.update_priority(number, priority)
        return number

    def update_tensordict_priority(self, data: TensorDict) -> int:
        """Change the priorities of items of a batch, to what it holds under `priority_key`.

        Returns how many were left out, as their items had been overwritten.

        >>> from raffia.data.storage import TensorStorage
        >>> buffer = PrioritizedReplayBuffer(0.6, 0.4, storage=TensorStorage(9))
        >>> _ = buffer.extend(TensorDict(obs=torch.zeros(5), batch_size=[5]))
        >>> batch = buffer.sample(3)
        >>> buffer.update_tensordict_priority(batch.set("td_error", torch.rand(3)))
        0
        """
        return self.update_priority(data["index"], data[self.priority_key])

    def _priority_of(self, data: Any, batch_dims: int) -> Tensor | None:
        """The priority that items come with, if any; ValueError if it is none."""
        if not isinstance(data, TensorDict):
            return None
        priority = data.get(self.priority_key, None)
        if priority is None:
            return None
        self.priorities.check_priority(data.batch_size[:batch_dims], priority)
        return priority
