"""Gradients through keyed modules equal those of plain PyTorch, and keep nothing alive."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.func import grad, jacfwd, jacrev, jvp
from torch.testing import assert_close

from raffia import TensorDict
from raffia.nn import TensorDictModule as Mod
from raffia.nn import TensorDictSequential

B, T, A = 2, 3, 5


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


# --- nothing is left behind ---------------------------------------------------------------------


@forms
def test_calls_keep_no_graph_and_no_container_alive(form):
    keyed, x = sequence(), example(requires_grad=True)
    y, td = called(keyed, x, form), TensorDict({"x": example()}, [B])
    keyed(td)
    refs = weakref.ref(y), weakref.ref(td)
    del y, td
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
