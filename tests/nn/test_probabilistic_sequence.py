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
from raffia.nn.distributions import NormalParamExtractor

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


def score(value, loc):
    return d.Normal(torch.as_tensor(loc), 1.0).log_prob(torch.as_tensor(value))


# ------------------------------------------------------------------------ construction


def test_keys():
    seq = chain()
    assert seq.in_keys == ["x"]
    assert seq.out_keys == ["loc", "a", "a_log_prob", "mid", "b", "b_log_prob"]
    assert seq.log_prob_keys == ["b_log_prob", "a_log_prob"]  # the last module first
    assert seq.dist_params_keys == ["mid", "loc"] and seq.dist_sample_keys == ["b", "a"]
    assert single().log_prob_key == "a_log_prob"
    with pytest.raises(AttributeError):
        seq.log_prob_key  # noqa: B018


def test_ours_several_log_prob_keys_are_named():
    with pytest.raises(AttributeError, match=r"at \['b_log_prob', 'a_log_prob'\]"):
        chain().log_prob_key  # noqa: B018


@pytest.mark.parametrize(
    "seq, composite",
    [
        (lambda **k: single(**k), False),
        (lambda **k: chain(**k), True),
        (lambda **k: Seq(normal("x", "a"), plus(1, "a", "y"), **k), True),
        (lambda **k: Seq(plus(1, "x", "y"), **k), True),
    ],
)
def test_whether_the_distribution_is_a_composite(seq, composite):
    assert seq().return_composite is composite
    assert seq(return_composite=True).return_composite is True


def test_modules_in_a_list_or_by_name():
    modules = {"net": plus(1, "x", "loc"), "head": normal("loc", "a")}
    named, listed = Seq(modules), Seq(list(modules.values()))
    assert (named(inputs())["a"] == 1).all() and (listed(inputs())["a"] == 1).all()
    assert named["head"] is modules["head"] and listed[1] is modules["head"]
    assert isinstance(named.get_dist(inputs()), d.Normal)


def test_a_function_from_container_to_container():
    seq = Seq(lambda td: td.set("loc", td["x"] + 1), normal("loc", "a"))
    assert (seq(inputs())["a"] == 1).all()


def test_no_module():
    with pytest.raises(ValueError, match="must consist of zero or more"):
        Seq()


def test_the_last_one_must_be_probabilistic_to_give_its_distribution():
    with pytest.raises(TypeError, match="The final module passed to"):
        Seq(plus(1, "x", "y"), return_composite=False)
    with pytest.raises(TypeError, match="The final module passed to"):
        Seq(TensorDictSequential(normal("x", "a")), return_composite=False)


# ------------------------------------------------------------------------ calling


def test_a_call_writes_everything():
    td = inputs()
    assert chain()(td) is td
    assert (td["loc"] == 1).all() and (td["a"] == 1).all() and (td["b"] == 2).all()
    assert (td["b_log_prob"] == score(0.0, 0.0)).all()


def test_tensors_instead_of_a_container():
    for a, b in ((single()(torch.zeros(T))[:2]), (single()(x=torch.zeros(T))[:2])):
        assert (a == 1).all() and (b == 1).all()


def test_draws_are_those_of_the_distributions():
    seq = chain()
    torch.manual_seed(0)
    with set_interaction_type("random"):
        td = seq(inputs())
    torch.manual_seed(0)
    a = d.Normal(torch.ones(B, T), 1.0).rsample()
    b = d.Normal(a + 1, 1.0).rsample()
    assert (td["a"] == a).all() and (td["b"] == b).all()
    torch.testing.assert_close(td["b_log_prob"], score(b, a + 1))


def test_without_a_composite_the_last_default_holds_for_all():
    def seq(first, last, **options):
        modules = (normal("x", "a", default_interaction_type=first),)
        return Seq(*modules, normal("a", "b", default_interaction_type=last), **options)

    last = seq("deterministic", "random", return_composite=False)
    assert last.default_interaction_type is InteractionType.RANDOM
    assert last(inputs())["a"].any()
    assert last.get_dist_params(inputs())["a"].any() and last.get_dist(inputs()).loc.any()
    own = seq("deterministic", "random")
    assert not own(inputs())["a"].any() and not own.get_dist(inputs())["b"].loc.any()
    assert own.get_dist_params(inputs())["a"].any()
    own = seq("random", "deterministic")
    assert own(inputs())["a"].any() and not own.get_dist_params(inputs())["a"].any()
    assert interaction_type() is None


