"""The graph of a sequence: data, text, drawings, and the check of its keys.

That the graph of any sequence agrees with what it does is a property in test_properties.py.
"""

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

from raffia import TensorDict
from raffia.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    TensorDictModuleWrapper,
    WrapModule,
)
from raffia.nn import TensorDictModule as Mod
from raffia.nn import TensorDictSequential as Seq
from raffia.nn.graph import Graph, check_in_keys, graph_of
from raffia.nn.graph_record import EntryShape, key_text, label

from .keyed import policy

B, D, H, A = 5, 4, 8, 3


def linear(num_in, num_out, reads, writes):
    return Mod(nn.Linear(num_in, num_out), in_keys=[reads], out_keys=[writes])


def keyed(in_keys, out_keys, function=None):
    def add(*args):
        total = sum(args)
        return tuple([total for _ in out_keys]) if len(out_keys) > 1 else total

    return Mod(function or add, in_keys=in_keys, out_keys=out_keys)


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


class Loud(TensorDictModuleWrapper):
    pass


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        return x.add_(torch.rand_like(x))  # in place, and random


def small_actor():
    return Seq(linear(D, H, "obs", "hidden"), linear(H, A, "hidden", "action"))


@pytest.fixture
def actor():
    return small_actor()


@pytest.fixture
def example():
    return TensorDict(obs=torch.ones(B, D), batch_size=[B])


def zeros(*shape):
    return TensorDict(x=torch.zeros(B, *shape), batch_size=[B])


# ------------------------------------------------------------------------ data


def key_of(text):
    return tuple(text.split(".")) if "." in text else text


def step(text):
    """A module from "x,a.b>y": its inputs and outputs."""
    return keyed(*([key_of(key) for key in side.split(",")] for side in text.split(">")))


def of(*steps, **options):
    """A sequence of modules or their texts."""
    return Seq(*(step(part) if isinstance(part, str) else part for part in steps), **options)


def hiding():
    return of(of("x>h", "h>y", selected_out_keys=["y"]), "h,y>z")


def three_deep():
    return of("x>h", Seq(of("h>i", "i>j")), "j>y")


