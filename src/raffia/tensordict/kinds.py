"""The kinds of containers, for the files that these are built on.

Methods of a container make containers of other kinds: to store a word takes a `NonTensorData`, to
stack what is unlike a `LazyStackedTensorDict`. The files of the kinds import those of the methods;
a method finds a kind here, by its name, where the file that defines it has entered it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from raffia.tensordict.lazy import LazyStackedTensorDict as LazyStackedTensorDict
    from raffia.tensordict.lazy import lazy_stack as lazy_stack
    from raffia.tensordict.nontensor import MetaData as MetaData
    from raffia.tensordict.nontensor import NonTensorData as NonTensorData
    from raffia.tensordict.nontensor import NonTensorStack as NonTensorStack
    from raffia.tensordict.nontensor import shaped as shaped
    from raffia.tensordict.params import TensorDictParams as TensorDictParams
    from raffia.tensordict.pytrees import register_subclass as register_subclass
    from raffia.tensordict.stack import maybe_dense_stack as maybe_dense_stack
    from raffia.tensordict.stack import stack as stack
    from raffia.tensordict.tensorclass import TensorClass as TensorClass
    from raffia.tensordict.tensorclass import from_dataclass as from_dataclass
    from raffia.tensordict.tensordict import TensorDict as TensorDict

Kind = TypeVar("Kind")  # a class of containers, or a function that makes one


def enter(kind: Kind) -> Kind:
    """Let the files below find a class or function by its name; a decorator."""
    globals()[kind.__name__] = kind  # type: ignore[attr-defined]
    return kind
