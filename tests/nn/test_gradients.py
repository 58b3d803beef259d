"""Gradients through keyed modules equal those of plain PyTorch, and nothing is left behind."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp
from torch.testing import assert_close

from raffia import TensorDict, from_modules
from raffia.nn import TensorDictModule as Mod
from raffia.nn import TensorDictModuleWrapper, TensorDictSequential

B, T, A, N = 2, 3, 5, 4


# Forward mode of torch itself compiles its formulas with deprecated functions.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def net():
    return nn.Sequential(nn.Linear(T, A), nn.Tanh(), nn.Linear(A, 2)).double()


class Product(nn.Module):
    """Two inputs and two layers."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(A, 2).double(), nn.Linear(A, 2).double()

    def forward(self, u, v):
        return self.left(u) * self.right(v)


def module(**options):
    return Mod(net(), ["x"], ["y"], **options)


def sequence():
    return TensorDictSequential(
        Mod(nn.Linear(T, A).double(), ["x"], [("n", "h")]),
        Mod(lambda h: (h.tanh(), h.sigmoid()), [("n", "h")], ["u", "v"]),
        Mod(Product(), ["u", "v"], ["y"]),
    )


def plain(keyed):
    """The same function of `x` without keys."""

    def call(x):
        if isinstance(keyed, TensorDictSequential):
            h = keyed[0].module(x)
            return keyed[2].module(h.tanh(), h.sigmoid())
        return keyed.module(x)

    return call


makes = pytest.mark.parametrize("make", [module, sequence])
FORMS = ["container", "tensors", "keywords"]
forms = pytest.mark.parametrize("form", FORMS)


def example(requires_grad=False):
    return torch.randn(B, T, dtype=torch.double, requires_grad=requires_grad)


def called(keyed, x, form):
    """`y` of a call in one of the forms."""
    if form in ("container", "tensordict_out"):
        options = {"tensordict_out": TensorDict()} if form == "tensordict_out" else {}
        return keyed(TensorDict({"x": x}, x.shape[:1]), **options)["y"]
    out = keyed(x) if form == "tensors" else keyed(x=x)
    return out[-1] if isinstance(out, tuple) else out


# --- equal to plain modules ---------------------------------------------------------------------


@makes
@forms
def test_derivatives_equal_plain_torch(make, form):
    keyed, x, t = make(), example(requires_grad=True), example()
    call, expected = (lambda x: called(keyed, x, form)), plain(keyed)
    wanted = [x, *keyed.parameters()]
    for a, b in zip(
        torch.autograd.grad(call(x).square().sum(), wanted),
        torch.autograd.grad(expected(x).square().sum(), wanted),
        strict=True,
    ):
        assert_close(a, b, rtol=0, atol=0)
    x = example()
    for transform in (jacrev, jacfwd):
        assert_close(transform(call)(x), transform(expected)(x))
    assert_close(jvp(call, (x,), (t,)), jvp(expected, (x,), (t,)))

    def loss(call):
        return lambda row: call(row.unsqueeze(0)).square().sum()

    assert_close(torch.vmap(grad(loss(call)))(x), torch.vmap(grad(loss(expected)))(x))


# --- other parameters ---------------------------------------------------------------------------


def parameters(keyed):
    return TensorDict.from_module(keyed).data.clone()


@makes
@forms
def test_vmap_over_stacked_parameters(make, form):
    members, x = [make() for _ in range(N)], example()
    params, empty = from_modules(*members), make().to("meta")

    def call(params, x):
        with params.to_module(empty):
            return called(empty, x, form)

    def keyed_call(params, td):
        with params.to_module(empty):
            return empty(td)

    out = torch.vmap(call, (0, None))(params, x)
    expected = torch.stack([plain(m)(x) for m in members])
    assert_close(out, expected)
    td = TensorDict({"x": x}, [B])
    whole = torch.vmap(keyed_call, (0, None))(params, td)
    assert whole.batch_size == (N, B) and "y" not in td
    assert_close(whole["y"], expected)
    grads = torch.vmap(grad(lambda p, x: call(p, x).square().sum()), (0, None))(params.data, x)
    out.square().sum().backward()
    expected.square().sum().backward()
    for i, member in enumerate(members):
        for name, p in member.named_parameters():
            assert_close(params.flatten_keys(".")[name].grad[i], p.grad)
            assert_close(grads.flatten_keys(".")[name][i], p.grad)
    assert all(p.is_meta for p in empty.parameters())


