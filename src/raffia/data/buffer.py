"""`Buffer`: what all replay buffers have in common, and the checks of their options."""

from collections.abc import Mapping
from typing import Any

import torch

from raffia.data.prefetch import Prefetcher
from raffia.data.processes import Locked
from raffia.data.storage import Storage
from raffia.hints import check_count


class Buffer(Locked):
    """The base of replay buffers: a lock, a generator, and perhaps batches drawn ahead.

    >>> from raffia.data.replay import ReplayBuffer
    >>> from raffia.data.storage import TensorStorage
    >>> isinstance(ReplayBuffer(storage=TensorStorage(9)), Buffer)
    True
    """

    _maker: Any  # makes the batches; has the generator
    _ahead: Prefetcher[Any, Any] | None

    def _start(self, prefetch: int) -> None:
        """Make the lock, and the thread that draws batches ahead, of a buffer that has a maker."""
        self._make_lock()
        self._ahead = Prefetcher(self._maker, prefetch, self._lock) if prefetch else None

    def __bool__(self) -> bool:
        """True, for an empty buffer too: `buffer or make_buffer()` must not discard it.

        >>> from raffia.data.replay import ReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> bool(ReplayBuffer(storage=TensorStorage(9)))
        True
        """
        return True

    @property
    def generator(self) -> torch.Generator | None:
        """The generator of random numbers; set another one to seed again.

        >>> from raffia.data.replay import ReplayBuffer
        >>> from raffia.data.storage import TensorStorage
        >>> buffer = ReplayBuffer(storage=TensorStorage(9))
        >>> buffer.generator = torch.Generator().manual_seed(3)
        """
        generator: torch.Generator | None = self._maker.generator
        return generator

    @generator.setter
    def generator(self, generator: torch.Generator | None) -> None:
        check_generator(generator, prefetch=self._ahead is not None)
        with self._lock:
            self._before_change()
            self._maker.generator = generator

    def _copied(self) -> dict[str, Any]:
        self._before_change()  # the generator is where it stands without batches drawn ahead
        return {**super()._copied(), "_ahead": 0 if self._ahead is None else self._ahead.depth}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start(state["_ahead"])

    def _before_change(self) -> None:
        """Undo the batches drawn ahead; called under the lock, before every change."""
        if self._ahead is not None:
            self._ahead.drop()


def check_is_storage(storage: Any) -> None:
    """Raise TypeError for an object that is not a storage.

    >>> check_is_storage(100)
    Traceback (most recent call last):
    ...
    TypeError: storage must be a Storage, such as TensorStorage(100); got 100
    """
    if not isinstance(storage, Storage):
        size = storage if isinstance(storage, int) else 1_000_000
        raise TypeError(
            f"storage must be a Storage, such as TensorStorage({size}); got {storage!r}"
        )


def check_device(device: Any) -> None:
    """Raise ValueError for a device that this machine does not have."""
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter where torch has no CUDA
        raise ValueError(f"device {str(device)!r} is not available here: {error}") from None


def check_options(batch_size: int | None, pin_memory: bool, prefetch: int) -> None:
    """Raise TypeError or ValueError for options of a buffer that cannot be."""
    if batch_size is not None:
        check_count("batch_size", batch_size, 1)
    check_count("prefetch", int(prefetch) if isinstance(prefetch, bool) else prefetch, 0)
    if pin_memory and not torch.accelerator.is_available():
        raise ValueError(
            "pin_memory=True needs a GPU, and torch sees none on this machine: pass "
            "pin_memory=torch.cuda.is_available()"
        )


def own_generator(generator: torch.Generator | None, prefetch: int) -> torch.Generator | None:
    """The generator of a buffer, after a check; one that draws batches ahead has one in any case.

    It is seeded by torch's global one, so `torch.manual_seed` decides what it draws.

    >>> own_generator(None, prefetch=0) is None
    True
    """
    check_generator(generator, prefetch=False)
    if generator is not None or not prefetch:
        return generator
    return torch.Generator().manual_seed(int(torch.randint(2**63 - 1, (), device="cpu")))


def check_same_generator(state: Mapping[str, Any], generator: torch.Generator | None) -> None:
    """Raise ValueError unless a state has a generator where the buffer has one."""
    if ("generator" in state) != (generator is not None):
        has, lacks = ("state", "buffer") if "generator" in state else ("buffer", "state")
        raise ValueError(
            f"the {has} has a generator, but the {lacks} has none: set buffer.generator = "
            "torch.Generator(), or None, before loading the state"
        )


def check_generator(generator: torch.Generator | None, prefetch: bool) -> None:
    """Raise TypeError or ValueError for a generator that items cannot be drawn with."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator; got {generator!r}: pass "
            "generator=torch.Generator().manual_seed(0)"
        )
    if generator is None and prefetch:
        raise ValueError(
            "prefetch needs its own generator, because other random numbers would depend on how "
            "far it is ahead: pass generator=torch.Generator().manual_seed(0)"
        )
    if generator is not None and generator.device.type != "cpu":
        raise ValueError(
            f"items are drawn on the CPU, but the generator is on {generator.device}: pass "
            "generator=torch.Generator().manual_seed(0)"
        )
