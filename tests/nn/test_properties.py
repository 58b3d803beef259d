"""Properties that hold for any graph of keyed modules.

The model is plain data: a step reads keys and writes keys, a group is a list of steps. A
dict interpreter runs it; the sequence that is built from it must give the same. All
numbers are integers modulo a prime, so results are exact, and values that depend on an entry change
with it.
"""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import distributions as d
from torch import nn

from raffia import TensorDict
from raffia.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleWrapper,
    TensorDictSequential,
    WrapModule,
    interaction_type,
    is_functional,
    make_functional,
    repopulate_module,
    set_composite_lp_aggregate,
    set_interaction_type,
    set_skip_existing,
    symbolic_trace,
    target_copy,
    update_target,
)
from tests.tensordict.invariants import sound


def examples(number):
    return settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


B, PRIME = 2, 99991


# --- the model ---------------------------------------------------------------------------------


class Mix(nn.Module):
    """A weighted sum of its inputs; the outputs of all steps differ."""

    def __init__(self, number, size, outputs):
        super().__init__()
        self.number, self.size, self.outputs = number, size, outputs

    def forward(self, *values, **named):
        total = torch.full((B, 1), self.number + 1)
        for index, value in enumerate([*values, *named.values()]):
            total = total + (7 * index + 3) * value.sum(1, keepdim=True)
        columns = torch.arange(1, self.size + 1)
        outs = [
            (total * (13 * self.number + j + 2) * columns + j) % PRIME for j in range(self.outputs)
        ]
        return outs[0] if self.outputs == 1 else tuple(outs)


@dataclass(frozen=True)
class Step:
    ins: tuple
    outs: tuple
    number: int  # unique
    size: int  # its outputs have the shape [B, size]
    kind: str = "list"  # form of the module
    selected: tuple | None = None

    def function(self):
        return Mix(self.number, self.size, len(self.outs))

    def keys(self):
        return self.ins, self.outs if self.selected is None else self.selected

    def run(self, env):
        values = self.function()(*[env[key] for key in self.ins])
        values = values if isinstance(values, tuple) else (values,)
        new = env | {k: v for k, v in zip(self.outs, values, strict=True) if k != "_"}
        if self.selected is not None:
            remaining = {*self.selected, *self.ins}
            new = {k: v for k, v in new.items() if k not in self.outs or k in remaining}
        return new

    def build(self):
        keys = list(self.ins)
        if self.kind == "dict":
            keys = {f"p{index}": key for index, key in enumerate(self.ins)}
        module = TensorDictModule(self.function(), in_keys=keys, out_keys=list(self.outs))
        if self.selected is not None:
            module.select_out_keys(*self.selected)
        if self.kind == "wrapper":
            return TensorDictModuleWrapper(module)
        if self.kind == "function":
            return WrapModule(module, in_keys=list(self.ins), out_keys=module.out_keys)
        return module

    def steps(self):
        return [self]


@dataclass(frozen=True)
class Group:
    parts: tuple
    named: bool = False
    selected: tuple | None = None

    def own_keys(self):
        """Inputs and outputs; an output is ordered by its last write."""
        reads, writes = {}, {}
        for part in self.parts:
            ins, outs = part.keys()
            reads |= {key: None for key in ins if key not in writes}
            for key in outs:
                writes.pop(key, None)
                writes[key] = None
        return tuple(reads), tuple(writes)

    def keys(self):
        ins, outs = self.own_keys()
        return ins, outs if self.selected is None else self.selected

    def run(self, env):
        inner = env
        for part in self.parts:
            inner = part.run(inner)
        if self.selected is None:
            return inner
        ins, outs = self.own_keys()
        shown = [*self.selected, *[key for key in ins if key in outs]]
        return env | {key: inner[key] for key in shown if key != "_"}

    def build(self, **options):
        parts = [part.build() for part in self.parts]
        if self.named:
            parts = [{f"name{index}": part for index, part in enumerate(parts)}]
        options.setdefault("selected_out_keys", self.selected and list(self.selected))
        return TensorDictSequential(*parts, **options)

    def steps(self):
        return [step for part in self.parts for step in part.steps()]


def container(env):
    td = TensorDict(batch_size=[B])
    for key, value in env.items():
        td[key] = value
    return td


def entries(td):
    assert sound(td)
    return dict(td.items(include_nested=True, leaves_only=True))


def same(got, want):
    got = got if isinstance(got, dict) else entries(got)
    assert set(got) == set(want)
    for key, value in want.items():
        assert torch.equal(got[key], value), key


