"""symbolic_trace: a keyed graph as a flat torch.fx program over tensors."""

import operator

import pytest
import torch
from torch import fx, nn
from torch.testing import assert_close

from raffia import TensorDict
from raffia.nn import (
    EnsembleModule,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModuleBase,
    TensorDictSequential,
    symbolic_trace,
)
from tests.marks import refusals

from .keyed import keyed, linear, tree

B, T, A = 2, 3, 5


class Net(nn.Module):
    def __init__(self, size_in=T, size_out=A):
        super().__init__()
        self.fc1 = nn.Linear(size_in, 7)
        self.fc2 = nn.Linear(7, size_out)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))

    def encode(self, x, *, scale):
        return self.forward(x) * scale


class Masker(nn.Module):
    def forward(self, x, mask):
        return torch.softmax(x * mask, dim=1)


class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.rand(T))

    def forward(self, x):
        return x + self.bias, torch.sigmoid(x)


class Branch(Split):
    def forward(self, x):
        outputs = super().forward(x)
        return outputs if x.sum() > 0 else outputs[::-1]


class Named(nn.Module):
    def forward(self, x):
        return {"b": x + 2, "a": x + 1} if len(x) > 1 else {}


def relu_by_hand(x):
    return x if x.sum() > 0 else 0 * x


def minus(x, *, scale, y):
    return x - scale * y


def pair(x):
    return x + 1, x + 2


def step(in_key, out_key, **options):
    return keyed(lambda x: x + 1, [in_key], [out_key], **options)


def seq(*modules, **options):
    return TensorDictSequential(*modules, **options)


def two(**options):
    return seq(step("z", "h"), step("h", "y"), **options)


def with_scale():
    module = keyed(minus, {"y": "z", "x": ("input", "x")}, ["d"], method_kwargs=None)
    module.method_kwargs = {"scale": 3}
    return module


def inputs(scale=1.0):
    x = {"x": torch.randn(B, T), "mask": torch.ones(B, A)}
    return TensorDict({"input": x, "z": scale * torch.randn(B, T)}, [B])


def masked_net():
    return seq(
        keyed(Net(), [("input", "x")], [("mid", "x")]),
        keyed(Masker(), [("mid", "x"), ("input", "mask")], [("out", "p")]),
    )


def same(module, td=None):
    """Traces a module, and compares both on equal containers; returns the traced one."""
    traced = symbolic_trace(module)
    td = inputs() if td is None else td
    mine, theirs = td.clone(), td.clone()
    result, expected = traced(mine), module(theirs)
    assert_close(tree(result), tree(expected))
    assert_close(tree(mine), tree(theirs))
    assert (result is mine) == (expected is theirs)
    assert result.batch_size == expected.batch_size
    assert traced.in_keys == module.in_keys
    assert traced.out_keys == [key for key in module.out_keys if key != "_"]
    assert {id(p) for p in traced.parameters()} == {id(p) for p in module.parameters()}
    return traced


SHARED = Net(T, T)
MODULES = {
    "outputs": lambda: keyed(Split(), ["z"], [("out", "a"), ("out", "b")]),
    "a class twice": lambda: seq(keyed(Net(), ["z"], ["y"]), keyed(Net(A, A), ["y"], ["w"])),
    "a module twice": lambda: seq(keyed(SHARED, ["z"], ["h"]), keyed(SHARED, ["h"], ["y"])),
    "keywords": with_scale,
    "dropped": lambda: keyed(lambda x: (x + 1, x + 2, x + 3), ["z"], ["_", "b", "_"]),
    "dict": lambda: keyed(lambda x: {"b": x + 2, "a": x + 1, "c": x}, ["z"], ["a", "b"]),
    "method": lambda: keyed(Net(), ["z"], ["y"], method="encode", method_kwargs={"scale": 2.0}),
    "extractor": lambda: seq(
        keyed(nn.Linear(T, 4), ["z"], ["params"]),
        keyed(NormalParamExtractor(), ["params"], ["loc", "scale"]),
    ),
    # modules that torch.fx cannot trace are one call
    "branch": lambda: seq(keyed(Branch(), ["z"], ["a", "b"]), keyed(Net(), ["b"], ["y"])),
    "branch with a dict": lambda: keyed(Named(), ["z"], ["a", "b"]),
    # destination of outputs
    "fresh": lambda: step("z", "y", inplace=False),
    "empty inside": lambda: seq(two(inplace="empty"), step("y", "i")),
    # selections
    "selected": lambda: keyed(pair, ["z"], ["a", "b"]).select_out_keys("b"),
    "selected inside": lambda: seq(two(selected_out_keys=["y"]), step("y", "i")),
    "overwritten inside": lambda: seq(
        seq(step("z", "h"), step("h", "z"), selected_out_keys=["h"]), step("h", "i")
    ),
    **{  # names that Python or modules use otherwise
        name: lambda name=name: seq({name: keyed(nn.Linear(T, A), ["z"], ["class"])})
        for name in ("lambda", "2nd head", "keyed", "graph")
    },
}


