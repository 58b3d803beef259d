"""The functional API: parameters taken out of modules, passed at each call, and put back.

That any network with its parameters is the network is a property in test_properties.py.
"""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from raffia import TensorDict, from_modules
from raffia.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictParams,
    TensorDictSequential,
)
from raffia.nn import TensorDictModule as Mod
from raffia.nn.functional_modules import (
    get_functional,
    is_functional,
    make_functional,
    repopulate_module,
)
from tests.marks import refusals

B, A, P = 2, 3, 5  # rows, features, sets of parameters


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Tied(nn.Module):
    """Two layers with one weight, one of them under two names."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(A, A, bias=False), nn.Linear(A, A, bias=False)
        self.b.weight = self.a.weight
        self.c = self.a

    def forward(self, x):
        return self.c(self.b(self.a(x)))


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(A, 1)

    def forward(self, x, zeros=None):
        return self.layer(x) if zeros is None else self.layer(x, params=zeros)

    def value(self, x, *, scale=1):
        return scale * self.forward(x)


class Count(nn.Module):
    """Replaces its buffer."""

    def __init__(self, shape=()):
        super().__init__()
        self.register_buffer("count", torch.zeros(shape))

    def forward(self, x):
        self.count = self.count + x if self.count.dim() == 0 else torch.cat([self.count, x])
        return self.count


class Reads(nn.Module):
    """A plain module of a container."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(A, 2)

    def forward(self, td):
        return self.layer(td["x"])


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 2.0))

    def forward(self, params):
        return self.weight * params


def net():
    return nn.Sequential(nn.Linear(A, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, A)))


def normed():
    return nn.Sequential(nn.Linear(A, 4), nn.BatchNorm1d(4)).eval()


def keyed():
    return TensorDictSequential(
        Mod(nn.Linear(A, 4), in_keys=["x"], out_keys=[("h", "x")]),
        Mod(nn.Linear(4, 1), in_keys=[("h", "x")], out_keys=["y"]),
    )


def on_tensors(module, x, *args, **kwargs):
    out = module(x, *args, **kwargs)
    return out[0] if isinstance(out, tuple) else out


def on_container(module, x, *args, **kwargs):
    return module(TensorDict({"x": x}, [len(x)]), *args, **kwargs)["y"]


KINDS = {  # a module, and its form of call
    "tied": (Tied, on_tensors),
    "recurrent": (lambda: nn.GRU(A, 4), on_tensors),
    "keyed": (keyed, on_container),
}


def tensor_ids(module):
    return {n: id(t) for n, t in module.state_dict(keep_vars=True).items()}


def zeros(params):
    return params.apply(lambda p: torch.zeros_like(p, requires_grad=p.requires_grad))


@pytest.mark.parametrize("name", KINDS)
def test_a_module_without_its_parameters_is_called_with_them(name):
    make, run = KINDS[name]
    module, x, other = make(), torch.randn(B, A), make()
    want, before, trained = run(module, x), tensor_ids(module), torch.randn(B, A)
    params = make_functional(module)
    assert isinstance(params, TensorDict) and params.batch_size == () and params.is_locked
    assert not module.state_dict() and module._is_stateless
    assert all(is_functional(m) for m in module.modules()) and not is_functional(other)
    twin = copy.deepcopy(module)
    for form in (params, params.to_dict()):
        assert torch.equal(run(module, x, form if name != "keyed" else params), want)
        assert torch.equal(run(module, x, params=form), want)
    assert not torch.equal(run(module, x, params=zeros(params)), want)
    with pytest.raises(TypeError, match="is stateless"):
        run(module, x)
    with pytest.raises(RuntimeError, match="return_params=True on a functional, stateless"):
        make_functional(module)
    assert make_functional(module, return_params=False) is None and not module.state_dict()
    if name != "recurrent":
        several = [make() for _ in range(P)]
        out = torch.vmap(lambda p: run(module, x, p))(from_modules(*several))
        assert_close(out, torch.stack([run(m, x) for m in several]))
    if name == "keyed":
        grads = torch.func.grad(lambda p: run(module, trained, p).square().sum())(params.data)
        run(module, trained, params).square().sum().backward()
        for key, leaf in params.items(True, True):
            assert_close(grads[key], leaf.grad)
    assert repopulate_module(module, params) is module and tensor_ids(module) == before
    assert torch.equal(run(module, x), want) and is_functional(module) and not module._is_stateless
    zeroed = zeros(params)
    assert repopulate_module(twin, zeroed.to_dict()) is twin and module.state_dict()
    assert torch.equal(run(twin, x), run(module, x, params=zeroed))


