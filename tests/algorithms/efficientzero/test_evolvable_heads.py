"""Heads whose form can change: at the start, grown, folded, stacked with heads of other forms."""

import pytest
import torch
from torch import nn

from raffia.algorithms.efficientzero import fold
from raffia.algorithms.efficientzero.config import ModelConfig
from raffia.algorithms.efficientzero.heads import LargestHead
from raffia.algorithms.efficientzero.model_mlp import EfficientZeroModelMLP
from raffia.envs import Box, Discrete, EnvSpec
from raffia.evolution import MutationConfig
from raffia.evolution.mutate import mutate

from .small import draws
from .test_learner import LINE, learner_of

ENVS = {
    "vectors": LINE,
    "images": EnvSpec(observation_shape=(2, 5, 4), action=Discrete(3)),
    "continuous": EnvSpec(observation_shape=(4,), action=Box(low=(-1.0, -1.0), high=(1.0, 1.0))),
}
EVOLVABLE = {"evolvable_heads": True, "max_head_layers": 3, "max_head_nodes": 12}
ANY = MutationConfig(
    no_mutation=0.0, activation=0.3, architecture=0.7, new_layer_prob=0.4, nodes=(1, 2, 3)
)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def evolvable(spec=LINE, **parts):
    return learner_of(spec, model=EVOLVABLE, **parts)


def members(learner, size=3, generations=6, seed=0):
    """States whose outputs are not 0; after some generations the members' forms differ."""
    state = torch.stack([learner.init(seed + i) for i in range(size)])
    for part in (state["params"], state["target", "params"]):
        for leaf in part.values(True, True):
            leaf += 0.2 * torch.rand(leaf.shape, generator=draws(seed))
    generator = draws(seed)
    for _ in range(generations):
        state, _ = mutate(state, ANY, generator)
    return state


def loaded(model, weights):
    names = dict(model.named_parameters()) | dict(model.named_buffers())
    for part in ("params", "buffers"):
        for key, value in weights[part].items(True, True):
            names[".".join(key)].data.copy_(value)
    return model.eval()


def inputs(spec, size=5):
    torch.manual_seed(1)
    continuous = isinstance(spec.action, Box)
    action = torch.rand(size, 2) if continuous else torch.randint(spec.action.n, (size,))
    return torch.rand(size, *spec.observation_shape), action


@pytest.mark.parametrize("env", ENVS)
def test_a_folded_model_gives_the_model_s_outputs_whatever_its_form(env):
    spec = ENVS[env]
    learner, (obs, action) = evolvable(spec), inputs(spec)
    model = learner.make_model(0)
    folded = fold(model)
    for state in members(learner, size=4).unbind(0):
        folded.refresh(loaded(model, state))
        root, expected = folded.root(obs), model.initial_inference(obs)
        torch.testing.assert_close(root.prior_logits, expected.policy_logits, **CLOSE)
        torch.testing.assert_close(root.value, model.decode_value(expected.value), **CLOSE)
        found, _ = folded.recurrent_fn(root.embedding, action)
        step = model.recurrent_inference(
            expected.latent_state, expected.reward_hidden_state, action
        )
        torch.testing.assert_close(found.prior_logits, step.policy_logits, **CLOSE)
        torch.testing.assert_close(found.reward, model.decode_reward(step.value_prefix), **CLOSE)


INVALID = [
    ({"head_hidden_channels": (32, 64)}, r"same number of nodes at the start, .* \(32,\)"),
    ({"head_hidden_channels": (200,)}, "set these to 3 and 200, or more"),
    ({"head_hidden_channels": (8,) * 4}, "set these to 4 and 128, or more"),
    ({"max_head_layers": 0}, "max_head_layers=0"),
]


@pytest.mark.parametrize(("settings", "error"), INVALID)
def test_invalid_forms_are_refused(settings, error):
    with pytest.raises(ValueError, match=error):
        ModelConfig(evolvable_heads=True, **settings)


def test_an_activation_outside_the_table_is_refused():
    largest = LargestHead(3, 64)
    with pytest.raises(ValueError, match="choose one of ReLU, GELU"):
        EfficientZeroModelMLP(4, 2, activation=nn.Hardswish(), largest_head=largest)
    model = EfficientZeroModelMLP(4, 2, activation=nn.Tanh(), largest_head=largest)
    assert int(model.prediction_network.fc_value_head.activation) == 4
