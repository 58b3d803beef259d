"""One value of a distribution: the draw, mean or mode that an interaction type asks for.

`deterministic_sample` stands for a distribution where nothing is to be drawn.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Distribution,
    Independent,
    LKJCholesky,
    LogisticNormal,
    OneHotCategorical,
    RelaxedBernoulli,
    RelaxedOneHotCategorical,
    constraints,
)
from torch.overrides import TorchFunctionMode

from raffia.nn.modes import InteractionType

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
    """The method that returns a draw with its log-probability, if the distribution has one."""
    name = "rsample_and_log_prob" if dist.has_rsample else "sample_and_log_prob"
    method = getattr(dist, name, None)
    return None if method is None else functools.partial(_drawn, method)


def _random(dist: Any, shape: torch.Size) -> Any:
    return _drawn(dist.rsample if dist.has_rsample else dist.sample, shape)


def _drawn(sample: Callable[..., Any], shape: torch.Size) -> Any:
    try:
        return sample(shape)
    except RuntimeError:
        if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
            raise
    with _NoiseOfEach():
        return sample(shape)


class _NoiseOfEach(TorchFunctionMode):
    """A mode for use within `torch.vmap` that draws separate noise for each member.

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


_ASKED = "deterministic_sample"


class NoMeanError(NotImplementedError):
    """The mean was requested but has no formula; modules then average samples.

    >>> from torch import distributions as d
    >>> deterministic_sample(d.TransformedDistribution(d.Normal(0.0, 1.0), d.TanhTransform()))
    Traceback (most recent call last):
    ...
    raffia.nn.sampling.NoMeanError: TransformedDistribution has no
    deterministic_sample, and no mean to use instead. Give the class a property
    `deterministic_sample`, or draw at random.
    """


def deterministic_sample(dist: Distribution) -> Any:
    """The value that a module writes for `dist` where the interaction is deterministic.

    The first of these that `dist` has: its own `deterministic_sample`; for an `Independent`, the
    value of its base; for a distribution of `torch.distributions`, the mode if its support can be
    enumerated, else the mean. A class that is not known here (a subclass of a known one too) gives
    its mean if its support is the real line or not stated, else its mode, with a warning.
    Raises NotImplementedError where the mode asked for does not exist, NoMeanError where the mean
    does not, and RuntimeError for `LKJCholesky`, whose mean is not a Cholesky factor.

    >>> from torch import distributions as d
    >>> deterministic_sample(d.Normal(torch.tensor([1.5, 2.0]), 1.0))
    tensor([1.5000, 2.0000])
    >>> deterministic_sample(d.Categorical(probs=torch.tensor([0.2, 0.5, 0.3])))
    tensor(1)
    """
    value = _known_value(dist)
    if value is not None:
        return value
    name = "mean" if _is_real(dist) else "mode"
    warnings.warn(
        f"deterministic_sample wasn't found on {type(dist)}: its {name} is taken instead. "
        "Give the class a property `deterministic_sample`, or ask for the mean or the mode with "
        f"`set_interaction_type({name!r})`.",
        UserWarning,
        stacklevel=2,
    )
    return statistic(dist, name, _ASKED)


def _known_value(dist: Any) -> Any:
    """The value of a distribution that states it or that we know; None for others."""
    own = getattr(dist, _ASKED, None)
    if own is not None:
        return own
    if isinstance(dist, Independent):
        return _known_value(dist.base_dist)
    for cls in type(dist).__mro__:
        if cls in _BY_CLASS:
            return _BY_CLASS[cls](dist)
    if type(dist).__module__.startswith("torch.distributions."):
        return statistic(dist, "mode" if dist.has_enumerate_support else "mean", _ASKED)
    return None


def statistic(dist: Distribution, name: str, asked: str = "") -> Any:
    """The "mean", "mode" or "median" of a distribution.

    asked: what it replaces, for the error where the distribution has none.
    Raises NoMeanError where the mean has no formula, else NotImplementedError.
    """
    try:
        return getattr(dist, name)
    except (NotImplementedError, AttributeError) as error:
        lacks = f"{asked}, and no {name} to use instead" if asked else name
        kind = NoMeanError if name == "mean" else NotImplementedError
        raise kind(
            f"{type(dist).__name__} has no {lacks}. Give the class a property `{asked or name}`, "
            "or draw at random."
        ) from error


def _is_real(dist: Distribution) -> bool:
    try:
        return dist.support is constraints.real
    except (NotImplementedError, AttributeError):  # no support stated
        return True


def _transformed_mean(dist: Any) -> Any:
    """The mean of the base distribution, sent through the transforms."""
    value = dist.base_dist.mean
    for transform in dist.transforms:
        value = transform(value)
    return value


def _refuse(dist: Distribution) -> NoReturn:
    raise RuntimeError(
        f"{type(dist).__name__} has no deterministic value: its mean is not a Cholesky factor and "
        "its mode is not known. Draw at random: `set_interaction_type('random')`."
    )


# The relaxed ones answer as what they relax does; subclasses answer as their parent.
_BY_CLASS: dict[type, Callable[[Any], Any]] = {
    LogisticNormal: _transformed_mean,
    RelaxedBernoulli: lambda dist: Bernoulli(logits=dist.logits, validate_args=False).mode,
    RelaxedOneHotCategorical: lambda dist: (
        OneHotCategorical(logits=dist.logits, validate_args=False).mode
    ),
    LKJCholesky: _refuse,
}
