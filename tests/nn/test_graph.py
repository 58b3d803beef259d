"""A sequence knows its graph: data, text, drawings, and the check of its keys."""

import contextlib
import copy
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Normal

from raffia import TensorDict, lazy_stack
from raffia.nn import (
    CompositeDistribution,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleWrapper,
    TensorDictSequential,
    WrapModule,
)
from raffia.nn.expected import check_in_keys
from raffia.nn.graph import Graph, graph_of
from raffia.nn.labels import key_text, label
from raffia.nn.shapes import EntryShape, shapes

B, D, H, A = 5, 4, 8, 3


def linear(num_in, num_out, reads, writes):
    return TensorDictModule(nn.Linear(num_in, num_out), in_keys=[reads], out_keys=[writes])


def keyed(in_keys, out_keys, function=None):
    def add(*args):
        total = sum(args)
        return tuple([total for _ in out_keys]) if len(out_keys) > 1 else total

    return TensorDictModule(function or add, in_keys=in_keys, out_keys=out_keys)


class Foreign(nn.Module):
    """Not one of ours: it only has the two lists of keys."""

    def __init__(self, in_keys, out_keys):
        super().__init__()
        self.in_keys, self.out_keys = in_keys, out_keys

    def forward(self, td):
        for key in self.out_keys:
            td.set(key, torch.zeros(td.batch_size))
        return td


class Draws(Foreign):
    """As a probabilistic module: its outputs come from a distribution."""

    distribution_class = None

    def __init__(self, in_keys, out_keys):
        super().__init__(in_keys, out_keys)
        self.distribution_class = Normal

    def forward(self, td):
        return td.set(self.out_keys[0], torch.normal(td["loc"], 1.0))


@pytest.fixture
def actor():
    return TensorDictSequential(linear(D, H, "obs", "hidden"), linear(H, A, "hidden", "action"))


@pytest.fixture
def example():
    return TensorDict(obs=torch.ones(B, D), batch_size=[B])


# ------------------------------------------------------------------------ data


def test_nodes_and_edges(actor):
    graph = actor.graph()
    first, second = graph.nodes
    assert (first.name, first.kind, first.label) == ("0", "TensorDictModule", "Linear(4, 8)")
    assert (second.in_keys, second.out_keys) == (("hidden",), ("action",))
    assert [(e.key, e.source, e.target) for e in graph.edges] == [
        ("obs", None, "0"),
        ("hidden", "0", "1"),
        ("action", "1", None),
    ]
    assert (graph.in_keys, graph.results, graph.overwritten) == (("obs",), ("action",), {})
    assert graph.unread == {"action": ("1",)}


def test_modules_by_name_are_called_so():
    seq = TensorDictSequential({"enc": keyed(["x"], ["h"]), "head": keyed(["h"], ["y"])})
    assert [node.name for node in seq.graph().nodes] == ["enc", "head"]


def test_nested_sequences_are_groups():
    inner = TensorDictSequential(keyed(["h"], ["i"]), keyed(["i"], ["j"]))
    middle = TensorDictSequential(inner)
    graph = TensorDictSequential(keyed(["x"], ["h"]), middle, keyed(["j"], ["y"])).graph()
    assert [node.name for node in graph.nodes] == ["0", "1.0.0", "1.0.1", "2"]
    assert [(g.name, g.start, g.stop) for g in graph.groups] == [("1", 1, 3), ("1.0", 1, 3)]
    assert ("j", "1.0.1", "2") in [(e.key, e.source, e.target) for e in graph.edges]


def test_dropped_outputs_are_no_keys():
    graph = TensorDictSequential(keyed(["x"], ["_", "y"])).graph()
    assert graph.nodes[0].out_keys == ("y",)
    assert graph.results == ("y",)


def test_nested_keys_depend_on_what_stands_above_and_below():
    whole = keyed(["x"], ["state"])
    part = keyed([("state", "a")], [("made", "b")])
    below = keyed(["made"], ["y"])
    graph = TensorDictSequential(whole, part, below).graph()
    assert graph.in_keys == ("x",)
    assert [(e.key, e.source, e.target) for e in graph.edges] == [
        ("x", None, "0"),
        ("state", "0", "1"),
        (("made", "b"), "1", "2"),
        ("y", "2", None),
    ]


