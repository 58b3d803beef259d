"""Networks: sizes, initial weights, options, use as keyed modules, refused arguments."""

import copy
import inspect

import pytest
import torch
from torch import nn

from raffia.algorithms.efficientzero import (
    EfficientZeroModel,
    EfficientZeroModelMLP,
    PredictionNetwork,
    RepresentationNetwork,
    fold,
)
from raffia.algorithms.efficientzero.folding import Folding
from raffia.algorithms.efficientzero.networks import DynamicsNetwork, latent_size
from raffia.nn import TensorDictSequential, symbolic_trace
from raffia.tensordict import TensorDict, from_modules
from tests.marks import refusals

from .small import BOTH, IMAGE, conv, step, vector

HALF = dict.fromkeys(("reward_support_range", "value_support_range"), (-50, 51, 1))
CART_POLE = {"latent_state_dim": 128, "lstm_hidden_size": 128, "action_space_size": 2}


LATENTS = {(12, 84, 84): (6, 6), (2, 64, 64): (8, 8), (2, 65, 7): (5, 1), (1, 1, 1): (1, 1)}
LATENTS[2, 5, 4] = None  # without downsampling
PUBLISHED = {
    "conv 96": (EfficientZeroModel, (12, 96, 96), {}, 8_353_192),
    "conv 64": (EfficientZeroModel, (4, 64, 64), HALF, 11_099_072),
    "cart pole": (EfficientZeroModelMLP, 4, CART_POLE, 3_591_508),
}


@pytest.mark.parametrize(("kind", "shape", "options", "count"), PUBLISHED.values(), ids=PUBLISHED)
def test_parameters_are_as_many_as_published(kind, shape, options, count):
    ours = {"downsample" if kind is EfficientZeroModel else "res_connection_in_dynamics": True}
    with torch.device("meta"):
        model = kind(shape, **{"action_space_size": 6, **ours, **options})
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize("norm_type", ["BN", "LN"])
@pytest.mark.parametrize("shape, size", LATENTS.items(), ids=str)
def test_images_of_any_size(shape, size, norm_type):
    downsample = size is not None
    assert latent_size(*shape[1:], downsample=downsample) == (size or shape[1:])
    model = conv(shape, downsample=downsample, norm_type=norm_type).eval()
    root, child = step(model, torch.rand(2, *shape))
    assert root.latent_state.shape == child.latent_state.shape == (2, 8, *(size or shape[1:]))


@BOTH
def test_each_model_has_its_own_activations_in_all_networks(build, shape):
    every = [m for _ in range(2) for _, m in build().named_modules(remove_duplicate=False)]
    found = [m for m in every if isinstance(m, nn.ReLU)]
    assert len(found) > 16 and len({id(m) for m in found}) == len(found)
    assert inspect.signature(DynamicsNetwork).parameters["activation"].default not in found
    model, plain = build(activation=nn.Tanh()), build()
    for part in model.children():
        names = {type(m).__name__ for m in part.modules()}
        assert not names & {"ReLU", "GELU"}
        assert "Tanh" in names or part is model.action_encoding
    plain.load_state_dict(model.state_dict())
    obs = torch.rand(3, *shape)
    assert not torch.allclose(step(model, obs)[1].latent_state, step(plain, obs)[1].latent_state)
    identity = build(activation=nn.Sequential())  # its length is 0, which is false
    assert not {type(m).__name__ for m in identity.modules()} & {"ReLU", "GELU"}


@BOTH
def test_all_parameters_learn_and_the_consistency_target_does_not(build, shape):
    model = build(last_linear_layer_init_zero=False)
    _, child = step(model, torch.rand(3, *shape))
    assert not model.project(child.latent_state, with_grad=False).requires_grad
    projected = model.project(child.latent_state)
    sum(x.square().sum() for x in (*child[:3], projected)).backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None]
    without = build(self_supervised_learning_loss=False)
    assert not [n for n in without.state_dict() if n.startswith(("projection", "prediction_head"))]
    with pytest.raises(RuntimeError, match="self_supervised_learning_loss=True"):
        without.project(torch.rand(2, 8))


