import copy
import inspect

import pytest
import torch
from torch import nn

from raffia.algorithms.efficientzero.dynamics import DynamicsNetwork
from raffia.algorithms.efficientzero.folding import Folding
from raffia.algorithms.efficientzero.inference import fold
from raffia.algorithms.efficientzero.model import (
    EfficientZeroModel,
    EfficientZeroModelMLP,
    NetworkOutput,
    PredictionNetwork,
    RepresentationNetwork,
)
from raffia.algorithms.efficientzero.representation import latent_size

HEADS = dict(
    lstm_hidden_size=6,
    reward_head_hidden_channels=[5],
    value_head_hidden_channels=[5],
    policy_head_hidden_channels=[5],
    proj_hid=7,
    proj_out=6,
    pred_hid=5,
    pred_out=6,
)
CONV = dict(num_channels=8, reward_head_channels=2, value_head_channels=3, policy_head_channels=4)


def conv(shape=(3, 5, 4), actions=5, **options):
    return EfficientZeroModel(shape, actions, **{**HEADS, **CONV, **options})


def vector(size=4, actions=5, **options):
    return EfficientZeroModelMLP(size, actions, **{**HEADS, "latent_state_dim": 8, **options})


BOTH = pytest.mark.parametrize(
    ("build", "shape"), [(conv, (3, 5, 4)), (vector, (4,))], ids=["conv", "mlp"]
)


def step(model, obs, action=None):
    """The root, and the child of an action."""
    root = model.initial_inference(obs)
    action = torch.arange(len(obs)) if action is None else action
    return root, model.recurrent_inference(root.latent_state, root.reward_hidden_state, action)


# Sizes and surfaces


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (lambda: EfficientZeroModel((12, 96, 96), 6, downsample=True), 8_353_192),
        (
            lambda: EfficientZeroModel(
                (4, 64, 64),
                6,
                downsample=True,
                reward_support_range=(-50, 51, 1),
                value_support_range=(-50, 51, 1),
            ),
            11_099_072,
        ),
        (
            lambda: EfficientZeroModelMLP(
                4, 2, latent_state_dim=128, lstm_hidden_size=128, res_connection_in_dynamics=True
            ),
            3_591_508,
        ),
    ],
    ids=["conv 96", "conv 64", "cart pole"],
)
def test_parameters_are_as_many_as_published(build, count):
    with torch.device("meta"):
        assert sum(p.numel() for p in build().parameters()) == count


# Defects of the peers that must not be here


@pytest.mark.parametrize("norm_type", ["BN", "LN"])
@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((3, 96, 96), (6, 6)),
        ((3, 84, 84), (6, 6)),
        ((2, 80, 80), (5, 5)),
        ((2, 64, 64), (8, 8)),
        ((2, 65, 7), (5, 1)),
        ((2, 7, 7), (1, 1)),
        ((1, 1, 1), (1, 1)),
    ],
    ids=str,
)
def test_any_size_goes_with_downsample(shape, size, norm_type):
    assert latent_size(*shape[1:], downsample=True) == size
    root, child = step(
        conv(shape, downsample=True, norm_type=norm_type).eval(), torch.rand(2, *shape)
    )
    assert root.latent_state.shape == child.latent_state.shape == (2, 8, *size)


@pytest.mark.parametrize("norm_type", ["BN", "LN"])
@pytest.mark.parametrize("shape", [(3, 3, 3), (2, 5, 4), (1, 1, 1), (2, 1, 6)], ids=str)
def test_any_size_is_kept_without_downsample(shape, norm_type):
    root, child = step(conv(shape, norm_type=norm_type).eval(), torch.rand(2, *shape))
    assert root.latent_state.shape == child.latent_state.shape == (2, 8, *shape[1:])


def test_a_stack_of_frames_is_channels():
    frames = torch.rand(2, 4, 3, 9, 8)  # [B, frames, RGB, H, W]
    model = conv((12, 9, 8), downsample=True).eval()
    assert model.initial_inference(frames.flatten(1, 2)).latent_state.shape == (2, 8, 2, 1)