def test_overwritten_keys_and_their_modules():
    graph = TensorDictSequential(
        keyed(["x"], ["x"]), keyed(["x"], ["y"]), keyed(["x"], ["y"]), keyed(["y"], ["z"])
    ).graph()
    assert graph.overwritten == {"x": ("0",), "y": ("1", "2")}
    assert graph.unread == {"y": ("1",), "z": ("3",)}  # the first y is lost
    assert graph.results == ("z",)


def test_a_container_overwrites_what_it_replaces():
    graph = TensorDictSequential(keyed(["x"], [("a", "b")]), keyed(["x"], ["a"])).graph()
    assert graph.overwritten == {("a", "b"): ("0", "1")}
    assert graph.results == ("a",)


def test_a_key_that_is_read_twice_has_one_edge():
    graph = TensorDictSequential(keyed(["x", "x"], ["y"])).graph()
    assert len(graph.edges) == 2
    assert "add(x, x)" in graph.program()


def test_selected_outputs_are_the_results():
    seq = TensorDictSequential(keyed(["x"], ["h"]), keyed(["h"], ["y"]), keyed(["h"], ["z"]))
    assert seq.graph().results == ("y", "z")
    seq.select_out_keys("h", "z")
    assert seq.graph().results == ("h", "z")
    assert seq.graph().unread == {"y": ("1",), "z": ("2",)}


def test_what_a_nested_selection_hides_comes_from_outside():
    inner = TensorDictSequential(keyed(["x"], ["h"]), keyed(["h"], ["y"]), selected_out_keys=["y"])
    graph = TensorDictSequential(inner, keyed(["h", "y"], ["z"])).graph()
    assert graph.in_keys == ("x", "h")
    assert graph.groups[0].hidden == ("h",)
    assert "# hidden from here on: h" in graph.program()


def test_foreign_modules_and_functions_of_containers():
    seq = TensorDictSequential(Foreign(["x"], ["y"]), lambda td: td)
    foreign, function = seq.graph().nodes
    assert (foreign.label, foreign.kind) == ("Foreign", "Foreign")
    assert (function.label, function.in_keys, function.out_keys) == ("lambda", (), ())


def test_an_empty_sequence():
    graph = TensorDictSequential().graph()
    assert (graph.nodes, graph.in_keys, graph.results) == ((), (), ())
    assert graph.program() == "TensorDictSequential(\n)"
    assert graph.svg().endswith("</svg>")
    assert graph.mermaid() == "flowchart TD"


def test_the_graph_is_plain_data(actor, example):
    graph = actor.graph(example)
    plain = graph.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["in_keys"] == ["obs"]
    assert plain["nodes"][0]["writes"] == [{"key": "hidden", "shape": [B, H], "dtype": "float32"}]
    assert copy.deepcopy(graph) == graph
    assert hash(graph) == hash(copy.deepcopy(graph))


# ------------------------------------------------------------------------ shapes


def test_shapes_of_an_example(actor, example):
    assert actor.graph().shapes == {}
    obs, hidden, action = [EntryShape((B, n), "float32") for n in (D, H, A)]
    assert actor.graph(example).shapes == {
        "0": {"in": {"obs": obs}, "out": {"hidden": hidden}},
        "1": {"in": {"hidden": hidden}, "out": {"action": action}},
    }
    assert actor.graph().shapes == {}  # the example leaves no trace


def test_shapes_of_the_first_call(actor, example):
    actor(example)
    assert actor.graph().nodes[1].writes == {"action": EntryShape((B, A), "float32")}
    assert copy.deepcopy(actor).graph().shapes == actor.graph().shapes


def test_shapes_in_a_nested_sequence(actor, example):
    outer = TensorDictSequential(actor, linear(A, 1, "action", "value"))
    assert outer.graph(example).nodes[0].writes == {"hidden": EntryShape((B, H), "float32")}
    outer(example)
    assert outer.graph().nodes[0].writes == {"hidden": EntryShape((B, H), "float32")}


