"""Rows of lazy stacks: which members an index reaches, and the index into each of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from raffia.tensordict import index, lock
from raffia.tensordict.lazy_shape import grid
from raffia.tensordict.node import Node
from raffia.tensordict.tensordict import TensorDict

_ALL = slice(None)


class Plan:
    """An index into a lazy stack as indices into its members.

    rows: the members, by their number, and the index into each; in row-major order over `sizes`.
    sizes: the dimensions that the result has instead of the stack dimension; () of one member.
    dim: where they stand, if there are any.
    spare: a dimension of size 1 that the members' results have and the result has not.
    copied: whether a tensor would give a copy, where the rows of the members are views.
    emptied: the index into a stack of one member that gives the result, where it has no rows.
    """

    __slots__ = ("rows", "sizes", "dim", "spare", "copied", "emptied")
    rows: list[tuple[int, tuple[Any, ...]]]

    def __init__(self, td: Any, idx: Any) -> None:
        parts = [_plain_part(part) for part in (idx if isinstance(idx, tuple) else (idx,))]
        at = self._find(parts, td.stack_dim)
        item = parts[at]
        self.sizes: Sequence[int] = ()
        if isinstance(item, int):
            self.rows = [(item, (*parts[:at], *parts[at + 1 :]))]
            return
        self.rows, self.copied = [], False
        self.spare: int | None = None
        slots = [part for part in parts if not isinstance(part, int)]  # each makes a dimension
        arrays = [i for i, part in enumerate(slots) if isinstance(part, Tensor)]  # or some make it
        side_by_side = not arrays or arrays[-1] - arrays[0] == len(arrays) - 1
        if isinstance(item, Tensor):
            self.dim = arrays[0] if side_by_side else 0
            self._rows_of_arrays(parts, at)
        else:
            self.dim = at - len([part for part in parts[:at] if isinstance(part, int)])
            before = len([i for i in arrays if i < self.dim])
            if arrays:
                width = max([slots[i].dim() for i in arrays])
                self.dim += (width if not side_by_side or before else 0) - before
            rest = (*parts[:at], *parts[at + 1 :])
            if 0 < before < len(arrays):  # between arrays: keep them apart in the members too
                self.spare = self.dim
                rest = (*parts[:at], None, *parts[at + 1 :])
            self.rows = [(number, rest) for number in range(len(td.tensordicts))[item]]
            self.sizes = (len(self.rows),)
        if not self.rows:
            none: Any = slice(0, 0)
            if isinstance(item, Tensor):
                none = torch.zeros(tuple(self.sizes), dtype=torch.int64)
            self.emptied = (*parts[:at], none, *parts[at + 1 :])

    @staticmethod
    def _find(parts: list[Any], stack_dim: int) -> int:
        """The part that indexes the stack dimension; `parts` is filled up to there."""
        used = 0
        for i, part in enumerate(parts):
            if part is None:
                continue
            if used == stack_dim:
                return i
            used += 1
        parts.extend([_ALL] * (stack_dim - used + 1))
        return len(parts) - 1

    def _rows_of_arrays(self, parts: list[Any], at: int) -> None:
        where = [i for i, part in enumerate(parts) if isinstance(part, Tensor)]
        if len(parts) > 1:
            rest = (*parts[:at], *parts[at + 1 :])
            self.copied = not all([p is None or p.__class__ is slice and p == _ALL for p in rest])
        arrays = torch.broadcast_tensors(*[parts[i] for i in where])
        self.sizes = arrays[0].shape
        columns = [array.reshape(-1).tolist() for array in arrays]
        for cell in zip(*columns, strict=True):
            filled = list(parts)
            for i, number in zip(where, cell, strict=True):
                filled[i] = number
            number = filled.pop(at)
            self.rows.append((number, tuple(filled)))


def _plain_part(part: Any) -> Any:
    """A part of a normalised index: a tensor of one number as a number, True as a new dimension."""
    if isinstance(part, Tensor) and part.dim() == 0:
        part = part.item()
    return None if isinstance(part, bool) else part


def _is_truth(part: Any) -> bool:
    """Whether a part of a normalised index is a truth value."""
    if isinstance(part, Tensor):
        return not part.dim() and part.dtype is torch.bool
    return isinstance(part, bool)


def _has_truth(idx: Any) -> bool:
    return any(map(_is_truth, idx)) if isinstance(idx, tuple) else _is_truth(idx)


def _has_false(idx: Any) -> bool:
    """Whether a normalised index has a False, which gives no rows."""
    parts = idx if isinstance(idx, tuple) else (idx,)
    return not all([part for part in parts if _is_truth(part)])


class _Merged:
    """A normalised index with truth values, as one with at most a single True, without arrays.

    As in torch, a truth value is an array of one number, and arrays make one group of dimensions:
    where they stand if that is side by side, otherwise in front.
    index: the index without the others.
    start, width: the dimensions that begin at `start` there, and are in front in the result;
        `width` is 0 if nothing has to be moved.
    """

    __slots__ = ("index", "start", "width")

    def __init__(self, idx: Any) -> None:
        parts = idx if isinstance(idx, tuple) else (idx,)
        parts = tuple([True if _is_truth(part) else _plain_part(part) for part in parts])
        rest = tuple([part for part in parts if part is not True])
        group = [i for i, part in enumerate(_slots(parts)) if _is_array(part)]
        side_by_side = group[-1] - group[0] == len(group) - 1
        arrays = [i for i, part in enumerate(_slots(rest)) if _is_array(part)]
        self.start = self.width = 0
        if not arrays:
            at = [part is True for part in parts].index(True) if side_by_side else 0
            rest = (*rest[:at], True, *rest[at:])
        elif not side_by_side and arrays[-1] - arrays[0] == len(arrays) - 1:
            self.start = arrays[0]
            self.width = max([part.dim() for part in rest if isinstance(part, Tensor)])
        self.index = rest

    def front(self, rows: Any) -> Any:
        """The rows of `index`, with the group in front."""
        return rows.permute(*_shifted(rows.ndim, self.start, self.width)) if self.width else rows

    def back(self, value: Any) -> Any:
        """A value for the rows, for those of `index`."""
        if not self.width:
            return value
        order = _shifted(value.ndim, self.start, self.width)
        return value.permute(*[order.index(dim) for dim in range(len(order))])


def _slots(parts: tuple[Any, ...]) -> list[Any]:
    """The parts that make dimensions."""
    return [part for part in parts if part is True or not isinstance(part, int)]


def _is_array(part: Any) -> bool:
    return part is True or isinstance(part, Tensor)


def _shifted(ndim: int, start: int, width: int) -> list[int]:
    """The order of dimensions in which the `width` ones from `start` on come first."""
    dims = [*range(ndim)]
    return [*dims[start : start + width], *dims[:start], *dims[start + width :]]


def _rows_of_truths(td: Any, idx: Any, ndim: int) -> Any:
    """`td[idx]` for an index with truth values: for False, what True gives, without rows."""
    parts = idx if isinstance(idx, tuple) else (idx,)
    full = tuple([True if _is_truth(part) else part for part in parts])
    before, after = [index.indexed_size(td._batch_size[:ndim], at) for at in (full, idx)]
    merged = _Merged(idx)
    out = merged.front(_rows(td, merged.index, ndim))
    if before == after:
        return out
    dim = [a == b for a, b in zip(before, after, strict=True)].index(False)
    return out._index((*[_ALL] * dim, slice(0, 0)), out.ndim, None)


def rows(td: Any, idx: Any, ndim: int) -> Any:
    """`td[idx]` of a lazy stack, whose first `ndim` dimensions the index covers."""
    if idx.__class__ is not slice and _has_truth(idx):
        return _rows_of_truths(td, idx, ndim)
    return _rows(td, idx, ndim)


def _rows(td: Any, idx: Any, ndim: int) -> Any:
    """`td[idx]`, where a True is the only part that makes several dimensions, or one of arrays."""
    plan, ndim = Plan(td, idx), max(ndim, td.stack_dim + 1)
    if not plan.sizes:
        return row(td, *plan.rows[0], ndim)
    if not plan.rows:
        return td._no_rows(plan, ndim) if td.tensordicts else emptied(td, plan, ndim)
    members = [row(td, at, rest, ndim) for at, rest in plan.rows]
    if plan.copied:
        members = [member.clone() for member in members]
    if plan.spare is not None:
        members = [m._index((*(_ALL,) * plan.spare, 0), m.ndim, None) for m in members]
    return grid(td, members, plan.sizes, plan.dim)


def row(td: Any, at: int, rest: tuple[Any, ...], ndim: int) -> Any:
    """The member `at` indexed by `rest`."""
    try:
        member = td.tensordicts[at]
    except IndexError:
        raise IndexError(
            f"index {at} is out of bounds for dimension {td.stack_dim} with size "
            f"{len(td.tensordicts)}"
        ) from None
    if all([part.__class__ is slice and part == _ALL for part in rest]):
        return member
    return member._index(rest, ndim - 1, None)


def emptied(td: Any, plan: Plan, ndim: int) -> Any:
    """A lazy stack without members."""
    size = index.indexed_size(td._batch_size[:ndim], plan.emptied) + td._batch_size[ndim:]
    out = td._of([], plan.dim, torch.Size((*size[: plan.dim], *size[plan.dim + 1 :])))
    if td._device is not None:
        out._device = td._device
    return out


def set_rows(td: Any, idx: Any, value: Any, ndim: int) -> None:
    """Write into the rows `idx`, which are normalised, of the members of a lazy stack."""
    if isinstance(value, Tensor) and value.dim() and not _has_false(idx):
        value = _like_tensor(td._index(idx, max(ndim, td.stack_dim + 1), None), value)
    for at, rest, part in parts_of_rows(td, idx, value, ndim):
        old = td.tensordicts[at]
        replaced = old._set_index(rest, part, max(ndim - 1, td.stack_dim))
        if replaced is not None:
            td.tensordicts[at] = replaced
            if td._own_lock:
                lock.relink(td, old, replaced)


def parts_of_rows(td: Any, idx: Any, value: Any, ndim: int) -> list[tuple[int, Any, Any]]:
    """Members that the rows `idx` reach: number, index into the member, part of `value` for it."""
    if idx.__class__ is not slice and _has_truth(idx):
        if _has_false(idx):
            return []
        merged = _Merged(idx)
        idx, value = merged.index, merged.back(value) if isinstance(value, Node) else value
    plan, ndim = Plan(td, idx), max(ndim, td.stack_dim + 1)
    if not isinstance(value, Node) or not plan.sizes:
        parts: Sequence[Any] = [value] * len(plan.rows)
    elif len(plan.sizes) == 1:
        parts = value.unbind(plan.dim) if plan.rows else ()
    else:
        lead, cells = (_ALL,) * plan.dim, itertools.product(*[range(n) for n in plan.sizes])
        parts = [value._index((*lead, *cell), len(value._batch_size), None) for cell in cells]
    if plan.sizes and plan.spare is not None and isinstance(value, Node):
        parts = [part.unsqueeze(plan.spare) for part in parts]
    for at, rest in plan.rows:
        if not -len(td.tensordicts) <= at < len(td.tensordicts):
            row(td, at, rest, ndim)  # raises
    return [(at, rest, part) for (at, rest), part in zip(plan.rows, parts, strict=True)]


def _like_tensor(rows: Any, tensor: Tensor) -> Any:
    """A container like `rows` with `tensor`, broadcast, under every key."""
    out = {
        name: _like_tensor(value, tensor) if isinstance(value, Node) else tensor.expand(value.shape)
        for name, value in rows._entries().items()
        if not (isinstance(value, Node) and value._is_data())
    }
    return TensorDict._make(out, rows._batch_size)