# --- nothing is left behind ---------------------------------------------------------------------


class Broken(nn.Module):
    """Fails after its parameters were used."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(T, A).double()
        self.register_buffer("count", torch.zeros((), dtype=torch.double))

    def forward(self, x):
        self.layer(x)
        raise ZeroDivisionError("inner trouble")


def state(keyed):
    """Everything that a call must leave unchanged."""
    return (
        [(name, id(p), p._version, type(p)) for name, p in keyed.named_parameters()],
        [(name, id(b), b._version) for name, b in keyed.named_buffers()],
        [name for name, m in keyed.named_modules() if isinstance(m, nn.Linear)],
    )


def uses():
    """Ways to run a keyed module with other parameters or under a transform."""

    def vmapped(keyed, x):
        stacked = torch.stack([parameters(keyed)] * N)

        def call(params, x):
            with params.to_module(keyed):
                return called(keyed, x, "tensors")

        return torch.vmap(call, (0, None))(stacked, x)

    def differentiated(keyed, x):
        return jacrev(lambda x: called(keyed, x, "keywords"))(x)

    def by_parameters(keyed, x):
        def loss(params):
            with params.to_module(keyed):
                return called(keyed, x, "container").sum()

        return grad(loss)(parameters(keyed))

    def replaced(keyed, x):
        flat = dict(parameters(keyed).flatten_keys(".").items())
        return functional_call(keyed, flat, (TensorDict({"x": x}, [B]),))

    return [vmapped, differentiated, by_parameters, replaced]


def wrapped_tensors(value):
    """Tensors of a functorch transform anywhere in attributes."""
    if isinstance(value, torch.Tensor):
        return [value] if torch._C._functorch.is_functorch_wrapped_tensor(value) else []
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in wrapped_tensors(v)] if isinstance(value, list | tuple) else []


@pytest.mark.parametrize("use", uses(), ids=lambda use: use.__name__)
@pytest.mark.parametrize("kind", ["module", "sequence", "broken last", "broken inside"])
def test_a_call_leaves_the_module_unchanged(use, kind):
    broken = Mod(Broken(), ["x"], ["y"])
    keyed = {
        "module": module,
        "sequence": sequence,
        "broken last": lambda: TensorDictSequential(Mod(torch.sin, ["x"], ["x"]), broken),
        "broken inside": lambda: TensorDictModuleWrapper(broken),
    }[kind]()
    x, fails = example(), kind.startswith("broken")
    if not fails:
        called(keyed, x, "container")  # caches of the first call are no leak
    before = state(keyed)
    if fails:
        with pytest.raises(ZeroDivisionError):
            use(keyed, x)
    else:
        use(keyed, x)
    assert state(keyed) == before
    assert not any(wrapped_tensors(m.__dict__) for m in keyed.modules())
    if not fails:
        assert_close(called(keyed, x, "container"), plain(keyed)(x))
        called(keyed, x, "tensors").sum().backward()
        assert all(p.grad is not None for p in keyed.parameters())


@forms
def test_calls_keep_no_graph_and_no_container_alive(form):
    keyed, x = sequence(), example(requires_grad=True)
    y, td = called(keyed, x, form), TensorDict({"x": example()}, [B])
    keyed(td)
    refs = weakref.ref(y), weakref.ref(td)
    del y, td
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
