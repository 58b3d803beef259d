"""Modules that read entries of a container by key and write entries by key."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear
from torch.nn.functional import linear

from raffia.nn.base import (
    CALL,
    Keys,
    TensorDictModuleBase,
    any_global_hook,
    listed,
    one_or_more,
    shown,
)
from raffia.nn.dispatch import SKIP, as_entry, dispatch, may_skip, missing_inputs
from raffia.tensordict.access import dense_entries, value_of
from raffia.tensordict.functions import is_non_tensor
from raffia.tensordict.keys import MissingKeyError, NestedKey
from raffia.tensordict.node import Container, Node
from raffia.tensordict.tensorclass import is_tensorclass
from raffia.tensordict.tensordict import TensorDict

_OPTIONS = {  # attributes that decide which way a call goes
    "_keywords",
    "_selected",
    "get_kwargs",
    "inplace",
    "method",
    "partial_tolerant",
    "strict",
}


class TensorDictModule(TensorDictModuleBase):
    """A module or function whose inputs and outputs are entries of a container.

    module: an `nn.Module` or any callable.
    in_keys: keys of its positional arguments, in order; or a dict {keyword: key}.
    out_keys: keys of its outputs, in order; `"_"` drops an output. An output that is a dict or a
        container with all these keys is picked by key.
    out_to_in_map: False reads a dict `in_keys` the other way round, as {key: keyword}.
    inplace: True writes into the container that came in; False (or None) into a new one without
        batch size; "empty" into an empty one of the same batch size.
    method: name of the method of `module` to call.
    method_kwargs: keywords for every call.
    strict: a missing input is a KeyError; otherwise None is passed for it.
    get_kwargs: keywords for reading the inputs, such as `as_nested_tensor=True`.
    Raises ValueError for malformed keys or a module that cannot be called.

    >>> from torch import nn
    >>> from raffia.nn import TensorDictModule
    >>> actor = TensorDictModule(nn.Linear(3, 4), in_keys=[("obs", "x")], out_keys=["action"])
    >>> td = TensorDict(obs=dict(x=torch.zeros(2, 3)), batch_size=[2])
    >>> actor(td)["action"].shape
    torch.Size([2, 4])
    >>> actor(obs_x=torch.zeros(2, 3)).shape  # tensors instead of a container
    torch.Size([2, 4])
    """

    _inner = "module"
    inplace: bool | str | None = True
    method: str | None = None
    strict: bool = False
    get_kwargs: Mapping[str, Any] = MappingProxyType({})
    _keywords: list[str] | None = None

    def __init__(
        self,
        module: Callable[..., Any],
        in_keys: Keys | Mapping[str, NestedKey],
        out_keys: Keys,
        *,
        out_to_in_map: bool | None = None,
        inplace: bool | str | None = True,
        method: str | None = None,
        method_kwargs: dict[str, Any] | None = None,
        strict: bool = False,
        get_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if inspect.isclass(module) or not callable(module) and method is None:
            raise ValueError(
                f"module {module!r} is not callable: give an nn.Module (an instance, not a class) "
                "or a function; to call one of its methods, name it: method=..."
            )
        if inplace != "empty" and not any([inplace is value for value in (None, True, False)]):
            raise ValueError(f"inplace={inplace!r} must be one of True, False, 'empty'")
        if isinstance(in_keys, Mapping):
            first: list[Any] = list(in_keys)
            second: list[Any] = list(in_keys.values())
            self._keywords, in_keys = (second, first) if out_to_in_map is False else (first, second)
            _check_keywords(self._keywords)
        elif out_to_in_map is not None:
            warnings.warn(
                "out_to_in_map sets how a dict of in_keys is read, but in_keys is a list: leave "
                "out_to_in_map out",
                stacklevel=2,
            )
        self._in_keys = listed(one_or_more(in_keys), "in_keys")
        self._out_keys = listed(one_or_more(out_keys), "out_keys")
        if "_" in self._in_keys:
            warnings.warn(
                'key "_" is for ignoring output, it should not be used in input keys', stacklevel=2
            )
        self.module = module
        self.method = method
        self.method_kwargs = dict(method_kwargs or {})
        self.strict = strict
        self.get_kwargs = dict(get_kwargs or {})
        self.inplace = inplace

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _OPTIONS:
            self._plan()

    def _plan(self) -> None:
        """Work out whether `_run` may stand for `forward`; called when an option changes."""
        self._quick = (
            self.inplace is True
            and self._keywords is None
            and self.method is None
            and not self.strict
            and not self.get_kwargs
            and not self._has_own_keys
        )

    def _run(self, tensordict: Any) -> Any:
        mine = self.__dict__
        if self.__class__.forward is not _FORWARD or mine["method_kwargs"]:
            return CALL(self, tensordict)
        entries = dense_entries(tensordict)
        values = []
        for key in mine["_in_keys"]:
            value = entries.get(key)  # a nested key is not found here
            if value.__class__ is not Tensor:
                if value is None and (value := tensordict.get(key)) is None:
                    return self._general(tensordict, None, {})
                value = value_of(value)
            values.append(value)
        try:
            module = mine["_modules"].get("module")
            if module is None:
                output = self.module(*values)
            elif (
                module.__class__.__call__ is not CALL
                or module._forward_hooks
                or module._forward_pre_hooks
                or module._backward_hooks
                or module._backward_pre_hooks
                or module._compiled_call_impl is not None
            ):
                output = module(*values)
            elif module.__class__ is Linear and len(values) == 1:
                output = _linear(module, values[0])
            else:
                output = module.forward(*values)
            keys = mine["_out_keys"]
            if output.__class__ is not Tensor or len(keys) != 1 or keys[0] == "_":
                self._write(tensordict, output)
            else:
                tensordict.set(keys[0], output)
        except Exception as error:
            self._explain(error, tensordict)
            raise
        return tensordict

    @dispatch(auto_batch_size=False)
    def forward(
        self,
        tensordict: Container,
        *args: Any,
        tensordict_out: Container | None = None,
        **kwargs: Any,
    ) -> Container:
        """Read inputs, call the module, write its outputs; also callable with tensors, see
        `dispatch`.

        tensordict_out: container to write into instead.
        Other keywords go to the module.
        """
        if args:
            raise ValueError(
                f"Got {len(args)} arguments beyond the container; {self._title()} takes "
                "module(tensordict) or one tensor for each of its "
                f"in_keys={self.in_keys}; what else the module needs is given by keyword"
            )
        mode = SKIP.get()
        if mode and may_skip(tensordict, self.in_keys, self.out_keys, mode):
            return tensordict
        if (
            tensordict.__class__ is TensorDict
            and self._quick
            and tensordict_out is None
            and not (kwargs or self.method_kwargs)
            and self.__class__.forward is _FORWARD
            and not any_global_hook()
        ):
            return self._run(tensordict)
        return self._general(tensordict, tensordict_out, kwargs)

    def _general(self, tensordict: Any, tensordict_out: Any, kwargs: dict[str, Any]) -> Any:
        """Run the module like `_run`, but with all options and kinds of container."""
        try:
            if tensordict_out is None:
                tensordict_out = result_container(tensordict, self.inplace)
            self._write(tensordict_out, self._outputs(tensordict, kwargs))
        except Exception as error:
            self._explain(error, tensordict)
            raise
        return tensordict_out

    def _outputs(self, tensordict: Any, kwargs: dict[str, Any]) -> Any:
        """The outputs of the wrapped module for the entries at `in_keys`."""
        values = [self._read(tensordict, key) for key in self.in_keys]
        call = self.module if self.method is None else getattr(self.module, self.method)
        if self.method_kwargs:
            kwargs = {**kwargs, **self.method_kwargs}
        try:
            if self._keywords is None:
                return call(*values, **kwargs)
            return call(**dict(zip(self._keywords, values, strict=True)), **kwargs)
        except Exception as error:
            missing = [
                key for key, value in zip(self.in_keys, values, strict=True) if value is None
            ]
            if missing and "None" in str(error):
                raise MissingKeyError(missing_inputs(self._title(), missing, tensordict)) from error
            raise

    def _read(self, tensordict: Any, key: NestedKey) -> Any:
        if self.strict and key not in tensordict:
            return tensordict[key]  # the error names what is missing
        return value_of(tensordict.get(key, None, **self.get_kwargs))

    def _write(self, tensordict: Any, output: Any) -> None:
        """Store the module's results under the keys of its outputs."""
        out_keys = self._out_keys
        outputs = spread(output, out_keys)
        if len(outputs) != len(out_keys):
            many = len(outputs) > len(out_keys)
            what = "tensors than out_keys" if many else "out_keys than tensors"
            hint = ". Name all outputs; those named '_' are dropped" if many else ""
            if isinstance(output, list):
                hint = ". A list is one output; return a tuple to give several"
            raise RuntimeError(
                f"There are more {what}: {self._title()} gave {len(outputs)} for out_keys="
                f"{out_keys}{hint}"
            )
        for key, value in zip(out_keys, outputs, strict=True):
            if key != "_":
                tensordict.set(key, as_entry(value))

    @property
    def device(self) -> torch.device:
        """The device of the first parameter, or the CPU; deprecated, parameters may be on several.

        A module's own attribute of that name goes first.
        """
        own = getattr(self.module, "device", None)
        if own is not None:
            return own
        warnings.warn(
            "TensorDictModule.device is deprecated: read the devices of the parameters instead",
            DeprecationWarning,
            stacklevel=2,
        )
        return next((parameter.device for parameter in self.parameters()), torch.device("cpu"))

    def _title(self) -> str:
        module = self.module
        name = getattr(module, "__qualname__", None) or type(module).__name__
        return f"{type(self).__name__}({name if self.method is None else f'{name}.{self.method}'})"

    def _explain(self, error: Exception, tensordict: Any) -> None:
        """Add a note to an error: which module failed, and its inputs."""
        inputs = ", ".join(_described(tensordict, key) for key in self.in_keys)
        error.add_note(
            f"in {self._title()}, in_keys={self.in_keys}, out_keys={self._out_keys}, "
            f"which got {inputs or 'nothing'}"
        )

    def __repr__(self) -> str:
        return shown(self, [f"module={self.module!r}"])


