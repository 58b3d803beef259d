"""EnsembleModule: copies of a keyed module with parameters of their own, run as one by vmap."""

import copy
import warnings
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.testing import assert_close

from raffia import TensorDict, TensorDictParams
from raffia.nn import (
    EnsembleModule,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_interaction_type,
)

N, B, T, A = 4, 2, 3, 5  # copies, batch, input, output


def linear(in_key="x", out_key="y", sizes=(T, A)):
    return TensorDictModule(nn.Linear(*sizes), in_keys=[in_key], out_keys=[out_key])


def mlp():
    net = nn.Sequential(nn.Linear(T, 7), nn.Tanh(), nn.Linear(7, A))
    return TensorDictModule(net, in_keys=["x"], out_keys=["y"])


def inputs(*batch):
    batch = batch or (B,)
    return TensorDict({"x": torch.randn(*batch, T)}, batch_size=batch)


def members(ensemble, module, inputs):
    """The outputs of separate modules, each with one member's parameters and input."""
    out = []
    for i, td in enumerate(inputs):
        member = copy.deepcopy(module)
        flat = ensemble.params_td[i].flatten_keys(".")
        member.load_state_dict({k: v.detach().clone() for k, v in flat.items()})
        out.append(member(td.clone()))
    return out


# --- the parameters -----------------------------------------------------------------------------


def test_parameters_are_stacked_under_the_structure_of_the_module():
    ensemble = EnsembleModule(mlp(), num_copies=N)
    assert isinstance(ensemble.params_td, TensorDictParams)
    assert ensemble.params_td.batch_size == (N,)
    shapes = {k: tuple(v.shape) for k, v in ensemble.params_td.items(True, True)}
    assert shapes == {
        ("module", "0", "weight"): (N, 7, T),
        ("module", "0", "bias"): (N, 7),
        ("module", "2", "weight"): (N, A, 7),
        ("module", "2", "bias"): (N, A),
    }
    assert all(p.requires_grad and p.is_leaf for p in ensemble.params_td.parameters())


def test_each_copy_is_drawn_anew():
    module = mlp()
    ensemble = EnsembleModule(module, num_copies=N)
    for name, param in module.named_parameters():
        stacked = ensemble.params_td[tuple(name.split("."))]
        for i in range(N):
            assert not torch.equal(stacked[i], param)
            assert not any(torch.equal(stacked[i], stacked[j]) for j in range(i))


def test_reset_parameters_of_a_layer_is_called_once_for_each_copy():
    layer = nn.Linear(T, A)
    layer.reset_parameters = Mock()
    EnsembleModule(
        TensorDictModule(nn.Sequential(layer, nn.ReLU()), in_keys=["x"], out_keys=["y"]), N
    )
    assert layer.reset_parameters.call_count == N


def test_the_module_given_keeps_its_parameters():
    module = mlp()
    before = {name: (p, p.detach().clone()) for name, p in module.named_parameters()}
    ensemble = EnsembleModule(module, num_copies=N)
    ensemble(inputs())["y"].sum().backward()
    assert ensemble.module is module
    after = dict(module.named_parameters())
    for name, (param, value) in before.items():
        assert after[name] is param
        assert torch.equal(param, value)
        assert param.grad is None


def test_the_module_given_is_whole_again_after_an_error():
    def fail(x):
        raise RuntimeError("not today")

    module = TensorDictSequential(linear(), TensorDictModule(fail, ["y"], ["z"]))
    before = dict(module.named_parameters())
    ensemble = EnsembleModule(module, num_copies=N)
    with pytest.raises(RuntimeError, match="not today"):
        ensemble(inputs())
    after = dict(module.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is param for name, param in before.items())


def test_only_what_is_trained_is_a_parameter_ours():
    ensemble = EnsembleModule(mlp(), num_copies=N)
    ensemble(inputs())["y"].sum().backward()
    names = {"module.0.weight", "module.0.bias", "module.2.weight", "module.2.bias"}
    expected = {f"params_td.{name}" for name in names}
    assert {name for name, _ in ensemble.named_parameters()} == expected
    assert set(ensemble.state_dict()) == expected
    assert all(p.grad is not None for p in ensemble.parameters())
    around = nn.ModuleList([ensemble])
    assert {name for name, _ in around.named_parameters()} == {f"0.{name}" for name in expected}