@pytest.mark.parametrize("name", MODULES)
def test_a_traced_module_gives_the_same_outputs(name):
    module = MODULES[name]()
    for scale in (1.0, 10.0, -10.0):
        same(module, inputs(scale))
    same(module, inputs().set("a", torch.zeros(B)).set("h", torch.zeros(B, T)))


def test_the_program():
    traced = symbolic_trace(masked_net())
    reads = [node for node in traced.graph.nodes if node.target is operator.getitem]
    assert [node.args[1] for node in reads] == [("input", "x"), ("input", "mask")]
    encoder, head = keyed(Net(), [("input", "x")], ["hidden"]), linear("hidden", "value", (A, 1))
    code = same(seq({"encoder": encoder, "head": head})).code
    assert [line.split(";")[0].strip() for line in code.strip().splitlines()] == [
        "def forward(self, tensordict):",
        "input_x = tensordict[('input', 'x')]",
        "encoder_fc1 = self.encoder.fc1(input_x)",
        "relu = torch.relu(encoder_fc1)",
        "hidden = self.encoder.fc2(relu)",
        "value = self.head(hidden)",
        "return (hidden, value)",
    ]
    names = {n.split(".")[1] for n, _ in same(MODULES["a class twice"]()).named_parameters()}
    assert names == {"net", "net_1"}
    assert "y = self.relu_by_hand(z)" in same(keyed(relu_by_hand, ["z"], ["y"])).code
    layer, q = nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(B, T, 4)
    attention = keyed(layer, {"query": "q", "key": "q", "value": "q"}, ["y", "_"])
    traced = same(attention, TensorDict({"q": q}, batch_size=[B]))  # layers of torch stay calls
    assert "self.multiheadattention(query = q, key = q, value = q)" in traced.code
    net = Net()
    over = symbolic_trace(keyed(lambda x: net(x), ["z"], ["y"]))  # a module that is not its own
    td = inputs()
    assert_close(over(td)["y"], net(td["z"]))


def test_a_traced_module_is_a_graph_module_and_a_keyed_module(capsys):
    module, td = masked_net(), inputs()
    traced, out = symbolic_trace(module), TensorDict(batch_size=[B])
    assert isinstance(traced.graph, fx.Graph) and "def forward(self, tensordict)" in traced.code
    assert isinstance(symbolic_trace(keyed(Net(), ["z"], ["y"])).fc1, nn.Linear)
    with pytest.raises(AttributeError, match="fc3"):
        _ = traced.fc3
    traced.print_readable()
    assert "softmax = torch.softmax" in capsys.readouterr().out.replace("out_p", "softmax")
    before, (x, mask) = set(td.keys(True, True)), td["input"].values()
    assert traced(td, tensordict_out=out) is out and set(td.keys(True, True)) == before
    assert set(out.keys(True, True)) == {("mid", "x"), ("out", "p")}
    assert traced(td, TensorDict(batch_size=[B]))["out", "p"].shape == (B, A)
    expected = module(x, mask)
    assert_close(traced(x, mask), expected)
    assert_close(traced(input_x=x, input_mask=mask), expected)
    net = nn.Sequential(nn.Linear(T, A), nn.Dropout(0.99)).eval()
    traced = symbolic_trace(keyed(net, ["z"], ["y"]).eval())
    assert not traced.training and traced(td.clone())["y"].count_nonzero() == B * A
    assert traced.train()(td.clone())["y"].count_nonzero() < B * A


# --- refusals -----------------------------------------------------------------------------------


class Foreign(TensorDictModuleBase):
    in_keys, out_keys = ["z"], ["y"]

    def forward(self, tensordict):
        return tensordict.set("y", tensordict["z"])


def normal():
    return ProbabilisticTensorDictModule(
        in_keys=["loc", "scale"], out_keys=["y"], distribution_class=torch.distributions.Normal
    )


OWN_WAY = {
    Foreign: "Foreign",
    normal: "ProbabilisticTensorDictModule",
    lambda: EnsembleModule(keyed(Net(), ["z"], ["y"]), 2): "EnsembleModule",
    lambda: ProbabilisticTensorDictSequential(normal()): "ProbabilisticTensorDictSequential",
}
ADD, WHOLE = keyed(torch.add, ["h", "z"], ["y"]), keyed(lambda n: n["y"], ["n"], ["v"])
one = torch.ones(2)
ERRORS = [  # a traced module, and part of the error
    *((make, rf"program of {name}\b.*on the container itself") for make, name in OWN_WAY.items()),
    (lambda: seq(normal()), r"flat program of Prob.*works on the container itself"),
    (lambda: seq(step("z", "y"), partial_tolerant=True), "with partial_tolerant=True"),
    (lambda: step("z", "y", get_kwargs={"as_list": True}), r"get_kwargs=\{'as_list': True\}"),
    (lambda: seq(step("z", "h", inplace=False), ADD), "it reads 'z', which was removed before"),
    (lambda: seq(step("z", ("n", "y")), WHOLE), "it reads all of 'n'"),
]
test_modules_that_cannot_be_traced_are_refused = refusals(
    [
        *((lambda make=make: symbolic_trace(make()), TypeError, words) for make, words in ERRORS),
        (lambda: symbolic_trace(step("z", "y"))(TensorDict(y=one)), KeyError, '"z" not found'),
    ]
)