PAIRS = [("a", Foreign(["x"], ["y"])), ("b", Foreign(["y"], ["z"]))]
GRAPHS = {  # a sequence, its in_keys, results, overwritten and unread keys, and its edges
    "nested": (three_deep(), "x", "y", {}, {"y": ("2",)}, "x-0 h01.0.0 i1.0.01.0.1 j1.0.12 y2-"),
    "dropped": (of("x>_,y"), "x", "y", {}, {"y": ("0",)}, "x-0 y0-"),
    "above": (of("x>s", "s.a>m.b", "m>y"), "x", "y", {}, {"y": ("2",)}, "x-0 s01 m.b12 y2-"),
    "overwritten": (  # the first y is lost
        of("x>x", "x>y", "x>y", "y>z"),
        *("x", "z", {"x": ("0",), "y": ("1", "2")}, {"y": ("1",), "z": ("3",)}, None),
    ),
    "by a container": (of("x>a.b", "x>a"), "x", "a", {("a", "b"): ("0", "1")}, None, None),
    "selected": (
        of("x>h", "h>y", "h>z").select_out_keys("h", "z"),
        *("x", "hz", {}, {"y": ("1",), "z": ("2",)}, None),
    ),
    "hidden inside": (hiding(), "xh", "z", {"h": ("0.0",)}, None, None),
    "pairs": (PAIRS, "x", "z", {}, {"z": ("b",)}, "x-a yab zb-"),
    "empty": (Seq(), "", "", {}, {}, ""),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_the_data_of_a_graph(name):
    seq, in_keys, results, overwritten, unread, edges = GRAPHS[name]
    graph = graph_of(seq) if isinstance(seq, list) else seq.graph()
    assert isinstance(graph, Graph)
    assert (graph.in_keys, graph.results) == (tuple(in_keys), tuple(results))
    assert graph.overwritten == overwritten and (unread is None or graph.unread == unread)
    found = [f"{key_text(e.key)}{e.source or '-'}{e.target or '-'}" for e in graph.edges]
    assert edges is None or sorted(found) == sorted(edges.split())
    plain = graph.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert copy.deepcopy(graph) == graph and hash(graph) == hash(copy.deepcopy(graph))
    assert graph.svg().endswith("</svg>")


def test_nodes_groups_and_programs_of_some_graphs(actor):
    first, second = actor.graph().nodes
    assert (first.name, first.kind, first.label) == ("0", "TensorDictModule", "Linear(4, 8)")
    assert (second.in_keys, second.out_keys) == (("hidden",), ("action",))
    groups = three_deep().graph().groups
    assert [(g.name, g.start, g.stop) for g in groups] == [("1", 1, 3), ("1.0", 1, 3)]
    graph = hiding().graph()
    assert graph.groups[0].hidden == ("h",) and "# hidden from here on: h" in graph.program()
    twice = of("x,x>y").graph()
    assert len(twice.edges) == 2 and "add(x, x)" in twice.program()
    foreign = Seq(Foreign(["x"], ["y"])).graph().nodes[0]
    assert (foreign.label, foreign.kind) == ("Foreign", "Foreign")
    assert Seq().graph().program() == "TensorDictSequential(\n)"


# ------------------------------------------------------------------------ shapes


def test_shapes_of_an_example_and_of_the_first_call(actor, example):
    obs, hidden, action = [EntryShape((B, n), "float32") for n in (D, H, A)]
    shapes = {
        "0": {"in": {"obs": obs}, "out": {"hidden": hidden}},
        "1": {"in": {"hidden": hidden}, "out": {"action": action}},
    }
    outer = Seq(actor, linear(A, 1, "action", "value"))
    graph = actor.graph(example)
    assert graph.shapes == shapes and outer.graph(example).nodes[0].writes == {"hidden": hidden}
    plain = graph.to_dict()
    assert plain["in_keys"] == ["obs"]
    assert plain["nodes"][0]["writes"] == [{"key": "hidden", "shape": [B, H], "dtype": "float32"}]
    assert actor.graph().shapes == {} and list(example.keys()) == ["obs"]  # without a trace
    outer(example)
    assert outer.graph().nodes[0].writes == {"hidden": hidden}
    assert actor.graph().shapes == copy.deepcopy(actor).graph().shapes == shapes
    actor[1] = linear(H, 1, "hidden", "action")
    assert actor.graph().shapes == {}
    torch.vmap(lambda obs: actor(TensorDict(obs=obs))["action"])(torch.zeros(B, D))
    assert actor.graph().nodes[1].writes["action"].shape == (1,)  # of a member


def test_the_example_and_the_sequence_are_unchanged():
    norm, counter = nn.BatchNorm1d(D), Counter()
    seq = Seq(keyed(["x"], ["x"], counter), keyed(["x"], ["y"], norm))
    td, before = zeros(D), torch.random.get_rng_state()
    graph = seq.graph(td)
    assert graph.nodes[1].writes == {"y": EntryShape((B, D), "float32")}
    assert torch.equal(torch.random.get_rng_state(), before)
    assert counter.num_calls == 0 and norm.num_batches_tracked == 0
    assert norm.running_mean.eq(0).all() and seq.training
    assert list(td.keys()) == ["x"] and td["x"].eq(0).all()
    draw = {"generator": 7, "default_interaction_type": "random"}
    first, second = policy(**draw), policy(**draw)
    second.load_state_dict(first.state_dict())
    td = zeros(3)
    first.graph(td)
    assert torch.equal(first(td.clone())["action"], second(td.clone())["action"])


DOUBLE = keyed(["x"], ["x"], lambda x: torch.cat([x, x], -1))
LAZY = nn.LazyLinear(H)
EXAMPLES = {  # a sequence, an example, and the shapes that its modules write
    "a module twice": (Seq(DOUBLE, DOUBLE), zeros(1), [{"x": (B, 2)}, {"x": (B, 4)}]),
    "some modules only": (of("x>y", "z>w", partial_tolerant=True), zeros(), [{"y": (B,)}, {}]),
    "selected": (
        of("x>h", "h>y", "h>z", selected_out_keys=["z"]),
        zeros(),
        [{"h": (B,)}, {"y": (B,)}, {"z": (B,)}],
    ),
    "lazy layers": (Seq(keyed(["x"], ["y"], LAZY)), zeros(D), [{"y": (B, H)}]),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_shapes_of_other_examples(name):
    seq, td, written = EXAMPLES[name]
    nodes = seq.graph(td).nodes
    assert [{key: s.shape for key, s in node.writes.items()} for node in nodes] == written
    assert torch.nn.parameter.is_lazy(LAZY.weight)  # they stay lazy


def test_a_compiled_sequence_keeps_no_symbols(actor, example):
    torch.compile(actor, backend="eager", fullgraph=True)(example)
    assert actor.graph().shapes == {}


# ------------------------------------------------------------------------ text


def test_programs(actor):
    seq = Seq({"actor": actor, "again": keyed(["action"], ["action"])})
    assert repr(seq).splitlines() == [
        "TensorDictSequential(",
        "    given obs",
        "    (actor): TensorDictSequential(",
        "        (0): hidden = Linear(4, 8)(obs)",
        "        (1): action = Linear(8, 3)(hidden)",
        "    )",
        "    (again): action = add(action)  # overwrites action",
        "    return action",
        ")",
    ]
    keys = {"input": "x", "other": ("a", "b")}
    module = Mod(torch.add, in_keys=keys, out_keys=["y"])
    assert "y = add(input=x, other=a.b)" in repr(Seq(module))
    names = [f"a_rather_long_name_{i}" for i in range(12)]
    text = repr(Seq(keyed(names, ["y"]))).split("(0)")[0]
    assert max(map(len, text.splitlines())) <= 100 and all(name in text for name in names)


def test_the_table(actor, example):
    actor.append(keyed(["obs"], ["action"]))
    *_, overwritten, unread = str(actor.graph(example)).splitlines()
    assert overwritten == "overwritten: action by 1, 2" and unread == "never read: action of 1"


def composite():
    kwargs = {"distribution_map": {"move": Normal, ("say", "word"): Categorical}}
    return ProbabilisticTensorDictModule(
        ["params"], distribution_class=CompositeDistribution, distribution_kwargs=kwargs
    )


LONG = nn.Sequential(*[nn.Linear(i, i + 1) for i in range(100, 109)])
LABELS = {
    "Conv2d(3, 8, (2, 2))": nn.Conv2d(3, 8, 2),
    "Sequential(Linear(3, 4), Tanh)": nn.Sequential(nn.Linear(3, 4), nn.Tanh()),
    "Sequential(Linear(100, 101), ..., Linear(108, 109))": LONG,
    "GRUCell(3, 4).forward": Mod(nn.GRUCell(3, 4), ["x"], ["h"], method="forward"),
    "lambda": WrapModule(lambda td: td),
    "relu": torch.relu,
    "Normal": Draws(["loc"], ["x"]),
    "CompositeDistribution(move=Normal, say.word=Categorical)": composite(),
    "Loud(TensorDictSequential(Linear(4, 8), Linear(8, 3)))": Loud(small_actor()),
}


@pytest.mark.parametrize("text", LABELS)
def test_labels(text):
    assert label(LABELS[text]) == text


def test_keys_that_are_ambiguous_with_dots_are_quoted():
    assert key_text(("a", "b")) == "a.b"
    assert key_text("a.b") == "'a.b'"
    assert key_text(("a", "b c")) == "('a', 'b c')"


# ------------------------------------------------------------------------ drawings

AWKWARD = 'a "quoted" key|<b>&amp;</b>|line\nbreak|end|`code`|1. list|日本語|#;'.split("|")


def drawable():
    return of(Seq(step("x>h"), Draws(["h"], ["i"])), "h,i,x>y", "x>lost", "y>lost").graph()


def test_mermaid():
    """docs/graph.md has a whole one."""
    lines = drawable().mermaid().splitlines()
    assert '    subgraph g0["TensorDictSequential (0)"]' in lines and lines.count("    end") == 1
    assert '    m0 -- "h" --> m2' in lines
    assert '    out1(["lost"]):::lost' in lines and "    m3 -.-> out1" in lines


def elements(svg, tag):
    return list(ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}" + tag))


@pytest.mark.parametrize("key", AWKWARD)
def test_texts_are_safe_in_drawings(key):
    graph = Seq(keyed([key], [("out", key)])).graph()
    text = graph.mermaid().split('"')[1]
    assert not set(text) & set('"<>&`*\n')
    for code in {int(part.split(";")[0]) for part in text.split("#")[1:]}:
        text = text.replace(f"#{code};", chr(code))
    assert text == key_text(key)
    texts = [element.text for element in elements(graph.svg(), "text")]
    assert texts == [key_text(key), "add", "(0)", key_text(("out", key))]


def rectangles(svg):
    for element in elements(svg, "rect")[1:]:
        x, y, width, height = [float(element.get(k)) for k in ("x", "y", "width", "height")]
        yield element, (x, y, x + width, y + height)


def frames_of(svg):
    return [bounds for e, bounds in rectangles(svg) if e.get("stroke-dasharray") == "5 4"]


def test_svg_is_plain_and_in_the_order_of_the_modules(actor):
    svg = drawable().svg()
    assert svg.count("http") == 1  # the name space: nothing is needed from elsewhere
    assert "href" not in svg and "<style" not in svg and " id=" not in svg
    assert drawable()._repr_svg_() == svg
    heights = {e.text: float(e.get("y")) for e in elements(actor.graph().svg(), "text")}
    order = ["obs", "Linear(4, 8)", "hidden", "Linear(8, 3)", "action"]
    assert [heights[name] for name in order] == sorted(heights[name] for name in order)


def test_svg_frames_contain_exactly_their_modules():
    middle = of("x>a", of("a>b", "b>c"), "c,x>d")
    svg = of(middle, "x>side", "d,side>y", "side>z").graph().svg()
    outer, inner = frames_of(svg)
    assert outer[0] < inner[0] and outer[1] < inner[1]
    assert outer[2] > inner[2] and outer[3] > inner[3]
    modules = [p for e, p in rectangles(svg) if e.get("rx") == "6"]
    within = [m for m in modules if m[0] > outer[0] and m[2] < outer[2] and m[3] < outer[3]]
    across = [m for m in modules if m[0] < outer[2] and m[1] < outer[3] and m not in within]
    assert (len(within), across) == (4, [])


# ------------------------------------------------------------------------ checks


def rename(td):
    return td.rename_key_("a", "b")


def misspelt():
    encoder, head = linear(D, H, "obs", "hidden"), linear(H, A, "hiden", "action")
    Seq(encoder, head, expect_in_keys=["obs"])


def check(expected, **texts):
    return lambda: check_in_keys({name: step(text) for name, text in texts.items()}, expected)


MISSPELT = (
    "module \"1\" (Linear(8, 3)) reads 'hiden', which is neither in expect_in_keys nor written "
    "before. Did you mean 'hidden', which module \"0\" (Linear(4, 8)) writes? "
    "If it comes from outside: expect_in_keys=['obs', 'hiden']"
)
CHECKS = [  # a call that is refused, and words of the error
    (misspelt, f"^{re.escape(MISSPELT)}$"),
    (check(["x"], a="x>agents.h", b="agent.h>y"), r"Did you mean \('agents', 'h'\), which module"),
    (check(["x"], a="h>y", b="x>h"), 'module "b" .* writes it, but runs later'),
    (check(["obs", "obss"], a="obs>y"), "Did you mean 'obs', which module \"a\""),
    (check(["x", "h"], a="x>h", b="h>y"), 'module "a" .* writes it before module "b" .* reads it'),
    (lambda: of(rename, "reward>y", expect_in_keys=[]), r"declare it: WrapModule\(rename"),
]


@pytest.mark.parametrize("row", range(len(CHECKS)))
def test_keys_that_do_not_fit_are_refused(row):
    wrong, match = CHECKS[row]
    with pytest.raises(ValueError, match=match):
        wrong()


def test_keys_that_fit_are_not_refused():
    assert Seq(*small_actor(), expect_in_keys=["obs"]).in_keys == ["obs"]
    check(["obs"], a="obs.x,obs.y>z")()
    check([("obs", "x")], a="obs>y")()
    of(WrapModule(rename, in_keys=["a"], out_keys=["b"]), "b>y", expect_in_keys=["a"])


# ------------------------------------------------------------------------ the page


def printed_blocks(page):
    """Pairs of the output of a block of the page and the output shown in the page."""
    namespace = {"__name__": "page"}
    pattern = r"^```python\n(.*?)^```\n(?:\n```(?:text|mermaid)\n(.*?)^```)?"
    for code, shown in re.findall(pattern, page, re.M | re.S):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        yield printed.getvalue(), shown


def test_the_page_shows_the_output_of_its_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "graph.md"
    pairs = list(printed_blocks(page.read_text()))
    assert len([shown for _, shown in pairs if shown]) == 5
    for printed, shown in pairs:
        assert printed == shown