@BOTH
def test_without_categories_there_is_one_number(build, shape):
    model = build(categorical_distribution=False)
    raw = model.decode_value(torch.tensor([[1.0 + 0.003], [0.0]]))
    torch.testing.assert_close(raw, torch.tensor([3.0, 0.0]), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="one value per row"):
        model.decode_value(torch.zeros(2, 5))


@BOTH
@pytest.mark.parametrize("sigma_type", ["conditioned", "fixed"])
def test_actions_are_encoded_as_the_options_say(build, shape, sigma_type):
    plane = build(discrete_action_encoding_type="not_one_hot")
    assert build().dynamics_network.action_encoding_dim == 5
    assert plane.dynamics_network.action_encoding_dim == 1
    assert plane.action_encoding(torch.tensor([[4], [0]])).tolist() == [[pytest.approx(0.8)], [0]]
    continuous = dict(continuous_action_space=True, sigma_type=sigma_type)
    model = build(actions=2, last_linear_layer_init_zero=False, **continuous).eval()
    action = torch.tensor([[0.5, -1.0], [0.5, -1.0], [0.0, 2.0]])
    obs = torch.rand(1, *shape).expand(3, *shape)
    _, child = step(model, obs, action)
    mean, sigma = child.policy_logits.chunk(2, -1)
    assert mean.shape == sigma.shape == (3, 2) and (sigma > 0).all()
    torch.testing.assert_close(child.latent_state[0], child.latent_state[1])
    assert not torch.allclose(child.latent_state[0], child.latent_state[2])
    assert (sigma == 0.3).all() == (sigma_type == "fixed")
    with pytest.raises(ValueError, match=r"floats of shape \[B, 2\]"):
        step(model, obs, torch.tensor([0, 1, 1]))


# Keyed modules


@BOTH
def test_a_sequence_of_keyed_modules_is_the_model(build, shape):
    options = dict(actions=2, last_linear_layer_init_zero=False, state_norm=True)
    members = [build(**options).eval() for _ in range(3)]
    model = members[0]
    entries = list(model.state_dict())
    keyed = [TensorDictSequential(m.representation, m.dynamics, m.prediction) for m in members]
    td = TensorDict(
        observation=torch.rand(3, *shape),
        action=torch.tensor([0, 1, 1]),
        reward_hidden_state=dict(h=torch.zeros(3, 6), c=torch.zeros(3, 6)),
        batch_size=[3],
    )
    state = [("reward_hidden_state", "h"), ("reward_hidden_state", "c")]
    assert model.representation.out_keys == model.prediction.in_keys == ["latent_state"]
    assert model.dynamics.in_keys == ["latent_state", "action", *state]
    assert model.dynamics.out_keys == ["latent_state", *state, "value_prefix"]
    assert model.prediction.out_keys == ["policy_logits", "value"]
    assert list(model.state_dict()) == entries  # each network is registered once

    _, child = step(model, td["observation"], td["action"])
    h, c = (part[0] for part in child.reward_hidden_state)
    names = ["value", "value_prefix", "policy_logits", "latent_state"]
    expected = dict(zip(names, child[:4], strict=True))
    found, traced = keyed[0](td.clone()), symbolic_trace(keyed[0])(td.clone())
    for key, value in {**expected, state[0]: h, state[1]: c}.items():
        assert torch.equal(found[key], value) and torch.equal(traced[key], value), key

    params = from_modules(*keyed)

    def run(params, td):
        with params.to_module(keyed[0]):
            return keyed[0](td)

    stacked = torch.vmap(run, (0, None))(params, td.clone())
    for i, member in enumerate(keyed):
        expected_member = member(td.clone())
        for key in (*expected, *state):
            torch.testing.assert_close(stacked[i][key], expected_member[key], rtol=1e-4, atol=1e-5)

    model.prediction_network = members[1].prediction_network  # one put in later counts
    latent = model.representation(observation=td["observation"])
    assert torch.equal(
        model.prediction(latent_state=latent)[1], members[1].prediction_network(latent)[1]
    )
    twin = copy.deepcopy(model)
    assert twin.prediction.module is twin.prediction_network


