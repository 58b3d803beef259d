"""Modules from one tensorclass to another, which a type checker can follow."""

from __future__ import annotations

import typing
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from raffia.nn.base import TensorDictModuleBase, shown
from raffia.nn.dispatch import dispatch
from raffia.tensordict.keys import NestedKey
from raffia.tensordict.tensorclass import is_tensorclass

Input = TypeVar("Input")
Output = TypeVar("Output")


class TensorClassModuleBase(nn.Module, Generic[Input, Output], ABC):
    """The base of modules that take one tensorclass (or tensor) and return another.

    A subclass names both types, `TensorClassModuleBase[Input, Output]`, and writes `forward`; the
    types are then its `input_type` and `output_type`.

    >>> from raffia import TensorClass
    >>> from raffia.nn import TensorClassModuleBase
    >>> class Pair(TensorClass):
    ...     a: torch.Tensor
    ...     b: torch.Tensor
    >>> class Total(TensorClass):
    ...     total: torch.Tensor
    >>> class Add(TensorClassModuleBase[Pair, Total]):
    ...     def forward(self, x):
    ...         return Total(total=x.a + x.b, batch_size=x.batch_size)
    >>> Add()(Pair(a=torch.ones(2), b=torch.ones(2), batch_size=[2])).total
    tensor([2., 2.])
    """

    input_type: Any
    output_type: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__dict__.get("__orig_bases__", ()):
            types = typing.get_args(base)
            if typing.get_origin(base) is TensorClassModuleBase and not any(
                [isinstance(t, TypeVar) for t in types]
            ):
                _check_types(cls, types)
                cls.input_type, cls.output_type = types

    @abstractmethod
    def forward(self, x: Input) -> Output:
        """What the module computes."""

    def as_td_module(self) -> TensorClassModuleWrapper:
        """This module as one that takes and returns a container.

        Raises ValueError unless both types are tensorclasses.
        """
        return TensorClassModuleWrapper(self)


class TensorClassModuleWrapper(TensorDictModuleBase):
    """A module between tensorclasses as a keyed module; its keys are their fields.

    It returns a new container of the output fields; fields that are tensorclasses have nested keys.

    >>> from raffia import TensorClass
    >>> from raffia.nn import TensorClassModuleBase
    >>> class Point(TensorClass):
    ...     x: torch.Tensor
    >>> class Double(TensorClassModuleBase[Point, Point]):
    ...     def forward(self, point):
    ...         return Point(x=2 * point.x, batch_size=point.batch_size)
    >>> double = Double().as_td_module()
    >>> double.in_keys, double(TensorDict(x=torch.ones(2)))["x"]
    (['x'], tensor([2., 2.]))
    """

    def __init__(self, module: TensorClassModuleBase[Any, Any]) -> None:
        super().__init__()
        types = [getattr(module, name, None) for name in ("input_type", "output_type")]
        if not all([t is not None and is_tensorclass(t) for t in types]):
            shown_types = ", ".join([getattr(t, "__name__", repr(t)) for t in types])
            raise ValueError(
                f"{type(module).__name__} can't become a keyed module: its input and output types "
                f"are {shown_types}, and both must be tensorclasses: "
                "class Mine(TensorClassModuleBase[Input, Output])"
            )
        self.tc_module = module
        self.in_keys = _field_keys(types[0])
        self.out_keys = _field_keys(types[1])

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: Any) -> Any:
        """Call the module on the fields of its input type."""
        known = [key for key in self.in_keys if key in tensordict]  # optional fields may be absent
        inputs = self.tc_module.input_type.from_tensordict(tensordict.select(*known))
        return self.tc_module(inputs).to_tensordict()

    def __repr__(self) -> str:
        return shown(self, [f"tc_module={self.tc_module!r}"])


def _check_types(cls: type, types: tuple[Any, ...]) -> None:
    for t in types:
        if not (t is Tensor or isinstance(t, type) and is_tensorclass(t)):
            raise TypeError(
                f"{cls.__name__} is between {', '.join(map(repr, types))}; each must be a "
                "TensorClass or torch.Tensor"
            )


def _field_keys(cls: Any) -> list[NestedKey]:
    """The keys of a tensorclass's fields, down through fields that are tensorclasses."""
    keys: list[NestedKey] = []
    for name in cls._fields:
        below = cls._types.get(name)
        if isinstance(below, type) and is_tensorclass(below):
            keys += [(name, *([k] if isinstance(k, str) else k)) for k in _field_keys(below)]
        else:
            keys.append(name)
    return keys
