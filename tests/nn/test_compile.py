"""Keyed modules compile as one graph, once, and give the same results as without."""

import re

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from raffia import TensorDict
from raffia.nn import EnsembleModule as Ensemble
from raffia.nn import (
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    dispatch,
    set_skip_existing,
    symbolic_trace,
)
from raffia.nn import TensorDictSequential as Seq
from tests.marks import slow_among

from .keyed import keyed, linear, policy, tree

B, T, A = 2, 3, 5


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch.manual_seed(0)


def chain(**options):
    return Seq(
        linear("x", "h"), keyed(lambda h, z: (h * z, h + z), ["h", "z"], ["y", "_"]), **options
    )


def nested_chain():
    return Seq(
        linear(("obs", "x"), ("mid", "h")),
        Seq(
            keyed(torch.relu, [("mid", "h")], [("mid", "h")]),
            linear(("mid", "h"), ("out", "n", "y"), (A, 1)),
        ),
    )


def inputs():
    return TensorDict({"x": x(), "z": z(), "obs": {"x": x()}}, batch_size=[B])


def whole(function, *make, backend="eager", close=assert_close):
    """Compiles a function, compares it with itself, and calls it again without a new compilation.

    make: functions that make its arguments.
    """
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for run in range(2):
        args = [m() for m in make]
        copies = [a.clone() for a in args]
        torch.manual_seed(run)
        with torch._dynamo.config.patch(error_on_recompile=run > 0):
            result = compiled(*args)
        torch.manual_seed(run)
        expected = function(*copies)
        for mine, theirs in zip([result, *args], [expected, *copies], strict=True):
            if isinstance(theirs, TensorDict):
                assert mine.batch_size == theirs.batch_size
                assert (mine is args[0]) == (theirs is copies[0])
                mine, theirs = tree(mine), tree(theirs)
            close(mine, theirs)
    return compiled


# --- containers ---------------------------------------------------------------------------------


class Own(TensorDictModuleBase):
    in_keys, out_keys = ["x"], ["y"]

    @dispatch
    def forward(self, tensordict):
        return tensordict.set("y", 2 * tensordict["x"])


class Around(TensorDictModuleWrapper):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class Foreign(nn.Module):
    in_keys, out_keys = ["x"], ["y"]

    def forward(self, tensordict):
        tensordict["y"] = 2 * tensordict["x"]
        return tensordict


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(T, A)

    def forward(self, x):
        return x

    def encode(self, x, *, scale):
        return self.net(x) * scale


MODULES = {
    "module": linear,
    "nested keys": lambda: linear(("obs", "x"), ("out", "n", "y")),
    "nested output": lambda: keyed(lambda x: {"b": x + 1, "a": x + 2}, ["x"], ["n"]),
    "method": lambda: keyed(Branch(), ["x"], ["y"], method="encode", method_kwargs={"scale": 2.0}),
    "inplace empty": lambda: linear(inplace="empty"),
    "selected": lambda: keyed(lambda x: (x + 1, x + 2), ["x"], ["a", "b"]).select_out_keys("b"),
    "sequence of nested keys": nested_chain,
    "sequence inplace False": lambda: chain(inplace=False),
    "selected twice": lambda: Seq(chain().select_out_keys("y"), linear("x", "v")),
    "partial tolerant": lambda: Seq(linear("missing", "v"), linear(), partial_tolerant=True),
    "function of a container": lambda: Seq(lambda td: td.set("y", td["x"] + 1)),
    "wrapper": lambda: Around(linear()),
    "own class": Own,
    "any class with keys": lambda: Seq(Foreign(), linear("x", "h")),
    "traced": lambda: symbolic_trace(chain()),
    "probabilistic": lambda: policy(default_interaction_type="mode"),
    "ensemble": lambda: Ensemble(linear(), 4),
    "ensembles in a row": lambda: Seq(
        Ensemble(linear("x", "h"), 4), Ensemble(linear("h", "y", (A, 1)), 4, False)
    ),
}


SLOW = """ensembles in a row, probabilistic, selected twice, method, sequence of nested keys,
    nested keys, sequence inplace False, nested output, inplace empty"""


@pytest.mark.parametrize("name", slow_among(MODULES, *re.split(r",\s+", SLOW)))
def test_container_in_container_out(name):
    whole(MODULES[name](), inputs)


def test_within_a_compiled_function():
    module = nested_chain()
    whole(lambda td: module(td)["out", "n", "y"].square().sum(), inputs)
    whole(linear(inplace="empty"), lambda: inputs().lock_())
    scaled = keyed(lambda x, scale=1: x * scale, ["x"], ["y"])
    whole(lambda td: scaled(td, scale=3), inputs)

    def function(td, out):
        chain_out(td, tensordict_out=out)
        return out

    chain_out = chain()
    whole(function, inputs, lambda: TensorDict(batch_size=[B]))


# --- tensors ------------------------------------------------------------------------------------


def x():
    return torch.randn(B, T)


def z():
    return torch.randn(B, A)


def test_called_with_tensors():
    for single in (linear("x", ("n", "y")), Own(), Ensemble(linear(), 4)):
        whole(single, x)
    whole(policy(), x)
    nested, module = nested_chain(), chain()
    whole(lambda x: nested(obs_x=x), x)
    whole(lambda x, z: module(x, z=z), x, z)
    whole(module.select_out_keys("y"), x, z)


# --- state --------------------------------------------------------------------------------------


def test_skip_existing_can_be_switched_off_within_and_refuses_to_be_switched_on():
    module = linear()

    def function(td, mode):
        with set_skip_existing(mode):
            return module(td)

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    td = inputs()
    assert_close(compiled(td.clone(), False)["y"], module(td)["y"])
    with pytest.raises(Exception, match="can't|cannot"):
        compiled(td.clone(), True)
    around, td = torch.compile(linear(), fullgraph=True, backend="eager"), inputs()
    td["y"] = torch.zeros(B, A)
    with set_skip_existing():
        assert around(td.clone())["y"].count_nonzero() == 0
    assert around(td.clone())["y"].count_nonzero() > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("make", [policy, lambda: Ensemble(nested_chain(), 4)])
def test_inductor(make):
    whole(make(), inputs, backend="inductor")