@pytest.mark.slow
@BOTH
def test_the_steps_compile_without_a_break(build, shape):
    model = build(last_linear_layer_init_zero=False).eval()
    with torch.no_grad():
        root, child = step(model, torch.rand(3, *shape))
    compiled = torch.compile(model.recurrent_inference, backend="eager", fullgraph=True)
    found = compiled(root.latent_state, root.reward_hidden_state, torch.arange(3))
    torch.testing.assert_close(found, child)


# Dynamics


def dynamics(**options):
    sizes = dict(action_encoding_dim=3, num_channels=11, reward_head_channels=2, lstm_hidden_size=6)
    sizes[FLAT] = 2 * 5 * 4
    return DynamicsNetwork(IMAGE, **sizes | options)


def zeros(batch, hidden=6):
    return torch.zeros(1, batch, hidden), torch.zeros(1, batch, hidden)


def test_the_dynamics_network():
    network = dynamics(num_res_blocks=0).eval()
    nn.init.zeros_(network.conv.weight)
    x = torch.randn(2, 11, 5, 4)  # the channels count the action's planes
    original = x.clone()
    latent, (h, c), value_prefix = network(x, zeros(2))
    torch.testing.assert_close(latent, x[:, :8].relu())  # added before the activation
    assert torch.equal(x, original) and value_prefix.shape == (2, 601)
    assert h.shape == c.shape == (1, 2, 6)
    latent, _, _ = DynamicsNetwork((4, 1, 1))(torch.randn(2, 64, 1, 1), zeros(2, 512))
    assert latent.shape == (2, 62, 1, 1)
    arguments = inspect.signature(DynamicsNetwork).parameters
    assert repr(arguments["activation"].default) == "ReLU(inplace=True)"

    network = dynamics(last_linear_layer_init_zero=False)
    weights, reward_mean = network.get_reward_mean()
    counted = [network.conv.weight, *network.resblocks.parameters()]
    of_reward = [network.conv1x1_reward.weight, *network.fc_reward_head.parameters()]
    for parts, mean in ((counted, network.get_dynamic_mean()), (of_reward, reward_mean)):
        values = torch.cat([p.detach().flatten() for p in parts])
        assert isinstance(mean, float) and mean == pytest.approx(float(values.abs().mean()))
    assert torch.equal(torch.from_numpy(weights), values)


# Mistakes

CONTINUOUS, ONE_NUMBER = {"continuous_action_space": True}, {"categorical_distribution": False}
WRONG_OPTIONS = [
    ({"norm_type": "GN"}, "norm_type='GN'.*must be one of 'BN', 'LN'"),
    ({"gaussian_head": "two"}, "gaussian_head='two' must be one of 'mlp', 'reparameterization'"),
    ({"sigma_type": "free"}, "sigma_type='free' must be one of 'conditioned', 'fixed'"),
    (CONTINUOUS | {"fixed_sigma_value": 0}, "fixed_sigma_value=0 .* number > 0"),
    ({"fixed_sigma_value": float("nan")}, "fixed_sigma_value=nan .* number > 0"),
    (CONTINUOUS | {"discrete_action_encoding_type": "no"}, "'one_hot', 'not_one_hot'"),
    (ONE_NUMBER | {"reward_support_range": (5, 1, 1)}, "start=5, .* start must be below stop"),
    (ONE_NUMBER | {"value_support_range": (1, 5, 0)}, "step=0.* step positive"),
    ({"actions": 0}, "action_space_size=0.* at least 1"),
    (CONTINUOUS | {"actions": 0}, "action_space_size=0.* at least 1"),
]
WRONG_ACTIONS = [
    ([0, 1, 5], ValueError, "must be from 0 to 4; got actions from 0 to 5"),
    ([0, -1, 1], ValueError, "must be from 0 to 4; got actions from -1 to 1"),
    ([0.0, 1.0, 2.0], TypeError, r"got torch.float32: pass action.long\(\)"),
    ([[0, 1], [1, 1], [2, 2]], ValueError, r"shape \[B\]; got \[3, 2\]"),
    ([0, 1], ValueError, "2 actions were given for 3 latent states"),
]


