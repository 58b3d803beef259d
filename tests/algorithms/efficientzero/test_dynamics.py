import inspect

import numpy as np
import pytest
import torch
from torch import nn

from raffia.algorithms.efficientzero.dynamics import DynamicsNetwork


def dynamics(**options):
    defaults = dict(
        observation_shape=(3, 5, 4),
        action_encoding_dim=3,
        num_channels=11,
        reward_head_channels=2,
        flatten_output_size_for_reward_head=2 * 5 * 4,
        lstm_hidden_size=6,
    )
    return DynamicsNetwork(**{**defaults, **options})


def zeros(batch, hidden=6):
    return torch.zeros(1, batch, hidden), torch.zeros(1, batch, hidden)


def test_the_arguments_are_the_published_ones():
    arguments = inspect.signature(DynamicsNetwork).parameters
    *published, ours = arguments
    assert ours == "largest_head"
    assert {n: arguments[n].default for n in published if n != "activation"} == {
        "observation_shape": inspect.Parameter.empty,
        "action_encoding_dim": 2,
        "num_res_blocks": 1,
        "num_channels": 64,
        "reward_head_channels": 64,
        "fc_reward_layers": [32],
        "output_support_size": 601,
        "flatten_output_size_for_reward_head": 64,
        "downsample": False,
        "lstm_hidden_size": 512,
        "last_linear_layer_init_zero": True,
        "norm_type": "BN",
    }
    assert published[-2:] == ["activation", "norm_type"]
    assert repr(arguments["activation"].default) == "ReLU(inplace=True)"


def test_the_channels_count_the_action_planes():
    latent, (h, c), value_prefix = dynamics()(torch.randn(2, 11, 5, 4), zeros(2))
    assert latent.shape == (2, 8, 5, 4) and value_prefix.shape == (2, 601)
    assert h.shape == c.shape == (1, 2, 6)


def test_the_defaults_fit_latent_states_of_one_pixel():
    network = DynamicsNetwork((4, 1, 1))
    latent, _, _ = network(torch.randn(2, 64, 1, 1), zeros(2, 512))
    assert latent.shape == (2, 62, 1, 1)


def test_the_latent_part_of_the_input_is_added_before_the_activation():
    network = dynamics(num_res_blocks=0).eval()
    nn.init.zeros_(network.conv.weight)
    x = torch.randn(2, 11, 5, 4)
    kept = x.clone()
    latent, _, _ = network(x, zeros(2))
    torch.testing.assert_close(latent, x[:, :8].relu())
    assert torch.equal(x, kept)


def test_means_of_magnitudes():
    network = dynamics(last_linear_layer_init_zero=False)
    mean = network.get_dynamic_mean()
    counted = [network.conv.weight, *network.resblocks.parameters()]
    assert isinstance(mean, float)
    total = sum(p.abs().sum().item() for p in counted) / sum(p.numel() for p in counted)
    assert mean == pytest.approx(total, rel=1e-5)
    weights, mean = network.get_reward_mean()
    assert isinstance(weights, np.ndarray) and isinstance(mean, float)
    counted = [network.conv1x1_reward.weight, *network.fc_reward_head.parameters()]
    assert len(counted) == 1 + 2 * 3  # two layers and the normalisation between them
    assert np.array_equal(weights, np.concatenate([p.detach().numpy().ravel() for p in counted]))
    total = sum(p.abs().sum().item() for p in counted) / sum(p.numel() for p in counted)
    assert mean == pytest.approx(total, rel=1e-5)


def test_sizes_of_the_dynamics_network_that_do_not_fit_are_refused():
    x = torch.rand(2, 11, 5, 4)
    with pytest.raises(ValueError, match="2 x 5 x 4.*pass flatten_output_size_for_reward_head=40"):
        dynamics(flatten_output_size_for_reward_head=64)(x, zeros(2))
    with pytest.raises(ValueError, match="num_channels=3 counts"):
        dynamics(num_channels=3)
    with pytest.raises(ValueError, match="LayerNorm was built for latent states of 5 x 4"):
        dynamics(norm_type="LN")(x.mT, zeros(2))
