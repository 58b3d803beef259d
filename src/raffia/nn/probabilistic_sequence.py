"""Keyed modules one after another, some of which draw: the distribution of what they draw."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast, overload

import torch
from torch import Tensor, distributions, nn
from torch.compiler import is_compiling

from raffia.nn.base import CALL
from raffia.nn.dispatch import dispatch
from raffia.nn.distributions.composite import CompositeDistribution
from raffia.nn.log_prob_keys import renamed
from raffia.nn.modes import INTERACTION, InteractionType, interaction_type
from raffia.nn.probabilistic_module import ProbabilisticTensorDictModule
from raffia.nn.sequence import TensorDictSequential, keys_of, moved
from raffia.tensordict.keys import NestedKey
from raffia.tensordict.node import Container, Node
from raffia.tensordict.tensordict import TensorDict


class ProbabilisticTensorDictSequential(TensorDictSequential):
    """A sequence with probabilistic modules: it can also give the distribution of their values.

    Each probabilistic module is conditioned on the values that those before it have drawn. If the
    modules before the last one write its values already, it draws nothing, and only writes the
    log-probability.

    modules: as for `TensorDictSequential`; usually the last one is probabilistic.
    partial_tolerant, selected_out_keys, inplace, expect_in_keys: as for `TensorDictSequential`.
    return_composite: True: `get_dist` gives a `CompositeDistribution` of the values of all
        probabilistic modules; False: the distribution of the last module, whose
        `default_interaction_type` then holds for all. Default: True if there are several, or if the
        last module is not probabilistic.
    Raises ValueError without modules; TypeError for `return_composite=False` if the last module is
    not probabilistic.

    >>> from torch import nn
    >>> from torch.distributions import Normal
    >>> from raffia.nn import (
    ...     ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
    ... )
    >>> from raffia.nn.distributions import NormalParamExtractor
    >>> net = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
    >>> policy = ProbabilisticTensorDictSequential(
    ...     TensorDictModule(net, in_keys=["obs"], out_keys=["loc", "scale"]),
    ...     ProbabilisticTensorDictModule(
    ...         ["loc", "scale"], ["action"], distribution_class=Normal, return_log_prob=True
    ...     ),
    ... )
    >>> td = policy(TensorDict(obs=torch.zeros(5, 3), batch_size=[5]))
    >>> td["action"].shape, td["action_log_prob"].shape
    (torch.Size([5, 2]), torch.Size([5, 2]))
    >>> policy.get_dist(td), policy.log_prob(td).shape
    (Normal(loc: torch.Size([5, 2]), scale: torch.Size([5, 2])), torch.Size([5, 2]))
    """

    return_composite: bool | None

    def __init__(
        self,
        *modules: Any,
        partial_tolerant: bool = False,
        return_composite: bool | None = None,
        selected_out_keys: list[NestedKey] | None = None,
        inplace: bool | str | None = None,
        expect_in_keys: list[NestedKey] | None = None,
    ) -> None:
        self.__dict__["return_composite"] = return_composite  # which the keys depend on
        options = {
            "selected_out_keys": selected_out_keys,
            "inplace": inplace,
            "expect_in_keys": expect_in_keys,
        }
        given: Any = {name: value for name, value in options.items() if value is not None}
        super().__init__(*modules, partial_tolerant=partial_tolerant, **given)
        if self.return_composite is None:  # a mixin's constructor replaced the sequence's
            self._refresh_keys()

    def _refresh_keys(self) -> None:
        """Work out the keys from the modules, and what else depends on them."""
        modules = list(self)
        if not modules:
            raise ValueError(
                f"{type(self).__name__} must consist of zero or more TensorDictModules followed by "
                "a ProbabilisticTensorDictModule; it has no module"
            )
        last = modules[-1]
        if self.return_composite is None:
            own = [m for m in modules if isinstance(m, ProbabilisticTensorDictModule)]
            self.return_composite = len(own) > 1 or not _probabilistic(last)
        if not self.return_composite and not _probabilistic(last):
            raise TypeError(
                f"The final module passed to {type(self).__name__} must be an instance of "
                "ProbabilisticTensorDictModule or another ProbabilisticTensorDictSequential, but "
                f"it is a {type(last).__name__}; pass return_composite=True to allow others"
            )
        super()._refresh_keys()

    @property
    def _requires_sample(self) -> bool:
        """Whether the last module has to draw: not all its values are written before it."""
        *early, last = self._named().values()
        if not _probabilistic(last):
            return True
        written = [module.out_keys for module in early]
        return not all([any([key in keys for keys in written]) for key in last.dist_sample_keys])

    def _named(self) -> dict[str, Any]:
        """The modules by name, without a search of attributes."""
        modules: Any = self._modules["module"]
        return cast("dict[str, Any]", modules._modules)

    def _last(self) -> Any:
        return list(self._named().values())[-1]

    # -- running

    def _run(self, tensordict: TensorDict) -> Any:
        if self.__class__.forward is not _FORWARD:
            return CALL(self, tensordict)
        return self._through(tensordict)

    @dispatch(auto_batch_size=False)
    def forward(
        self,
        tensordict: Container,
        tensordict_out: Container | None = None,
        _requires_sample: bool | None = None,
        **kwargs: Any,
    ) -> Container:
        """Run the modules in order; also callable with tensors, see `dispatch`.

        tensordict_out: container to write the outputs into, and only these.
        Other keywords go to the modules that are not probabilistic.
        """
        asked, runner = _requires_sample is not False, None
        if kwargs or not asked:
            runner = self._runner(asked and self._requires_sample, kwargs)
        through = functools.partial(self._through, runner=runner)
        return self._written(tensordict, tensordict_out, through)

    def _through(self, tensordict: Any, runner: Callable[[str, Any], Any] | None = None) -> Any:
        if runner is None and not self._requires_sample:
            runner = self._runner(False, {})
        undo = self._interacting()
        try:
            return super()._through(tensordict, runner)
        finally:
            if undo is not None:
                undo()

    def _runner(
        self, requires_sample: bool, kwargs: dict[str, Any]
    ) -> Callable[[str, Any], Callable[..., Any]]:
        """The modules with `kwargs`; the last one draws nothing if no sample is required."""
        last_name, last = list(self._named().items())[-1]
        silent = _probabilistic(last) and not requires_sample

        def runner(name: str, module: Any) -> Callable[..., Any]:
            options = {} if isinstance(module, ProbabilisticTensorDictModule) else kwargs
            if silent and name == last_name:
                options = {**options, "_requires_sample": False}
            return functools.partial(module, **options)

        return runner

    def _interacting(self, always: bool = False) -> Callable[[], None] | None:
        """Apply the last module's default interaction type to all; returns the call to undo it."""
        if (self.return_composite and not always) or INTERACTION.get() is not None:
            return None
        # for this thread only; a compiled program has no others
        return INTERACTION.put(self.default_interaction_type, not is_compiling())

    # -- the distribution

    def get_dist_params(
        self, tensordict: Container, tensordict_out: Container | None = None, **kwargs: Any
    ) -> Container:
        """Run all modules but the last; the result holds the parameters of its distribution.

        They take the values of `default_interaction_type`, unless `set_interaction_type` chooses
        another.

        tensordict_out: container to write the outputs into, and only these.
        Other keywords go to the modules that are not probabilistic.
        """
        if tensordict_out is None:
            return self._params(tensordict, kwargs)
        params = self._params(tensordict.copy(), kwargs)
        return moved(params, tensordict_out, self._early_keys())

    def _params(self, tensordict: Any, kwargs: dict[str, Any], keep: bool = False) -> Any:
        """Run all but the last module, and of a sequence at the end all but its last module.

        keep: values that are there are not drawn again.
        """
        *early, (name, last) = self._named().items()
        undo = self._interacting(always=True)
        try:
            for name, module in early:  # noqa: B007 # read where one fails
                tensordict = run(module, tensordict, kwargs, keep)
            if _passes_on(last):
                tensordict = last._params(tensordict, kwargs, keep)
        except Exception as error:
            error.add_note(self._where(name))
            raise
        finally:
            if undo is not None:
                undo()
        return tensordict

    def _early_keys(self) -> list[NestedKey]:
        """The keys that `get_dist_params` writes."""
        *early, last = self
        return keys_of(early)[1] + (last._early_keys() if _passes_on(last) else [])

    def get_dist(
        self, tensordict: Node, tensordict_out: Node | None = None, **kwargs: Any
    ) -> distributions.Distribution:
        """The distribution of the values that the sequence writes.

        With `return_composite` it is that of all probabilistic modules, each conditioned on new
        draws of those before it; the container is not changed. Otherwise it is that of the last
        module, and what the modules before it make is written.

        tensordict_out: container to write that into instead.
        Other keywords go to the modules that are not probabilistic.
        """
        dist: distributions.Distribution
        dist, _ = self._dist(tensordict, tensordict_out, kwargs, keep=False)
        return dist

    def _dist(
        self, tensordict: Any, tensordict_out: Any, kwargs: dict[str, Any], keep: bool
    ) -> tuple[Any, Any]:
        """The distribution, and the container with its parameters."""
        if self.return_composite:
            return _composite(self, tensordict, kwargs, keep), tensordict
        params = self._params(
            tensordict if tensordict_out is None else tensordict.copy(), kwargs, keep
        )
        if tensordict_out is not None:
            moved(params, tensordict_out, self._early_keys())
        last = self._asked()
        if isinstance(last, ProbabilisticTensorDictSequential):
            return _composite(last, params, kwargs, keep), params
        return last.get_dist(params), params

    def _asked(self) -> Any:
        """The module that makes the distribution: this one if composite, else the last of all."""
        if self.return_composite:
            return self
        last = self._last()
        return last._asked() if isinstance(last, ProbabilisticTensorDictSequential) else last

    def build_dist_from_params(self, tensordict: Node) -> distributions.Distribution:
        """The distribution of the last probabilistic module; no other module runs.

        Raises RuntimeError if the sequence has none.
        """
        modules = _drawing(self)
        if not modules:
            raise RuntimeError(
                f"Could not find any ProbabilisticTensorDictModule in {type(self).__name__}"
            )
        return modules[-1].get_dist(tensordict)

    def log_prob(
        self,
        tensordict: Node,
        tensordict_out: Node | None = None,
        *,
        dist: distributions.Distribution | None = None,
        **kwargs: Any,
    ) -> Any:
        """The log-probability of the values already present, each given those before it.

        With `return_composite` it is a container, with one entry for each value at the key where a
        call writes it; or the sum, while `composite_lp_aggregate()` is on. Otherwise it is that of
        the last module, and what the modules before it make is written.

        tensordict_out: container to write that into instead.
        dist: the distribution, if it has been made already.
        Other keywords go to the modules that are not probabilistic.
        """
        found: Any = dist
        if dist is None:
            found, tensordict = self._dist(tensordict, tensordict_out, kwargs, keep=True)
        elif kwargs:
            raise TypeError(
                "log_prob(td, dist=...) runs no module, so nothing takes the keywords "
                f"{sorted(kwargs)}"
            )
        last = self._asked()
        if isinstance(last, ProbabilisticTensorDictModule):
            return last.log_prob(tensordict, dist=found)
        scores = found.log_prob(tensordict)
        if isinstance(scores, Tensor):
            return scores
        moves = [module.log_prob_moves for module in _drawing(last)]
        return renamed(scores, {old: new for some in moves for old, new in some.items()})

    # -- from the modules

    @property
    def default_interaction_type(self) -> InteractionType | None:
        """The default of the last module that has one; without one, `interaction_type()`."""
        for module in reversed(self._named().values()):
            kind = getattr(module, "default_interaction_type", None)
            if kind is not None:
                return InteractionType(kind)
        return interaction_type()

    @property
    def num_samples(self) -> torch.Size:
        """The dimensions that the modules put before the batch: those of the last one first."""
        return torch.Size(self._listed("num_samples"))

    @property
    def log_prob_keys(self) -> list[NestedKey]:
        """The keys of the log-probabilities: those of the last module first."""
        return self._listed("log_prob_keys")

    @property
    def log_prob_key(self) -> NestedKey:
        """The key of the log-probability; AttributeError if there is not exactly one."""
        return self._one_key()

    def __getattr__(self, name: str) -> Any:
        if name == "log_prob_key":  # where the property fails
            return self._one_key()
        return super().__getattr__(name)

    def _one_key(self) -> NestedKey:
        keys = self.log_prob_keys
        if len(keys) != 1:
            raise AttributeError(
                f"{type(self).__name__} has {len(keys)} log-probabilities, at {keys}, so there is "
                "no single log_prob_key; read log_prob_keys"
            )
        return keys[0]

    @property
    def dist_params_keys(self) -> list[NestedKey]:
        """The keys of the parameters of the distributions: those of the last module first."""
        return self._listed("dist_params_keys")

    @property
    def dist_sample_keys(self) -> list[NestedKey]:
        """The keys of the values: those of the last module first."""
        return self._listed("dist_sample_keys")

    def _listed(self, name: str) -> list[Any]:
        """The items that all probabilistic modules list under `name`, the last module first."""
        return [item for m in reversed(_drawing(self)) for item in getattr(m, name) or ()]

    @property
    def det_part(self) -> TensorDictSequential:
        """The modules before the last one; deprecated, `get_dist_params` runs them."""
        warnings.warn(
            "det_part is deprecated: get_dist_params(td) runs the modules before the last one",
            DeprecationWarning,
            stacklevel=2,
        )
        return TensorDictSequential(*list(self)[:-1])

    # -- a collection of modules

    @overload
    def __getitem__(self, index: slice) -> TensorDictSequential: ...
    @overload
    def __getitem__(self, index: int | str) -> Any: ...

    def __getitem__(self, index: int | slice | str) -> Any:
        """A module by its index or name; a slice gives a sequence that shares the modules.

        A slice without probabilistic modules is a `TensorDictSequential`.
        """
        if isinstance(index, slice):
            part = dict(list(self.module._modules.items())[index])
            if not any([_probabilistic(module) for module in part.values()]):
                named = isinstance(self.module, nn.ModuleDict)
                options = TensorDictSequential._options(self)
                return TensorDictSequential(part if named else list(part.values()), **options)
        return super().__getitem__(index)


