"""Folded copies give the model's outputs; models of other layers are refused."""

import pytest
import torch
from torch import nn

from raffia.algorithms.efficientzero import fold
from raffia.algorithms.efficientzero.folding import Folding
from raffia.nn.blocks import DirectSequential

from . import small
from .small import IMAGE, VECTOR, drawn


def conv(**options):
    return drawn(small.conv(**options))


def vector(**options):
    return drawn(small.vector(**options))


@torch.no_grad()
def outputs(model, shape):
    """All outputs for an observation and for the states after three actions."""
    obs = torch.linspace(-1, 1, 3 * torch.Size(shape).numel()).view(3, *shape)
    root, child = small.step(model, obs, torch.tensor([4, 0, 2]))
    return [*root[:4], *root[4], *child[:4], *child[4]]


@pytest.mark.parametrize(("build", "shape"), [(conv, IMAGE), (vector, VECTOR)])
@pytest.mark.parametrize("norm_type", ["BN", "LN"])
def test_a_refreshed_copy_gives_the_model_s_outputs(build, shape, norm_type):
    model = build(norm_type=norm_type)
    folding = Folding(model)
    other = drawn(build(norm_type=norm_type, self_supervised_learning_loss=False), seed=1)
    assert not torch.allclose(outputs(folding.model, shape)[3], outputs(other, shape)[3])
    folding.refresh(other)  # the projection does not count
    found = outputs(folding.model, shape)
    torch.testing.assert_close(found, outputs(other, shape), rtol=1e-3, atol=1e-4)


def changed(model, kind):
    """The model with linear layers, also in front of BatchNorm, that compute something else."""
    network = model.prediction_network
    for layer in [inner for inner in network.modules() if isinstance(inner, nn.Linear)]:
        if kind == "parametrized":
            nn.utils.parametrizations.weight_norm(layer)
        elif kind == "normalised":
            nn.utils.spectral_norm(layer)
        else:
            layer.register_forward_hook(lambda layer, given, found: 2 * found + 1)
    return drawn(model)


@pytest.mark.parametrize("build", [small.conv, small.vector])
@pytest.mark.parametrize("kind", ["parametrized", "normalised", "hook"])
def test_layers_that_compute_something_else_are_not_folded(build, kind):
    shape, norm = (IMAGE, "BN") if build is small.conv else (VECTOR, "LN")
    model, other = (
        changed(build(norm_type=norm, last_linear_layer_init_zero=False), kind) for _ in range(2)
    )
    snapshot = fold(model)
    assert snapshot.compiled is None and snapshot.recurrent_fn.compiled is None
    for now in (model, other):
        snapshot.refresh(now)
        found = outputs(snapshot._folding.model, shape)
        torch.testing.assert_close(found, outputs(now, shape), rtol=1e-3, atol=1e-4)


def without_statistics():
    model = vector()
    model.prediction_network.fc_value_head[1] = nn.BatchNorm1d(5, track_running_stats=False)
    return model.eval()


def plane(**options):
    return vector(discrete_action_encoding_type="not_one_hot", **options)


IMAGES, WIDE = conv(), dict(value_support_range=(-299, 302, 1))
OTHERS = [  # a model, another model, and the error message
    (vector, IMAGES, "representation_network is Repr.* here and Rep.*MLP"),
    (vector, vector(norm_type="LN"), "fc_representation.1 is LayerNorm here and Bat"),
    (vector, vector(lstm_hidden_size=7), r"weight_ih_l0 is of shape \[28, 8\] here"),
    (plane, plane(actions=6), r"fc_policy_head.3.weight is of sh.* here"),
    (conv, conv(num_res_blocks=2), "resblocks.1 is .* here and missing there"),
    (conv, conv(activation=nn.Tanh()), "activation is Tanh here and ReLU ther"),
    (vector, without_statistics(), "running_mean is None here and of shape"),
    (vector, vector(**WIDE), r"value_support is Support"),
    (conv, conv(state_norm=True), "state_norm is True here and False there"),
]


@pytest.mark.parametrize(("build", "other", "message"), OTHERS)
def test_a_model_of_other_layers_is_refused_and_changes_nothing(build, other, message):
    model, shape = build(), IMAGE if build is conv else VECTOR
    folding = Folding(model)
    before = outputs(folding.model, shape)
    with pytest.raises(ValueError, match=rf"{message}.*Call fold\(model\) to make a new one"):
        folding.refresh(other)
    for found, expected in zip(outputs(folding.model, shape), before, strict=True):
        assert torch.equal(found, expected)


def latent(folding):
    return outputs(folding.model, VECTOR)[3]


def test_layers_run_directly_with_the_same_bits_unless_they_have_hooks():
    model = vector(norm_type="LN")
    folding = Folding(model)
    direct = latent(folding)
    sequentials = [part for part in folding.model.modules() if isinstance(part, nn.Sequential)]
    assert {type(part) for part in sequentials} == {DirectSequential}
    for part in sequentials:
        part.__class__ = nn.Sequential
    assert latent(folding).equal(direct)
    assert not any(isinstance(part, DirectSequential) for part in model.modules())
    layer = model.representation_network.fc_representation[0]
    layer.register_forward_hook(lambda module, args, output: -output)
    assert not latent(Folding(model)).equal(direct)