def without(env, *keys):
    return {k: v for k, v in env.items() if k not in keys}


def plain(keys):
    return [key for key in keys if key != "_"]


# --- strategies --------------------------------------------------------------------------------

POOL = ("a", "b", "c", ("n", "a"), ("n", "b"), ("n", "m", "c"))
GIVEN = ("a", "b", ("n", "a"))  # inputs of graphs in which each key is written once
NEW = ("u", "v", "w", "x", "y", "z", ("n", "u"), ("n", "v"), ("n", "m", "w"), ("k", "x"))
KINDS = ("list", "list", "dict", "wrapper", "function")


@st.composite
def groups(draw, once=False, selections=False, kinds=KINDS, depth=2, dropped=True):
    """A graph. once: each key is written by one step, and no input is overwritten."""
    numbers, available, fresh = iter(range(99)), list(GIVEN), list(draw(st.permutations(NEW)))

    def keys(pool, least, most):
        return tuple(draw(st.lists(st.sampled_from(pool), min_size=least, max_size=most)))

    def step():
        ins = keys(available if once else POOL, 0, 3)
        if once:
            outs = tuple([fresh.pop() for _ in range(draw(st.integers(1, 2))) if fresh])
            available.extend(outs)
            if dropped and (not outs or draw(st.booleans())):
                outs += ("_",)
        else:
            outs = keys((*POOL, "_") if dropped else POOL, 1, 3)
        size, kind = draw(st.integers(1, 3)), draw(st.sampled_from(kinds))
        new = Step(ins, outs or ("_",), next(numbers), size, kind)
        return selected(new) if once else new

    def selected(part):
        outs = plain(dict.fromkeys(part.keys()[1]))
        if not selections or not outs or draw(st.integers(0, 2)):
            return part
        chosen = draw(st.lists(st.sampled_from(outs), min_size=1, unique=True))
        if once:
            available[:] = [key for key in available if key not in outs or key in chosen]
        return replace(part, selected=tuple(chosen))

    def group(depth, least):
        parts = [
            group(depth - 1, 1) if depth and not draw(st.integers(0, 3)) else step()
            for _ in range(draw(st.integers(least, 4)))
        ]
        new = Group(tuple(parts), draw(st.booleans()))
        return selected(new) if least == 1 else new

    return group(depth, 2)


@st.composite
def cases(draw, **options):
    """A graph with a dict of its inputs and further entries."""
    graph = draw(groups(**options))
    first = draw(st.integers(1, 99))
    more = draw(st.lists(st.sampled_from([*POOL, "q", ("n", "q")]), unique=True))
    needed = dict.fromkeys([*graph.keys()[0], *more])
    env = {
        key: (torch.arange(2 * B).reshape(B, 2) + first + 10 * i) for i, key in enumerate(needed)
    }
    return graph, env


any_graph = cases(selections=True)
written_once = cases(once=True)


# --- sequences ---------------------------------------------------------------------------------


@examples(50)
@given(any_graph)
def test_a_sequence_equals_the_interpreter(case):
    graph, env = case
    seq, td = graph.build(), container(env)
    ins, outs = graph.keys()
    assert seq.in_keys == list(ins)
    assert seq.out_keys == list(outs)
    for _ in range(2):  # the first call records shapes, the second uses them
        before = entries(td)
        assert seq(td) is td
        same(td, graph.run(before))


@examples(40)
@given(cases())
def test_exactly_the_in_keys_are_needed(case):
    graph, env = case
    seq = graph.build()
    env = {key: env[key] for key in seq.in_keys}
    same(seq(container(env)), graph.run(env))
    for key in seq.in_keys:
        with pytest.raises(KeyError, match="necessary for the module call|not found"):
            seq(container(without(env, key)))


@examples(40)
@given(any_graph, st.integers(0, 9))
def test_tensors_by_position_and_by_name_equal_the_container(case, positional):
    graph, env = case
    seq = graph.build()
    want = graph.run({key: env[key] for key in seq.in_keys})
    want = tuple([want[key] for key in seq.out_keys if key != "_"])
    names = ["_".join([key] if isinstance(key, str) else key) for key in seq.in_keys]
    values = [env[key] for key in seq.in_keys]
    for first in (0, positional, len(values)):
        got = seq(*values[:first], **dict(zip(names[first:], values[first:], strict=True)))
        got = got if isinstance(got, tuple) else (got,)
        assert len(got) == len(want)
        assert all(map(torch.equal, got, want))


