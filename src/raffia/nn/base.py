"""The base class of keyed modules: keys, selection of outputs, and the call."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Self, TypeVar, overload

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from raffia.nn.dispatch import SKIP
from raffia.tensordict.entries import UNSET
from raffia.tensordict.functions import is_non_tensor
from raffia.tensordict.keys import NestedKey, nearest, unravel_key
from raffia.tensordict.node import Container, Node
from raffia.tensordict.signatures import assigned
from raffia.tensordict.tensordict import TensorDict

CALL = nn.Module.__call__
Keys = NestedKey | Sequence[NestedKey]  # one key, or a list
Given = TypeVar("Given")
_FORWARD_HOOKS = torch_module._global_forward_hooks
_FORWARD_PRE_HOOKS = torch_module._global_forward_pre_hooks
_BACKWARD_HOOKS = torch_module._global_backward_hooks
_BACKWARD_PRE_HOOKS = torch_module._global_backward_pre_hooks


def any_global_hook() -> bool:
    """Whether hooks are registered for all modules."""
    return bool(_FORWARD_HOOKS or _FORWARD_PRE_HOOKS or _BACKWARD_HOOKS or _BACKWARD_PRE_HOOKS)


class OutKeyNotFoundError(ValueError, RuntimeError):
    """A key was selected that the module does not write.

    >>> from raffia.nn import TensorDictModule
    >>> TensorDictModule(torch.relu, ["x"], ["action"]).select_out_keys("acton")
    Traceback (most recent call last):
    ...
    raffia.nn.base.OutKeyNotFoundError: Can't select non existent key: 'acton'.
    The module writes ['action']. Did you mean "action"?
    """


class TensorDictModuleBase(nn.Module):
    """The common part of keyed modules: `in_keys`, `out_keys`, and their selection.

    A subclass sets `in_keys` and `out_keys` (as class attributes or in its constructor) and writes
    `forward(self, tensordict)`, which returns a container. `dispatch` makes it callable with
    tensors, too.

    >>> from raffia.nn import TensorDictModuleBase, dispatch
    >>> class Double(TensorDictModuleBase):
    ...     in_keys, out_keys = ["x"], ["y"]
    ...     @dispatch
    ...     def forward(self, tensordict):
    ...         return tensordict.set("y", 2 * tensordict["x"])
    >>> Double()(TensorDict(x=torch.ones(2)))["y"], Double()(x=torch.ones(2))
    (tensor([2., 2.]), tensor([2., 2.]))
    """

    _quick: bool = False  # whether `_run` may replace `forward`
    _has_own_keys: bool = False  # a subclass works out its keys: they are not a stored list
    _selected: list[NestedKey] | None = None
    _inner: str | None = None  # the child whose attributes it passes on ...
    _own_prefixes: str = "_"  # prefixes of names that are its own

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("in_keys", "out_keys"):
            keys = cls.__dict__.get(name)
            if isinstance(keys, (list, tuple, str)):  # the default of its instances
                setattr(cls, "_" + name, listed(keys, name))
                delattr(cls, name)
            elif keys is not None:
                cls._has_own_keys = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        for name in ("_in_keys", "_out_keys"):
            keys = getattr(cls, name, None)
            if keys is not None:  # lists of this instance, which may be changed
                self.__dict__[name] = list(keys)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get(self._inner)
            if inner is not None and not name.startswith(self._own_prefixes):
                return getattr(inner, name)
            if name not in ("_in_keys", "_out_keys"):
                raise
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name[1:]!r}: a keyed module must "
            f"declare what it reads and writes; set self.{name[1:]} = [...] after "
            "super().__init__(), or as an attribute of the class"
        )

    def _follow(self) -> None:
        """Bring the keys up to date; a sequence computes them from its modules."""

    def _read_in_keys(self) -> list[NestedKey]:
        """The keys that the module reads, in the order of its arguments; of a sequence, those that
        are read before a module writes them."""
        self._follow()
        return self._in_keys

    def _write_in_keys(self, keys: Keys) -> None:
        self._in_keys = listed(keys, "in_keys")

    def _read_out_keys(self) -> list[NestedKey]:
        """The keys that the module writes; after `select_out_keys`, only the selected ones."""
        self._follow()
        return self._out_keys if self._selected is None else self._selected

    def _write_out_keys(self, keys: Keys) -> None:
        self._out_keys = listed(keys, "out_keys")
        if self._selected is not None:  # keys may be set before super().__init__()
            self.reset_out_keys()

    # not as decorators: for type checkers, a class attribute may then take their place
    in_keys = assigned(_read_in_keys, _write_in_keys)
    out_keys = assigned(_read_out_keys, _write_out_keys)

    @property
    def out_keys_source(self) -> list[NestedKey]:
        """The keys that the module writes, whatever is selected."""
        self._follow()
        return self._out_keys

    @overload
    def __call__(self, tensordict: Container, /, *args: Any, **kwargs: Any) -> Container: ...
    @overload
    def __call__(self, tensor: Any = ..., /, *args: Any, **kwargs: Any) -> Any: ...

    def __call__(self, tensordict: Any = UNSET, /, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`, or the faster `_run` where no hook, mode or option needs more."""
        mine = self.__dict__
        if (
            tensordict.__class__ is not TensorDict
            or args
            or kwargs
            or not self._quick
            or SKIP.everywhere
            or SKIP.by_thread
            or "forward" in mine
            or mine["_forward_hooks"]
            or mine["_forward_pre_hooks"]
            or mine["_backward_hooks"]
            or mine["_backward_pre_hooks"]
            or self._compiled_call_impl is not None
            or _FORWARD_HOOKS
            or _FORWARD_PRE_HOOKS
            or _BACKWARD_HOOKS
            or _BACKWARD_PRE_HOOKS
        ):
            if "params" in kwargs or args and isinstance(args[-1], Node):
                self._become_functional()
            if tensordict is UNSET:
                return CALL(self, **kwargs)
            return CALL(self, tensordict, *args, **kwargs)
        return self._run(tensordict)

    def _become_functional(self) -> None:
        """Make this module functional if a submodule was made functional before being added."""
        if "forward" in self.__dict__ or torch.compiler.is_compiling():
            return
        if any(["_is_stateless" in module.__dict__ for module in self.modules()]):
            from raffia.nn.functional_modules import join_functional

            join_functional(self)

    def _run(self, tensordict: Any) -> Any:
        """The fast path of `forward(tensordict)` for a plain container, where `_quick` is true."""
        raise NotImplementedError

    @property
    def __name__(self) -> str:  # as functions have it, for functools.wraps and torch.vmap
        return type(self).__name__  # type: ignore[return-value] # of the class, not this property

    @staticmethod
    def is_tdmodule_compatible(module: Any) -> bool:
        """Whether a module can be part of a sequence: it has `in_keys` and `out_keys`.

        >>> from torch import nn
        >>> from raffia.nn import TensorDictModuleBase
        >>> TensorDictModuleBase.is_tdmodule_compatible(nn.Linear(3, 4))
        False
        """
        return hasattr(module, "in_keys") and hasattr(module, "out_keys")

    # -- selection

    def select_out_keys(self, *out_keys: NestedKey) -> Self:
        """Write only these outputs from now on; other outputs are left out of the container.

        A second selection is one of what the first left; `reset_out_keys` brings back all.
        Raises ValueError for a key that the module does not write.

        >>> from raffia.nn import TensorDictModule
        >>> halves = TensorDictModule(lambda x: x.chunk(2), in_keys=["x"], out_keys=["a", "b"])
        >>> halves.select_out_keys("b")(torch.arange(4))
        tensor([2, 3])
        """
        selected = self._selectable(out_keys)
        if not hasattr(self, "out_keys_source"):
            raise RuntimeError(
                f"{type(self).__name__} computes its out_keys, so none of them can be selected "
                "here: TensorDictSequential(module).select_out_keys(...) does it"
            )
        self.reset_out_keys()
        self._selected = selected
        self.register_forward_hook(OutKeySelection(dropped_keys(self)))
        return self

    def _selectable(self, out_keys: tuple[Any, ...]) -> list[NestedKey]:
        written = self.out_keys
        bundled = "Are you passing the keys in a list? Unpack it: select_out_keys(*keys)"
        for key in out_keys:
            if not isinstance(key, (str, tuple)):
                raise OutKeyNotFoundError(
                    f"a selected key must be a string or a tuple of strings, got {key!r}. {bundled}"
                )
        selected = [unravel_key(key) for key in out_keys]
        unknown = [key for key in selected if key not in written]
        if unknown:
            first = unknown[0]
            hint = (
                nearest(first, written)  # type: ignore[arg-type]
                if isinstance(first, str)
                else f". {bundled}" * all([part in written for part in first])
            )
            raise OutKeyNotFoundError(
                f"Can't select non existent key{'s' * (len(unknown) > 1)}: "
                f"{', '.join(map(repr, unknown))}. The module writes {written}{hint}"
            )
        return selected

    def reset_out_keys(self) -> Self:
        """Undo `select_out_keys`: write all outputs again.

        >>> from raffia.nn import TensorDictModule
        >>> halves = TensorDictModule(lambda x: x.chunk(2), in_keys=["x"], out_keys=["a", "b"])
        >>> halves.select_out_keys("b").reset_out_keys().out_keys
        ['a', 'b']
        """
        self._selected = None
        for number, hook in list(self._forward_hooks.items()):
            if isinstance(hook, OutKeySelection):
                del self._forward_hooks[number]
        return self

    # -- parameters

    @overload
    def reset_parameters_recursive(self, parameters: None = None) -> None: ...
    @overload
    def reset_parameters_recursive(self, parameters: Container) -> Container: ...

    def reset_parameters_recursive(self, parameters: Any = None) -> Node | None:
        """Reinitialise all layers by their `reset_parameters`.

        parameters: a tree of parameters for this module, without batch dimensions: these are drawn
            again and returned as leaves that require gradients, and the module keeps its own.
        Raises RuntimeError if they have batch dimensions.

        >>> from torch import nn
        >>> from raffia import from_module
        >>> from raffia.nn import TensorDictModule
        >>> module = TensorDictModule(nn.Linear(3, 4), in_keys=["x"], out_keys=["y"])
        >>> params = from_module(module).data.clone().zero_()
        >>> module.reset_parameters_recursive(params)["module", "weight"].any().item()
        True
        """
        if parameters is None:
            if not reset_layers(self):
                warnings.warn(
                    "reset_parameters_recursive was called without the parameters argument and did "
                    f"not find any parameters to reset in {type(self).__name__}",
                    stacklevel=2,
                )
            return None
        if parameters.batch_size:
            raise RuntimeError(
                "reset_parameters_recursive does not support batched parameters: got batch_size "
                f"{tuple(parameters.batch_size)}, where each leaf must have the shape that it has "
                "in the module; draw the members one by one, or use EnsembleModule"
            )
        leaves = parameters.apply(
            lambda leaf: leaf.detach().requires_grad_(leaf.is_floating_point())
        )
        with leaves.to_module(self):
            reset_layers(self)
        return leaves

    def __repr__(self) -> str:
        return shown(self, [f"{name}={child}" for name, child in self.named_children()])