def test_the_modules_before_see_the_type_too():
    seen = []
    watch = Mod(lambda x: seen.append(interaction_type()) or x, in_keys=["x"], out_keys=["loc"])
    seq = Seq(watch, normal("loc", "a", default_interaction_type="mean"))
    seq(inputs())
    seq(inputs())
    with set_interaction_type("random"):
        seq(inputs())
    assert seen == ["mean", "mean", "random"] and interaction_type() is None


def test_ours_the_type_of_a_call_is_not_seen_by_other_threads():
    seen = []

    def look(x):
        thread = threading.Thread(target=lambda: seen.append(interaction_type()))
        thread.start()
        thread.join()
        return x

    watch = Mod(look, in_keys=["x"], out_keys=["loc"])
    seq = Seq(watch, normal("loc", "a", default_interaction_type="mean"))
    seq(inputs())
    seq(inputs())
    assert seen == [None, None]


def test_an_error_puts_the_type_back():
    def fail(x):
        raise ArithmeticError

    seq = Seq(Mod(fail, in_keys=["x"], out_keys=["loc"]), normal("loc", "a"))
    with pytest.raises(ArithmeticError):
        seq(inputs())
    assert interaction_type() is None


def test_what_the_earlier_modules_write_is_not_drawn():
    def both(x):
        return x + 1, x + 7

    seq = Seq(Mod(both, in_keys=["x"], out_keys=["loc", "a"]), normal("loc", "a"))
    td = seq(inputs())
    assert (td["a"] == 7).all() and (td["a_log_prob"] == score(7.0, 1.0)).all()
    plain = Seq(seq[0], normal("loc", "a", return_log_prob=False))
    assert (plain(inputs())["a"] == 7).all()
    assert (single()(inputs(a=torch.full((B, T), 7.0)))["a"] == 1).all()  # the input's is drawn


def test_keywords_go_to_the_modules_that_compute():
    seq = single()
    assert (seq(inputs(), more=5.0)["a"] == 6).all()
    assert (seq.get_dist_params(inputs(), more=5.0)["loc"] == 6).all()
    assert (seq.get_dist(inputs(), more=5.0).loc == 6).all()
    td = inputs(a=torch.zeros(B, T))
    assert (seq.log_prob(td, more=5.0) == score(0.0, 6.0)).all()


def test_ours_keywords_with_a_composite():
    seq = single(return_composite=True)
    assert (seq.get_dist(inputs(), more=5.0)["a"].loc == 6).all()
    td = inputs(a=torch.zeros(B, T))
    assert (seq.log_prob(td, more=5.0)["a_log_prob"] == score(0.0, 6.0)).all()


@pytest.mark.parametrize("inplace", [True, False, "empty"])
def test_where_the_outputs_go(inplace):
    td = inputs()
    out = single(inplace=inplace)(td)
    assert (out is td) == (inplace is True)
    assert ("a" in td) == (inplace is True)
    assert out.batch_size == (() if inplace is False else (B,))


def test_another_container_takes_the_outputs():
    td, out = inputs(), TensorDict(batch_size=[B])
    assert single()(td, tensordict_out=out) is out
    assert set(out.keys()) == {"loc", "a", "a_log_prob"} and set(td.keys()) == {"x"}


def test_selected_outputs():
    for seq in (single(selected_out_keys=["a"]), single().select_out_keys("a")):
        assert seq.out_keys == ["a"]
        td = seq(inputs())
        assert set(td.keys()) == {"x", "a"}
        assert isinstance(seq.get_dist(td), d.Normal) and seq.log_prob(td).shape == (B, T)


def test_ours_modules_without_inputs_are_left_out():
    td = TensorDict(y=torch.zeros(B), batch_size=[B])
    assert list(single(partial_tolerant=True)(td).keys()) == ["y"]


