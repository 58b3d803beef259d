"""Keyed modules one after another, some of which draw: the distribution of what they draw."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, distributions, nn

from raffia.nn.base import CALL
from raffia.nn.dispatch import SKIP, dispatch, may_skip
from raffia.nn.distributions.composite import CompositeDistribution
from raffia.nn.interaction import INTERACTION, InteractionType, interaction_type
from raffia.nn.module import place
from raffia.nn.probabilistic_module import ProbabilisticTensorDictModule
from raffia.nn.sequence import TensorDictSequential, _keys, _moved, _tolerant
from raffia.nn.shapes import watched
from raffia.tensordict.keys import NestedKey
from raffia.tensordict.tensordict import TensorDict

Run = Callable[..., Any]


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

    def __init__(
        self,
        *modules: Any,
        partial_tolerant: bool = False,
        return_composite: bool | None = None,
        selected_out_keys: list[NestedKey] | None = None,
        inplace: bool | str | None = None,
        expect_in_keys: list[NestedKey] | None = None,
    ) -> None:
        super().__init__(
            *modules,
            partial_tolerant=partial_tolerant,
            selected_out_keys=selected_out_keys,
            inplace=inplace,
            expect_in_keys=expect_in_keys,
        )
        if return_composite is None and len(self):
            direct = [m for m in self if isinstance(m, ProbabilisticTensorDictModule)]
            return_composite = len(direct) > 1 or not _probabilistic(self._last())
        self.return_composite = bool(return_composite)
        self._check_modules()
        self._settle()

    def _refresh_keys(self) -> None:
        """Work out the keys from the modules, and what else depends on them."""
        if "return_composite" in self.__dict__:
            self._check_modules()
        super()._refresh_keys()
        if "return_composite" in self.__dict__:
            self._settle()

    def _check_modules(self) -> None:
        if not len(self):
            raise ValueError(
                f"{type(self).__name__} must consist of zero or more TensorDictModules followed by "
                "a ProbabilisticTensorDictModule; it has no module"
            )
        last = self._last()
        if not self.return_composite and not _probabilistic(last):
            raise TypeError(
                f"The final module passed to {type(self).__name__} must be an instance of "
                "ProbabilisticTensorDictModule or another ProbabilisticTensorDictSequential, and "
                f"it is a {type(last).__name__}; or pass return_composite=True"
            )

    def _settle(self) -> None:
        """Whether the last module draws, and which one's default type holds for all."""
        last = self._last()
        self._requires_sample = True
        if _probabilistic(last):
            early = _keys(list(self)[:-1])[1]
            self._requires_sample = not all([key in early for key in last.dist_sample_keys])
        self._deciding = _deciding(self.module._modules.items())

    def _last(self) -> Any:
        return list(self)[-1]

    # -- running

    def _run(self, tensordict: TensorDict) -> Any:
        if self.__class__.forward is not _FORWARD:
            return CALL(self, tensordict)
        if not self._requires_sample or self._unseen():
            return self._through(tensordict)
        undo = self._interacting()
        name = None
        children: Any = self._modules["module"]
        try:
            for name, module in children._modules.items():  # noqa: B007 # read where one fails
                tensordict = module(tensordict)
        except Exception as error:
            error.add_note(self._where(name))
            raise
        finally:
            if undo is not None:
                undo()
        return tensordict

    @dispatch(auto_batch_size=False)
    def forward(
        self,
        tensordict: Any,
        tensordict_out: Any = None,
        _requires_sample: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the modules in order; also by tensors, see `dispatch`.

        tensordict_out: container to write the outputs into, and only these.
        Other keywords go to the modules that are not probabilistic.
        """
        mode = SKIP.get()
        if mode and may_skip(tensordict, self.in_keys, self.out_keys, mode):
            return tensordict
        options = (_requires_sample is not False, kwargs)
        if tensordict_out is None and self.inplace is None and self._selected is None:
            return self._through(tensordict, *options)
        if tensordict_out is None:
            tensordict_out = place(tensordict, True if self.inplace is None else self.inplace)
        if tensordict_out is tensordict and self._selected is None:
            result = self._through(tensordict, *options)
            return tensordict if result is tensordict else _moved(result, tensordict, self.out_keys)
        keys = self.out_keys
        if tensordict_out is tensordict:  # inputs that were written anew count as well
            keys = [*keys, *[key for key in self.in_keys if key in self._out_keys]]
        return _moved(self._through(tensordict.copy(), *options), tensordict_out, keys)

    def _through(
        self, tensordict: Any, requires_sample: bool = True, kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What all modules make of the container."""
        runs = self._runs(kwargs or {})
        if not (requires_sample and self._requires_sample) and _probabilistic(self._last()):
            name, module, run = runs[-1]
            runs[-1] = (name, module, functools.partial(run, _requires_sample=False))
        undo = self._interacting()
        try:
            if self.partial_tolerant:
                return self._steps(tensordict, runs, _tolerant)
            if not self._unseen():
                return self._steps(tensordict, runs, _step)
            seen: dict[str, Any] = {}
            result = self._steps(tensordict, runs, functools.partial(watched, seen))
            self._seen = seen
            return result
        finally:
            if undo is not None:
                undo()

    def _unseen(self) -> bool:
        """Whether this call is the first, whose shapes are noted."""
        return not torch.compiler.is_compiling() and self._seen is None

    def _runs(self, kwargs: dict[str, Any]) -> list[tuple[str, Any, Run]]:
        """The modules by name, and how each is called."""
        return [(name, m, _called(m, kwargs)) for name, m in self.module._modules.items()]

    def _steps(
        self, tensordict: Any, runs: Iterable[tuple[str, Any, Run]], step: Callable[..., Any]
    ) -> Any:
        name = None
        try:
            for name, module, run in runs:
                tensordict = step(name, module, tensordict, run)
        except Exception as error:
            error.add_note(self._where(name))
            raise
        return tensordict

    def _interacting(self, always: bool = False) -> Callable[[], None] | None:
        """Let the default of the last module hold for all; returns the call that ends that."""
        if (self.return_composite and not always) or INTERACTION.get() is not None:
            return None
        # for this thread only; a compiled program has no others
        return INTERACTION.put(self.default_interaction_type, not torch.compiler.is_compiling())

    # -- the distribution

    def get_dist_params(self, tensordict: Any, tensordict_out: Any = None, **kwargs: Any) -> Any:
        """Run all modules but the last, which gives the parameters of its distribution.

        They take the values that `default_interaction_type` says, unless `set_interaction_type`
        says otherwise.

        tensordict_out: container to write the outputs into, and only these.
        Other keywords go to the modules that are not probabilistic.
        """
        if tensordict_out is None:
            return self._params(tensordict, kwargs)
        return _moved(self._params(tensordict.copy(), kwargs), tensordict_out, self._early_keys())

    def _params(self, tensordict: Any, kwargs: dict[str, Any], keep: bool = False) -> Any:
        """Run all but the last module, and of a sequence at the end all but its last module.

        keep: values that are there are not drawn anew.
        """
        *runs, (_, last, _) = self._runs(kwargs)
        if keep:  # of the values in sequences here, too
            runs = [(name, m, _called(m, kwargs)) for name, s, _ in runs for m in _flat([s])]
        undo = self._interacting(always=True)
        try:
            tensordict = self._steps(tensordict, runs, _kept if keep else _step)
            if isinstance(last, ProbabilisticTensorDictSequential) and not last.return_composite:
                tensordict = last._params(tensordict, kwargs, keep)
        finally:
            if undo is not None:
                undo()
        return tensordict

    def _early_keys(self) -> list[NestedKey]:
        """The keys that `get_dist_params` writes."""
        *early, last = list(self)
        keys = _keys(early)[1]
        if isinstance(last, ProbabilisticTensorDictSequential) and not last.return_composite:
            keys += last._early_keys()
        return keys

    def get_dist(
        self, tensordict: Any, tensordict_out: Any = None, **kwargs: Any
    ) -> distributions.Distribution:
        """The distribution of the values that the sequence writes.

        With `return_composite` it is that of all probabilistic modules, each conditioned on new
        draws of those before it; the container is not changed. Otherwise it is that of the last
        module, and what the modules before it make is written.

        tensordict_out: container to write that into instead.
        Other keywords go to the modules that are not probabilistic.
        """
        return self._dist(tensordict, tensordict_out, kwargs, keep=False)[0]

    def _dist(
        self, tensordict: Any, tensordict_out: Any, kwargs: dict[str, Any], keep: bool
    ) -> tuple[Any, Any]:
        """The distribution, and the container with its parameters."""
        if self.return_composite:
            return self._composite(tensordict, kwargs, keep), tensordict
        inner = tensordict if tensordict_out is None else tensordict.copy()
        params = self._params(inner, kwargs, keep)
        if tensordict_out is not None:
            _moved(params, tensordict_out, self._early_keys())
        last = _innermost(self)
        if isinstance(last, ProbabilisticTensorDictSequential):
            return last._composite(params, kwargs, keep), params
        return last.get_dist(params), params

    def _composite(self, tensordict: Any, kwargs: dict[str, Any], keep: bool) -> Any:
        dists: dict[NestedKey, Any] = {}
        self._collect(tensordict.copy(), dists, kwargs, keep)
        if not dists:
            raise RuntimeError(
                f"No distribution module found in {type(self).__name__}: none of its modules is a "
                f"ProbabilisticTensorDictModule, they are {[type(m).__name__ for m in self]}"
            )
        batch = TensorDict(batch_size=tensordict.batch_size)
        return CompositeDistribution.from_distributions(batch, dists)

    def _collect(
        self, tensordict: Any, dists: dict[NestedKey, Any], kwargs: dict[str, Any], keep: bool
    ) -> None:
        """Run the modules, and note the distributions of the probabilistic ones."""
        modules = list(_flat(self))
        for number, module in enumerate(modules, 1):
            if not isinstance(module, ProbabilisticTensorDictModule):
                tensordict = module(tensordict, **kwargs)
                continue
            dist = module.get_dist(tensordict)
            dists.update(_named(module, dist))
            there = keep and all([key in tensordict for key in module.dist_sample_keys])
            if number < len(modules) and not there:
                tensordict = module(tensordict)

    def build_dist_from_params(self, tensordict: Any) -> distributions.Distribution:
        """The distribution of the last probabilistic module; no other module runs.

        Raises RuntimeError if there is none.
        """
        found = [m for m in _flat(self) if isinstance(m, ProbabilisticTensorDictModule)]
        if not found:
            raise RuntimeError(
                f"Could not find any ProbabilisticTensorDictModule in {type(self).__name__}"
            )
        return found[-1].get_dist(tensordict)

    def log_prob(
        self, tensordict: Any, tensordict_out: Any = None, *, dist: Any = None, **kwargs: Any
    ) -> Any:
        """The log-probability of the values that are there, each given those before it.

        With `return_composite` it is a container, with one entry for each value at the key where a
        call writes it; or the sum, while `composite_lp_aggregate()` is on. Otherwise it is that of
        the last module, and what the modules before it make is written.

        tensordict_out: container to write that into instead.
        dist: the distribution, if it has been made already.
        Other keywords go to the modules that are not probabilistic.
        """
        if dist is None:
            dist, tensordict = self._dist(tensordict, tensordict_out, kwargs, keep=True)
        elif kwargs:
            raise TypeError(
                f"log_prob(td, dist=...) runs no module that could take {sorted(kwargs)}"
            )
        last = self if self.return_composite else _innermost(self)
        if isinstance(last, ProbabilisticTensorDictModule):
            return last.log_prob(tensordict, dist=dist)
        return last._renamed(dist.log_prob(tensordict))

    def _renamed(self, log_prob: Any) -> Any:
        """Log-probabilities under the keys where a call writes them."""
        if isinstance(log_prob, Tensor):
            return log_prob
        for module in _flat(self):
            if isinstance(module, ProbabilisticTensorDictModule) and module._custom:
                for old, new in module._renames():
                    if old != new and old in log_prob:
                        log_prob.rename_key_(old, new)
        return log_prob

    # -- what the modules say

    @property
    def default_interaction_type(self) -> InteractionType | None:
        """That of the last module that has one; without one, what `interaction_type()` gives."""
        if self._deciding is None:
            return interaction_type()
        module: Any = self._modules["module"]._modules[self._deciding]  # type: ignore[union-attr]
        return cast("InteractionType", module.default_interaction_type)

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
        (key,) = self._one_key()
        return key

    def _one_key(self) -> list[NestedKey]:
        keys = self.log_prob_keys
        if len(keys) != 1:
            raise AttributeError(
                f"{type(self).__name__} has {len(keys)} log-probabilities, at {keys}, and not one "
                "log_prob_key; see log_prob_keys"
            )
        return keys

    def __getattr__(self, name: str) -> Any:
        if name == "log_prob_key":  # where the property fails
            return self._one_key()
        return super().__getattr__(name)

    @property
    def dist_params_keys(self) -> list[NestedKey]:
        """The keys of the parameters of the distributions: those of the last module first."""
        return self._listed("dist_params_keys")

    @property
    def dist_sample_keys(self) -> list[NestedKey]:
        """The keys of the values: those of the last module first."""
        return self._listed("dist_sample_keys")

    def _listed(self, name: str) -> list[Any]:
        values: list[Any] = []
        for module in reversed(list(_flat(self))):
            if isinstance(module, ProbabilisticTensorDictModule):
                values += getattr(module, name) or ()
        return values

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

    def __getitem__(self, index: int | slice | str) -> Any:
        """A module by its place or name; a slice gives a sequence that shares the modules.

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


def _flat(sequence: Iterable[Any]) -> Iterator[Any]:
    """The modules of a sequence; those of a sequence in it too, not that one itself."""
    for module in sequence:
        if isinstance(module, TensorDictSequential):
            yield from _flat(module)
        else:
            yield module


def _innermost(sequence: ProbabilisticTensorDictSequential) -> Any:
    """The last module; of a sequence there its last, unless that one gives a composite."""
    last = sequence._last()
    while isinstance(last, ProbabilisticTensorDictSequential) and not last.return_composite:
        last = last._last()
    return last


def _deciding(modules: Iterable[tuple[str, Any]]) -> str | None:
    """The name of the last module that has a default interaction type."""
    for name, module in reversed(list(modules)):
        if getattr(module, "default_interaction_type", None) is not None:
            return name
    return None


def _named(module: ProbabilisticTensorDictModule, dist: Any) -> dict[NestedKey, Any]:
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


def _called(module: Any, kwargs: dict[str, Any]) -> Run:
    """How a module is called: those that draw take no keywords."""
    if kwargs and not isinstance(module, ProbabilisticTensorDictModule):
        return functools.partial(module, **kwargs)
    return cast("Run", module)


def _step(name: str, module: Any, tensordict: Any, run: Run) -> Any:
    return run(tensordict)


def _kept(name: str, module: Any, tensordict: Any, run: Run) -> Any:
    """Run a module, unless it draws values that are there."""
    if isinstance(module, ProbabilisticTensorDictModule) and all(
        [key in tensordict for key in module.dist_sample_keys]
    ):
        return tensordict
    return run(tensordict)
