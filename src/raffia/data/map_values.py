"""The values of a `TensorDictMap`: its contract, storages by entry, merging, and batches as rows.

Several values for one key are merged in one batched pass, never row by row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from raffia.data.row_index import CARRIERS, RowGroups
from raffia.hints import check_choice
from raffia.tensordict.collection import TensorCollection
from raffia.tensordict.functions import is_tensor_collection
from raffia.tensordict.keys import NestedKey, dotted, unravel_key
from raffia.tensordict.node import Container
from raffia.tensordict.tensordict import TensorDict

K = TypeVar("K")
V = TypeVar("V")


class UnknownRowError(KeyError, IndexError):
    """Rows that are not in the map were queried; the message names them.

    A KeyError, as of any dictionary, and an IndexError, as programs for TorchRL expect it.

    >>> from raffia.data.map import TensorDictMap
    >>> TensorDictMap(in_keys=["obs"])[TensorDict(obs=torch.zeros(2, 3), batch_size=[2])]
    Traceback (most recent call last):
    ...
    raffia.data.map_values.UnknownRowError: 2 of 2 rows are not in the map, ...
    """

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class TensorMap(ABC, Generic[K, V]):
    """The contract of a dictionary from batches of keys to batches of values.

    >>> from raffia.data.map import TensorDictMap
    >>> issubclass(TensorDictMap, TensorMap)
    True
    """

    @abstractmethod
    def clear(self) -> None:
        """Delete all rows from the map."""

    @abstractmethod
    def __getitem__(self, item: K) -> V:
        """The values of the rows of a key."""

    @abstractmethod
    def __setitem__(self, key: K, value: V) -> None:
        """Write a value for each row of a key."""

    @abstractmethod
    def __len__(self) -> int:
        """How many rows there are."""

    @abstractmethod
    def contains(self, item: K) -> Tensor:
        """Whether each row of a key is here: bool [*batch]."""

    def __contains__(self, item: K) -> bool:
        """Whether all rows of a key are here."""
        return bool(self.contains(item).all())


Merge = Callable[[Any, Tensor, int], Any]  # values [N], group [N], num_groups -> [num_groups]


def merged(values: TensorCollection, items: RowGroups, merge: str | Merge) -> TensorCollection:
    """One value for each group of items, in the order of the groups.

    values: container [N]
    merge: "last", "first", "sum", "mean" or "max", or a function of the values [N], the group of
        each (int64 [N], numbered in order of first appearance) and the number of groups, which
        gives a container [num_groups].
    Raises ValueError for another name, or where the function gives another number of rows.

    >>> from raffia.data.row_index import groups
    >>> from raffia.data.map_values import merged
    >>> items = groups(torch.tensor([7, 8, 7]))
    >>> merged(TensorDict(x=torch.tensor([1, 2, 3]), batch_size=[3]), items, "sum")["x"]
    tensor([4, 2])
    """
    count = len(items.distinct)
    if callable(merge):
        result = merge(values.clone(), items.group, count)  # it may write into what it gets
        return _with_rows(result, count, "merge(values, group, num_groups)")
    named = "last", "first", *REDUCTIONS
    check_choice("merge", merge, named, ", or a function merge(values, group, num_groups)")
    for key, x in values.items(True, True):
        why = _refusal(merge, x)
        if why:
            raise ValueError(f'merge="{merge}" {why} (entry "{dotted(key)}", {x.dtype})')
    if items.first is items.last:  # all keys are distinct
        return values
    if merge in ("last", "first"):  # rows as they are, with the batch sizes of nested containers
        return values[items.last if merge == "last" else items.first]
    reduce, size = REDUCTIONS[merge], [count, *values.batch_size[1:]]
    return values.apply(lambda x: reduce(x, items), batch_size=size)


def _with_rows(result: Any, count: int, function: str) -> TensorCollection:
    """The output of a user's function, checked to be a container with a row for each key."""
    size = getattr(result, "batch_size", None)
    if size is None or tuple(size[:1]) != (count,):
        raise ValueError(
            f"{function} returned {'a ' + type(result).__name__ if size is None else list(size)} "
            f"for {count} keys: it must return a container whose batch_size begins with {count}"
        )
    return result


