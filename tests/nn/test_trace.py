"""symbolic_trace: a keyed graph as a flat torch.fx program over tensors."""

import copy
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
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
    symbolic_trace,
)

B, T, A = 2, 3, 5


class Net(nn.Module):
    def __init__(self, size_in=T, size_out=A):
        super().__init__()
        self.fc1 = nn.Linear(size_in, 7)
        self.fc2 = nn.Linear(7, size_out)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


class Masker(nn.Module):
    def forward(self, x, mask):
        return torch.softmax(x * mask, dim=1)


class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.rand(T))

    def forward(self, x):
        return x + self.bias, torch.sigmoid(x)


def keyed(module, in_keys, out_keys, **options):
    return TensorDictModule(module, in_keys=in_keys, out_keys=out_keys, **options)


def inputs():
    return TensorDict(
        {"input": {"x": torch.randn(B, T), "mask": torch.ones(B, A)}, "z": torch.randn(B, T)},
        batch_size=[B],
    )


def masked_net():
    return TensorDictSequential(
        keyed(Net(), [("input", "x")], [("mid", "x")]),
        keyed(Masker(), [("mid", "x"), ("input", "mask")], [("out", "p")]),
    )


def tree(td):
    return {key: td[key] for key in td.keys(True, True)}


def same(module, td=None):
    """Trace a module, and compare what both do to equal containers; returns the traced one."""
    traced = symbolic_trace(module)
    td = inputs() if td is None else td
    mine, theirs = td.clone(), td.clone()
    result, expected = traced(mine), module(theirs)
    assert_close(tree(result), tree(expected))
    assert_close(tree(mine), tree(theirs))
    assert (result is mine) == (expected is theirs)
    assert result.batch_size == expected.batch_size
    return traced


# --- what the peer does as well -----------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: keyed(Net(), ["z"], ["y"]),
        lambda: keyed(nn.Linear(T, A), [("input", "x")], [("out", "y")]),
        lambda: keyed(Split(), ["z"], [("out", "a"), ("out", "b")]),
        lambda: keyed(nn.Sequential(nn.Linear(T, A), nn.ReLU()), ["z"], ["y"]),
        masked_net,
        lambda: TensorDictSequential(masked_net(), keyed(nn.Linear(A, 1), [("out", "p")], ["v"])),
        lambda: TensorDictSequential(keyed(Net(), ["z"], ["y"]), keyed(Net(A, A), ["y"], ["y2"])),
    ],
)
def test_same_result(make):
    same(make())


def test_inputs_are_read_by_getitem():
    traced = symbolic_trace(masked_net())
    reads = [node for node in traced.graph.nodes if node.target is operator.getitem]
    assert [node.args[1] for node in reads] == [("input", "x"), ("input", "mask")]
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    assert [node.target for node in placeholders] == ["tensordict"]


def test_attributes_fall_through_to_the_graph_module():
    traced = symbolic_trace(keyed(Net(), ["z"], ["y"]))
    assert isinstance(traced.graph, fx.Graph)
    assert "def forward(self, tensordict)" in traced.code
    assert isinstance(traced.fc1, nn.Linear)
    with pytest.raises(AttributeError, match="fc3"):
        _ = traced.fc3


def test_writes_into_tensordict_out():
    traced, td, out = symbolic_trace(masked_net()), inputs(), TensorDict(batch_size=[B])
    before = set(td.keys(True, True))
    assert traced(td, tensordict_out=out) is out
    assert set(out.keys(True, True)) == {("mid", "x"), ("out", "p")}
    assert set(td.keys(True, True)) == before
    assert traced(td, TensorDict(batch_size=[B]))["out", "p"].shape == (B, A)


def test_parameters_are_those_of_the_module():
    module = masked_net()
    traced = symbolic_trace(module)
    assert {id(p) for p in traced.parameters()} == {id(p) for p in module.parameters()}


@pytest.mark.parametrize("thing", [nn.Linear(T, A), 3, lambda x: x])
def test_what_is_no_keyed_module_is_refused(thing):
    with pytest.raises(TypeError):
        symbolic_trace(thing)


def test_gradients_are_the_same():
    module = masked_net()
    traced, td = symbolic_trace(module), inputs()
    traced(td.clone())["out", "p"][:, 0].sum().backward()
    grads = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    module(td)["out", "p"][:, 0].sum().backward()
    assert_close(grads, [p.grad for p in module.parameters()])


