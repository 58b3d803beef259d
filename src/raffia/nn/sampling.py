"""One value of a distribution: the draw, mean or mode that an interaction type asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from raffia.nn.distributions.deterministic import NoMeanError, deterministic_sample, statistic
from raffia.nn.interaction import InteractionType

RANDOM, DETERMINISTIC = InteractionType.RANDOM, InteractionType.DETERMINISTIC
_IN_PLACE = (Tensor.normal_, Tensor.exponential_, Tensor.cauchy_, Tensor.uniform_)


def draw(dist: Any, kind: InteractionType, shape: torch.Size, num_estimates: int) -> Any:
    """The value of a distribution that `kind` asks for; `shape` are dimensions put before it.

    num_estimates: how many draws are averaged where a mean is asked for that has no formula.
    Raises NotImplementedError if the distribution has no such value.

    >>> from torch.distributions import Normal
    >>> draw(Normal(torch.zeros(3), 1.0), InteractionType.MEAN, torch.Size([2]), 10).shape
    torch.Size([2, 3])
    """
    if kind is RANDOM:
        return _random(dist, shape)
    try:
        if kind is DETERMINISTIC:
            value = deterministic_sample(dist)
        else:
            value = statistic(dist, kind.value)
    except NoMeanError:
        value = _random(dist, torch.Size((num_estimates,))).mean(0)
    return _repeated(value, shape) if shape else value


def drawn_together(dist: Any) -> Callable[..., Any] | None:
    """The method that draws and gives the log-probability too, if the distribution has one."""
    name = "rsample_and_log_prob" if dist.has_rsample else "sample_and_log_prob"
    return getattr(dist, name, None)


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


def _repeated(value: Any, shape: torch.Size) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple([_repeated(part, shape) for part in value])
    return value.expand(shape + value.shape)