_FORWARD = ProbabilisticTensorDictSequential.forward


def _probabilistic(module: Any) -> bool:
    return isinstance(module, (ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential))


def _passes_on(module: Any) -> bool:
    """Whether a module is a sequence whose distribution is that of its last module."""
    sequence = isinstance(module, ProbabilisticTensorDictSequential)
    return sequence and not module.return_composite


def _composite(
    sequence: Iterable[Any], tensordict: Any, kwargs: dict[str, Any], keep: bool
) -> CompositeDistribution:
    """The distribution of all that a sequence draws, from a run on a shallow copy.

    kwargs: keywords for the modules that are not probabilistic.
    keep: the values that are there are the conditions; otherwise new draws.
    Raises RuntimeError if no module draws.
    """
    batch = TensorDict(batch_size=tensordict.batch_size)
    dists: dict[NestedKey, Any] = {}
    modules = list(_flat(sequence))
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


def run(module: Any, tensordict: Container, kwargs: dict[str, Any], keep: bool) -> Container:
    """Run a module on the container and return the result; modules that draw take no keywords.

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


def _flat(sequence: Iterable[Any]) -> Iterator[Any]:
    """The modules of a sequence; those of a sequence in it too, not that one itself."""
    for module in sequence:
        if isinstance(module, TensorDictSequential):
            yield from _flat(module)
        else:
            yield module


def _drawing(sequence: Iterable[Any]) -> list[ProbabilisticTensorDictModule]:
    """The probabilistic modules among them."""
    return [m for m in _flat(sequence) if isinstance(m, ProbabilisticTensorDictModule)]