@pytest.mark.parametrize("name", KINDS)
def test_a_module_that_keeps_its_parameters(name):
    make, run = KINDS[name]
    module, x = make(), torch.randn(B, A)
    want, before = run(module, x), tensor_ids(module)
    assert get_functional(module) is module and tensor_ids(module) == before
    params = make_functional(module, keep_params=True)
    assert all(is_functional(m) for m in module.modules()) and not module._is_stateless
    zeroed = zeros(params)
    assert not torch.equal(run(module, x, params=zeroed), want)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied|input.size"):
        run(module, torch.randn(B, A + 1), params=zeroed)
    assert tensor_ids(module) == before and torch.equal(run(module, x), want)
    if name == "keyed":
        assert torch.equal(run(module, x, zeroed), run(module, x, params=zeroed))
    elif name != "recurrent":  # which takes a second argument
        for form in (params, params.to_dict()):
            with pytest.raises(TypeError, match="tried to provide the parameters as an argument"):
                module(x, form)


# --- errors -------------------------------------------------------------------------------------


def stateless(make=net):
    module = make()
    return module, make_functional(module)


def with_entry(key, put_back=False):
    module, params = stateless()
    params.unlock_().set(key, torch.zeros(1))
    return repopulate_module(module, params) if put_back else module(torch.randn(A), params)


def flat():
    module, params = stateless()
    module(torch.randn(A), params.flatten_keys("."))


def lacking():
    module, params = stateless()
    module(torch.zeros(A), params.select("0"))


def grown():
    module, params = stateless(lambda: Count((1,)))
    try:
        module(torch.ones(2), params)
    finally:
        assert module.count is None


ERRORS = [  # a call, its error, and words of its message and notes
    (lambda: make_functional(lambda x: x), TypeError, "nn.Modules can be made functional, got"),
    (lambda: make_functional(Both(), ["valeu"]), AttributeError, "no method 'valeu'.*\"value\""),
    (lambda: get_functional(stateless()[0]), RuntimeError, "stateless: repopulate_module"),
    (lambda: stateless()[0](torch.ones(A), params=[]), TypeError, "container or nested.*got list"),
    (lambda: with_entry("more", put_back=True), KeyError, "no parameter, buffer or layer 'more'"),
    (flat, KeyError, r"unflatten_keys\('.'\)"),
    (lacking, TypeError, r"lack 2.0.weight, 2.0.bias"),
    (grown, RuntimeError, r"'count' of shape \(1,\) by one of shape \(3,\)"),
]


test_errors = refusals(ERRORS)


def test_a_failed_call_changes_nothing():
    module, params = stateless()
    for x, weights in ((torch.randn(A + 1), params), (torch.randn(A), {"9": torch.ones(1)})):
        with pytest.raises((RuntimeError, KeyError)):
            module(x, weights)
        assert not module.state_dict() and module[2][0]._is_stateless
    assert module(torch.randn(B, A), params).shape == (B, A)
    layer, wrong = nn.Linear(3, 2), TensorDict(weight=torch.zeros(5, 3), bias=torch.zeros(2))
    with pytest.raises(RuntimeError, match=r"(?s)weight: \(5, 3\) for \(2, 3\)"):
        with wrong.to_module(layer):
            layer(torch.zeros(4, 3))
    with pytest.raises(KeyError, match="of the user"), wrong.to_module(layer):
        raise KeyError("of the user's own")
    assert layer.weight.shape == (2, 3)


def test_a_dict_as_an_argument():
    class First(nn.Module):
        def forward(self, values):
            return values["a"] + 1

    class Takes(nn.Module):
        def forward(self, x, params):
            return x + params["shift"]

    module = get_functional(First())
    assert module({"a": 1}) == 2
    with pytest.raises(TypeError, match="can only concatenate str") as caught:
        module({"a": "text"})
    assert caught.value.__cause__ is None  # an error of the module's own is left alone
    module = Mod(Takes(), ["x"], ["y"])  # an argument of the name `params`
    out = module(TensorDict(x=torch.ones(2)), params=TensorDict(shift=torch.ones(2)))
    assert out["y"].tolist() == [2, 2]


# --- buffers ------------------------------------------------------------------------------------


def test_buffers_that_a_module_writes_are_in_the_parameters():
    module, x = normed().train(), torch.randn(B, A)
    reference = copy.deepcopy(module)
    reference(x)
    params = make_functional(module)
    module(x, params)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(params["1", name], getattr(reference[1], name))
    for keep in (False, True):  # also a buffer that is replaced
        module = Count()
        params = make_functional(module, keep_params=keep).clone()
        count = params["count"]
        module(torch.tensor(2.0), params=params)
        assert module(torch.tensor(3.0), params=params) == 5
        assert params["count"] is count and count == 5
        assert (module.count == 0) if keep else module.count is None


# --- calls within calls, other methods and signatures --------------------------------------------


def test_other_methods():
    module, x = Both(), torch.randn(B, A)
    want = module(x)
    params = make_functional(module, funs_to_decorate=["forward", "value"])
    assert torch.equal(module.value(x, params, scale=2), 2 * want)
    later = get_functional(Both())  # more methods may be named later
    params = make_functional(later, ["value"])
    assert torch.equal(later.value(x, params), later(x, params))
    listed = nn.ModuleList([nn.Linear(A, 1)])
    params = make_functional(listed)
    assert is_functional(listed) and listed[0](x, params["0"]).shape == (B, 1)
    own = nn.Linear(A, 1)
    own.forward = lambda x: nn.functional.linear(x, own.weight) + 100
    assert own(torch.zeros(A), make_functional(own)).item() == 100
    activation = nn.Sequential(nn.ReLU())  # no parameters, and none are needed
    make_functional(activation)
    assert torch.equal(activation(x), activation(x, params={}))


