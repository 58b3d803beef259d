"""`PrioritizedReplayBuffer`: a replay buffer that draws items by their priority."""

from typing import Unpack

from raffia.data.buffer import check_is_storage
from raffia.data.list_storage import ListStorage
from raffia.data.prioritized import PrioritizedSampler
from raffia.data.replay import BufferOptions
from raffia.data.storage import Storage
from raffia.data.tensordict_replay import TensorDictReplayBuffer
from raffia.data.torchrl_storages import refuse_others
from raffia.tensordict.keys import NestedKey
from raffia.tensordict.signatures import shows_options_of


class PrioritizedReplayBuffer(TensorDictReplayBuffer):
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

    @shows_options_of(
        TensorDictReplayBuffer.__init__, without="sampler dim_extend shared compilable"
    )
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
        **options: Unpack[BufferOptions],
    ) -> None:
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
            reduction=reduction,
            max_priority_within_buffer=max_priority_within_buffer,
            stratified=stratified,
            importance=importance,
        )
        super().__init__(storage=storage, sampler=sampler, priority_key=priority_key, **options)

    @property
    def priorities(self) -> PrioritizedSampler:
        """The sampler."""
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


class TensorDictPrioritizedReplayBuffer(PrioritizedReplayBuffer):
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
        PrioritizedReplayBuffer.__init__, without="max_priority_within_buffer stratified"
    )
    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        priority_key: NestedKey = "td_error",
        eps: float = 1e-8,
        storage: Storage | None = None,
        reduction: str = "max",
        importance: str = "buffer",
        sync: bool = True,
        dim_extend: int = 0,
        shared: bool = False,
        compilable: bool = False,
        **options: Unpack[BufferOptions],
    ) -> None:
        refuse_others(sync=sync, dim_extend=dim_extend or 0, shared=shared, compilable=compilable)
        super().__init__(
            alpha,
            beta,
            storage=ListStorage(1000) if storage is None else storage,
            eps=eps,
            priority_key=priority_key,
            reduction=reduction,
            importance=importance,
            **options,
        )
