"""The last layers of value, policy and value prefix, of a fixed or an evolvable form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypedDict

from torch import nn

from raffia.algorithms.efficientzero.config import check_heads
from raffia.nn.blocks import RELU, mlp
from raffia.nn.evolvable import EvolvableMLP

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


class HeadOptions(TypedDict, total=False):
    """What all heads of a network have in common: the keywords of `head`.

    >>> options: HeadOptions = {"norm_type": "BN", "zero_last": True}
    """

    norm_type: str | None
    activation: nn.Module
    zero_last: bool
    largest: LargestHead | None


def head(
    sizes: Sequence[int],
    *,
    norm_type: str | None = None,
    activation: nn.Module = RELU,
    zero_last: bool = False,
    largest: LargestHead | None = None,
) -> nn.Module:
    """`mlp` of these sizes; with `largest` an `EvolvableMLP` that begins with as many nodes.

    An evolvable head is as wide between its layers as these have nodes, and has no normalisation.
    With `zero_last` it gives 0 at first, too.

    >>> import torch
    >>> network = head([8, 4, 2], zero_last=True, largest=LargestHead(3, 16))
    >>> network(torch.ones(1, 8)), network.num_nodes
    (tensor([[0., 0.]], grad_fn=<AddmmBackward0>), [4, 0, 0])
    """
    if largest is None:
        return mlp(sizes, norm_type=norm_type, activation=activation, zero_last=zero_last)
    first, *hidden, last = sizes
    check_heads(hidden, largest.num_layers, largest.num_nodes)
    if type(activation) not in _NAMES:
        raise ValueError(
            f"activation={activation}: a head that can change its form begins with one of "
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
