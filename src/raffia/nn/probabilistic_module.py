"""The keyed module that makes a distribution from entries and writes a value taken from it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, distributions
from torch.compiler import is_compiling
from torch.distributions import Distribution

from raffia.nn.base import TensorDictModuleBase, listed, one_or_more, shown
from raffia.nn.dispatch import SKIP, dispatch, may_skip, missing_inputs
from raffia.nn.distributions.composite import CompositeDistribution
from raffia.nn.distributions.continuous import Delta
from raffia.nn.generators import RandomSource
from raffia.nn.log_prob_keys import LogProbKeys, check_distinct, requested_keys
from raffia.nn.modes import INTERACTION, InteractionType, composite_lp_aggregate
from raffia.nn.sampling import RANDOM, draw, drawn_together
from raffia.tensordict.access import dense_entries, value_of
from raffia.tensordict.keys import MissingKeyError, NestedKey, nearest, unravel_key_to_tuple
from raffia.tensordict.node import Container, Node
from raffia.tensordict.tensordict import TensorDict

_ONE, _CPU = torch.Size(), torch.device("cpu")


class ProbabilisticTensorDictModule(TensorDictModuleBase):
    """A module that makes a distribution of the entries `in_keys` and writes a value to `out_keys`.

    `set_interaction_type` chooses the value, else `default_interaction_type`. A value that is there
    already is written again, unless `set_skip_existing` is on.

    in_keys: keys whose last part is the distribution's keyword, or a dict {keyword: key}.
    out_keys: keys of what the distribution gives; the default is `["_"]`, of a
        `CompositeDistribution` the names of its parts.
    default_interaction_type: an `InteractionType` or its name.
    distribution_class: a class, a function that gives a distribution, or the name of a class of
        `torch.distributions` or `raffia.nn.distributions`, in upper or lower case.
    distribution_kwargs: further keywords for it; tensors in a `TensorDictParams` move with the
        module.
    return_log_prob: write the log-probability of the value too, at `<out key>_log_prob`.
    log_prob_keys, log_prob_key: where else to write it. While `composite_lp_aggregate()` is on, it
        is one sum, at "sample_log_prob" or `log_prob_key`.
    cache_dist: keep the distribution that was made last, with what it was made of, and give it
        again while the entries are the same tensors, unchanged, and gradients are on or off as
        they were: for example `log_prob` after a call.
    n_empirical_estimate: how many draws are averaged where the mean has no formula.
    num_samples: int or sizes of dimensions put before the batch: so many values, of which only
        draws differ. The result is then the expanded container; the input stays as it is.
    generator: where random numbers come from: a `torch.Generator`, a seed, or the key of an entry
        with one of these; a seed in an entry is replaced by a fresh one at each call. A compiled
        module runs these draws outside of its graph.
    Raises RuntimeError if the log-probability keys don't fit `composite_lp_aggregate()`, or this
        changed since.

    >>> from torch.distributions import Normal
    >>> from raffia.nn import ProbabilisticTensorDictModule
    >>> act = ProbabilisticTensorDictModule(
    ...     in_keys={"loc": "mu", "scale": ("head", "sigma")},
    ...     out_keys=["action"],
    ...     distribution_class=Normal,
    ...     default_interaction_type="random",
    ...     return_log_prob=True,
    ... )
    >>> td = TensorDict(mu=torch.zeros(2, 3), head=dict(sigma=torch.ones(2, 3)), batch_size=[2])
    >>> act(td)["action"].shape, act.out_keys
    (torch.Size([2, 3]), ['action', 'action_log_prob'])
    >>> act.get_dist(td)
    Normal(loc: torch.Size([2, 3]), scale: torch.Size([2, 3]))
    """

    def __init__(
        self,
        in_keys: NestedKey | list[NestedKey] | dict[str, NestedKey],
        out_keys: NestedKey | list[NestedKey] | None = None,
        *,
        default_interaction_type: InteractionType | str = InteractionType.DETERMINISTIC,
        distribution_class: Any = Delta,
        distribution_kwargs: Any = None,
        return_log_prob: bool = False,
        log_prob_keys: list[NestedKey] | None = None,
        log_prob_key: NestedKey | None = None,
        cache_dist: bool = False,
        n_empirical_estimate: int = 1000,
        num_samples: int | Sequence[int] | None = None,
        generator: torch.Generator | int | NestedKey | None = None,
    ) -> None:
        super().__init__()
        keys: Any = in_keys
        named = isinstance(in_keys, Mapping)
        self.in_keys = list(keys.values()) if named else one_or_more(keys)
        last_parts = [unravel_key_to_tuple(key)[-1] for key in self.in_keys]
        self.dist_keys = list(keys) if named else last_parts
        self.cache_dist = cache_dist
        self._last: tuple[list[Any], Distribution, list[Any]] | None = None  # for cache_dist
        self.distribution_class = _class_of(distribution_class)
        self.distribution_kwargs = {} if distribution_kwargs is None else distribution_kwargs
        self.default_interaction_type = default_interaction_type
        self.return_log_prob = return_log_prob
        self.n_empirical_estimate = n_empirical_estimate
        self.num_samples = num_samples
        self._source = None if generator is None else RandomSource(generator)
        written: Any = self._values() if out_keys is None else one_or_more(out_keys)
        self._out_keys = listed(written, "out_keys")
        summed = composite_lp_aggregate()
        asked = requested_keys(log_prob_keys, log_prob_key, self._out_keys, summed)
        if asked is not None and return_log_prob:
            check_distinct(asked, self._out_keys, summed)
        self._scores = LogProbKeys(self._out_keys, asked)
        self._quick = type(self).forward is ProbabilisticTensorDictModule.forward

    def _values(self) -> list[NestedKey]:
        """The keys of the values where none are given."""
        if self.distribution_class is not CompositeDistribution:
            return ["_"]
        if "distribution_map" not in self.distribution_kwargs:
            raise KeyError(
                "'distribution_map' must be provided within distribution_kwargs whenever the "
                "distribution is a CompositeDistribution: "
                "distribution_kwargs={'distribution_map': {'action': Normal}}"
            )
        parts: Any = self.distribution_kwargs["distribution_map"]
        names = self.distribution_kwargs.get("name_map") or {}
        return listed([names.get(part, part) for part in parts], "out_keys")

    @property
    def default_interaction_type(self) -> InteractionType:
        """The value that is taken where `set_interaction_type` sets none."""
        return self._default_interaction_type

    @default_interaction_type.setter
    def default_interaction_type(self, kind: InteractionType | str) -> None:
        self._default_interaction_type = InteractionType(kind)

    @property
    def num_samples(self) -> torch.Size | None:
        """The dimensions that are put before the batch, or None."""
        return self._num_samples

    @num_samples.setter
    def num_samples(self, sizes: int | Sequence[int] | None) -> None:
        if isinstance(sizes, int):
            sizes = (sizes,)
        self._num_samples = None if sizes is None else torch.Size(sizes)

    # -- keys

    @property
    def out_keys(self) -> list[NestedKey]:  # type: ignore[override]
        """The keys that are written: of the values, then of the log-probabilities."""
        if self.return_log_prob:
            return self._out_keys + self.log_prob_keys
        return self._out_keys

    @property
    def out_keys_source(self) -> list[NestedKey]:
        """The keys that are written."""
        return self.out_keys

    @property
    def dist_params_keys(self) -> list[NestedKey]:
        """The keys of the parameters: the `in_keys`."""
        return self.in_keys

    @property
    def dist_sample_keys(self) -> list[NestedKey]:
        """The keys of the values."""
        return self._out_keys

    @property
    def log_prob_keys(self) -> list[NestedKey]:
        """The keys of the log-probabilities.

        Raises RuntimeError if `composite_lp_aggregate()` changed since the module was made.
        """
        self._scores.check_mode("log_prob_keys")
        return self._scores.keys

    @property
    def log_prob_key(self) -> NestedKey:
        """The key of the log-probability, if it is the only one.

        Raises RuntimeError if there are several, or if `composite_lp_aggregate()` changed.
        """
        return self._scores.only()

    @property
    def log_prob_moves(self) -> dict[NestedKey, NestedKey]:
        """A map from the log-probability keys of a composite distribution to the requested ones."""
        return self._scores.moves

    def select_out_keys(self, *out_keys: NestedKey) -> Self:
        """Select all outputs; to select only some, use a sequence around the module.

        Raises RuntimeError if one would be left out.
        """
        if set(self._selectable(out_keys)) == set(self.out_keys):
            return self
        raise RuntimeError(
            f"{type(self).__name__} does not support select_out_keys; put it into a sequence: "
            f"ProbabilisticTensorDictSequential(module).select_out_keys("
            f"{', '.join(map(repr, out_keys))})"
        )

    # -- the distribution

    def get_dist(self, tensordict: Any) -> Distribution:
        """The distribution of the entries at `in_keys`.

        Raises TypeError for keywords that the distribution does not take, and what it raises
        itself for parameters out of their domain.
        """
        values = _read(tensordict, self._in_keys)
        if not self.cache_dist or is_compiling() or not all(map(_counts_writes, values)):
            return self._made(values, tensordict)
        made_of = [torch.is_grad_enabled(), *[(id(value), value._version) for value in values]]
        last = self._last  # which another thread may replace meanwhile
        if last is None or last[0] != made_of:
            last = self._last = made_of, self._made(values, tensordict), values
        return last[1]

    def _made(self, values: list[Any], tensordict: Any) -> Distribution:
        make, constants = self.distribution_class, self.distribution_kwargs
        params = dict(zip(self.dist_keys, values, strict=True))
        if is_compiling() and _may_check(make):
            # a compiled or exported program cannot branch on the values of its parameters
            constants = {"validate_args": False, **constants}
        try:
            dist = make(**params, **constants)
        except Exception as error:
            keys = dict(zip(self.dist_keys, self._in_keys, strict=True))
            raise _explained(error, self._title(), make, keys, constants, tensordict) from error
        if not isinstance(dist, Distribution):
            raise TypeError(
                f"Expected Distribution, but got {type(dist)}: {self._title()} calls its "
                "distribution_class for a torch.distributions.Distribution"
            )
        return dist

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}  # what it is made of may hold a graph

    def build_dist_from_params(self, tensordict: Node) -> Distribution:
        """Build the distribution, as `get_dist` does."""
        return self.get_dist(tensordict)

    def log_prob(self, tensordict: Node, *, dist: Distribution | None = None) -> Any:
        """The log-probability of the values at `out_keys`.

        dist: their distribution, if it has been made already.
        Returns a tensor; for a `CompositeDistribution`, a container with one entry for each value,
        unless `composite_lp_aggregate()` is on.
        """
        self._scores.check_mode("log_prob")
        if dist is None:
            dist = self.get_dist(tensordict)
        if isinstance(dist, CompositeDistribution):
            return self._scores.with_keys(
                self._scores.in_parts(dist.log_prob, tensordict), tensordict
            )
        values = _read(tensordict, self._out_keys)
        try:
            return dist.log_prob(*values)
        except Exception as error:
            missing = [k for k, v in zip(self._out_keys, values, strict=True) if v is None]
            if missing:
                asked = f"the log-probability of {self._title()}"
                raise MissingEntryError(missing_inputs(asked, missing, tensordict)) from error
            raise

    # -- running

    @dispatch(auto_batch_size=False)
    def forward(
        self,
        tensordict: Container,
        tensordict_out: Container | None = None,
        _requires_sample: bool = True,
    ) -> Container:
        """Write a value of the distribution; also callable with tensors, see `dispatch`.

        tensordict_out: container to write into instead.
        """
        mode = SKIP.get()
        if mode and may_skip(tensordict, self.in_keys, self.out_keys, mode):
            return tensordict
        return self._run(tensordict, tensordict_out, _requires_sample)

    def _run(self, tensordict: Any, out: Any = None, requires_sample: bool = True) -> Any:
        scored = self.return_log_prob
        if scored:
            self._scores.check_mode("the key of the log-probability")
        dist = self.get_dist(tensordict)
        if out is None:
            out = tensordict
        if not requires_sample:
            if scored:
                self._write_log_prob(out, self.log_prob(tensordict, dist=dist))
            return out
        if self._source is None:
            sample, log_prob = self._taken(dist)
        else:
            sample, log_prob = self._taken_from_source(dist, tensordict)
        if self._num_samples:
            out = out.expand(self._num_samples + out.batch_size)
        if sample.__class__ is Tensor and len(self._out_keys) == 1:
            out.set(self._out_keys[0], sample)
            if scored and log_prob is None:
                log_prob = dist.log_prob(sample)
        elif isinstance(sample, Node):
            if scored and log_prob is None:
                log_prob = self._scores.in_parts(dist.log_prob, sample)
            out.update(sample)
        else:
            samples = self._several(sample)
            if scored and log_prob is None:
                log_prob = dist.log_prob(*samples)
            for key, value in zip(self._out_keys, samples, strict=True):
                out.set(key, value)
        if scored:
            if isinstance(log_prob, Node):
                log_prob = self._scores.with_keys(log_prob, out)
            self._write_log_prob(out, log_prob)
        return out

    def _taken(self, dist: Any) -> tuple[Any, Any]:
        """The value taken from a distribution, with its log-probability if that comes with it."""
        kind = INTERACTION.get()
        if kind is None:
            kind = self._default_interaction_type
        shape = _ONE if self._num_samples is None else self._num_samples
        if kind is RANDOM and self.return_log_prob:
            together = drawn_together(dist)
            if together is not None:
                sample, log_prob = self._scores.in_parts(together, shape)
                return sample, log_prob
        return draw(dist, kind, shape, self.n_empirical_estimate), None

    def _taken_from_source(self, dist: Any, tensordict: Any) -> tuple[Any, Any]:
        assert self._source is not None
        params = tensordict.select(*self._in_keys, strict=False)._leaves([])
        devices = [leaf.device for leaf in params if isinstance(leaf, Tensor)]
        with self._source.numbers(tensordict, devices[0] if devices else _CPU):
            return self._taken(dist)

    def _several(self, sample: Any) -> Sequence[Any]:
        """The values, one for each key."""
        samples = sample if isinstance(sample, (tuple, list)) else (sample,)
        if len(samples) != len(self._out_keys):
            raise ValueError(
                f"{self._title()} returned {len(samples)} values for the {len(self._out_keys)} "
                f"out_keys={self._out_keys}; pass one key for each value"
            )
        return samples

    def _write_log_prob(self, out: Any, log_prob: Any) -> None:
        if isinstance(log_prob, Node):
            out.update(log_prob)
        else:
            out.set(self.log_prob_key, log_prob)

    def _title(self) -> str:
        made = self.distribution_class
        return f"{type(self).__name__}({getattr(made, '__name__', repr(made))})"

    def __repr__(self) -> str:
        options = ("distribution_class", "distribution_kwargs", "default_interaction_type")
        names = [*options, "num_samples"]
        return shown(self, [f"{name}={getattr(self, name)}" for name in names])


def _counts_writes(value: Any) -> bool:
    """Whether writes to a value can be noticed, as a tensor counts them."""
    return isinstance(value, Tensor) and not value.is_inference()


def _read(tensordict: Any, keys: list[NestedKey]) -> list[Any]:
    """The entries at `keys`, None for each missing one."""
    entries: Any = dense_entries(tensordict) if tensordict.__class__ is TensorDict else {}
    values = []
    for key in keys:
        value = entries.get(key)  # a nested key is not found here
        if value.__class__ is not Tensor:
            value = value_of(tensordict.get(key, None))
        values.append(value)
    return values


_AS_THEY_ARE = (ValueError, TypeError, RuntimeError, NotImplementedError)  # made of one text


class MissingEntryError(MissingKeyError, ValueError):
    """A distribution could not be built or evaluated because an entry is missing.

    >>> from torch.distributions import Normal
    >>> from raffia.nn import ProbabilisticTensorDictModule
    >>> act = ProbabilisticTensorDictModule(["loc", "scale"], ["act"], distribution_class=Normal)
    >>> act(TensorDict(loc=torch.zeros(3), scales=torch.ones(3)))
    Traceback (most recent call last):
    ...
    raffia.nn.probabilistic_module.MissingEntryError: Some tensors that are necessary for the
    module call were not found in the input: ProbabilisticTensorDictModule(Normal) reads 'scale'.
    Did you mean "scales"? (None was passed for it). The entries are ['loc', 'scales']
    """


def _class_of(chosen: Any) -> Any:
    """The class or function that makes the distributions; a name stands for a class.

    >>> _class_of("normal")
    <class 'torch.distributions.normal.Normal'>
    """
    if callable(chosen):
        return chosen
    if not isinstance(chosen, str):
        raise TypeError(
            "distribution_class must be a class, a function that returns a distribution, or the "
            f"name of a class; got {chosen!r}"
        )
    from raffia.nn import distributions as ours  # which import this package

    classes = {
        name.lower(): made
        for room in (distributions, ours)
        for name, made in vars(room).items()
        if inspect.isclass(made) and issubclass(made, distributions.Distribution)
    }
    if chosen.lower() not in classes:
        raise ValueError(
            "distribution_class must be a class, or the name of one in torch.distributions or "
            f"raffia.nn.distributions; none is named {chosen!r}{nearest(chosen.lower(), classes)}"
        )
    return classes[chosen.lower()]


def _may_check(make: Any) -> bool:
    """Whether `make` takes `validate_args`."""
    code = getattr(getattr(make, "__init__", None), "__code__", None)
    return code is not None and "validate_args" in code.co_varnames


def _explained(
    error: Exception,
    title: str,  # of the module
    make: Any,  # the class or function
    keys: dict[str, NestedKey],  # keyword -> key
    constants: Any,  # further keywords
    tensordict: Any,
) -> Exception:
    """The error of a distribution that could not be made, with the keys it came from."""
    mismatch = _mismatch(make, list(keys), list(constants)) if isinstance(error, TypeError) else ""
    if mismatch:
        return TypeError(
            f"distribution keywords and tensordict keys indicated by {title}.dist_keys must match, "
            f"and the keys are read as {keys}: {mismatch} To name the keyword that a key feeds: "
            f"in_keys={{keyword: key}}. ({error})"
        )
    missing = [key for key in keys.values() if tensordict.get(key, None) is None]
    if missing:
        return MissingEntryError(missing_inputs(title, missing, tensordict))
    blamed = [name for name in keys if re.search(rf"\bparameter {name}\b", str(error))]
    read = ", ".join(f"{name} from {keys[name]!r}" for name in blamed or keys)
    text = f"{title} can't make its distribution with {read}: {error}"
    if type(error) in _AS_THEY_ARE:
        return type(error)(text)
    error.add_note(text)
    return error


def _mismatch(make: Any, read: list[str], constants: list[str]) -> str:
    """The differences between the keywords and those that `make` takes, or nothing."""
    twice = [name for name in read if name in constants]
    if twice:
        return f"{twice} are given both by in_keys and by distribution_kwargs."
    try:
        signature = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # a callable without one
        return ""
    named = [p for p in signature if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    takes, given = [p.name for p in named], [*read, *constants]
    name = getattr(make, "__name__", repr(make))
    unknown = [k for k in given if k not in takes] if len(named) == len(signature) else []
    if unknown:
        hint = nearest(unknown[0], takes) or "."
        return f"{name} takes {takes}, not {unknown[0]!r}{hint}"
    needed = [p.name for p in named if p.default is p.empty and p.name not in given]
    return f"{name} takes {takes} and needs {needed[0]!r}." if needed else ""
