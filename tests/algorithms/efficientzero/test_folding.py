import pytest
import torch
from torch import nn

from raffia.algorithms.efficientzero.folding import Folding
from raffia.algorithms.efficientzero.model import EfficientZeroModel

from . import small
from .small import IMAGE, VECTOR, drawn


def conv(**options):
    return drawn(small.conv(**options))


def vector(**options):
    return drawn(small.vector(**options))


@torch.no_grad()
def outputs(model, shape):
    """All that it says of an observation and of the states after three actions."""
    obs = torch.linspace(-1, 1, 3 * torch.Size(shape).numel()).view(3, *shape)
    root = model.initial_inference(obs)
    child = model.recurrent_inference(
        root.latent_state, root.reward_hidden_state, torch.tensor([4, 0, 2])
    )
    return [*root[:4], *root[4], *child[:4], *child[4]]


@pytest.mark.parametrize(("build", "shape"), [(conv, IMAGE), (vector, VECTOR)])
@pytest.mark.parametrize("norm_type", ["BN", "LN"])
def test_a_refreshed_copy_says_what_the_model_says(build, shape, norm_type):
    model = build(norm_type=norm_type)
    folding = Folding(model)
    other = drawn(build(norm_type=norm_type, self_supervised_learning_loss=False), seed=1)
    assert not torch.allclose(outputs(folding.model, shape)[3], outputs(other, shape)[3])
    folding.refresh(other)  # the projection does not count
    found = outputs(folding.model, shape)
    torch.testing.assert_close(found, outputs(other, shape), rtol=1e-3, atol=1e-4)


def batch_norm_without_statistics():
    model = vector()
    model.prediction_network.fc_value_head[1] = nn.BatchNorm1d(5, track_running_stats=False)
    return model.eval()


OTHERS = {
    "images": (vector, conv, "representation_network is RepresentationNetwork here and Rep.*MLP"),
    "norm": (
        vector,
        lambda: vector(norm_type="LN"),
        "representation_network.fc_representation.1 is LayerNorm here and BatchNorm1d there",
    ),
    "lstm": (
        vector,
        lambda: vector(lstm_hidden_size=7),
        r"dynamics_network.lstm.weight_ih_l0 is of shape \[28, 8\] here and of shape \[24, 8\]",
    ),
    "actions": (
        lambda: vector(discrete_action_encoding_type="not_one_hot"),
        lambda: vector(actions=6, discrete_action_encoding_type="not_one_hot"),
        r"prediction_network.fc_policy_head.3.weight is of shape \[6, 5\] here",
    ),
    "more blocks": (
        conv,
        lambda: conv(num_res_blocks=2),
        "representation_network.resblocks.1 is ResidualBlock here and missing there",
    ),
    "activation": (
        conv,
        lambda: conv(activation=nn.Tanh()),
        "representation_network.activation is Tanh here and ReLU there",
    ),
    "no statistics": (
        vector,
        batch_norm_without_statistics,
        r"fc_value_head.1.running_mean is None here and of shape \[5\] there",
    ),
    "support": (
        vector,
        lambda: vector(value_support_range=(-299, 302, 1)),
        r"value_support is Support\(start=-299, .* here and Support\(start=-300",
    ),
    "state norm": (conv, lambda: conv(state_norm=True), "state_norm is True here and False there"),
}


@pytest.mark.parametrize(("build", "other", "message"), OTHERS.values(), ids=OTHERS)
def test_a_model_of_other_layers_is_refused_and_changes_nothing(build, other, message):
    model = build()
    folding = Folding(model)
    shape = IMAGE if isinstance(model, EfficientZeroModel) else VECTOR
    before = outputs(folding.model, shape)
    with pytest.raises(ValueError, match=rf"{message}.*Call fold\(model\) to make a new one"):
        folding.refresh(drawn(other(), seed=1))
    for found, expected in zip(outputs(folding.model, shape), before, strict=True):
        assert torch.equal(found, expected)
    folding.refresh(model)
    torch.testing.assert_close(outputs(folding.model, shape), before)