def test_signatures():
    for forward, signature in (
        (lambda self, x, y=1: x, "(x, y=1, params=None)"),
        (lambda self, x, *, y: x, "(x, params=None, *, y)"),
        (lambda self, *x, **options: x, "(*x, params=None, **options)"),
        (lambda self, params: params, "(params, params_=None)"),
    ):
        module = get_functional(type("Module", (nn.Module,), {"forward": forward})())
        assert str(inspect.signature(module.forward)) == signature
    scaled, weights = stateless(Scaled)  # another name where it is taken
    assert scaled(params=3, params_=weights) == scaled(3, weights) == 6


# --- keyed modules ------------------------------------------------------------------------------


def test_a_keyed_module_is_called_with_tensors_and_into_another_container():
    module, x, out = keyed(), torch.randn(B, A), TensorDict(batch_size=[B])
    want = module(x)[-1]
    params = make_functional(module)
    for got in (module(x, params), module(x=x, params=params), module(params, x=x)):
        assert torch.equal(got[-1], want)
    data = TensorDict({"x": x}, [B])
    module(data, params, tensordict_out=out)
    assert torch.equal(out["y"], want) and module(data, params=params) is data
    assert module[0](data.select("x"), params["module", "0"])["h", "x"].shape == (B, 4)
    many = torch.vmap(module, (0, 0))(data.select("x").expand(P, B), params.data.expand(P))
    assert_close(many["y"][0], want)
    call = torch.compile(lambda data, p: module(data, p)["y"], fullgraph=True, backend="eager")
    assert torch.equal(call(data.select("x"), params), want)
    part = module.select_subsequence(out_keys=[("h", "x")])
    with params.unlock_():
        del params["module", "1"]
    del module[1]
    for made in (module, part):
        assert set(made(data.select("x"), params).keys(True, True)) == {"x", ("h", "x")}


def test_keyed_modules_around_functional_nets_take_their_parameters():
    nets = [nn.Linear(3, 4), nn.Linear(4, 2)]
    td, params = TensorDict(x=torch.rand(5, 3), batch_size=[5]), [make_functional(n) for n in nets]
    hidden = nets[0](td["x"], params[0])
    want = nets[1](hidden, params[1])
    modules = [Mod(nets[0], ["x"], ["h"]), Mod(nets[1], ["h"], ["y"])]
    alone = TensorDict(module=params[0])
    for got in (modules[0](td.copy(), params=alone), modules[0](td.copy(), alone)):
        assert_close(got["h"], hidden)
    head = ProbabilisticTensorDictModule({"param": "y"}, ["a"])
    module = ProbabilisticTensorDictSequential(*modules, head)
    tree = TensorDict(module={str(i): {"module": p} for i, p in enumerate(params)})
    for got in (module(td.copy(), params=tree), module(td.copy(), tree)):
        assert_close(got["y"], want)
    several = torch.vmap(module, (None, 0))(td, tree.expand(2))
    assert several.batch_size == (2, 5) and several["y"].shape == (2, *want.shape)
    with pytest.raises(TypeError, match="stateless"):
        module(td, None)
    for net, p in zip(nets, params, strict=True):
        repopulate_module(net, p)
    assert_close(module(td.copy())["y"], want)
    assert (module(td.copy(), params=zeros(tree.data))["y"] == 0).all()


def test_a_container_for_a_plain_module_warns():
    module, td = Reads(), TensorDict(x=torch.ones(A))
    want = module(td)
    params = make_functional(module)

    def warned(*args, **kwargs):
        with pytest.warns(UserWarning, match="does not inherit from TensorDictModuleBase"):
            return module(*args, **kwargs)

    assert torch.equal(warned(td, params), want)
    with pytest.raises(TypeError, match="stateless"):
        warned(td)
    repopulate_module(module, params)
    for got in (warned(td, params=params), warned(td), warned(td=td)):
        assert torch.equal(got, want)


@pytest.mark.parametrize("keep_params", [False, True])
def test_compiles_as_one_graph(keep_params):
    module, x = normed(), torch.randn(B, A)
    params = make_functional(module, keep_params=keep_params)
    call = torch.compile(module, fullgraph=True, backend="eager")
    assert torch.equal(call(x, params=params), module(x, params=params))


def test_parameters_held_as_a_container_in_the_module():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.params = TensorDictParams(TensorDict(w=torch.ones(2)))

        def forward(self):
            return self.params["w"] * 3

    module = Holder()
    params = make_functional(module)
    for factor in (1, 0, 1):
        assert module(params.apply(lambda p: p * factor)).tolist() == [3 * factor] * 2  # noqa: B023