@examples(40)
@given(any_graph, st.data())
def test_a_selection_keeps_the_selected_keys_and_the_inputs(case, data):
    graph, env = case
    outs = plain(graph.keys()[1])
    if not outs:
        return
    keys = tuple(data.draw(st.lists(st.sampled_from(outs), min_size=1, unique=True)))
    chosen = replace(graph, selected=keys)
    seq = graph.build().select_out_keys(*keys)
    assert seq.out_keys == list(keys)
    same(seq(container(env)), chosen.run(env))
    same(chosen.build()(container(env)), chosen.run(env))
    assert seq.reset_out_keys().out_keys == graph.build().out_keys
    same(seq(container(env)), graph.run(env))


@examples(40)
@given(any_graph, st.data())
def test_a_subsequence_has_exactly_the_needed_modules(case, data):
    graph, env = case
    outs = plain(graph.keys()[1])
    if not outs:
        return
    wanted = data.draw(st.lists(st.sampled_from(outs), min_size=1, unique=True))
    seq = graph.build()
    env = {key: env[key] for key in seq.in_keys}
    full = graph.run(env)
    want = {key: full[key] for key in wanted}

    def results(sub):
        td = sub(container(env))
        return {key: td[key] for key in wanted}

    sub = seq.select_subsequence(out_keys=wanted)
    assert set(sub.in_keys) <= set(seq.in_keys)
    assert set(wanted) <= set(sub.out_keys)
    same(results(sub), want)
    for index in range(len(sub)):
        less = copy.copy(list(sub))
        del less[index]
        try:
            got = results(TensorDictSequential(*less))
        except KeyError:
            continue
        assert any([not torch.equal(got[key], want[key]) for key in wanted])


@examples(40)
@given(cases(once=True), st.data())
def test_a_subsequence_of_some_inputs_has_the_modules_that_can_run(case, data):
    graph, env = case
    seq = graph.build()
    have = data.draw(st.lists(st.sampled_from(GIVEN), unique=True))
    reached = set(have)
    for step in graph.steps():
        if reached.issuperset(step.ins):
            reached.update(plain(step.outs))
    reached -= set(have)
    if not reached:
        if all([step.ins for step in graph.steps()]):
            with pytest.raises(ValueError, match="No modules left"):
                seq.select_subsequence(in_keys=have)
        return
    env = {key: torch.full((B, 1), 5 + i) for i, key in enumerate(GIVEN)}
    full = graph.run(env)
    sub = seq.select_subsequence(in_keys=have)
    assert set(plain(sub.out_keys)) == reached
    got = sub(container({key: env[key] for key in have}))
    same(got, {key: full[key] for key in [*have, *reached]})


@examples(40)
@given(any_graph)
def test_destinations_of_outputs_agree(case):
    graph, env = case
    full = graph.run(env)
    outs = {key: full[key] for key in plain(graph.keys()[1])}
    for options, want in (
        ({"inplace": True}, full),
        ({"inplace": False}, outs),
        ({"inplace": "empty"}, outs),
    ):
        seq, td = graph.build(**options), container(env)
        result = seq(td)
        same(result, want)
        if options["inplace"] is True:
            assert result is td
        else:
            assert result.batch_size == (() if options["inplace"] is False else (B,))
            same(td, env)
        destination, td = TensorDict(batch_size=[B]), container(env)
        assert seq(td, tensordict_out=destination) is destination  # overrides `inplace`
        same(destination, outs)
        same(td, env)


@examples(40)
@given(written_once, st.data())
def test_skipping_existing_outputs_changes_no_value(case, data):
    graph, env = case
    full, seq = graph.run(env), graph.build()
    outs = plain(graph.keys()[1])
    existing = data.draw(st.lists(st.sampled_from(outs), unique=True)) if outs else []
    listed = data.draw(st.lists(st.sampled_from(outs), unique=True)) if outs else []
    for mode in (True, listed):
        with set_skip_existing(mode):
            same(seq(container(env | {key: full[key] for key in existing})), full)
    calls = []
    for module in seq.modules():
        if isinstance(module, Mix):
            module.register_forward_hook(lambda *_: calls.append(1))
    with set_skip_existing():
        same(seq(container(full)), full)
    assert not calls


# --- graphs and traces of a sequence -----------------------------------------------------------