def test_an_example_and_the_sequence_stay_as_they_were():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_calls = 0

        def forward(self, x):
            self.num_calls += 1
            return x.add_(torch.rand_like(x))  # in place, and random

    norm, counter = nn.BatchNorm1d(D), Counter()
    seq = TensorDictSequential(keyed(["x"], ["x"], counter), keyed(["x"], ["y"], norm))
    example = TensorDict(x=torch.zeros(B, D), batch_size=[B])
    before = torch.random.get_rng_state()
    graph = seq.graph(example)
    assert graph.nodes[1].writes == {"y": EntryShape((B, D), "float32")}
    assert torch.equal(torch.random.get_rng_state(), before)
    assert counter.num_calls == 0
    assert norm.num_batches_tracked == 0
    assert norm.running_mean.eq(0).all()
    assert list(example.keys()) == ["x"]
    assert example["x"].eq(0).all()
    assert seq.training


def test_a_module_that_stands_twice_is_seen_at_each_place():
    double = keyed(["x"], ["x"], lambda x: torch.cat([x, x], -1))
    seq = TensorDictSequential(double, double)
    nodes = seq.graph(TensorDict(x=torch.zeros(B, 1), batch_size=[B])).nodes
    assert [node.writes["x"].shape for node in nodes] == [(B, 2), (B, 4)]


def test_an_example_for_some_modules_only():
    seq = TensorDictSequential(keyed(["x"], ["y"]), keyed(["z"], ["w"]), partial_tolerant=True)
    graph = seq.graph(TensorDict(x=torch.zeros(B), batch_size=[B]))
    assert graph.nodes[0].writes == {"y": EntryShape((B,), "float32")}
    assert graph.nodes[1].writes == {}


def test_an_example_with_selected_outputs_and_a_new_container(example):
    seq = TensorDictSequential(
        linear(D, H, "obs", "hidden"),
        linear(H, A, "hidden", "action"),
        selected_out_keys=["action"],
    )
    assert seq.graph(example).nodes[0].writes["hidden"].shape == (B, H)
    fresh = TensorDictSequential(linear(D, H, "obs", "hidden"), inplace=False)
    assert fresh.graph(example).nodes[0].writes["hidden"].shape == (B, H)


def test_lazy_layers_stay_lazy():
    lazy = nn.LazyLinear(H)
    seq = TensorDictSequential(keyed(["obs"], ["hidden"], lazy))
    graph = seq.graph(TensorDict(obs=torch.zeros(B, D), batch_size=[B]))
    assert graph.nodes[0].writes["hidden"].shape == (B, H)
    assert torch.nn.parameter.is_lazy(lazy.weight)


def test_dtypes_and_entries_that_are_no_tensors():
    td = TensorDict(
        a=torch.zeros(B, 2, dtype=torch.bfloat16),
        b=torch.zeros(B, dtype=torch.bool),
        c=TensorDict(d=torch.zeros(B, 1, dtype=torch.int64), batch_size=[B]),
        e="a word",
        batch_size=[B],
    )
    seen = shapes(td, ["a", "b", "c", ("c", "d"), "e", "missing", ("a", "x")])
    assert {key: str(value) for key, value in seen.items()} == {
        "a": "bf16[5, 2]",
        "b": "bool[5]",
        "c": "TensorDict[5]",
        ("c", "d"): "i64[5, 1]",
        "e": "str[5]",
    }


def test_shapes_in_a_stack_of_unlike_members():
    stack = lazy_stack([TensorDict(x=torch.zeros(1)), TensorDict(x=torch.zeros(2))])
    assert str(shapes(stack, ["x"])["x"]) == "f32[2, -1]"
    outer = TensorDict(inner=stack)
    assert str(shapes(outer, [("inner", "x")])["inner", "x"]) == "f32[2, -1]"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_shapes_of_nested_tensors(layout):
    rows = torch.nested.nested_tensor([torch.zeros(2, A), torch.zeros(3, A)], layout=layout)
    seen = shapes(TensorDict(x=rows), ["x"])["x"]
    assert seen.shape[:2] == (2, -1)
    assert copy.deepcopy(seen) == seen


def test_shapes_in_vmap_are_those_of_a_member(actor):
    torch.vmap(lambda obs: actor(TensorDict(obs=obs))["action"])(torch.zeros(B, D))
    assert actor.graph().nodes[1].writes["action"].shape == (A,)


def test_a_compiled_sequence_keeps_no_symbols(actor):
    compiled = torch.compile(actor, backend="eager", fullgraph=True)
    compiled(TensorDict(obs=torch.zeros(B, D), batch_size=[B]))
    assert actor.graph().shapes == {}


