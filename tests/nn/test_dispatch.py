"""`dispatch`: methods that take a container can be called with tensors."""

import inspect

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from raffia import TensorDict, lazy_stack
from raffia.nn import TensorDictModule as M
from raffia.nn import TensorDictModuleBase, dispatch, make_tensordict
from tests.marks import refusals

from .keyed import leaves, plus

B, T = 2, 3
one, two = torch.ones(T), torch.full((T,), 2.0)


class Bare(nn.Module):
    in_keys = ["a", ("n", "b")]
    out_keys = ["c"]

    @dispatch
    def forward(self, tensordict, scale=1.0, *, shift=0.0, **rest):
        self.batch_size, self.rest = tensordict.batch_size, rest
        total = tensordict["a"] + 10 * tensordict["n", "b"]
        return tensordict.set("c", total * scale + shift)


class Three(nn.Module):
    in_keys = ["a"]
    out_keys = ["u", ("n", "v"), "w"]

    @dispatch
    def forward(self, tensordict):
        a = tensordict["a"]
        return tensordict.update({"w": a + 3, "n": {"v": a + 2}, "u": a + 1})


class Inherited(Bare):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def of(cls, **attributes):
    """An instance of a class made from `cls` with other attributes."""
    return type(cls.__name__, (cls,), attributes)()


def dispatching(ins, outs, func=lambda td, x: td.set("out", x + 1), **options):
    """A module of the first input, whose `forward` dispatches with options."""

    class Made(nn.Module):
        in_keys, out_keys = ins, outs

        @dispatch(**options)
        def forward(self, tensordict):
            self.batch_size = tensordict.batch_size
            return func(tensordict, tensordict[ins[0]])

    return Made()


# --- forms of calls -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Bare, Inherited])
@pytest.mark.parametrize(
    "kwargs, result", [({}, 21), ({"scale": 3.0, "shift": 2.0, "more": 3}, 65)]
)
def test_forms_of_calls(make, kwargs, result):
    module, calls = make(), []
    module.register_forward_hook(lambda m, args, out: calls.append(out))
    td = TensorDict({"a": one, "n": {"b": two}})
    tensors = [module(one, two, **kwargs), module(n_b=two, a=one, **kwargs)]
    tensors.append(module.forward(one, n_b=two, **kwargs))
    out = [module(td.copy(), **kwargs), module(tensordict=td.copy(), **kwargs)]
    out.append(module(lazy_stack([td, td]), **kwargs)[0])
    for got in (*tensors, *(container["c"] for container in out)):
        assert got.tolist() == [result] * T
    assert set(module.rest) == set(kwargs) - {"scale", "shift"}
    assert module(td) is td and calls[0] is tensors[0]
    assert module(one, two, 3.0).tolist() == [63] * T
    assert make()(torch.ones(B, T), torch.ones(B, 1)).shape == (B, T)


SEVERAL = [(["w", "u"], (3, 1)), ([("n", "v"), "a"], (2, 0)), (["u", "_", "w"], (1, 3))]
RESULTS = [*SEVERAL, (["u"], 1), ([], ()), (["_"], ())]  # of `Three`: out_keys, outputs for zeros


@pytest.mark.parametrize("keys, amounts", RESULTS, ids=str)
def test_results_in_the_order_of_out_keys(keys, amounts):
    module = of(Three, out_keys=keys)
    out = module(a=torch.zeros(T))
    got = tuple(o[0].item() for o in out) if isinstance(out, tuple) else out[0].item()
    assert got == amounts
    module.out_keys = ["n"]
    assert leaves(module(one)) == {"v"}  # keys are read at each call
    for value in (3, True, [1.0, 2.0]):  # numbers are made tensors
        assert_close(of(Three, out_keys=["a"])(a=value), torch.tensor(value))