@examples(50)
@given(cases())
def test_the_graph_agrees_with_the_sequence(case):
    model, env = case
    seq = model.build()
    graph = seq.graph(container(env))
    steps = model.steps()
    assert list(graph.in_keys) == seq.in_keys
    assert [node.in_keys for node in graph.nodes] == [step.ins for step in steps]
    assert [list(node.out_keys) for node in graph.nodes] == [plain(step.outs) for step in steps]
    writers, readers = {}, {}  # key -> steps that write it; (key, writer) -> whether it is read
    for index, step in enumerate(steps):
        for key in step.ins:
            readers[key, writers.get(key, [None])[-1]] = True
        for key in dict.fromkeys(plain(step.outs)):
            writers.setdefault(key, []).append(index)
    overwritten = {k for k, w in writers.items() if len(w) + (k in seq.in_keys) > 1}
    assert set(graph.overwritten) >= overwritten
    for key in overwritten:
        assert list(dict.fromkeys(graph.overwritten[key])) == [
            graph.nodes[index].name for index in writers[key]
        ]
    assert set(graph.results) == {k for k, w in writers.items() if (k, w[-1]) not in readers}
    td = env
    for node, step in zip(graph.nodes, steps, strict=True):
        shapes = graph.shapes.get(node.name, {"in": {}, "out": {}})
        assert {k: s.shape for k, s in shapes["in"].items()} == {k: td[k].shape for k in step.ins}
        td = step.run(td)
        assert {k: s.shape for k, s in shapes["out"].items()} == {
            k: td[k].shape for k in plain(step.outs)
        }
    for source in (seq.graph(), graph):  # before a call without shapes, otherwise equal
        assert (source.in_keys, source.results) == (graph.in_keys, graph.results)
        assert source.edges == graph.edges
    seq(container(env))
    assert seq.graph() == graph
    assert seq.graph().shapes == graph.shapes


@examples(12)
@given(any_graph)
def test_any_graph_can_be_shown(case):
    graph = case[0].build().graph()
    for text in (graph.mermaid(), graph.svg(), graph.program(), str(graph)):
        assert text.count("Mix") >= len(case[0].steps())


@examples(30)
@given(cases(selections=True, kinds=("list", "list", "dict", "wrapper")), st.data())
def test_a_trace_gives_the_same_outputs(case, data):
    graph, env = case
    outs = plain(graph.keys()[1])
    if outs and data.draw(st.booleans()):
        graph = replace(graph, selected=(data.draw(st.sampled_from(outs)),))
    flat = symbolic_trace(graph.build())
    same(flat(container(env)), graph.run(env))


@examples(50)
@given(any_graph, st.data())
def test_expected_inputs_must_be_the_read_keys(case, data):
    graph, _ = case
    keys = graph.build().in_keys
    assert graph.build(expect_in_keys=data.draw(st.permutations(keys))).in_keys == keys
    with pytest.raises(ValueError, match="names 'nobody', which no module reads"):
        graph.build(expect_in_keys=[*keys, "nobody"])
    for key in keys:
        with pytest.raises(ValueError, match="neither in expect_in_keys nor written before"):
            graph.build(expect_in_keys=[other for other in keys if other != key])


# --- parameters --------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A layer with a buffer that it reads, and one of integers that it does not."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", None)

    def forward(self, x):
        return x * self.scale


class Residual(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleDict({f"l{i}": layer for i, layer in enumerate(layers)})
        self.gain = nn.Parameter(torch.randn(()))

    def forward(self, x):
        y = x
        for layer in self.layers.values():
            y = layer(y)
        return x + self.gain * y


@st.composite
def architectures(draw, depth=2):
    """A plan of layers 3 -> 3 as nested tuples; ("tied", i) has the weight of the i-th layer."""
    kinds = ["linear", "tanh", "scaled", "norm", "tied", "again"]
    if depth:
        kinds += ["nested", "residual"]
    plan = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(kinds))
        inner = draw(architectures(depth=depth - 1)) if kind in ("nested", "residual") else None
        plan.append((kind, inner, draw(st.integers(0, 9))))
    return tuple(plan)


def network(plan, linears=None):
    linears = [] if linears is None else linears  # linear layers so far
    layers = []
    for kind, inner, number in plan:
        if kind == "again" and linears:
            layers.append(linears[number % len(linears)])  # the same layer again
            continue
        layer = {
            "tanh": nn.Tanh,
            "scaled": Scaled,
            "norm": lambda: nn.LayerNorm(3),
            "nested": lambda: nn.Sequential(*network(inner, linears)),  # noqa: B023
            "residual": lambda: Residual(*network(inner, linears)),  # noqa: B023
        }.get(kind, lambda: nn.Linear(3, 3))()
        if kind == "tied" and linears:
            layer.weight = linears[number % len(linears)].weight
        if isinstance(layer, nn.Linear):
            linears.append(layer)
        layers.append(layer)
    return layers