def test_modules_whose_outputs_are_there_are_skipped():
    with set_skip_existing(True):
        assert (single()(inputs(loc=torch.full((B, T), 4.0)))["a"] == 4).all()


@pytest.mark.parametrize(
    "sizes, expected", [((4,), (4,)), ((4, 5), (5, 4)), ((None, 4), (4,)), ((4, None), (4,))]
)
def test_several_draws_of_several_modules(sizes, expected):
    options = dict(default_interaction_type="random")
    modules = [
        normal("x" if i == 0 else "a0", f"a{i}", num_samples=size, **options)
        for i, size in enumerate(sizes)
    ]
    seq = Seq(*modules)
    td = inputs()
    out = seq(td)
    assert seq.num_samples == expected and out.batch_size == (*expected, B)
    assert out[f"a{len(sizes) - 1}_log_prob"].shape == (*expected, B, T)
    assert td.batch_size == (B,)


def test_no_number_of_draws():
    assert single().num_samples == ()


# ------------------------------------------------------------------------ distributions


def test_the_distribution_of_the_last_module():
    td = inputs()
    dist = chain(return_composite=False).get_dist(td)
    assert type(dist) is d.Normal and (dist.loc == 2).all()
    assert set(td.keys()) == {"x", "loc", "a", "a_log_prob", "mid"}


def test_the_distribution_of_all():
    td = inputs()
    dist = chain().get_dist(td)
    assert isinstance(dist, CompositeDistribution) and list(dist.keys()) == ["a", "b"]
    assert (dist["a"].loc == 1).all() and (dist["b"].loc == 2).all()
    assert list(td.keys()) == ["x"]


def test_each_is_conditioned_on_the_draws_before():
    seq = chain()
    with set_interaction_type("random"):
        torch.manual_seed(0)
        dist = seq.get_dist(inputs())
        torch.manual_seed(0)
        a = d.Normal(torch.ones(B, T), 1.0).rsample()
    assert (dist["b"].loc == a + 1).all()


def test_the_distribution_where_the_last_module_computes():
    seq = Seq(normal("x", "a"), plus(1, "a", "y"))
    assert list(seq.get_dist(inputs()).keys()) == ["a"]
    assert set(seq.log_prob(seq(inputs())).keys()) == {"a_log_prob"}


def test_no_distribution():
    seq = Seq(plus(1, "x", "y"))
    assert (seq(inputs())["y"] == 1).all() and seq.default_interaction_type is None
    with pytest.raises(RuntimeError, match="No distribution module found"):
        seq.get_dist(inputs())
    with pytest.raises(RuntimeError, match="Could not find any ProbabilisticTensorDictModule"):
        seq.build_dist_from_params(inputs())


def test_parameters_and_their_distribution():
    td, seq = inputs(), chain()
    params = seq.get_dist_params(td)
    assert params is td and set(td.keys()) == {"x", "loc", "a", "a_log_prob", "mid"}
    assert (seq.build_dist_from_params(params).loc == 2).all()
    td, out = inputs(), TensorDict(batch_size=[B])
    assert seq.get_dist_params(td, tensordict_out=out) is out
    assert set(out.keys()) == {"loc", "a", "a_log_prob", "mid"} and set(td.keys()) == {"x"}


def test_another_container_takes_what_leads_to_the_distribution():
    td, out = inputs(), TensorDict(batch_size=[B])
    assert (single().get_dist(td, tensordict_out=out).loc == 1).all()
    assert set(out.keys()) == {"loc"} and set(td.keys()) == {"x"}


def test_log_prob_of_one_and_of_all():
    td = inputs(a=torch.ones(B, T), b=torch.zeros(B, T))
    assert (single().log_prob(td) == score(1.0, 1.0)).all()
    scores = chain().log_prob(td)
    assert set(scores.keys()) == {"a_log_prob", "b_log_prob"} and scores.batch_size == (B,)
    assert (scores["b_log_prob"] == score(0.0, 2.0)).all()
    given = chain().log_prob(td, dist=chain().get_dist(inputs()))
    assert (given == scores).all()


def test_log_prob_leaves_the_container_if_another_is_given():
    td = inputs(a=torch.ones(B, T))
    single().log_prob(td, TensorDict(batch_size=[B]))
    assert set(td.keys()) == {"x", "a"}


