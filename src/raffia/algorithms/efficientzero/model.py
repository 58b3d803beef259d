"""EfficientZero's models: for images here, for vectors in `model_mlp`; `make_model` makes both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from raffia.algorithms.efficientzero.actions import action_encoding
from raffia.algorithms.efficientzero.config import ModelConfig
from raffia.algorithms.efficientzero.heads import LargestHead, check_gaussian
from raffia.algorithms.efficientzero.latent_model import LatentModel, supports
from raffia.algorithms.efficientzero.latent_model import NetworkOutput as NetworkOutput
from raffia.algorithms.efficientzero.model_mlp import GELU
from raffia.algorithms.efficientzero.model_mlp import EfficientZeroModelMLP as EfficientZeroModelMLP
from raffia.algorithms.efficientzero.networks import DynamicsNetwork as DynamicsNetwork
from raffia.algorithms.efficientzero.networks import PredictionNetwork as PredictionNetwork
from raffia.algorithms.efficientzero.networks import RepresentationNetwork as RepresentationNetwork
from raffia.algorithms.efficientzero.networks import image_shape, latent_size
from raffia.envs.env import Discrete, EnvSpec
from raffia.nn.blocks import RELU

# Settings whose names are those of arguments of both kinds of model.
OF_BOTH = (
    "lstm_hidden_size reward_support_range value_support_range state_norm sigma_type gaussian_head "
    "proj_hid proj_out pred_hid pred_out norm_type projection_norm_type"
).split()


class EfficientZeroModel(LatentModel):
    """EfficientZero's model for images.

    observation_shape: (C, H, W); of a stack of frames, C counts the channels of all.
    action_space_size: how many actions; of continuous ones, how many numbers each has.
    lstm_hidden_size: width of the value prefix's LSTM; 0 for MuZero's model, which has none.
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
        `GaussianHead` (also for `sigma_type` and `fixed_sigma_value`) and `policy_head` (for
        `gaussian_head`).
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
        gaussian_head: str = "mlp",
    ) -> None:
        shape = image_shape(observation_shape)
        h, w = latent_size(*shape[1:], downsample)
        actions = action_encoding(
            action_space_size, continuous_action_space, discrete_action_encoding_type
        )
        check_gaussian(sigma_type, fixed_sigma_value, gaussian_head)
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
                gaussian_head,
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


def make_model(
    spec: EnvSpec,
    config: ModelConfig,
    *,
    frame_stack: int = 1,  # S: the networks see S * C channels, or S * D numbers
    consistency: bool = True,  # with the projection that consistency is measured on
) -> LatentModel:
    """Networks for an environment: residual convolutions for images [C, H, W], dense layers for
    vectors [D].

    Continuous actions get a policy of means and standard deviations.

    >>> from raffia.envs.env import Discrete, EnvSpec
    >>> spec = EnvSpec(observation_shape=(4,), action=Discrete(2))
    >>> type(make_model(spec, ModelConfig(), frame_stack=3)).__name__
    'EfficientZeroModelMLP'
    >>> board = EnvSpec(observation_shape=(3, 6, 7), action=Discrete(7), num_players=2)
    >>> make_model(board, ModelConfig(downsample=False, num_channels=8)).latent_shape
    (8, 6, 7)
    """
    if spec.observation_dtype not in (torch.float32, torch.uint8):
        raise ValueError(
            f"observation_dtype={spec.observation_dtype} is not supported: the networks accept "
            "float32, or uint8 from 0 to 255. Return observation.float() from the environment, "
            "and set its spec accordingly"
        )
    first, *rest = spec.observation_shape or (0,)
    shape: tuple[int, ...] = (frame_stack * first, *rest)
    if config.flatten:
        shape = (math.prod(shape),)
    action = spec.action
    largest = LargestHead(config.max_head_layers, config.max_head_nodes)
    common: dict[str, Any] = {
        "observation_shape": shape,
        "action_space_size": action.n if isinstance(action, Discrete) else action.shape[0],
        "continuous_action_space": not isinstance(action, Discrete),
        "discrete_action_encoding_type": config.action_encoding,
        "fixed_sigma_value": config.fixed_sigma,
        "reward_head_hidden_channels": config.head_hidden_channels,
        "value_head_hidden_channels": config.head_hidden_channels,
        "policy_head_hidden_channels": config.head_hidden_channels,
        "self_supervised_learning_loss": consistency,
        "largest_head": largest if config.evolvable_heads else None,
        **{name: getattr(config, name) for name in OF_BOTH},
    }
    if config.activation == "gelu":
        common["activation"] = GELU
    if len(shape) == 3:
        return EfficientZeroModel(
            num_res_blocks=config.num_res_blocks,
            num_channels=config.num_channels,
            downsample=config.downsample,
            **common,
        )
    if len(shape) == 1 and (first > 0 or config.flatten):
        return EfficientZeroModelMLP(
            latent_state_dim=config.latent_state_dim,
            res_connection_in_dynamics=config.res_connection,
            latent_norm=config.latent_norm,
            **common,
        )
    raise ValueError(
        f"observation_shape={list(spec.observation_shape)} is not supported: the built-in "
        "networks accept vectors [D] and images [C, H, W]. For other shapes pass your own "
        "network: EfficientZeroLearner(..., model_factory=...)"
    )
