"""Random number generators of a module, used instead of the global one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from raffia.functional.seeds import GLOBAL_DRAWS
from raffia.tensordict.access import value_of
from raffia.tensordict.keys import NestedKey, unravel_key

_LARGEST_SEED = 2**62


class RandomSource:
    """The source of a module's random numbers: a generator, a seed, or an entry with either.

    origin: a `torch.Generator`; an int, the seed of a generator that this makes; or the key of an
        entry that is one of the two. A seed in an entry is replaced by a fresh one at each call.

    >>> from raffia.nn.generators import RandomSource
    >>> with RandomSource(3).numbers(TensorDict(), torch.device("cpu")):
    ...     a = torch.rand(2)
    >>> bool((a == torch.rand(2, generator=torch.Generator().manual_seed(3))).all())
    True
    """

    def __init__(self, origin: torch.Generator | int | NestedKey) -> None:
        if isinstance(origin, (str, tuple)):
            origin = unravel_key(origin)
        elif not (isinstance(origin, torch.Generator) or _is_seed(origin)):
            raise TypeError(
                "generator must be a torch.Generator, an int (its seed), the key of an entry, or "
                f"None; got {type(origin).__name__}"
            )
        self.origin = origin
        self._seeded: torch.Generator | None = None

    def numbers(self, tensordict: Any, device: torch.device) -> AbstractContextManager[None]:
        """Draw the random numbers on the device from this source, within the block."""
        if isinstance(self.origin, torch.Generator):
            return drawing_from(self.origin, device)
        if not isinstance(self.origin, int):
            return _drawing_from_entry(tensordict, self.origin, device)
        if self._seeded is None or self._seeded.device != device:
            self._seeded = torch.Generator(device).manual_seed(self.origin)
        return drawing_from(self._seeded, device)


@contextmanager
def drawing_from(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """Use `generator` instead of the global generator of its device, within the block.

    Distributions draw from the global one only; its state is the same afterwards.

    device: where the draws will be made; ValueError if the generator is elsewhere.
    """
    if generator.device.type != device.type:
        raise ValueError(
            f"the generator is on {generator.device}, but the parameters of the distribution are "
            f"on {device}; create it there: torch.Generator({str(device)!r}).manual_seed(...)"
        )
    everybody = _global_generator(generator.device)
    with GLOBAL_DRAWS:
        before = everybody.get_state()
        everybody.set_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(everybody.get_state())
            everybody.set_state(before)


def _global_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]


@contextmanager
def _drawing_from_entry(tensordict: Any, key: NestedKey, device: torch.device) -> Iterator[None]:
    entry = tensordict.get(key, None)
    value = value_of(entry)
    if value is None:  # the global generator, as if no key had been given
        yield
    elif isinstance(value, torch.Generator):
        with drawing_from(value, device):
            yield
    else:
        generator = torch.Generator(device).manual_seed(_seed(value, key))
        with drawing_from(generator, device):
            yield
        fresh = torch.randint(0, _LARGEST_SEED, (), generator=generator, device=device)
        if isinstance(value, Tensor):
            tensordict.set(key, fresh.to(value.device).expand(value.shape).clone())
        else:
            tensordict.set_non_tensor(key, int(fresh))


def _is_seed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _seed(value: Any, key: NestedKey) -> int:
    """The seed that an entry holds."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"the entry {key!r} must hold one seed, but has {value.numel()} elements; to "
                f"store one seed in a container with a batch: td.set_non_tensor({key!r}, 0)"
            )
        return int(value.item())
    if not _is_seed(value):
        raise TypeError(
            f"the entry {key!r}, from which random numbers are drawn, must be a torch.Generator, "
            f"an int or a tensor with one element; it is of type {type(value).__name__}"
        )
    return int(value)