SUB = TensorDict({"x": one}, [T])
OPTIONS = [  # a dispatching module, the keywords of a call, the batch size of ones [2, 1]
    (dispatching(["a", ("n", "b")], ["out"], separator="__"), {"a": one, "n__b": two}, (B, 1)),
    (dispatching(["a", ("n", "b")], ["out"], separator=""), {"a": one, "nb": two}, (B, 1)),
    (dispatching(["a"], [], source=["a", "d"], dest=["out"]), {"a": one, "d": two}, (B, 1)),
    (dispatching(["a", "b"], ["out"], auto_batch_size=False), {"a": one, "b": two}, ()),
    (
        dispatching(["a", "sub"], ["out"], lambda td, x: td.set("out", x + td["sub", "x"])),
        *({"a": one, "sub": SUB}, None),
    ),
    (
        dispatching(["tensordict"], ["out"], lambda td, x: td.set("out", x["x"] + 1)),
        *({"tensordict": SUB}, None),
    ),
]


@pytest.mark.parametrize("row", range(len(OPTIONS)))
def test_options(row):
    module, arguments, batch_size = OPTIONS[row]
    assert_close(module(**arguments), two)
    if "tensordict" not in arguments:  # the first argument would be taken for the container
        assert_close(module(*arguments.values()), two)
    if batch_size is not None:
        module(*[torch.ones(B, 1)] * len(arguments))
        assert module.batch_size == batch_size


def test_decorated_methods_and_functions():
    class Coder(TensorDictModuleBase):
        in_keys, out_keys = ["x"], ["y"]
        reads = [("n", "b"), "a"]

        @dispatch
        def forward(self, tensordict):
            """What it does."""
            return tensordict.set("y", tensordict["x"] + 1)

        @dispatch(source="out_keys", dest="in_keys")
        def back(self, tensordict):
            return tensordict.set("x", tensordict["y"] - 1)

        @dispatch("-", "reads", ["c", ("d", "e")], False)
        def other(self, tensordict):
            n, a = tensordict["n", "b"], tensordict["a"]
            return tensordict.set("c", a + 1).set(("d", "e"), n + 1)

        def plain(self, tensordict):
            return tensordict.set("y", tensordict["x"] + 1)

    @dispatch(source=["a"], dest=["b"])
    def function(tensordict):
        return tensordict.set("b", tensordict["a"] + 1)

    coder = Coder()
    assert_close(coder.back(coder(one)), one)
    assert isinstance(coder.back(TensorDict(y=two)), TensorDict)
    assert_close(coder.other(a=one, **{"n-b": two}), (two, two + 1))
    run = dispatch(coder.plain)
    for got in (run(x=one), run(TensorDict(x=one))["y"], function(one), function(a=one)):
        assert_close(got, two)
    assert Coder.forward.__name__ == "forward" and Coder.forward.__doc__ == "What it does."
    assert "tensordict" in inspect.signature(Coder.forward).parameters
    made = dispatch(separator=".", source="s", dest=["d"], auto_batch_size=False)
    settings = (made.separator, made.source, made.dest, made.auto_batch_size)
    assert settings == (".", "s", ["d"], False)
    defaults = dispatch.DEFAULT_SEPARATOR, dispatch.DEFAULT_SOURCE, dispatch.DEFAULT_DEST
    assert defaults == ("_", "in_keys", "out_keys")


# --- errors -------------------------------------------------------------------------------------


class NoKeys(nn.Module):
    @dispatch
    def forward(self, tensordict):
        return tensordict


ERRORS = [  # a call, its error, and words of its message
    (lambda: M(plus, ["x"], ["z"])(one, x=one), RuntimeError, "Duplicated argument"),
    (lambda: NoKeys()(one), AttributeError, "in_keys"),
    (lambda: of(Three, out_keys=["u", "gone"])(one), KeyError, "gone"),
    (lambda: dispatch(lambda tensordict: tensordict)(one), RuntimeError, "pass the keys to the"),
    (lambda: dispatch(lambda self, td: td), RuntimeError, "tensordict"),
    (lambda: make_tensordict(a=one, batch_size=[T + 1]), RuntimeError, "batch"),
]


test_errors = refusals(ERRORS)