def test_module_of_functions_with_a_class_around_them():
    class Double(nn.Module):
        def forward(self, x):
            return 2 * x

    traced = same(keyed(Double(), ["z"], ["y"]))
    assert [node.op for node in traced.graph.nodes] == [
        "placeholder",
        "call_function",
        "call_function",
        "output",
    ]


# --- ours: functions ----------------------------------------------------------------------------


def test_functions_become_nodes_ours():
    traced = same(
        TensorDictSequential(
            keyed(lambda x, z: (x + z, x * z), [("input", "x"), "z"], ["sum", "product"]),
            keyed(torch.add, ["sum", "product"], ["y"]),
            keyed(torch.exp, ["y"], ["y"]),
        )
    )
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert called[2:] == [operator.add, operator.mul, torch.add, torch.exp]


def test_program_reads_like_the_keys_ours():
    seq = TensorDictSequential(
        {
            "encoder": keyed(Net(), [("input", "x")], ["hidden"]),
            "head": keyed(nn.Linear(A, 1), ["hidden"], [("out", "value")]),
        }
    )
    code = same(seq).code.strip().splitlines()
    assert [line.split(";")[0].strip() for line in code] == [
        "def forward(self, tensordict):",
        "input_x = tensordict[('input', 'x')]",
        "encoder_fc1 = self.encoder.fc1(input_x)",
        "relu = torch.relu(encoder_fc1)",
        "hidden = self.encoder.fc2(relu)",
        "out_value = self.head(hidden)",
        "return (hidden, out_value)",
    ]


def test_print_readable_ours(capsys):
    symbolic_trace(masked_net()).print_readable()
    assert "softmax = torch.softmax" in capsys.readouterr().out.replace("out_p", "softmax")


def test_two_modules_of_one_class_have_two_names_ours():
    seq = TensorDictSequential(keyed(Net(), ["z"], ["h"]), keyed(Net(A, A), ["h"], ["y"]))
    names = {name for name, _ in same(seq).named_parameters()}
    assert len(names) == 8 and {n.split(".")[1] for n in names} == {"net", "net_1"}


def test_a_module_used_twice_is_there_once_ours():
    net = Net(T, T)
    seq = TensorDictSequential(keyed(net, ["z"], ["h"]), keyed(net, ["h"], ["y"]))
    assert len(list(same(seq).parameters())) == 4


def test_keyword_inputs_ours():
    def minus(x, *, scale, y):
        return x - scale * y

    module = keyed(minus, {"y": "z", "x": ("input", "x")}, ["d"], method_kwargs=None)
    module.method_kwargs = {"scale": 3}
    same(module)


def test_dropped_outputs_ours():
    traced = same(keyed(lambda x: (x + 1, x + 2, x + 3), ["z"], ["_", "b", "_"]))
    assert traced.out_keys == ["b"]
    traced.graph.eliminate_dead_code()
    assert len(list(traced.graph.nodes)) == 4  # no sum but that of b


def test_dict_outputs_are_picked_by_key_ours():
    same(keyed(lambda x: {"b": x + 2, "a": x + 1, "c": x}, ["z"], ["a", "b"]))


def test_method_ours():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def encode(self, x, *, scale):
            return self.net(x) * scale

    same(keyed(Two(), ["z"], ["y"], method="encode", method_kwargs={"scale": 2.0}))


def test_wrapper_ours():
    same(TensorDictModuleWrapper(masked_net()))


# --- ours: what torch.fx can't follow is one call -----------------------------------------------


def test_function_with_control_flow_ours():
    def relu_by_hand(x):
        return x if x.sum() > 0 else 0 * x

    traced = symbolic_trace(keyed(relu_by_hand, ["z"], ["y"]))
    assert "call_module" in [node.op for node in traced.graph.nodes]
    assert "y = self.relu_by_hand(z)" in traced.code
    for sign in (1, -1):
        result = traced(TensorDict({"z": sign * torch.ones(B, T)}, [B]))
        assert_close(result["y"], torch.full((B, T), float(sign > 0)))


def test_module_with_control_flow_ours():
    class Branch(Split):
        def forward(self, x):
            outputs = super().forward(x)
            return outputs if x.sum() > 0 else outputs[::-1]

    module = TensorDictSequential(keyed(Branch(), ["z"], ["a", "b"]), keyed(Net(), ["b"], ["y"]))
    traced = same(module)
    assert {id(p) for p in traced.parameters()} == {id(p) for p in module.parameters()}
    same(module, TensorDict({"z": -10 * torch.ones(B, T)}, [B]))