# ------------------------------------------------------------------------ text


def test_the_program_of_a_small_actor(actor, example):
    actor.append(Draws(["action"], [("next", "action")]))
    assert repr(actor) == (
        "TensorDictSequential(\n"
        "    given obs\n"
        "    (0): hidden = Linear(4, 8)(obs)\n"
        "    (1): action = Linear(8, 3)(hidden)\n"
        "    (2): next.action ~ Normal(action)\n"
        "    return next.action\n"
        ")"
    )


def test_the_program_with_shapes(actor, example):
    actor(example)
    assert str(actor) == (
        "TensorDictSequential(\n"
        "    given obs: f32[5, 4]\n"
        "    (0): hidden = Linear(4, 8)(obs)     # f32[5, 8]\n"
        "    (1): action = Linear(8, 3)(hidden)  # f32[5, 3]\n"
        "    return action\n"
        ")"
    )


def test_the_program_of_nested_sequences(actor):
    seq = TensorDictSequential({"actor": actor, "again": keyed(["action"], ["action"])})
    assert repr(seq) == (
        "TensorDictSequential(\n"
        "    given obs\n"
        "    (actor): TensorDictSequential(\n"
        "        (0): hidden = Linear(4, 8)(obs)\n"
        "        (1): action = Linear(8, 3)(hidden)\n"
        "    )\n"
        "    (again): action = add(action)  # overwrites action\n"
        "    return action\n"
        ")"
    )


def test_arguments_by_name():
    module = TensorDictModule(
        torch.add, in_keys={"input": "x", "other": ("a", "b")}, out_keys=["y"]
    )
    assert "y = add(input=x, other=a.b)" in repr(TensorDictSequential(module))


def policy(**options):
    return ProbabilisticTensorDictSequential(
        TensorDictModule(
            nn.Sequential(nn.Linear(D, 2 * A), NormalParamExtractor()),
            in_keys=["obs"],
            out_keys=["mu", ("head", "sigma")],
        ),
        ProbabilisticTensorDictModule(
            in_keys={"loc": "mu", "scale": ("head", "sigma")},
            out_keys=["action"],
            distribution_class=Normal,
            default_interaction_type="random",
            **options,
        ),
    )


def test_the_program_of_a_policy(example):
    assert policy(return_log_prob=True).graph(example).program().splitlines()[2:] == [
        "    (0): mu, head.sigma = Sequential(Linear(4, 6), NormalParamExtractor)(obs)"
        "  # f32[5, 3], f32[5, 3]",
        "    (1): action, action_log_prob ~ Normal(loc=mu, scale=head.sigma)"
        "  # f32[5, 3], f32[5, 3]",
        "    return action, action_log_prob",
        ")",
    ]


def test_an_example_draws_nothing_from_the_generator_of_a_policy(example):
    first, second = policy(generator=7), policy(generator=7)
    second.load_state_dict(first.state_dict())
    first.graph(example)
    assert torch.equal(first(example.clone())["action"], second(example.clone())["action"])


def test_the_label_of_several_distributions():
    kwargs = {"distribution_map": {"move": Normal, ("say", "word"): Categorical}}
    module = ProbabilisticTensorDictModule(
        ["params"], distribution_class=CompositeDistribution, distribution_kwargs=kwargs
    )
    assert label(module) == "CompositeDistribution(move=Normal, say.word=Categorical)"


def test_the_label_of_a_wrapped_sequence(actor):
    class Loud(TensorDictModuleWrapper):
        pass

    assert label(Loud(actor)) == "Loud(TensorDictSequential(Linear(4, 8), Linear(8, 3)))"


def test_shapes_are_forgotten_when_a_module_changes(actor, example):
    actor(example)
    actor[1] = linear(H, 1, "hidden", "action")
    assert actor.graph().shapes == {}


def test_many_inputs_are_wrapped():
    names = [f"a_rather_long_name_{i}" for i in range(12)]
    text = repr(TensorDictSequential(keyed(names, ["y"])))
    given = text.split("(0)")[0]
    assert max(map(len, given.splitlines())) <= 100
    assert all([name in given for name in names])


