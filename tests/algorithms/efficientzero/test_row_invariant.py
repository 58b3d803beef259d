"""A row of a search gets the same bits whatever the other rows of its batch are."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from raffia.algorithms.efficientzero import fold, make_model
from raffia.algorithms.efficientzero.config import ModelConfig
from raffia.algorithms.efficientzero.row_invariant import (
    RowInvariantConv2d,
    row_invariant,
)
from raffia.envs import Box, Discrete, EnvSpec
from raffia.recipes.running import threads

from .small import PROJECTION, draws

VECTOR = EnvSpec(observation_shape=(5,), action=Discrete(3))
FIELDS = EnvSpec(observation_shape=(4, 6, 5), action=Discrete(3))
IMAGES = EnvSpec(observation_shape=(3, 64, 64), action=Discrete(3))
BOX = EnvSpec(observation_shape=(3,), action=Box((-2.0,), (2.0,)))
SMALL = dict(latent_state_dim=12, lstm_hidden_size=6, head_hidden_channels=(8,), num_channels=7)
SMALL |= PROJECTION

FORMS = {
    "vector": (VECTOR, {}),
    "vector LN": (VECTOR, dict(norm_type="LN")),
    "not residual": (VECTOR, dict(res_connection=False)),
    "evolvable heads": (VECTOR, dict(evolvable_heads=True, max_head_nodes=16)),
    "odd sizes": (VECTOR, dict(latent_state_dim=11, head_hidden_channels=(7,))),
    "evolvable heads of odd size": (VECTOR, dict(evolvable_heads=True, max_head_nodes=13)),
    "box": (BOX, {}),
    "box fixed": (BOX, dict(sigma_type="fixed")),
    "box of LightZero": (BOX, dict(gaussian_head="reparameterization", activation="gelu")),
    "fields": (FIELDS, dict(downsample=False)),
    "fields LN": (FIELDS, dict(downsample=False, norm_type="LN", action_encoding="not_one_hot")),
    "one pixel": (dataclasses.replace(FIELDS, observation_shape=(4, 1, 1)), dict(downsample=False)),
    "images": (IMAGES, dict(downsample=True)),
    "state norm": (VECTOR, dict(state_norm=True)),
}


def make(form):
    spec, changes = FORMS[form]
    generator = draws(0)
    model = make_model(spec, ModelConfig(**SMALL | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
    return spec, model


@pytest.fixture(autouse=True)
def one_thread():
    """With several threads, a long sum is split according to the number of rows."""
    with threads(1):
        yield


def outputs(folded, observation, action):
    root = folded.root(observation)
    child, after = folded.recurrent_fn(root.embedding, action)
    again, _ = folded.recurrent_fn(after, action)
    leaves = [root.value, root.prior_logits, *child[:3], *again[:3]]
    return leaves + [x for x in after.values(True, True)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_is_the_same_bits_in_any_batch(form, compiled):
    spec, model = make(form)
    folded = fold(model)
    if not compiled:
        vars(folded)["compiled"] = None
    elif folded.compiled is None:
        return  # same as the eager case
    generator = draws(1)
    observation = torch.rand(21, *spec.observation_shape, generator=generator)
    action = torch.arange(21) % 3
    if isinstance(spec.action, Box):
        action = torch.rand(21, 1, generator=generator)
    expected = outputs(folded, observation, action)
    for start, end in [*((0, num) for num in range(1, 18)), (3, 4), (5, 12), (20, 21)]:
        found = outputs(folded, observation[start:end], action[start:end])
        for x, y in zip(found, expected, strict=True):
            assert x.equal(y[start:end]), (start, end, (x - y[start:end]).abs().max())


def test_plain_layers_are_not_row_invariant():
    """Shows that the test above can fail: plain layers differ, on a CPU whose BLAS is MKL."""
    if not torch.backends.mkl.is_available():
        pytest.skip("only MKL is known to differ")
    layer = nn.Linear(64, 64)
    x = torch.rand(21, 64)
    expected = layer(x)
    assert not all(layer(x[:num]).equal(expected[:num]) for num in range(1, 17))


def test_row_invariant_networks_equal_the_plain_ones():
    head = nn.Sequential(nn.Linear(50, 6), nn.ReLU(), nn.Linear(6, 2))
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1), nn.Flatten(), head)
    x = torch.rand(3, 3, 5, 5)
    plain = copy.deepcopy(network)
    row_invariant(network)
    assert [type(part) for part in network][:2] == [RowInvariantConv2d] * 2
    assert type(head) is not nn.Sequential
    torch.testing.assert_close(network(x), plain(x))
    torch.testing.assert_close(network[0](x[:1]), plain[0](x[:1]))
