"""Sequences with probabilistic modules, and the distributions they give."""

import threading

import pytest
import torch
from torch import distributions as d
from torch import nn

from raffia import TensorDict
from raffia.nn import (
    CompositeDistribution,
    InteractionType,
    TensorDictSequential,
    interaction_type,
    set_composite_lp_aggregate,
    set_interaction_type,
    set_skip_existing,
)
from raffia.nn import ProbabilisticTensorDictModule as Prob
from raffia.nn import ProbabilisticTensorDictSequential as Seq
from raffia.nn import TensorDictModule as Mod
from tests.marks import refusals, slow_among

from .keyed import compiled, policy

B, T = 2, 3


def normal(loc, out, **options):
    """out ~ Normal(loc, 1)"""
    options.setdefault("return_log_prob", True)
    kwargs = {"scale": 1.0}
    return Prob(
        {"loc": loc}, [out], distribution_class=d.Normal, distribution_kwargs=kwargs, **options
    )


def plus(n, source, dest):
    return Mod(lambda x, more=0.0: x + n + more, in_keys=[source], out_keys=[dest])


def single(**options):
    return Seq(plus(1, "x", "loc"), normal("loc", "a"), **options)


def chain(**options):
    """loc = x + 1; a ~ Normal(loc); mid = a + 1; b ~ Normal(mid)"""
    return Seq(
        plus(1, "x", "loc"), normal("loc", "a"), plus(1, "a", "mid"), normal("mid", "b"), **options
    )


def inputs(**entries):
    return TensorDict(x=torch.zeros(B, T), batch_size=[B]).update(entries)


def full(value):
    return torch.full((B, T), float(value))


def score(value, loc):
    return d.Normal(torch.as_tensor(loc), 1.0).log_prob(torch.as_tensor(value))


def composite_head():
    def params(x):
        return TensorDict(a=dict(loc=x + 1, scale=torch.ones_like(x)), batch_size=[B])

    kwargs = {"distribution_map": {"a": d.Normal}}
    options = dict(distribution_class=CompositeDistribution, distribution_kwargs=kwargs)
    head = Prob(["params"], return_log_prob=True, **options)
    return Seq(Mod(params, in_keys=["x"], out_keys=["params"]), head, normal("a", "b"))


