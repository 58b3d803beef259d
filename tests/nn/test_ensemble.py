"""EnsembleModule: copies of a keyed module with separate parameters, run as one by vmap."""

import copy
import time
import warnings
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.testing import assert_close

from raffia import TensorClass, TensorDict, TensorDictParams, lazy_stack
from raffia.nn import EnsembleModule as Ensemble
from raffia.nn import (
    TensorDictModule,
    TensorDictSequential,
    set_interaction_type,
)
from tests.marks import refusals

from .keyed import linear, policy

N, B, T, A = 4, 2, 3, 5  # copies, batch, input, output


def keyed(net, in_key="x", out_key="y"):
    return TensorDictModule(net, in_keys=[in_key], out_keys=[out_key])


def mlp():
    return keyed(nn.Sequential(nn.Linear(T, 7), nn.Tanh(), nn.Linear(7, A)))


def tied():
    first, second = nn.Linear(T, T), nn.Linear(T, T)
    second.weight = first.weight
    return keyed(nn.Sequential(first, nn.Tanh(), second))


def nested_keys():
    return TensorDictSequential(
        linear(("obs", "x"), ("mid", "h")), linear(("mid", "h"), ("out", "y"), (A, 1))
    )


def inputs(*batch):
    batch = batch or (B,)
    return TensorDict({"x": torch.randn(*batch, T), "obs": {"x": torch.randn(*batch, T)}}, batch)


class Scale(nn.Module):
    """Has a parameter, but no `reset_parameters`."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(T))

    def forward(self, x):
        return x * self.scale


class Product(nn.Linear):
    def __init__(self):
        super().__init__(T, T)

    def forward(self, x, z):
        return super().forward(x) * z


class Renewed(Scale):
    calls = 0

    def reset_parameters(self):
        type(self).calls += 1
        self.scale = nn.Parameter(torch.full((T,), float(self.calls)))


def members(ensemble, module):
    """Separate modules, each with one member's parameters."""
    for i in range(len(ensemble.params_td)):
        member = copy.deepcopy(module)
        flat = ensemble.params_td[i].flatten_keys(".")
        member.load_state_dict({k: v.detach().clone() for k, v in flat.items()})
        yield member


# --- the call -----------------------------------------------------------------------------------

MODULES = {
    "linear": linear,
    "tied": tied,
    "nested keys": nested_keys,
    "selected": lambda: TensorDictSequential(linear("x", "h"), linear("h", "y", (A, 1))),
    "no parameters": lambda: keyed(torch.tanh),
    "two inputs": lambda: TensorDictModule(Product(), ["x", ("obs", "x")], ["y"]),
}


@pytest.mark.parametrize("num_copies", [1, N])
@pytest.mark.parametrize("name", MODULES)
def test_equals_separate_modules(name, num_copies):
    module = MODULES[name]()
    before = {key: (p, p.detach().clone()) for key, p in module.named_parameters()}
    ensemble = Ensemble(module, num_copies=num_copies)
    assert ensemble.in_keys == module.in_keys and ensemble.out_keys == module.out_keys
    if name == "selected":
        ensemble.select_out_keys("y")
    key, td = ensemble.out_keys[-1], inputs().set("reward", torch.ones(B)).set("task", "walk")
    td["x"].requires_grad_()
    td.lock_()
    keys = {*td.keys(True, True)}
    result = ensemble(td)
    assert result is not td and {*td.keys(True, True)} == keys and td.is_locked
    assert result.batch_size == (num_copies, B) and result["task"] == "walk"
    assert {*result.keys(True, True)} == {*keys, *ensemble.out_keys}
    apart = list(members(ensemble, module)) if before else [module] * num_copies
    if before:
        own = Ensemble(module, num_copies, expand_input=False)
        rows = inputs(num_copies, B)
        pairs = zip(members(own, module), rows, strict=True)
        expected = torch.stack([member(row.clone())[key] for member, row in pairs])
        for given_rows in (rows, TensorDict(rows.to_dict())):
            assert_close(own(given_rows)[key], expected)
    expected = torch.stack([member(td.clone())[key] for member in apart])
    for got in (result[key], ensemble(*(td[k] for k in ensemble.in_keys)), ensemble(td)[key]):
        assert_close(got[-1] if isinstance(got, tuple) else got, expected)
    result[key].square().sum().backward()
    expected.square().sum().backward()
    for i, member in enumerate(apart):
        for path, param in member.named_parameters():
            assert_close(ensemble.params_td[tuple(path.split("."))].grad[i], param.grad)
    after = dict(module.named_parameters())  # the module keeps its parameters
    for path, (param, value) in before.items():
        assert after[path] is param and torch.equal(param, value) and param.grad is None


