import pytest
import torch
from torch import nn

from raffia.nn.blocks import LSTMStep, ResidualBlock, SimNorm, mlp, norm_of_images, norm_of_vectors


def test_an_lstm_step_starts_and_computes_as_torch_s_and_its_state_loads():
    torch.manual_seed(3)
    theirs = nn.LSTM(5, 3)
    torch.manual_seed(3)
    ours = LSTMStep(5, 3)
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    ours.load_state_dict(theirs.state_dict())
    x, h, c = torch.randn(2, 5), torch.randn(2, 3), torch.randn(2, 3)
    _, (h_next, c_next) = theirs(x[None], (h[None], c[None]))
    torch.testing.assert_close(ours(x, (h, c)), (h_next[0], c_next[0]))


def test_an_lstm_step_runs_under_vmap_and_has_gradients():
    step, state = LSTMStep(5, 3), torch.randn(4, 2, 3)
    x = torch.randn(4, 2, 5, requires_grad=True)
    h, c = torch.vmap(lambda x, s: step(x, (s, s)))(x, state)
    torch.testing.assert_close(h[1], step(x[1], (state[1], state[1]))[0])
    (h.sum() + c.sum()).backward()
    assert all(p.grad.abs().sum() > 0 for p in step.parameters())


def test_an_mlp_has_norm_and_activation_after_all_but_the_last():
    net = mlp([4, 6, 5, 3], norm_type="LN", activation=nn.Tanh())
    kinds = [type(layer).__name__ for layer in net]
    assert kinds == ["Linear", "LayerNorm", "Tanh", "Linear", "LayerNorm", "Tanh", "Linear"]
    assert [m.out_features for m in net if isinstance(m, nn.Linear)] == [6, 5, 3]
    closed = mlp([4, 6], norm_type="BN", norm_last=True)
    assert [type(layer).__name__ for layer in closed] == ["Linear", "BatchNorm1d", "ReLU"]
    assert len(mlp([4, 3])) == 1


def test_zero_last_starts_at_zero_for_any_input():
    assert not mlp([4, 6, 3], zero_last=True)(torch.randn(2, 4)).any()
    assert mlp([4, 6, 3])(torch.randn(2, 4)).any()


def test_activations_are_copies():
    activation = nn.ReLU(inplace=True)
    nets = mlp([4, 6, 5, 3], activation=activation), ResidualBlock((2, 3, 4), activation=activation)
    found = [m for net in nets for m in net.modules() if isinstance(m, nn.ReLU)]
    assert len({id(m) for m in [*found, activation]}) == 2 + 2 + 1


@pytest.mark.parametrize("norm_type", ["BN", "LN"])
@pytest.mark.parametrize("size", [(1, 1), (1, 4), (5, 4), (7, 8)])
def test_a_block_of_stride_2_halves_n_rounded_up(norm_type, size):
    block = ResidualBlock((3, *size), 5, stride=2, norm_type=norm_type)
    half = [-(-n // 2) for n in size]
    assert block(torch.randn(2, 3, *size)).shape == (2, 5, *half)


def test_a_block_adds_its_input():
    block = ResidualBlock((3, 4, 5)).eval()
    nn.init.zeros_(block.conv2[0].weight)
    x = torch.randn(2, 3, 4, 5)
    assert torch.equal(block(x), x.relu())
    assert (x < 0).any()  # an in-place activation did not change the caller's tensor


def test_a_block_of_other_channels_needs_a_stride():
    with pytest.raises(ValueError, match="cannot have 5: pass stride=2"):
        ResidualBlock((3, 4, 4), 5)


def test_layer_norm_of_images_is_over_each_image():
    x = torch.randn(2, 3, 4, 5) * torch.tensor([1.0, 100])[:, None, None, None]
    y = norm_of_images("LN", (3, 4, 5))(x)
    torch.testing.assert_close(y.flatten(1).std(1, correction=0), torch.ones(2), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "make", [lambda n: norm_of_vectors(n, 3), lambda n: ResidualBlock((1, 2, 2), norm_type=n)]
)
@pytest.mark.parametrize("norm_type", ["bn", "GN", None])
def test_other_normalisations_are_refused(make, norm_type):
    with pytest.raises(ValueError, match=f"norm_type={norm_type!r} must be one of 'BN', 'LN'"):
        make(norm_type)


def test_sim_norm_is_a_softmax_of_each_group():
    x = torch.randn(2, 3, 8)
    y = SimNorm(4)(x)
    torch.testing.assert_close(y[..., :4], x[..., :4].softmax(-1))
    torch.testing.assert_close(y.sum(-1), torch.full((2, 3), 2.0))
