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
        slots = [part for part in parts if part.__class__ is not int]  # each makes a dimension
        arrays = [i for i, part in enumerate(slots) if _is_array(part)]  # or some make it
        side_by_side = not arrays or arrays[-1] - arrays[0] == len(arrays) - 1
        if isinstance(item, Tensor):
            self.dim = arrays[0] if side_by_side else 0
            self._rows_of_arrays(parts, at)
        else:
            self.dim = at - len([part for part in parts[:at] if part.__class__ is int])
            before = len([i for i in arrays if i < self.dim])
            if arrays:
                width = max([getattr(slots[i], "ndim", 1) for i in arrays])
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
            if part is None or isinstance(part, bool):
                continue
            if used == stack_dim:
                return i
            used += 1
        parts.extend([_ALL] * (stack_dim - used + 1))
        return len(parts) - 1

    def _rows_of_arrays(self, parts: list[Any], at: int) -> None:
        truths = [torch.zeros(int(p), dtype=torch.int64) for p in parts if isinstance(p, bool)]
        at -= len([part for part in parts[:at] if isinstance(part, bool)])
        parts = [part for part in parts if not isinstance(part, bool)]
        where = [i for i, part in enumerate(parts) if isinstance(part, Tensor)]
        rest = (*parts[:at], *parts[at + 1 :])
        self.copied = not all([p is None or p.__class__ is slice and p == _ALL for p in rest])
        try:
            arrays = torch.broadcast_tensors(*[parts[i] for i in where], *truths)[: len(where)]
        except RuntimeError as error:
            raise IndexError(
                f"shape mismatch: the arrays of an index must broadcast with each other: {error}"
            ) from None
        self.sizes = arrays[0].shape
        columns = [array.reshape(-1).tolist() for array in arrays]
        for cell in zip(*columns, strict=True):
            filled = list(parts)
            for i, number in zip(where, cell, strict=True):
                filled[i] = number
            number = filled.pop(at)
            self.rows.append((number, tuple(filled)))


def _plain_part(part: Any) -> Any:
    """A part of a normalised index: a tensor of one number or truth value as that."""
    return part.item() if isinstance(part, Tensor) and part.dim() == 0 else part


def _is_array(part: Any) -> bool:
    """Whether a part is an array for torch, as a truth value is: of one number, or of none."""
    return isinstance(part, (Tensor, bool))


def rows(td: Any, idx: Any, ndim: int) -> Any:
    """`td[idx]` of a lazy stack, whose first `ndim` dimensions the index covers."""
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
    return member if is_whole(rest) else member._index(rest, ndim - 1, None)


def is_whole(rest: tuple[Any, ...]) -> bool:
    """Whether an index into a member takes all of it."""
    return all([part.__class__ is slice and part == _ALL for part in rest])


def emptied(td: Any, plan: Plan, ndim: int) -> Any:
    """A lazy stack without members."""
    size = index.indexed_size(td._batch_size[:ndim], plan.emptied) + td._batch_size[ndim:]
    out = td._of([], plan.dim, torch.Size((*size[: plan.dim], *size[plan.dim + 1 :])))
    if td._device is not None:
        out._device = td._device
    return out


def set_rows(td: Any, idx: Any, value: Any, ndim: int) -> None:
    """Write into the rows `idx`, which are normalised, of the members of a lazy stack."""
    if any([_plain_part(part) is False for part in (idx if isinstance(idx, tuple) else (idx,))]):
        return
    if isinstance(value, Tensor) and value.dim():
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