def _refusal(merge: str, x: Tensor) -> str:
    """The error text why entries like `x` are not merged so; the same whether there is anything to
    merge."""
    if merge == "sum" and x.dtype == torch.bool:
        return 'is not defined for bool; for "any of them" use merge="max"'
    if merge == "mean" and not (x.is_floating_point() or x.is_complex()):
        return "would round integers; store them as floating point"
    if merge in REDUCTIONS and x.dtype in CARRIERS:
        return "is not implemented in torch for such numbers; store them as int64 or float32"
    if merge == "max" and x.is_complex():
        return "is not defined for complex numbers, which have no order"
    return ""


# Reductions of an entry x [N, ...] to a row for each group [G, ...].


def _sum(x: Tensor, items: RowGroups) -> Tensor:
    return x.new_zeros(len(items.distinct), *x.shape[1:]).index_add_(0, items.group, x)


def _mean(x: Tensor, items: RowGroups) -> Tensor:
    total, number = _sum(x, items), torch.bincount(items.group, minlength=len(items.distinct))
    return total / number.view(-1, *[1] * (x.dim() - 1)).to(x.dtype)


def _max(x: Tensor, items: RowGroups) -> Tensor:
    if x.dtype == torch.bool:
        return _max(x.view(torch.uint8), items).view(torch.bool)
    group = items.group.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
    return x[items.first].scatter_reduce_(0, group, x, "amax")


REDUCTIONS: dict[str, Callable[[Tensor, RowGroups], Tensor]] = {
    "sum": _sum,
    "mean": _mean,
    "max": _max,
}


def with_stored(values: Any, items: RowGroups, known: Tensor, stored: Any) -> tuple[Any, RowGroups]:
    """Values and groups with the stored value of each known group as the first of its items.

    known: int64 [K], the groups that are stored
    stored: container [K]
    """
    count = len(known)
    if not count:
        return values, items
    group = torch.cat([known, items.group])
    first = items.first + count
    first[known] = torch.arange(count, device=known.device)
    return torch.cat([stored, values]), RowGroups(items.distinct, group, first, items.last + count)


def in_rounds(
    values: Any,  # container [N]
    items: RowGroups,
    known: Tensor,  # bool [G]
    stored: Any,  # container [known.sum()]
    write: Callable[..., Any],
) -> TensorCollection:
    """The results of `write(new)` and `write(new, old)`: for all first items, all second ones ...

    Each round is one batched call for the keys that have no value yet, and one for those that have.
    """
    count = len(items.distinct)
    round_N = occurrence(items.group)
    result, row_of = stored, torch.full((count,), -1, device=known.device)  # group -> row of result
    row_of[known] = torch.arange(int(known.sum()), device=known.device)
    for number in range(int(round_N.max()) + 1):
        chosen = (round_N == number).nonzero().squeeze(1)
        group = items.group[chosen]
        fresh = row_of[group] < 0
        if bool(fresh.any()):
            made = _checked(write(values[chosen[fresh]]), int(fresh.sum()), result)
            start = 0 if result is None else len(result)
            row_of[group[fresh]] = torch.arange(start, start + len(made), device=row_of.device)
            result = made if result is None or not start else torch.cat([result, made])
        if not bool(fresh.all()):
            again = row_of[group[~fresh]]
            old = result if len(again) < len(result) else None  # if all are replaced, of any kind
            made = _checked(write(values[chosen[~fresh]], result[again]), len(again), old)
            result = _replaced(result, again, made)
    return result[row_of]


