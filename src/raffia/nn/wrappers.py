"""Keyed modules around other modules, made of functions, or from one tensorclass to another."""

from __future__ import annotations

import functools
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from raffia.nn.base import Keys, TensorDictModuleBase, listed, shown
from raffia.nn.dispatch import dispatch
from raffia.nn.module import TensorDictModule
from raffia.tensordict.keys import NestedKey
from raffia.tensordict.node import Node
from raffia.tensordict.tensorclass import is_tensorclass
from raffia.tensordict.tensordict import TensorDict


class TensorDictModuleWrapper(TensorDictModuleBase):
    """A keyed module around another one, whose attributes it passes on; the base of wrappers.

    >>> from torch import nn
    >>> from raffia.nn import TensorDictModule, TensorDictModuleWrapper
    >>> class Loud(TensorDictModuleWrapper):
    ...     def forward(self, *args, **kwargs):
    ...         print("now")
    ...         return super().forward(*args, **kwargs)
    >>> loud = Loud(TensorDictModule(nn.Linear(3, 4), in_keys=["x"], out_keys=["y"]))
    >>> loud(x=torch.zeros(3)).shape, loud.in_features
    now
    (torch.Size([4]), 3)
    """

    _inner, _own_prefixes = "td_module", "__"

    def __init__(self, td_module: nn.Module) -> None:
        super().__init__()
        self.td_module: Any = td_module

    @property
    def in_keys(self) -> list[NestedKey]:
        """The keys that the wrapped module reads, unless the wrapper sets its own."""
        own = self.__dict__.get("_in_keys")
        return self.td_module.in_keys if own is None else own

    @in_keys.setter
    def in_keys(self, keys: Any) -> None:
        self._in_keys = listed(keys, "in_keys")

    @property
    def out_keys(self) -> list[NestedKey]:
        """The keys that the wrapped module writes; after a selection, the selected ones."""
        return self.td_module.out_keys if self._selected is None else self._selected

    @out_keys.setter
    def out_keys(self, keys: Any) -> None:
        self.td_module.out_keys = keys

    @property
    def out_keys_source(self) -> list[NestedKey]:
        """The keys that the wrapped module writes, whatever is selected."""
        return self.td_module.out_keys_source

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""
        result = self.td_module(*args, **kwargs)
        if self._selected is None or isinstance(result, Node):
            return result
        keys = [key for key in self.td_module.out_keys if key != "_"]
        values = dict(zip(keys, (result,) if len(keys) == 1 else result, strict=True))
        selected = tuple([values[key] for key in keys if key in self._selected])
        return selected[0] if len(selected) == 1 else selected

    def __repr__(self) -> str:
        return shown(self, [f"td_module={self.td_module!r}"])


class WrapModule(TensorDictModuleBase):
    """A function from container to container as a keyed module.

    inplace: write what it returns into the container that came in, and return that one.
    in_keys, out_keys: the keys that it reads and writes; a sequence works out its own from these.

    >>> from raffia.nn import WrapModule
    >>> flat = WrapModule(lambda td: td.reshape(-1))
    >>> flat(TensorDict(a=torch.zeros(2, 3), batch_size=[2, 3])).shape
    torch.Size([6])
    """

    def __init__(
        self,
        func: Callable[[Any], Any],
        *,
        inplace: bool = False,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
    ) -> None:
        super().__init__()
        if not callable(func):
            raise TypeError(
                f"WrapModule takes a function from container to container, got {func!r}"
            )
        self.func = func
        self.inplace = inplace
        self.in_keys = [] if in_keys is None else in_keys
        self.out_keys = [] if out_keys is None else out_keys

    def forward(self, data: Any) -> Any:
        """Call the function."""
        result = self.func(data)
        if self.inplace and result is not data:
            return data.update(result)
        return result

    def __repr__(self) -> str:
        return shown(self, [f"func={self.func!r}"])


class as_tensordict_module:
    """Decorates a function or method of tensors so that it takes a container.

    >>> from raffia.nn import as_tensordict_module
    >>> @as_tensordict_module(in_keys=["x", "y"], out_keys=["sum"])
    ... def add(x, y):
    ...     return x + y
    >>> add(TensorDict(x=torch.ones(2), y=torch.ones(2)))["sum"]
    tensor([2., 2.])
    """

    def __init__(self, *, in_keys: Keys | Mapping[str, NestedKey], out_keys: Keys) -> None:
        self.in_keys, self.out_keys = in_keys, out_keys

    def __call__(self, func: Callable[..., Any]) -> _KeyedFunction:
        keyed = _KeyedFunction(func, self.in_keys, self.out_keys)
        functools.update_wrapper(keyed, func)
        return keyed


class _KeyedFunction:
    """The result of `as_tensordict_module`: a keyed module for a function or each bound method."""

    def __init__(self, func: Callable[..., Any], in_keys: Any, out_keys: Any) -> None:
        self.func, self.keys = func, (in_keys, out_keys)
        self.module = TensorDictModule(func, in_keys, out_keys)
        self.in_keys, self.out_keys = self.module.in_keys, self.module.out_keys

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any) -> Any:
        if instance is None:
            return self
        bound = functools.partial(self.func, instance)
        return TensorDictModule(bound, *self.keys)


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
        """Compute the output of the module."""

    def as_td_module(self) -> TensorClassModuleWrapper:
        """Wrap this module in one that takes and returns a container.

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
                f"are {shown_types}, but both must be tensorclasses: class "
                "Mine(TensorClassModuleBase[Input, Output])"
            )
        self.tc_module = module
        self.in_keys = _field_keys(types[0])
        self.out_keys = _field_keys(types[1])

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: Node) -> TensorDict:
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
                f"the input and output types of {cls.__name__} are {', '.join(map(repr, types))}; "
                "each must be a TensorClass or torch.Tensor"
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