_FORWARD = TensorDictModule.forward
_LINEAR_FORWARD = Linear.forward


def _linear(module: Linear, x: Any) -> Tensor:
    """`module.forward(x)` without two searches of attributes, a fifth of the time of a small layer.

    A layer whose forward or weights are replaced is called as it is.
    """
    mine = module.__dict__
    weights: Any = mine["_parameters"]
    if (
        Linear.forward is not _LINEAR_FORWARD
        or "forward" in mine
        or "weight" not in weights
        or "bias" not in weights
    ):
        return module.forward(x)
    weight, bias = weights["weight"], weights["bias"]
    if weight is None or bias is None and "bias" in mine:  # `to_module` made them attributes
        return module.forward(x)
    return linear(x, weight, bias)


def _check_keywords(names: list[str]) -> None:
    for name in names:
        if not isinstance(name, str):
            raise ValueError(
                f"in_keys as a dict maps keywords of the module to keys, but {name!r} is not a "
                "keyword: pass for example {'x': ('obs', 'x')}; with out_to_in_map=False the dict "
                "maps keys to keywords"
            )


def result_container(tensordict: Any, inplace: bool | str | None) -> Any:
    """The container that outputs go to."""
    if inplace is True:
        return tensordict
    return tensordict.empty() if inplace == "empty" else TensorDict()


def spread(output: Any, out_keys: list[NestedKey]) -> Sequence[Any]:
    """The outputs of a module, one for each key."""
    if isinstance(output, tuple):
        return output
    if output is None:
        return ()
    if isinstance(output, Mapping):
        there: Any = output
    elif isinstance(output, Node) and not is_non_tensor(output) and not is_tensorclass(output):
        there = output.keys(True)
    else:
        return (output,)
    if all([key in there or key == "_" for key in out_keys]):
        return [None if key == "_" else output[key] for key in out_keys]
    return (output,)


def _described(tensordict: Any, key: NestedKey) -> str:
    """An entry's shape and dtype, for an error."""
    value = tensordict.get(key, None)
    if isinstance(value, Tensor):
        return f"{key!r}: {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return f"{key!r}: {'nothing' if value is None else type(value).__name__}"
