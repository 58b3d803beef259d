"""The module that makes a distribution of entries and writes a value of it."""

import copy
import functools
import pickle

import pytest
import torch
from torch import distributions as d

from raffia import TensorDict, lazy_stack
from raffia.nn import (
    CompositeDistribution,
    TensorDictParams,
    set_composite_lp_aggregate,
    set_interaction_type,
    set_skip_existing,
)
from raffia.nn import ProbabilisticTensorDictModule as Prob
from raffia.nn.distributions import Delta
from tests.marks import refusals

from .keyed import compiled

B, T, A = 2, 3, 5


def normal_td(**entries):
    td = TensorDict(loc=torch.arange(6.0).view(B, T), scale=torch.full((B, T), 0.5), batch_size=[B])
    return td.update(entries)


def standard(**entries):
    return TensorDict(loc=torch.zeros(T), scale=torch.ones(T), **entries)


def prob(distribution_class, out="a", keys=("loc", "scale"), **options):
    return Prob(list(keys), [out], distribution_class=distribution_class, **options)


def normal(out="action", **options):
    return prob(d.Normal, out, **options)


def params_td():
    params = dict(
        move=dict(loc=torch.zeros(B, T), scale=torch.ones(B, T)),
        head=dict(word=dict(logits=torch.zeros(B, A))),
    )
    return TensorDict(params=TensorDict(params, batch_size=[B]), batch_size=[B])


MAP = {"move": d.Normal, ("head", "word"): d.Categorical}


def composite(out_keys=None, kwargs=None, **options):
    options.setdefault("return_log_prob", True)
    kwargs = {"distribution_map": MAP, **(kwargs or {})}
    options.update(distribution_class=CompositeDistribution, distribution_kwargs=kwargs)
    return Prob(["params"], out_keys, **options)


def squashed(loc, scale):
    return d.TransformedDistribution(d.Normal(loc, scale), d.TanhTransform())


class Laplace(d.Laplace):
    median = property(lambda self: self.loc)


class NoMean(d.Normal):
    mean = property(lambda self: d.Distribution.mean.fget(self))


class Joint(d.Normal):
    """Draws and scores in one call."""

    def rsample_and_log_prob(self, shape=()):
        return self.loc + 100, self.loc + 200


class Pair(d.Distribution):
    """An unknown class with two values, a mean and a mode."""

    arg_constraints = {}
    support = d.constraints.real
    mean = property(lambda self: self.loc)
    mode = property(lambda self: self.loc + 1)

    def __init__(self, loc):
        self.loc = loc
        super().__init__(loc.shape, validate_args=False)

    def sample(self, shape=()):
        return self.loc + 1, self.loc + 2

    def log_prob(self, first, second=None):
        return first - second


def paired(*out, **options):
    options |= dict(distribution_class=Pair, default_interaction_type="random")
    return Prob(["loc"], list(out), **options)(TensorDict(loc=torch.zeros(2)))


# --- keys ---------------------------------------------------------------------------------------