def test_state_dict_goes_round():
    first, second = (EnsembleModule(mlp(), num_copies=N) for _ in range(2))
    td = inputs()
    assert not torch.equal(first(td)["y"], second(td)["y"])
    second.load_state_dict(first.state_dict())
    assert_close(second(td)["y"], first(td)["y"])


def test_deepcopy_is_independent():
    first = EnsembleModule(mlp(), num_copies=N)
    second = copy.deepcopy(first)
    td = inputs()
    assert_close(second(td)["y"], first(td)["y"])
    second.params_td.data.zero_()
    assert second(td)["y"].count_nonzero() == 0
    assert first(td)["y"].count_nonzero() > 0


def test_frozen_parameters_stay_frozen_ours():
    module = mlp()
    module.module[0].requires_grad_(False)
    ensemble = EnsembleModule(module, num_copies=N)
    trained = {k[1:]: v.requires_grad for k, v in ensemble.params_td.items(True, True)}
    assert trained == {
        ("0", "weight"): False,
        ("0", "bias"): False,
        ("2", "weight"): True,
        ("2", "bias"): True,
    }


def test_tied_weights_stay_tied_ours():
    first, second = nn.Linear(T, T), nn.Linear(T, T)
    second.weight = first.weight
    net = nn.Sequential(first, nn.Tanh(), second)
    ensemble = EnsembleModule(TensorDictModule(net, ["x"], ["y"]), num_copies=N)
    params = ensemble.params_td["module"]
    assert params["0", "weight"] is params["2", "weight"]
    td = inputs()
    expected = [
        torch.tanh(td["x"] @ w.T + b0) @ w.T + b2
        for w, b0, b2 in zip(
            params["0", "weight"], params["0", "bias"], params["2", "bias"], strict=True
        )
    ]
    assert_close(ensemble(td)["y"], torch.stack(expected))


