"""Plain networks of linear layers, read off modules and written as a `DenseProgram`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raffia.functional.transforms import Support
from raffia.jit.dense_program import ColumnBuffer, DenseProgram
from raffia.nn.blocks import DirectSequential


class Layer(NamedTuple):
    """A linear layer with its bias and activation."""

    linear: nn.Linear
    norm: nn.LayerNorm | None = None
    activation: str | None = None  # "relu", "gelu" (the approximation by tanh)


class Heads(NamedTuple):
    """The layers from a latent state to value and policy."""

    common: list[Layer]
    value: list[Layer]
    policy: list[Layer]
    support: Support | None  # support of the value


class CompiledLayers:
    """A program in the making, and the tensors that its parameters are copied from.

    >>> from torch import nn
    >>> layers = CompiledLayers()
    >>> network = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    >>> out = layers.mlp(read_layers(network), layers.program.read("x", 3))
    >>> layers.program.write(out, "y")
    >>> layers.load()
    >>> x, y = torch.ones(4, 3), torch.empty(4, 2)
    >>> layers.program.bind({"x": x, "y": y})(4)
    >>> torch.testing.assert_close(y, network(x))
    """

    def __init__(self) -> None:
        self.program = DenseProgram()
        self.parameters: list[Tensor] = []
        self._loaded = False

    def mlp(
        self,
        layers: list[Layer],
        inputs: ColumnBuffer,
        *,
        onto: ColumnBuffer | None = None,  # holds what the first layer's sums start with
        added: ColumnBuffer | None = None,  # to the result
        out: ColumnBuffer | None = None,
        behind: float = 0.0,
    ) -> ColumnBuffer:
        """Add layers one after the other.

        Where the first one has more inputs than there are, `onto` holds what the rest gives.
        """
        for number, (linear, norm, activation) in enumerate(layers, start=1):
            last = number == len(layers)
            self.parameters.append(linear.weight[:, : inputs.width])
            if onto is None:
                self.parameters.append(linear.bias)
            relu = activation == "relu"
            to_add = added if last else None
            result = self.program.dense(
                inputs,
                linear.out_features,
                relu=relu and norm is None,
                onto=onto,
                added=None if norm else to_add,
                out=out if last else None,
                behind=behind if last else 0.0,
            )
            if norm is not None:
                self.parameters += [norm.weight, norm.bias]
                self.program.norm(result, norm.eps, relu=relu, added=to_add)
            if activation == "gelu":
                self.program.gelu(result)
            if number > 1:
                self.program.reuse(inputs)
            inputs, onto = result, None
        return inputs

    def scalar(
        self, layers: list[Layer], inputs: ColumnBuffer, array: str, support: Support | None
    ) -> None:
        """Add layers, then the decoding of their output as a value."""
        logits = self.mlp(layers, inputs, behind=0.0 if support is None else -math.inf)
        if support is not None:
            self.parameters.append(support.values())
        self.program.decode(logits, array)
        self.program.reuse(logits)

    def heads(self, heads: Heads, latent: ColumnBuffer) -> None:
        """Add the heads, which write the arrays "value" and "prior_logits"."""
        common = self.mlp(heads.common, latent)
        self.scalar(heads.value, common, "value", heads.support)
        self.program.write(self.mlp(heads.policy, common), "prior_logits")

    def load(self) -> None:
        """Load the present parameters."""
        if self._loaded:
            self.program.reload()
        else:
            self.program.load(self.parameters)
        self._loaded = True


def read_layers(network: nn.Module) -> list[Layer] | None:
    """The layers of a plain network, None if it has others.

    >>> from torch import nn
    >>> layers = read_layers(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.ReLU()))
    >>> [layer.activation for layer in layers]
    ['relu']
    >>> read_layers(nn.Sequential(nn.Linear(3, 2), nn.Dropout())) is None
    True
    """
    plain = type(network) in (nn.Sequential, DirectSequential)
    if not (plain and isinstance(network, nn.Sequential)):
        return None
    layers: list[Layer] = []
    for part in network:
        if type(part) is nn.Linear and part.bias is not None:
            layers.append(Layer(part))
        elif type(part) is not nn.Identity:
            layer = _with(layers[-1], part) if layers else None
            if layer is None:
                return None
            layers[-1] = layer
    return layers


def _with(layer: Layer, part: nn.Module) -> Layer | None:
    if layer.activation is not None:
        return None
    if type(part) is nn.ReLU:
        return layer._replace(activation="relu")
    if isinstance(part, nn.GELU) and part.approximate == "tanh":
        return layer._replace(activation="gelu")
    if type(part) is nn.LayerNorm and layer.norm is None and part.bias is not None:
        return layer._replace(norm=part)
    return None


def all_layers(networks: Sequence[nn.Module]) -> list[list[Layer]] | None:
    """The layers of several networks, None if one of them has others."""
    read = [layers for network in networks if (layers := read_layers(network)) is not None]
    return read if len(read) == len(networks) else None


def is_float32_here(tensor: Tensor) -> bool:
    """Whether compiled code can read the tensor.

    >>> is_float32_here(torch.zeros(1)), is_float32_here(torch.zeros(1, dtype=torch.int64))
    (True, False)
    """
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"