PARAMS, WORD = ["params"], ("head", "word")
PARTIAL = functools.partial(CompositeDistribution, distribution_map=MAP)
NORMAL, LP = ["loc", "scale"], {"return_log_prob": True}
KEYS = [  # a module, its inputs and outputs
    (normal(), NORMAL, ["action"]),
    (normal(**LP), NORMAL, ["action", "action_log_prob"]),
    (normal(**LP, log_prob_key="lp"), NORMAL, ["action", "lp"]),
    (normal(**LP, log_prob_keys=("lp",)), NORMAL, ["action", "lp"]),
    (
        Prob({"scale": "sigma", "loc": ("h", "mu")}, ["a"], distribution_class=d.Normal),
        *(["sigma", ("h", "mu")], ["a"]),
    ),
    (Prob(("h", "param"), ("o", "a")), [("h", "param")], [("o", "a")]),
    (Prob(["param"]), ["param"], ["_"]),
    (composite(kwargs={"name_map": {"move": "m"}}, return_log_prob=False), PARAMS, ["m", WORD]),
    (composite(log_prob_keys=("p", ("q", "r"))), PARAMS, ["move", WORD, "p", ("q", "r")]),
    (Prob(PARAMS, ["move", WORD], distribution_class=PARTIAL), PARAMS, ["move", WORD]),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", range(len(KEYS)))
def test_keys(row):
    module, ins, outs = KEYS[row]
    num = len(module.dist_sample_keys)
    assert (module.in_keys, module.out_keys) == (ins, outs) and module.dist_params_keys == ins
    assert outs[:num] == module.dist_sample_keys
    assert not module.return_log_prob or outs[num:] == module.log_prob_keys
    td = params_td() if ins == ["params"] else TensorDict({k: torch.ones(B, T) for k in ins}, [B])
    before = set(td.keys(True, True))
    out = module(td.copy())
    assert set(out.keys(True, True)) == before | set(outs)
    copied = module(td.copy(), tensordict_out=TensorDict(batch_size=[B]))
    assert set(copied.keys(True, True)) == set(outs) and copied.batch_size == (B,)
    names = ["_".join([k] if isinstance(k, str) else k) for k in ins]
    got = module(**dict(zip(names, [td[k] for k in ins], strict=True)))
    assert len(got if isinstance(got, tuple) else [got]) == len([k for k in outs if k != "_"])
    if module.return_log_prob:
        scores = module.log_prob(out)
        if isinstance(scores, torch.Tensor):
            scores = TensorDict({module.log_prob_key: scores}, [B])
        assert set(scores.keys(True, True)) == {*module.log_prob_keys}
        assert all(torch.equal(scores[key], out[key]) for key in module.log_prob_keys)


def test_scores_follow_the_order_of_their_keys():
    everything = normal(return_log_prob=True)
    assert everything.select_out_keys(*everything.out_keys) is everything
    plain = composite()
    traded = composite(log_prob_keys=[*reversed(plain.log_prob_keys)])
    td = plain(params_td())
    scores = traded.log_prob(td)
    assert (scores["head", "word_log_prob"] == td["move_log_prob"]).all()
    assert (scores["move_log_prob"] == td["head", "word_log_prob"]).all()


@pytest.mark.parametrize("name, cls", [("Delta", Delta), ("normal", d.Normal)])
def test_a_class_by_its_name(name, cls):
    assert Prob(["param"], ["a"], distribution_class=name).distribution_class is cls


def test_keywords_in_a_parameter_container_move_with_the_module():
    kwargs = TensorDictParams(TensorDict(scale=torch.ones(())))
    module = prob(d.Normal, keys=["loc"], distribution_kwargs=kwargs)
    assert [name for name, _ in module.named_parameters()] == ["distribution_kwargs.scale"]
    dist = module.to(torch.float64).get_dist(TensorDict(loc=torch.zeros(3, dtype=torch.float64)))
    assert dist.scale.dtype is torch.float64


# --- which value --------------------------------------------------------------------------------


def drawn(make, *shape):
    torch.manual_seed(0)
    return make(normal_td()["loc"], normal_td()["scale"]).rsample(*shape)


def estimated(make):
    return lambda: drawn(make, (7,)).mean(0)


def loc():
    return normal_td()["loc"]


VALUES = [  # a class, the kind of its value, and that value
    (Laplace, "median", loc),
    (Joint, "random", lambda: loc() + 100),
    (Joint, "mean", loc),
    (squashed, "mean", estimated(squashed)),  # without a formula
    (lambda **k: d.Independent(squashed(**k), 1), None, estimated(squashed)),
    (lambda **k: d.Independent(d.Normal(**k), 1), None, loc),
]


@pytest.mark.parametrize("sizes", [None, (4,)])
@pytest.mark.parametrize("row", range(len(VALUES)))
def test_the_value_of_a_kind(row, sizes):
    cls, kind, value = VALUES[row]
    if sizes and kind == "random":
        return
    options = {} if kind is None else {"default_interaction_type": kind}
    module = prob(cls, n_empirical_estimate=7, num_samples=sizes, return_log_prob=True, **options)
    torch.manual_seed(0)
    td = module(normal_td())
    torch.testing.assert_close(td["a"], value().expand(*sizes or (), B, T))
    if kind == "random":
        assert (td["a_log_prob"] == td["loc"] + 200).all()
    else:
        dist = module.get_dist(normal_td())
        torch.testing.assert_close(td["a_log_prob"], dist.log_prob(td["a"]))


def test_other_values_and_kinds():
    with pytest.warns(UserWarning, match="deterministic_sample"):  # it falls back on the mean
        out = prob(Pair, keys=["loc"])(TensorDict(loc=torch.zeros(B)))
    assert not out["a"].any()
    with pytest.warns(UserWarning, match="deterministic_sample"):  # or on draws
        prob(NoMean, n_empirical_estimate=7)(normal_td())
    module, td = normal(default_interaction_type="random"), normal_td()
    with set_interaction_type("mean"):  # it wins over the default
        assert (module(td)["action"] == td["loc"]).all()
        with set_interaction_type(None):
            assert not (module(td)["action"] == td["loc"]).all()
    td = paired("a", "b")
    assert td["a"].tolist() == [1, 1] and td["b"].tolist() == [2, 2]


# --- log-probabilities --------------------------------------------------------------------------


def test_the_log_probability_of_existing_values():
    td = normal_td(action=torch.ones(B, T))
    torch.testing.assert_close(
        normal().log_prob(td), d.Normal(td["loc"], 0.5).log_prob(td["action"])
    )
    other = normal().log_prob(td, dist=d.Normal(torch.zeros(B, T), 1.0))
    torch.testing.assert_close(other, d.Normal(0.0, 1.0).log_prob(torch.ones(B, T)))
    assert list(td.keys()) == ["loc", "scale", "action"]
    for make in (normal().get_dist, normal().build_dist_from_params):
        assert type(make(td)) is d.Normal and make(td).loc is td["loc"]


@pytest.mark.parametrize("key", ["sample_log_prob", "total"])
def test_the_sum_of_the_parts(key):
    td = composite()(params_td())
    with set_composite_lp_aggregate(True):
        module = composite(log_prob_key=key)
        assert module.out_keys == ["move", ("head", "word"), key]
        summed = module(params_td())
        total = module.log_prob(summed)
        plain = normal(return_log_prob=True)
        assert plain.out_keys == ["action", "sample_log_prob"]
        assert plain(normal_td())["sample_log_prob"].shape == (B, T)
        with pytest.raises(RuntimeError, match="set to True but log_prob_keys were passed"):
            normal(log_prob_keys=["lp"])
    expected = td["move_log_prob"].sum(-1) + td["head", "word_log_prob"]
    for got in (summed[key], total):
        torch.testing.assert_close(got, expected)
    assert summed["move_log_prob"].shape == (B, T)  # the parts are written as well


@pytest.mark.parametrize("at_first", [True, False])
def test_the_mode_may_not_change_under_a_module(at_first):
    with set_composite_lp_aggregate(at_first):
        module, plain = normal(return_log_prob=True), normal()
    td = plain(normal_td())
    with set_composite_lp_aggregate(not at_first):
        for ask in (
            lambda: module(td),
            lambda: module.log_prob(td),
            lambda: module.log_prob_key,
            lambda: module.out_keys,
        ):
            with pytest.raises(RuntimeError, match="but the class was instantiated with"):
                ask()
        plain(td)


# --- calling ------------------------------------------------------------------------------------


def test_existing_values_are_drawn_again_unless_skipped():
    existing = torch.full((B, T), 7.0)
    module = normal(return_log_prob=True)
    assert not (module(normal_td(action=existing))["action"] == 7).any()
    with set_skip_existing(True):
        full = normal_td(action=existing, action_log_prob=existing)
        assert (module(full)["action"] == 7).all()
        assert not (module(normal_td(action=existing))["action"] == 7).any()  # the score is missing
    stack = lazy_stack([normal_td()[0], normal_td()[1]])
    out = normal(return_log_prob=True, default_interaction_type="random")(stack)
    assert out is stack and out["action"].shape == (B, T)


@pytest.mark.parametrize("num, sizes", [(torch.Size([4, 2]), (4, 2)), (0, (0,))])
@pytest.mark.parametrize("kind", ["random", "deterministic"])
def test_several_draws_expand_the_container(num, sizes, kind):
    options = dict(num_samples=num, return_log_prob=True, default_interaction_type=kind)
    module, td = normal(**options), normal_td()
    out = module(td)
    assert out.batch_size == (*sizes, B) and "action" not in td
    assert out["action"].shape == out["action_log_prob"].shape == out["loc"].shape == (*sizes, B, T)
    assert module.num_samples == sizes and module(torch.zeros(T), torch.ones(T))[0].shape[-1] == T
    if not num:
        return
    assert (out["action"] == out["action"][:1]).all() == (kind == "deterministic")
    out = composite(**options)(params_td())
    assert out.batch_size == (*sizes, B) and out["head", "word_log_prob"].shape == (*sizes, B)


# --- generators ---------------------------------------------------------------------------------


def randn(seed):
    return torch.randn(T, generator=torch.Generator().manual_seed(seed))


def test_a_seed_or_a_generator_leaves_the_global_one_unchanged():
    for generator in (3, torch.Generator().manual_seed(3)):
        module = normal(generator=generator, default_interaction_type="random")
        before = torch.get_rng_state()
        twin = copy.deepcopy(module)
        first, second = module(standard())["action"], module(standard())["action"]
        assert (first == randn(3)).all() and not (first == second).any()
        assert (twin(standard())["action"] == first).all()
        assert (torch.get_rng_state() == before).all()
    module = normal(generator=3, default_interaction_type="random")
    assert (compiled(module, fullgraph=False)(standard())["action"] == randn(3)).all()


def test_a_seed_or_a_generator_in_an_entry():
    module = normal(generator="seed", default_interaction_type="random")
    td = module(standard(seed=torch.tensor(3)))
    assert (td["action"] == randn(3)).all() and td["seed"] != 3
    second = td["seed"].item()
    assert (module(td)["action"] == randn(second)).all()
    assert module.in_keys == ["loc", "scale"]
    torch.manual_seed(0)
    action = module(standard())["action"]  # without the entry the global generator draws
    torch.manual_seed(0)
    assert (action == d.Normal(torch.zeros(T), 1.0).rsample()).all()
    module = normal(generator=("rng", "g"), default_interaction_type="random")
    td = standard(rng=TensorDict())
    td.set_non_tensor(("rng", "g"), torch.Generator().manual_seed(3))
    first = module(td)["action"]
    assert (first == randn(3)).all() and not (module(td)["action"] == first).any()


# --- errors -------------------------------------------------------------------------------------


def seeded(seed):
    return normal(generator="seed", default_interaction_type="random")(standard(seed=seed))


def head():
    td = normal_td(head=TensorDict(s=-torch.ones(B, T), batch_size=[B]))
    Prob({"loc": "loc", "scale": ("head", "s")}, ["a"], distribution_class=d.Normal)(td)


def overwriting(out, key):
    return lambda: normal(out, return_log_prob=True, log_prob_key=key)


MODE = {"default_interaction_type": "mode"}
ERRORS = [  # a call, its error, and words of its message
    (overwriting(("a", "b"), ("a", "b")), ValueError, "overwrite the sample"),
    (lambda: normal(return_log_prob=True).select_out_keys("action"), RuntimeError, "select_out_k"),
    (lambda: prob("nomal"), ValueError, "none is named 'nomal'. Did you mean \"normal\""),
    (lambda: prob(3), TypeError, "distribution_class must be a class"),
    (lambda: prob(lambda loc, scale: loc)(normal_td()), TypeError, "Expected Distribution, but.*T"),
    (lambda: normal(default_interaction_type="randm"), ValueError, "'randm' is not a valid"),
    (lambda: prob(squashed, **MODE)(normal_td()), NotImplementedError, "mode"),
    (lambda: paired("a", "b", **LP), RuntimeError, "one and only one element"),
    (lambda: paired("a"), ValueError, "returned 2 values for the 1"),
    (lambda: composite(log_prob_key="lp"), RuntimeError, "lp_aggregate is set to `False`"),
    (lambda: normal(log_prob_key="p", log_prob_keys=["q"]), ValueError, "name different keys"),
    (lambda: normal(log_prob_keys=["p", "q"], return_log_prob=True), ValueError, "must have one"),
    (lambda: Prob(["p"], distribution_class=CompositeDistribution), KeyError, "distribution_map"),
    *(
        (lambda g=g: normal(generator=g), TypeError, "generator must be a torch.Generator")
        for g in (3.5, True, torch.tensor(3))
    ),
    (lambda: seeded(torch.arange(3)), ValueError, "3 elements"),
    (lambda: seeded("three"), TypeError, "of type str"),
    (
        *(lambda: prob(d.Normal, keys=["loc", "scal"])(standard(scal=torch.ones(T))), TypeError),
        r"keywords and .* must match.*takes \['loc', 'scale', .*not 'scal'. Did you mean \"scale\"",
    ),
    (lambda: prob(d.Normal, keys=["loc"])(normal_td()), TypeError, "needs 'scale'"),
    (lambda: normal(distribution_kwargs={"loc": 1.0})(normal_td()), TypeError, "given both by"),
    (head, ValueError, r"Module\(Normal\) .* scale from \('head', 's'\): Expected"),
    (lambda: normal()(TensorDict(loc=torch.zeros(B))), ValueError, "scale"),
]


test_errors = refusals(ERRORS)


# --- cached distributions -----------------------------------------------------------------------


def test_ours_a_cached_distribution_is_reused_while_its_entries_are_the_same():
    module = normal(cache_dist=True)
    td = standard()
    dist = module.get_dist(td)
    assert module.get_dist(td.copy()) is dist and normal().get_dist(td) is not dist
    td["loc"].add_(1)  # in place
    moved = module.get_dist(td)
    assert moved is not dist and (moved.loc == td["loc"]).all()
    td["loc"] = td["loc"].clone()
    assert module.get_dist(td) is not moved
    td = TensorDict(loc=torch.ones(3, requires_grad=True) * 2, scale=torch.ones(3))
    module(td)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    assert (twin(td)["action"] == 2).all()
    module = prob(d.Categorical, keys=["logits"], cache_dist=True)
    td = TensorDict(logits=torch.zeros(B, A, requires_grad=True))
    with torch.no_grad():  # its normalised logits have no gradient
        module(td)
    assert module.log_prob(td).requires_grad


# --- transforms of torch ------------------------------------------------------------------------


OF_CLASS = {
    "Normal": (d.Normal, "loc", {"scale": 1.0}),
    "Delta": (Delta, "param", {}),
    "Categorical": (d.Categorical, "logits", {}),
}


@pytest.mark.parametrize("kind", ["random", "mean", "deterministic"])
@pytest.mark.parametrize("name", OF_CLASS)
def test_compiled_in_one_graph_and_vmapped(name, kind):
    scored = (name, kind) != ("Categorical", "mean")  # which is nan
    cls, key, kwargs = OF_CLASS[name]
    options = dict(default_interaction_type=kind, return_log_prob=scored)
    module = prob(cls, keys=[key], distribution_kwargs=kwargs, **options)
    td = TensorDict({key: torch.randn(B, A)}, batch_size=[B])
    expected = module(td.copy())["a"]
    for run in (torch.vmap(module, randomness="different"), compiled(module)):
        out = run(td.copy())
        if kind != "random":
            torch.testing.assert_close(out["a"], expected, equal_nan=True)
        assert ("a_log_prob" in out) == scored and out.batch_size == (B,)


def test_ours_a_composite_is_drawn_and_scored_for_each_member_of_vmap():
    kwargs = {"distribution_map": {"move": d.Normal}}
    module = composite(kwargs=kwargs, default_interaction_type="random")
    out = torch.vmap(module, randomness="different")(params_td().expand(4, B))
    assert out["move"].unique().numel() == 4 * B * T and out["move_log_prob"].shape == (4, B, T)