@BOTH
def test_wrong_options_actions_and_states_are_refused(build, shape):
    for options, message in WRONG_OPTIONS:
        with pytest.raises(ValueError, match=message):
            build(**options)
    model = build()
    root = model.initial_inference(torch.rand(3, *shape))
    h, c = root.reward_hidden_state
    for action, kind, message in WRONG_ACTIONS:
        with pytest.raises(kind, match=message):
            model.recurrent_inference(root.latent_state, (h, c), torch.tensor(action))
    action, latent = torch.arange(3), root.latent_state
    with pytest.raises(ValueError, match=r"shape \[1, 3, 6\] each; got \[1, 2, 6\]"):
        model.recurrent_inference(latent, (h[:, :2], c), action)
    with pytest.raises(ValueError, match=r"8 \+ 5 = 13 "):
        model.recurrent_inference(latent[:, :7], (h, c), action)
    with pytest.raises(ValueError, match="latent states must have shape"):
        model.prediction_network(latent[:, :7])


FLAT = "flatten_output_size_for_reward_head"
REFUSED = [
    (lambda: conv((4,)), r"observation_shape=\[4\].*EfficientZeroModelMLP"),
    (lambda: conv(4), r"observation_shape=\[4\].*EfficientZeroModelMLP"),
    (lambda: vector(IMAGE), r"observation_shape=\[3, 5, 4\].*use EfficientZeroModel"),
    (lambda: vector(latent_state_dim=12, latent_norm="SimNorm"), "groups of 8.*=12.*set it to 16"),
    (lambda: vector(latent_norm="BN"), "latent_norm='BN'"),
    (lambda: conv(num_channels=1, downsample=True), "num_channels=1 must be at least 2"),
    (lambda: DynamicsNetwork(IMAGE, norm_type=None), "norm_type=None.*must be one of 'BN', 'LN'"),
    (lambda: RepresentationNetwork(IMAGE, downsample=False, norm_type="GN"), "norm_type='GN'"),
    (lambda: PredictionNetwork(IMAGE, 2, norm_type="GN"), "norm_type='GN'"),
    (lambda: run_dynamics(5, 4, **{FLAT: 64}), "2 x 5 x 4.*_reward_head=40"),
    (lambda: dynamics(num_channels=3), "num_channels=3 must be larger than .*_dim=3"),
    (lambda: run_dynamics(4, 5, norm_type="LN"), "LayerNorm was built for latent states of 5 x 4"),
    (lambda: run_root(conv, (2, 3, 4, 5)), r"\['B', 3, 5, 4\]; got .* of .* \[2, 3, 4, 5\]"),
    (lambda: run_root(conv, (3, 5, 4)), r"\['B', 3, 5, 4\]"),
    (lambda: run_root(conv, (2, 3, 5, 4), torch.uint8), r"uint8.*observation.float\(\) / 255"),
    (lambda: run_root(vector, (2, 5)), r"shape \[B, 4\]; got torch.float32 of shape \[2, 5\]"),
    (lambda: run_root(vector, (4,)), r"shape \[B, 4\]"),
]


def run_dynamics(height, width, **options):
    return dynamics(**options)(torch.ones(2, 11, height, width), zeros(2))


def run_root(build, shape, dtype=torch.float32):
    return build().initial_inference(torch.zeros(shape, dtype=dtype))


test_wrong_shapes_and_arguments_are_refused = refusals(REFUSED)


@BOTH
@pytest.mark.parametrize("downsample", [False, True])
def test_an_observation_of_another_precision_is_refused(build, shape, downsample):
    model = build(**{"downsample": True} if downsample and build is conv else {})
    obs = torch.rand(2, *shape)
    message = r"torch.float64, but .* torch.float32: pass observation.to\(torch.float32\)"
    for call in (model.initial_inference, fold(model).root, Folding(model).model.initial_inference):
        with pytest.raises(TypeError, match=message):
            call(obs.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert model.initial_inference(obs.bfloat16()).value.shape == (2, 601)
    with pytest.raises(TypeError, match="torch.float32, but the weights are torch.float64"):
        model.double().initial_inference(obs)
