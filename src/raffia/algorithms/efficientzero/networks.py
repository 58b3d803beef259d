"""EfficientZero's three networks for images: representation, dynamics and prediction.

representation   an image to a latent state
dynamics         a latent state, by an action, to the next one and to the sum of rewards
prediction       a latent state to policy and value
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raffia.algorithms.efficientzero.heads import HeadOptions, LargestHead, head, policy_head
from raffia.nn.blocks import RELU, LSTMStep, ResidualBlock, conv3x3, norm_of_images, norm_of_vectors


def image_shape(observation_shape: Sequence[int]) -> tuple[int, int, int]:
    """(channels, height, width) of an observation, or ValueError.

    >>> image_shape([12, 96, 96])
    (12, 96, 96)
    """
    shape = [observation_shape] if isinstance(observation_shape, int) else list(observation_shape)
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(
            f"observation_shape={shape} is not the shape of an image (C, H, W). For vectors use "
            "EfficientZeroModelMLP; for a stack of F frames with C channels, C is F * C"
        )
    return (shape[0], shape[1], shape[2])


def check_precision(observation: Tensor, weight: Tensor) -> None:
    """TypeError for observations in another precision than the weights, but under autocast.

    >>> check_precision(torch.zeros(2, dtype=torch.float64), torch.zeros(2))
    Traceback (most recent call last):
    ...
    TypeError: observations are torch.float64, but the weights are torch.float32: ...
    """
    if observation.dtype != weight.dtype and not torch.is_autocast_enabled(observation.device.type):
        raise TypeError(
            f"observations are {observation.dtype}, but the weights are {weight.dtype}: pass "
            f"observation.to({weight.dtype}), or convert the model to {observation.dtype}"
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
                f"num_channels={num_channels} must be at least 2, because with downsample the "
                "first layers have half as many channels"
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
    """A sequence of this many residual blocks.

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
        is_float = observation.is_floating_point()
        if observation.shape[1:] != self.observation_shape or not is_float:
            hint = "" if is_float else "; for bytes pass observation.float() / 255"
            raise ValueError(
                f"observations must be floats of shape {['B', *self.observation_shape]}; got "
                f"{observation.dtype} of shape {list(observation.shape)}{hint}"
            )
        if self.downsample:
            check_precision(observation, self.downsample_net.conv1.weight)
            return self.resblocks(self.downsample_net(observation))
        check_precision(observation, self.conv.weight)
        return self.resblocks(self.activation(self.norm(self.conv(observation))))


_HIDDEN = [32]  # a list, as in the published signature; it is only read


