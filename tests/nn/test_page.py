"""What the published page of keyed modules shows, program by program."""

import importlib

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.testing import assert_close

import raffia.nn as keyed
from raffia import TensorDict
from raffia.nn import TensorDictModule, TensorDictSequential

B, T, A = 2, 3, 5


def leaves(td):
    return set(td.keys(True, True))


def known(name):
    """Something the page names, by the way it is imported there."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"raffia.{module}"), attribute)


def page_names(*names):
    return pytest.mark.parametrize("name", names)


@page_names(
    "nn.TensorDictModuleBase",
    "nn.TensorDictModule",
    "nn.ProbabilisticTensorDictModule",
    "nn.TensorDictSequential",
    "nn.TensorDictModuleWrapper",
    "nn.get_functional",
    "nn.is_functional",
    "nn.make_functional",
    "nn.repopulate_module",
    "nn.EnsembleModule",
    "nn.AddStateIndependentNormalScale",
    "nn.CompositeDistribution",
    "nn.OneHotCategorical",
    "nn.TruncatedNormal",
    "nn.make_tensordict",
    "nn.dispatch",
    "nn.set_interaction_type",
    "nn.inv_softplus",
    "nn.biased_softplus",
    "nn.set_skip_existing",
    "nn.skip_existing",
    "nn.TensorDictParams",
    "nn.symbolic_trace",
    "nn.distributions.NormalParamWrapper",
    "nn.distributions.Delta",
    "nn.functional_modules.make_functional",
    "nn.prototype.ProbabilisticTensorDictModule",
    "nn.prototype.ProbabilisticTensorDictSequential",
    "prototype.fx.symbolic_trace",
)
def test_every_name_of_the_page_is_there_ours(name):
    assert callable(known(name))


def test_the_names_of_prototype_are_the_same_classes_ours():
    for name in ("ProbabilisticTensorDictModule", "ProbabilisticTensorDictSequential"):
        assert known(f"nn.prototype.{name}") is getattr(keyed, name)


# --- one module ---------------------------------------------------------------------------------


def test_a_transformer_reads_two_entries():
    net = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    module = TensorDictModule(net, in_keys=["feature", "target"], out_keys=["prediction"])
    data = TensorDict({"feature": torch.randn(B, T, 8), "target": torch.randn(B, T, 8)}, [B, T])
    out = module(data)
    assert out is data and leaves(data) == {"feature", "target", "prediction"}
    assert data["prediction"].shape == (B, T, 8)
    assert_close(data["prediction"], net(data["feature"], data["target"]))


def test_a_module_of_ones_own_with_lists_of_keys_suffices():
    class Own(nn.Module):
        in_keys = ["x"]
        out_keys = ["y"]

        def forward(self, tensordict):
            return tensordict.set("y", tensordict["x"] * 2)

    seq = TensorDictSequential(Own(), TensorDictModule(lambda y: y + 1, ["y"], ["z"]))
    assert seq.in_keys == ["x"] and seq.out_keys == ["y", "z"]
    assert_close(seq(TensorDict({"x": torch.ones(B)}, [B]))["z"], torch.full((B,), 3.0))


# --- the masked network -------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, ins=7, hidden=4, outs=A):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(ins, hidden), nn.Linear(hidden, outs)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


class Masker(nn.Module):
    def forward(self, x, mask):
        return torch.softmax(x * mask, dim=1)


def masked():
    return TensorDictSequential(
        TensorDictModule(Net(), in_keys=[("input", "x")], out_keys=[("intermediate", "x")]),
        TensorDictModule(
            Masker(),
            in_keys=[("intermediate", "x"), ("input", "mask")],
            out_keys=[("output", "probabilities")],
        ),
    )


def masked_input():
    inputs = {"x": torch.rand(B, 7), "mask": torch.randint(2, (B, A))}
    return TensorDict({"input": TensorDict(inputs, [B])}, [B])


def test_a_sequence_over_nested_keys():
    module, td = masked(), masked_input()
    assert module.in_keys == [("input", "x"), ("input", "mask")]
    assert module.out_keys == [("intermediate", "x"), ("output", "probabilities")]
    out = module(td)
    assert out is td
    assert leaves(td) == {
        ("input", "x"),
        ("input", "mask"),
        ("intermediate", "x"),
        ("output", "probabilities"),
    }
    assert td["intermediate"].batch_size == td["output"].batch_size == (B,)
    assert td["intermediate", "x"].shape == td["output", "probabilities"].shape == (B, A)
    hidden = module[0].module(td["input", "x"])
    assert_close(td["output", "probabilities"], (hidden * td["input", "mask"]).softmax(1))
    assert_close(td["output", "probabilities"].sum(1), torch.ones(B))


def test_the_same_sequence_called_with_tensors():
    module, td = masked(), masked_input()
    hidden, probabilities = module(input_x=td["input", "x"], input_mask=td["input", "mask"])
    module(td)
    assert_close(hidden, td["intermediate", "x"])
    assert_close(probabilities, td["output", "probabilities"])


def test_a_part_of_the_sequence():
    module, td = masked(), masked_input()
    part = module.select_subsequence(out_keys=[("intermediate", "x")])
    part(td)
    assert "output" not in td and len(part) == 1 and part[0] is module[0]
    assert_close(td["intermediate", "x"], module[0].module(td["input", "x"]))


def test_the_other_part_of_the_sequence():
    module, td = masked(), masked_input()
    part = module.select_subsequence(in_keys=[("intermediate", "x"), ("input", "mask")])
    td["intermediate", "x"] = torch.zeros(B, A)
    part(td)
    assert_close(td["output", "probabilities"], torch.full((B, A), 1 / A))


# --- the Gaussian cell --------------------------------------------------------------------------


def gaussian(wrapper, probabilistic, sequential, **kwargs):
    cell = nn.GRUCell(4, 8)
    return cell, sequential(
        TensorDictModule(wrapper(cell), in_keys=["input", "hidden"], out_keys=["loc", "scale"]),
        probabilistic(
            in_keys=["loc", "scale"],
            out_keys=["sample"],
            distribution_class=Normal,
            return_log_prob=True,
            **kwargs,
        ),
    )


def gaussian_input():
    return TensorDict({"input": torch.randn(T, 4), "hidden": torch.randn(T, 8)}, [T])


def test_a_gaussian_cell_ours():
    cell, module = gaussian(
        known("nn.distributions.NormalParamWrapper"),
        known("nn.prototype.ProbabilisticTensorDictModule"),
        known("nn.prototype.ProbabilisticTensorDictSequential"),
    )
    td = gaussian_input()
    assert module(td) is td
    assert set(td.keys()) == {"hidden", "input", "loc", "sample", "sample_log_prob", "scale"}
    loc, raw = cell(td["input"], td["hidden"]).chunk(2, -1)
    scale = nn.functional.softplus(raw + torch.tensor(0.99).expm1().log()) + 0.01  # 1 at raw = 0
    assert_close(td["loc"], loc)
    assert_close(td["scale"], scale)
    assert_close(td["sample"], loc)  # by default what is drawn is not random
    assert_close(td["sample_log_prob"], Normal(loc, scale).log_prob(loc))
    assert td["sample_log_prob"].shape == (T, 4)


class Extracted(nn.Module):
    """A cell whose output is taken apart by today's extractor."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.split = cell, keyed.NormalParamExtractor()

    def forward(self, x, h):
        return self.split(self.cell(x, h))