def built(plan, seed):
    torch.manual_seed(seed)
    return nn.Sequential(*network(plan))


def tensors(module):
    """All tensors of a module by name; one tensor may have several names."""
    named = module.named_parameters(remove_duplicate=False)
    return dict(named) | dict(module.named_buffers(remove_duplicate=False))


seeds = st.integers(0, 99)


@examples(40)
@given(architectures(), seeds)
def test_a_functional_module_with_its_parameters_equals_the_module(plan, seed):
    module, x = built(plan, seed), torch.rand(B, 3)
    want, before = module(x), tensors(module)
    params = make_functional(module)
    assert all(map(is_functional, module.modules()))
    assert not tensors(module)
    got = {".".join([k] if isinstance(k, str) else k): v for k, v in entries(params).items()}
    assert {k: id(v) for k, v in got.items()} == {k: id(v) for k, v in before.items() if k in got}
    assert {id(v) for v in got.values()} == {id(v) for v in before.values()}
    assert torch.equal(module(x, params), want)
    assert torch.equal(module(x, params=params.to_dict()), want)
    twin = built(plan, seed + 1)
    other = TensorDict.from_module(twin, filter_empty=False).apply(torch.clone)
    assert torch.equal(module(x, other), twin(x))
    assert not tensors(module)
    assert repopulate_module(module, params) is module
    after = tensors(module)
    assert {k: id(v) for k, v in after.items()} == {k: id(v) for k, v in before.items()}
    assert torch.equal(module(x), want)


@examples(30)
@given(architectures(), seeds, st.integers(1, 3))
def test_stacked_modules_under_vmap_equal_a_loop(plan, seed, number):
    modules = [built(plan, seed + i) for i in range(number)]
    x = torch.rand(number, B, 3)
    want = torch.stack([module(row) for module, row in zip(modules, x, strict=True)])
    empty = copy.deepcopy(modules[0]).to("meta")
    for params in (
        TensorDict.from_modules(*modules),
        TensorDict.from_modules(*modules, use_state_dict=True),
        TensorDict.from_modules(*modules, as_module=True),
        TensorDict.from_modules(*modules, lazy_stack=True),
    ):
        assert params.batch_size == (number,)

        def call(row, params):
            with params.to_module(empty):
                return empty(row)

        torch.testing.assert_close(torch.vmap(call)(x, params), want)
    assert all([leaf.is_meta for leaf in tensors(empty).values()])


@examples(40)
@given(architectures(), seeds, st.sampled_from([0.0, 0.25, 1.0]), st.booleans(), st.booleans())
def test_update_target_equals_a_simple_loop(plan, seed, rate, by_tensor, as_container):
    online, target = built(plan, seed), target_copy(built(plan, seed + 1))
    for module in (online, target):
        for leaf in tensors(module).values():
            if not leaf.is_floating_point():
                leaf.fill_(3 if module is online else 5)
    sources = {name: leaf.detach().clone() for name, leaf in tensors(online).items()}
    want = {}
    for name, leaf in tensors(target).items():
        if leaf.is_floating_point():
            want[name] = leaf + rate * (sources[name] - leaf)
        else:
            want[name] = sources[name] if rate else leaf.clone()
    holder = TensorDict.from_module(target) if as_container else target
    source = TensorDict.from_module(online) if as_container else online
    number = torch.tensor(rate) if by_tensor else rate
    assert update_target(holder, source, rate=number) is holder
    for name, leaf in tensors(target).items():
        torch.testing.assert_close(leaf, want[name])
        assert not leaf.requires_grad
    for name, leaf in tensors(online).items():
        assert torch.equal(leaf, sources[name])


# --- distributions -----------------------------------------------------------------------------

CLASSES = {  # distribution -> its parameters for a batch [B], some with more dimensions
    d.Normal: {"loc": (0.0, 4), "scale": (0.5, 4)},
    d.Exponential: {"rate": (0.5, 0)},
    d.Bernoulli: {"probs": (0.1, 0)},
    d.Categorical: {"logits": (0.0, 3)},
    d.OneHotCategorical: {"logits": (0.0, 5)},
    d.Poisson: {"rate": (1.0, 0)},
}
NAMES = ("a", "b", "c", ("n", "a"), ("n", "b"), ("n", "m", "c"))


