"""A network whose form is data: active and inactive weights, and networks of different forms."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state

from raffia.functional.activations import ACTIVATIONS, activate
from raffia.nn.evolvable import EvolvableMLP
from tests.marks import refusals

X, Y, D, L, N, B = 3, 2, 4, 3, 6, 7
NAMES = tuple(ACTIVATIONS)


def network_of(seed=0, **options):
    torch.manual_seed(seed)
    sizes = {"width": D, "max_layers": L, "max_nodes": N, "num_nodes": 5}
    return EvolvableMLP(X, Y, **{**sizes, **options})


def inputs(seed=1, *shape):
    return torch.randn(*(shape or (B,)), X, generator=torch.Generator().manual_seed(seed))


def plainly(network, x):
    """The same outputs from the active parts alone."""
    x = network.embed(x)
    act = ACTIVATIONS[NAMES[int(network.activation)]]
    for layer in range(len(network.layer_gate)):
        if network.layer_gate[layer]:
            on = network.width_mask[layer].bool()
            inner = act(x @ network.inner_weight[layer, on].T + network.inner_bias[layer, on])
            x = x + inner @ network.outer_weight[layer][:, on].T + network.outer_bias[layer]
    return network.out(x)


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_outputs_come_from_the_active_parts(activation, num_layers):
    network = network_of(activation=activation, num_layers=num_layers).double()
    x = inputs().double()
    torch.testing.assert_close(network(x), plainly(network, x))
    assert network(inputs(1, 2, 5).double()).shape == (2, 5, Y)
    network.width_mask[0, 2:4] = 0
    network.layer_gate[0] = num_layers == 1
    torch.testing.assert_close(network(x), plainly(network, x))


def test_inactive_weights_have_no_effect_and_no_gradients():
    network, other = network_of(num_layers=2), network_of(num_layers=2)
    dead = network.width_mask == 0
    assert dead.sum() == 2 * 1 + N
    with torch.no_grad():
        for weight in (other.inner_weight, other.inner_bias, other.outer_weight.transpose(1, 2)):
            weight[dead] += 10
        other.outer_bias[2] += 10
    x = inputs()
    assert other(x).equal(network(x))
    network(x).square().sum().backward()
    nodes = network.inner_weight, network.inner_bias
    for grad in (*(weight.grad for weight in nodes), network.outer_weight.grad.movedim(1, 2)):
        assert not grad[dead].any()
        assert grad[~dead].any()
    assert not network.outer_bias.grad[2].any() and network.outer_bias.grad[:2].all()


def test_networks_of_different_forms_are_one_program():
    networks = [network_of(seed, num_layers=1 + seed % L, num_nodes=1 + seed,
                           activation=NAMES[seed]) for seed in range(5)]  # fmt: skip
    x = inputs()
    params, buffers = stack_module_state(networks)
    base = copy.deepcopy(networks[0]).to("meta")

    def one(params, buffers):
        return functional_call(base, (params, buffers), (x,))

    def size(params, buffers):
        return one(params, buffers).square().sum()

    outputs = torch.vmap(one, randomness="error")(params, buffers)
    grads = torch.vmap(torch.func.grad(size))(params, buffers)
    for i, network in enumerate(networks):
        torch.testing.assert_close(outputs[i], network(x), rtol=1e-5, atol=1e-6)
        network(x).square().sum().backward()
        for name, parameter in network.named_parameters():
            torch.testing.assert_close(grads[name][i], parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_activations_by_number(name):
    x = torch.linspace(-40, 40, 41, dtype=torch.float64)
    number = torch.tensor(NAMES.index(name))
    expected = getattr(nn, {"relu": "ReLU", "gelu": "GELU", "elu": "ELU", "silu": "SiLU",
                            "tanh": "Tanh"}[name])()(x)  # fmt: skip
    assert activate(x, number).equal(expected)
    numbers = torch.arange(len(NAMES))
    each = torch.vmap(activate, (None, 0))(x, numbers)
    torch.testing.assert_close(each[NAMES.index(name)], expected)
    slope = torch.vmap(torch.func.grad(lambda x, n: activate(x, n).sum()), (None, 0))(x, numbers)
    assert slope.isfinite().all()  # nor is it of those that are not chosen


def test_weights_are_initialised_as_in_linear_layers():
    torch.manual_seed(0)
    network = EvolvableMLP(X, Y, width=100, num_nodes=25, max_nodes=200, max_layers=2)
    bounds = {"inner_weight": 0.1, "inner_bias": 0.1, "outer_weight": 0.2}
    for weight, bound in ((getattr(network, name), bound) for name, bound in bounds.items()):
        assert weight.abs().max() <= bound and weight.abs().max() > 0.95 * bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
    assert not network.outer_bias.any()
    assert network_of(3).inner_weight.equal(network_of(3).inner_weight)


INVALID = [("num_layers", 0), ("num_layers", L + 1), ("num_nodes", 0), ("num_nodes", N + 1)]
RANGES = r"in 1\.\.3 \(max_layers\), and .*1\.\.6"
test_invalid_options_are_refused = refusals(
    [
        *((lambda name=name, n=n: network_of(**{name: n}), RANGES) for name, n in INVALID),
        (lambda: network_of(activation="sine"), "'sine' must be one of 'relu', 'gelu', 'elu'"),
    ]
)