class Scale(nn.Module):
    """Has a parameter, but no `reset_parameters`."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(T))

    def forward(self, x):
        return x * self.scale


def test_layers_without_reset_keep_identical_copies_and_say_so_ours():
    module = TensorDictModule(Scale(), in_keys=["x"], out_keys=["y"])
    with pytest.warns(UserWarning, match="no layer of TensorDictModule has a reset_parameters"):
        ensemble = EnsembleModule(module, num_copies=N)
    assert_close(ensemble.params_td["module", "scale"], module.module.scale.expand(N, T))


def test_some_layers_without_reset_keep_identical_copies():
    net = nn.Sequential(Scale(), nn.Linear(T, A))
    ensemble = EnsembleModule(TensorDictModule(net, ["x"], ["y"]), num_copies=N)
    scale, weight = (ensemble.params_td["module"][k] for k in (("0", "scale"), ("1", "weight")))
    assert_close(scale[0], scale[1])
    assert not torch.equal(weight[0], weight[1])


def test_a_layer_may_make_itself_a_new_parameter_in_its_reset_ours():
    class Renewed(Scale):
        calls = 0

        def reset_parameters(self):
            type(self).calls += 1
            self.scale = nn.Parameter(torch.full((T,), float(self.calls)))

    module = TensorDictModule(Renewed(), in_keys=["x"], out_keys=["y"])
    own = module.module.scale
    ensemble = EnsembleModule(module, num_copies=N)
    assert ensemble.params_td["module", "scale"].tolist() == [[i + 1.0] * T for i in range(N)]
    assert module.module.scale is own


# --- the call -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [linear, mlp])
def test_equals_separate_modules(make):
    module = make()
    ensemble, td = EnsembleModule(module, num_copies=N), inputs()
    result = ensemble(td)
    assert result.batch_size == (N, B)
    expected = [member["y"] for member in members(ensemble, module, [td] * N)]
    assert_close(result["y"], torch.stack(expected))
    assert_close(result["x"], td["x"].expand(N, B, T))


def test_the_container_that_came_in_is_left_alone():
    td = inputs().lock_()
    result = EnsembleModule(linear(), num_copies=N)(td)
    assert result is not td
    assert set(td.keys()) == {"x"}
    assert td.is_locked and td.batch_size == (B,)


def test_input_that_has_the_ensemble_shape():
    module = mlp()
    ensemble, td = EnsembleModule(module, N, expand_input=False), inputs(N, B)
    result = ensemble(td)
    assert result.batch_size == (N, B)
    assert_close(result["x"], td["x"])
    assert_close(
        result["y"], torch.stack([m["y"] for m in members(ensemble, module, td.unbind(0))])
    )


def test_input_that_has_the_ensemble_shape_but_no_batch_size():
    td = TensorDict({"x": torch.randn(N, B, T)})
    result = EnsembleModule(linear(), N, expand_input=False)(td)
    assert result["y"].shape == (N, B, A)


def test_ensembles_in_a_row():
    seq = TensorDictSequential(
        EnsembleModule(linear("x", "h"), N),
        EnsembleModule(linear("h", "y", (A, 1)), N, expand_input=False),
    )
    td = inputs()
    result = seq(td)
    assert result.batch_size == (N, B)
    assert {k: tuple(v.shape) for k, v in result.items()} == {
        "x": (N, B, T),
        "h": (N, B, A),
        "y": (N, B, 1),
    }


def test_ensemble_of_a_sequence_with_nested_keys():
    module = TensorDictSequential(
        linear(("obs", "x"), ("mid", "h")), linear(("mid", "h"), ("out", "y"), (A, 1))
    )
    ensemble = EnsembleModule(module, num_copies=N)
    assert ensemble.in_keys == [("obs", "x")]
    assert ensemble.out_keys == [("mid", "h"), ("out", "y")]
    td = TensorDict({"obs": {"x": torch.randn(B, T)}}, batch_size=[B])
    result = ensemble(td)
    expected = [member["out", "y"] for member in members(ensemble, module, [td] * N)]
    assert_close(result["out", "y"], torch.stack(expected))
    assert set(td.keys(True, True)) == {("obs", "x")}


def test_nested_ensembles_ours():
    inner = EnsembleModule(linear(), num_copies=3)
    outer = EnsembleModule(inner, num_copies=N)
    td = inputs()
    result = outer(td)
    weight, bias = (outer.params_td["params_td", "module", k] for k in ("weight", "bias"))
    assert weight.shape == (N, 3, A, T)
    flat = weight.flatten(0, 1)
    assert not any(torch.equal(flat[i], flat[j]) for i in range(3 * N) for j in range(i))
    assert_close(result["y"], torch.einsum("bt,nmat->nmba", td["x"], weight) + bias[:, :, None])


def test_keys_come_from_the_module():
    module = TensorDictModule(nn.Bilinear(T, T, A), in_keys=["x", ("n", "z")], out_keys=["y"])
    ensemble = EnsembleModule(module, num_copies=N)
    assert ensemble.in_keys == ["x", ("n", "z")]
    assert ensemble.out_keys == ["y"]


def test_selected_outputs():
    ensemble = EnsembleModule(
        TensorDictSequential(linear("x", "h"), linear("h", "y", (A, 1))), num_copies=N
    )
    ensemble.select_out_keys("y")
    assert ensemble.out_keys == ["y"]
    assert set(ensemble(inputs()).keys()) == {"x", "y"}


def test_other_entries_come_along():
    td = inputs().set("reward", torch.ones(B)).set("task", "walk")
    result = EnsembleModule(linear(), num_copies=N)(td)
    assert result["reward"].shape == (N, B)
    assert result["task"] == "walk"


def test_module_without_parameters():
    result = EnsembleModule(TensorDictModule(torch.tanh, ["x"], ["y"]), num_copies=N)(inputs())
    assert result["y"].shape == (N, B, T)


def test_one_copy():
    module, td = linear(), inputs()
    ensemble = EnsembleModule(module, num_copies=1)
    params = ensemble.params_td["module"]
    assert_close(ensemble(td)["y"], td["x"] @ params["weight"].mT + params["bias"][:, None])


def test_called_with_a_tensor():
    ensemble, td = EnsembleModule(linear(), num_copies=N), inputs()
    assert_close(ensemble(td["x"]), ensemble(td)["y"])
    assert_close(ensemble(tensordict=td)["y"], ensemble(td)["y"])


def test_called_with_keywords_ours():
    ensemble, td = EnsembleModule(linear(), num_copies=N), inputs()
    assert_close(ensemble(x=td["x"]), ensemble(td)["y"])


# --- training -----------------------------------------------------------------------------------


def test_gradients_are_those_of_separate_modules():
    module = mlp()
    ensemble, td = EnsembleModule(module, num_copies=N), inputs()
    ensemble(td)["y"].square().sum().backward()
    for i in range(N):
        member = copy.deepcopy(module)
        flat = ensemble.params_td[i].flatten_keys(".")
        member.load_state_dict({k: v.detach().clone() for k, v in flat.items()})
        member(td.clone())["y"].square().sum().backward()
        for name, param in member.named_parameters():
            stacked = ensemble.params_td[tuple(name.split("."))]
            assert_close(stacked.grad[i], param.grad)


def test_training_moves_each_copy_to_its_own_target():
    torch.manual_seed(0)
    ensemble, td = EnsembleModule(mlp(), num_copies=N), inputs(8)
    target = torch.arange(N).float()[:, None, None].expand(N, 8, A)
    optimiser = torch.optim.Adam(ensemble.parameters(), lr=0.05)
    for _ in range(100):
        loss = (ensemble(td)["y"] - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.05


def test_gradient_reaches_the_input():
    td = inputs()
    td["x"].requires_grad_()
    EnsembleModule(linear(), num_copies=N)(td)["y"].sum().backward()
    assert td["x"].grad.shape == (B, T)


def test_dropout_differs_between_copies_and_stops_in_eval_ours():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(T, 64), nn.Dropout(0.5))
    ensemble = EnsembleModule(TensorDictModule(net, ["x"], ["y"]), num_copies=N)
    dropped = ensemble(inputs())["y"] == 0
    assert dropped.any()
    assert not torch.equal(dropped[0], dropped[1])
    ensemble.eval()
    assert not (ensemble(inputs())["y"] == 0).any()
    assert not ensemble.module.training and not net[1].training
    assert ensemble.train().module.training


def test_batch_norm_statistics_are_kept_for_each_copy_ours():
    net = nn.Sequential(nn.Linear(T, A), nn.BatchNorm1d(A))
    ensemble = EnsembleModule(TensorDictModule(net, ["x"], ["y"]), num_copies=N)
    assert {name.rpartition(".")[2] for name, _ in ensemble.named_buffers()} == {
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }
    td = inputs(8)
    ensemble(td)
    hidden = torch.nn.functional.linear
    stats = ensemble.params_td["module", "1"]
    first = ensemble.params_td["module", "0"]
    for i in range(N):
        h = hidden(td["x"], first["weight"][i], first["bias"][i])
        assert_close(stats["running_mean"][i], 0.1 * h.mean(0))
        assert_close(stats["running_var"][i], 0.9 + 0.1 * h.var(0))
    assert stats["num_batches_tracked"].tolist() == [1] * N
    assert net[1].num_batches_tracked == 0
    assert net[1].running_mean.count_nonzero() == 0


# --- draws --------------------------------------------------------------------------------------


def policy():
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(T, 2 * A), ["x"], ["params"]),
        TensorDictModule(NormalParamExtractor(), ["params"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=Normal,
            return_log_prob=True,
        ),
    )


def test_probabilistic_module():
    ensemble = EnsembleModule(policy(), num_copies=N)
    result = ensemble(inputs())
    assert result.batch_size == (N, B)
    assert_close(result["action"], result["loc"])
    expected = Normal(result["loc"], result["scale"]).log_prob(result["action"])
    assert_close(result["action_log_prob"], expected)


def test_copies_draw_independently_ours():
    torch.manual_seed(0)
    module = ProbabilisticTensorDictModule(
        in_keys=["loc", "scale"], out_keys=["action"], distribution_class=Normal
    )
    ensemble = EnsembleModule(module, num_copies=N)
    td = TensorDict({"loc": torch.zeros(B, A), "scale": torch.ones(B, A)}, batch_size=[B])
    with set_interaction_type("random"):
        action = ensemble(td)["action"]
    assert action.unique().numel() == N * B * A


# --- reset --------------------------------------------------------------------------------------


def test_reset_parameters_recursive_needs_the_parameters():
    with pytest.raises(ValueError, match="require passing a TensorDict of parameters"):
        EnsembleModule(linear(), num_copies=N).reset_parameters_recursive()


def test_reset_parameters_recursive_of_its_own_parameters():
    ensemble = EnsembleModule(mlp(), num_copies=N)
    own = dict(ensemble.named_parameters())
    before = {name: p.detach().clone() for name, p in own.items() if "params_td" in name}
    ensemble.reset_parameters_recursive(ensemble.params_td)
    for name, value in before.items():
        assert dict(ensemble.named_parameters())[name] is own[name]
        assert (own[name] != value).any(-1).all()


def test_reset_parameters_recursive_of_other_parameters():
    ensemble = EnsembleModule(mlp(), num_copies=N)
    before = ensemble.params_td.data.clone()
    zeros = before.clone().zero_()
    new = ensemble.reset_parameters_recursive(zeros)
    assert new.batch_size == (N,)
    assert (ensemble.params_td.data == before).all()
    for i in range(N):
        weight = new[i]["module", "0", "weight"]
        assert weight.count_nonzero() > 0
    weights = [new[i]["module", "0", "weight"] for i in range(N)]
    assert not torch.equal(weights[0], weights[1])


def test_reset_parameters_recursive_gives_tensors_that_require_gradients_ours():
    ensemble = EnsembleModule(linear(), num_copies=N)
    given = ensemble.params_td.data.clone()
    new = ensemble.reset_parameters_recursive(given)
    for key, leaf in new.items(True, True):
        assert leaf.requires_grad and leaf.is_leaf
        assert leaf.data_ptr() == given[key].data_ptr()


def test_reset_parameters_recursive_with_another_number_of_copies_ours():
    ensemble, other = (EnsembleModule(linear(), num_copies=n) for n in (N, N + 1))
    with pytest.raises(ValueError, match=r"of 4 copies have batch size \[4\], got \[5\]"):
        ensemble.reset_parameters_recursive(other.params_td)


def test_reset_of_a_module_around_resets_the_copies_ours():
    ensemble = EnsembleModule(linear(), num_copies=N)
    ensemble.params_td.data.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TensorDictSequential(ensemble).reset_parameters_recursive()
    weight = ensemble.params_td["module", "weight"]
    assert weight.flatten(1).any(-1).all()
    assert not torch.equal(weight[0], weight[1])


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_copies", [0, -1])
def test_fewer_than_one_copy_ours(num_copies):
    with pytest.raises(ValueError, match=f"at least one copy, got num_copies={num_copies}"):
        EnsembleModule(linear(), num_copies=num_copies)


def test_number_of_copies_that_is_no_integer():
    with pytest.raises(TypeError):
        EnsembleModule(linear(), num_copies=2.5)


def test_module_that_has_no_keys_ours():
    with pytest.raises(TypeError, match=r"got Linear: wrap it first, .*TensorDictModule"):
        EnsembleModule(nn.Linear(T, A), num_copies=N)


def test_lazy_layer_ours():
    module = TensorDictModule(nn.LazyLinear(A), in_keys=["x"], out_keys=["y"])
    with pytest.raises(RuntimeError, match="call the module once before"):
        EnsembleModule(module, num_copies=N)


def test_input_of_another_number_of_rows():
    ensemble = EnsembleModule(linear(), N, expand_input=False)
    with pytest.raises(ValueError):
        ensemble(inputs())


def test_input_of_another_number_of_rows_is_named_ours():
    ensemble = EnsembleModule(linear(), N, expand_input=False)
    with pytest.raises(ValueError, match=r"num_copies=4, and the input has shape \(2,\)"):
        ensemble(inputs())
    with pytest.raises(ValueError, match=r"num_copies=4, and x has shape \(2, 3\)"):
        ensemble(x=torch.zeros(B, T))


def test_repr_names_the_module_and_the_parameters():
    shown = repr(EnsembleModule(linear(), num_copies=N))
    assert shown.startswith("EnsembleModule(")
    assert "Linear(in_features=3" in shown and "params_td" in shown
