"""Values of a map: batches of them as rows, and defaults where a map has none."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from raffia.data.map_contract import UnknownRowError
from raffia.tensordict.functions import is_tensor_collection
from raffia.tensordict.keys import dotted
from raffia.tensordict.node import Container


def rows_of(value: Any, batch: torch.Size) -> Any:
    """A value to be written, as a container [N]."""
    if not is_tensor_collection(value):
        raise TypeError(
            f"a value is a container, got a {type(value).__name__}: "
            "TensorDict({'value': x}, batch_size=query.batch_size)"
        )
    if value.batch_size[: len(batch)] != batch:
        raise ValueError(
            f"the value has batch_size {list(value.batch_size)} and the query {list(batch)}: "
            "one value is needed for each row of the query"
        )
    return flat(value, batch)


def filled(storage: Any, count: int, default: Any) -> Any:
    """`count` rows of the entries that are stored, filled with a number."""
    if storage.structure is None:
        raise UnknownRowError(
            "the map is empty and does not know its entries yet, so it cannot fill them with "
            f"{default!r}: pass a default such as TensorDict({{'value': ...}}), or make the "
            "map with TensorDictMap.from_tensordict_pair(source, dest, in_keys)"
        )
    values = storage.empty(count)
    for key, x in values.items(True, True):
        if not _can_hold(x.dtype, default):
            raise ValueError(
                f'default={default!r} is no {x.dtype}, as entry "{dotted(key)}" is: pass a '
                "number that it can hold, or a container with a value for each entry"
            )
        x.fill_(default)
    return values


def as_number(default: Any) -> int | float | complex:
    """The number that a default for unknown rows is."""
    if isinstance(default, Tensor) and not default.dim():
        default = default.item()
    if not isinstance(default, (bool, int, float, complex)):
        raise TypeError(
            f"default is a number for all entries, or a container with a value for each, got "
            f"a {type(default).__name__}: get(query, 0.0), get(query, TensorDict(...))"
        )
    return default


def _can_hold(dtype: torch.dtype, number: complex) -> bool:
    """Whether a number keeps its value in this dtype, but for the rounding of floating point."""
    if dtype.is_complex:
        return True
    if isinstance(number, complex):
        return False
    if dtype.is_floating_point:
        return True
    if not math.isfinite(number) or number != int(number):
        return False
    if dtype == torch.bool:
        return number in (0, 1)
    return torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max


def flat(td: Container, batch: torch.Size) -> Container:
    """Values [*batch, ...] as a container [N, ...]."""
    if len(batch) == 1:
        return td
    return td.reshape(batch.numel(), *td.batch_size[len(batch) :])


def shaped(td: Container, batch: torch.Size) -> Container:
    """Values [N, ...] as a container [*batch, ...]."""
    return td.reshape(*batch, *td.batch_size[1:])
