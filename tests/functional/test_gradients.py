"""raffia.functional.gradients: the same gradients plainly, in torch.func's transforms, compiled."""

import pytest
import torch
from torch import Tensor

from raffia.functional.gradients import value_and_grad
from raffia.tensordict.tensordict import TensorDict


def loss(params, x, bias=0.0):
    hidden = (x @ params["net", "weight"]).tanh()
    error = hidden @ params["out"] - bias
    return error.square().mean(), {"error": error, "mean": hidden.mean(0)}


def params_of(*batch: int, seed: int = 0) -> TensorDict:
    g = torch.Generator().manual_seed(seed)
    return TensorDict(
        net=TensorDict(weight=torch.randn(*batch, 3, 5, generator=g), batch_size=batch),
        out=torch.randn(*batch, 5, generator=g),
        unused=torch.ones(*batch, 2),
        batch_size=batch,
    )


X = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))


def assert_trees_close(a, b, **tolerance):
    leaves_a, spec_a = torch.utils._pytree.tree_flatten(a)
    leaves_b, spec_b = torch.utils._pytree.tree_flatten(b)
    assert spec_a == spec_b
    for x, y in zip(leaves_a, leaves_b, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


def test_equals_backward():
    params = params_of()
    grads, (value, aux) = value_and_grad(loss, params, X, 0.5)
    leaves = params.apply(lambda p: p.clone().requires_grad_())
    expected, expected_aux = loss(leaves, X, 0.5)
    expected.backward()
    torch.testing.assert_close(grads["net", "weight"], leaves["net", "weight"].grad)
    torch.testing.assert_close(grads["out"], leaves["out"].grad)
    assert torch.equal(grads["unused"], torch.zeros(2))
    assert torch.equal(value, expected) and torch.equal(aux["error"], expected_aux["error"])


def test_plain_results_have_no_graph_and_parameters_are_unchanged():
    params = params_of().apply(lambda p: torch.nn.Parameter(p))
    grads, (value, aux) = value_and_grad(loss, params, X)
    tensors = [value, *aux.values(), *grads.values(True, True)]
    assert not any(t.requires_grad for t in tensors)
    assert all(p.grad is None and p.requires_grad for p in params.values(True, True))


def test_a_dict_and_no_aux():
    grads, (value, aux) = value_and_grad(
        lambda p: ((p["a"] * p["b"]).sum(), {}), {"a": torch.tensor([2.0]), "b": torch.ones(3)}
    )
    assert grads["a"].tolist() == [3.0] and grads["b"].tolist() == [2.0, 2.0, 2.0]
    assert value == 6 and aux == {}


def test_calls_that_are_not_meant_are_told_what_is():
    with pytest.raises(TypeError, match="return loss, {}"):
        value_and_grad(lambda p: p["a"].sum(), {"a": X})
    with pytest.raises(TypeError, match="TensorDict.from_module"):
        value_and_grad(lambda p: (p(X).sum(), {}), torch.nn.Linear(1, 1))


def test_a_number_that_depends_on_no_parameter():
    def fn(p: dict[str, Tensor]) -> tuple[Tensor, tuple[()]]:
        return torch.tensor(3.0), ()

    for grads, (value, _) in [
        value_and_grad(fn, {"a": torch.ones(2)}),
        torch.vmap(lambda p: value_and_grad(fn, p))({"a": torch.ones(1, 2)}),
    ]:
        assert not grads["a"].any() and (value == 3).all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_in_modes_without_gradients(mode):
    with mode():
        grads, _ = value_and_grad(loss, params_of(), X)
    assert_trees_close(grads, value_and_grad(loss, params_of(), X)[0])


@pytest.mark.parametrize("num_members", [1, 4])
def test_vmap_equals_separate_calls(num_members):
    stacked = params_of(num_members)
    grads, (value, aux) = torch.vmap(lambda p: value_and_grad(loss, p, X))(stacked)
    assert grads.batch_size == (num_members,)
    for i in range(num_members):
        one, (v, a) = value_and_grad(loss, stacked[i], X)
        assert_trees_close(grads[i], one)
        torch.testing.assert_close(value[i], v)
        torch.testing.assert_close(aux["error"][i], a["error"])


def test_it_can_be_called_within_grad():
    def outer(p):
        grads, _ = value_and_grad(lambda q: (q["a"].pow(3).sum(), ()), p)
        return grads["a"].sum()

    second = torch.func.grad(outer)({"a": torch.tensor([1.0, 2.0])})
    assert second["a"].tolist() == [6.0, 12.0]


@pytest.mark.parametrize("as_dict", [False, True])
def test_compiled_equals_plain(as_dict):
    torch._dynamo.reset()
    step = torch.compile(lambda p, x: value_and_grad(loss, p, x), backend="eager", fullgraph=True)
    params = params_of()
    if as_dict:
        params = {key: params[key] for key in (("net", "weight"), "out", "unused")}
    assert_trees_close(step(params, X), value_and_grad(loss, params, X))
