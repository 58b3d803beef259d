"""Several named distributions as one, whose samples are containers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch.distributions import Distribution

from raffia.hints import did_you_mean
from raffia.nn.modes import composite_lp_aggregate as composite_lp_aggregate
from raffia.nn.modes import set_composite_lp_aggregate as set_composite_lp_aggregate
from raffia.nn.sampling import deterministic_sample
from raffia.tensordict.collection import TensorDictBase
from raffia.tensordict.keys import MissingKeyError, NestedKey, dotted, is_key, unravel_key
from raffia.tensordict.node import Container, Node
from raffia.tensordict.tensordict import TensorDict

Values = dict[NestedKey, Any]  # name of a distribution -> what belongs to it


class MissingSampleError(MissingKeyError, ValueError):
    """A sample lacks the entry of one of the distributions.

    >>> from raffia.nn.distributions.composite import CompositeDistribution
    >>> params = TensorDict(action=dict(probs=torch.full((2,), 0.5)), batch_size=[2])
    >>> dist = CompositeDistribution(params, {"action": torch.distributions.Bernoulli})
    >>> dist.log_prob(TensorDict(acton=torch.ones(2), batch_size=[2]))
    Traceback (most recent call last):
    ...
    raffia.nn.distributions.composite.MissingSampleError: the sample has no entry 'action';
    there are ['acton']. Did you mean 'acton'?
    """


def _key_of_sum(name: str, default: str, writer: str) -> property:
    """A property: the key at which `writer` writes the sum; None sets the default."""

    def get(self: CompositeDistribution) -> NestedKey:
        return self.__dict__[name]

    def put(self: CompositeDistribution, key: NestedKey | None) -> None:
        self.__dict__[name] = default if key is None else unravel_key(key)

    return property(
        get, put, doc=f"Where `{writer}` writes the sum; set it to None for the default."
    )


class CompositeDistribution(Distribution, Mapping[NestedKey, Distribution]):
    """Named distributions as one: draws containers, and is itself a mapping of name to member.

    params: container with, for each name, a container of keyword arguments; its batch size is the
        `batch_shape`.
    distribution_map: name -> class, or any callable that takes the parameters and gives a
        distribution. Nested names are tuples, or dicts in the dict.
    name_map: name -> key of its sample, where that is not the name; names without a distribution
        have no effect, so that one map can serve several.
    extra_kwargs: name -> further keyword arguments, as constants that are not in `params`.
    log_prob_key, entropy_key: where `log_prob_composite` and `entropy_composite` write the sum,
        "sample_log_prob" and "entropy" by default.

    A sample of shape `S` has batch size `S + batch_shape`; more dimensions than these, as of the
    `loc` below, stay in the entries. `has_rsample` is true where all members have it.

    >>> from torch import distributions as d
    >>> from raffia.nn.distributions.composite import CompositeDistribution
    >>> params = TensorDict(
    ...     move=dict(loc=torch.zeros(3, 4), scale=torch.ones(3, 4)),
    ...     head=dict(speak=dict(logits=torch.zeros(3, 10))),
    ...     batch_size=[3],
    ... )
    >>> dist = CompositeDistribution(params, {"move": d.Normal, ("head", "speak"): d.Categorical})
    >>> dist["head", "speak"]
    Categorical(logits: torch.Size([3, 10]))
    >>> sample = dist.sample((2,))
    >>> sample.batch_size, sample["move"].shape
    (torch.Size([2, 3]), torch.Size([2, 3, 4]))
    >>> dist.log_prob(sample)["head", "speak_log_prob"].shape
    torch.Size([2, 3])
    """

    dists: dict[NestedKey, Distribution]
    log_prob_key = _key_of_sum("_log_prob_key", "sample_log_prob", "log_prob_composite")
    entropy_key = _key_of_sum("_entropy_key", "entropy", "entropy_composite")

    def __init__(
        self,
        params: Node,
        distribution_map: dict[Any, Any],
        *,
        name_map: dict[Any, Any] | None = None,
        extra_kwargs: Any = None,
        log_prob_key: NestedKey | None = None,
        entropy_key: NestedKey | None = None,
    ) -> None:
        classes = dict(_leaves("distribution_map", distribution_map))
        constants = _extras(extra_kwargs, classes)
        dists = {
            name: _build(name, cls, _parameters(params, name), constants.get(name, {}))
            for name, cls in classes.items()
        }
        self._fill(params, dists, name_map, log_prob_key, entropy_key)

    @classmethod
    def from_distributions(
        cls,
        params: Node,
        distributions: dict[Any, Any],
        *,
        name_map: dict[Any, Any] | None = None,
        log_prob_key: NestedKey | None = None,
        entropy_key: NestedKey | None = None,
    ) -> Self:
        """A composite of distributions that exist already.

        params: container whose batch size is the `batch_shape`; its entries are not read.

        >>> from torch import distributions as d
        >>> from raffia.nn.distributions.composite import CompositeDistribution
        >>> go = d.Bernoulli(torch.full((3,), 0.5))
        >>> CompositeDistribution.from_distributions(TensorDict(batch_size=[3]), {"go": go})
        CompositeDistribution({'go': Bernoulli(probs: torch.Size([3]))})
        """
        dists = dict(_leaves("distributions", distributions))
        for name, dist in dists.items():
            if isinstance(dist, type):
                raise CompositeTypeError(
                    f"distribution {name!r} must be an instance, got the class {dist.__name__}; "
                    f"to build it from parameters: {cls.__name__}(params, distribution_map)"
                )
        new = cls.__new__(cls)
        new._fill(params, dists, name_map, log_prob_key, entropy_key)
        return new

    def _fill(
        self,
        params: Any,
        dists: Values,
        name_map: Any,
        log_prob_key: NestedKey | None,
        entropy_key: NestedKey | None,
    ) -> None:
        super().__init__(_node("params", params).batch_size, validate_args=False)
        self.dists = _renamed(dists, name_map) if name_map is not None else dists
        self.log_prob_key = log_prob_key
        self.entropy_key = entropy_key

    def __getitem__(self, name: NestedKey) -> Distribution:
        dist = self.dists.get(name)
        if dist is None:
            dist = self.dists.get(unravel_key(name))
        if dist is None:
            raise MissingKeyError(f"there is no distribution {name!r}{_known(name, self.dists)}")
        return dist

    def __iter__(self) -> Iterator[NestedKey]:
        return iter(self.dists)

    def __len__(self) -> int:
        return len(self.dists)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dists})"

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """These distributions over a larger batch; the last dimensions are those of this one."""
        batch_shape = torch.Size(batch_shape)
        ndim = len(self.batch_shape)
        new = type(self).__new__(type(self)) if _instance is None else _instance
        own = self._each("expand", lambda _, d: d.expand(batch_shape + d.batch_shape[ndim:]))
        new._fill(TensorDict(batch_size=batch_shape), own, None, None, None)
        new.log_prob_key, new.entropy_key = self.log_prob_key, self.entropy_key
        return new

    def sample(self, shape: Any = None) -> TensorDict:  # type: ignore[override]
        """Draw from each distribution. shape: dimensions in front of the batch."""
        shape = _size(shape)
        return self._container(self._each("sample", lambda _, d: d.sample(shape)), shape)

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        """Whether all members draw with a gradient."""
        return all([dist.has_rsample for dist in self.dists.values()])

    def rsample(self, shape: Any = None) -> TensorDict:  # type: ignore[override]
        """Draw from each distribution so that gradients reach the parameters through the draw."""
        shape = _size(shape)
        return self._container(self._each("rsample", lambda _, d: d.rsample(shape)), shape)

    def sample_and_log_prob(self, shape: Any = None) -> tuple[TensorDict, Any]:
        """A draw and its log-probability, as returned by `sample` and `log_prob`.

        A member with a method `sample_and_log_prob` is called only once.
        """
        return self._draw_and_score("sample", shape)

    def rsample_and_log_prob(self, shape: Any = None) -> tuple[TensorDict, Any]:
        """A draw, with gradients through it, and its log-probability; see `sample_and_log_prob`."""
        return self._draw_and_score("rsample", shape)

    def _draw_and_score(self, method: str, shape: Any) -> tuple[TensorDict, Any]:
        shape = _size(shape)
        pairs = self._each(method, lambda _, dist: _drawn_and_scored(dist, method, shape))
        sample = self._container({name: draw for name, (draw, _) in pairs.items()}, shape)
        scores = {name: score for name, (_, score) in pairs.items()}
        if composite_lp_aggregate():
            return sample, _total(scores, sample.batch_size)
        return sample, _write(sample.empty(), scores, "_log_prob")

    @property
    def mode(self) -> TensorDict:  # type: ignore[override]
        """The most probable value of each distribution."""
        return self._container(self._each("mode", lambda _, dist: dist.mode))

    @property
    def mean(self) -> TensorDict:  # type: ignore[override]
        """The mean of each distribution that has one."""
        return self._container(self._each("mean", lambda _, dist: dist.mean))

    @property
    def deterministic_sample(self) -> TensorDict:
        """The representative value of each distribution, used where nothing is drawn.

        >>> from torch import distributions as d
        >>> from raffia.nn.distributions.composite import CompositeDistribution
        >>> dists = {"x": d.Normal(torch.ones(2), 1.0), "k": d.Categorical(torch.eye(2))}
        >>> dist = CompositeDistribution.from_distributions(TensorDict(batch_size=[2]), dists)
        >>> dist.deterministic_sample["x"], dist.deterministic_sample["k"]
        (tensor([1., 1.]), tensor([0, 1]))
        """
        values = self._each("deterministic_sample", lambda _, dist: deterministic_sample(dist))
        return self._container(values)

    def log_prob(self, sample: Any) -> Any:
        """Log-probabilities at `<name>_log_prob`, or their sum.

        The sum, over the distributions and what they have beyond the batch of `sample`, is given
        as one tensor while `composite_lp_aggregate()` is True. `sample` is not changed.

        >>> from torch import distributions as d
        >>> from raffia.nn.distributions.composite import (
        ...     CompositeDistribution,
        ...     set_composite_lp_aggregate,
        ... )
        >>> dists = {"a": d.Bernoulli(torch.tensor([0.5])), "b": d.Bernoulli(torch.tensor([0.5]))}
        >>> dist = CompositeDistribution.from_distributions(TensorDict(batch_size=[1]), dists)
        >>> sample = TensorDict(a=torch.ones(1), b=torch.zeros(1), batch_size=[1])
        >>> dist.log_prob(sample)["a_log_prob"]
        tensor([-0.6931])
        >>> with set_composite_lp_aggregate(True):
        ...     dist.log_prob(sample)
        tensor([-1.3863])
        """
        if composite_lp_aggregate():
            return _total(self._log_probs(sample), sample.batch_size)
        return self.log_prob_composite(sample, include_sum=False)

    def log_prob_composite(self, sample: Any, *, include_sum: bool | None = None) -> TensorDictBase:
        """A container of log-probabilities, at `<name>_log_prob`.

        While `composite_lp_aggregate()` is True they are written into `sample`, which is returned;
        else the container is a new one.
        include_sum: write the sum as well, at `log_prob_key`; by default while
            `composite_lp_aggregate()` is True.
        """
        aggregate = composite_lp_aggregate()
        scores = self._log_probs(sample)
        out = _write(sample if aggregate else sample.empty(), scores, "_log_prob")
        if aggregate if include_sum is None else include_sum:
            out.set(self.log_prob_key, _total(scores, sample.batch_size))
        return out

    def _log_probs(self, sample: Any) -> Values:
        values = self._entries(sample)
        return self._each("log_prob", lambda name, dist: dist.log_prob(values[name]))

    def entropy(
        self,
        samples_mc: int = 1,
        *,
        aggregate_probabilities: bool | None = None,
        include_sum: bool | None = None,
    ) -> Any:
        """Entropies at `<name>_entropy`, or their sum while `composite_lp_aggregate()` is True.

        samples_mc: how many draws estimate an entropy that has no closed form. Where draws are not
            reparameterised, the gradient of the estimate is the score function's.
        aggregate_probabilities: has no effect and is deprecated; `set_composite_lp_aggregate`
            replaces it.

        >>> from torch import distributions as d
        >>> from raffia.nn.distributions.composite import CompositeDistribution
        >>> dists = {"a": d.Bernoulli(torch.tensor([0.5]))}
        >>> dist = CompositeDistribution.from_distributions(TensorDict(batch_size=[1]), dists)
        >>> dist.entropy()["a_entropy"]
        tensor([0.6931])
        """
        if aggregate_probabilities is not None:
            warnings.warn(
                "entropy(aggregate_probabilities=...) has no effect and will be removed; use "
                "set_composite_lp_aggregate(...)",
                DeprecationWarning,
                stacklevel=2,
            )
        if composite_lp_aggregate():
            return _total(self._entropies(samples_mc), self.batch_shape)
        return self.entropy_composite(samples_mc, include_sum=include_sum)

    def entropy_composite(
        self, samples_mc: int = 1, *, include_sum: bool | None = None
    ) -> TensorDict:
        """A new container of entropies, at `<name>_entropy`.

        include_sum: write the sum as well, at `entropy_key`; by default while
            `composite_lp_aggregate()` is True.
        """
        entropies = self._entropies(samples_mc)
        out = _write(TensorDict(batch_size=self.batch_shape), entropies, "_entropy")
        if composite_lp_aggregate() if include_sum is None else include_sum:
            out.set(self.entropy_key, _total(entropies, self.batch_shape))
        return out

    def _entropies(self, samples_mc: int) -> Values:
        return self._each("entropy", lambda _, dist: _entropy(dist, samples_mc))

    def cdf(self, sample: Container) -> Container:  # type: ignore[override]
        """Write the cumulative probabilities into `sample`, at `<name>_cdf`, and return it."""
        values = self._entries(sample)
        return _write(sample, self._each("cdf", lambda n, d: d.cdf(values[n])), "_cdf")

    def icdf(self, sample: Container) -> Container:  # type: ignore[override]
        """Write the quantiles of `<name>_cdf` into `sample`, at `<name>_icdf`, and return it.

        Where an entry `<name>_cdf` is missing, the cumulative probability of `<name>` is used.

        >>> from torch import distributions as d
        >>> from raffia.nn.distributions.composite import CompositeDistribution
        >>> dists = {"x": d.Uniform(torch.zeros(1), 4.0)}
        >>> dist = CompositeDistribution.from_distributions(TensorDict(batch_size=[1]), dists)
        >>> dist.icdf(TensorDict(x_cdf=torch.tensor([0.5]), batch_size=[1]))["x_icdf"]
        tensor([2.])
        """
        sample = _node("the sample", sample)
        quantiles = self._each("icdf", lambda name, dist: dist.icdf(_level(sample, name, dist)))
        return _write(sample, quantiles, "_icdf")

    def _each(self, what: str, fn: Callable[[NestedKey, Any], Any]) -> Values:
        """`fn(name, distribution)` of each; errors name the entry."""
        out = {}
        for name, dist in self.dists.items():
            try:
                out[name] = fn(name, dist)
            except NotImplementedError as error:
                text = str(error) or f"a {type(dist).__name__} has no {what}"
                raise NotImplementedError(f"distribution {name!r}: {text}") from error
            except MissingSampleError:
                raise
            except ValueError as error:
                raise ValueError(f"distribution {name!r}: {error}") from error
        return out

    def _entries(self, sample: Any) -> Values:
        sample = _node("the sample", sample)
        return {name: _entry(sample, name) for name in self.dists}

    def _container(self, values: Values, shape: torch.Size | None = None) -> TensorDict:
        batch_shape = self.batch_shape if shape is None else shape + self.batch_shape
        return TensorDict(values, batch_size=batch_shape)


def _size(shape: Any) -> torch.Size:
    return torch.Size(() if shape is None else shape)


def _entry(sample: Any, name: NestedKey) -> Any:
    value = sample.get(name)
    if value is None:
        raise MissingSampleError(
            f"the sample has no entry {name!r}{_known(name, sample.keys(True))}"
        )
    return value


def _level(sample: Any, name: NestedKey, dist: Distribution) -> Any:
    """The cumulative probability at `<name>_cdf`, or that of the value at `name`."""
    key = suffixed(name, "_cdf")
    level = sample.get(key)
    if level is not None:
        return level
    if sample.get(name) is None:
        raise MissingSampleError(f"the sample has neither an entry {name!r} nor {key!r}")
    return dist.cdf(sample.get(name))


def _write(out: Any, values: Values, suffix: str) -> Any:
    for name, value in values.items():
        out.set(suffixed(name, suffix), value)
    return out


def _drawn_and_scored(dist: Any, method: str, shape: torch.Size) -> tuple[Any, Any]:
    joint = getattr(dist, f"{method}_and_log_prob", None)
    if joint is not None:
        return joint(shape)
    draw = getattr(dist, method)(shape)
    return draw, dist.log_prob(draw)


def _tensors(value: Any) -> Any:
    """The tensors of a value, which is a container where the distribution is a composite."""
    return (value,) if isinstance(value, Tensor) else value.values(True, True)


def _total(values: Values, size: torch.Size) -> Tensor:
    """The sum of all values and of what they have beyond the dimensions of `size`."""
    total: Any = None
    for value in values.values():
        for leaf in _tensors(value):
            term = leaf.flatten(len(size)).sum(-1) if leaf.ndim > len(size) else leaf
            total = term if total is None else total + term
    return torch.zeros(size) if total is None else total


def _entropy(dist: Any, samples_mc: int) -> Any:
    if isinstance(dist, CompositeDistribution):
        return dist.entropy(samples_mc)
    try:
        return dist.entropy()
    except NotImplementedError:  # no closed form
        return _estimated_entropy(dist, samples_mc)


def _estimated_entropy(dist: Any, samples_mc: int) -> Tensor:
    """The mean of -log p over draws.

    Draws without reparameterisation carry no gradient, and the plain mean would have that of
    -E[grad log p] = 0. The value log p (1 + log p - stop(log p)) is log p, and its gradient is
    (1 + log p) grad log p, whose mean is -grad H.
    """
    if samples_mc < 1:
        raise ValueError(f"samples_mc={samples_mc} must be at least 1 to estimate the entropy")
    if dist.has_rsample:
        return -dist.log_prob(dist.rsample((samples_mc,))).mean(0)
    log_p = dist.log_prob(dist.sample((samples_mc,)))
    zero = (log_p - log_p.detach()).nan_to_num(0.0)  # also where log p is infinite, as of a `Delta`
    return -(log_p * (1 + zero)).mean(0)


_TREES = (dict, Node)  # what nested names may be given as; a composite is a member, not this


class CompositeTypeError(TypeError, RuntimeError):
    """An argument of a `CompositeDistribution` is of the wrong type.

    >>> from raffia.nn.distributions.composite import CompositeDistribution
    >>> CompositeDistribution(TensorDict(), {}, name_map=["action"])
    Traceback (most recent call last):
    ...
    raffia.nn.distributions.composite.CompositeTypeError: name_map must be a dict, got list
    """


def _node(what: str, value: Any) -> Any:
    """`value`, which must be a container."""
    if not isinstance(value, Node):
        raise CompositeTypeError(
            f"{what} must be a TensorDict, got {type(value).__name__}; "
            "to make one of a dict: TensorDict(entries, batch_size=[...])"
        )
    return value


def _known(name: Any, names: Collection[NestedKey]) -> str:
    """The end of an error about a name that is not among `names`."""
    spelled = {dotted(n): n for n in names}
    hint = did_you_mean(dotted(name), spelled, ". Did you mean {!r}?") if is_key(name) else ""
    return f"; there are {sorted(names, key=str)}{hint}"


def _leaves(
    argument: str, tree: Any, names: Collection[NestedKey] = (), path: tuple[Any, ...] = ()
) -> Iterator[tuple[NestedKey, Any]]:
    """The (name, value) pairs of nested dicts, down to the first part of a path in `names`."""
    keyed = isinstance(tree, (Mapping, Node))
    if not keyed:
        raise CompositeTypeError(f"{argument} must be a dict, got {type(tree).__name__}")
    for part, value in tree.items():
        if not is_key(part):
            raise CompositeTypeError(
                f"the names in {argument} must be strings or tuples of strings, got {part!r}"
            )
        name = unravel_key((*path, part) if path else part)
        if isinstance(value, _TREES) and name not in names:
            yield from _leaves(argument, value, names, (*path, part))
        else:
            yield name, value


def _extras(extra_kwargs: Any, names: Collection[NestedKey]) -> Values:
    """The constants by the name of their distribution."""
    if extra_kwargs is None:
        return {}
    constants = dict(_leaves("extra_kwargs", extra_kwargs, names))
    for name, kwargs in constants.items():
        if name not in names:
            raise MissingKeyError(
                f"extra_kwargs names {name!r}, which is not one of the "
                f"distributions{_known(name, names)}"
            )
        if not isinstance(kwargs, _TREES):
            raise CompositeTypeError(
                f"extra_kwargs[{name!r}] must be a dict of keyword arguments, got {kwargs!r}"
            )
    return constants


def _parameters(params: Any, name: NestedKey) -> Any:
    """The keyword arguments in `params` for the distribution `name`."""
    kwargs = _node("params", params).get(name)
    if kwargs is None:
        _raise_no_parameters(params, name)
    if not isinstance(kwargs, Node):
        raise CompositeTypeError(
            f"the parameters of {name!r} must be a container of keyword arguments, such as "
            f"{{'loc': ..., 'scale': ...}}, got a {type(kwargs).__name__}"
        )
    return kwargs


def _raise_no_parameters(params: Any, name: NestedKey) -> NoReturn:
    """Raise an error that there is nothing for `name`, and what there is."""
    names = [key for key, value in params.items(True, False) if isinstance(value, Node)]
    raise MissingKeyError(f"no param {name!r} found in params{_known(name, names)}")


def _build(name: NestedKey, cls: Any, params: Any, extra: Any) -> Distribution:
    """One distribution; an error of its class is raised with the name."""
    if not callable(cls):
        raise CompositeTypeError(
            f"distribution_map[{name!r}] must be a class or a function that gives a distribution, "
            f"got {cls!r}"
        )
    try:
        return cls(**params, **extra)
    except ValueError as error:
        raise ValueError(f"distribution {name!r}: {error}") from error
    except TypeError as error:
        raise TypeError(f"distribution {name!r}: {error}") from error


def _renamed(dists: Values, name_map: Any) -> Values:
    """The distributions by the key of their sample."""
    keys = dict(_leaves("name_map", name_map))
    for name, key in keys.items():
        if not is_key(key):
            raise CompositeTypeError(
                f"name_map[{name!r}] must be a string or a tuple of strings, got {key!r}"
            )
    out: Values = {}
    for name, dist in dists.items():
        key = unravel_key(keys.get(name, name))
        if key in out:
            raise ValueError(f"two distributions would write their sample at {key!r}")
        out[key] = dist
    return out


def suffixed(name: NestedKey, suffix: str) -> NestedKey:
    """The key of a figure about the entry `name`: its last part with a suffix."""
    return name + suffix if isinstance(name, str) else (*name[:-1], name[-1] + suffix)
