"""Nested lists of JSON as tensors: the shape is found first, and an error names the one bad value.

Nothing here loops over values in Python unless one of them is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from math import prod
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from raffia.data.readers.episode import (
    MAX_DEPTH,
    REWARD,
    Column,
    Key,
    Layout,
    Location,
    leave_out,
    shown,
)
from raffia.data.readers.json_text import kind
from raffia.tensordict.keys import NestedKey, dotted, unravel_key_to_tuple

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = {
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.uint16: np.uint16,
    torch.int16: np.int16,
    torch.uint32: np.uint32,
    torch.int32: np.int32,
    torch.uint64: np.uint64,
    torch.int64: np.int64,
}


class JsonRows(NamedTuple):
    """The values of a column as JSON gives them."""

    path: Key  # path in the file
    values: list[Any]  # one for each step


class Flat(NamedTuple):
    """The values of a column flattened, with their known shape."""

    name: Key  # name of the entry
    path: Key  # path in the file
    values: list[Any]
    shape: list[int]
    types: set[type]  # types of the values: bool alone, or int and float, or nothing

    def step(self, at: int) -> int:
        """The row of the value at an index."""
        return at // prod(self.shape[1:])


class Numbers(NamedTuple):
    """The dtypes that the columns get.

    dtypes: name -> dtype, as the caller gives them.
    float_dtype: of other numbers, unless all of a column are whole.
    """

    dtypes: dict[Key, torch.dtype]
    float_dtype: torch.dtype

    @classmethod
    def checked(cls, dtypes: Mapping[NestedKey, torch.dtype], float_dtype: torch.dtype) -> Numbers:
        if float_dtype not in FLOATS:
            raise TypeError(f"float_dtype={float_dtype} is none of {list(FLOATS)}")
        found = {unravel_key_to_tuple(key): dtype for key, dtype in dtypes.items()}
        for key, dtype in found.items():
            if dtype not in FLOATS and dtype not in INTEGERS and dtype is not torch.bool:
                raise TypeError(f"dtypes={{{shown(key)}: {dtype}}}: JSON has no such numbers")
        return cls(found, float_dtype)

    def dtype(self, key: Key, types: set[type], first: Layout | None) -> torch.dtype:
        """The dtype of a column; `types` are those of its values and of the column it is the `next`
        of."""
        given = self.dtypes.get(key)
        if given is None and key[0] == "next":
            given = self.dtypes.get(key[1:])
        if given is not None:
            return given
        if first is not None and key in first:
            return first[key][0]
        if key == REWARD:
            return self.float_dtype
        if types == {bool}:
            return torch.bool
        return torch.int64 if types == {int} else self.float_dtype


def to_columns(
    rows: Mapping[Key, JsonRows], location: Location, numbers: Numbers, first: Layout | None
) -> dict[Key, Column]:
    """The columns of an episode as tensors.

    first: the layout of the file's first episode, whose dtypes hold for the others.

    >>> rows = {("obs",): JsonRows(("state",), [[1, 2], [3, 0.5]])}
    >>> to_columns(rows, Location("a.jsonl", "line 1"), Numbers({}, torch.float32), None)["obs",]
    Column(name='state', values=tensor([[1.0000, 2.0000],
            [3.0000, 0.5000]]))
    """
    for key in numbers.dtypes:
        if key not in rows:
            location.fail(f"there is no {shown(key)}, which `dtypes` names")
    flats = {key: flat(key, *row, location) for key, row in rows.items()}
    columns = {}
    for key, found in flats.items():
        # An observation of whole numbers may lead to one that is not.
        pair = flats.get(key[1:] if key[0] == "next" else ("next", *key), found)
        dtype = numbers.dtype(key, found.types | pair.types, first)
        columns[key] = Column(dotted(found.path), to_tensor(found, dtype, location))
    return columns


def flat(name: Key, path: Key, rows: list[Any], location: Location) -> Flat:
    """Nested lists flattened, when all of a level have the same length."""
    values, shape = rows, [len(rows)]
    while True:
        types = set(map(type, values))
        if types != {list}:
            break
        lengths = set(map(len, values))
        if len(lengths) > 1:
            at = next(i for i, value in enumerate(values) if len(value) != len(values[0]))
            location.fail(
                f"a list of {len(values[at])} where those before it have {len(values[0])}",
                dotted(path),
                at // prod(shape[1:]),
            )
        if len(shape) == MAX_DEPTH:
            location.fail(f"lists are nested more than {MAX_DEPTH} deep", dotted(path))
        shape += lengths
        values = list(chain.from_iterable(values))
    found = Flat(name, path, values, shape, types)
    if types != {bool} and not types <= {int, float}:
        check_equal_layout(found, location)
    return found


def check_equal_layout(found: Flat, location: Location) -> None:
    """Raise an error that names the value of another shape, or that is no number."""
    wanted = kind(found.values[0])
    for at, value in enumerate(found.values):
        if kind(value) != wanted:
            why = f"{kind(value)} where those before it are {wanted}"
            location.fail(why, dotted(found.path), found.step(at))
    why = f"{wanted} can't be in a tensor; {leave_out(found.path)}"
    location.fail(why, dotted(found.path), 0)


def to_tensor(found: Flat, dtype: torch.dtype, location: Location) -> Tensor:
    if found.values and (found.types == {bool}) != (dtype is torch.bool):
        here = kind(found.values[0])
        location.fail(f"{here}, and the column is {dtype}", dotted(found.path), 0)
    if dtype is torch.bool:
        return torch.from_numpy(np.array(found.values, np.bool_).reshape(found.shape))
    if dtype in INTEGERS:
        return whole(found, dtype, location)
    return real(found, dtype, location)


def whole(found: Flat, dtype: torch.dtype, location: Location) -> Tensor:
    """A tensor of integers."""
    if float in found.types:
        at = next(i for i, value in enumerate(found.values) if type(value) is float)
        location.fail(
            f"{found.values[at]} is written as a fraction, and the column is {dtype}, since the "
            "first episode has whole numbers only or `dtypes` sets it; to read it: "
            f"dtypes={{{shown(found.name)}: torch.float32}}",
            dotted(found.path),
            found.step(at),
        )
    try:
        array = np.array(found.values, INTEGERS[dtype])
    except OverflowError:
        info = torch.iinfo(dtype)
        at = next(i for i, n in enumerate(found.values) if not info.min <= n <= info.max)
        refuse_size(found, at, dtype, location)
    return torch.from_numpy(array.reshape(found.shape))


def real(found: Flat, dtype: torch.dtype, location: Location) -> Tensor:
    """A tensor of floating-point numbers."""
    try:
        exact = torch.from_numpy(np.array(found.values, np.float64))
    except OverflowError:
        at = next(i for i, n in enumerate(found.values) if abs(n) > torch.finfo(dtype).max)
        refuse_size(found, at, dtype, location)
    rounded = exact.to(dtype)
    lost = rounded.isinf() & exact.isfinite()
    if lost.any():
        refuse_size(found, int(lost.nonzero()[0]), dtype, location)
    return rounded.reshape(found.shape)


def refuse_size(found: Flat, at: int, dtype: torch.dtype, location: Location) -> NoReturn:
    number = str(found.values[at])
    number = number if len(number) <= 30 else f"{number[:27]}..."
    location.fail(f"{number} does not fit {dtype}", dotted(found.path), found.step(at))
