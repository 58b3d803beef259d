"""Functions that map what a network puts out to a positive scale, and their names."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from raffia.tensordict.keys import nearest

Mapping = Callable[[Tensor], Tensor]

_SMALLEST = 1e-6  # of exp(bias) - 1, so that a bias of 0 or less has an inverse too


def inv_softplus(bias: float | Tensor) -> float | Tensor:
    """The x with softplus(x) = bias: log(exp(bias) - 1), finite for bias <= 0 as well.

    >>> inv_softplus(torch.tensor([1.0, 2.0]))
    tensor([0.5413, 1.8546])
    """
    if not isinstance(bias, Tensor):
        return inv_softplus(torch.tensor(bias, dtype=torch.float64)).item()  # type: ignore[union-attr]
    # bias + log(1 - exp(-bias)) does not overflow; clamped are the biases whose exp(bias) - 1 is.
    bias = bias.clamp(min=math.log1p(_SMALLEST))
    return bias + torch.log(-torch.expm1(-bias))


class biased_softplus(nn.Module):  # noqa: N801 # the name users of tensordict know
    """A softplus that is `bias` at 0 and stays above `min_val`.

    bias: the output for an input of 0.
    min_val: lower bound of the output.
    The attribute `bias` is the number added to the input.

    >>> biased_softplus(2.0)(torch.tensor([-100.0, 0.0]))
    tensor([0.0100, 2.0000])
    """

    def __init__(self, bias: float, min_val: float = 0.01) -> None:
        super().__init__()
        self.bias = inv_softplus(bias - min_val)
        self.min_val = min_val

    def forward(self, x: Tensor) -> Tensor:
        """The scale for what the network gave."""
        return softplus(x + self.bias) + self.min_val


def expln(x: Tensor) -> Tensor:
    """exp(x) up to 0 and 1 + log(1 + x) above: positive, smooth and slow to grow.

    Source: Rueckstiess et al. (2008), State-Dependent Exploration for Policy Gradient Methods.

    >>> expln(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([0.3679, 1.0000, 1.6931])
    """
    # Each branch sees only its own side: where the other overflows, its gradient would be NaN.
    return torch.where(x > 0, 1 + torch.log1p(x.clamp(min=0)), torch.exp(x.clamp(max=0)))


def _identity(x: Tensor) -> Tensor:
    return x


_mappings: dict[str, Mapping] = {
    "softplus": softplus,
    "exp": torch.exp,
    "relu": torch.relu,
    "expln": expln,
    "none": _identity,
}


def mappings(key: str) -> Mapping:
    """The function that a name stands for.

    key: "softplus", "exp", "relu", "expln", "none" (the identity), "biased_softplus" (with bias
        1), "biased_softplus_{bias}", "biased_softplus_{bias}_{min_val}", or a name given to
        `add_custom_mapping`.
    Raises NotImplementedError for a name that is not known, and ValueError for a "biased_softplus"
    without numbers in their place.

    >>> mappings("biased_softplus_2.0_0.1")(torch.zeros(2))
    tensor([2., 2.])
    """
    if not isinstance(key, str):
        raise TypeError(f'a mapping is given by its name, such as "softplus"; got {key!r}')
    if key in _mappings:
        return _mappings[key]
    if key.startswith("biased_softplus"):
        return _biased(key)
    known = [*_mappings, "biased_softplus"]
    raise NotImplementedError(
        f"Unknown mapping {key}; the mappings are {sorted(known)}{nearest(key, known) or '.'} "
        "To add one: add_custom_mapping(name, function)"
    )


def _biased(key: str) -> biased_softplus:
    name, *numbers = key.split("_softplus")[1].split("_")
    if name or len(numbers) > 2:
        raise ValueError(
            f"Invalid number of args in {key}: write biased_softplus, biased_softplus_{{bias}} or "
            "biased_softplus_{bias}_{min_val}"
        )
    try:
        return biased_softplus(*map(float, numbers or ["1.0"]))
    except ValueError as error:
        raise ValueError(
            f'{error} in "{key}": write numbers, such as biased_softplus_1.0_0.01'
        ) from None


def add_custom_mapping(name: str, mapping: Mapping) -> None:
    """Give a function a name that `mappings` knows from now on; a name that exists is replaced.

    name: the name.
    mapping: a function from a tensor to a tensor of the same shape.

    >>> add_custom_mapping("halved", lambda x: x / 2)
    >>> mappings("halved")(torch.ones(2))
    tensor([0.5000, 0.5000])
    """
    if not isinstance(name, str) or not callable(mapping):
        raise TypeError(
            "add_custom_mapping takes a name and a function, as in "
            f'add_custom_mapping("twice", lambda x: 2 * x); got {name!r} and {mapping!r}'
        )
    _mappings[name] = mapping