def test_the_table(actor, example):
    actor.append(keyed(["obs"], ["action"]))
    assert str(actor.graph(example)).splitlines() == [
        "module  computes      reads              writes",
        "0       Linear(4, 8)  obs: f32[5, 4]     hidden: f32[5, 8]",
        "1       Linear(8, 3)  hidden: f32[5, 8]  action: f32[5, 3]",
        "2       add           obs: f32[5, 4]     action: f32[5, 4]",
        "in: obs",
        "out: action",
        "overwritten: action by 1, 2",
        "read by nobody: action of 1",
    ]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.Tanh(), "Tanh"),
        (nn.Linear(3, 4, bias=False), "Linear(3, 4)"),
        (nn.Conv2d(3, 8, 2), "Conv2d(3, 8, (2, 2))"),
        (nn.Sequential(nn.Linear(3, 4), nn.Tanh()), "Sequential(Linear(3, 4), Tanh)"),
        (
            nn.Sequential(*[nn.Linear(i, i + 1) for i in range(100, 109)]),
            "Sequential(Linear(100, 101), ..., Linear(108, 109))",
        ),
        (
            TensorDictModule(nn.GRUCell(3, 4), ["x"], ["h"], method="forward"),
            "GRUCell(3, 4).forward",
        ),
        (WrapModule(lambda td: td), "lambda"),
        (torch.relu, "relu"),
        (Draws(["loc"], ["x"]), "Normal"),
    ],
)
def test_labels(module, text):
    assert label(module) == text


def test_keys_that_dots_would_not_tell_apart_are_quoted():
    assert key_text(("a", "b")) == "a.b"
    assert key_text("a.b") == "'a.b'"
    assert key_text(("a", "b c")) == "('a', 'b c')"


# ------------------------------------------------------------------------ drawings

AWKWARD = [
    'a "quoted" key',
    "<b>&amp;</b>",
    "line\nbreak",
    "end",
    "`code`",
    "1. list",
    "日本語",
    "#;",
]


def drawable(example=None):
    inner = TensorDictSequential(keyed(["x"], ["h"]), Draws(["h"], ["i"]))
    return TensorDictSequential(
        inner, keyed(["h", "i", "x"], ["y"]), keyed(["x"], ["lost"]), keyed(["y"], ["lost"])
    ).graph()


def test_mermaid_of_a_small_actor(actor, example):
    assert actor.graph(example).mermaid().splitlines()[:8] == [
        "flowchart TD",
        '    in0(["obs<br/>f32[5, 4]"]):::given',
        '    m0["Linear(4, 8)<br/>(0)"]:::module',
        '    m1["Linear(8, 3)<br/>(1)"]:::module',
        '    out0(["action<br/>f32[5, 3]"]):::result',
        "    in0 --> m0",
        '    m0 -- "hidden: f32[5, 8]" --> m1',
        "    m1 --> out0",
    ]


def test_mermaid_groups_and_losses():
    lines = drawable().mermaid().splitlines()
    assert '    subgraph g0["TensorDictSequential (0)"]' in lines
    assert lines.count("    end") == 1
    assert '    m0 -- "h" --> m2' in lines
    assert '    out1(["lost"]):::lost' in lines
    assert "    m3 -.-> out1" in lines


@pytest.mark.parametrize("key", AWKWARD)
def test_mermaid_texts_are_safe(key):
    labels = TensorDictSequential(keyed([key], ["y"])).graph().mermaid().split('"')[1::2]
    text = labels[0]
    assert not set(text) & set('"<>&`*\n')
    decoded = text
    for code in {int(part.split(";")[0]) for part in text.split("#")[1:]}:
        decoded = decoded.replace(f"#{code};", chr(code))
    assert decoded == key_text(key)


def elements(svg, tag):
    return list(ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}" + tag))


@pytest.mark.parametrize("key", AWKWARD)
def test_svg_is_well_formed_and_has_every_text(key):
    svg = TensorDictSequential(keyed([key], [("out", key)])).graph().svg()
    texts = [element.text for element in elements(svg, "text")]
    assert texts == [key_text(key), "add", "(0)", key_text(("out", key))]


def test_svg_needs_nothing_from_elsewhere():
    svg = drawable().svg()
    assert svg.count("http") == 1  # the name space
    assert "href" not in svg and "<style" not in svg and " id=" not in svg
    assert drawable()._repr_svg_() == svg


