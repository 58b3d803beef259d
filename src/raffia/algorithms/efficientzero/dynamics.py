"""The dynamics network: from a latent state, by an action, to the next and to the sum of
rewards."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raffia.algorithms.efficientzero.heads import LargestHead, head
from raffia.algorithms.efficientzero.representation import (
    image_shape,
    latent_size,
    residual_blocks,
)
from raffia.algorithms.efficientzero.reward_memory import remember
from raffia.nn.blocks import RELU, LSTMStep, conv3x3, norm_of_images, norm_of_vectors

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
                f"num_channels={num_channels} counts the latent state's channels and the "
                f"action_encoding_dim={action_encoding_dim} planes of the action, so it is larger"
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
        self.lstm = LSTMStep(flatten_output_size_for_reward_head, lstm_hidden_size)
        self.norm_value_prefix = norm_of_vectors(norm_type, lstm_hidden_size)
        self.activation_value_prefix = copy.deepcopy(activation)
        self.fc_reward_head = head(
            [lstm_hidden_size, *fc_reward_layers, output_support_size],
            norm_type=norm_type,
            activation=activation,
            zero_last=last_linear_layer_init_zero,
            largest=largest_head,
        )

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
                f"latent states with actions are [B, C, h, w] of {self.num_channels - planes} + "
                f"{planes} = {self.num_channels} channels, got shape {list(x.shape)}"
            )
        if self.norm_type == "LN" and x.shape[2:] != self.size:
            raise ValueError(
                f"LayerNorm was built for latent states of {self.size[0]} x {self.size[1]}, as "
                f"observation_shape and downsample determine, got shape {list(x.shape)}"
            )
        channels, (height, width) = self.conv1x1_reward.out_channels, x.shape[2:]
        if channels * height * width != self.flatten_output_size_for_reward_head:
            raise ValueError(
                f"the reward head makes {channels} x {height} x {width} numbers of this latent "
                f"state, but its LSTM was built for {self.flatten_output_size_for_reward_head}: "
                f"pass flatten_output_size_for_reward_head={channels * height * width}"
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
