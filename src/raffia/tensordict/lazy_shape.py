"""Lazy stacks: the shapes of their members, and shape operations that keep the members apart.

An operation is named as in shape.py, ("unsqueeze", 1) or ("permute", (1, 0)). `_inner` gives
the operation on the members, which lack the stack dimension, and that dimension's new position.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from raffia.hints import check_choice
from raffia.tensordict.node import LeafFn, Node, Op


def common_size(members: Sequence[Any]) -> torch.Size:
    """The batch size of the members, with -1 where it differs."""
    first = members[0]._batch_size
    size = list(first)
    for i, td in enumerate(members):
        other = td._batch_size
        if len(other) != len(size):
            raise size_mismatch(first, other, i)
        size = [a if a == b else -1 for a, b in zip(size, other, strict=True)]
    return torch.Size(size)


def size_mismatch(first: torch.Size, other: torch.Size, i: int) -> RuntimeError:
    return RuntimeError(
        "batch sizes in tensordicts differs, LazyStackedTensorDict cannot be created. Got "
        f"td[0].batch_size={first} and td[{i}].batch_size={other}. If the length match and you "
        "wish to stack these tensordicts, set strict_shape to False."
    )


def member_shape(node: Any, name: str) -> torch.Size | None:
    """The shape of an entry, with -1 for dimensions that differ in the members of a lazy stack."""
    if not node._lazy:
        value = node._get_str(name)
        return getattr(value, "shape", None)
    shapes = [member_shape(td, name) for td in node.tensordicts]
    if not shapes or any([size is None for size in shapes]):
        return None
    width = min([len(size) for size in shapes])  # type: ignore[arg-type]
    same = [
        sizes[0] if len(dict.fromkeys(sizes)) == 1 else -1 for sizes in zip(*shapes, strict=False)
    ]
    dim = min(node.stack_dim, width)
    return torch.Size((*same[:dim], len(shapes), *same[dim:]))


def padded(values: list[Tensor], fill: float | bool, side: str) -> list[Tensor]:
    """Tensors filled up to the largest size along each dimension."""
    check_choice("padding_side", side, ("left", "right"))
    target = [max(sizes) for sizes in zip(*[value.shape for value in values], strict=True)]
    out = []
    for value in values:
        widths: list[int] = []
        for n, size in zip(reversed(target), reversed(value.shape), strict=True):
            widths += [n - size, 0] if side == "left" else [0, n - size]
        out.append(torch.nn.functional.pad(value, widths, value=fill) if any(widths) else value)
    return out


def nested(values: list[Tensor], layout: torch.layout | None) -> Tensor:
    """A nested tensor: jagged if at most one dimension differs and no layout is asked for."""
    if any([value.is_nested for value in values]):
        raise ValueError(
            "a nested tensor of nested tensors is not possible: flatten the lazy stack of lazy "
            "stacks first with td.view(-1), or pass as_padded_tensor=True"
        )
    if layout is torch.strided:
        return torch.nested.as_nested_tensor(values, layout=torch.strided)
    sizes = list(zip(*[value.shape for value in values], strict=True))
    ragged = [i for i, column in enumerate(sizes) if len(dict.fromkeys(column)) > 1]
    if layout is None and len(ragged) > 1:
        return torch.nested.as_nested_tensor(values, layout=torch.strided)
    at = ragged[0] if ragged else 0
    if at == 0:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)
    turned = torch.nested.as_nested_tensor(
        [v.transpose(0, at) for v in values], layout=torch.jagged
    )
    return turned.transpose(1, at + 1)


def joined_tensors(
    tensors: list[Any],
    dim: int,
    forms: tuple[bool, bool, bool],
    *,
    padding_side: str,
    layout: torch.layout | None,
    fill: float | bool,
) -> Tensor | list[Tensor]:
    """Tensors as a list, as one tensor padded to the largest shape, or as a nested tensor."""
    if sum(forms) > 1:
        raise TypeError("lazy_stack: pass one of as_list, as_padded_tensor and as_nested_tensor")
    if not all([isinstance(tensor, Tensor) for tensor in tensors]):
        raise TypeError(
            "lazy_stack: as_list, as_padded_tensor and as_nested_tensor take a list of tensors; "
            "td.get(key, as_list=True) reads an entry of a lazy stack so"
        )
    if forms[0]:
        return tensors
    if forms[1]:
        return torch.stack(padded(tensors, fill, padding_side), dim)
    return nested(tensors, torch.jagged if layout is None else layout)


_ALL = slice(None)


def reshaped_lazily(td: Any, ndim: int, batch_size: torch.Size, op: Op) -> Node | None:
    """The lazy stack after a shape operation; None if the result can't be a lazy stack.

    ndim: how many dimensions, with the stack dimension among them, become `batch_size`.
    """
    name, dim = op[0] if op else "", td.stack_dim
    if name in ("view", "reshape"):
        return _reshaped(td, name, batch_size, ndim)
    if name == "repeat_interleave" and len(op) == 3 and op[2] == dim:
        return _interleaved(td, op[1])
    found = _inner(op, dim, ndim)
    if found is None:
        return None
    inner, at = found
    if name == "squeeze" and dim in op[1]:
        return on_members(td, inner, ndim, batch_size)[0]
    size = _without(batch_size, at)
    if name == "repeat":  # each time with new copies
        members = [m for _ in range(op[1][dim]) for m in on_members(td, inner, ndim, size, True)]
    elif name == "expand" and batch_size[at] != len(td.tensordicts):  # one, shown several times
        members = on_members(td, inner, ndim, size, True) * batch_size[at]
    else:
        members = on_members(td, inner, ndim, size, name == "repeat_interleave")
    return td._of(members, at, size + td._batch_size[ndim:])


def _inner(op: Op, dim: int, ndim: int) -> tuple[Op, int] | None:
    """The operation to apply to the members, and the position of the stack dimension after it."""
    match op:
        case ("unsqueeze", at):
            return ("unsqueeze", at - (at > dim)), dim + (at <= dim)
        case ("transpose", first, second):
            order = list(range(ndim))
            order[first], order[second] = second, first
            return _inner(("permute", tuple(order)), dim, ndim)
        case ("permute", order):
            return ("permute", _below(order, dim)), order.index(dim)
        case ("squeeze", dims):
            return ("squeeze", _below(dims, dim)), dim - len([d for d in dims if d < dim])
        case ("expand", size):
            at = dim + len(size) - ndim
            return ("expand", _without(size, at)), at
        case ("repeat", times):
            return ("repeat", _without(times, dim)), dim
        case ("repeat_interleave", repeats, at):
            return ("repeat_interleave", repeats, at - (at > dim)), dim
    return None


def _below(dims: Sequence[int], dim: int) -> tuple[int, ...]:
    """Dimensions as the members count them, which lack `dim`."""
    return tuple([d - (d > dim) for d in dims if d != dim])


def _without(size: Sequence[int], at: int) -> torch.Size:
    return torch.Size((*size[:at], *size[at + 1 :]))


def on_members(td: Any, op: Op, ndim: int, size: torch.Size, is_new: bool = False) -> list[Any]:
    """The members after an operation on their first `ndim - 1` dimensions, which become `size`.

    is_new: give new ones also where nothing changes.
    """
    if not is_new and size == _without(td._batch_size[:ndim], td.stack_dim):
        if op[0] != "permute" or op[1] == tuple(range(ndim - 1)):
            return list(td.tensordicts)
    fn = _on_leaf(op, ndim - 1, size)
    return [member._batched(fn, ndim - 1, size, None, op) for member in td.tensordicts]


def _on_leaf(op: Op, ndim: int, size: torch.Size) -> LeafFn:
    """The effect on a tensor of an operation on its first `ndim` dimensions, giving `size`."""
    name, arg = op[0], op[1]
    if name == "permute":
        return lambda leaf: leaf.permute(*arg, *range(ndim, leaf.dim()))
    if name == "expand":
        return lambda leaf: leaf.expand((*size, *leaf.shape[ndim:]))
    if name == "repeat_interleave":
        return lambda leaf: torch.repeat_interleave(leaf, arg, dim=op[2])
    if name == "repeat":
        if all([n == 1 for n in arg]):  # a clone is a tenth of the time of such a repeat
            return lambda leaf: leaf.clone(memory_format=torch.contiguous_format)
        return lambda leaf: leaf.repeat((*arg, *[1] * (leaf.dim() - ndim)))
    if name in ("view", "reshape"):
        method = Tensor.view if name == "view" else Tensor.reshape
        return lambda leaf: method(leaf, (*size, *leaf.shape[ndim:]))
    return methodcaller(name, arg)  # squeeze, unsqueeze


def _interleaved(td: Any, repeats: Any) -> Any:
    """Each member several times in a row: itself, as where an index names a row twice."""
    counts = [repeats] * len(td.tensordicts)
    if isinstance(repeats, Tensor):
        counts = repeats.expand(len(td.tensordicts)).tolist()
    pairs = zip(td.tensordicts, counts, strict=True)
    members = [member for member, n in pairs for _ in range(n)]
    return td._of(members, td.stack_dim, td._member_size())


def _reshaped(td: Any, name: str, new: torch.Size, ndim: int) -> Any:
    """A reshape that members can do, or that merges the stack dimension with others into one.

    The old dimensions fall into three groups: those that the stack dimension is merged with, and
    those before and after; the new dimensions must fall into groups of the same sizes.
    """
    old = tuple(td._batch_size[:ndim])
    if not math.prod(old) or -1 in old:
        return None
    for first, last in _runs(td.stack_dim, ndim):
        cut = _cut_out(old, tuple(new), first, last)
        if cut is None:
            continue
        start, stop = cut
        if first == last:  # the stack dimension on its own, maybe split into several
            size = torch.Size((*new[:start], *new[stop:]))
            return grid(td, on_members(td, (name, size), ndim, size), new[start:stop], start)
        if stop - start != 1:
            return None
        lead, cells = (_ALL,) * first, itertools.product(*[range(n) for n in old[first : last + 1]])
        out = td._of([td._index((*lead, *cell), ndim, None) for cell in cells], first)
        width = ndim - (last - first)
        return out if out._batch_size[:width] == new else _reshaped(out, name, new, width)
    return None


def grid(td: Any, members: list[Any], sizes: Sequence[int], dim: int) -> Node:
    """Nested lazy stacks: members in row-major order over dimensions `sizes`, none empty, at `dim`.

    One member where there are no such dimensions.
    """
    if not sizes:
        return members[0]
    for n in reversed(sizes[1:]):
        members = [td._of(members[i : i + n], dim) for i in range(0, len(members), n)]
    return td._of(members, dim)


def _runs(dim: int, ndim: int) -> list[tuple[int, int]]:
    """Runs of dimensions that contain `dim`, as (first, last), the short ones first."""
    runs = [(a, b) for a in range(dim + 1) for b in range(dim, ndim)]
    return sorted(runs, key=lambda run: run[1] - run[0])


def _cut_out(
    old: tuple[int, ...], new: tuple[int, ...], first: int, last: int
) -> tuple[int, int] | None:
    """The range in `new` of the dimensions `first` to `last` of `old`; None if they are joined."""
    before, inside = math.prod(old[:first]), math.prod(old[first : last + 1])
    for start in range(len(new) + 1):
        if math.prod(new[:start]) != before:
            continue
        for stop in range(start, len(new) + 1):
            if math.prod(new[start:stop]) == inside:
                while inside == 1 and stop == start and stop < len(new) and new[stop] == 1:
                    stop += 1
                return start, stop
    return None
