import copy

import pytest
import torch
from torch import nn

from raffia.algorithms.efficientzero.folding import Folding
from raffia.algorithms.efficientzero.model import EfficientZeroModel, EfficientZeroModelMLP


def drawn(model, seed=0):
    """The model with parameters and statistics at random, so that none is as it starts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, entry in model.state_dict().items():
            if entry.is_floating_point():
                entry.uniform_(0.1 if "running_var" in name else -0.5, 0.9, generator=generator)
    return model.eval()


def conv(shape=(3, 5, 4), actions=5, **options):
    options = dict(num_channels=8, lstm_hidden_size=6, proj_hid=7, proj_out=6) | options
    return drawn(EfficientZeroModel(shape, actions, **options))


def vector(size=4, actions=5, **options):
    options = dict(latent_state_dim=8, lstm_hidden_size=6, proj_hid=7, proj_out=6) | options
    return drawn(EfficientZeroModelMLP(size, actions, **options))


BOTH = pytest.mark.parametrize(
    ("build", "shape"), [(conv, (3, 5, 4)), (vector, (4,))], ids=["conv", "mlp"]
)


@torch.no_grad()
def outputs(model, shape):
    """All that it says of an observation and of the states after three actions."""
    obs = torch.linspace(-1, 1, 3 * torch.Size(shape).numel()).view(3, *shape)
    root = model.initial_inference(obs)
    child = model.recurrent_inference(
        root.latent_state, root.reward_hidden_state, torch.tensor([4, 0, 2])
    )
    return [*root[:4], *root[4], *child[:4], *child[4]]


@BOTH
@pytest.mark.parametrize("norm_type", ["BN", "LN"])
def test_a_refreshed_copy_says_what_the_model_says(build, shape, norm_type):
    model = build(norm_type=norm_type)
    folding = Folding(model)
    other = drawn(copy.deepcopy(model), seed=1)
    assert not torch.allclose(outputs(folding.model, shape)[3], outputs(other, shape)[3])
    folding.refresh(other)
    torch.testing.assert_close(
        outputs(folding.model, shape), outputs(other, shape), rtol=1e-3, atol=1e-4
    )


def batch_norm_without_statistics():
    model = vector()
    model.prediction_network.fc_value_head[1] = nn.BatchNorm1d(32, track_running_stats=False)
    return model.eval()


OTHERS = {
    "images": (vector, conv, "representation_network is RepresentationNetwork here and Rep.*MLP"),
    "norm": (
        vector,
        lambda: vector(norm_type="LN"),
        "representation_network.fc_representation.1 is LayerNorm here and BatchNorm1d there",
    ),
    "norm of images": (
        conv,
        lambda: conv(norm_type="LN"),
        "representation_network.norm is LayerNorm here and BatchNorm2d there",
    ),
    "norm the other way round": (
        lambda: vector(norm_type="LN"),
        vector,
        "representation_network.fc_representation.1 is BatchNorm1d here and LayerNorm there",
    ),
    "latent": (
        vector,
        lambda: vector(latent_state_dim=16),
        r"fc_representation.0.weight is of shape \[16, 4\] here and of shape \[8, 4\] there",
    ),
    "lstm": (
        vector,
        lambda: vector(lstm_hidden_size=7),
        r"dynamics_network.lstm.weight_ih_l0 is of shape \[28, 8\] here and of shape \[24, 8\]",
    ),
    "actions": (
        lambda: vector(discrete_action_encoding_type="not_one_hot"),
        lambda: vector(actions=6, discrete_action_encoding_type="not_one_hot"),
        r"prediction_network.fc_policy_head.3.weight is of shape \[6, 32\] here",
    ),
    "more blocks": (
        conv,
        lambda: conv(num_res_blocks=2),
        "representation_network.resblocks.1 is ResidualBlock here and missing there",
    ),
    "fewer blocks": (
        lambda: conv(num_res_blocks=2),
        conv,
        "representation_network.resblocks.1 is missing here and ResidualBlock there",
    ),
    "activation": (
        conv,
        lambda: conv(activation=nn.Tanh()),
        "representation_network.activation is Tanh here and ReLU there",
    ),
    "no statistics": (
        vector,
        batch_norm_without_statistics,
        r"fc_value_head.1.running_mean is None here and of shape \[32\] there",
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
    folding = Folding(build())
    shape = (3, 5, 4) if isinstance(build(), EfficientZeroModel) else (4,)
    before = outputs(folding.model, shape)
    with pytest.raises(ValueError, match=rf"{message}.*; fold\(model\) makes a new one"):
        folding.refresh(drawn(other(), seed=1))
    for found, expected in zip(outputs(folding.model, shape), before, strict=True):
        assert torch.equal(found, expected)
    folding.refresh(build())
    torch.testing.assert_close(outputs(folding.model, shape), before)


def test_the_projection_does_not_count():
    folding = Folding(vector())
    other = vector(self_supervised_learning_loss=False)
    folding.refresh(other)
    torch.testing.assert_close(
        outputs(folding.model, (4,)), outputs(other, (4,)), rtol=1e-3, atol=1e-4
    )
