"""Serialisation of containers with `torch.save` and pickle, and loading them with `torch.load`.

`torch.load` with its default, `weights_only=True`, calls only what is in torch's table of safe
functions. The functions of this file that stand there make containers, of values that were read
already, and do nothing else: no class is looked up by import, none is called. A tensorclass is
found by its name among those that the program has defined, and is not initialised again, so that no
`__post_init__` runs on values from a file. A memory-mapped tensor is read from its file, and is no
longer tied to it: what is written into it later changes no file.
"""

from __future__ import annotations

from typing import Any

import torch

from raffia.tensordict import consolidated, memmap, stored_values
from raffia.tensordict.node import REGISTRY, Node

KINDS: dict[str, Any] = {}  # the classes that a state restores, by name; pytrees.py fills it


class ClassName:
    """A placeholder for a tensorclass while `torch.load` reads weights only; it can't be called."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClassName) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


def reduced(td: Any) -> tuple[Any, ...] | None:
    """The pickled form of a container: its kind and its state; None for classes of others."""
    cls = type(td)
    if KINDS.get(cls.__name__) is not cls:
        return None
    return restored, (cls.__name__, td.__getstate__())


def reduced_class(td: Any) -> tuple[Any, ...]:
    """The pickled form of a tensorclass instance: its class, container and other attributes."""
    state = td.__getstate__()
    return restored_class, (type(td), state.pop("_td"), state)


def restored(kind: str, state: dict[str, Any]) -> Node:
    """A container of a kind that is known here, from its state."""
    cls = KINDS[kind]
    td = cls.__new__(cls)
    td.__setstate__(_checked(cls, state))
    return td


def restored_class(cls: Any, td: Any, state: dict[str, Any]) -> Node:
    """A tensorclass instance over a container; `cls` is the class, or the name it goes by."""
    if isinstance(cls, ClassName):
        cls = REGISTRY[cls.name]
    is_known = isinstance(cls, type) and hasattr(cls, "_check_keys")
    if not (is_known and isinstance(td, Node)):
        raise TypeError(
            f"this is not an instance of a tensorclass: {cls!r} over {type(td).__name__}"
        )
    cls._check_keys(td.keys())
    out = cls._over(td)
    out.__dict__.update(_checked(cls, state))
    return out


def _checked(cls: type, state: Any) -> dict[str, Any]:
    """A state that hides no method: attributes of an object come before those of its class."""
    for name in state:
        if callable(getattr(cls, name, None)):
            raise TypeError(f"the state of a {cls.__name__} would hide its method {name!r}")
    return dict(state)


def read_mapped(filename: str, dtype: torch.dtype, length: int, *view: Any) -> torch.Tensor:
    """The values of a memory-mapped tensor; its file is read, and never written."""
    memmap.check_length(filename, length * dtype.itemsize)
    whole = torch.empty(0, dtype=dtype)
    if length:
        whole = torch.from_file(filename, shared=False, size=length, dtype=dtype)
    return torch.as_strided(whole, *view)


def class_by_name(name: str) -> None:
    """Allow `torch.load` to make instances of the tensorclass with this qualified name."""
    torch.serialization.add_safe_globals([(ClassName(name), name)])  # type: ignore[list-item]


torch.serialization.add_safe_globals(
    [
        *(restored, restored_class, consolidated.from_buffer),
        (read_mapped, f"{memmap.__name__}.{memmap._reopen.__name__}"),
        (stored_values.left_alone, f"{stored_values.__name__}.{stored_values.reopened.__name__}"),
    ]
)