def test_ours_log_prob_is_given_the_values_that_are_there():
    a, b = torch.full((B, T), 5.0), torch.zeros(B, T)
    inner = Seq(TensorDictSequential(*chain()[:3]), normal("mid", "b"))
    for seq in (chain(), chain(return_composite=False), inner):
        with set_interaction_type("random"):
            td = inputs(a=a, b=b)
            scores = seq.log_prob(td)
        last = scores["b_log_prob"] if seq.return_composite else scores
        assert (last == score(0.0, 6.0)).all() and (td["a"] == 5).all()


def test_ours_log_prob_is_what_the_call_wrote():
    seq = chain()
    with set_interaction_type("random"):
        td = seq(inputs())
        scores = seq.log_prob(td)
    torch.testing.assert_close(scores["b_log_prob"], td["b_log_prob"])
    torch.testing.assert_close(scores["a_log_prob"], td["a_log_prob"])


def test_other_keys_for_the_log_probabilities():
    seq = Seq(normal("x", "a", log_prob_key="p"), normal("a", "b", log_prob_key="q"))
    assert seq.log_prob_keys == ["q", "p"]
    td = seq(inputs())
    assert set(seq.log_prob(td).keys()) == {"p", "q"} == set(td.keys()) - {"x", "a", "b"}


def test_the_sum_of_all():
    with set_composite_lp_aggregate(True):
        seq = chain()
        td = seq(inputs())
        assert seq.out_keys == ["loc", "a", "mid", "b", "sample_log_prob"]
        total = seq.log_prob(td)
    torch.testing.assert_close(total, 2 * T * score(0.0, 0.0).expand(B))


def test_a_sample_that_is_missing():
    for seq in (single(), chain()):
        with pytest.raises(ValueError):
            seq.log_prob(inputs())


def test_ours_keywords_beside_a_distribution_are_refused():
    td = single()(inputs())
    with pytest.raises(TypeError, match="runs no module"):
        single().log_prob(td, dist=d.Normal(0.0, 1.0), more=3.0)


# ------------------------------------------------------------------------ sequences in sequences


def test_a_sequence_in_the_middle():
    seq = Seq(single(), plus(1, "a", "y"))
    assert seq.return_composite and list(seq.get_dist(inputs()).keys()) == ["a"]
    assert seq.log_prob_keys == ["a_log_prob"] and seq.dist_sample_keys == ["a"]


def test_ours_a_sequence_at_the_end():
    seq = Seq(plus(1, "x0", "x"), single())
    td = TensorDict(x0=torch.zeros(B, T), batch_size=[B])
    assert not seq.return_composite and (seq.get_dist(td.copy()).loc == 2).all()
    assert (seq.build_dist_from_params(seq.get_dist_params(td.copy())).loc == 2).all()
    assert (seq.log_prob(seq(td.copy())) == score(0.0, 0.0)).all()
    of_two = Seq(plus(1, "x0", "x"), chain())
    assert list(of_two.get_dist(td.copy()).keys()) == ["a", "b"]
    assert set(of_two.log_prob(of_two(td)).keys()) == {"a_log_prob", "b_log_prob"}


