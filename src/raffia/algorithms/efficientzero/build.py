"""The construction of networks for an environment and a config."""

from __future__ import annotations

import math
from typing import Any

import torch

from raffia.algorithms.efficientzero.config import ModelConfig
from raffia.algorithms.efficientzero.heads import LargestHead
from raffia.algorithms.efficientzero.latent_model import LatentModel
from raffia.algorithms.efficientzero.model import EfficientZeroModel
from raffia.algorithms.efficientzero.model_mlp import EfficientZeroModelMLP
from raffia.envs.env import Discrete, EnvSpec


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
            f"observation_dtype={spec.observation_dtype}: the networks take float32, or uint8 of "
            "0..255; have the environment give observation.float(), and set its spec accordingly"
        )
    first, *rest = spec.observation_shape or (0,)
    shape = (frame_stack * first, *rest)
    if config.flatten:
        return _for_vectors((math.prod(shape),), spec, config, consistency)
    if len(shape) == 3:
        return _for_images(shape, spec, config, consistency)
    if len(shape) == 1 and first > 0:
        return _for_vectors(shape, spec, config, consistency)
    raise ValueError(
        f"observation_shape={list(spec.observation_shape)}: there are networks for vectors [D] and "
        "images [C, H, W]; for others pass your own: EfficientZeroLearner(..., model_factory=...)"
    )


def _for_images(
    shape: tuple[int, ...], spec: EnvSpec, config: ModelConfig, consistency: bool
) -> LatentModel:
    return EfficientZeroModel(
        observation_shape=shape,
        num_res_blocks=config.num_res_blocks,
        num_channels=config.num_channels,
        downsample=config.downsample,
        **_of_both(spec, config, consistency),
    )


def _for_vectors(
    shape: tuple[int, ...], spec: EnvSpec, config: ModelConfig, consistency: bool
) -> LatentModel:
    return EfficientZeroModelMLP(
        observation_shape=shape,
        latent_state_dim=config.latent_state_dim,
        res_connection_in_dynamics=config.res_connection,
        **_of_both(spec, config, consistency),
    )


def _of_both(spec: EnvSpec, config: ModelConfig, consistency: bool) -> dict[str, Any]:
    """The arguments that both kinds of model take."""
    largest = LargestHead(config.max_head_layers, config.max_head_nodes)
    return {
        "action_space_size": _action_size(spec),
        "continuous_action_space": not isinstance(spec.action, Discrete),
        "discrete_action_encoding_type": config.action_encoding,
        "sigma_type": config.sigma_type,
        "fixed_sigma_value": config.fixed_sigma,
        "lstm_hidden_size": config.lstm_hidden_size,
        "reward_head_hidden_channels": config.head_hidden_channels,
        "value_head_hidden_channels": config.head_hidden_channels,
        "policy_head_hidden_channels": config.head_hidden_channels,
        "reward_support_range": config.reward_support_range,
        "value_support_range": config.value_support_range,
        "proj_hid": config.proj_hid,
        "proj_out": config.proj_out,
        "pred_hid": config.pred_hid,
        "pred_out": config.pred_out,
        "self_supervised_learning_loss": consistency,
        "state_norm": config.state_norm,
        "norm_type": config.norm_type,
        "projection_norm_type": config.projection_norm_type,
        "largest_head": largest if config.evolvable_heads else None,
    }


def _action_size(spec: EnvSpec) -> int:
    """The number of actions, or of a continuous action's numbers."""
    return spec.action.n if isinstance(spec.action, Discrete) else spec.action.shape[0]
