"""The two networks that consistency is learned with."""

from __future__ import annotations

from torch import nn

from raffia.nn.blocks import RELU, mlp, norm_of_vectors


def projection(
    size: int, hidden: int, out: int, activation: nn.Module = RELU, norm_type: str = "BN"
) -> nn.Sequential:
    """Three layers, all with normalisation, the last without activation.

    Source: Chen & He (2021), SimSiam; sizes: Ye et al. (2021), appendix A.1.

    >>> projection(8, hidden=16, out=4)(torch.zeros(2, 8)).shape
    torch.Size([2, 4])
    """
    layers = mlp([size, hidden, hidden, out], norm_type=norm_type, activation=activation)
    return layers.append(norm_of_vectors(norm_type, out))


def prediction_head(
    size: int, hidden: int, out: int, activation: nn.Module = RELU, norm_type: str = "BN"
) -> nn.Sequential:
    """Two layers that predict the projection of the observed state from that of the imagined one.

    >>> prediction_head(4, hidden=2, out=4)(torch.zeros(2, 4)).shape
    torch.Size([2, 4])
    """
    return mlp([size, hidden, out], norm_type=norm_type, activation=activation)
