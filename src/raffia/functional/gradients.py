"""Gradients with respect to a tree of parameters, their norm, and clipping by it."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from raffia.functional.trees import is_traced, over_leaf

Aux = TypeVar("Aux")
Tree = TypeVar("Tree")  # a tree of tensors: a `TensorDict`, a dict, ...


def value_and_grad(
    fn: Callable[..., tuple[Tensor, Aux]],
    params: Tree,
    *args: Any,
) -> tuple[Tree, tuple[Tensor, Aux]]:
    """The gradients of `fn(params, *args)[0]` by `params`, and the detached outputs of `fn`.

    fn: gives a number [] and whatever else is wanted of it: a tree of tensors (`{}` if nothing).
    params: a tree (a `TensorDict`, a dict, ...) of floating-point tensors. Gradients have its
        structure; a parameter that the number does not depend on has zeros.

    Plain calls go through `torch.autograd.grad`; within `torch.vmap` or another transform of
    `torch.func`, in `torch.compile` and in `torch.inference_mode`, through
    `torch.func.grad_and_value`, which can be nested but takes up to 1.5 times as long. Neither
    touches the `.grad` or the history of the parameters given.

    >>> def loss(params, x):
    ...     error = params["weight"] * x - 1
    ...     return error.square().sum(), {"error": error}
    >>> params = TensorDict(weight=torch.tensor(2.0), unused=torch.zeros(2))
    >>> grads, (value, aux) = value_and_grad(loss, params, torch.tensor([1.0, 3.0]))
    >>> grads["weight"], grads["unused"], value, aux["error"]
    (tensor(32.), tensor([0., 0.]), tensor(26.), tensor([1., 5.]))
    """
    if is_traced() or torch.is_inference_mode_enabled():  # autograd records nothing there
        return torch.func.grad_and_value(fn, has_aux=True)(params, *args)
    leaves, structure = pytree.tree_flatten(params)
    if isinstance(params, torch.nn.Module):
        raise TypeError("params must be a tree of tensors: TensorDict.from_module(module)")
    with torch.enable_grad():
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        found = fn(pytree.tree_unflatten(leaves, structure), *args)
        if isinstance(found, Tensor):
            raise TypeError("fn must return two things, a number and a tree: return loss, {}")
        value, aux = found
        if value.requires_grad:
            grads = torch.autograd.grad(value, leaves, materialize_grads=True)
        else:  # nothing leads back to a parameter
            grads = tuple(map(torch.zeros_like, leaves))
    detached = pytree.tree_map(Tensor.detach, aux)
    return pytree.tree_unflatten(grads, structure), (value.detach(), detached)


def global_norm(
    grads: Any,  # a tree of tensors [*P, ...]
    num_batch_dims: int = 0,
) -> Tensor:  # [*P]
    """The L2 norm of all leaves together; of each member, where members are stacked.

    num_batch_dims: how many leading dimensions count members; under `torch.vmap` none.

    >>> grads = {"weight": torch.tensor([[3.0], [0.0]]), "bias": torch.tensor([4.0, 1.0])}
    >>> global_norm(grads), global_norm(grads, num_batch_dims=1)
    (tensor(5.0990), tensor([5., 1.]))
    """
    leaves = pytree.tree_leaves(grads)
    if not leaves:
        return torch.zeros(())
    if not num_batch_dims and not is_traced():
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(leaves)))
    members = leaves[0].shape[:num_batch_dims]
    rows = [leaf.unsqueeze(-1).flatten(num_batch_dims) for leaf in leaves]
    # The compiler of torch 2.11 keeps the dimension of a leaf [1]: so the shape is given.
    norms = [torch.linalg.vector_norm(row, dim=-1).reshape(members) for row in rows]
    return torch.linalg.vector_norm(torch.stack(norms, -1), dim=-1)


def clip_by_global_norm(
    grads: Tree,  # of tensors [*P, ...]
    max_norm: float | Tensor,  # [*P] for members with separate bounds
    num_batch_dims: int = 0,
    *,
    norm: Tensor | None = None,  # [*P]
) -> tuple[Tree, Tensor]:
    """Scale gradients down to the norm `max_norm`; returns them, and their norm before [*P].

    norm: of all gradients, where those given are a part of them; None: it is computed.

        g <- g min(1, max_norm / (|g| + 1e-6))

    As `torch.nn.utils.clip_grad_norm_`, but nothing is written to the gradients given. Where a
    gradient is not finite, neither is the length. Source: Pascanu et al. (2013), algorithm 1.

    >>> grads, norm = clip_by_global_norm({"w": torch.tensor([3.0, 4.0])}, 1.0)
    >>> grads["w"], norm
    (tensor([0.6000, 0.8000]), tensor(5.))
    """
    norm = global_norm(grads, num_batch_dims) if norm is None else norm
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)
    if is_traced() or num_batch_dims:
        return pytree.tree_map(lambda leaf: leaf * over_leaf(factor, leaf), grads), norm
    if norm.device.type == "cpu" and factor == 1:  # on a GPU, to look would be to wait for it
        return grads, norm
    leaves, structure = pytree.tree_flatten(grads)
    return structure.unflatten(torch._foreach_mul(leaves, factor)), norm