def test_a_gaussian_cell_with_an_extractor():
    cell, module = gaussian(
        Extracted, keyed.ProbabilisticTensorDictModule, keyed.ProbabilisticTensorDictSequential
    )
    td = module(gaussian_input())
    loc, raw = cell(td["input"], td["hidden"]).chunk(2, -1)
    assert_close(td["sample"], loc)
    assert td["scale"].shape == raw.shape and (td["scale"] > 0).all()


def test_samples_of_the_gaussian_cell_are_random_on_request():
    _, module = gaussian(
        Extracted, keyed.ProbabilisticTensorDictModule, keyed.ProbabilisticTensorDictSequential
    )
    td = gaussian_input()
    with keyed.set_interaction_type(keyed.InteractionType.RANDOM):
        one, other = module(td.clone())["sample"], module(td.clone())["sample"]
    assert not torch.equal(one, other)
    assert_close(module.get_dist(td.clone()).mean, module(td.clone())["loc"])


# --- the functional model -----------------------------------------------------------------------


def layers():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))


@pytest.fixture
def functional():
    """A model, its parameters, an input, and what the model made of it before."""
    model, x = layers(), torch.randn(A, 3)
    before = model(x).detach()
    params = known("nn.make_functional")(model)
    return model, params, x, before


def test_parameters_have_the_structure_of_the_model_ours(functional):
    _, params, _, _ = functional
    assert isinstance(params, TensorDict) and params.is_locked
    assert leaves(params) == {("0", "weight"), ("0", "bias"), ("1", "weight"), ("1", "bias")}
    flat = params.flatten_keys(".")
    assert set(flat.keys()) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert all(isinstance(p, nn.Parameter) for p in params.values(True, True))


