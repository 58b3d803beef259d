"""The prediction network: from a latent state to policy and value."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor, nn

from raffia.algorithms.efficientzero.heads import HeadOptions, LargestHead, head
from raffia.algorithms.efficientzero.policy_head import policy_head
from raffia.algorithms.efficientzero.representation import (
    image_shape,
    latent_size,
    residual_blocks,
)
from raffia.nn.blocks import RELU, norm_of_images


class PredictionNetwork(nn.Module):
    """From a latent state [B, num_channels, h, w] to policy and value.

    observation_shape: (C, H, W) of an observation; with `downsample` it determines the latent's
    size.
    action_space_size: how many actions; of continuous ones, how many numbers each has.
    sigma_type: None for a logit for each action; "conditioned" or "fixed" for continuous actions,
        see `GaussianHead`.
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
        options: HeadOptions = {
            "norm_type": norm_type,
            "activation": activation,
            "zero_last": last_linear_layer_init_zero,
            "largest": largest_head,
        }
        self.fc_value = head(
            [value_head_channels * h * w, *value_head_hidden_channels, output_support_size],
            **options,
        )
        self.fc_policy = policy_head(
            [policy_head_channels * h * w, *policy_head_hidden_channels, action_space_size],
            sigma_type=sigma_type,
            fixed_sigma_value=fixed_sigma_value,
            **options,
        )

    def forward(self, latent_state: Tensor) -> tuple[Tensor, Tensor]:
        """latent_state: [B, num_channels, h, w] -> policy [B, A], value logits [B, F]."""
        if latent_state.shape[1:] != self.latent_shape:
            raise ValueError(
                f"latent states are {['B', *self.latent_shape]}, got {list(latent_state.shape)}"
            )
        x = self.resblocks(latent_state)
        value = self.activation_value(self.norm_value(self.conv1x1_value(x)))
        policy = self.activation_policy(self.norm_policy(self.conv1x1_policy(x)))
        return self.fc_policy(policy.flatten(1)), self.fc_value(value.flatten(1))
