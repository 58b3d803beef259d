"""Gradients with respect to a tree of parameters, also within `torch.vmap`."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from raffia.functional.trees import is_traced

Aux = TypeVar("Aux")


def value_and_grad(
    fn: Callable[..., tuple[Tensor, Aux]],
    params: Any,
    *args: Any,
) -> tuple[Any, tuple[Tensor, Aux]]:
    """The gradients of `fn(params, *args)[0]` by `params`, and the detached outputs of `fn`.

    fn: gives a number [] and whatever else is wanted of it: a tree of tensors (`{}` if nothing).
    params: a tree (a `TensorDict`, a dict, ...) of floating-point tensors. Gradients have its
        structure; a parameter that the number does not depend on has zeros.

    Plain calls go through `torch.autograd.grad`; within `torch.vmap` or another transform of
    `torch.func`, and in `torch.compile`, through `torch.func.grad_and_value`, which nests but takes
    up to 1.5 times as long. Neither touches the `.grad` or the history of the parameters given.

    >>> def loss(params, x):
    ...     error = params["weight"] * x - 1
    ...     return error.square().sum(), {"error": error}
    >>> params = TensorDict(weight=torch.tensor(2.0), unused=torch.zeros(2))
    >>> grads, (value, aux) = value_and_grad(loss, params, torch.tensor([1.0, 3.0]))
    >>> grads["weight"], grads["unused"], value, aux["error"]
    (tensor(32.), tensor([0., 0.]), tensor(26.), tensor([1., 5.]))
    """
    if is_traced():
        return torch.func.grad_and_value(fn, has_aux=True)(params, *args)
    leaves, structure = pytree.tree_flatten(params)
    with torch.enable_grad():
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        value, aux = fn(pytree.tree_unflatten(leaves, structure), *args)
        if value.requires_grad:
            grads = torch.autograd.grad(value, leaves, materialize_grads=True)
        else:  # nothing leads back to a parameter
            grads = tuple(map(torch.zeros_like, leaves))
    detached = pytree.tree_map(Tensor.detach, aux)
    return pytree.tree_unflatten(grads, structure), (value.detach(), detached)