def _checked(made: Any, count: int, others: Any) -> Any:
    """The output of `write_fn`, checked for a row for each key and the entries of other rows."""
    _with_rows(made, count, "write_fn")
    if others is not None:
        mine, wanted = set(made.keys(True, True)), set(others.keys(True, True))
        if mine != wanted:
            raise ValueError(
                f"write_fn returned the entries {sorted(map(dotted, mine))}, but other rows have "
                f"{sorted(map(dotted, wanted))}: return the same entries for new and for known "
                "keys"
            )
    return made


def _replaced(rows: Any, rows_of: Tensor, new: Any) -> Any:
    if len(rows_of) == len(rows):
        back = torch.empty_like(rows_of)
        back[rows_of] = torch.arange(len(rows_of), device=rows_of.device)
        return new[back]  # all are replaced: the new may have other entries than the old
    rows[rows_of] = new
    return rows


def occurrence(group: Tensor) -> Tensor:
    """How many items of the same group come before each: int64 [N].

    >>> from raffia.data.map_values import occurrence
    >>> occurrence(torch.tensor([0, 1, 0, 0]))
    tensor([0, 0, 1, 2])
    """
    order = group.argsort(stable=True)
    ordered = group[order]
    starts = torch.searchsorted(ordered, ordered)
    number = torch.empty_like(group)
    number[order] = torch.arange(len(group), device=group.device) - starts
    return number


def rows_of(value: Any, batch: torch.Size) -> TensorCollection:
    """A value to be written, as a container [N]."""
    if not is_tensor_collection(value):
        raise TypeError(
            f"a value must be a container; got a {type(value).__name__}: pass "
            "TensorDict({'value': x}, batch_size=query.batch_size)"
        )
    if value.batch_size[: len(batch)] != batch:
        raise ValueError(
            f"the value has batch_size {list(value.batch_size)}, but the query has {list(batch)}: "
            "pass one value for each row of the query"
        )
    return flat(value, batch)


def filled(storage: Any, count: int, default: complex) -> TensorCollection:
    """`count` rows of the entries that are stored, filled with a number."""
    if storage.structure is None:
        raise UnknownRowError(
            "the map is empty and its entries are not known yet, so they cannot be filled with "
            f"{default!r}: pass a default such as TensorDict({{'value': ...}}), or create the map "
            "with TensorDictMap.from_tensordict_pair(source, dest, in_keys)"
        )
    values = storage.empty(count)
    for key, x in values.items(True, True):
        if not _can_hold(x.dtype, default):
            raise ValueError(
                f"default={default!r} cannot be stored as {x.dtype}, the dtype of entry "
                f'"{dotted(key)}": pass a number that fits, or a container with a value for each '
                "entry"
            )
        x.fill_(default)
    return values


def as_number(default: Any) -> int | float | complex:
    """The number that a default for unknown rows is."""
    if isinstance(default, Tensor) and not default.dim():
        default = default.item()
    if not isinstance(default, (bool, int, float, complex)):
        raise TypeError(
            "default must be a number for all entries, or a container with a value for each; got "
            f"a {type(default).__name__}: pass get(query, 0.0) or get(query, TensorDict(...))"
        )
    return default


def _can_hold(dtype: torch.dtype, number: complex) -> bool:
    """Whether a number keeps its value in this dtype, apart from floating-point rounding."""
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


