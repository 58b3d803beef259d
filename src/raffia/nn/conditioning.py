"""The joint distribution of a probabilistic sequence: each value given those drawn before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from raffia.nn.distributions.composite import CompositeDistribution
from raffia.nn.probabilistic_module import ProbabilisticTensorDictModule
from raffia.nn.sequence import TensorDictSequential
from raffia.tensordict.keys import NestedKey
from raffia.tensordict.tensordict import TensorDict


def composite(
    sequence: Iterable[Any], tensordict: Any, kwargs: dict[str, Any], keep: bool
) -> CompositeDistribution:
    """The distribution of all that a sequence draws, from a run on a shallow copy.

    kwargs: keywords for the modules that are not probabilistic.
    keep: the values that are there are the conditions; otherwise new draws.
    Raises RuntimeError if no module draws.
    """
    batch = TensorDict(batch_size=tensordict.batch_size)
    dists: dict[NestedKey, Any] = {}
    modules = list(flat(sequence))
    tensordict = tensordict.copy()
    for number, module in enumerate(modules, 1):
        draws = isinstance(module, ProbabilisticTensorDictModule)
        if draws:
            dists |= _members(module, module.get_dist(tensordict))
        if number < len(modules) or not draws:
            tensordict = run(module, tensordict, kwargs, keep)
    if not dists:
        raise RuntimeError(
            f"No distribution module found in {type(sequence).__name__}: none of its modules is a "
            f"ProbabilisticTensorDictModule, they are {[type(m).__name__ for m in sequence]}"
        )
    return CompositeDistribution.from_distributions(batch, dists)


def _members(module: ProbabilisticTensorDictModule, dist: Any) -> dict[NestedKey, Any]:
    """The distributions of a module by the keys of their values."""
    if isinstance(dist, CompositeDistribution):
        return dict(dist.items())
    keys = module.dist_sample_keys
    if len(keys) != 1:
        raise TypeError(
            f"a {type(dist).__name__} for the {len(keys)} values {keys} can't be part of a "
            "CompositeDistribution, which has one distribution for each value"
        )
    return {keys[0]: dist}


def run(module: Any, tensordict: Any, kwargs: dict[str, Any], keep: bool) -> Any:
    """What a module makes of the container; those that draw take no keywords.

    keep: values that are there are not drawn again, in sequences neither.
    """
    if isinstance(module, ProbabilisticTensorDictModule):
        there = keep and all([key in tensordict for key in module.dist_sample_keys])
        return tensordict if there else module(tensordict)
    if keep and isinstance(module, TensorDictSequential):
        for part in module:
            tensordict = run(part, tensordict, kwargs, keep)
        return tensordict
    return module(tensordict, **kwargs)


def flat(sequence: Iterable[Any]) -> Iterator[Any]:
    """The modules of a sequence; those of a sequence in it too, not that one itself."""
    for module in sequence:
        if isinstance(module, TensorDictSequential):
            yield from flat(module)
        else:
            yield module


def drawing(sequence: Iterable[Any]) -> list[ProbabilisticTensorDictModule]:
    """The probabilistic modules among them."""
    return [m for m in flat(sequence) if isinstance(m, ProbabilisticTensorDictModule)]
