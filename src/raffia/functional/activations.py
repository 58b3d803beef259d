"""Activation functions by index, so that members of a population can have different ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import elu, gelu, relu, silu

from raffia.functional.trees import is_traced

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": relu,
    "gelu": gelu,
    "elu": elu,
    "silu": silu,
    "tanh": torch.tanh,
}
_FUNCTIONS = tuple(ACTIVATIONS.values())


def activate(x: Tensor, number: Tensor) -> Tensor:
    """Apply the activation with this index [] in `ACTIVATIONS` to x.

    Under `torch.vmap`, where each member has its own, all of them are computed.

    >>> activate(torch.tensor([-1.0, 2.0]), torch.tensor(0))
    tensor([0., 2.])
    """
    if not is_traced():
        return _FUNCTIONS[int(number)](x)
    out = _FUNCTIONS[0](x)
    for other, function in enumerate(_FUNCTIONS[1:], 1):
        out = torch.where(number == other, function(x), out)
    return out