def test_ours_a_composite_module_among_others():
    def params(x):
        return TensorDict(a=dict(loc=x, scale=torch.ones_like(x)), batch_size=[B])

    head = Prob(
        ["params"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": {"a": d.Normal}},
        return_log_prob=True,
    )
    seq = Seq(Mod(params, in_keys=["x"], out_keys=["params"]), head, normal("a", "b"))
    td = seq(inputs())
    assert list(seq.get_dist(inputs()).keys()) == ["a", "b"]
    assert set(seq.log_prob(td).keys()) == {"a_log_prob", "b_log_prob"}


# ------------------------------------------------------------------------ as a collection


def test_slices():
    seq = chain()
    assert type(seq[:1]) is TensorDictSequential and type(seq[2:3]) is TensorDictSequential
    assert type(seq[:2]) is Seq and seq[:2][1] is seq[1]
    assert len(seq) == 4 and [type(module) for module in seq] == [Mod, Prob, Mod, Prob]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_modules_before_the_last():
    part = single().det_part
    assert type(part) is TensorDictSequential and part.out_keys == ["loc"]


def test_a_subsequence():
    part = chain().select_subsequence(out_keys=["a"])
    assert isinstance(part, Seq) and not part.return_composite
    assert (part(inputs())["a"] == 1).all()


def test_editing():
    seq = single()
    seq[1] = normal("loc", "c")
    assert seq.out_keys == ["loc", "c", "c_log_prob"] and seq.log_prob_key == "c_log_prob"
    del seq[0]
    assert seq.in_keys == ["loc"]


def test_edits_that_do_not_fit_are_refused():
    seq = single()
    with pytest.raises(TypeError, match="The final module passed to"):
        seq[1] = plus(1, "loc", "a")
    with pytest.raises(TypeError, match="The final module passed to"):
        del seq[1]
    seq = Seq(normal("x", "a"))
    with pytest.raises(ValueError, match="must consist of zero or more"):
        del seq[0]


def test_ours_a_refused_edit_changes_nothing():
    seq = single()
    with pytest.raises(TypeError):
        del seq[1]
    assert len(seq) == 2 and (seq(inputs())["a"] == 1).all()
    assert seq.out_keys == ["loc", "a", "a_log_prob"]


def test_ours_one_module_may_stand_twice():
    step = plus(1, "x", "x")
    seq = Seq(step, step, normal("x", "a"))
    assert (seq(inputs())["a"] == 2).all() and (seq.get_dist(inputs()).loc == 2).all()


# ------------------------------------------------------------------------ learning with it


def policy(kind="random"):
    net = nn.Sequential(nn.Linear(T, 4), NormalParamExtractor())
    return Seq(
        Mod(net, in_keys=["x"], out_keys=["loc", "scale"]),
        Prob(
            ["loc", "scale"],
            ["a"],
            distribution_class=d.Normal,
            default_interaction_type=kind,
            return_log_prob=True,
        ),
    )


def test_gradients_reach_the_network():
    seq = policy().double()

    def value(x):
        torch.manual_seed(0)
        td = seq(TensorDict(x=x, batch_size=[B]))
        return td["a"], td["a_log_prob"]

    x = torch.randn(B, T, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(value, (x,))
    sum(v.sum() for v in value(x)).backward()
    assert all(p.grad is not None for p in seq.parameters())


def compiled(module, **options):
    """The compiled module; checks of arguments are off, as after a process's first compilation."""
    torch._dynamo.reset()
    d.Distribution.set_default_validate_args(False)
    return torch.compile(module, **{"backend": "eager", "fullgraph": True, **options})


@pytest.mark.parametrize("kind", ["random", "mean", "mode", "deterministic"])
def test_ours_compiled_in_one_graph(kind):
    seq = policy(kind)
    out, expected = compiled(seq)(inputs()), seq(inputs())
    if kind != "random":
        torch.testing.assert_close(out["a"], expected["a"])
    scores = compiled(seq.log_prob)(expected.detach())
    torch.testing.assert_close(scores, expected["a_log_prob"])


def test_ours_compiled_ahead_of_time():
    seq = policy()
    out = compiled(seq, backend="aot_eager")(inputs())
    torch.testing.assert_close(out["a_log_prob"], seq.log_prob(out.copy()))
    out["a"].sum().backward()
    assert seq[0].module[0].weight.grad is not None


def test_ours_compiled_with_several_draws():
    out = compiled(chain())(inputs())
    assert (out["b"] == 2).all() and interaction_type() is None


def test_ours_vmap():
    seq = policy()
    out = torch.vmap(seq, randomness="different")(inputs())
    assert out["a"].shape == (B, 2) and not (out["a"][0] == out["a"][1]).any()


def test_ours_the_page_of_2022():
    from raffia.nn.distributions import NormalParamWrapper
    from raffia.nn.prototype import (
        ProbabilisticTensorDictModule,
        ProbabilisticTensorDictSequential,
    )

    td = TensorDict({"input": torch.randn(3, 4), "hidden": torch.randn(3, 8)}, [3])
    module = Mod(
        NormalParamWrapper(nn.GRUCell(4, 8)),
        in_keys=["input", "hidden"],
        out_keys=["loc", "scale"],
    )
    prob_module = ProbabilisticTensorDictModule(
        in_keys=["loc", "scale"],
        out_keys=["sample"],
        distribution_class=d.Normal,
        return_log_prob=True,
    )
    td_module = ProbabilisticTensorDictSequential(module, prob_module)
    td_module(td)
    for key in ("loc", "scale", "sample", "sample_log_prob"):
        assert td[key].shape == (3, 4)


# ------------------------------------------------------------------------ edits of `.module`


def with_a_value_before():
    """The module before the last one writes what the last one would draw."""
    return Seq(plus(1, "x", "loc"), plus(7, "x", "a"), normal("loc", "a"))


EDITS = {
    "deleted": lambda seq: seq.module.__delitem__(1),
    "replaced": lambda seq: seq.module.__setitem__(1, plus(7, "x", "b")),
    "renamed": lambda seq: setattr(seq[1], "out_keys", ["b"]),
    "in the dict": lambda seq: seq.module._modules.update({"1": plus(7, "x", "b")}),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_sequence_draws_as_its_modules_are_now(edit):
    seq = with_a_value_before()
    assert (seq(inputs())["a"] == 7).all()  # nothing to draw
    EDITS[edit](seq)
    td = seq(inputs())
    assert (td["a"] == 1).all() and torch.equal(td["a_log_prob"], score(td["a"], 1.0))
    assert seq.out_keys == ["loc", *["b"] * (edit != "deleted"), "a", "a_log_prob"]


def test_a_sequence_stops_drawing_when_its_modules_give_the_value():
    seq = with_a_value_before()
    value = seq.module[1]
    del seq.module[1]
    assert (seq(inputs())["a"] == 1).all()
    seq.module.insert(1, value)
    assert (seq(inputs())["a"] == 7).all()


def test_a_sequence_within_a_sequence_that_is_edited():
    inner = TensorDictSequential(plus(1, "x", "loc"), plus(7, "x", "a"))
    seq = Seq(inner, normal("loc", "a"))
    assert (seq(inputs())["a"] == 7).all()
    del inner.module[1]
    assert inner.out_keys == ["loc"] and (seq(inputs())["a"] == 1).all()


# ------------------------------------------------------------------------ mixins


class Bounded(Mod):
    """A module that keeps a bound, as classes do that add a specification to keyed modules."""

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


class Counted:
    """A mixin of no module that counts the constructors."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.count = getattr(self, "count", 0) + 1


class CountedSeq(Counted, Seq):
    pass


@pytest.mark.parametrize("kind", [BoundedSeq, CooperativeSeq, CountedSeq])
def test_mixins_among_the_bases_of_a_probabilistic_sequence(kind):
    seq = kind(plus(1, "x", "loc"), normal("loc", "a"))
    assert getattr(seq, "bound", None) == {BoundedSeq: 2}.get(kind)
    assert kind is not CountedSeq or seq.count == 1
    assert seq.in_keys == ["x"] and seq.out_keys == ["loc", "a", "a_log_prob"]
    td = seq(inputs())
    assert (td["a"] == 1).all() and seq.get_dist(td).loc.shape == (B, T)
    assert torch.equal(seq.log_prob(td), td["a_log_prob"])
    assert not seq.return_composite and len(seq) == 2
    seq.module.insert(1, plus(7, "x", "a"))
    assert (seq(inputs())["a"] == 7).all()
    assert seq.select_out_keys("a").out_keys == ["a"]


@pytest.mark.parametrize("kind", [BoundedSequential, Cooperative])
def test_mixins_among_the_bases_of_a_sequence(kind):
    seq = kind(plus(1, "x", "y"), plus(1, "y", "z"))
    assert seq.bound == (2 if kind is BoundedSequential else None)
    assert (seq.in_keys, seq.out_keys) == (["x"], ["y", "z"])
    assert (seq(inputs())["z"] == 2).all() and seq(x=torch.zeros(1))[1].item() == 2
    seq.module.append(plus(1, "z", "w"))
    assert seq.out_keys == ["y", "z", "w"]
    assert (seq(inputs())["w"] == 3).all()
