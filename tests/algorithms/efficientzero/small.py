"""Small networks, and models with weights as after training."""

from dataclasses import replace

import pytest
import torch

from raffia.algorithms.efficientzero import (
    EfficientZeroModel,
    EfficientZeroModelMLP,
    Planner,
    make_model,
)

PROJECTION = dict(proj_hid=7, proj_out=6, pred_hid=5, pred_out=6)  # a thousandth of the weights
HEADS = {f"{head}_head_hidden_channels": [5] for head in ("reward", "value", "policy")}
HEADS |= dict(lstm_hidden_size=6) | PROJECTION
CHANNELS = dict(num_channels=8)
CHANNELS |= dict(reward_head_channels=2, value_head_channels=3, policy_head_channels=4)
IMAGE, VECTOR = (3, 5, 4), (4,)
SUPPORTS = dict.fromkeys(("reward_support_range", "value_support_range"), (-3, 4, 1))
SIZES = dict(latent_state_dim=8, lstm_hidden_size=6, num_channels=4, head_hidden_channels=(5,))
SIZES |= dict(downsample=False) | SUPPORTS | PROJECTION  # of a `ModelConfig`


def conv(shape=IMAGE, actions=5, **options):
    return EfficientZeroModel(shape, actions, **{**HEADS, **CHANNELS, **options})


def vector(shape=VECTOR, actions=5, **options):
    return EfficientZeroModelMLP(shape, actions, **{**HEADS, "latent_state_dim": 8, **options})


BOTH = pytest.mark.parametrize(
    ("build", "shape"), [(conv, IMAGE), (vector, VECTOR)], ids=["conv", "mlp"]
)


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(model, seed=0):
    """The model with all parameters and statistics moved, so that none has its initial value."""
    generator = draws(seed)
    with torch.no_grad():
        for name, entry in model.state_dict().items():
            if "running_var" in name:
                entry.mul_(0.5 + torch.rand(entry.shape, generator=generator))
            elif entry.is_floating_point():
                entry.add_(0.1 * torch.randn(entry.shape, generator=generator))
    return model.eval()


def step(model, obs, action=None):
    """The root, and the child of an action."""
    root = model.initial_inference(obs)
    action = torch.arange(len(obs)) if action is None else action
    return root, model.recurrent_inference(root.latent_state, root.reward_hidden_state, action)


def planner_of(spec, config, *, scale=0.3, consistency=True, **options):
    """A planner whose networks have weights as after training."""
    torch.manual_seed(0)
    model = make_model(spec, config.model, consistency=consistency)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * scale)
    return Planner(model, spec, config, **options)


def configured(config, **parts):
    """The config with some options changed, given by section."""
    changed = {name: replace(getattr(config, name), **new) for name, new in parts.items()}
    return replace(config, **changed)


def assert_close(found, expected, equal_nan=False, **tolerances):
    """Equal keys and near entries; without tolerances, equal bits."""
    pairs, tolerances = dict(expected.items(True, True)), tolerances or {"atol": 0, "rtol": 0}
    for key, value in found.items(True, True):
        options = dict(equal_nan=equal_nan, msg=lambda text, key=key: f"{key}: {text}")
        torch.testing.assert_close(value, pairs.pop(key), **options, **tolerances)
    assert not pairs
