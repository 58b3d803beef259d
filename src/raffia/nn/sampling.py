"""One value of a distribution: the draw, mean or mode that an interaction type asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from raffia.nn.distributions.deterministic import deterministic_sample
from raffia.nn.interaction import InteractionType
from raffia.tensordict.keys import NestedKey, unravel_key
from raffia.tensordict.node import Node

RANDOM, MEAN = InteractionType.RANDOM, InteractionType.MEAN
DETERMINISTIC = InteractionType.DETERMINISTIC


def draw(dist: Any, kind: InteractionType, shape: torch.Size, num_estimates: int) -> Any:
    """The value of a distribution that `kind` asks for; `shape` are dimensions put before it.

    num_estimates: how many draws are averaged where the mean has no formula.
    Raises NotImplementedError if the distribution has no such value.

    >>> from torch.distributions import Normal
    >>> draw(Normal(torch.zeros(3), 1.0), InteractionType.MEAN, torch.Size([2]), 10).shape
    torch.Size([2, 3])
    """
    if kind is RANDOM:
        return _random(dist, shape)
    if kind is DETERMINISTIC:
        value = deterministic_sample(dist)
    elif kind is MEAN:
        value = _mean(dist, num_estimates)
    else:
        value = _named(dist, kind.value)
    return _repeated(value, shape) if shape else value


def drawn_together(dist: Any) -> Callable[..., Any] | None:
    """The method that draws and gives the log-probability too, if the distribution has one."""
    return getattr(
        dist, "rsample_and_log_prob" if dist.has_rsample else "sample_and_log_prob", None
    )


def _random(dist: Any, shape: torch.Size) -> Any:
    sample = dist.rsample if dist.has_rsample else dist.sample
    try:
        return sample(shape)
    except RuntimeError:
        if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
            raise
    with _NoiseOfEach():
        return sample(shape)


class _NoiseOfEach(TorchFunctionMode):
    """Within `torch.vmap`, noise that is drawn in place is drawn for each member.

    `Normal.rsample` and others fill an empty tensor, which `vmap(..., randomness="different")`
    refuses, as that tensor has no dimension for the members; `torch.rand` gives one that has.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _IN_PLACE:
            empty, *rest = args
            args = (torch.rand(empty.shape, dtype=empty.dtype, device=empty.device), *rest)
        return func(*args, **(kwargs or {}))


_IN_PLACE = (Tensor.normal_, Tensor.exponential_, Tensor.cauchy_, Tensor.uniform_)


def _mean(dist: Any, num_estimates: int) -> Any:
    try:
        return dist.mean
    except (NotImplementedError, AttributeError):
        return _random(dist, torch.Size((num_estimates,))).mean(0)


def _named(dist: Any, name: str) -> Any:
    try:
        return getattr(dist, name)
    except AttributeError as error:
        raise NotImplementedError(
            f"{type(dist).__name__} has no {name}; take another interaction type, such as "
            "'deterministic', or give the class that property"
        ) from error


def _repeated(value: Any, shape: torch.Size) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple([_repeated(part, shape) for part in value])
    return value.expand(shape + value.shape)


# ------------------------------------------------------------------------ generators

_LARGEST_SEED = 2**62


class Source:
    """Where a module's random numbers come from: a generator, a seed, or an entry with either.

    origin: a `torch.Generator`; an int, the seed of a generator that this makes; or the key of an
        entry that is one of the two. A seed in an entry is replaced by a fresh one at each call.

    >>> from raffia.nn.sampling import Source
    >>> with Source(3).numbers(TensorDict(), torch.device("cpu")):
    ...     a = torch.rand(2)
    >>> bool((a == torch.rand(2, generator=torch.Generator().manual_seed(3))).all())
    True
    """

    def __init__(self, origin: torch.Generator | int | NestedKey) -> None:
        self.key: NestedKey | None = None
        self.generator: torch.Generator | None = None
        self.seed: int | None = None
        if isinstance(origin, torch.Generator):
            self.generator = origin
        elif isinstance(origin, int) and not isinstance(origin, bool):
            self.seed = origin
        elif isinstance(origin, (str, tuple)):
            self.key = unravel_key(origin)
        else:
            raise TypeError(
                "generator must be a torch.Generator, an int (its seed), the key of an entry, or "
                f"None; got {type(origin).__name__}"
            )

    @contextlib.contextmanager
    def numbers(self, tensordict: Any, device: torch.device) -> Iterator[None]:
        """Within the block, random numbers on the device come from here."""
        if self.key is None:
            with drawing_from(self._own(device), device):
                yield
            return
        entry = tensordict.get(self.key, None)
        if entry is None:  # the global generator, as if no key had been given
            yield
            return
        value = entry._unwrapped() if isinstance(entry, Node) else entry
        if isinstance(value, torch.Generator):
            with drawing_from(value, device):
                yield
            return
        generator = torch.Generator(device).manual_seed(self._seed_of(value))
        with drawing_from(generator, device):
            yield
        fresh = torch.randint(0, _LARGEST_SEED, (), generator=generator, device=device)
        if isinstance(value, Tensor):
            tensordict.set(self.key, fresh.to(value.device).expand(value.shape).clone())
        else:
            tensordict.set_non_tensor(self.key, int(fresh))

    def _own(self, device: torch.device) -> torch.Generator:
        if self.generator is None or self.seed is not None and self.generator.device != device:
            assert self.seed is not None
            self.generator = torch.Generator(device).manual_seed(self.seed)
        return self.generator

    def _seed_of(self, value: Any) -> int:
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"the entry {self.key!r} is the seed of the draws, one number, and holds "
                    f"{value.numel()} elements; for one seed beside a batch: "
                    f"td.set_non_tensor({self.key!r}, 0)"
                )
            return int(value.item())
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise TypeError(
            f"the entry {self.key!r} is where the draws come from: a torch.Generator, an int or a "
            f"tensor with one element; it is of type {type(value).__name__}"
        )


@contextlib.contextmanager
def drawing_from(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """Within the block, `generator` stands in for the global generator of its device.

    Distributions draw from the global one only; its state is the same afterwards.

    device: where the draws will be made; ValueError if the generator is elsewhere.
    """
    if generator.device.type != device.type:
        raise ValueError(
            f"the generator is on {generator.device}, the parameters of the distribution are on "
            f"{device}; make it there: torch.Generator({str(device)!r}).manual_seed(...)"
        )
    everybody = _global_generator(generator.device)
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
