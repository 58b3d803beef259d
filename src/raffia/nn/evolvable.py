"""An MLP whose depth, width and activation are data, so that different ones can be stacked.

Legend: L layers and N nodes of each that there can be at most, D the width between them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from raffia.functional.activations import ACTIVATIONS, activate
from raffia.functional.trees import is_traced
from raffia.hints import check_choice

NAMES = tuple(ACTIVATIONS)


class EvolvableMLP(nn.Module):
    """A residual MLP whose depth and width can grow up to a largest size.

        x <- E x;   x <- x + gate_l O_l (mask_l * act(I_l x))  for all L layers;   y = F x

    Absent layers and nodes have gate or mask 0, so that they have no effect and no gradient. The
    gates [L], masks [L, N] and the activation's number are buffers: under `torch.vmap` each member
    has its own. `raffia.evolution` adds a layer with O_l = 0 and a node with its column of O_l
    zero, which change nothing at first.

    in_features, out_features: of x and y.
    width: D.
    num_layers, num_nodes: at the start; at most max_layers (L), max_nodes (N).
    activation: of `raffia.functional.activations.ACTIVATIONS`.

    >>> network = EvolvableMLP(4, 2, num_layers=1, num_nodes=8, max_layers=3, max_nodes=16)
    >>> network(torch.zeros(5, 4)).shape, network.layer_gate.tolist(), network.num_nodes
    (torch.Size([5, 2]), [1.0, 0.0, 0.0], [8, 0, 0])
    """

    layer_gate: Tensor
    width_mask: Tensor
    activation: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        width: int = 64,
        num_layers: int = 1,
        num_nodes: int = 64,
        max_layers: int = 3,
        max_nodes: int = 128,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        if not 1 <= num_layers <= max_layers or not 1 <= num_nodes <= max_nodes:
            raise ValueError(
                f"num_layers={num_layers} must be in 1..{max_layers} (max_layers), and "
                f"num_nodes={num_nodes} in 1..{max_nodes} (max_nodes)"
            )
        check_choice("activation", activation, NAMES)
        self.embed = nn.Linear(in_features, width)
        self.inner_weight = nn.Parameter(torch.empty(max_layers, max_nodes, width))
        self.inner_bias = nn.Parameter(torch.empty(max_layers, max_nodes))
        self.outer_weight = nn.Parameter(torch.empty(max_layers, width, max_nodes))
        self.outer_bias = nn.Parameter(torch.zeros(max_layers, width))
        self.out = nn.Linear(width, out_features)
        layer, node = torch.arange(max_layers), torch.arange(max_nodes)
        there = (layer < num_layers).unsqueeze(1) & (node < num_nodes)
        self.register_buffer("layer_gate", (layer < num_layers).float())
        self.register_buffer("width_mask", there.float())
        self.register_buffer("activation", torch.tensor(NAMES.index(activation)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights as `nn.Linear` does, by how many numbers a node reads at the start."""
        nodes = max(1, int(self.width_mask[0].sum()))
        for weight, fan in (
            (self.inner_weight, self.inner_weight.shape[2]),
            (self.outer_weight, nodes),
        ):
            nn.init.uniform_(weight, -(fan**-0.5), fan**-0.5)
        bound = self.inner_weight.shape[2] ** -0.5
        nn.init.uniform_(self.inner_bias, -bound, bound)
        nn.init.zeros_(self.outer_bias)

    @property
    def num_nodes(self) -> list[int]:
        """Width of each layer; 0 for a layer that is switched off."""
        found: list[int] = (self.width_mask * self.layer_gate.unsqueeze(1)).sum(1).int().tolist()
        return found

    def features(self, x: Tensor) -> Tensor:
        """Features of the last hidden layer: x [..., in_features] -> [..., width]."""
        x = self.embed(x)
        for layer in self._computed():
            nodes = linear(x, self.inner_weight[layer], self.inner_bias[layer])
            nodes = activate(nodes, self.activation)
            change = linear(
                nodes * self.width_mask[layer], self.outer_weight[layer], self.outer_bias[layer]
            )
            x = x + self.layer_gate[layer] * change
        return x

    def _computed(self) -> Iterable[int]:
        """The layers that are switched on; all of them, where the gates cannot be read."""
        if is_traced() or self.layer_gate.device.type != "cpu":
            return range(len(self.layer_gate))
        return [layer for layer, gate in enumerate(self.layer_gate.tolist()) if gate]

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        out: Tensor = self.out(self.features(x))
        return out