@pytest.mark.parametrize(
    "model",
    [
        conv(norm_type="LN"),
        conv((3, 9, 7), downsample=True, norm_type="LN"),
        vector(norm_type="LN"),
        vector(norm_type="LN", res_connection_in_dynamics=True),
    ],
    ids=["board", "image", "mlp", "mlp with residual"],
)
def test_layer_norm_is_everywhere(model):
    def count(kind):
        return len([m for m in model.modules() if isinstance(m, kind)])

    assert count(nn.modules.batchnorm._BatchNorm) == 0
    assert count(nn.LayerNorm) > 10


def test_layer_norm_does_not_mix_samples():
    model, obs = conv(norm_type="LN", last_linear_layer_init_zero=False), torch.rand(3, 3, 5, 4)
    whole, first = step(model, obs)[1], step(model, obs[:1])[1]
    for a, b in zip(whole[:4], first[:4], strict=True):
        torch.testing.assert_close(a[:1], b)


@BOTH
def test_no_activation_is_shared_by_modules_or_models(build, shape):
    def found(model):
        return [m for _, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.ReLU)]

    one, two = found(build()), found(build())
    assert len(one) == len(two) > 8
    assert len({id(m) for m in one + two}) == len(one + two)
    default = inspect.signature(DynamicsNetwork).parameters["activation"].default
    assert default not in one + two


@BOTH
def test_the_activation_reaches_all_networks(build, shape):
    model = build(activation=nn.Tanh())
    for part in model.children():
        names = {type(m).__name__ for m in part.modules()}
        assert not names & {"ReLU", "GELU"}
        if part is not model.action_encoding:
            assert "Tanh" in names
    other = build()
    other.load_state_dict(model.state_dict())
    obs = torch.rand(3, *shape)
    assert not torch.allclose(step(model, obs)[1].latent_state, step(other, obs)[1].latent_state)


@BOTH
def test_an_activation_in_place_leaves_what_came_in(build, shape):
    model = build().eval()
    obs = torch.randn(3, *shape)
    kept = obs.clone()
    root = model.initial_inference(obs)
    latent = root.latent_state.clone()
    model.recurrent_inference(root.latent_state, root.reward_hidden_state, torch.tensor([0, 1, 2]))
    model.project(root.latent_state)
    assert torch.equal(obs, kept) and torch.equal(root.latent_state, latent)
    assert not root.reward_hidden_state[0].any() and not root.reward_hidden_state[1].any()


@BOTH
def test_the_first_value_prefix_is_a_tensor_of_zeros(build, shape):
    root = build().double().initial_inference(torch.rand(3, *shape, dtype=torch.float64))
    assert isinstance(root, NetworkOutput)
    assert torch.equal(root.value_prefix, torch.zeros(3, dtype=torch.float64))
    assert [s.shape for s in root.reward_hidden_state] == [(1, 3, 6)] * 2
    assert root.reward_hidden_state[0].dtype == torch.float64


@BOTH
def test_supports_of_reward_and_value_may_differ(build, shape):
    model = build(reward_support_range=(-2, 3, 1), value_support_range=(-10, 11, 0.5))
    _, child = step(model, torch.rand(3, *shape))
    assert child.value_prefix.shape == (3, 5) and child.value.shape == (3, 42)
    assert (
        model.decode_reward(child.value_prefix).shape
        == model.decode_value(child.value).shape
        == (3,)
    )
    with pytest.raises(ValueError, match="5 entries"):
        model.decode_reward(child.value)
    spike = torch.full((1, 42), -99.0).index_fill(1, torch.tensor([20 + 3]), 99.0)  # h(value) = 1.5
    assert model.decode_value(spike).item() == pytest.approx(2.5**2 - 1, rel=1e-2)


@BOTH
def test_hidden_layers_of_heads_are_as_given(build, shape):
    model = build(
        reward_head_hidden_channels=[16, 8],
        value_head_hidden_channels=[7, 6, 9],
        policy_head_hidden_channels=[],
    )
    prediction = model.prediction_network

    def widths(net):
        return [m.out_features for m in net if isinstance(m, nn.Linear)]

    assert widths(model.dynamics_network.fc_reward_head) == [16, 8, 601]
    heads = [n for n in ("fc_value", "fc_value_head") if hasattr(prediction, n)]
    assert widths(getattr(prediction, heads[0])) == [7, 6, 9, 601]
    assert widths(getattr(prediction, heads[0].replace("value", "policy"))) == [5]


