"""The three steps as keyed modules."""

import pytest
import torch

from raffia.algorithms.efficientzero.model import EfficientZeroModel, EfficientZeroModelMLP
from raffia.nn.ensemble import EnsembleModule
from raffia.nn.sequence import TensorDictSequential
from raffia.nn.trace import symbolic_trace
from raffia.tensordict.functions import from_modules
from raffia.tensordict.tensordict import TensorDict

SIZES = dict(lstm_hidden_size=6, last_linear_layer_init_zero=False, state_norm=True)


def conv():
    return EfficientZeroModel((3, 5, 4), 2, num_channels=8, **SIZES).eval()


def vector():
    return EfficientZeroModelMLP(4, 2, latent_state_dim=8, **SIZES).eval()


BOTH = pytest.mark.parametrize(
    ("build", "shape"), [(conv, (3, 5, 4)), (vector, (4,))], ids=["conv", "mlp"]
)


def record(shape):
    state = dict(h=torch.zeros(3, 6), c=torch.zeros(3, 6))
    return TensorDict(
        observation=torch.rand(3, *shape),
        action=torch.tensor([0, 1, 1]),
        reward_hidden_state=state,
        batch_size=[3],
    )


def sequence(model):
    return TensorDictSequential(model.representation, model.dynamics, model.prediction)


@BOTH
def test_a_sequence_of_them_is_the_model(build, shape):
    model, td = build(), record(shape)
    root = model.initial_inference(td["observation"])
    child = model.recurrent_inference(root.latent_state, root.reward_hidden_state, td["action"])
    sequence(model)(td)
    assert torch.equal(td["latent_state"], child.latent_state)
    assert torch.equal(td["reward_hidden_state", "h"], child.reward_hidden_state[0][0])
    assert torch.equal(td["reward_hidden_state", "c"], child.reward_hidden_state[1][0])
    assert torch.equal(td["value_prefix"], child.value_prefix)
    assert torch.equal(td["policy_logits"], child.policy_logits)
    assert torch.equal(td["value"], child.value)


@BOTH
def test_the_keys_are_the_documented_ones(build, shape):
    model = build()
    state = [("reward_hidden_state", "h"), ("reward_hidden_state", "c")]
    assert model.representation.in_keys == ["observation"]
    assert model.representation.out_keys == ["latent_state"]
    assert model.dynamics.in_keys == ["latent_state", "action", *state]
    assert model.dynamics.out_keys == ["latent_state", *state, "value_prefix"]
    assert model.prediction.in_keys == ["latent_state"]
    assert model.prediction.out_keys == ["policy_logits", "value"]


@BOTH
def test_the_model_s_state_holds_each_network_once(build, shape):
    model = build()
    names = list(model.state_dict())
    model.representation, model.dynamics, model.prediction  # noqa: B018
    assert list(model.state_dict()) == names
    assert {n for n, _ in model.named_children()} == {
        *("representation_network", "dynamics_network", "prediction_network"),
        *("action_encoding", "projection", "prediction_head"),
    }
    assert not [n for n in names if "codes" in n]


@BOTH
def test_a_network_put_in_later_counts(build, shape):
    model, td = build(), record(shape)
    other = build()
    model.prediction_network = other.prediction_network
    model.representation(td)
    assert torch.equal(
        model.prediction(td)["value"], other.prediction_network(td["latent_state"])[1]
    )


@BOTH
def test_they_are_called_with_tensors_too(build, shape):
    model = build()
    latent = model.representation(observation=torch.rand(3, *shape))
    policy, value = model.prediction(latent_state=latent)
    assert policy.shape == (3, 2) and value.shape == (3, 601)


@BOTH
def test_they_trace(build, shape):
    sequential, td = sequence(build()), record(shape)
    traced = symbolic_trace(sequential)
    want, got = sequential(td.clone()), traced(td.clone())
    for key in want.keys(True, True):
        assert torch.equal(got[key], want[key])


@BOTH
def test_they_make_ensembles_of_stacked_parameters(build, shape):
    members, td = [sequence(build()) for _ in range(3)], record(shape)
    params = from_modules(*members)

    def run(params, td):
        with params.to_module(members[0]):
            return members[0](td)

    got = torch.vmap(run, (0, None))(params, td.clone())
    for i, member in enumerate(members):
        want = member(td.clone())
        for key in ("latent_state", "value", "value_prefix", ("reward_hidden_state", "c")):
            torch.testing.assert_close(got[i][key], want[key], rtol=1e-4, atol=1e-5)


def test_they_make_ensemble_modules():
    model, td = vector(), record((4,))
    model.representation(td)
    got = EnsembleModule(model.dynamics, 3)(td.clone())
    assert got["value_prefix"].shape == (3, 3, 601) and got["latent_state"].shape == (3, 3, 8)
    assert not torch.allclose(got["value_prefix"][0], got["value_prefix"][1])