@st.composite
def composites(draw):
    """(name -> class, parameters, a name_map or None, seed)"""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    classes = {name: draw(st.sampled_from(list(CLASSES))) for name in names}
    renamed = draw(st.booleans())
    torch.manual_seed(draw(seeds))
    params = TensorDict(batch_size=[B])
    for name, cls in classes.items():
        path = (name,) if isinstance(name, str) else name
        for keyword, (low, extra) in CLASSES[cls].items():
            params[(*path, keyword)] = low + 0.5 * torch.rand(B, *[extra] * bool(extra))
    keys = {name: ("out", f"k{i}") if i % 2 else f"k{i}" for i, name in enumerate(names)}
    return classes, params, keys if renamed else None


def suffixed(name, suffix):
    return name + suffix if isinstance(name, str) else (*name[:-1], name[-1] + suffix)


@examples(50)
@given(composites(), st.sampled_from([(), (3,), (1, 4)]))
def test_a_composite_equals_its_parts(case, shape):
    classes, params, keys = case
    dist = CompositeDistribution(params, classes, name_map=keys)
    parts = {(keys or {}).get(n, n): cls(**params[n]) for n, cls in classes.items()}
    assert list(dist) == list(parts)
    sample = dist.sample(shape)
    assert sample.batch_size == (*shape, B)
    assert set(entries(sample)) == set(parts)
    scores = {n: part.log_prob(sample[n]) for n, part in parts.items()}
    spread = {n: part.entropy() for n, part in parts.items() if type(part) is not d.Poisson}
    same(dist.log_prob(sample), {suffixed(n, "_log_prob"): v for n, v in scores.items()})

    def total(values, batch):
        return sum([v.reshape(*batch, -1).sum(-1) for v in values.values()])

    with set_composite_lp_aggregate(True):
        torch.testing.assert_close(dist.log_prob(sample), total(scores, (*shape, B)))
        if len(spread) == len(parts):
            torch.testing.assert_close(dist.entropy(), total(spread, (B,)))
    entropies = {suffixed(n, "_entropy"): v for n, v in spread.items()}
    same({k: v for k, v in entries(dist.entropy()).items() if k in entropies}, entropies)
    for what in ("mean", "mode"):
        if what == "mean" and any([type(part) is d.Categorical for part in parts.values()]):
            continue  # nan
        same(getattr(dist, what), {n: getattr(part, what) for n, part in parts.items()})
    torch.manual_seed(1)
    drawn = dist.sample(shape)
    torch.manual_seed(1)
    same(drawn, {n: part.sample(shape) for n, part in parts.items()})


VALUES = st.sampled_from(["mean", "mode", "random", "deterministic"])


@examples(50)
@given(st.sampled_from(list(CLASSES)), VALUES, st.none() | VALUES, seeds)
def test_the_interaction_type_selects_the_value(cls, default, setting, seed):
    params = TensorDict(batch_size=[B])
    torch.manual_seed(seed)
    for keyword, (low, extra) in CLASSES[cls].items():
        params[keyword] = low + 0.5 * torch.rand(B, *[extra] * bool(extra))
    names = list(params.keys())
    part = cls(**params, validate_args=False)  # the mean of integers is not in the support
    kind = setting or default
    if kind == "deterministic":
        kind = "mode" if part.has_enumerate_support else "mean"
    torch.manual_seed(seed)
    want = part.sample() if kind == "random" else getattr(part, kind)
    scored = bool(want.isfinite().all())  # a Categorical has no mean
    options = dict(distribution_class=cls, distribution_kwargs={"validate_args": False})
    options |= dict(default_interaction_type=default, return_log_prob=scored)
    draw = ProbabilisticTensorDictModule(names, ["value"], **options)
    copied = TensorDictModule(lambda *x: x, names, names)
    for module in (draw, ProbabilisticTensorDictSequential(copied, draw)):
        torch.manual_seed(seed)
        if setting is None:
            td = module(params.copy())
        else:
            with set_interaction_type(setting):
                assert interaction_type() is InteractionType(setting)
                td = module(params.copy())
        assert interaction_type() is None
        torch.testing.assert_close(td["value"], want, equal_nan=True)
        if scored:
            torch.testing.assert_close(td["value_log_prob"], part.log_prob(want))
            torch.testing.assert_close(module.log_prob(td), td["value_log_prob"])