NAMED = {"net": plus(1, "x", "loc"), "head": normal("loc", "a")}
TWICE, PLAIN = plus(0.5, "x", "x"), TensorDictSequential(*chain()[:3])
KEYED = normal("x", "a", log_prob_key="p")
SEQUENCES = {  # a sequence, the location of each distribution, and whether it is a composite
    "listed": (Seq(list(NAMED.values())), {"a": 1}, False),
    "named": (Seq(NAMED), {"a": 1}, False),
    "a function": (Seq(lambda td: td.set("loc", td["x"] + 1), normal("loc", "a")), {"a": 1}, False),
    "one, as a composite": (single(return_composite=True), {"a": 1}, True),
    "two": (chain(), {"b": 2, "a": 1}, True),
    "two, the last": (chain(return_composite=False), {"b": 2, "a": 1}, False),
    "the last computes": (Seq(normal("x", "a"), plus(1, "a", "y")), {"a": 0}, True),
    "in the middle": (Seq(single(), plus(1, "a", "y")), {"a": 1}, True),
    "at the end": (Seq(plus(1, "x", "x"), single()), {"a": 2}, False),
    "two at the end": (Seq(plus(1, "x", "x"), chain()), {"b": 3, "a": 2}, True),
    "a plain sequence": (Seq(PLAIN, normal("mid", "b")), {"b": 2, "a": 1}, False),
    "a module twice": (Seq(TWICE, TWICE, normal("x", "a")), {"a": 1}, False),
    "a composite module": (composite_head(), {"b": 1, "a": 1}, True),
    "other keys": (Seq(KEYED, normal("a", "b")), {"b": 0, "a": 0}, True),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_calls_distributions_and_scores(name):
    seq, locs, composite = SEQUENCES[name]
    td = inputs()
    assert seq(td) is td and seq.dist_sample_keys == list(locs)
    assert seq.return_composite is (composite and name != "two at the end")
    keys = dict(zip(locs, seq.log_prob_keys, strict=True))
    for key, loc in locs.items():
        assert (td[key] == loc).all()
        assert torch.equal(td[keys[key]], score(full(loc), full(loc)))
    with set_interaction_type("random"):
        drawn = seq(inputs())
        scores = seq.log_prob(drawn.copy().update(inputs()))  # some write x
    assert not torch.equal(drawn["a"], td["a"])
    fives = inputs(a=full(5), b=full(0))
    written = seq.log_prob(fives)  # it scores the existing values
    dist = seq.get_dist(inputs())
    if composite:
        assert isinstance(dist, CompositeDistribution) and set(dist) == set(locs)
        assert all((dist[key].loc == loc).all() for key, loc in locs.items())
        assert set(scores.keys(True, True)) == set(keys.values()) and scores.batch_size == (B,)
        for key in locs:
            torch.testing.assert_close(scores[keys[key]], drawn[keys[key]])
        assert torch.equal(written[keys["a"]], score(full(5), full(locs["a"])))
    else:
        key = next(iter(locs))
        assert type(dist) is d.Normal and (dist.loc == locs[key]).all()
        torch.testing.assert_close(scores, drawn[keys[key]])
        assert (seq.build_dist_from_params(seq.get_dist_params(inputs())).loc == locs[key]).all()
    if "b" in locs:
        last = written[keys["b"]] if composite else written
        assert torch.equal(last, score(full(0), full(5 + locs["b"] - locs["a"])))
        assert (fives["a"] == 5).all()


def test_keys():
    seq = chain()
    assert seq.in_keys == ["x"] and seq.dist_params_keys == ["mid", "loc"]
    assert seq.out_keys == ["loc", "a", "a_log_prob", "mid", "b", "b_log_prob"]
    assert seq.log_prob_keys == ["b_log_prob", "a_log_prob"]  # the last module first
    assert single().log_prob_key == "a_log_prob" and single().num_samples == ()
    out = single()(x=torch.zeros(T))
    assert (out[0] == 1).all() and (out[1] == 1).all()
    with set_composite_lp_aggregate(True):
        seq = chain()
        td = seq(inputs())
        assert seq.out_keys == ["loc", "a", "mid", "b", "sample_log_prob"]
        total = seq.log_prob(td)
    torch.testing.assert_close(total, 2 * T * score(0.0, 0.0).expand(B))


# --- the type of interaction --------------------------------------------------------------------


def test_without_a_composite_the_last_default_applies_to_all():
    def seq(first, last, **options):
        modules = (normal("x", "a", default_interaction_type=first),)
        return Seq(*modules, normal("a", "b", default_interaction_type=last), **options)

    last = seq("deterministic", "random", return_composite=False)
    assert last.default_interaction_type is InteractionType.RANDOM
    assert last(inputs())["a"].any()
    assert last.get_dist_params(inputs())["a"].any() and last.get_dist(inputs()).loc.any()
    own = seq("deterministic", "random")
    assert not own(inputs())["a"].any() and not own.get_dist(inputs())["b"].loc.any()
    assert own.get_dist_params(inputs())["a"].any() and interaction_type() is None


def test_earlier_modules_get_the_interaction_type_and_other_threads_do_not():
    types, elsewhere = [], []

    def look(x):
        types.append(interaction_type())
        thread = threading.Thread(target=lambda: elsewhere.append(interaction_type()))
        thread.start()
        thread.join()
        return x if len(types) < 4 else 1 / 0

    watch = Mod(look, in_keys=["x"], out_keys=["loc"])
    seq = Seq(watch, normal("loc", "a", default_interaction_type="mean"))
    seq(inputs())
    seq(inputs())
    with set_interaction_type("random"):
        seq(inputs())
    with pytest.raises(ZeroDivisionError):
        seq(inputs())
    assert types == ["mean", "mean", "random", "mean"] and interaction_type() is None
    assert elsewhere[:2] == [None, None]


# --- calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize("composite", [False, True])
def test_keywords_go_to_the_modules_that_compute(composite):
    seq = single(return_composite=composite)
    assert (seq(inputs(), more=5.0)["a"] == 6).all()
    assert (seq.get_dist_params(inputs(), more=5.0)["loc"] == 6).all()
    dist, scores = seq.get_dist(inputs(), more=5.0), seq.log_prob(inputs(a=full(0)), more=5.0)
    if composite:
        dist, scores = dist["a"], scores["a_log_prob"]
    assert (dist.loc == 6).all() and (scores == score(0.0, 6.0)).all()


@pytest.mark.parametrize("inplace", [None, True, False, "empty"])
def test_inplace_and_destination(inplace):
    td = inputs()
    out = single(inplace=inplace)(td)
    assert (out is td) == ("a" in td) == (inplace in (True, None))
    assert out.batch_size == (() if inplace is False else (B,))
    written = {"loc", "a", "a_log_prob"}
    for run, expected in (
        (single(inplace=inplace), written),
        (single().get_dist_params, {"loc"}),
        (single().get_dist, {"loc"}),
        (chain().get_dist_params, {*written, "mid"}),
    ):
        td, out = inputs(), TensorDict(batch_size=[B])
        run(td, tensordict_out=out)
        assert set(out.keys()) == expected and set(td.keys()) == {"x"}
    td = inputs(a=full(1))
    single().log_prob(td, TensorDict(batch_size=[B]))
    assert set(td.keys()) == {"x", "a"}
    for composite, keys in ((False, {"x", *written, "mid"}), (True, {"x"})):
        td = inputs()
        chain(return_composite=composite).get_dist(td)
        assert set(td.keys()) == keys


def test_selected_and_missing_and_skipped():
    for seq in (single(selected_out_keys=["a"]), single().select_out_keys("a")):
        assert seq.out_keys == ["a"]
        td = seq(inputs())
        assert set(td.keys()) == {"x", "a"}
        assert isinstance(seq.get_dist(td), d.Normal) and seq.log_prob(td).shape == (B, T)
    td = TensorDict(y=torch.zeros(B), batch_size=[B])
    assert list(single(partial_tolerant=True)(td).keys()) == ["y"]
    with set_skip_existing(True):
        assert (single()(inputs(loc=full(4)))["a"] == 4).all()


# --- errors -------------------------------------------------------------------------------------

LAST = "The final module passed to"


def no_distribution():
    seq = Seq(plus(1, "x", "y"))
    assert (seq(inputs())["y"] == 1).all() and seq.default_interaction_type is None
    assert seq.return_composite
    return seq


UNIT = d.Normal(0.0, 1.0)
ERRORS = [  # a call, its error, and words of its message
    (lambda: Seq(normal("x", "a")).__delitem__(0), ValueError, "must consist of zero or more"),
    (lambda: Seq(plus(1, "x", "y"), return_composite=False), TypeError, LAST),
    (lambda: chain().log_prob_key, AttributeError, r"at \['b_log_prob', 'a_log_prob'\]"),
    (lambda: no_distribution().get_dist(inputs()), RuntimeError, "No distribution module found"),
    (lambda: no_distribution().build_dist_from_params(inputs()), RuntimeError, "Could not find"),
    (lambda: single().log_prob(inputs()), ValueError, "a"),
    (lambda: chain().log_prob(inputs()), ValueError, "a"),
    (lambda: single().log_prob(single()(inputs()), dist=UNIT, more=3.0), TypeError, "runs no mod"),
]


test_errors = refusals(ERRORS)


# --- as a list of modules -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parts_and_edits():
    seq = chain()
    assert type(seq[:1]) is type(seq[2:3]) is TensorDictSequential
    assert type(seq[:2]) is Seq and seq[:2][1] is seq[1]
    part = single().det_part
    assert type(part) is TensorDictSequential and part.out_keys == ["loc"]
    part = chain().select_subsequence(out_keys=["a"])
    assert isinstance(part, Seq) and not part.return_composite
    assert (part(inputs())["a"] == 1).all()
    scores = chain().log_prob(seq(inputs()), dist=chain().get_dist(inputs()))
    assert (scores["b_log_prob"] < 0).all()
    seq = single()
    seq[1] = normal("loc", "c")
    assert seq.out_keys == ["loc", "c", "c_log_prob"] and seq.log_prob_key == "c_log_prob"
    del seq[0]
    assert seq.in_keys == ["loc"]


EDITS = {
    "deleted": lambda seq: seq.module.__delitem__(1),
    "renamed": lambda seq: setattr(seq[1], "out_keys", ["b"]),
    "in the dict": lambda seq: seq.module._modules.update({"1": plus(7, "x", "b")}),
}


@pytest.mark.parametrize("edit", EDITS)
def test_outputs_of_earlier_modules_are_not_drawn_after_any_edit(edit):
    seq = Seq(plus(1, "x", "loc"), plus(7, "x", "a"), normal("loc", "a"))
    inner = TensorDictSequential(plus(1, "x", "loc"), plus(7, "x", "a"))
    nested, value = Seq(inner, normal("loc", "a")), seq.module[1]
    for made in (seq, nested):
        td = made(inputs(a=full(9)))
        assert (td["a"] == 7).all() and (td["a_log_prob"] == score(7.0, 1.0)).all()
    EDITS[edit](seq)
    del inner.module[1]
    assert inner.out_keys == ["loc"]
    for made in (seq, nested):
        td = made(inputs(a=full(9)))  # an input's is drawn
        assert (td["a"] == 1).all() and torch.equal(td["a_log_prob"], score(td["a"], 1.0))
    assert seq.out_keys == ["loc", *["b"] * (edit != "deleted"), "a", "a_log_prob"]
    if edit == "deleted":
        seq.module.insert(1, value)
        assert (seq(inputs())["a"] == 7).all()


# --- learning with it ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", slow_among(["random", "deterministic"], "deterministic"))
def test_compiled_in_one_graph(kind):
    seq = policy(default_interaction_type=kind)
    out, expected = compiled(seq)(inputs()), seq(inputs())
    if kind != "random":
        torch.testing.assert_close(out["action"], expected["action"])
    scores = compiled(seq.log_prob)(expected.detach())
    torch.testing.assert_close(scores, expected["action_log_prob"])
    assert (compiled(chain())(inputs())["b"] == 2).all() and interaction_type() is None


# --- mixins -------------------------------------------------------------------------------------


class Bounded(Mod):
    """A module that stores a bound, like classes that add a specification to keyed modules."""

    def __init__(self, module, in_keys, out_keys, bound=None, inplace=True):
        super().__init__(module, in_keys, out_keys, inplace=inplace)
        self.bound = bound


class BoundedSequential(TensorDictSequential, Bounded):
    """Calls the constructor of the module, not that of the sequence."""

    def __init__(self, *modules, partial_tolerant=False, inplace=None):
        self.partial_tolerant = partial_tolerant
        in_keys, out_keys = self._compute_in_and_out_keys(modules)
        super(TensorDictSequential, self).__init__(
            bound=2, module=nn.ModuleList(modules), in_keys=in_keys, out_keys=out_keys
        )
        self.inplace = inplace


class Cooperative(TensorDictSequential, Bounded):
    """Leaves everything to the constructors of its bases."""


class BoundedSeq(Seq, BoundedSequential):
    def __init__(self, *modules, partial_tolerant=False):
        super().__init__(*modules, partial_tolerant=partial_tolerant)
        super(Seq, self).__init__(*modules, partial_tolerant=partial_tolerant)


class CooperativeSeq(Seq, Cooperative):
    pass


@pytest.mark.parametrize("kind", [BoundedSeq, CooperativeSeq])
def test_mixins_among_the_bases_of_a_probabilistic_sequence(kind):
    seq = kind(plus(1, "x", "loc"), normal("loc", "a"))
    assert getattr(seq, "bound", None) == {BoundedSeq: 2}.get(kind)
    assert seq.in_keys == ["x"] and seq.out_keys == ["loc", "a", "a_log_prob"]
    td = seq(inputs())
    assert (td["a"] == 1).all() and seq.get_dist(td).loc.shape == (B, T)
    assert not seq.return_composite and len(seq) == 2
    seq.module.insert(1, plus(7, "x", "a"))
    assert (seq(inputs())["a"] == 7).all()


def test_draws_equal_those_of_the_distributions():
    seq = chain()
    with set_interaction_type("random"):
        torch.manual_seed(0)
        td = seq(inputs())
        torch.manual_seed(0)
        dist = seq.get_dist(inputs())
    torch.manual_seed(0)
    a = d.Normal(full(1), 1.0).rsample()
    b = d.Normal(a + 1, 1.0).rsample()
    assert (td["a"] == a).all() and (td["b"] == b).all() and (dist["b"].loc == a + 1).all()
    torch.testing.assert_close(td["b_log_prob"], score(b, a + 1))
