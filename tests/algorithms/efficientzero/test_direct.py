"""A folded copy runs its layers directly, unless hooks are to see them."""

import pytest
import torch
from torch import nn

from raffia.algorithms.efficientzero.folding import Folding
from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
from raffia.nn.blocks import DirectSequential


@pytest.fixture
def model():
    return EfficientZeroModelMLP(4, 2, latent_state_dim=8, lstm_hidden_size=6, norm_type="LN")


def sequentials(module):
    return [part for part in module.modules() if isinstance(part, nn.Sequential)]


@torch.no_grad()
def latent(folding):
    return folding.model.initial_inference(torch.linspace(-1, 1, 12).view(3, 4)).latent_state


def test_layers_run_directly_with_the_same_bits(model):
    folding = Folding(model)
    direct = latent(folding)
    assert {type(part) for part in sequentials(folding.model)} == {DirectSequential}
    for part in sequentials(folding.model):
        part.__class__ = nn.Sequential
    assert latent(folding).equal(direct)
    assert {type(part) for part in sequentials(model)} == {nn.Sequential}


def test_hooks_of_a_layer_are_still_called(model):
    plain = latent(Folding(model))
    layer = model.representation_network.fc_representation[0]
    layer.register_forward_hook(lambda module, args, output: -output)
    assert not latent(Folding(model)).equal(plain)