def rectangles(svg):
    for element in elements(svg, "rect")[1:]:
        x, y, width, height = [float(element.get(k)) for k in ("x", "y", "width", "height")]
        yield element, (x, y, x + width, y + height)


def test_svg_boxes_stay_apart_and_within_the_image():
    torch.manual_seed(0)
    modules = []
    for i in range(12):
        reads = [f"k{j}" for j in torch.randperm(i + 1)[: 1 + i % 3].tolist()]
        modules.append(keyed(reads, [f"k{i + 1}"]))
    svg = TensorDictSequential(*modules).graph().svg()
    root = ElementTree.fromstring(svg)
    boxes = [place for _, place in rectangles(svg)]
    assert len(boxes) >= 12
    for i, (left, top, right, bottom) in enumerate(boxes):
        assert 0 <= left and right <= float(root.get("width"))
        assert 0 <= top and bottom <= float(root.get("height"))
        for other in boxes[:i]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top


def test_svg_draws_the_first_module_above_the_second(actor):
    svg = actor.graph().svg()
    heights = {e.text: float(e.get("y")) for e in elements(svg, "text")}
    order = ["obs", "Linear(4, 8)", "hidden", "Linear(8, 3)", "action"]
    assert sorted(heights, key=heights.get) == sorted(order + ["(0)", "(1)"], key=heights.get)
    assert [heights[name] for name in order] == sorted([heights[name] for name in order])


def test_svg_frames_hold_their_modules_and_no_others():
    svg = TensorDictSequential(
        TensorDictSequential(keyed(["x"], ["h"]), keyed(["h"], ["i"])),
        keyed(["x"], ["a_rather_long_name_beside_the_frame"]),
        keyed(["i", "a_rather_long_name_beside_the_frame"], ["y"]),
    ).graph().svg()  # fmt: skip
    frames = [place for e, place in rectangles(svg) if e.get("stroke-dasharray") == "5 4"]
    assert len(frames) == 1
    left, top, right, bottom = frames[0]
    inside = [
        e.text
        for e in elements(svg, "text")
        if left <= float(e.get("x")) <= right and top + 9 <= float(e.get("y")) <= bottom
    ]
    assert inside == ["add", "(0.0)", "h", "add", "(0.1)"]


def test_svg_frames_within_frames():
    inner = TensorDictSequential(keyed(["a"], ["b"]), keyed(["b"], ["c"]))
    middle = TensorDictSequential(keyed(["x"], ["a"]), inner, keyed(["c", "x"], ["d"]))
    svg = TensorDictSequential(
        middle, keyed(["x"], ["side"]), keyed(["d", "side"], ["y"]), keyed(["side"], ["z"])
    ).graph().svg()  # fmt: skip
    outer, inner = [p for e, p in rectangles(svg) if e.get("stroke-dasharray") == "5 4"]
    assert outer[0] < inner[0] and outer[1] < inner[1]
    assert outer[2] > inner[2] and outer[3] > inner[3]
    modules = [p for e, p in rectangles(svg) if e.get("rx") == "6"]
    within = [m for m in modules if m[0] > outer[0] and m[2] < outer[2] and m[3] < outer[3]]
    across = [m for m in modules if m[0] < outer[2] and m[1] < outer[3] and m not in within]
    assert (len(within), across) == (4, [])


# ------------------------------------------------------------------------ checks


def test_a_misspelt_key_is_an_error_that_names_both_modules():
    encoder, head = linear(D, H, "obs", "hidden"), linear(H, A, "hiden", "action")
    with pytest.raises(ValueError) as error:
        TensorDictSequential(encoder, head, expect_in_keys=["obs"])
    assert str(error.value) == (
        "module \"1\" (Linear(8, 3)) reads 'hiden', which is neither in expect_in_keys nor written "
        "before. Did you mean 'hidden', which module \"0\" (Linear(4, 8)) writes? "
        "If it comes from outside: expect_in_keys=['obs', 'hiden']"
    )


def test_keys_that_fit_are_no_error(actor):
    modules = [linear(D, H, "obs", "hidden"), linear(H, A, "hidden", "action")]
    assert TensorDictSequential(*modules, expect_in_keys=["obs"]).in_keys == ["obs"]
    named = dict(zip(("a", "b"), modules, strict=True))
    assert TensorDictSequential(named, expect_in_keys=["obs"]).in_keys == ["obs"]
    with pytest.raises(ValueError, match='module "b"'):
        named["b"].in_keys = ["hiden"]
        TensorDictSequential(named, expect_in_keys=["obs"])


