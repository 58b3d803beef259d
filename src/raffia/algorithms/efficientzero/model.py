"""EfficientZero's models: for images here, for vectors in `model_mlp`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from raffia.algorithms.efficientzero.actions import action_encoding
from raffia.algorithms.efficientzero.dynamics import DynamicsNetwork
from raffia.algorithms.efficientzero.heads import LargestHead
from raffia.algorithms.efficientzero.latent_model import LatentModel, NetworkOutput, supports
from raffia.algorithms.efficientzero.model_mlp import EfficientZeroModelMLP
from raffia.algorithms.efficientzero.policy_head import check_sigma
from raffia.algorithms.efficientzero.prediction import PredictionNetwork
from raffia.algorithms.efficientzero.representation import (
    RepresentationNetwork,
    image_shape,
    latent_size,
)
from raffia.nn.blocks import RELU

__all__ = [
    "DynamicsNetwork",
    "EfficientZeroModel",
    "EfficientZeroModelMLP",
    "NetworkOutput",
    "PredictionNetwork",
    "RepresentationNetwork",
]


class EfficientZeroModel(LatentModel):
    """EfficientZero's model for images.

    observation_shape: (C, H, W); of a stack of frames, C counts the channels of all.
    action_space_size: how many actions; of continuous ones, how many numbers each has.
    num_channels: of the latent state.
    reward_head_channels, ..., policy_head_hidden_channels: 1x1 convolution and hidden layers of
        the three heads.
    reward_support_range, value_support_range: (start, stop, step), stop left out; they may differ.
    proj_hid, proj_out, pred_hid, pred_out: widths of the projection and of its prediction head,
        which are built if `self_supervised_learning_loss`.
    categorical_distribution: False gives one number instead of logits over a support.
    activation: of which each layer of all networks gets a copy.
    last_linear_layer_init_zero: policy, value and value prefix start at zero.
    state_norm: latent states are brought to 0 .. 1.
    downsample: for large images, see `latent_size`; otherwise height and width stay (boards),
        and of an image of 96 x 96 the projection alone would have 600 million parameters.
    norm_type: "BN" or "LN".
    projection_norm_type: of the projection and its head; None for that of the rest. Without "BN"
        there, all states may become equal to the consistency loss.
    discrete_action_encoding_type: "one_hot" for a plane each, or "not_one_hot" for one plane of
        action / size.
    continuous_action_space: actions are floats [B, D], and the policy a Gaussian, see
        `GaussianHead` (also for `sigma_type` and `fixed_sigma_value`).
    largest_head: of heads whose form can change, `LargestHead(num_layers, num_nodes)`; None for
        plain ones.

    Source: Ye et al. (2021), appendix A.1.

    >>> model = EfficientZeroModel((12, 96, 96), action_space_size=6, downsample=True)
    >>> sum(parameter.numel() for parameter in model.parameters())
    8353192
    >>> root = model.initial_inference(torch.zeros(2, 12, 96, 96))
    >>> root.latent_state.shape, model.decode_value(root.value).shape
    (torch.Size([2, 64, 6, 6]), torch.Size([2]))
    """

    def __init__(
        self,
        observation_shape: Sequence[int] = (12, 96, 96),
        action_space_size: int = 6,
        lstm_hidden_size: int = 512,
        num_res_blocks: int = 1,
        num_channels: int = 64,
        reward_head_channels: int = 16,
        value_head_channels: int = 16,
        policy_head_channels: int = 16,
        reward_head_hidden_channels: Sequence[int] = (32,),
        value_head_hidden_channels: Sequence[int] = (32,),
        policy_head_hidden_channels: Sequence[int] = (32,),
        reward_support_range: Sequence[float] = (-300.0, 301.0, 1.0),
        value_support_range: Sequence[float] = (-300.0, 301.0, 1.0),
        proj_hid: int = 1024,
        proj_out: int = 1024,
        pred_hid: int = 512,
        pred_out: int = 1024,
        self_supervised_learning_loss: bool = True,
        categorical_distribution: bool = True,
        activation: nn.Module = RELU,
        last_linear_layer_init_zero: bool = True,
        state_norm: bool = False,
        downsample: bool = False,
        norm_type: str = "BN",
        discrete_action_encoding_type: str = "one_hot",
        continuous_action_space: bool = False,
        sigma_type: str = "conditioned",
        fixed_sigma_value: float = 0.3,
        projection_norm_type: str | None = None,
        largest_head: LargestHead | None = None,
    ) -> None:
        shape = image_shape(observation_shape)
        h, w = latent_size(*shape[1:], downsample)
        actions = action_encoding(
            action_space_size, continuous_action_space, discrete_action_encoding_type
        )
        check_sigma(sigma_type, fixed_sigma_value)
        reward_support, value_support = supports(
            reward_support_range, value_support_range, categorical_distribution
        )
        super().__init__(
            representation_network=RepresentationNetwork(
                shape, num_res_blocks, num_channels, downsample, activation, norm_type
            ),
            dynamics_network=DynamicsNetwork(
                shape,
                actions.dim,
                num_res_blocks,
                num_channels + actions.dim,
                reward_head_channels,
                reward_head_hidden_channels,
                reward_support.size if reward_support else 1,
                reward_head_channels * h * w,
                downsample,
                lstm_hidden_size,
                last_linear_layer_init_zero,
                activation,
                norm_type,
                largest_head,
            ),
            prediction_network=PredictionNetwork(
                shape,
                action_space_size,
                num_res_blocks,
                num_channels,
                value_head_channels,
                policy_head_channels,
                value_head_hidden_channels,
                policy_head_hidden_channels,
                value_support.size if value_support else 1,
                downsample,
                last_linear_layer_init_zero,
                activation,
                norm_type,
                sigma_type if continuous_action_space else None,
                fixed_sigma_value,
                largest_head,
            ),
            action_encoding=actions,
            latent_shape=(num_channels, h, w),
            lstm_hidden_size=lstm_hidden_size,
            reward_support=reward_support,
            value_support=value_support,
            state_norm=state_norm,
            sizes_of_projection=(
                (proj_hid, proj_out, pred_hid, pred_out) if self_supervised_learning_loss else None
            ),
            activation=activation,
            projection_norm_type=projection_norm_type or norm_type,
        )
