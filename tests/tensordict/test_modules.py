"""Parameters of modules as containers: from_module(s), to_module, TensorDictParams."""

import copy
import functools
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from raffia import LazyStackedTensorDict, TensorDict, TensorDictParams, from_module, from_modules
from raffia.nn import TensorDictModule
from tests.tensordict.invariants import sound
from tests.tensordict.kinds import each, raises

NORM = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


def linear():
    return nn.Linear(3, 4)


def linears(n=2):
    return [linear() for _ in range(n)]


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def values(module):
    """A free copy of a module's parameters and buffers, no gradient."""
    return TensorDict.from_module(module).data.clone()


def call(params, module, x):
    with params.to_module(module):
        return module(x)


def names(module):
    """The names of the parameters and of the buffers."""
    return [n for n, _ in module.named_parameters()], [n for n, _ in module.named_buffers()]


def first(out):
    return out[0] if isinstance(out, tuple) else out


ensemble = torch.vmap(call, (0, None, None))


class Tied(nn.Module):
    """Two layers, one weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


class Shared(nn.Module):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        self.a = self.b = nn.Linear(3, 3)

    def forward(self, x):
        return self.b(self.a(x))


class Host(nn.Module):
    """A module that holds parameters as a container."""

    def __init__(self):
        super().__init__()
        entries = TensorDict(a=dict(w=torch.rand(3)), k=torch.zeros(2, dtype=torch.int))
        self.params = TensorDictParams(entries)

    def forward(self, x):
        return x * self.params["a", "w"]


def params(**options):
    counts = torch.zeros(2, dtype=torch.long)
    entries = TensorDict(w=torch.zeros(3, 4), n=TensorDict(b=torch.zeros(2), i=counts))
    return TensorDictParams(entries, **options)


# ------------------------------------------------------------------------------ out of modules


def test_from_module():
    m = mlp()
    p = from_module(m)
    assert p["0", "weight"] is m[0].weight and p["2", "bias"] is m[2].bias and sound(p)
    assert p.batch_size == () and p.device is None and p.is_locked
    assert set(p.keys(True, True)) == {(n, k) for n in ("0", "2") for k in ("weight", "bias")}
    assert not TensorDict.from_module(m).is_locked
    assert TensorDict.from_module(m, lock=True).is_locked
    with pytest.raises(RuntimeError, match="Cannot modify locked"):
        p["0"].set("weight", torch.zeros(4, 3))
    module = from_module(m, as_module=True)
    assert isinstance(module, TensorDictParams) and module["0", "weight"] is m[0].weight
    every = from_module(m, filter_empty=False)
    assert set(p.keys()) == {"0", "2"} and set(every.keys()) == {"0", "1", "2"}
    assert every["1"].is_empty() and from_module(nn.ReLU()).is_empty()
    norm = nn.BatchNorm1d(3)
    assert set(from_module(norm).keys()) == NORM
    assert from_module(norm)["running_mean"] is norm.running_mean
    sparse = nn.ModuleDict({"norm": nn.BatchNorm1d(3, track_running_stats=False), "act": nn.ReLU()})
    sparse.register_buffer("nothing", None)
    sparse.register_parameter("void", None)
    assert set(from_module(sparse).keys(True, True)) == {("norm", "weight"), ("norm", "bias")}
    tied = Tied()
    assert from_module(tied)["a", "weight"] is from_module(tied)["b", "weight"] is tied.a.weight
    assert len(list(from_module(tied, as_module=True).parameters())) == 3
    m[0].weight.requires_grad_(False)
    assert not from_module(m)["0", "weight"].requires_grad
    host = Host()
    assert from_module(host)["params", "a", "w"] is host.params["a", "w"]
    assert not host.params.is_locked


def test_from_the_state_dict():
    m = nn.Sequential(linear())
    w = from_module(m, use_state_dict=True)["0", "weight"]
    assert type(w) is torch.Tensor and not w.requires_grad
    assert w.data_ptr() == m[0].weight.data_ptr()
    hooked = linear()
    hooked._register_state_dict_hook(lambda m, state, *_: state.update(x=torch.ones(1)))
    assert set(from_module(hooked, use_state_dict=True).keys()) == {"weight", "bias", "x"}
    assert set(from_module(hooked).keys()) == {"weight", "bias"}
    p = from_modules(*linears(), use_state_dict=True)
    assert type(p["weight"]) is torch.Tensor and p["weight"].shape == (2, 4, 3)


def test_from_modules():
    a, b = ms = linears()
    p = from_modules(*ms)
    assert p.batch_size == (2,) and p.is_locked and p["weight"].shape == (2, 4, 3) and sound(p)
    assert all(type(v) is nn.Parameter and v.is_leaf and v.requires_grad for v in p.values())
    assert_close(p["weight"][1], b.weight)
    assert TensorDict.from_modules(*ms).is_locked and not from_modules(*ms, lock=False).is_locked
    assert from_modules(a).batch_size == (1,)
    nested = from_modules(mlp(), mlp(), as_module=True)
    assert isinstance(nested, TensorDictParams) and nested.is_locked
    assert nested["0", "weight"].shape == (2, 4, 3) and nested["0"].batch_size == (2,)
    assert set(names(nested)[0]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert set(nested.state_dict()) == set(names(nested)[0])
    assert not from_modules(*ms, as_module=True, lock=False).is_locked
    a.bias.requires_grad_(False)  # the first one decides
    p = from_modules(a, b)
    assert type(p["bias"]) is nn.Parameter and not p["bias"].requires_grad
    assert p["weight"].requires_grad and from_modules(b, a)["bias"].requires_grad
    p = from_modules(nn.BatchNorm1d(3), nn.BatchNorm1d(3), as_module=True)
    assert set(names(p)[0]) == {"weight", "bias"} and set(names(p)[1]) == NORM - {"weight", "bias"}
    assert p["running_mean"].shape == (2, 3) and p["num_batches_tracked"].tolist() == [0, 0]
    p = from_modules(*[nn.ReLU()] * 3)
    assert p.is_empty() and p.batch_size == (3,)
    p = from_modules(Tied(), Tied())
    assert p["a", "weight"] is not p["b", "weight"]
    assert_close(p["a", "weight"], p["b", "weight"])


def test_lazy_stacks_contain_the_originals():
    ms = linears()
    p = from_modules(*ms, lazy_stack=True)
    assert isinstance(p, LazyStackedTensorDict) and p.is_locked and p.batch_size == (2,)
    assert p.tensordicts[0]["weight"] is ms[0].weight
    assert type(p["weight"]) is torch.Tensor and p["weight"].requires_grad
    ms[1].weight.data.fill_(3)
    assert p["weight"][1].unique().tolist() == [3.0]
    assert not from_modules(*ms, lazy_stack=True, lock=False).is_locked
    p = from_modules(linear(), nn.Linear(3, 5), lazy_stack=True)
    assert p[1]["weight"].shape == (5, 3)
    with pytest.raises(RuntimeError, match="weight"):
        p["weight"]
    p = from_modules(linear(), nn.Sequential(nn.Linear(3, 5)), lazy_stack=True)
    assert list(p.keys()) == [] and p[1]["0", "bias"].shape == (5,)


def ran():
    layer = nn.LazyLinear(4)
    layer(torch.ones(2, 3))
    return layer


R = RuntimeError
BARE = nn.Linear(3, 4, bias=False)
LAZY = TensorDict.lazy_stack([TensorDict(w=torch.zeros(n)) for n in (2, 3)])
NOPE = TensorDict(nope=torch.zeros(4))
# call, words of its text, error if it is no RuntimeError
REFUSED = [
    (lambda: from_modules(linear(), nn.Linear(3, 5)), "shapes.*incompatible.*weight"),
    (lambda: from_modules(linear(), BARE, expand_identical=True), "bias", ValueError),
    (from_modules, ""),
    (lambda: from_modules(*linears(), as_module=True, lazy_stack=True), "(?i)lazystacked.*permit"),
    (lambda: from_modules(*[nn.LazyLinear(3)] * 2, lazy_stack=True), "lazy mod"),
    (lambda: from_modules(ran(), nn.LazyLinear(4)), "initialised in some"),
    (lambda: NOPE.to_module(linear()), "nope", KeyError),
    (lambda: NOPE.to_module(len), "", (AttributeError, TypeError)),
    (lambda: TensorDictParams(LAZY), "LazyStacked.*permitted"),
    (lambda: params().map(lambda x: x), "map"),
    (lambda: params().memmap_(), "memmap"),
    (lambda: params()(1), "", NotImplementedError),
    (lambda: params().load_state_dict({"w": torch.zeros(3, 4)}), "Missing key.*n"),
    (lambda: params(lock=True).set("z", torch.zeros(2)), "Cannot modify locked"),
]


def test_refused():
    each([(call, *(*error, R)[:1], words) for call, words, *error in REFUSED], raises)


# --------------------------------------------------------------------- parameters that are shared


def shared_and_separate(n=3, requires_grad=True):
    """Modules that share their first layer, and the result of `from_modules`."""
    shared = nn.Linear(2, 4).requires_grad_(requires_grad)
    modules = [nn.Sequential(shared, nn.Linear(4, 5)) for _ in range(n)]
    return modules, from_modules(*modules, expand_identical=True, as_module=True)


@pytest.mark.parametrize("n", [2, 3])
def test_a_shared_parameter_is_registered_and_trained(n):
    modules, p = shared_and_separate(n)
    shared, named = modules[0][0], dict(p.named_parameters())
    assert named["0.weight"] is shared.weight and named["0.bias"] is shared.bias
    assert named["1.weight"].shape == (n, 5, 4) and not list(p.buffers())
    assert p["0", "weight"].shape == (n, 4, 2)
    out = ensemble(p, modules[0], torch.ones(2))
    want = torch.stack([m(torch.ones(2)) for m in modules])
    assert_close(out, want)
    losses = out.square().sum(), want.square().sum()
    grads = [torch.autograd.grad(loss, shared.weight, retain_graph=True)[0] for loss in losses]
    assert_close(*grads)
    before = shared.weight.detach().clone()
    out.sum().backward()
    torch.optim.SGD(p.parameters(), 0.1).step()
    assert not torch.equal(before, shared.weight)
    assert_close(p["0", "weight"][-1], shared.weight)


def test_shared_parameters_follow_the_module():
    modules, p = shared_and_separate()
    shared = modules[0][0].weight
    for twin in copy.deepcopy(p), pickle.loads(pickle.dumps(p)), p.clone(), p.to(torch.float64):
        assert names(twin) == names(p)
        mine = twin.get_parameter("0.weight")
        assert mine is not shared and mine.shape == shared.shape
        assert_close(mine, shared, check_dtype=False)
        twin["0", "weight"].sum().backward()
        assert_close(mine.grad, torch.full_like(mine, 3.0))
    _, other = shared_and_separate()
    state = p.state_dict()
    assert state["0.weight"].shape == (4, 2)
    for assign in (False, True):
        other.zero_()
        other.load_state_dict(state, assign=assign)
        assert_close(other["0", "weight"], p["0", "weight"])
        assert_close(other.get_parameter("0.weight"), p.get_parameter("0.weight"))
    holder = nn.ModuleList([p]).double()
    assert holder[0].get_parameter("0.weight") is shared and shared.dtype is torch.float64
    assert p["0", "weight"].dtype is torch.float64
    p.zero_()
    assert not shared.any() and not p["0", "weight"].any()


def test_shared_parameters_that_change_their_memory_or_mode():
    modules, p = shared_and_separate()
    shared = modules[0][0]
    vector = torch.arange(100.0)[: sum(q.numel() for q in p.parameters())]
    nn.utils.vector_to_parameters(vector, p.parameters())  # sets their `data`
    assert_close(p["0", "weight"], shared.weight.expand(3, 4, 2))
    assert_close(p["0", "weight"][1].flatten(), torch.arange(8.0))
    nn.ModuleList([p]).requires_grad_(False)
    assert not p["0", "weight"].requires_grad
    nn.ModuleList([p]).requires_grad_(True)
    with torch.no_grad():
        assert p["0", "weight"].shape == (3, 4, 2)
    p["0", "weight"].sum().backward()
    assert_close(shared.weight.grad, torch.full((4, 2), 3.0))
    _, frozen = shared_and_separate(requires_grad=False)
    assert not frozen.get_parameter("0.weight").requires_grad and not list(frozen.buffers())


def test_calls_with_other_values_for_shared_parameters():
    """`functional_call` uses the value of one row, or one for each row."""
    _, p = shared_and_separate()

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = p

        def forward(self):
            return self.p["0", "weight"]

    before, reads = p["0", "weight"].clone(), Reads()
    one, each_row = torch.rand(4, 2), torch.rand(3, 4, 2)
    for value, want in ((one, one.expand(3, 4, 2)), (each_row, each_row)):
        assert_close(torch.func.functional_call(reads, {"p.0.weight": value}, ()), want)
    assert_close(p["0", "weight"], before)


# --------------------------------------------------------------------------------- lazy layers


@pytest.mark.parametrize(
    "options, randomness",
    [({}, "error"), ({"as_module": True}, "same"), ({"use_state_dict": True}, "different")],
)
def test_lazy_layers(options, randomness):
    """The first call initialises them, each like a separate layer."""

    def lazy():
        return nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyBatchNorm1d(), nn.Linear(4, 2))

    modules, x = [lazy() for _ in range(3)], torch.randn(5, 7)
    p = from_modules(*modules, **options)
    assert p.batch_size == (3,) and p.is_locked
    optimizer = torch.optim.SGD([v for v in p.values(True, True) if v.requires_grad], 0.1)
    torch.manual_seed(0)  # the bounds below hold for it
    out = torch.vmap(call, (0, None, None), randomness=randomness)(p, lazy(), x)
    assert out.shape == (3, 5, 2) and type(p["0", "weight"]) is nn.Parameter
    assert p["0", "weight"].shape == (3, 4, 7) and p["2", "running_mean"].shape == (3, 4)
    largest = p["0", "weight"].abs().amax((1, 2))
    assert (largest <= 7**-0.5).all() and (largest > 0.8 * 7**-0.5).all()
    assert largest.unique().numel() == 3 and nn.parameter.is_lazy(modules[0][0].weight)
    out.sum().backward()
    before = p["0", "weight"].detach().clone()
    optimizer.step()
    assert not torch.equal(before, p["0", "weight"])
    assert torch.vmap(call, (0, None, None), randomness="same")(p, lazy(), x).shape == (3, 5, 2)


def test_a_failed_call_leaves_lazy_layers_unchanged():
    p = from_modules(nn.LazyLinear(4), nn.LazyLinear(4))
    empty, twin = nn.LazyLinear(4), copy.deepcopy(p)
    hooks = list(empty._forward_pre_hooks)

    def fail(p):
        with p.to_module(empty):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        torch.vmap(fail)(p)
    assert list(empty._forward_pre_hooks) == hooks
    assert ensemble(p, empty, torch.ones(3)).shape == (2, 4)
    assert ensemble(twin, nn.LazyLinear(4, device="meta"), torch.ones(3)).shape == (2, 4)


# -------------------------------------------------------------------------------- into modules


def two_names():
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Sequential(layer))


def norm():
    return nn.BatchNorm1d(3).eval()


RECURRENT = [functools.partial(nn.LSTM, 3, 4), functools.partial(nn.GRU, 3, 4)]
MODULES = [linear, mlp, norm, Tied, Shared, two_names, Host, *RECURRENT]
WAYS = [{}, {"inplace": True}, {"preserve_module_state": False}]


def state(module):
    """Each parameter and buffer of a module under each of its names, and a copy of it."""
    found = [*module.named_parameters(remove_duplicate=False)]
    found += module.named_buffers(remove_duplicate=False)
    return {name: (value, value.detach().clone()) for name, value in found}


def check_state(module, before):
    now = state(module)
    assert set(now) == set(before)
    for name, (value, copied) in before.items():
        assert now[name][0] is value and torch.equal(now[name][1], copied), name
    return True


@pytest.mark.parametrize("form", ["block", "call", "locked"])
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("make", MODULES)
def test_values_are_swapped_in_and_out(make, options, form):
    m, other, x = make(), make(), torch.randn(5, 3)
    new, before, listed, want = values(other), state(m), list(m.state_dict()), first(other(x))
    if form == "locked":
        new.lock_()
    swap = new.to_module(m, **options)
    if form == "call":
        assert_close(first(m(x)), want)
        swap.to_module(m, **({} if "preserve_module_state" in options else options))
    else:
        with swap:
            assert_close(first(m(x)), want)
            if "preserve_module_state" not in options:
                assert list(m.state_dict()) == listed
    assert check_state(m, before) and list(m.state_dict()) == listed
    assert new.is_locked is (form == "locked")
    leaf = values(other).apply(lambda v: v.requires_grad_(v.is_floating_point()))
    if not options and make is not norm:
        first(call(leaf, m, x)).sum().backward()
        assert any(v.grad is not None for v in leaf.values(True, True))
        assert all(q.grad is None for q in m.parameters()) and check_state(m, before)


@pytest.mark.parametrize("options", [{}, {"inplace": True}], ids=str)
def test_nested_and_failing_blocks(options):
    m = mlp()
    before = state(m)
    with pytest.raises(ZeroDivisionError), values(m).zero_().to_module(m, **options):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError):
        call(values(m), m, torch.ones(7))
    extra = values(m).zero_().set(("zz", "w"), torch.zeros(1))
    with pytest.raises(KeyError, match="zz"):
        extra.to_module(m, **options)
    assert check_state(m, before)
    for i in (1, 2):
        with values(m).fill_("0", 1.0 * i).to_module(m, **options):
            with values(m).fill_("0", 5.0).to_module(m, **options):
                assert m[0].weight.mean() == 5
            assert m[0].weight.mean() == i
    with TensorDict({("0", "weight"): torch.zeros(4, 3)}).to_module(m, **options):
        assert not m[0].weight.any() and m[2].weight is before["2.weight"][0]
    with TensorDict().to_module(m, **options):
        pass
    wrong = TensorDict({("0", "weight"): torch.zeros(4, 3), ("0", "bias"): torch.zeros(5)})
    if options:
        with pytest.raises(RuntimeError):  # all or nothing is written
            wrong.to_module(m, inplace=True)
    else:
        wide = TensorDict({("0", "weight"): torch.zeros(7, 3), ("0", "bias"): torch.zeros(7)})
        assert call(wide, m[:1], torch.ones(3)).shape == (7,)  # other shapes may enter
    assert check_state(m, before)


def test_results_of_to_module():
    m = linear()
    w, new = m.weight, values(m).zero_()
    swap = new.to_module(m)
    assert isinstance(m.weight, nn.Parameter) and m.weight.data_ptr() == new["weight"].data_ptr()
    assert isinstance(swap, TensorDict) and swap["weight"] is w
    swap.to_module(m)
    assert m.weight is w
    assert new.to_module(m, swap_dest=(dest := TensorDict())) is dest and dest["weight"] is w
    dest.to_module(m)
    assert new.to_module(m, return_swap=False) is None and not m.weight.any()
    TensorDict(weight=torch.ones(4, 3), bias=torch.zeros(4)).to_module(m, use_state_dict=True)
    assert m.weight.sum() == 12
    real, empty, x = mlp(), mlp().to("meta"), torch.randn(5, 3)
    assert_close(call(from_module(real), empty, x), real(x))
    assert empty[0].weight.is_meta


def test_a_layer_under_two_names_gets_the_values_of_either():
    shared = linear()
    m = nn.Sequential(nn.Sequential(shared), shared)
    weight, bias = torch.rand(4, 3), torch.rand(4)
    for options in ({}, {"inplace": True}):
        before = state(m)
        td = TensorDict({"0": {"0": {"weight": weight}}, "1": {"bias": bias}})
        with td.to_module(m, **options):
            assert_close(shared.weight.data, weight)
            assert_close(shared.bias.data, bias)
        assert check_state(m, before)
    m = nn.Module()
    m.first = m.second = TensorDictParams(TensorDict(w=torch.ones(3)))
    parameter = m.first.get_parameter("w")
    swap = values(m).zero_().to_module(m)
    assert not m.first["w"].any()
    swap.to_module(m)
    assert m.first["w"] is parameter and m.first["w"].all()


def test_parameters_for_buffers_and_buffers_for_parameters():
    m = nn.BatchNorm1d(3)
    before, td, x = state(m), values(m), torch.randn(2, 3)
    mean = td["running_mean"] = nn.Parameter(torch.ones(3))
    with td.to_module(m):  # a buffer over the same memory, no parameter of the module
        assert not isinstance(m.running_mean, nn.Parameter)
        assert m.running_mean.data_ptr() == mean.data_ptr() and "running_mean" in names(m)[1]
        m.running_mean.sum().backward()
    assert mean.grad.tolist() == [1, 1, 1]
    td["bias"] = nn.Parameter(torch.zeros(3))
    for form in ("block", "call"):  # unchanged, only parameters are parameters
        swap = td.to_module(m, preserve_module_state=False)
        assert names(m) == (["bias", "running_mean"], ["running_var", "num_batches_tracked"])
        assert m.weight is td["weight"] and m.running_mean is td["running_mean"]
        with torch.no_grad():
            assert_close(m.eval()(x), (x - 1) / (1 + m.eps) ** 0.5)
        if form == "block":
            with swap:
                pass
        else:
            swap.to_module(m)
        assert check_state(m, before) and "weight" not in m.__dict__
    for m, x in ((linear(), torch.ones(3)), (nn.LSTM(3, 2), torch.ones(5, 3))):
        want = torch.zeros_like(first(m(x)))
        with values(m).zero_().to_module(m, preserve_module_state=False):
            assert not list(m.parameters())
            module = TensorDictModule(m, ["x"], ["y", "_"] if isinstance(m, nn.LSTM) else ["y"])
            assert_close(module(TensorDict(x=x))["y"], want)
    m, x = nn.BatchNorm1d(3), torch.randn(5, 3) + 4
    p, before = values(m), state(m)
    call(p, m, x)
    assert_close(p["running_mean"], 0.1 * x.mean(0))
    assert p["num_batches_tracked"] == 1 and check_state(m, before)


def test_gradients_and_frozen_parameters():
    m, x = linear(), torch.ones(3)
    p = TensorDictParams(values(m).zero_())
    with p.to_module(m):
        assert m.weight is p["weight"]
        m(x).sum().backward()
    assert p["weight"].grad.sum() == 12 and m.weight.grad is None
    call(TensorDict.from_module(m).apply(lambda t: t * 2), m, x).sum().backward()
    assert m.weight.grad.unique().tolist() == [2.0]
    frozen, p = linear().requires_grad_(False), TensorDict.from_module(linear())
    assert not call(p, frozen, x).requires_grad  # parameters take the module's flag
    with p.to_module(frozen, preserve_module_state=False):
        frozen(x).sum().backward()
    assert p["weight"].grad is not None and not frozen.weight.requires_grad
    assert call(p.clone(), frozen, x).requires_grad  # tensors carry their gradient
    p = TensorDict.from_module(frozen)
    with p.to_module(m):
        assert m.weight.requires_grad
    with p.to_module(m, preserve_module_state=False):
        assert m.weight is p["weight"] and not m.weight.requires_grad
    assert not p["weight"].requires_grad


def test_threads_with_separate_modules():
    torch.manual_seed(0)
    x, wrong = torch.randn(5, 3), []

    def work(m, other):
        p, y, y_other = TensorDict.from_module(other), m(x), other(x)
        for _ in range(20):
            if not torch.allclose(call(p, m, x), y_other) or not torch.allclose(m(x), y):
                wrong.append(m)

    threads = [threading.Thread(target=work, args=(mlp(), mlp())) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    m = mlp()
    p = values(m)
    call(p, m, torch.ones(3))
    ref = weakref.ref(m)
    del m
    gc.collect()
    assert ref() is None  # modules are not kept alive


def parameter(*shape):
    return nn.Parameter(torch.ones(shape))


# --------------------------------------------------------------------------- TensorDictParams
# as modules and in modules: tests/nn/test_tensordict_params.py


def test_params_are_container_and_module():
    p = params()
    assert isinstance(p, nn.Module) and sound(p) and not p.is_locked and params(lock=True).is_locked
    assert names(p) == (["w", "n.b"], ["n.i"]) and (params() == params()).all()
    t, v = torch.zeros(3), nn.Parameter(torch.zeros(3))
    q = TensorDictParams(TensorDict(w=t, v=v), no_convert="skip")
    assert (
        q["v"] is v and names(q) == (["v"], ["w"]) and TensorDictParams(TensorDict(w=v))["w"] is v
    )
    assert TensorDictParams({"w": t})["w"].data_ptr() == t.data_ptr()
    p = TensorDictParams(w=t)
    assert p.setdefault("w", torch.ones(3)) is p["w"] and p["w"].data_ptr() == t.data_ptr()
    frozen = nn.Parameter(t, requires_grad=False)
    assert not TensorDictParams(TensorDict(w=frozen))["w"].requires_grad
    assert TensorDictParams(TensorDict(w=torch.ones(3, requires_grad=True) * 2))["w"].is_leaf
    assert TensorDictParams(TensorDict(s="text", w=torch.zeros(2)))["s"] == "text"
    src = TensorDict(w=t, n=TensorDict(b=t))
    TensorDictParams(src)
    assert src["w"] is src["n", "b"] is t  # the source keeps its tensors
    p = params()
    p["n"]["d"] = torch.ones(2)
    assert "n.d" not in names(p)[0]  # written below: after the next change
    p["e"] = torch.ones(2)
    assert {"n.d", "e"} <= set(names(p)[0])


@pytest.mark.parametrize("nested", [False, True])
def test_names_with_a_dot(nested):
    p = TensorDictParams(TensorDict(w=torch.zeros(1)))
    if nested:
        p["n", "b"] = torch.zeros(2)
    before = names(p)
    p["n.b"] = torch.ones(2)
    assert dict(p.named_parameters())["n.b"] is p["n.b"] is p.get_parameter("n.b")
    if nested:  # two entries of one name in the state dict: one would be lost
        with pytest.raises(KeyError, match="'n.b'"):
            p.state_dict()
    assert p.pop("n.b").tolist() == [1.0, 1.0]
    assert names(p) == before and "n.b" not in p and set(p.state_dict()) == set(before[0])
    with pytest.raises(KeyError, match="n.b"):
        p.pop("n.b")
    # a parameter registered by its dotted name is the nested entry
    new = p._parameters["n.c"] = nn.Parameter(torch.ones(2))
    assert p["n", "c"] is new and p._parameters.pop("n.c") is new and ("n", "c") not in p


def test_lock_of_params_and_nested_containers():
    p = params()
    assert not p["n"].is_locked and p.lock_()["n"].is_locked
    with pytest.raises(RuntimeError, match="locked"):
        p["n"].unlock_()
    p.set_("w", torch.ones(3, 4))
    assert pickle.loads(pickle.dumps(p)).is_locked
    p.unlock_().set("z", torch.zeros(2))
    assert "z" in names(p)[0] and not p["n"].is_locked
    p.exclude(("n", "b"), inplace=True)
    assert list(p["n"].keys()) == ["i"]
    first_, rest = params().split_keys([("n", "b")])
    assert list(first_.keys(True, True)) == [("n", "b")] and "b" not in rest["n"].keys()


def test_ties():
    t = parameter(3)
    p = TensorDictParams(TensorDict(a=t, n=TensorDict(b=t)))
    assert p["a"] is p["n", "b"] is t
    assert names(p)[0] == ["a"] and len(list(p.parameters())) == 1
    assert set(p.state_dict()) == {"a", "n.b"}
    twins = p.clone(), copy.deepcopy(p), pickle.loads(pickle.dumps(p)), p.to(torch.float64)
    for q in (*twins, p.cuda("meta")):
        assert q["a"] is q["n", "b"] and q["a"] is not t and len(list(q.parameters())) == 1
