"""The last layers of networks, fixed or evolvable: value, value prefix, policy and consistency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raffia.algorithms.efficientzero.config import check_heads
from raffia.hints import check_choice
from raffia.nn.blocks import RELU, mlp
from raffia.nn.evolvable import EvolvableMLP

EXPONENTS = (-20.0, 2.0)  # the least and the greatest logarithm of a standard deviation
_NAMES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.GELU: "gelu",
    nn.ELU: "elu",
    nn.SiLU: "silu",
    nn.Tanh: "tanh",
}


class LargestHead(NamedTuple):
    """The largest form of a head in a population whose networks change their form.

    >>> LargestHead(num_layers=3, num_nodes=128).num_layers
    3
    """

    num_layers: int
    num_nodes: int  # nodes of each layer


class HeadOptions(NamedTuple):
    """The options that all heads of a network share.

    >>> HeadOptions(norm_type="BN", zero_last=True).largest is None
    True
    """

    norm_type: str | None = None
    activation: nn.Module = RELU  # of which each layer gets a copy
    zero_last: bool = False  # whether a new head outputs 0
    largest: LargestHead | None = None  # how far its form can change; None: not at all


def head(sizes: Sequence[int], options: HeadOptions) -> nn.Module:
    """`mlp` of these sizes; with `largest` an `EvolvableMLP` that begins with as many nodes.

    An evolvable head is as wide between its layers as these have nodes, and has no normalisation.

    >>> import torch
    >>> network = head([8, 4, 2], HeadOptions(zero_last=True, largest=LargestHead(3, 16)))
    >>> network(torch.ones(1, 8)), network.num_nodes
    (tensor([[0., 0.]], grad_fn=<AddmmBackward0>), [4, 0, 0])
    """
    norm_type, activation, zero_last, largest = options
    if largest is None:
        return mlp(sizes, norm_type=norm_type, activation=activation, zero_last=zero_last)
    first, *hidden, last = sizes
    check_heads(hidden, largest.num_layers, largest.num_nodes)
    if type(activation) not in _NAMES:
        raise ValueError(
            f"activation={activation} is not supported in an evolvable head: choose one of "
            f"{', '.join(kind.__name__ for kind in _NAMES)}"
        )
    network = EvolvableMLP(
        first,
        last,
        width=hidden[0],
        num_layers=len(hidden),
        num_nodes=hidden[0],
        max_layers=largest.num_layers,
        max_nodes=largest.num_nodes,
        activation=_NAMES[type(activation)],
    )
    if zero_last:
        nn.init.zeros_(network.out.weight)
        nn.init.zeros_(network.out.bias)
    return network


class GaussianHead(nn.Module):
    """Mean and standard deviation of each number of an action, of which sampled actions are drawn.

    sizes: of the input, the hidden layers and the action.
    sigma_type: "conditioned", where it is the network's too, or "fixed".
    fixed_sigma_value: the standard deviation if it is fixed.
    options: with `zero_last` both start at the same for any input: mean 0, standard deviation 1 (or
        fixed).

    The exponent of sigma is clamped to `EXPONENTS`.

    >>> GaussianHead([4, 8, 1], HeadOptions(zero_last=True), "fixed", 0.3)(torch.ones(2, 4))
    tensor([[0.0000, 0.3000],
            [0.0000, 0.3000]], grad_fn=<CatBackward0>)
    """

    def __init__(
        self, sizes: Sequence[int], options: HeadOptions, sigma_type: str, fixed_sigma_value: float
    ) -> None:
        super().__init__()
        *sizes, self.action_size = sizes
        self.fixed_sigma = fixed_sigma_value if sigma_type == "fixed" else None
        num_outputs = self.action_size * (1 if sigma_type == "fixed" else 2)
        self.net = head([*sizes, num_outputs], options)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, size] -> [B, 2 * action_size]: the means, then the standard deviations."""
        output = self.net(x)
        if self.fixed_sigma is not None:
            return torch.cat([output, torch.full_like(output, self.fixed_sigma)], -1)
        mean, exponent = output.chunk(2, -1)
        return torch.cat([mean, exponent.clamp(*EXPONENTS).exp()], -1)


def policy_head(
    sizes: Sequence[int],
    options: HeadOptions,
    sigma_type: str | None,
    fixed_sigma_value: float,
    gaussian_head: str = "mlp",
) -> nn.Module:
    """Logits over sizes[-1] actions, or a `GaussianHead` where `sigma_type` is given.

    gaussian_head: "mlp" for a `GaussianHead` of these sizes and options; "reparameterization" for
        two hidden layers as wide as the input, with ReLU and without normalisation, as in
        DI-engine's ReparameterizationHead, which LightZero's Sampled EfficientZero has.

    >>> policy_head([4, 8, 3], HeadOptions(), None, 0.3)(torch.zeros(2, 4)).shape
    torch.Size([2, 3])
    """
    check_gaussian(sigma_type or "fixed", fixed_sigma_value, gaussian_head)
    if sigma_type is None:
        return head(sizes, options)
    if gaussian_head == "reparameterization":
        sizes = [sizes[0]] * 3 + [sizes[-1]]
        options = HeadOptions(zero_last=options.zero_last)
    return GaussianHead(sizes, options, sigma_type, fixed_sigma_value)


def check_gaussian(sigma_type: str, fixed_sigma_value: float, gaussian_head: str = "mlp") -> None:
    """Raise ValueError for options that `policy_head` does not have, even if no head is built.

    >>> check_gaussian("free", 0.3)
    Traceback (most recent call last):
    ...
    ValueError: sigma_type='free' must be one of 'conditioned', 'fixed'
    """
    check_choice("sigma_type", sigma_type, ("conditioned", "fixed"))
    check_choice("gaussian_head", gaussian_head, ("mlp", "reparameterization"))
    if not 0 < fixed_sigma_value < math.inf:
        raise ValueError(
            f"fixed_sigma_value={fixed_sigma_value} is not a valid standard deviation: pass a "
            "number > 0"
        )
