"""Networks whose outputs for a row are the same bits, whichever other rows are in the batch.

On a CPU they need not be. A matrix product's order of sums depends on how many rows it is given:
MKL takes other kernels for one row, for a few, and for what is left of 16. A function of elements
is computed for 32 at a time, and what is left is computed by another approximation. In whole blocks
of rows every row gets the same; so blocks are filled up with zeros. A convolution by more than one
pixel depends on the number of images only where there is one. All this holds for one thread:
several share out the terms of a long sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from raffia.algorithms.efficientzero.heads import GaussianHead
from raffia.nn.evolvable import EvolvableMLP

BLOCK = 16  # rows of a product
ELEMENTS = 32  # of a function


def filled_up(x: Tensor, size: int = BLOCK) -> Tensor:
    """Pad x [B, ...] with zeros to a multiple of `size` rows.

    >>> filled_up(torch.ones(3, 4)).shape
    torch.Size([16, 4])
    """
    missing = -len(x) % size
    return torch.constant_pad_nd(x, [0, 0] * (x.dim() - 1) + [0, missing]) if missing else x


def in_blocks(function: Callable[[Tensor], Tensor], x: Tensor, size: int = BLOCK) -> Tensor:
    """`function(x)` [B, ...], called with x filled up.

    >>> in_blocks(lambda x: x + len(x), torch.zeros(3, 1)).tolist()
    [[16.0], [16.0], [16.0]]
    """
    filled = filled_up(x, size)
    return function(x) if filled is x else function(filled)[: len(x)]


class RowInvariantConv2d(nn.Conv2d):
    """`nn.Conv2d` of images [B, C, H, W], with its weights in any order of memory.

    >>> layer = RowInvariantConv2d(3, 4, 3)
    >>> x = torch.rand(7, 3, 6, 6)
    >>> layer(x)[2:3].equal(layer(x[2:3]))
    True
    """

    def forward(self, x: Tensor) -> Tensor:
        """The outputs [B, out_channels, H', W']."""
        if x.dim() != 4:
            return super().forward(x)
        x = x.permute(0, 2, 3, 1).contiguous()  # another order in memory has other sums
        is_plain = self.stride == (1, 1) and self.groups == 1 and self.padding in (0, (0, 0))
        if is_plain and self.kernel_size == (1, 1):
            product = partial(nn.functional.linear, weight=self.weight.flatten(1), bias=self.bias)
            pixels = in_blocks(product, x.flatten(0, 2))
            return pixels.view(*x.shape[:3], -1).permute(0, 3, 1, 2)
        is_product = x.shape[1:3] == (1, 1)
        return in_blocks(
            self._by_channels_last, x, BLOCK if is_product else 2 if len(x) == 1 else 1
        )

    def _by_channels_last(self, x: Tensor) -> Tensor:
        x = x.flatten().view(x.shape)  # of one pixel, strides could be any
        return super().forward(x.permute(0, 3, 1, 2))


class _InBlocks:
    """Applies a module to rows in blocks."""

    _size = BLOCK

    def forward(self, x: Tensor) -> Tensor:
        return in_blocks(super().forward, x, self._size)  # type: ignore[misc]


class _Sequential(_InBlocks, nn.Sequential): ...


class _EvolvableMLP(_InBlocks, EvolvableMLP):
    _size = ELEMENTS  # it has functions of elements within


class _GaussianHead(_InBlocks, GaussianHead): ...


class _OfElements:
    """Applies an elementwise function in blocks."""

    def forward(self, x: Tensor) -> Tensor:
        function: Callable[[Tensor], Tensor] = super().forward  # type: ignore[misc]
        if x.numel() % ELEMENTS == 0:
            return function(x)
        return in_blocks(function, x.flatten(), ELEMENTS).view(x.shape)


class _GELU(_OfElements, nn.GELU): ...


class _SiLU(_OfElements, nn.SiLU): ...


class _ELU(_OfElements, nn.ELU): ...


class _Tanh(_OfElements, nn.Tanh): ...


class _Sigmoid(_OfElements, nn.Sigmoid): ...


class _Softplus(_OfElements, nn.Softplus): ...


class _Mish(_OfElements, nn.Mish): ...


_FORMS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: RowInvariantConv2d,
    nn.GELU: _GELU,
    nn.SiLU: _SiLU,
    nn.ELU: _ELU,
    nn.Tanh: _Tanh,
    nn.Sigmoid: _Sigmoid,
    nn.Softplus: _Softplus,
    nn.Mish: _Mish,
    EvolvableMLP: _EvolvableMLP,
}
_HEADS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Sequential: _Sequential,
    GaussianHead: _GaussianHead,
}


def row_invariant(network: nn.Module) -> None:
    """Make a network row-invariant by changing the classes of its layers.

    Linear layers are, as parts of heads behind convolutions; others want blocks of 16 rows.

    >>> network = nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU())
    >>> row_invariant(network)
    >>> network[0]
    RowInvariantConv2d(2, 3, kernel_size=(1, 1), stride=(1, 1))
    """
    has_images = any(isinstance(part, nn.Conv2d) for part in network.modules())
    for part in network.modules():
        kinds = {type(inner) for inner in part.modules()}
        is_head = nn.Linear in kinds and not kinds & {nn.Conv2d, RowInvariantConv2d}
        part.__class__ = _FORMS.get(type(part), type(part))
        if has_images and is_head:
            part.__class__ = _HEADS.get(type(part), type(part))
