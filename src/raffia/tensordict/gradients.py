"""Gradients of the entries."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from raffia.tensordict.entries import NO_DEFAULT, get
from raffia.tensordict.node import Container, Node
from raffia.tensordict.views import every


def detach(td: Container) -> Container:
    """The container with its tensors detached from the autograd graph.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2, requires_grad=True)).detach().requires_grad
    False
    """
    out = td._map(Tensor.detach)
    return out.lock_() if td._locked else out


def detach_(td: Container) -> Container:
    """Detach the tensors from the autograd graph (inplace).

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2, requires_grad=True)).detach_().requires_grad
    False
    """
    for leaf in td._leaves([]):
        if leaf.requires_grad:
            leaf.detach_()
    return td


if TYPE_CHECKING:
    Owner = TypeVar("Owner")  # the class of the container

    class Data:
        """The type of the property `data`, for type checkers."""

        def __get__(self, td: Owner, kind: Any) -> Owner: ...
        def __set__(self, td: Any, value: Node | Mapping[str, Any]) -> None: ...

    class Grad:
        """The type of the property `grad`, for type checkers."""

        def __get__(self, td: Owner, kind: Any) -> Owner | None: ...


def data(td: Container) -> Container:
    """The container of the tensors' `data`.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2, requires_grad=True)).data.requires_grad
    False
    """
    out = td._map(attrgetter("data"))
    return out.lock_() if td._locked else out


def set_data(td: Any, value: Any) -> None:
    data(td).update_(value)


def grad(td: Container) -> Container | None:
    """The container of the tensors' gradients, without the missing ones; None if all are missing.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.zeros(2, requires_grad=True))
    >>> (3 * td["a"]).sum().backward()
    >>> td.grad["a"]
    tensor([3., 3.])
    """
    out = td.apply(lambda leaf: leaf.grad) if td._leaves([]) else None
    return out.lock_() if out is not None and td._locked else out


def requires_grad(td: Any) -> bool:
    """Whether any entry requires a gradient.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2)).requires_grad
    False
    """
    return not every(td, lambda leaf: not leaf.requires_grad)


def requires_grad_(td: Container, requires_grad: bool = True) -> Container:
    """Set whether all entries require a gradient.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2)).requires_grad_().requires_grad
    True
    """
    for leaf in td._leaves([]):
        leaf.requires_grad_(requires_grad)
    return td


def zero_grad(td: Container, set_to_none: bool = True) -> Container:
    """Remove the gradients of all entries, or fill them with zeros.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2, requires_grad=True)).zero_grad().grad is None
    True
    """
    for leaf in td._leaves([]):
        if leaf.grad is not None:
            if set_to_none:
                leaf.grad = None
            else:
                leaf.grad.zero_()
    return td


def backward(
    td: Any,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Accumulate gradients of all entries, as `torch.autograd.backward` does.

    gradient: container with the gradient of each entry; not needed for entries of one element.
    inputs: tensors, or a container of them, to accumulate into.

    >>> from raffia import TensorDict
    >>> x = torch.ones(2, requires_grad=True)
    >>> TensorDict(a=x.sum()).backward()
    >>> x.grad
    tensor([1., 1.])
    """
    leaves = [leaf for leaf in td._leaves([]) if leaf.requires_grad]
    if not leaves:
        raise RuntimeError("backward: no entry requires a gradient, so there is nothing to compute")
    grads = None
    if gradient is not None:
        grads = [
            get(gradient, key, NO_DEFAULT)
            for key, leaf in td.items(True, True)
            if leaf.requires_grad
        ]
    if isinstance(inputs, Node):
        inputs = inputs._leaves([])
    torch.autograd.backward(leaves, grads, retain_graph, create_graph, inputs=inputs)
