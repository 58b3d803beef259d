"""Values of rows as pytrees: `torch.vmap` hides them in one row, and they come back with the rows.

A value for each row has no leaves. Inside `torch.vmap` it has one, a probe, whose strides show
where the dimension of the rows is put. Elsewhere the leaves of the container around it show that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import CVmapInterpreterPtr, TransformType, peek_interpreter_stack
from torch._C._functorch import _add_batch_dim as add_batch_dim
from torch._C._functorch import is_batchedtensor as is_batched
from torch.utils import _pytree as pytree

from raffia.tensordict.node import Node
from raffia.tensordict.nontensor import NonTensorData, NonTensorStack


def changed_dims(old: torch.Size, new: torch.Size) -> list[int]:
    """The possible positions of the one added or removed dimension; [] after other changes."""
    short, long = (old, new) if len(old) < len(new) else (new, old)
    if len(long) != len(short) + 1:
        return []
    return [i for i in range(len(long)) if long[:i] + long[i + 1 :] == short]


def resized(node: Any, old: torch.Size, size: torch.Size, taken: int | None) -> Node:
    """An entry without tensors of a container whose batch size was `old` and is `size`.

    taken: which dimension `torch.vmap` took away, where that is known.
    Values of single rows are hidden from the one row that `torch.vmap` runs its function on: there
    they are one value, a list, and the node remembers the rows for when the dimension comes back,
    and which that was; None where that is unknown, as within `torch.compile`.
    """
    extra = node._batch_size[len(old) :]
    if not node._is_data():
        below = {key: resized(one, old, size, taken) for key, one in node._entries().items()}
        return node._new(below, size + extra)
    at = changed_dims(old, size)
    if not _has_rows(node) or not at:
        return node._new({}, size + extra)
    if len(size) > len(old):
        rows = node.__dict__.get("_rows")
        if len(at) > 1 and size[at[0]] != 1 or rows is not None and rows[1] is None:
            raise RuntimeError(
                f"a container of batch size {tuple(old)} became one of {tuple(size)}, and it is "
                f"ambiguous which of the dimensions {at} is the new one, so the values of rows "
                "could be assigned to the wrong rows. Leave them out: td.exclude(key)"
            )
        return _with_dim(node, at[0], size[at[0]])
    row = NonTensorData(node.tolist(), size + extra, node._device)
    dim = taken if taken in at else at[0] if len(at) == 1 else None
    row._rows = (node, dim, _vmap()[0])
    return row


def _has_rows(node: Any) -> bool:
    """Whether a node holds a value for each row, be it one that is hidden by `torch.vmap`."""
    return isinstance(node, NonTensorStack) or node.__dict__.get("_rows") is not None


def _with_dim(node: Any, at: int, size: int) -> Any:
    """A data node with the dimension `at` that `torch.vmap`, or another function, adds."""
    rows = node.__dict__.get("_rows")
    if rows is not None:
        whole, dim, level = rows
        known = dim is not None and level == _vmap()[0]
        if known and whole._batch_size[dim] == size:
            return _dims_changed(whole, lambda data, first: data.movedim(first + dim, first + at))

    def expand(data: Any, first: int) -> Any:
        data = data.unsqueeze(first + at)
        return data.expand(
            (*data.batch_size[: first + at], size, *data.batch_size[first + at + 1 :])
        )

    return _dims_changed(node, expand)


def _dims_changed(node: Any, change: Callable[[Any, int], Any], first: int = 0) -> Any:
    """Apply `change` to a data node, and to the rows that outer `torch.vmap`s hide from it.

    change: called with a node, and at which of its dimensions those begin that are to be changed.
    """
    out, rows = change(node, first)._shallow(), node.__dict__.get("_rows")
    if rows is not None and rows[1] is not None:
        whole, dim, level = rows
        whole = _dims_changed(whole, lambda data, at: data.movedim(at + dim, at))
        out._rows = (_dims_changed(whole, change, first + 1), 0, level)
    return out


def _vmap() -> tuple[int | None, int]:
    """Level and number of rows of the innermost `torch.vmap` that runs; None, 0 outside of one.

    `torch.compile` can't ask.
    """
    top = None if torch.compiler.is_compiling() else peek_interpreter_stack()
    if top is None or top.key() != TransformType.Vmap:
        return None, 0
    return top.level(), CVmapInterpreterPtr(top).batchSize()


def register_data(cls: Any) -> None:
    """Register non-tensor entries as their own context, without leaves except for a probe."""
    pytree.register_pytree_node(cls, _flatten_data, _unflatten_data)


def _flatten_data(node: Any) -> tuple[list[Any], Constant]:
    level, rows = _vmap() if _has_rows(node) else (None, 0)
    if level is None:
        return [], Constant(node)
    # the only dimension with a stride is that of the rows of `torch.vmap`
    size = node._batch_size
    probe = torch.arange(rows).as_strided((rows, *size), (1, *[0] * len(size)))
    return [add_batch_dim(probe, 0, level)], Constant(node)


def _unflatten_data(values: Any, context: Constant) -> Any:
    node = context.node
    for probe in values:
        if isinstance(probe, Tensor) and probe.dim() == node.dim() + 1 and not is_batched(probe):
            at = [dim for dim, stride in enumerate(probe.stride()) if stride]
            return _with_dim(node, at[0], probe.shape[at[0]]) if len(at) == 1 else node
    return node


class Constant:
    """A non-tensor node as the context of a pytree without leaves."""

    __slots__ = ("node",)

    def __init__(self, node: Any) -> None:
        self.node = node

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant):
            return False
        return self.node is other.node or self.node._unwrapped() == other.node._unwrapped()

    def __hash__(self) -> int:
        return hash(type(self.node))

    def __repr__(self) -> str:
        return f"Constant({self.node!r})"
