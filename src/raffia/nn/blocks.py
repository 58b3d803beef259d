"""Layers that networks are built from: MLPs, residual blocks, an LSTM step, normalisation."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from raffia.hints import check_choice

RELU = nn.ReLU(inplace=True)  # only ever copied


def norm_of_vectors(norm_type: str, size: int) -> nn.Module:
    """Normalisation of [B, size]: "BN" by BatchNorm, "LN" by LayerNorm.

    >>> norm_of_vectors("LN", 3).normalized_shape
    (3,)
    """
    check_norm_type(norm_type)
    return nn.BatchNorm1d(size) if norm_type == "BN" else nn.LayerNorm(size)


def norm_of_images(norm_type: str, shape: Sequence[int]) -> nn.Module:
    """Normalisation of [B, C, H, W], shape = (C, H, W): "BN" for each channel over the batch,
    "LN" over each image, with a weight for each of its C H W numbers.

    >>> norm_of_images("BN", (3, 6, 6)).num_features
    3
    """
    check_norm_type(norm_type)
    return nn.BatchNorm2d(shape[0]) if norm_type == "BN" else nn.LayerNorm(list(shape))


def check_norm_type(norm_type: str) -> None:
    """Raise ValueError for any `norm_type` other than "BN" and "LN".

    >>> check_norm_type("GN")
    Traceback (most recent call last):
    ...
    ValueError: norm_type='GN' must be one of 'BN', 'LN': BatchNorm or LayerNorm
    """
    check_choice("norm_type", norm_type, ("BN", "LN"), ": BatchNorm or LayerNorm")


def mlp(
    sizes: Sequence[int],
    *,
    norm_type: str | None = None,
    activation: nn.Module = RELU,
    norm_last: bool = False,
    zero_last: bool = False,
) -> nn.Sequential:
    """An MLP: linear layers, each but the last followed by normalisation and activation.

    sizes: of the input, the hidden layers and the output.
    norm_type: "BN" or "LN", None for none.
    activation: of which each layer gets a copy.
    norm_last: normalisation and activation after the last layer, too.
    zero_last: weights and bias of the last layer start at 0.

    >>> mlp([4, 8, 2])(torch.zeros(3, 4)).shape
    torch.Size([3, 2])
    """
    layers: list[nn.Module] = []
    for i, (size_in, size_out) in enumerate(pairwise(sizes), start=1):
        linear = nn.Linear(size_in, size_out)
        layers.append(linear)
        if i < len(sizes) - 1 or norm_last:
            if norm_type is not None:
                layers.append(norm_of_vectors(norm_type, size_out))
            layers.append(copy.deepcopy(activation))
        elif zero_last:
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
    return nn.Sequential(*layers)


class DirectSequential(nn.Sequential):
    """`nn.Sequential` of layers without hooks: it runs them without the cost of a module's call.

    >>> layers = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> direct = DirectSequential(*layers)
    >>> direct(torch.ones(1, 2)).equal(layers(torch.ones(1, 2)))
    True
    """

    def forward(self, x: Tensor) -> Tensor:
        """The last layer's output."""
        for layer in self._modules.values():
            x = layer.forward(x)
        return x


def run_directly(network: nn.Module) -> None:
    """Make each `nn.Sequential` in a network a `DirectSequential`, unless a layer has hooks.

    >>> network = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> run_directly(network)
    >>> type(network).__name__
    'DirectSequential'
    """
    for part in network.modules():
        if type(part) is nn.Sequential and not any(map(has_hooks, part)):
            part.__class__ = DirectSequential


def has_hooks(layer: nn.Module) -> bool:
    """Whether a layer's call does more than its `forward`.

    >>> layer = nn.Linear(2, 3)
    >>> has_hooks(layer), has_hooks(nn.utils.spectral_norm(layer))
    (False, True)
    """
    return bool(layer._forward_pre_hooks or layer._forward_hooks)