def test_nested_ensembles():
    td, outer = inputs(), Ensemble(Ensemble(linear(), num_copies=3), num_copies=N)
    weight, bias = (outer.params_td["params_td", "module", k] for k in ("weight", "bias"))
    flat = weight.flatten(0, 1)
    assert weight.shape == (N, 3, A, T)
    assert not any(torch.equal(flat[i], flat[j]) for i in range(3 * N) for j in range(i))
    expected = torch.einsum("bt,nmat->nmba", td["x"], weight) + bias[:, :, None]
    assert_close(outer(td)["y"], expected)


def test_the_wrapped_module_is_restored_after_an_error():
    def fail(x):
        raise RuntimeError("not today")

    module = TensorDictSequential(linear(), keyed(fail, "y", "z"))
    before = dict(module.named_parameters())
    with pytest.raises(RuntimeError, match="not today"):
        Ensemble(module, num_copies=N)(inputs())
    after = dict(module.named_parameters())
    assert after.keys() == before.keys() and all(after[k] is p for k, p in before.items())


# --- the parameters -----------------------------------------------------------------------------


def test_parameters_are_stacked_under_the_structure_of_the_module():
    module = mlp()
    module.module[0].requires_grad_(False)
    ensemble = Ensemble(module, num_copies=N)
    assert isinstance(ensemble.params_td, TensorDictParams)
    assert ensemble.params_td.batch_size == (N,)
    for key, p in module.named_parameters():
        stacked = ensemble.params_td[tuple(key.split("."))]
        assert stacked.shape == (N, *p.shape) and stacked.is_leaf
        assert stacked.requires_grad == p.requires_grad
    expected = [f"params_td.{name}" for name, _ in module.named_parameters()]
    assert [name for name, _ in ensemble.named_parameters()] == list(ensemble.state_dict())
    assert list(ensemble.state_dict()) == expected  # and none of the module's own
    around = nn.ModuleList([ensemble])
    assert [name for name, _ in around.named_parameters()] == [f"0.{name}" for name in expected]
    shared = Ensemble(tied(), num_copies=N).params_td["module"]
    assert shared["0", "weight"] is shared["2", "weight"]
    shown = repr(Ensemble(linear(), num_copies=N))
    assert shown.startswith("EnsembleModule(")
    assert "Linear(in_features=3" in shown and "params_td" in shown


def test_each_copy_has_new_initial_parameters():
    module = mlp()
    ensemble = Ensemble(module, num_copies=N)
    for name, param in module.named_parameters():
        stacked = ensemble.params_td[tuple(name.split("."))]
        for i in range(N):
            assert not torch.equal(stacked[i], param)
            assert not any(torch.equal(stacked[i], stacked[j]) for j in range(i))
    layer = nn.Linear(T, A)
    layer.reset_parameters = Mock()
    Ensemble(keyed(nn.Sequential(layer, nn.ReLU())), N)
    assert layer.reset_parameters.call_count == N


def test_layers_with_a_custom_reset_or_none():
    module = keyed(Scale())
    with pytest.warns(UserWarning, match="no layer of TensorDictModule has a reset_parameters"):
        ensemble = Ensemble(module, num_copies=N)
    assert_close(ensemble.params_td["module", "scale"], module.module.scale.expand(N, T))
    mixed = Ensemble(keyed(nn.Sequential(Scale(), nn.Linear(T, A))), N).params_td["module"]
    assert_close(mixed["0", "scale"][0], mixed["0", "scale"][1])
    assert not torch.equal(mixed["1", "weight"][0], mixed["1", "weight"][1])
    module = keyed(Renewed())  # makes itself a new parameter
    own = module.module.scale
    ensemble = Ensemble(module, num_copies=N)
    assert ensemble.params_td["module", "scale"].tolist() == [[i + 1.0] * T for i in range(N)]
    assert module.module.scale is own


# --- training and draws -------------------------------------------------------------------------


def test_dropout_differs_between_copies_and_stops_in_eval():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(T, 64), nn.Dropout(0.5))
    ensemble = Ensemble(keyed(net), num_copies=N)
    dropped = ensemble(inputs())["y"] == 0
    assert dropped.any() and not torch.equal(dropped[0], dropped[1])
    assert not (ensemble.eval()(inputs())["y"] == 0).any()
    assert not ensemble.module.training and not net[1].training
    assert ensemble.train().module.training


def test_batch_norm_statistics_are_separate_for_each_copy():
    net = nn.Sequential(nn.Linear(T, A), nn.BatchNorm1d(A))
    ensemble, td = Ensemble(keyed(net), num_copies=N), inputs(8)
    assert len(list(ensemble.named_buffers())) == 3
    ensemble(td)
    first, stats = (ensemble.params_td["module", key] for key in ("0", "1"))
    for i in range(N):
        h = nn.functional.linear(td["x"], first["weight"][i], first["bias"][i])
        assert_close(stats["running_mean"][i], 0.1 * h.mean(0))
        assert_close(stats["running_var"][i], 0.9 + 0.1 * h.var(0))
    assert stats["num_batches_tracked"].tolist() == [1] * N
    assert net[1].num_batches_tracked == 0 and net[1].running_mean.count_nonzero() == 0