def test_a_vector_for_the_conv_model_is_pointed_at_the_mlp_and_the_other_way_round():
    for shape in ((4,), [4], 4):
        with pytest.raises(ValueError, match=r"observation_shape=\[4\].*EfficientZeroModelMLP"):
            conv(shape)
    with pytest.raises(
        ValueError, match=r"observation_shape=\[3, 5, 4\].*EfficientZeroModel takes"
    ):
        vector((3, 5, 4))
    assert vector((4,)).initial_inference(torch.rand(2, 4)).value.shape == (2, 601)


def test_the_consistency_target_has_no_graph():
    model = conv()
    root = model.initial_inference(torch.rand(3, 3, 5, 4))
    assert not model.project(root.latent_state, with_grad=False).requires_grad
    model.project(root.latent_state).sum().backward()
    assert all(p.grad is not None for p in model.representation_network.parameters())


# Starting weights


@BOTH
def test_heads_start_at_zero_and_latent_states_do_not(build, shape):
    root, child = step(build(), torch.rand(3, *shape))
    assert not (root.value.any() or root.policy_logits.any())
    assert not (child.value.any() or child.policy_logits.any() or child.value_prefix.any())
    assert root.latent_state[0].ne(root.latent_state[1]).any()
    _, child = step(build(last_linear_layer_init_zero=False), torch.rand(3, *shape))
    assert child.value.any() and child.policy_logits.any() and child.value_prefix.any()


@BOTH
def test_all_parameters_of_a_step_get_a_gradient(build, shape):
    model = build(last_linear_layer_init_zero=False)
    _, child = step(model, torch.rand(3, *shape))
    projected = model.project(child.latent_state)
    sum(x.square().sum() for x in (*child[:3], projected)).backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None]


# Options


@BOTH
def test_state_norm_brings_latent_states_to_0_and_1(build, shape):
    for output in step(build(state_norm=True), torch.rand(3, *shape)):
        flat = output.latent_state.flatten(1)
        assert not flat.amin(1).any()
        torch.testing.assert_close(flat.amax(1), torch.ones(3))


@BOTH
def test_without_categories_there_is_one_number(build, shape):
    model = build(categorical_distribution=False, last_linear_layer_init_zero=False)
    _, child = step(model, torch.rand(3, *shape))
    assert child.value.shape == child.value_prefix.shape == (3, 1)
    raw = model.decode_value(torch.tensor([[1.0 + 0.003], [0.0]]))
    torch.testing.assert_close(raw, torch.tensor([3.0, 0.0]), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="one output"):
        model.decode_value(torch.zeros(2, 5))


@BOTH
def test_an_action_is_one_plane_or_one_for_each(build, shape):
    one_hot, plane = build(), build(discrete_action_encoding_type="not_one_hot")
    assert one_hot.dynamics_network.action_encoding_dim == 5
    assert plane.dynamics_network.action_encoding_dim == 1
    assert plane.action_encoding(torch.tensor([[4], [0]])).tolist() == [[pytest.approx(0.8)], [0]]
    with pytest.raises(ValueError, match="'one_hot' or 'not_one_hot'"):
        build(discrete_action_encoding_type="binary")


@BOTH
@pytest.mark.parametrize("sigma_type", ["conditioned", "fixed"])
def test_continuous_actions_go_in_as_they_are_and_come_out_as_a_gaussian(build, shape, sigma_type):
    options = dict(actions=2, continuous_action_space=True, sigma_type=sigma_type)
    model = build(last_linear_layer_init_zero=False, **options).eval()
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
    with pytest.raises(ValueError, match="'conditioned' or 'fixed'"):
        build(continuous_action_space=True, sigma_type="free")
    with pytest.raises(ValueError, match="fixed_sigma_value=0"):
        build(continuous_action_space=True, fixed_sigma_value=0)