def test_a_misspelt_nested_key():
    with pytest.raises(ValueError, match=r"Did you mean \('agents', 'hidden'\), which module"):
        check_in_keys(
            {"a": keyed(["x"], [("agents", "hidden")]), "b": keyed([("agent", "hidden")], ["y"])},
            ["x"],
        )


def test_a_misspelt_key_from_outside():
    with pytest.raises(ValueError, match="Did you mean 'pixels', which is expected from outside"):
        check_in_keys({"a": keyed(["pixel"], ["y"])}, ["pixels"])


def test_a_key_like_none_that_is_there():
    with pytest.raises(ValueError, match=r"what is there: \['obs', 'h'\]"):
        check_in_keys({"a": keyed(["obs"], ["h"]), "b": keyed(["reward"], ["y"])}, ["obs"])


def test_a_key_that_is_written_too_late():
    with pytest.raises(ValueError, match='module "b" .* writes it, but runs later'):
        check_in_keys({"a": keyed(["h"], ["y"]), "b": keyed(["x"], ["h"])}, ["x"])


def test_an_expected_key_that_nobody_reads():
    with pytest.raises(ValueError, match="'reward', which no module reads from outside"):
        check_in_keys({"a": keyed(["obs"], ["y"])}, ["obs", "reward"])
    with pytest.raises(ValueError, match="Did you mean 'obs', which module \"a\""):
        check_in_keys({"a": keyed(["obs"], ["y"])}, ["obs", "obss"])
    with pytest.raises(ValueError, match='module "a" .* writes it before module "b" .* reads it'):
        check_in_keys({"a": keyed(["x"], ["h"]), "b": keyed(["h"], ["y"])}, ["x", "h"])


def test_expected_containers_hold_what_is_read():
    check_in_keys({"a": keyed([("obs", "x"), ("obs", "y")], ["z"])}, ["obs"])
    check_in_keys({"a": keyed(["obs"], ["z"])}, [("obs", "x")])
    with pytest.raises(ValueError, match="reads 'obsx'"):
        check_in_keys({"a": keyed(["obsx"], ["z"])}, ["obs"])


def test_keys_within_nested_sequences_are_checked():
    inner = TensorDictSequential(keyed(["hiden"], ["y"]))
    with pytest.raises(ValueError, match='module "1.0"'):
        TensorDictSequential(keyed(["x"], ["hidden"]), inner, expect_in_keys=["x"])


def test_a_function_that_does_not_say_what_it_writes():
    def rename(td):
        return td.rename_key_("a", "b")

    with pytest.raises(
        ValueError, match=r"declare it: WrapModule\(rename, out_keys=\['reward'\]\)"
    ):
        TensorDictSequential(rename, keyed(["reward"], ["y"]), expect_in_keys=[])
    TensorDictSequential(
        WrapModule(rename, in_keys=["a"], out_keys=["b"]), keyed(["b"], ["y"]), expect_in_keys=["a"]
    )


def test_graph_of_plain_pairs():
    graph = graph_of([("a", Foreign(["x"], ["y"])), ("b", Foreign(["y"], ["z"]))])
    assert isinstance(graph, Graph)
    assert graph.results == ("z",)


# ------------------------------------------------------------------------ the page


def printed_blocks(page):
    """Pairs of what a block of the page prints and what the page says that it prints."""
    namespace = {"__name__": "page"}
    pattern = r"^```python\n(.*?)^```\n(?:\n```(?:text|mermaid)\n(.*?)^```)?"
    for code, said in re.findall(pattern, page, re.M | re.S):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        yield printed.getvalue(), said


def test_the_page_shows_what_its_code_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "graph.md"
    pairs = list(printed_blocks(page.read_text()))
    assert len([said for _, said in pairs if said]) == 5
    for printed, said in pairs:
        assert printed == said


def test_a_page_that_says_another_thing_is_seen():
    page = "```python\nprint(1)\n```\n\n```text\n2\n```\n"
    assert list(printed_blocks(page)) == [("1\n", "2\n")]
