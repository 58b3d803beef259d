"""Sizes of the models that `benchmarks.search` plans with, for every package the same."""

from typing import Any

SUPPORT = 601  # -300 ... 300, of values and of value prefixes
HORIZON = 5  # steps after which a value prefix restarts
DISCOUNT = 0.997

LATENT, LSTM = 128, 128  # of the MLP as of the null model: LightZero's CartPole configuration
OBSERVATION = 4
HEAD = 32  # width of the hidden layer of each head

MLP: dict[str, Any] = {
    "observation_shape": OBSERVATION,
    "latent_state_dim": LATENT,
    "lstm_hidden_size": LSTM,
    "res_connection_in_dynamics": True,
}
# Of continuous actions of one number: LightZero's Pendulum configuration, with 20 sampled actions.
SAMPLED: dict[str, Any] = {
    **MLP,
    "observation_shape": 3,
    "norm_type": "LN",
    "continuous_action_space": True,
    "value_head_hidden_channels": [HEAD],
    "policy_head_hidden_channels": [LATENT, LATENT],  # as LightZero's policies over floats have
    "reward_head_hidden_channels": [HEAD],
}
CONV: dict[str, Any] = {"observation_shape": (12, 96, 96), "downsample": True}

NUM_PARAMETERS = {"mlp": 3_591_508, "conv": 8_353_192}  # with 2 and with 6 actions
NUM_ACTIONS = {"mlp": 2, "sampled": 20, "conv": 6}
