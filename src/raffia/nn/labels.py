"""Short texts for keys and modules: what errors, programs and drawings call them."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterable
from typing import Any

from torch import nn

from raffia.tensordict.keys import NestedKey, unravel_key_to_tuple

_LONGEST = 56  # characters of a label; what is longer is abridged in the middle
# These only carry keys; the wrapped module tells what is computed.
_CARRIERS = ("TensorDictModule", "TensorDictModuleBase", "WrapModule")


def key_text(key: NestedKey) -> str:
    """A key as it reads in a program: names joined by dots, quoted where that would be ambiguous.

    >>> key_text(("input", "x")), key_text("a.b"), key_text(("a", "b c"))
    ('input.x', "'a.b'", "('a', 'b c')")
    """
    parts = (key,) if isinstance(key, str) else key
    return ".".join(parts) if all([part.isidentifier() for part in parts]) else repr(key)


def keys_text(keys: Iterable[NestedKey]) -> str:
    return ", ".join([key_text(key) for key in keys])


def label(module: Any) -> str:
    """What a keyed module computes, in a few words: the layer, function or distribution it wraps.

    >>> from torch import nn
    >>> label(nn.Linear(4, 8))
    'Linear(4, 8)'
    >>> label(nn.Sequential(nn.Linear(4, 8), nn.Tanh()))
    'Sequential(Linear(4, 8), Tanh)'
    """
    if is_random(module):
        return _distribution_text(module)
    inner = _wrapped(module)
    if inner is None:
        return _module_text(module) if isinstance(module, nn.Module) else _callable_text(module)
    kind, method = type(module).__name__, module.__dict__.get("method")
    if isinstance(inner, (nn.ModuleList, nn.ModuleDict)):
        return _abridged(kind, [label(child) for child in inner._modules.values()])
    text = label(inner) + (f".{method}" if isinstance(method, str) else "")
    if "num_copies" in module.__dict__:  # of an ensemble
        text = f"{module.num_copies} x {text}"
    return text if kind in _CARRIERS else f"{kind}({text})"


def is_random(module: Any) -> bool:
    """Whether a keyed module draws its outputs from a distribution."""
    return getattr(module, "__dict__", {}).get("distribution_class") is not None


def keywords(module: Any) -> tuple[str, ...]:
    """The names of the arguments that a module's inputs go to; empty if the keys are enough."""
    own = getattr(module, "__dict__", {})
    if is_random(module):
        names = tuple(own.get("dist_keys", ()))
        return (
            () if names == tuple([unravel_key_to_tuple(k)[-1] for k in module.in_keys]) else names
        )
    return tuple(own.get("_keywords") or ())


def _distribution_text(module: Any) -> str:
    name = _callable_text(module.distribution_class)
    parts = getattr(module, "distribution_kwargs", {}).get("distribution_map", {})
    texts = [f"{key_text(key)}={_callable_text(part)}" for key, part in parts.items()]
    return _abridged(name, texts) if texts else name


def _wrapped(module: Any) -> Any:
    """What a keyed module stands for, or None: `Net` of `TensorDictModule(Net(), ...)`."""
    if not (isinstance(module, nn.Module) and hasattr(module, "in_keys")):
        return None
    own = module.__dict__ | module._modules  # not getattr, which a wrapper passes on
    for name in ("module", "td_module", "func"):
        if callable(own.get(name)):
            return own[name]
    return None


def _module_text(module: nn.Module) -> str:
    name = type(module).__name__
    if isinstance(module, nn.Sequential):
        return _abridged(name, [label(child) for child in module._modules.values()])
    sizes = [getattr(module, arg, None) for arg in _required(type(module))]
    plain = [repr(size) for size in sizes if isinstance(size, (int, float, str, tuple))]
    text = f"{name}({', '.join(plain)})"
    return text if plain and len(plain) == len(sizes) and len(text) <= _LONGEST else name


def _required(cls: type) -> tuple[str, ...]:
    """Names of the constructor's arguments that have no default: the sizes of a layer."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    return tuple(
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    )


def _abridged(name: str, parts: list[str]) -> str:
    text = f"{name}({', '.join(parts)})"
    if len(text) <= _LONGEST or len(parts) < 3:
        return text
    return f"{name}({parts[0]}, ..., {parts[-1]})"


def _callable_text(function: Any) -> str:
    if isinstance(function, functools.partial):
        return _callable_text(function.func)
    if isinstance(function, types.MethodType):
        return f"{type(function.__self__).__name__}.{function.__name__}"
    name = getattr(function, "__name__", None) or (
        function if isinstance(function, str) else type(function).__name__
    )
    return "lambda" if name == "<lambda>" else name
