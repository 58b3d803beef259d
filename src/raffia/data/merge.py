"""Merging of several values for one key: in one batched pass, never row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from raffia.data.groups import RowGroups
from raffia.tensordict.keys import dotted

Merge = Callable[[Any, Tensor, int], Any]  # values [N], group [N], num_groups -> [num_groups]


def merged(values: Any, items: RowGroups, merge: str | Merge) -> Any:
    """One value for each group of items, in the order of the groups.

    values: container [N]
    merge: "last", "first", "sum", "mean" or "max", or a function of the values [N], the group of
        each (int64 [N], numbered in order of first appearance) and the number of groups, which
        gives a container [num_groups].
    Raises ValueError for another name, or where the function gives another number of rows.

    >>> from raffia.data.groups import groups
    >>> from raffia.data.merge import merged
    >>> items = groups(torch.tensor([7, 8, 7]))
    >>> merged(TensorDict(x=torch.tensor([1, 2, 3]), batch_size=[3]), items, "sum")["x"]
    tensor([4, 2])
    """
    count = len(items.distinct)
    if callable(merge):
        result = merge(values.clone(), items.group, count)  # it may write into what it gets
        size = getattr(result, "batch_size", None)
        if size is None or tuple(size[:1]) != (count,):
            raise ValueError(
                f"merge gave {'a ' + type(result).__name__ if size is None else list(size)} for "
                f"{count} keys: merge(values, group, num_groups) gives a container whose "
                f"batch_size begins with num_groups, here {count}"
            )
        return result
    if merge not in NAMED:
        raise ValueError(
            f"merge is one of {', '.join(map(repr, NAMED))}, or a function "
            f"merge(values, group, num_groups); got {merge!r}"
        )
    for key, x in values.items(True, True):
        why = _refusal(merge, x)
        if why:
            raise ValueError(f'merge="{merge}" {why} (entry "{dotted(key)}", {x.dtype})')
    if items.first is items.last:  # nothing is there twice
        return values
    return NAMED[merge](values, items)


def _refusal(merge: str, x: Tensor) -> str:
    """The error text why entries like `x` are not merged so; the same whether there is anything to
    merge."""
    if merge == "sum" and x.dtype == torch.bool:
        return 'has no meaning for bool; for "any of them" use merge="max"'
    if merge == "mean" and not (x.is_floating_point() or x.is_complex()):
        return "would round integers; store them as floating point"
    if merge == "max" and x.is_complex():
        return "has no meaning for complex numbers, which have no order"
    return ""


def _sum(values: Any, items: RowGroups) -> Any:
    count = len(items.distinct)

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(count, *x.shape[1:]).index_add_(0, items.group, x)

    return _of_leaves(values, items, total)


def _mean(values: Any, items: RowGroups) -> Any:
    count = len(items.distinct)
    number = torch.bincount(items.group, minlength=count)

    def mean(x: Tensor) -> Tensor:
        total = x.new_zeros(count, *x.shape[1:]).index_add_(0, items.group, x)
        return total / number.view(-1, *[1] * (x.dim() - 1)).to(x.dtype)

    return _of_leaves(values, items, mean)


def _max(values: Any, items: RowGroups) -> Any:
    def largest(x: Tensor) -> Tensor:
        if x.dtype == torch.bool:
            return largest(x.view(torch.uint8)).view(torch.bool)
        group = items.group.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
        return x[items.first].scatter_reduce_(0, group, x, "amax")

    return _of_leaves(values, items, largest)


def _of_leaves(values: Any, items: RowGroups, reduce: Callable[[Tensor], Tensor]) -> Any:
    return values.apply(reduce, batch_size=[len(items.distinct), *values.batch_size[1:]])


NAMED: dict[str, Callable[[Any, RowGroups], Any]] = {
    "last": lambda values, items: values[items.last],
    "first": lambda values, items: values[items.first],
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
) -> Any:
    """What `write(new)` and `write(new, old)` make of the items: of all first ones, all second ...

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
    """What `write_fn` gave, if it has a row for each key, and the entries of the other rows."""
    size = getattr(made, "batch_size", None)
    if size is None or tuple(size[:1]) != (count,):
        raise ValueError(
            f"write_fn gave {'a ' + type(made).__name__ if size is None else list(size)} for "
            f"{count} keys: it gives a container whose batch_size begins with {count}"
        )
    if others is not None:
        mine, wanted = set(made.keys(True, True)), set(others.keys(True, True))
        if mine != wanted:
            raise ValueError(
                f"write_fn gave the entries {sorted(map(dotted, mine))}, and other rows have "
                f"{sorted(map(dotted, wanted))}: give the same for new keys and for known ones"
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

    >>> from raffia.data.merge import occurrence
    >>> occurrence(torch.tensor([0, 1, 0, 0]))
    tensor([0, 0, 1, 2])
    """
    order = group.argsort(stable=True)
    ordered = group[order]
    starts = torch.searchsorted(ordered, ordered)
    number = torch.empty_like(group)
    number[order] = torch.arange(len(group), device=group.device) - starts
    return number