@pytest.mark.parametrize("form", ["keyword", "position"])
def test_the_model_takes_its_parameters_ours(functional, form):
    model, params, x, before = functional
    out = model(x, params=params) if form == "keyword" else model(x, params)
    assert_close(out, before)


@pytest.mark.parametrize("form", ["keyword", "position"])
def test_its_parts_take_theirs_ours(functional, form):
    model, params, x, before = functional
    for name in ("0", "1"):
        layer, mine = model[int(name)], params[name]
        x = layer(x, params=mine) if form == "keyword" else layer(x, mine)
    assert_close(x, before)


def test_the_model_has_no_parameters_left_ours(functional):
    model, params, x, _ = functional
    assert list(model.parameters()) == []
    with pytest.raises(TypeError):
        model(x)
    model(x, params)
    assert list(model.parameters()) == []


def test_the_model_with_other_parameters_ours(functional):
    model, params, x, _ = functional
    assert_close(model(x, params.apply(torch.zeros_like)), torch.zeros(A, 4))


def test_parameters_made_by_hand_ours():
    model, x = layers(), torch.randn(A, 3)
    before = model(x).detach()
    by_name = TensorDict(dict(model.named_parameters()), []).unflatten_keys(".")
    by_state = TensorDict(model.state_dict(), []).unflatten_keys(".")
    known("nn.make_functional")(model)
    assert_close(model(x, params=by_name), before)
    assert_close(model(x, by_state), before)


def test_buffers_stand_with_the_parameters_ours():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    params = known("nn.make_functional")(model)
    assert ("1", "running_mean") in leaves(params) and ("1", "weight") in leaves(params)
    params = params.clone()
    model(torch.randn(A, 3) + 5, params)
    assert params["1", "num_batches_tracked"] == 1


@pytest.mark.parametrize("form", ["keyword", "position"])
def test_a_keyed_model_takes_container_and_parameters_ours(form):
    model = TensorDictModule(layers(), ["x"], ["y"])
    x = torch.randn(A, 3)
    before = model(x=x).detach()
    params = known("nn.make_functional")(model)
    td = TensorDict({"x": x}, [A])
    out = model(td, params=params) if form == "keyword" else model(td, params)
    assert out is td
    assert_close(td["y"], before)


@pytest.mark.parametrize("form", ["keyword", "position"])
def test_a_keyed_sequence_takes_container_and_parameters_ours(form):
    model = TensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), ["x"], ["h"]),
        TensorDictModule(nn.Linear(4, 2), ["h"], ["y"]),
    )
    x = torch.randn(A, 3)
    before = model(x=x)[1].detach()
    params = known("nn.make_functional")(model)
    td = TensorDict({"x": x}, [A])
    out = model(td, params=params) if form == "keyword" else model(td, params)
    assert_close(out["y"], before)


def test_get_functional_keeps_the_model_stateful_ours():
    model, x = layers(), torch.randn(A, 3)
    before = model(x).detach()
    params = TensorDict.from_module(model).apply(torch.zeros_like)
    model = known("nn.get_functional")(model)
    assert known("nn.is_functional")(model)
    assert_close(model(x), before)
    assert_close(model(x, params=params), torch.zeros(A, 4))
    assert_close(model(x), before)
    assert len(list(model.parameters())) == 4


def test_parameters_by_position_need_a_model_without_its_own_ours():
    model = known("nn.get_functional")(layers())
    with pytest.raises(TypeError):
        model(torch.randn(A, 3), TensorDict.from_module(model))


def test_is_functional_ours(functional):
    is_functional = known("nn.is_functional")
    model = functional[0]
    assert is_functional(model) and all(is_functional(m) for m in model.modules())
    assert not is_functional(layers())