class DynamicsNetwork(nn.Module):
    """The dynamics network: from a latent state with an action's planes to the next latent state
    and the value prefix.

    observation_shape: (C, H, W) of an observation; with `downsample` it determines the latent's
    size.
    num_channels: of the input, the latent state's and the action's planes together.
    reward_head_channels: of the 1x1 convolution before the LSTM.
    fc_reward_layers: hidden sizes of the network after it.
    output_support_size: of the value prefix's logits.
    flatten_output_size_for_reward_head: what the LSTM gets, reward_head_channels * h * w of the
        latent state.
    lstm_hidden_size: width of the LSTM; 0 for MuZero's network, which has none and predicts the
        reward of each step.
    last_linear_layer_init_zero: the value prefix starts at zero.
    activation: of which each layer gets a copy.
    norm_type: "BN" or "LN".
    largest_head: of a value prefix's head that can change its form, see `head`.

    Source: Ye et al. (2021), appendix A.1.

    >>> network = DynamicsNetwork((3, 5, 4), num_channels=10, reward_head_channels=2,
    ...     flatten_output_size_for_reward_head=2 * 5 * 4, lstm_hidden_size=6)
    >>> state = torch.zeros(1, 3, 6), torch.zeros(1, 3, 6)
    >>> latent, (h, c), value_prefix = network(torch.zeros(3, 10, 5, 4), state)
    >>> latent.shape, h.shape, value_prefix.shape
    (torch.Size([3, 8, 5, 4]), torch.Size([1, 3, 6]), torch.Size([3, 601]))
    """

    def __init__(
        self,
        observation_shape: Sequence[int],
        action_encoding_dim: int = 2,
        num_res_blocks: int = 1,
        num_channels: int = 64,
        reward_head_channels: int = 64,
        fc_reward_layers: Sequence[int] = _HIDDEN,
        output_support_size: int = 601,
        flatten_output_size_for_reward_head: int = 64,
        downsample: bool = False,
        lstm_hidden_size: int = 512,
        last_linear_layer_init_zero: bool = True,
        activation: nn.Module = RELU,
        norm_type: str = "BN",
        largest_head: LargestHead | None = None,
    ) -> None:
        super().__init__()
        if not 0 < action_encoding_dim < num_channels:
            raise ValueError(
                f"num_channels={num_channels} must be larger than "
                f"action_encoding_dim={action_encoding_dim}: it counts the channels of the latent "
                "state and the planes of the action"
            )
        self.num_channels, self.action_encoding_dim = num_channels, action_encoding_dim
        self.norm_type = norm_type
        self.flatten_output_size_for_reward_head = flatten_output_size_for_reward_head
        _, height, width = image_shape(observation_shape)
        self.size = size = latent_size(height, width, downsample)
        shape = (num_channels - action_encoding_dim, *size)

        self.conv = conv3x3(num_channels, shape[0])
        self.norm_common = norm_of_images(norm_type, shape)
        self.activation = copy.deepcopy(activation)
        self.resblocks = residual_blocks(num_res_blocks, shape, activation, norm_type)

        self.conv1x1_reward = nn.Conv2d(shape[0], reward_head_channels, 1)
        self.norm_reward = norm_of_images(norm_type, (reward_head_channels, *size))
        self.activation_reward = copy.deepcopy(activation)
        self.lstm = prefix_lstm(flatten_output_size_for_reward_head, lstm_hidden_size)
        self.norm_value_prefix: nn.Module = nn.Identity()
        self.activation_value_prefix: nn.Module = nn.Identity()
        if self.lstm is not None:
            self.norm_value_prefix = norm_of_vectors(norm_type, lstm_hidden_size)
            self.activation_value_prefix = copy.deepcopy(activation)
        size_in = lstm_hidden_size or flatten_output_size_for_reward_head
        options = HeadOptions(norm_type, activation, last_linear_layer_init_zero, largest_head)
        self.fc_reward_head = head([size_in, *fc_reward_layers, output_support_size], options)

    def forward(
        self,
        state_action_encoding: Tensor,  # [B, num_channels, h, w]
        reward_hidden_state: tuple[Tensor, Tensor],  # h, c: each [1, B, L]
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """The next latent state, (h, c), and the value prefix's logits [B, F]."""
        self._check_input(state_action_encoding)
        latent = state_action_encoding[:, : -self.action_encoding_dim]
        x = self.norm_common(self.conv(state_action_encoding))
        latent = self.resblocks(self.activation(x + latent))
        x = self.activation_reward(self.norm_reward(self.conv1x1_reward(latent)))
        output, state = remember(self.lstm, x.flatten(1), reward_hidden_state)
        x = self.activation_value_prefix(self.norm_value_prefix(output))
        return latent, state, self.fc_reward_head(x)

    def _check_input(self, x: Tensor) -> None:
        planes = self.action_encoding_dim
        if x.dim() != 4 or x.shape[1] != self.num_channels:
            raise ValueError(
                "latent states with actions must have shape [B, C, h, w] with "
                f"{self.num_channels - planes} + {planes} = {self.num_channels} channels; got "
                f"shape {list(x.shape)}"
            )
        if self.norm_type == "LN" and x.shape[2:] != self.size:
            raise ValueError(
                f"LayerNorm was built for latent states of {self.size[0]} x {self.size[1]}, which "
                f"follow from observation_shape and downsample; got shape {list(x.shape)}"
            )
        channels, (height, width) = self.conv1x1_reward.out_channels, x.shape[2:]
        if channels * height * width != self.flatten_output_size_for_reward_head:
            raise ValueError(
                f"the reward head produces {channels} x {height} x {width} numbers from this "
                "latent state, but its LSTM was built for "
                f"{self.flatten_output_size_for_reward_head}: pass "
                f"flatten_output_size_for_reward_head={channels * height * width}"
            )

    def get_dynamic_mean(self) -> float:
        """Mean magnitude of the parameters that make the next latent state."""
        return float(np.abs(_flat([self.conv.weight, *self.resblocks.parameters()])).mean())

    def get_reward_mean(self) -> tuple[np.ndarray[Any, np.dtype[np.float32]], float]:
        """The parameters around the LSTM that make the value prefix, flat, and their mean
        magnitude: the weights of the 1x1 convolution, then all of the last layers."""
        weights = _flat([self.conv1x1_reward.weight, *self.fc_reward_head.parameters()])
        return weights, float(np.abs(weights).mean())


def _flat(parameters: Iterable[Tensor]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return torch.cat([p.detach().float().flatten() for p in parameters]).cpu().numpy()


class PredictionNetwork(nn.Module):
    """The prediction network: from a latent state [B, num_channels, h, w] to policy and value.

    observation_shape: (C, H, W) of an observation; with `downsample` it determines the latent's
    size.
    action_space_size: how many actions; of continuous ones, how many numbers each has.
    sigma_type: None for a logit for each action; "conditioned" or "fixed" for continuous actions,
        see `GaussianHead`.
    gaussian_head: layers of that Gaussian head, see `policy_head`.
    largest_head: of heads that can change their form, see `head`.

    >>> network = PredictionNetwork((3, 5, 4), action_space_size=6, num_channels=8)
    >>> policy, value = network(torch.zeros(2, 8, 5, 4))
    >>> policy.shape, value.shape
    (torch.Size([2, 6]), torch.Size([2, 601]))
    """

    def __init__(
        self,
        observation_shape: Sequence[int],
        action_space_size: int,
        num_res_blocks: int = 1,
        num_channels: int = 64,
        value_head_channels: int = 16,
        policy_head_channels: int = 16,
        value_head_hidden_channels: Sequence[int] = (32,),
        policy_head_hidden_channels: Sequence[int] = (32,),
        output_support_size: int = 601,
        downsample: bool = False,
        last_linear_layer_init_zero: bool = True,
        activation: nn.Module = RELU,
        norm_type: str = "BN",
        sigma_type: str | None = None,
        fixed_sigma_value: float = 0.3,
        largest_head: LargestHead | None = None,
        gaussian_head: str = "mlp",
    ) -> None:
        super().__init__()
        _, height, width = image_shape(observation_shape)
        h, w = latent_size(height, width, downsample)
        self.latent_shape = (num_channels, h, w)
        self.resblocks = residual_blocks(num_res_blocks, self.latent_shape, activation, norm_type)
        self.conv1x1_value = nn.Conv2d(num_channels, value_head_channels, 1)
        self.conv1x1_policy = nn.Conv2d(num_channels, policy_head_channels, 1)
        self.norm_value = norm_of_images(norm_type, (value_head_channels, h, w))
        self.norm_policy = norm_of_images(norm_type, (policy_head_channels, h, w))
        self.activation_value = copy.deepcopy(activation)
        self.activation_policy = copy.deepcopy(activation)
        options = HeadOptions(norm_type, activation, last_linear_layer_init_zero, largest_head)
        sizes = [value_head_channels * h * w, *value_head_hidden_channels, output_support_size]
        self.fc_value = head(sizes, options)
        sizes = [policy_head_channels * h * w, *policy_head_hidden_channels, action_space_size]
        self.fc_policy = policy_head(sizes, options, sigma_type, fixed_sigma_value, gaussian_head)

    def forward(self, latent_state: Tensor) -> tuple[Tensor, Tensor]:
        """latent_state: [B, num_channels, h, w] -> policy [B, A], value logits [B, F]."""
        if latent_state.shape[1:] != self.latent_shape:
            raise ValueError(
                f"latent states must have shape {['B', *self.latent_shape]}; got "
                f"{list(latent_state.shape)}"
            )
        x = self.resblocks(latent_state)
        value = self.activation_value(self.norm_value(self.conv1x1_value(x)))
        policy = self.activation_policy(self.norm_policy(self.conv1x1_policy(x)))
        return self.fc_policy(policy.flatten(1)), self.fc_value(value.flatten(1))


def prefix_lstm(input_size: int, hidden_size: int) -> LSTMStep | None:
    """The LSTM of a value prefix; None if it has no width, as in MuZero.

    >>> prefix_lstm(4, 0) is None
    True
    """
    return LSTMStep(input_size, hidden_size) if hidden_size else None


def remember(
    lstm: LSTMStep | None,
    features: Tensor,  # [B, input_size]
    reward_hidden_state: tuple[Tensor, Tensor],  # h, c: each [1, B, L]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The LSTM's output [B, L] and its next (h, c), shaped as they came.

    Without an LSTM the output is the features, and h and c have no width.

    >>> output, (h, c) = remember(LSTMStep(4, 3), torch.ones(2, 4), (torch.zeros(1, 2, 3),) * 2)
    >>> bool((output == h[0]).all())
    True
    """
    h, c = reward_hidden_state
    shape = (1, len(features), lstm.hidden_size if lstm is not None else 0)
    if h.shape != shape or c.shape != shape:
        raise ValueError(
            f"reward_hidden_state must be a pair (h, c) with shape {list(shape)} each; got "
            f"{list(h.shape)} and {list(c.shape)}. At the start both are zeros"
        )
    if lstm is None:
        return features, (h, c)
    h, c = lstm(features, (h.squeeze(0), c.squeeze(0)))
    return h, (h.unsqueeze(0), c.unsqueeze(0))