class StorageByKey:
    """Rows whose entries rest in different storages, each of tensors: for example on disk and in
    memory.

    storages: entry -> storage; the entries of what is written must be these.

    >>> from raffia.data.storage import TensorStorage
    >>> from raffia.data.map_values import StorageByKey
    >>> rows = StorageByKey({"x": TensorStorage(9), "y": TensorStorage(7)})
    >>> data = TensorDict(x=torch.zeros(2), y=torch.ones(2, 3), batch_size=[2])
    >>> rows.set(torch.tensor([2, 0]), data)
    >>> rows.read(torch.tensor([0]))["y"], rows.max_size
    (tensor([[1., 1., 1.]]), 7)
    """

    def __init__(self, storages: Mapping[NestedKey, Any]) -> None:
        if not storages:
            raise ValueError(
                "no storages were given: pass {'value': TensorStorage(), ...}, one for each entry"
            )
        self._storages = {unravel_key(key): storage for key, storage in storages.items()}
        devices = {torch.device(storage.device) for storage in self._storages.values()}
        if len(devices) > 1:
            raise ValueError(
                f"the storages are on {sorted(map(str, devices))}: put them on one device"
            )
        self.device = devices.pop()
        limits = [s.max_size for s in self._storages.values() if s.max_size is not None]
        self.max_size: int | None = min(limits, default=None)

    def __len__(self) -> int:
        return min(len(storage) for storage in self._storages.values())

    @property
    def in_memory(self) -> bool:
        """Whether all values are in the memory of this process alone."""
        return all([storage.in_memory for storage in self._storages.values()])

    @property
    def structure(self) -> dict[NestedKey, Any] | None:
        """The structure of each entry of a row; None before the first write."""
        found = {key: storage.structure for key, storage in self._storages.items()}
        return None if None in found.values() else found

    def allocate(self, data: Any) -> None:
        """Learn the shape of rows from examples [n], and store nothing."""
        for storage, x in self._matched(data):
            storage.allocate(x)

    def check(self, data: Any) -> None:
        """Raise what `set` would for such rows."""
        for storage, x in self._matched(data):
            storage.check(x)

    def set(self, rows: Tensor, data: Any) -> None:
        """Write rows, all or none."""
        self.check(data)
        self._change(rows, [(s, partial(s.set, rows, x)) for s, x in self._matched(data)])

    def _change(self, rows: Tensor, changes: Sequence[tuple[Any, Callable[[], None]]]) -> None:
        """Change these rows of each storage; where one fails, those before it are as they were."""
        *others, (_, last) = changes
        done: list[tuple[Any, Tensor, Any]] = []
        try:
            for storage, change in others:
                there = rows[storage.contains(rows)]
                before = storage.read(there) if len(there) else None
                change()
                done.append((storage, there, before))
            last()
        except BaseException:
            for storage, there, before in done:
                storage.erase(rows)
                if before is not None:
                    storage.set(there, before)
            raise

    def read(self, rows: Any) -> TensorDict:
        """Read rows, as copies."""
        entries = {key: storage.read(rows) for key, storage in self._storages.items()}
        return TensorDict({}, batch_size=rows.shape).update(_nested(entries))

    def empty(self, count: int) -> TensorDict:
        """Rows of the stored shapes, with nothing in them yet."""
        entries = {key: storage.empty(count) for key, storage in self._storages.items()}
        return TensorDict({}, batch_size=[count]).update(_nested(entries))

    def contains(self, rows: Any) -> Tensor:
        """Whether rows hold something."""
        return torch.stack([s.contains(rows) for s in self._storages.values()]).all(0)

    def erase(self, rows: Tensor) -> None:
        """Rows hold nothing any more, or all are as they were."""
        self._change(rows, [(s, partial(s.erase, rows)) for s in self._storages.values()])

    def clear(self) -> None:
        """Clear all rows, so that none holds anything."""
        for storage in self._storages.values():
            storage.clear()

    def _matched(self, data: Any) -> list[tuple[Any, Tensor]]:
        here, there = set(self._storages), set(data.keys(True, True))
        if here != there:
            raise KeyError(
                f"the values have the entries {sorted(map(dotted, there))}, but there are "
                f"storages for {sorted(map(dotted, here))}: pass one storage for each, or out_keys"
            )
        return [(storage, data[key]) for key, storage in self._storages.items()]


def _nested(entries: dict[Any, Any]) -> TensorDict:
    td = TensorDict({}, batch_size=[])
    for key, value in entries.items():
        td.set(key, value)
    return td