def test_module_with_control_flow_that_gives_a_dict_ours():
    class Named(nn.Module):
        def forward(self, x):
            return {"b": x + 2, "a": x + 1} if len(x) > 1 else {}

    same(keyed(Named(), ["z"], ["a", "b"]))


def test_layers_of_torch_stay_calls_ours():
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    td = TensorDict({"q": torch.randn(B, T, 4)}, batch_size=[B])
    traced = same(keyed(layer, {"query": "q", "key": "q", "value": "q"}, ["y", "_"]), td)
    assert "self.multiheadattention(query = q, key = q, value = q)" in traced.code


def test_lambda_over_a_module_that_is_not_its_own_ours():
    net = Net()
    same(keyed(lambda x: net(x), ["z"], ["y"]))


def test_normal_param_extractor_ours():
    same(
        TensorDictSequential(
            keyed(nn.Linear(T, 4), ["z"], ["params"]),
            keyed(NormalParamExtractor(), ["params"], ["loc", "scale"]),
        )
    )


@pytest.mark.parametrize("name", ["lambda", "2nd head", "keyed", "graph", "meta"])
def test_names_that_python_or_modules_use_otherwise_ours(name):
    same(TensorDictSequential({name: keyed(nn.Linear(T, A), ["z"], ["class"])}))


# --- ours: where the outputs go -----------------------------------------------------------------


def step(in_key, out_key, **options):
    return keyed(lambda x: x + 1, [in_key], [out_key], **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: step("z", "y", inplace=False),
        lambda: step("z", "y", inplace="empty"),
        lambda: TensorDictSequential(step("z", "h"), step("h", "y"), inplace=False),
        lambda: TensorDictSequential(step("z", "h"), step("h", "y"), inplace="empty"),
        lambda: TensorDictSequential(step("z", "h"), step("h", "y"), inplace=True),
        lambda: TensorDictSequential(step("z", "h", inplace=False), step("h", "y")),
        lambda: TensorDictSequential(step("z", "h", inplace="empty"), step("h", "y")),
        lambda: TensorDictSequential(
            TensorDictSequential(step("z", "h"), step("h", "i"), inplace="empty"), step("i", "y")
        ),
        lambda: TensorDictSequential(step("z", "z"), step("z", "z"), step("z", "y")),
        lambda: TensorDictSequential(step("z", ("n", "z")), step(("n", "z"), ("n", "m", "y"))),
    ],
)
def test_inplace_ours(make):
    same(make())


def test_a_container_in_the_middle_is_not_written_to_ours():
    module = TensorDictSequential(step("z", "h"), step("h", "y", inplace=False))
    td = inputs()
    result = symbolic_trace(module)(td)
    assert_close(tree(result), {"y": td["z"] + 2})
    assert "h" not in td


@pytest.mark.parametrize(
    "make",
    [
        lambda: keyed(lambda x: (x + 1, x + 2), ["z"], ["a", "b"]).select_out_keys("b"),
        lambda: TensorDictSequential(step("z", "h"), step("h", "y")).select_out_keys("y"),
        lambda: TensorDictSequential(step("z", "z"), step("z", "y")).select_out_keys("y"),
        lambda: TensorDictSequential(step("z", "h"), step("h", "y"), selected_out_keys=["y"]),
        lambda: TensorDictSequential(
            TensorDictSequential(step("z", "h"), step("h", "i")).select_out_keys("i"),
            step("i", "y"),
        ),
        lambda: TensorDictSequential(
            keyed(lambda x: (x + 1, x + 2), ["z"], ["a", "b"]).select_out_keys("b"), step("b", "y")
        ),
    ],
)
def test_selected_keys_ours(make):
    traced = same(make())
    assert traced.out_keys == make().out_keys
    same(make(), inputs().set("a", torch.zeros(B)).set("h", torch.zeros(B, T)))


def test_only_what_is_selected_is_computed_after_dead_code_is_removed_ours():
    module = TensorDictSequential(step("z", "h"), keyed(torch.exp, ["z"], ["y"]))
    traced = symbolic_trace(module.select_out_keys("y"))
    traced.graph.eliminate_dead_code()
    traced.recompile()
    assert "add" not in traced.code and "+" not in traced.code


# --- ours: a keyed module like others -----------------------------------------------------------


def test_can_be_called_with_tensors_ours():
    module, td = masked_net(), inputs()
    traced = symbolic_trace(module)
    assert traced.in_keys == module.in_keys and traced.out_keys == module.out_keys
    expected = module(td["input", "x"], td["input", "mask"])
    assert_close(traced(td["input", "x"], td["input", "mask"]), expected)
    assert_close(traced(input_x=td["input", "x"], input_mask=td["input", "mask"]), expected)