@BOTH
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(sigma_type="nonsense"), "sigma_type='nonsense': it is 'conditioned' or 'fixed'"),
        (dict(fixed_sigma_value=-1), "fixed_sigma_value=-1 .* number > 0"),
        (dict(fixed_sigma_value=float("nan")), "fixed_sigma_value=nan .* number > 0"),
        (dict(fixed_sigma_value=float("inf")), "fixed_sigma_value=inf .* number > 0"),
        (
            dict(continuous_action_space=True, discrete_action_encoding_type="nonsense"),
            "discrete_action_encoding_type='nonsense': it is 'one_hot' or 'not_one_hot'",
        ),
        (
            dict(categorical_distribution=False, reward_support_range=(5, 1, 1)),
            "start=5, stop=1, step=1.* start must be below stop",
        ),
        (
            dict(categorical_distribution=False, value_support_range=(1, 5, 0)),
            "start=1, stop=5, step=0.* step positive",
        ),
    ],
    ids=str,
)
def test_options_are_checked_where_they_do_not_count_too(build, shape, options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


@BOTH
@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("encoding", ["one_hot", "not_one_hot"])
def test_there_is_at_least_one_action(build, shape, continuous, encoding):
    options = dict(continuous_action_space=continuous, discrete_action_encoding_type=encoding)
    with pytest.raises(ValueError, match="action_space_size=0.* at least 1"):
        build(actions=0, **options)
    assert build(actions=1, **options).action_encoding.size == 1


def test_an_activation_of_length_zero_is_one():
    model = vector(activation=nn.Sequential())  # the identity, which is false
    assert not {type(m).__name__ for m in model.modules()} & {"ReLU", "GELU"}
    names = {type(m).__name__ for m in vector().representation_network.modules()}
    assert "GELU" in names and "ReLU" not in names


def test_latent_states_may_be_normalised_in_groups():
    latent = vector(latent_norm="SimNorm").initial_inference(torch.rand(2, 4)).latent_state
    torch.testing.assert_close(latent.sum(-1), torch.ones(2))
    with pytest.raises(ValueError, match="groups of 8.*=12.*pass 16"):
        vector(latent_state_dim=12, latent_norm="SimNorm")
    with pytest.raises(ValueError, match="latent_norm='BN'"):
        vector(latent_norm="BN")


@BOTH
def test_without_the_self_supervised_loss_there_is_no_projection(build, shape):
    model = build(self_supervised_learning_loss=False)
    assert not [n for n in model.state_dict() if n.startswith(("projection", "prediction_head"))]
    with pytest.raises(RuntimeError, match="self_supervised_learning_loss=True"):
        model.project(torch.rand(2, 8))


@BOTH
def test_a_model_of_one_seed_is_one_model(build, shape):
    obs = torch.rand(3, *shape)

    def run():
        torch.manual_seed(7)
        return step(build(last_linear_layer_init_zero=False), obs)[1]

    assert all(torch.equal(a, b) for a, b in zip(run()[:4], run()[:4], strict=True))


@BOTH
def test_a_copy_is_a_model_apart(build, shape):
    model = build().eval()
    twin, obs = copy.deepcopy(model), torch.rand(3, *shape)
    before = step(model, obs)[1].latent_state
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    assert torch.equal(step(model, obs)[1].latent_state, before)
    assert twin.prediction.module is twin.prediction_network


@pytest.mark.slow
@BOTH
def test_the_steps_compile_without_a_break(build, shape):
    model = build(last_linear_layer_init_zero=False).eval()
    with torch.no_grad():
        root, child = step(model, torch.rand(3, *shape))
    compiled = torch.compile(model.recurrent_inference, backend="eager", fullgraph=True)
    got = compiled(root.latent_state, root.reward_hidden_state, torch.arange(3))
    torch.testing.assert_close(got, child)


# Mistakes


@pytest.mark.parametrize(
    "build",
    [
        conv,
        vector,
        lambda **o: DynamicsNetwork((3, 5, 4), **o),
        lambda **o: RepresentationNetwork((3, 5, 4), downsample=False, **o),
        lambda **o: PredictionNetwork((3, 5, 4), 2, **o),
    ],
)
@pytest.mark.parametrize("norm_type", ["GN", None])
def test_another_norm_type_is_refused(build, norm_type):
    with pytest.raises(ValueError, match=f"norm_type={norm_type!r}.*'BN' is BatchNorm"):
        build(norm_type=norm_type)


@pytest.mark.parametrize(
    ("build", "obs", "message"),
    [
        (
            conv,
            torch.rand(2, 3, 4, 5),
            r"\['B', 3, 5, 4\], got torch.float32 of shape \[2, 3, 4, 5\]",
        ),
        (conv, torch.rand(2, 4, 5, 4), r"\['B', 3, 5, 4\]"),
        (conv, torch.rand(3, 5, 4), r"\['B', 3, 5, 4\]"),
        (conv, torch.zeros(2, 3, 5, 4, dtype=torch.uint8), r"uint8.*observation.float\(\) / 255"),
        (vector, torch.rand(2, 5), r"shape \[B, 4\], got torch.float32 of shape \[2, 5\]"),
        (vector, torch.rand(4), r"shape \[B, 4\]"),
    ],
)
def test_an_observation_of_another_shape_is_refused(build, obs, message):
    with pytest.raises(ValueError, match=message):
        build().initial_inference(obs)


@pytest.mark.parametrize(
    ("build", "shape"),
    [(conv, (3, 5, 4)), (lambda: conv(downsample=True), (3, 5, 4)), (vector, (4,))],
    ids=["conv", "downsample", "mlp"],
)
def test_an_observation_of_another_precision_is_refused(build, shape):
    model, obs = build(), torch.rand(2, *shape)
    message = r"torch.float64 and the weights torch.float32: pass observation.to\(torch.float32\)"
    with pytest.raises(TypeError, match=message):
        model.initial_inference(obs.double())
    with pytest.raises(
        TypeError, match=r"torch.float64 and .* pass observation.to\(torch.float32\)"
    ):
        fold(model).root(obs.double())
    with pytest.raises(TypeError, match=message):
        Folding(model).model.initial_inference(obs.double())
    with pytest.raises(TypeError, match="torch.float32 and the weights torch.float64"):
        model.double().initial_inference(obs)
    with torch.autocast("cpu", torch.bfloat16):
        assert build().initial_inference(obs.bfloat16()).value.shape == (2, 601)


@BOTH
@pytest.mark.parametrize(
    ("action", "kind", "message"),
    [
        ([0, 1, 5], ValueError, "run from 0 to 4, got some from 0 to 5"),
        ([0, -1, 1], ValueError, "run from 0 to 4, got some from -1 to 1"),
        ([0.0, 1.0, 2.0], TypeError, r"got torch.float32: pass action.long\(\)"),
        ([[0, 1], [1, 1], [2, 2]], ValueError, r"shape \[B\], got \[3, 2\]"),
        ([0, 1], ValueError, "2 actions for 3 latent states"),
    ],
)
def test_an_action_that_does_not_exist_is_refused(build, shape, action, kind, message):
    with pytest.raises(kind, match=message):
        step(build(), torch.rand(3, *shape), torch.tensor(action))


@BOTH
def test_states_of_another_shape_are_refused(build, shape):
    model = build()
    root = model.initial_inference(torch.rand(3, *shape))
    h, c = root.reward_hidden_state
    action = torch.arange(3)
    with pytest.raises(ValueError, match=r"each of shape \[1, 3, 6\], got \[1, 2, 6\]"):
        model.recurrent_inference(root.latent_state, (h[:, :2], c), action)
    with pytest.raises(ValueError, match=r"8 \+ 5 = 13 "):
        model.recurrent_inference(root.latent_state[:, :7], (h, c), action)
    with pytest.raises(ValueError, match=r"latent states are"):
        model.prediction_network(root.latent_state[:, :7])


def test_down_sampling_needs_two_channels():
    with pytest.raises(ValueError, match="num_channels=1: with downsample"):
        conv(num_channels=1, downsample=True)
