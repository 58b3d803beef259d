"""Fields of tensorclasses: their defaults, annotations and casts, and the arguments of a class."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raffia.tensordict.collection import TensorCollection, TensorDictBase
from raffia.tensordict.node import Node
from raffia.tensordict.tensordict import TensorDict

BY_NAME = inspect.Parameter.KEYWORD_ONLY
ARGUMENTS = ("batch_size", "device", "names")
TENSOR_KINDS = (Tensor, Node, types.NoneType)  # what fields may be with `tensor_only`
NUMBERS: dict[Any, tuple[type, ...]] = {  # annotation -> the values that fit it
    bool: (bool,),
    int: (bool, int),
    float: (bool, int, float),
}


class Required:
    """The marker of a field that has no default.

    >>> Required()
    <required>
    """

    def __repr__(self) -> str:
        return "<required>"


class Factory:
    """The default of a field that a factory makes for each instance.

    >>> Factory(list).make()
    []
    """

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __repr__(self) -> str:
        return "<factory>"


def own_annotations(cls: type) -> dict[str, Any]:
    """The annotations in the body of a class: objects, or strings where a name is not known yet.

    >>> class Point:
    ...     x: Tensor
    >>> own_annotations(Point), own_annotations(type("Pixel", (Point,), {}))
    ({'x': 'Tensor'}, {})
    """
    if sys.version_info >= (3, 14):  # they are evaluated when they are read
        from annotationlib import Format, get_annotations

        found = get_annotations(cls, format=Format.FORWARDREF)
        return {
            key: kind.__forward_arg__ if isinstance(kind, typing.ForwardRef) else kind
            for key, kind in found.items()
        }
    return dict(inspect.get_annotations(cls))


REQUIRED = Required()
Argument = tuple[dataclasses.Field[Any], Any]  # a field and its default


def attribute(name: str) -> property:
    """A property that reads and writes a field."""

    def read(self: Any) -> object:
        value = self._td._get_str(name)
        return value._unwrapped() if isinstance(value, Node) else value

    def write(self: Any, value: Any) -> None:
        self._set_str(name, value)

    def delete(self: Any) -> None:
        self._set_str(name, None)

    return property(read, write, delete)


def signature(positional: list[Argument], by_name: list[Argument]) -> inspect.Signature:
    """The arguments of a class; TypeError where a field without default comes after one with."""
    defaults = False
    parameters = []
    for fields, kind in (
        (positional, inspect.Parameter.POSITIONAL_OR_KEYWORD),
        (by_name, BY_NAME),
    ):
        for field, default in fields:
            if default is REQUIRED and defaults and fields is positional:
                raise TypeError(f"non-default argument {field.name!r} follows default argument")
            defaults = default is not REQUIRED
            shown = default if defaults else inspect.Parameter.empty
            parameters.append(
                inspect.Parameter(field.name, kind, default=shown, annotation=field.type)
            )
    taken = [parameter.name for parameter in parameters]
    for name in ("batch_size", "device", "names"):  # programs compare the list: `lock` isn't in it
        if name not in taken:
            parameters.append(inspect.Parameter(name, BY_NAME, default=None))
    return inspect.Signature(parameters)


def members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


BUILTIN = (bool, int, float, complex, str, list, tuple, set, frozenset, dict)


def is_class(annotation: Any) -> bool:
    return isinstance(annotation, type) and annotation is not Any and annotation is not object


def is_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and not isinstance(value, Node)


def cast(value: Any, kind: Any, name: str, size: torch.Size, device: Any) -> object:
    """The value as an instance of the class that its field is annotated with."""
    if value.__class__ is kind or (isinstance(value, kind) and kind not in BUILTIN):
        return value
    if hasattr(kind, "from_tensordict"):
        if is_dict(value):
            return kind.from_dict(value, batch_size=size, device=device)
        return kind.from_tensordict(value) if isinstance(value, TensorDictBase) else kind(value)
    if issubclass(kind, TensorCollection):
        return TensorDict(value, batch_size=size, device=device)
    if is_dict(value):
        return value
    try:
        if kind is Tensor:
            return torch.as_tensor(value, device=device)
        return np.asarray(value) if kind is np.ndarray else kind(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise type(error)(
            f"cannot cast the value of field {name!r} to {kind.__name__}: {error}"
        ) from error


def unbound(field: dataclasses.Field[Any]) -> Any:
    """A field for another dataclass."""
    return dataclasses.field(
        default=field.default,
        default_factory=field.default_factory,
        init=field.init,
        kw_only=bool(field.kw_only),
    )