def test_probabilistic_modules_draw_independently():
    result = Ensemble(policy(), num_copies=N)(inputs())
    assert result.batch_size == (N, B)
    assert_close(result["action"], result["loc"])
    expected = Normal(result["loc"], result["scale"]).log_prob(result["action"])
    assert_close(result["action_log_prob"], expected)
    torch.manual_seed(0)
    head = Ensemble(policy()[-1], num_copies=N)
    with set_interaction_type("random"):
        action = head(loc=torch.zeros(B, A), scale=torch.ones(B, A))[0]
    assert action.unique().numel() == N * B * A


class Fields(TensorClass):
    x: torch.Tensor
    y: torch.Tensor | None = None


@pytest.mark.parametrize("kind", ["a tensorclass", "a lazy stack", "a tensorclass within"])
def test_other_containers_get_the_leading_dimension_too(kind):
    key, td = "y", inputs().select("x")
    expected = (ensemble := Ensemble(mlp(), num_copies=N))(td)["y"]
    if kind == "a lazy stack":
        td = lazy_stack(td.unbind(0))
    else:
        td = Fields(x=td["x"], batch_size=[B])
    if kind == "a tensorclass within":
        key, td = ("in", "y"), TensorDict({"in": td}, [B])
        ensemble.module.in_keys, ensemble.module.out_keys = [("in", "x")], [key]
    result = ensemble(td)
    assert result.batch_size == (N, B) and result.get("in", result).batch_size == (N, B)
    assert_close(result.get(key), expected)


class Slow(nn.Linear):
    """Lets other threads run before it reads its weights."""

    def forward(self, x):
        time.sleep(0.002)
        return super().forward(x)


def test_threads_do_not_see_each_other_s_parameters(in_threads):
    module, td = keyed(Slow(T, A)), inputs()
    ensembles = [Ensemble(module, num_copies=N) for _ in range(8)]  # which one module serves
    expected = [ensemble(td)["y"] for ensemble in ensembles]

    def work(i):
        for _ in range(3):
            assert_close(ensembles[i](td)["y"], expected[i])

    in_threads(work)


# --- reset --------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["its own", "others", "a module around"])
def test_reset_parameters_recursive(of):
    ensemble = Ensemble(mlp(), num_copies=N)
    own = dict(ensemble.named_parameters())
    ensemble.params_td.data.zero_()
    before = {name: p.detach().clone() for name, p in own.items()}
    if of == "others":
        values = ensemble.params_td.data.clone()
        new = ensemble.reset_parameters_recursive(values)
        assert new.batch_size == (N,) and all((own[k] == v).all() for k, v in before.items())
        for key, leaf in new.items(True, True):
            assert leaf.requires_grad and leaf.is_leaf
            assert leaf.data_ptr() == values[key].data_ptr()
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if of == "its own":
                ensemble.reset_parameters_recursive(ensemble.params_td)
            else:
                TensorDictSequential(ensemble).reset_parameters_recursive()
        new = ensemble.params_td
        for name, value in before.items():
            assert dict(ensemble.named_parameters())[name] is own[name]
            assert (own[name] != value).any(-1).all()
    weight = new["module", "0", "weight"]
    assert weight.flatten(1).any(-1).all() and not torch.equal(weight[0], weight[1])


# --- mistakes -----------------------------------------------------------------------------------


def of(module=None, num_copies=N, **options):
    return Ensemble(linear() if module is None else module, num_copies, **options)


ERRORS = [  # a call, its error, and words of its message
    (lambda: of(num_copies=-1), ValueError, "num_copies=-1 must be at least 1"),
    (lambda: of(num_copies=2.5), TypeError, "2.5|float"),
    (lambda: of(nn.Linear(T, A)), TypeError, r"got Linear: wrap it first, .*TensorDictModule"),
    (lambda: of(keyed(nn.LazyLinear(A))), RuntimeError, "call the module once before"),
    (lambda: of(expand_input=False)(x=torch.zeros(B, T)), ValueError, r"num_copies=4, and x has"),
    (lambda: of().reset_parameters_recursive(), ValueError, "require passing a TensorDict of"),
    (
        lambda: of().reset_parameters_recursive(of(num_copies=N + 1).params_td),
        ValueError,
        r"of 4 copies must have batch size \[4\], got \[5\]",
    ),
]


test_errors = refusals(ERRORS)