def test_can_stand_in_a_sequence_ours():
    module = masked_net()
    head = keyed(nn.Linear(A, 1), [("out", "p")], ["v"])
    td = inputs()
    expected = TensorDictSequential(module, head)(td.clone())
    assert_close(TensorDictSequential(symbolic_trace(module), head)(td)["v"], expected["v"])


def test_copies_ours():
    traced, td = symbolic_trace(masked_net()), inputs()
    again = copy.deepcopy(traced)
    assert_close(again(td.clone())["out", "p"], traced(td)["out", "p"])
    assert {id(p) for p in again.parameters()}.isdisjoint({id(p) for p in traced.parameters()})


def test_compiles_whole_ours():
    module, td = masked_net(), inputs()
    compiled = torch.compile(symbolic_trace(module), fullgraph=True, backend="eager")
    assert_close(compiled(td.clone())["out", "p"], module(td)["out", "p"])


def test_follows_the_training_mode_ours():
    net = nn.Sequential(nn.Linear(T, A), nn.Dropout(0.99)).eval()
    traced = symbolic_trace(keyed(net, ["z"], ["y"]).eval())
    assert not traced.training
    assert traced(inputs())["y"].count_nonzero() == B * A
    assert traced.train()(inputs())["y"].count_nonzero() < B * A


# --- ours: refusals -----------------------------------------------------------------------------


class Foreign(TensorDictModuleBase):
    in_keys, out_keys = ["z"], ["y"]

    def forward(self, tensordict):
        return tensordict.set("y", tensordict["z"])


def normal():
    return ProbabilisticTensorDictModule(
        in_keys=["loc", "scale"], out_keys=["y"], distribution_class=torch.distributions.Normal
    )


@pytest.mark.parametrize(
    "make, name",
    [
        (Foreign, "Foreign"),
        (normal, "ProbabilisticTensorDictModule"),
        (lambda: EnsembleModule(keyed(Net(), ["z"], ["y"]), 2), "EnsembleModule"),
        (lambda: ProbabilisticTensorDictSequential(normal()), "ProbabilisticTensorDictSequential"),
    ],
)
def test_modules_that_handle_the_container_themselves_are_refused_ours(make, name):
    for module in (make(), TensorDictSequential(make())):
        with pytest.raises(TypeError, match=rf"flat program of {name}\b.*way of its own"):
            symbolic_trace(module)


def test_function_of_a_container_is_refused_ours():
    with pytest.raises(TypeError, match="flat program of WrapModule"):
        symbolic_trace(TensorDictSequential(lambda td: td))


def test_partial_tolerance_is_refused_ours():
    with pytest.raises(TypeError, match="TensorDictSequential: with partial_tolerant=True"):
        symbolic_trace(TensorDictSequential(step("z", "y"), partial_tolerant=True))


def test_options_of_reading_are_refused_ours():
    with pytest.raises(TypeError, match=r"get_kwargs=\{'as_list': True\}"):
        symbolic_trace(step("z", "y", get_kwargs={"as_list": True}))


def test_hooks_are_refused_ours():
    module = step("z", "y")
    module.register_forward_hook(lambda *args: None)
    with pytest.raises(TypeError, match="flat program of TensorDictModule"):
        symbolic_trace(module)


def test_reading_what_is_gone_is_refused_ours():
    seq = TensorDictSequential(step("z", "h", inplace=False), keyed(torch.add, ["h", "z"], ["y"]))
    with pytest.raises(TypeError, match="it reads 'z', which is not there any more"):
        symbolic_trace(seq)


def test_reading_a_container_that_was_written_in_part_is_refused_ours():
    seq = TensorDictSequential(step("z", ("n", "y")), keyed(lambda n: n["y"], ["n"], ["v"]))
    with pytest.raises(TypeError, match="it reads all of 'n', a part of which was written"):
        symbolic_trace(seq)


def test_missing_input_is_a_key_error_ours():
    with pytest.raises(KeyError, match='"z" not found'):
        symbolic_trace(step("z", "y"))(TensorDict(y=torch.ones(2)))


def test_a_module_that_stands_twice_runs_twice_ours():
    double = TensorDictModule(lambda x: 2 * x, ["x"], ["x"])
    traced = symbolic_trace(TensorDictSequential(double, double))
    assert traced(TensorDict(x=torch.ones(T)))["x"].tolist() == [4.0] * T
