"""The kinds of containers, for the files that these are built on.

Methods of a container make containers of other kinds: to store a word takes a `NonTensorData`, to
stack different containers a `LazyStackedTensorDict`. The files of the kinds import those of the
methods; a method finds a kind here, by its name, where the file that defines it has entered it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

TensorDict: Any
LazyStackedTensorDict: Any
SubTensorDict: Any
TensorDictParams: Any
TensorClass: Any
NonTensorData: Any
NonTensorStack: Any
MetaData: Any
stack: Callable[..., Any]
maybe_dense_stack: Callable[..., Any]
lazy_stack: Callable[..., Any]
shaped: Callable[..., Any]
from_dataclass: Callable[..., Any]
register_subclass: Callable[[Any], None]

Kind = TypeVar("Kind")  # a class of containers, or a function that makes one


def enter(kind: Kind) -> Kind:
    """Register a container class or function by name, for the lower-level files; a decorator."""
    globals()[kind.__name__] = kind  # type: ignore[attr-defined]
    return kind