def test_repopulate_module_ours(functional):
    model, params, x, before = functional
    assert known("nn.repopulate_module")(model, params) is model
    assert_close(model(x), before)
    assert len(list(model.parameters())) == 4


def test_a_model_whose_call_fails_is_as_before_ours(functional):
    model, params, _, _ = functional
    with pytest.raises(RuntimeError):
        model(torch.randn(A, 7), params)
    assert list(model.parameters()) == []


def test_vmap_over_copies_of_the_parameters_ours(functional):
    model, params, x, before = functional
    many = params.apply(lambda p: torch.stack([p, 2 * p, 0 * p]), batch_size=[3])
    out = torch.vmap(model, (None, 0))(x, many)
    assert out.shape == (3, A, 4)
    assert_close(out[0], before)
    assert_close(out[2], torch.zeros(A, 4))


def test_gradients_reach_the_parameters_ours(functional):
    model, params, x, _ = functional
    model(x, params).sum().backward()
    assert all(p.grad is not None for p in params.values(True, True))


def test_the_same_by_to_module():
    model, x = layers(), torch.randn(A, 3)
    zeros = TensorDict.from_module(model).apply(torch.zeros_like)
    before = model(x)
    with zeros.to_module(model):
        assert_close(model(x), torch.zeros(A, 4))
    assert_close(model(x), before)


# --- the ensemble -------------------------------------------------------------------------------


def test_an_ensemble():
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    ensemble = keyed.EnsembleModule(
        TensorDictModule(net, in_keys=["a"], out_keys=["b"]), num_copies=3
    )
    data = TensorDict({"a": torch.randn(A, 4)}, batch_size=[A])
    out = ensemble(data)
    assert out.batch_size == (3, A) and leaves(out) == {"a", "b"}
    assert out["a"].shape == (3, A, 4) and out["b"].shape == (3, A, 2)
    assert_close(out["a"][1], data["a"])
    assert not torch.allclose(out["b"][0], out["b"][1])  # each copy is drawn anew
    assert ensemble.in_keys == ["a"] and ensemble.out_keys == ["b"]


# --- tracing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["nn.symbolic_trace", "prototype.fx.symbolic_trace"])
@pytest.mark.parametrize("kind", ["module", "sequence"])
def test_a_traced_module_gives_the_same_ours(where, kind):
    module = masked() if kind == "sequence" else masked()[0]
    traced = known(where)(module)
    td = masked_input()
    assert_close(traced(td.clone())[module.out_keys[-1]], module(td)[module.out_keys[-1]])


def test_only_keyed_modules_are_traced_ours():
    with pytest.raises(TypeError):
        known("nn.symbolic_trace")(nn.Linear(2, 2))


# --- printing -----------------------------------------------------------------------------------


def test_what_is_printed_names_keys_and_shapes():
    td = masked()(masked_input())
    text = repr(td)
    for name in ("input", "mask", "x", "intermediate", "output", "probabilities"):
        assert name in text


# --- the utilities ------------------------------------------------------------------------------


def test_make_tensordict():
    td = keyed.make_tensordict(a=torch.ones(B, T), b=torch.ones(B), batch_size=[B])
    assert td.batch_size == (B,) and leaves(td) == {"a", "b"}


def test_softplus_with_a_bias():
    bias = 1.0
    shift = keyed.inv_softplus(bias)
    assert_close(torch.as_tensor(shift).float(), torch.tensor(1.0).expm1().log())
    x = torch.zeros(T)
    assert_close(keyed.biased_softplus(bias)(x), torch.ones(T), atol=1e-2, rtol=0)


@pytest.mark.parametrize("mode", ["mode", "mean", "random", "MEDIAN", "Deterministic"])
def test_kinds_of_drawing_are_set_by_name(mode):
    with keyed.set_interaction_type(mode):
        assert keyed.interaction_type() is keyed.InteractionType.from_str(mode)
    assert keyed.interaction_type() is None


def test_old_names_for_kinds_of_drawing_ours():
    with known("nn.set_interaction_mode")("mean"):
        assert known("nn.interaction_mode")() == "mean"
        assert keyed.interaction_type() is keyed.InteractionType.MEAN


def test_parameters_in_a_container():
    params = keyed.TensorDictParams(TensorDict({"a": {"w": torch.ones(T)}}, []))
    assert [name for name, _ in params.named_parameters()] == ["a.w"]
