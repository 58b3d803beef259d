"""The keyed module that makes a distribution of entries and writes a value of it."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, distributions

from raffia.nn.base import TensorDictModuleBase, listed, shown
from raffia.nn.dispatch import SKIP, dispatch, may_skip, missing_inputs
from raffia.nn.distributions.aggregate import composite_lp_aggregate, set_composite_lp_aggregate
from raffia.nn.distributions.composite import CompositeDistribution
from raffia.nn.distributions.delta import Delta
from raffia.nn.interaction import INTERACTION, InteractionType
from raffia.nn.sampling import Source, draw, drawn_together
from raffia.tensordict.keys import MissingKeyError, NestedKey, nearest, unravel_key_to_tuple
from raffia.tensordict.node import Node

RANDOM = InteractionType.RANDOM
_AGGREGATE = set_composite_lp_aggregate.setting
_ONE = torch.Size()
_SUM = "sample_log_prob"  # where the log-probability goes while the parts are summed


class MissingEntryError(MissingKeyError, ValueError):
    """A distribution could not be made or asked because an entry is not there.

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


class ProbabilisticTensorDictModule(TensorDictModuleBase):
    """Makes a distribution of the entries at `in_keys` and writes a value of it at `out_keys`.

    Which value, `set_interaction_type` says, else `default_interaction_type`. A value that is there
    already is written anew, unless `set_skip_existing` is on.

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
    cache_dist: has no effect any more; True warns.
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
        if isinstance(in_keys, Mapping):
            self.dist_keys = list(in_keys)
            self.in_keys = list(in_keys.values())
        else:
            self.in_keys = _listed(in_keys, "in_keys")
            self.dist_keys = [unravel_key_to_tuple(key)[-1] for key in self.in_keys]
        if cache_dist:
            warnings.warn(
                "cache_dist=True has no effect: each call makes its distribution; leave it out",
                DeprecationWarning,
                stacklevel=2,
            )
        self.cache_dist = cache_dist
        self.distribution_class = _class_of(distribution_class)
        self.distribution_kwargs = {} if distribution_kwargs is None else distribution_kwargs
        self.default_interaction_type = default_interaction_type
        self.return_log_prob = return_log_prob
        self.n_empirical_estimate = n_empirical_estimate
        self.num_samples = num_samples
        self._source = None if generator is None else Source(generator)
        self._out_keys = self._sampled(out_keys)
        self._aggregates, self._set_then = composite_lp_aggregate(), _AGGREGATE.get()
        self._plan_log_prob(log_prob_keys, log_prob_key)
        self._quick = type(self).forward is ProbabilisticTensorDictModule.forward

    # -- what was asked for

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

    def _sampled(self, out_keys: Any) -> list[NestedKey]:
        """The keys of the values."""
        if out_keys is not None:
            return _listed(out_keys, "out_keys")
        if self.distribution_class is not CompositeDistribution:
            return ["_"]
        if "distribution_map" not in self.distribution_kwargs:
            raise KeyError(
                "'distribution_map' must be provided within distribution_kwargs whenever the "
                "distribution is a CompositeDistribution: "
                "distribution_kwargs={'distribution_map': {'action': Normal}}"
            )
        parts = self.distribution_kwargs["distribution_map"]
        names = self.distribution_kwargs.get("name_map") or {}
        return listed([names.get(part, part) for part in parts], "out_keys")

    def _plan_log_prob(self, keys: Any, key: Any) -> None:
        """Where the log-probabilities go."""
        samples = self._out_keys
        if self._aggregates:
            if keys is not None:
                raise RuntimeError(
                    "composite_lp_aggregate is set to True but log_prob_keys were passed: the "
                    "log-probabilities are summed then, and log_prob_key= says where the sum goes"
                )
        elif keys is None and key is not None:
            if len(samples) != 1:
                raise RuntimeError(
                    "composite_lp_aggregate is set to `False` but a `log_prob_key` was passed: "
                    f"each of {samples} has its own log-probability then; pass log_prob_keys="
                    f"{[log_prob_key_of(sample) for sample in samples]}"
                )
            keys = [key]
        elif not (keys is None or key is None or _listed(keys, "log_prob_keys") == [key]):
            raise ValueError(
                f"log_prob_key={key!r} and log_prob_keys={keys!r} name different places; give one"
            )
        custom = [key] if self._aggregates and key is not None else keys
        self._custom = custom is not None
        if custom is not None:
            self._log_prob_keys = _listed(custom, "log_prob_keys")
            if self.return_log_prob:
                self._check_log_prob_keys()
        elif self._aggregates:
            self._log_prob_keys = [_SUM]
        else:
            self._log_prob_keys = [log_prob_key_of(sample) for sample in samples]

    def _check_log_prob_keys(self) -> None:
        keys, samples = self._log_prob_keys, self._out_keys
        if samples != ["_"] and not self._aggregates and len(keys) != len(samples):
            raise ValueError(
                f"log_prob_keys={keys} must be one for each sampled key, and these are {samples}"
            )
        for key in keys:
            for sample in samples:
                a, b = unravel_key_to_tuple(key), unravel_key_to_tuple(sample)
                if a == b[: len(a)] or b == a[: len(b)]:
                    raise ValueError(
                        f"the log-probability at {key!r} would overwrite the sample at {sample!r}, "
                        "or a part of it; give it a key of its own, such as "
                        f"{log_prob_key_of(sample)!r}"
                    )

    # -- keys

    @property  # type: ignore[misc]
    def out_keys(self) -> list[NestedKey]:
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
        self._check_mode("log_prob_keys")
        return self._log_prob_keys

    @property
    def log_prob_key(self) -> NestedKey:
        """The key of the log-probability, where there is one.

        Raises RuntimeError if there are several, or if `composite_lp_aggregate()` changed.
        """
        self._check_mode("log_prob_key")
        if len(self._log_prob_keys) != 1:
            raise RuntimeError(
                "composite_lp_aggregate is set to ``False``, hence log_prob_key can't be accessed "
                "unless there is one and only one element in log_prob_keys, and they are "
                f"{self._log_prob_keys}; try log_prob_keys"
            )
        return self._log_prob_keys[0]

    def _check_mode(self, name: str) -> None:
        if _AGGREGATE.get() is self._set_then:  # spares a look at the environment
            return
        aggregates = composite_lp_aggregate()
        if aggregates != self._aggregates:
            raise RuntimeError(
                f"composite_lp_aggregate is set to `{aggregates}`, but the class was instantiated "
                f"with `{self._aggregates}`, which {name} depends on; make the module anew, or "
                f"call it within set_composite_lp_aggregate({self._aggregates})"
            )

    def select_out_keys(self, *out_keys: NestedKey) -> NoReturn:
        """Not possible here: a sequence around the module can select.

        Raises RuntimeError.
        """
        raise RuntimeError(
            f"{type(self).__name__} does not support select_out_keys; put it into a sequence: "
            f"ProbabilisticTensorDictSequential(module).select_out_keys("
            f"{', '.join(map(repr, out_keys))})"
        )

    # -- the distribution

    def get_dist(self, tensordict: Any) -> distributions.Distribution:
        """The distribution of the entries at `in_keys`.

        Raises TypeError for keywords that the distribution does not take, and what it raises
        itself for parameters out of their domain.
        """
        params = {}
        for name, key in zip(self.dist_keys, self._in_keys, strict=True):
            value = tensordict.get(key, None)
            params[name] = value._unwrapped() if isinstance(value, Node) else value
        try:
            if torch.compiler.is_compiling() and _may_check(self.distribution_class):
                # a compiled or exported program can't branch on the values of its parameters
                options = {"validate_args": False, **self.distribution_kwargs}
                return self.distribution_class(**params, **options)
            return self.distribution_class(**params, **self.distribution_kwargs)
        except Exception as error:
            raise self._explained(error, params, tensordict) from error

    def build_dist_from_params(self, tensordict: Any) -> distributions.Distribution:
        """The same as `get_dist`."""
        return self.get_dist(tensordict)

    def log_prob(self, tensordict: Any, *, dist: Any = None) -> Any:
        """The log-probability of the values at `out_keys`.

        dist: their distribution, if it has been made already.
        Returns a tensor; for a `CompositeDistribution`, a container with one entry for each value,
        unless `composite_lp_aggregate()` is on.
        """
        self._check_mode("log_prob")
        if dist is None:
            dist = self.get_dist(tensordict)
        if isinstance(dist, CompositeDistribution):
            return self._collected(self._parts(dist.log_prob, tensordict), tensordict)
        values = [tensordict.get(key, None) for key in self._out_keys]
        try:
            return dist.log_prob(*values)
        except Exception as error:
            missing = [k for k, v in zip(self._out_keys, values, strict=True) if v is None]
            if missing:
                asked = f"the log-probability of {self._title()}"
                raise MissingEntryError(missing_inputs(asked, missing, tensordict)) from error
            raise

    def _parts(self, ask: Callable[..., Any], *args: Any) -> Any:
        """What a composite distribution answers while it does not sum log-probabilities."""
        if not self._aggregates:
            return ask(*args)
        with set_composite_lp_aggregate(False):
            return ask(*args)

    def _collected(self, parts: Any, tensordict: Any) -> Any:
        """Several log-probabilities under the keys that were asked for, or their sum.

        Where the sum is asked for, the parts are written into `tensordict`.
        """
        if self._aggregates:
            tensordict.update(parts)
            return parts.sum(dim="feature", reduce=True)
        return self._renamed(parts) if self._custom else parts

    def _renames(self) -> list[tuple[NestedKey, NestedKey]]:
        """Where a composite distribution puts each log-probability, and where it is asked for."""
        names = [log_prob_key_of(key) for key in self._out_keys]
        return list(zip(names, self._log_prob_keys, strict=False))

    def _renamed(self, parts: Any) -> Any:
        names = [log_prob_key_of(key) for key in self._out_keys]
        if not all([name in parts for name in names]):
            names = list(parts.keys(True, True))
        if len(names) != len(self._log_prob_keys):
            raise ValueError(
                f"{self._title()} gives the log-probabilities {names}, and "
                f"log_prob_keys={self._log_prob_keys} must be one for each"
            )
        result = parts.empty()
        for name, key in zip(names, self._log_prob_keys, strict=True):
            result.set(key, parts.get(name))
        return result

    # -- running

    @dispatch(auto_batch_size=False)
    def forward(
        self, tensordict: Any, tensordict_out: Any = None, _requires_sample: bool = True
    ) -> Any:
        """Write a value of the distribution; also by tensors, see `dispatch`.

        tensordict_out: container to write into instead.
        """
        mode = SKIP.get()
        if mode and may_skip(tensordict, self.in_keys, self.out_keys, mode):
            return tensordict
        return self._run(tensordict, tensordict_out, _requires_sample)

    def _run(
        self, tensordict: Any, tensordict_out: Any = None, requires_sample: bool = True
    ) -> Any:
        scored = self.return_log_prob
        if scored:
            self._check_mode("the key of the log-probability")
        dist = self.get_dist(tensordict)
        out = tensordict if tensordict_out is None else tensordict_out
        if not requires_sample:
            if scored:
                self._write_log_prob(out, self.log_prob(tensordict, dist=dist))
            return out
        if self._source is None:
            sample, log_prob = self._taken(dist)
        else:
            sample, log_prob = self._taken_from_source(dist, tensordict)
        shape = self._num_samples
        if shape:
            out = out.expand(shape + out.batch_size)
        if sample.__class__ is Tensor and len(self._out_keys) == 1:
            out.set(self._out_keys[0], sample)
            if scored:
                self._write_log_prob(out, dist.log_prob(sample) if log_prob is None else log_prob)
        else:
            self._write(out, dist, sample, log_prob)
        return out

    def _taken(self, dist: Any) -> tuple[Any, Any]:
        """A value, and its log-probability if the distribution gives it with the value."""
        kind = INTERACTION.get()
        if kind is None:
            kind = self._default_interaction_type
        shape = _ONE if self._num_samples is None else self._num_samples
        if kind is RANDOM and self.return_log_prob:
            together = drawn_together(dist)
            if together is not None:
                sample, log_prob = self._parts(together, shape)
                return sample, log_prob
        return draw(dist, kind, shape, self.n_empirical_estimate), None

    def _taken_from_source(self, dist: Any, tensordict: Any) -> tuple[Any, Any]:
        assert self._source is not None
        with self._source.numbers(tensordict, self._device(tensordict)):
            return self._taken(dist)

    def _device(self, tensordict: Any) -> torch.device:
        """Where the parameters are."""
        for key in self._in_keys:
            value = tensordict.get(key, None)
            leaves = value._leaves([]) if isinstance(value, Node) else [value]
            for leaf in leaves:
                if isinstance(leaf, Tensor):
                    return leaf.device
        return torch.device("cpu")

    def _write(self, out: Any, dist: Any, sample: Any, log_prob: Any) -> None:
        """Write what is not one tensor: a container, or several values."""
        if isinstance(sample, Node):
            if self.return_log_prob and log_prob is None:
                log_prob = self._parts(dist.log_prob, sample)
            out.update(sample)
        else:
            samples = sample if isinstance(sample, (tuple, list)) else (sample,)
            if len(samples) != len(self._out_keys):
                raise ValueError(
                    f"{self._title()} gave {len(samples)} values for the {len(self._out_keys)} "
                    f"out_keys={self._out_keys}; give one key for each value"
                )
            if self.return_log_prob and log_prob is None:
                log_prob = dist.log_prob(*samples)
            for key, value in zip(self._out_keys, samples, strict=True):
                out.set(key, value)
        if isinstance(log_prob, Node):
            log_prob = self._collected(log_prob, out)
        if self.return_log_prob:
            self._write_log_prob(out, log_prob)

    def _write_log_prob(self, out: Any, log_prob: Any) -> None:
        if isinstance(log_prob, Node):
            out.update(log_prob)
        elif len(self._log_prob_keys) == 1:
            out.set(self._log_prob_keys[0], log_prob)
        else:
            out.set(self.log_prob_key, log_prob)  # which says what is wrong

    # -- what went wrong

    def _title(self) -> str:
        made = self.distribution_class
        return f"{type(self).__name__}({getattr(made, '__name__', repr(made))})"

    def _explained(self, error: Exception, params: dict[str, Any], tensordict: Any) -> Exception:
        """The error of a distribution that could not be made, with the keys it came from."""
        keys = dict(zip(self.dist_keys, self._in_keys, strict=True))
        if isinstance(error, TypeError):
            misfit = _misfit(self.distribution_class, params, self.distribution_kwargs)
            if misfit:
                return TypeError(
                    f"distribution keywords and tensordict keys indicated by {self._title()}"
                    f".dist_keys must match, and the keys are read as {keys}: {misfit} "
                    f"To say which keyword a key feeds: in_keys={{keyword: key}}. ({error})"
                )
        missing = [keys[name] for name, value in params.items() if value is None]
        if missing:
            return MissingEntryError(missing_inputs(self._title(), missing, tensordict))
        blamed = [name for name in keys if re.search(rf"\bparameter {name}\b", str(error))]
        read = ", ".join(f"{name} from {keys[name]!r}" for name in blamed or keys)
        text = f"{self._title()} can't make its distribution with {read}: {error}"
        if type(error) in (ValueError, TypeError, RuntimeError, NotImplementedError):
            return type(error)(text)
        error.add_note(text)
        return error

    def __repr__(self) -> str:
        return shown(
            self,
            [
                f"distribution_class={self.distribution_class}",
                f"distribution_kwargs={self.distribution_kwargs}",
                f"default_interaction_type={self.default_interaction_type}",
                f"num_samples={self.num_samples}",
            ],
        )


def log_prob_key_of(key: NestedKey) -> NestedKey:
    """The key of the log-probability of the value at `key`.

    >>> log_prob_key_of("action"), log_prob_key_of(("agent", "action"))
    ('action_log_prob', ('agent', 'action_log_prob'))
    """
    if isinstance(key, str):
        return key + "_log_prob"
    return (*key[:-1], key[-1] + "_log_prob")


def _class_of(chosen: Any) -> Any:
    """The class or function that makes the distributions."""
    if isinstance(chosen, str):
        from raffia.nn import distributions as ours

        classes = {
            name.lower(): made
            for room in (distributions, ours)
            for name, made in vars(room).items()
            if inspect.isclass(made) and issubclass(made, distributions.Distribution)
        }
        if chosen.lower() not in classes:
            raise ValueError(
                "distribution_class is a class, or the name of one of torch.distributions or "
                f"raffia.nn.distributions; none is named {chosen!r}"
                + nearest(chosen.lower(), classes)
            )
        return classes[chosen.lower()]
    if not callable(chosen):
        raise TypeError(
            "distribution_class is a class, a function that gives a distribution, or the name of "
            f"a class; got {chosen!r}"
        )
    return chosen


def _may_check(made: Any) -> bool:
    """Whether a distribution takes `validate_args`."""
    code = getattr(getattr(made, "__init__", None), "__code__", None)
    return code is not None and "validate_args" in code.co_varnames


def _misfit(make: Any, params: dict[str, Any], kwargs: Any) -> str:
    """In what the keywords differ from those that `make` takes, or nothing."""
    twice = [name for name in params if name in kwargs]
    if twice:
        return f"{twice} are given by in_keys and by distribution_kwargs."
    try:
        signature = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # a callable without one
        return ""
    named = [p for p in signature if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    takes = [p.name for p in named]
    given = [*params, *kwargs]
    name = getattr(make, "__name__", repr(make))
    unknown = [] if len(named) < len(signature) else [k for k in given if k not in takes]
    if unknown:
        hint = nearest(unknown[0], takes) or "."
        return f"{name} takes {takes}, not {unknown[0]!r}{hint}"
    needed = [p.name for p in named if p.default is p.empty and p.name not in given]
    return f"{name} takes {takes} and needs {needed[0]!r}." if needed else ""


def _listed(keys: Any, name: str) -> list[NestedKey]:
    """Keys as a list; a tuple of names is one nested key here."""
    return listed([keys] if isinstance(keys, (str, tuple)) else keys, name)