class ResidualBlock(nn.Module):
    """A residual block of two 3x3 convolutions, for images of one shape.

    stride: 2 halves height and width (n becomes ceil(n / 2)); the input is then added through a
        third convolution, without normalisation.

    Source: He et al. (2016); the block with stride is EfficientZero's.

    >>> ResidualBlock((4, 7, 7), out_channels=8, stride=2)(torch.zeros(2, 4, 7, 7)).shape
    torch.Size([2, 8, 4, 4])
    """

    def __init__(
        self,
        in_shape: Sequence[int],  # (channels, height, width)
        out_channels: int | None = None,  # as many as in the input
        stride: int = 1,
        activation: nn.Module = RELU,
        norm_type: str = "BN",
    ) -> None:
        super().__init__()
        channels, height, width = in_shape
        out = channels if out_channels is None else out_channels
        if stride == 1 and out != channels:
            raise ValueError(
                f"a block of stride 1 adds its input of {channels} channels to its output, which "
                f"therefore cannot have {out}: pass stride=2, or leave out_channels out"
            )
        shape = (out, -(-height // stride), -(-width // stride))
        self.conv1 = nn.Sequential(
            conv3x3(channels, out, stride),
            norm_of_images(norm_type, shape),
            copy.deepcopy(activation),
        )
        self.conv2 = nn.Sequential(conv3x3(out, out), norm_of_images(norm_type, shape))
        self.conv3 = nn.Sequential(conv3x3(channels, out, stride)) if stride > 1 else None
        self.activation = copy.deepcopy(activation)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.conv3 is None else self.conv3(x)
        return self.activation(self.conv2(self.conv1(x)) + identity)


def conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias that keeps height and width, or makes n into ceil(n / stride).

    >>> conv3x3(3, 8, stride=2)(torch.zeros(2, 3, 5, 4)).shape
    torch.Size([2, 8, 3, 2])
    """
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)


class LSTMStep(nn.Module):
    """One step of a one-layer LSTM; parameters are named, laid out and drawn as in `nn.LSTM`.

    Unlike `nn.LSTM` it runs under vmap and compiles without a graph break.

    >>> h, c = LSTMStep(4, 3)(torch.ones(2, 4), (torch.zeros(2, 3), torch.zeros(2, 3)))
    >>> h.shape, c.shape
    (torch.Size([2, 3]), torch.Size([2, 3]))
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        gates = 4 * hidden_size  # input, forget, cell, output
        self.weight_ih_l0 = nn.Parameter(torch.empty(gates, input_size))
        self.weight_hh_l0 = nn.Parameter(torch.empty(gates, hidden_size))
        self.bias_ih_l0 = nn.Parameter(torch.empty(gates))
        self.bias_hh_l0 = nn.Parameter(torch.empty(gates))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters again."""
        bound = 1 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self,
        x: Tensor,  # [B, input_size]
        state: tuple[Tensor, Tensor],  # h, c: each [B, hidden_size]
    ) -> tuple[Tensor, Tensor]:
        """The next h, which is the output, and c."""
        h, c = state
        # written out, for torch.lstm_cell has no batching rule
        gates = linear(x, self.weight_ih_l0, self.bias_ih_l0)
        gates = gates + linear(h, self.weight_hh_l0, self.bias_hh_l0)
        let_in, keep, new, let_out = gates.chunk(4, -1)
        c = keep.sigmoid() * c + let_in.sigmoid() * new.tanh()
        return let_out.sigmoid() * c.tanh(), c

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}"


class SimNorm(nn.Module):
    """Simplicial normalisation: a softmax over each group of `group_size` neighbouring features.

    Source: Hansen et al. (2024), TD-MPC2, section 3.1.

    >>> SimNorm(2)(torch.tensor([[0.0, 0.0, 9.0, -9.0]])).round()
    tensor([[0., 0., 1., 0.]])
    """

    def __init__(self, group_size: int = 8) -> None:
        super().__init__()
        self.group_size = group_size

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.group_size)).softmax(-1).flatten(-2)

    def extra_repr(self) -> str:
        return f"group_size={self.group_size}"