class OutKeySelection:
    """The forward hook behind `select_out_keys`: takes the other outputs out of the container."""

    def __init__(self, dropped: list[NestedKey]) -> None:
        self.dropped = dropped

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        # a dispatched call gives tensors, and these are selected; a locked container may stay as is
        if self.dropped and isinstance(output, Node):
            output.exclude(*self.dropped, inplace=True)
            for key in self.dropped:
                _prune(output, key)
        return output


def dropped_keys(module: TensorDictModuleBase) -> list[NestedKey]:
    """The outputs that a selection leaves out; an output that is an input too stays."""
    used = [*module.out_keys, *module.in_keys, "_"]
    return [key for key in module.out_keys_source if key not in used]


def _prune(tensordict: Any, key: NestedKey) -> None:
    """Remove the containers on the path to a nested key that are empty."""
    while isinstance(key, tuple):
        key = key[:-1] if len(key) > 2 else key[0]
        level = tensordict.get(key, None)
        if isinstance(level, Node) and not is_non_tensor(level) and level.is_empty():
            tensordict.del_(key)


def listed(keys: Any, name: str) -> list[NestedKey]:
    """Keys as a list of nested keys without inner tuples; a string is one key."""
    if isinstance(keys, str):
        keys = [keys]
    try:
        if not isinstance(keys, Sequence):
            raise TypeError(f"{type(keys).__name__} is not a list")
        return [unravel_key(key) for key in keys]
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"{name} must be of type list, str or tuples of str: a list of nested keys such as "
            f"['obs', ('next', 'obs')], or one nested key; got {keys!r}"
        ) from error


def one_or_more(keys: Given) -> Given | list[Given]:
    """Wrap a tuple in a list, since a tuple given as keys is one nested key."""
    return [keys] if isinstance(keys, tuple) else keys


def reset_layers(module: nn.Module) -> bool:
    """Call `reset_parameters` of all layers below; returns whether any layer has it."""
    found = False
    for child in module.children():
        if hasattr(type(child), "reset_parameters") or "reset_parameters" in child.__dict__:
            reset: Any = child.reset_parameters  # its own: a keyed module passes on its module's
            reset()
            found = True
        found = reset_layers(child) or found
    return found


def shown(module: Any, lines: list[str]) -> str:
    """The repr of a keyed module: `lines`, then its keys."""
    lines = [*lines, f"in_keys={module.in_keys}", f"out_keys={module.out_keys}"]
    body = ",\n".join(lines).replace("\n", "\n    ")
    return f"{type(module).__name__}(\n    {body})"
