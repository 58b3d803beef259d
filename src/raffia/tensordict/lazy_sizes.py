"""Shapes of the members of lazy stacks, and tensors of unlike shapes as one: padded, or nested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def common_size(members: Sequence[Any]) -> torch.Size:
    """The batch size of members, with -1 where it differs."""
    first = members[0]._batch_size
    size = list(first)
    for i, td in enumerate(members):
        other = td._batch_size
        if len(other) != len(size):
            raise unlike_sizes(first, other, i)
        size = [a if a == b else -1 for a, b in zip(size, other, strict=True)]
    return torch.Size(size)


def unlike_sizes(first: torch.Size, other: torch.Size, i: int) -> RuntimeError:
    return RuntimeError(
        "batch sizes in tensordicts differs, LazyStackedTensorDict cannot be created. Got "
        f"td[0].batch_size={first} and td[{i}].batch_size={other}. If the length match and you "
        "wish to stack these tensordicts, set strict_shape to False."
    )


def member_shape(node: Any, name: str) -> torch.Size | None:
    """The shape of an entry, with -1 for dimensions that differ in the members of a lazy stack."""
    if not getattr(node, "_lazy", False):
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
    if side not in ("left", "right"):
        raise ValueError(f"padding_side is 'left' or 'right', got {side!r}")
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
