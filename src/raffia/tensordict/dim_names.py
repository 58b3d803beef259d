"""Names of the batch dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any

from torch import Tensor

from raffia.tensordict.node import Container, Names, Node


def get_names(td: Any) -> list[str | None]:
    """Names of the batch dimensions; None where a dimension has none. Assign to change them.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[2, 3], names=["time", None]).names
    ['time', None]
    """
    return [None] * len(td._batch_size) if td._names is None else list(td._names)


def set_names(td: Any, value: Sequence[str | None] | None) -> None:
    store(td, checked(td, value))


def checked(td: Any, value: Sequence[str | None] | None) -> Names:
    """A list of names, one for each batch dimension of `td`; None if all of them are None."""
    if value is None:
        return None
    if isinstance(value, str) or len(value) != len(td._batch_size):
        raise ValueError(
            f"the batch size {tuple(td._batch_size)} needs {len(td._batch_size)} names, "
            f"got {value!r}; None stands for no name"
        )
    names = list(value)
    known = [name for name in names if name is not None]
    if len(known) != len(dict.fromkeys(known)):
        raise ValueError(f"each name can stand for one dimension only, got {names}")
    return names if known else None


def given(names: list[str | None]) -> Names:
    """The names; None if no dimension has one."""
    return names if any(names) else None


def store(td: Any, value: Names) -> None:
    td._set_names(value)
    for child in td._named_children():
        if isinstance(child, Tensor):  # its dimensions are not those of the batch
            continue
        extra = child.names[len(td._batch_size) :]
        merged = (value or [None] * len(td._batch_size)) + extra
        store(child, given(merged))


def passed_on(td: Container) -> Container:
    """The container itself, after its nested containers were given the names of its dimensions."""
    if td._names is not None:
        store(td, td._names)
    return td


def adopt(value: Container, names: list[str | None]) -> Container:
    """A nested container whose first dimensions have `names`; a copy if it had others."""
    if isinstance(value, Tensor):
        return value
    mine = value.names
    wanted = list(names) + mine[len(names) :]
    if mine == wanted:
        return value
    value = value.copy()
    store(value, wanted)
    return value


def take(td: Any, names: Names) -> None:
    """Name the dimensions of a dense container.

    Nested containers with other names are replaced by copies: another container may hold them.
    """
    td._set_names(names)
    if names is not None:
        for key, child in td._d.items():
            if isinstance(child, Node):
                td._d[key] = adopt(child, names)


def agreed(td: Any, value: Container) -> Container:
    """A nested container to store in `td`, which takes its names if it has none itself."""
    if td._names is not None:
        return adopt(value, td._names)
    if value.__class__ is td._plain and value._names is None or isinstance(value, Tensor):
        return value
    names = value.names[: len(td._batch_size)]
    if any(name is not None for name in names):
        take(td, names)
    return value


def refine_names(td: Container, *names: str | EllipsisType | None) -> Container:
    """Name dimensions that have no name, and return the container; `...` skips dimensions.

    Raises RuntimeError for a dimension that has another name.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[2, 3, 4]).refine_names(..., "time").names
    [None, None, 'time']
    """
    mine = get_names(td)
    wanted: list[Any] = list(names)
    if Ellipsis in wanted:
        at = wanted.index(Ellipsis)
        rest = wanted[at + 1 :]
        if Ellipsis in rest:
            raise RuntimeError("refine_names: '...' can be used only once")
        wanted = wanted[:at] + mine[at : len(mine) - len(rest)] + rest
    if len(wanted) != len(mine):
        raise ValueError(
            f"refine_names: {len(mine)} dimensions need {len(mine)} names, got {list(names)}"
        )
    for old, new in zip(mine, wanted, strict=True):
        if old is not None and new != old:
            raise RuntimeError(
                f"refine_names: cannot coerce the name {old!r} of {mine} to {new!r}; "
                f"td.rename({old}={new!r}) changes it"
            )
    set_names(td, wanted)
    return td


def rename_(td: Container, *names: str | None, **rename_map: str) -> Container:
    """Give the dimensions new names, all by position or some by `old=new`.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[2, 3], names=["a", "b"]).rename_(a="time").names
    ['time', 'b']
    """
    if names and rename_map:
        raise ValueError("rename takes all names by position or some as old=new, not both")
    if not names and not rename_map:
        raise ValueError("rename needs names: all by position or some as old=new")
    if names:
        wanted = [None] * len(td._batch_size) if names == (None,) else list(names)
    else:
        mine = get_names(td)
        for old in rename_map:
            if old not in mine:
                raise ValueError(f"rename: there is no dimension {old!r}; the names are {mine}")
        wanted = [rename_map.get(name, name) if name is not None else None for name in mine]
    set_names(td, wanted)
    return td


def rename(td: Container, *names: str | None, **rename_map: str) -> Container:
    """A copy (same tensors) whose dimensions have new names; see `rename_`.

    >>> from raffia import TensorDict
    >>> TensorDict(batch_size=[2, 3]).rename("a", "b").names
    ['a', 'b']
    """
    return rename_(td.copy(), *names, **rename_map)
