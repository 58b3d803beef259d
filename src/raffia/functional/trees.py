"""Trees of tensors leaf by leaf: dicts, containers, lists, and other pytrees of torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree


def is_traced() -> bool:
    """Whether code runs within `torch.vmap` or a transform of `torch.func`, or is compiled.

    There a tensor may stand for many, and may not be written to.

    >>> is_traced(), torch.vmap(lambda x: x + is_traced())(torch.zeros(2))
    (False, tensor([1., 1.]))
    """
    return torch.compiler.is_compiling() or _functorch.peek_interpreter_stack() is not None


def is_differentiated(x: Tensor) -> bool:
    """Whether derivatives by a tensor may be asked for of what is computed from it.

    >>> is_differentiated(torch.zeros(2)), is_differentiated(torch.zeros(2, requires_grad=True))
    (False, True)
    """
    if x.requires_grad or is_traced() or forward_ad._current_level >= 0:
        return True
    if torch._C._get_tracing_state() is not None:  # of torch.jit
        return True
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")  # importing it takes long
    return tracer is not None and tracer.get_proxy_mode() is not None


def aligned_leaves(first: Any, *others: Any) -> list[list[Tensor]]:
    """The leaves of several trees in the order of the first one's, matched by name.

    >>> aligned_leaves({"a": 1, "b": 2}, {"b": 20, "a": 10})
    [[1, 2], [10, 20]]
    """
    leaves, structure = pytree.tree_flatten(first)
    out = [leaves]
    for other in others:
        more, its_structure = pytree.tree_flatten(other)
        out.append(more if its_structure == structure else _in_order_of(first, other))
    return out


def _in_order_of(first: Any, other: Any) -> list[Tensor]:
    names = list(_named_leaves(first))
    named = _named_leaves(other)
    if named.keys() != set(names):
        odd = sorted(named.keys() ^ set(names), key=str)
        raise ValueError(
            "the trees must have the same entries; only one of them has "
            + ", ".join(".".join(map(str, name)) for name in odd[:5])
            + (f" and {len(odd) - 5} more" if len(odd) > 5 else "")
        )
    return [named[name] for name in names]


def _named_leaves(tree: Any) -> dict[tuple[Any, ...], Tensor]:
    pairs, _ = pytree.tree_flatten_with_path(tree)
    return {_name(path): leaf for path, leaf in pairs}


def _name(path: Sequence[Any]) -> tuple[Any, ...]:
    """The path to a leaf; a container lists an entry nested in it under one key ("a", "b")."""
    out: list[Any] = []
    for entry in path:
        key = getattr(entry, "key", entry)
        out += key if isinstance(key, tuple) else [key]
    return tuple(out)


def over_leaf(rate: Tensor, leaf: Tensor) -> Tensor:
    """Reshape a number [] or one of each member [P], so that it broadcasts over a leaf [P, *].

    >>> over_leaf(torch.tensor([1.0, 2.0]), torch.zeros(2, 3, 4)).shape
    torch.Size([2, 1, 1])
    """
    return rate.reshape(rate.shape + (1,) * (leaf.dim() - rate.dim()))
