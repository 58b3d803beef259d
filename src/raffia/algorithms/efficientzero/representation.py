"""The representation network: from an image to a latent state."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from raffia.nn.blocks import RELU, ResidualBlock, conv3x3, norm_of_images


def image_shape(observation_shape: Sequence[int]) -> tuple[int, int, int]:
    """(channels, height, width) of an observation, or ValueError.

    >>> image_shape([12, 96, 96])
    (12, 96, 96)
    """
    shape = [observation_shape] if isinstance(observation_shape, int) else list(observation_shape)
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(
            f"observation_shape={shape} is no image's (C, H, W); vectors are for "
            "EfficientZeroModelMLP, and of a stack of F frames of C channels C is F * C"
        )
    return (shape[0], shape[1], shape[2])


def check_precision(observation: Tensor, weight: Tensor) -> None:
    """TypeError for observations in another precision than the weights, but under autocast.

    >>> check_precision(torch.zeros(2, dtype=torch.float64), torch.zeros(2))
    Traceback (most recent call last):
    ...
    TypeError: observations are torch.float64 and the weights torch.float32: pass ...
    """
    if observation.dtype != weight.dtype and not torch.is_autocast_enabled(observation.device.type):
        raise TypeError(
            f"observations are {observation.dtype} and the weights {weight.dtype}: pass "
            f"observation.to({weight.dtype}), or bring the model to {observation.dtype}"
        )


def latent_size(height: int, width: int, downsample: bool) -> tuple[int, int]:
    """Height and width of the latent state of an image.

    Without `downsample` those of the image. With it, three or four times n becomes ceil(n / 2):
    the fourth only where more than 8 rows or columns are left after the third, so from 65 on.
    96 and 84 give 6, as in EfficientZero; 64 gives 8, as in LightZero.

    >>> [latent_size(n, n, downsample=True)[0] for n in (96, 84, 80, 65, 64, 7, 1)]
    [6, 6, 5, 5, 8, 1, 1]
    """
    if not downsample:
        return height, width
    third = -(-height // 8), -(-width // 8)
    return (-(-third[0] // 2), -(-third[1] // 2)) if _pools_twice(height, width) else third


def _pools_twice(height: int, width: int) -> bool:
    return max(height, width) > 64


class DownSample(nn.Module):
    """The first layers for large images: height and width become an eighth or a sixteenth.

    see `latent_size`.

    >>> DownSample((3, 84, 84), num_channels=8)(torch.zeros(2, 3, 84, 84)).shape
    torch.Size([2, 8, 6, 6])
    """

    def __init__(
        self,
        observation_shape: Sequence[int],
        num_channels: int,
        activation: nn.Module = RELU,
        norm_type: str = "BN",
    ) -> None:
        super().__init__()
        channels, height, width = image_shape(observation_shape)
        if num_channels < 2:
            raise ValueError(
                f"num_channels={num_channels}: with downsample the first layers have half as many, "
                "so pass at least 2"
            )
        half = (num_channels // 2, -(-height // 2), -(-width // 2))
        quarter = (num_channels, -(-height // 4), -(-width // 4))
        eighth = (num_channels, -(-height // 8), -(-width // 8))
        self.conv1 = conv3x3(channels, half[0], stride=2)
        self.norm1 = norm_of_images(norm_type, half)
        self.activation = copy.deepcopy(activation)
        self.resblocks1 = residual_blocks(1, half, activation, norm_type)
        self.downsample_block = ResidualBlock(half, num_channels, 2, activation, norm_type)
        self.resblocks2 = residual_blocks(1, quarter, activation, norm_type)
        self.pooling1 = nn.AvgPool2d(3, stride=2, padding=1)
        self.resblocks3 = residual_blocks(1, eighth, activation, norm_type)
        twice = _pools_twice(height, width)
        self.pooling2 = nn.AvgPool2d(3, stride=2, padding=1) if twice else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.norm1(self.conv1(x)))
        x = self.resblocks2(self.downsample_block(self.resblocks1(x)))
        return self.pooling2(self.resblocks3(self.pooling1(x)))


def residual_blocks(
    num: int, shape: Sequence[int], activation: nn.Module = RELU, norm_type: str = "BN"
) -> nn.Sequential:
    """So many residual blocks, one after the other.

    >>> len(residual_blocks(2, (8, 6, 6)))
    2
    """
    return nn.Sequential(
        *(ResidualBlock(shape, activation=activation, norm_type=norm_type) for _ in range(num))
    )


class RepresentationNetwork(nn.Module):
    """The representation network: from an image, or a stack of frames along the channels, to a
    latent state.

    downsample: for large images, see `latent_size`; otherwise height and width stay (boards).

    >>> network = RepresentationNetwork((3, 5, 4), num_channels=8, downsample=False)
    >>> network(torch.zeros(2, 3, 5, 4)).shape
    torch.Size([2, 8, 5, 4])
    """

    def __init__(
        self,
        observation_shape: Sequence[int] = (12, 96, 96),
        num_res_blocks: int = 1,
        num_channels: int = 64,
        downsample: bool = True,
        activation: nn.Module = RELU,
        norm_type: str = "BN",
    ) -> None:
        super().__init__()
        channels, height, width = self.observation_shape = image_shape(observation_shape)
        shape = (num_channels, *latent_size(height, width, downsample))
        self.downsample = downsample
        if downsample:
            self.downsample_net = DownSample(
                self.observation_shape, num_channels, activation, norm_type
            )
        else:
            self.conv = conv3x3(channels, num_channels)
            self.norm = norm_of_images(norm_type, shape)
            self.activation = copy.deepcopy(activation)
        self.resblocks = residual_blocks(num_res_blocks, shape, activation, norm_type)

    def forward(self, observation: Tensor) -> Tensor:
        """observation: floats [B, C, H, W] -> [B, num_channels, h, w]."""
        if observation.shape[1:] != self.observation_shape or not observation.is_floating_point():
            hint = (
                ""
                if observation.is_floating_point()
                else "; of bytes it is observation.float() / 255"
            )
            raise ValueError(
                f"observations are floats of shape {['B', *self.observation_shape]}, got "
                f"{observation.dtype} of shape {list(observation.shape)}{hint}"
            )
        first = self.downsample_net.conv1 if self.downsample else self.conv
        check_precision(observation, first.weight)
        x = self.downsample_net(observation) if self.downsample else self._stem(observation)
        return self.resblocks(x)

    def _stem(self, observation: Tensor) -> Tensor:
        return self.activation(self.norm(self.conv(observation)))
