"""The module that makes a distribution of entries and writes a value of it."""

import copy
import functools
import pickle
import warnings

import pytest
import torch
from torch import distributions as d

from raffia import TensorDict, lazy_stack
from raffia.nn import (
    CompositeDistribution,
    InteractionType,
    TensorDictParams,
    composite_lp_aggregate,
    set_composite_lp_aggregate,
    set_interaction_type,
    set_skip_existing,
)
from raffia.nn import ProbabilisticTensorDictModule as Prob
from raffia.nn.distributions import Delta, OneHotCategorical

B, T, A = 2, 3, 5


def normal_td(**entries):
    td = TensorDict(loc=torch.arange(6.0).view(B, T), scale=torch.full((B, T), 0.5), batch_size=[B])
    return td.update(entries)


def normal(out="action", **options):
    return Prob(["loc", "scale"], [out], distribution_class=d.Normal, **options)


def params_td():
    params = dict(
        move=dict(loc=torch.zeros(B, T), scale=torch.ones(B, T)),
        head=dict(word=dict(logits=torch.zeros(B, A))),
    )
    return TensorDict(params=TensorDict(params, batch_size=[B]), batch_size=[B])


MAP = {"move": d.Normal, ("head", "word"): d.Categorical}


def composite(out_keys=None, kwargs=None, **options):
    return Prob(
        ["params"],
        out_keys,
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": MAP, **(kwargs or {})},
        **options,
    )


# ------------------------------------------------------------------------ keys


def test_the_last_part_of_a_key_is_the_keyword():
    module = Prob(["loc", ("head", "scale")], ["action"], distribution_class=d.Normal)
    td = TensorDict(loc=torch.ones(B), head=dict(scale=torch.ones(B)), batch_size=[B])
    assert module(td) is td and td["action"].tolist() == [1.0, 1.0]
    assert module.in_keys == ["loc", ("head", "scale")]


def test_a_dict_gives_the_key_of_each_keyword():
    module = Prob({"scale": "sigma", "loc": ("head", "mu")}, ["a"], distribution_class=d.Normal)
    td = TensorDict(sigma=torch.ones(B), head=dict(mu=torch.full((B,), 4.0)), batch_size=[B])
    assert module(td)["a"].tolist() == [4.0, 4.0]
    assert module.in_keys == ["sigma", ("head", "mu")]


@pytest.mark.parametrize("key", ["param", ("head", "param")])
def test_one_key_stands_for_a_list_of_one(key):
    module = Prob(key, ("out", "a"), return_log_prob=True)
    assert module.in_keys == [key]
    assert module.out_keys == [("out", "a"), ("out", "a_log_prob")]


def test_without_a_class_the_value_is_the_input():
    assert Prob(["param"], ["a"])(TensorDict(param=torch.arange(3.0)))["a"].tolist() == [0, 1, 2]


def test_the_keys_that_are_read_and_written():
    module = normal(return_log_prob=True)
    assert module.dist_params_keys == ["loc", "scale"]
    assert module.dist_sample_keys == ["action"]
    assert module.log_prob_keys == ["action_log_prob"] and module.log_prob_key == "action_log_prob"
    assert module.out_keys == ["action", "action_log_prob"]
    assert normal().out_keys == ["action"] and normal().log_prob_key == "action_log_prob"


@pytest.mark.filterwarnings("ignore")
def test_without_out_keys_the_value_stands_at_an_underscore():
    module = Prob(["param"])
    assert module.out_keys == ["_"]
    assert module(TensorDict(param=torch.ones(2)))["_"].tolist() == [1, 1]


def test_outputs_cannot_be_selected_here():
    with pytest.raises(RuntimeError, match="does not support select_out_keys"):
        normal(return_log_prob=True).select_out_keys("action")
    assert normal().select_out_keys("action").out_keys == ["action"]


@pytest.mark.parametrize(
    "name, cls", [("delta", Delta), ("Delta", Delta), ("OneHotCategorical", OneHotCategorical)]
)
def test_a_class_by_its_name(name, cls):
    assert Prob(["param"], ["a"], distribution_class=name).distribution_class is cls


def test_ours_other_names_of_classes():
    named = functools.partial(Prob, ["loc", "scale"], ["a"])
    assert named(distribution_class="normal").distribution_class is d.Normal
    with pytest.raises(ValueError, match="none is named 'nomal'. Did you mean \"normal\""):
        named(distribution_class="nomal")
    with pytest.raises(TypeError, match="distribution_class is a class"):
        named(distribution_class=3)


def test_a_function_makes_the_distribution():
    def independent(loc, width):
        return d.Independent(d.Normal(loc, width), 1)

    module = Prob(
        ["loc"],
        ["a"],
        distribution_class=independent,
        distribution_kwargs={"width": 2.0},
        return_log_prob=True,
    )
    td = module(normal_td())
    torch.testing.assert_close(td["a_log_prob"], d.Normal(td["loc"], 2.0).log_prob(td["a"]).sum(-1))


def test_keywords_in_a_parameter_container_move_with_the_module():
    kwargs = TensorDictParams(TensorDict(scale=torch.ones(())))
    module = Prob(["loc"], ["a"], distribution_class=d.Normal, distribution_kwargs=kwargs)
    assert [name for name, _ in module.named_parameters()] == ["distribution_kwargs.scale"]
    dist = module.to(torch.float64).get_dist(TensorDict(loc=torch.zeros(3, dtype=torch.float64)))
    assert dist.scale.dtype is torch.float64


# ------------------------------------------------------------------------ which value


def test_the_default_is_deterministic():
    module = normal()
    assert module.default_interaction_type is InteractionType.DETERMINISTIC
    td = module(normal_td())
    assert (td["action"] == td["loc"]).all()


@pytest.mark.parametrize("kind", ["random", "RANDOM", InteractionType.RANDOM])
def test_random_draws_are_those_of_the_distribution(kind):
    module, td = normal(default_interaction_type=kind), normal_td()
    torch.manual_seed(0)
    action = module(td)["action"]
    torch.manual_seed(0)
    assert (action == d.Normal(td["loc"], td["scale"]).rsample()).all()


@pytest.mark.parametrize(
    "kind, value", [("mode", 2), ("deterministic", 2), ("random", 2), ("mean", None)]
)
def test_the_values_of_a_categorical(kind, value):
    module = Prob(
        ["logits"], ["a"], distribution_class=d.Categorical, default_interaction_type=kind
    )
    action = module(TensorDict(logits=torch.tensor([[0.0, 0.0, 1e3]])))["a"]
    assert action.isnan().all() if value is None else action.item() == value


@pytest.mark.parametrize("kind, expected", [("mode", 0.0), ("mean", 2.0), ("deterministic", 2.0)])
def test_mode_and_mean_differ(kind, expected):
    module = Prob(["rate"], ["a"], distribution_class=d.Exponential, default_interaction_type=kind)
    assert module(TensorDict(rate=torch.tensor(0.5)))["a"].item() == expected


def test_a_value_that_the_distribution_lacks():
    with pytest.raises(NotImplementedError, match="median"):
        normal(default_interaction_type="median")(normal_td())
    module = Prob(
        ["loc", "scale"],
        ["a"],
        distribution_class=d.LogisticNormal,
        default_interaction_type="mode",
    )
    with pytest.raises(NotImplementedError):
        module(normal_td())


def test_a_median_that_a_class_has():
    class Laplace(d.Laplace):
        median = property(lambda self: self.loc)

    module = Prob(
        ["loc", "scale"], ["a"], distribution_class=Laplace, default_interaction_type="median"
    )
    td = module(normal_td())
    assert (td["a"] == td["loc"]).all()


def test_a_mean_without_formula_is_estimated():
    td = TensorDict(loc=torch.zeros(2), scale=torch.ones(2))
    module = Prob(
        ["loc", "scale"],
        ["a"],
        distribution_class=d.LogisticNormal,
        default_interaction_type="mean",
        n_empirical_estimate=7,
    )
    torch.manual_seed(0)
    mean = module(td)["a"]
    torch.manual_seed(0)
    expected = d.LogisticNormal(td["loc"], td["scale"]).rsample((7,)).mean(0)
    torch.testing.assert_close(mean, expected)


def squashed(loc, scale):
    return d.TransformedDistribution(d.Normal(loc, scale), d.TanhTransform())


@pytest.mark.parametrize("make", [squashed, lambda **k: d.Independent(squashed(**k), 1)])
@pytest.mark.parametrize("sizes", [(), (4,)])
def test_a_deterministic_value_that_is_a_mean_without_formula_is_estimated(make, sizes):
    module = Prob(
        ["loc", "scale"],
        ["a"],
        distribution_class=make,
        n_empirical_estimate=7,
        num_samples=sizes or None,
    )
    torch.manual_seed(0)
    value = module(normal_td())["a"]
    torch.manual_seed(0)
    td = normal_td()
    expected = squashed(td["loc"], td["scale"]).rsample((7,)).mean(0)
    torch.testing.assert_close(value, expected.expand(*sizes, B, T))


def test_a_mode_without_formula_is_not_estimated():
    module = Prob(
        ["loc", "scale"], ["a"], distribution_class=squashed, default_interaction_type="mode"
    )
    with pytest.raises(NotImplementedError, match="mode"):
        module(normal_td())


def test_an_unknown_class_without_a_mean_warns_before_it_is_estimated():
    class Odd(d.Normal):
        mean = property(lambda self: d.Distribution.mean.fget(self))

    module = Prob(["loc", "scale"], ["a"], distribution_class=Odd, n_empirical_estimate=7)
    with pytest.warns(UserWarning, match="deterministic_sample"):
        assert module(normal_td())["a"].shape == (B, T)


def test_the_block_wins_over_the_default():
    module, td = normal(default_interaction_type="random"), normal_td()
    with set_interaction_type("mean"):
        assert (module(td)["action"] == td["loc"]).all()
        with set_interaction_type(None):
            assert not (module(td)["action"] == td["loc"]).all()


def test_an_unknown_class_says_what_it_falls_back_on():
    class Odd(d.Distribution):
        arg_constraints = {}
        support = d.constraints.real
        mean = property(lambda self: self.loc)
        mode = property(lambda self: self.loc + 1)

        def __init__(self, loc):
            self.loc = loc
            super().__init__(loc.shape, validate_args=False)

    module = Prob(["loc"], ["a"], distribution_class=Odd)
    with pytest.warns(UserWarning, match="deterministic_sample"):
        assert module(TensorDict(loc=torch.zeros(2)))["a"].tolist() == [0, 0]


def test_several_values():
    class Pair(d.Distribution):
        arg_constraints = {}

        def __init__(self, loc):
            self.loc = loc
            super().__init__(loc.shape, validate_args=False)

        def sample(self, shape=()):
            return self.loc + 1, self.loc + 2

        def log_prob(self, first, second=None):
            return first - second

    options = dict(distribution_class=Pair, default_interaction_type="random")
    td = Prob(["loc"], ["a", "b"], **options)(TensorDict(loc=torch.zeros(2)))
    assert td["a"].tolist() == [1, 1] and td["b"].tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="one and only one element"):
        Prob(["loc"], ["a", "b"], return_log_prob=True, **options)(td)
    with pytest.raises(ValueError):
        Prob(["loc"], ["a"], **options)(td)


def test_a_distribution_that_scores_what_it_draws_is_asked_once():
    class Joint(d.Normal):
        def rsample_and_log_prob(self, shape=()):
            return self.loc + 100, self.loc + 200

    def module(**options):
        return Prob(
            ["loc", "scale"], ["a"], distribution_class=Joint, return_log_prob=True, **options
        )

    td = module(default_interaction_type="random")(normal_td())
    assert (td["a"] == td["loc"] + 100).all() and (td["a_log_prob"] == td["loc"] + 200).all()
    td = module(default_interaction_type="mean")(normal_td())
    assert (td["a_log_prob"] == d.Normal(td["loc"], td["scale"]).log_prob(td["loc"])).all()


# ------------------------------------------------------------------------ log-probabilities


def test_the_log_probability_of_the_draw():
    td = normal(default_interaction_type="random", return_log_prob=True)(normal_td())
    expected = (
        -0.5 * ((td["action"] - td["loc"]) / 0.5) ** 2 - 0.5 * torch.tensor(torch.pi / 2).log()
    )
    torch.testing.assert_close(td["action_log_prob"], expected)


def test_log_prob_of_what_is_there():
    module, td = normal(), normal_td(action=torch.ones(B, T))
    expected = d.Normal(td["loc"], td["scale"]).log_prob(td["action"])
    assert (module.log_prob(td) == expected).all()
    other = module.log_prob(td, dist=d.Normal(torch.zeros(B, T), 1.0))
    torch.testing.assert_close(other, d.Normal(0.0, 1.0).log_prob(torch.ones(B, T)))
    assert "action_log_prob" not in td


def test_get_dist():
    td = normal_td()
    for make in (normal().get_dist, normal().build_dist_from_params):
        dist = make(td)
        assert type(dist) is d.Normal and dist.loc is td["loc"]
    assert list(td.keys()) == ["loc", "scale"]


@pytest.mark.parametrize("custom", [{"log_prob_key": "lp"}, {"log_prob_keys": ["lp"]}])
def test_another_key_for_the_log_probability(custom):
    module = normal(return_log_prob=True, **custom)
    assert module.out_keys == ["action", "lp"]
    assert module(normal_td())["lp"].shape == (B, T)


@pytest.mark.parametrize(
    "out, key", [("a", "a"), ("a", ("a", "b")), (("a", "b"), "a"), (("a", "b"), ("a", "b"))]
)
def test_a_log_probability_may_not_overwrite_the_sample(out, key):
    with pytest.raises(ValueError, match="overwrite the sample"):
        normal(out, return_log_prob=True, log_prob_key=key)


def test_one_key_for_several_values_needs_the_sum():
    with pytest.raises(RuntimeError, match="composite_lp_aggregate is set to `False`"):
        composite(return_log_prob=True, log_prob_key="lp")
    with pytest.raises(RuntimeError, match="one and only one element"):
        composite(return_log_prob=True).log_prob_key  # noqa: B018


def test_ours_keys_that_contradict_each_other():
    with pytest.raises(ValueError, match="name different keys"):
        normal(log_prob_key="p", log_prob_keys=["q"])
    with pytest.raises(ValueError, match="must be one for each sampled key"):
        normal(log_prob_keys=["p", "q"], return_log_prob=True)


def test_while_the_parts_are_summed_there_is_one_key():
    with set_composite_lp_aggregate(True):
        module = normal(return_log_prob=True)
        assert module.out_keys == ["action", "sample_log_prob"]
        assert module(normal_td())["sample_log_prob"].shape == (B, T)
        assert normal(return_log_prob=True, log_prob_key="lp").log_prob_keys == ["lp"]
        with pytest.raises(RuntimeError, match="set to True but log_prob_keys were passed"):
            normal(log_prob_keys=["lp"])


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
            lambda: module.log_prob_keys,
            lambda: module.out_keys,
        ):
            with pytest.raises(RuntimeError, match="but the class was instantiated with"):
                ask()
        plain(td)
    assert composite_lp_aggregate() is False


# ------------------------------------------------------------------------ composite


def test_the_values_of_a_composite():
    td = composite(return_log_prob=True)(params_td())
    assert td["move"].shape == (B, T) and td["head", "word"].shape == (B,)
    assert td["move_log_prob"].shape == (B, T)
    assert td["head", "word_log_prob"].shape == (B,)
    module = composite(return_log_prob=True)
    assert module.dist_sample_keys == ["move", ("head", "word")]
    assert module.log_prob_keys == ["move_log_prob", ("head", "word_log_prob")]
    scores = module.log_prob(td)
    assert (scores["move_log_prob"] == td["move_log_prob"]).all()
    assert set(scores.keys(True, True)) == {"move_log_prob", ("head", "word_log_prob")}


def test_a_name_map_names_the_values():
    module = composite(kwargs={"name_map": {"move": "m", ("head", "word"): ("h", "w")}})
    assert module.out_keys == ["m", ("h", "w")]
    assert module(params_td())["h", "w"].shape == (B,)


def test_other_keys_for_the_log_probabilities_of_a_composite():
    module = composite(return_log_prob=True, log_prob_keys=["p", ("q", "r")])
    td = module(params_td())
    assert td["p"].shape == (B, T) and td["q", "r"].shape == (B,)
    assert "move_log_prob" not in td
    assert set(module.log_prob(td).keys(True, True)) == {"p", ("q", "r")}


def test_ours_the_keys_of_log_probabilities_may_trade_places():
    plain = composite(return_log_prob=True)
    traded = composite(return_log_prob=True, log_prob_keys=[*reversed(plain.log_prob_keys)])
    td = plain(params_td())
    scores = traded.log_prob(td)
    assert (scores["head", "word_log_prob"] == td["move_log_prob"]).all()
    assert (scores["move_log_prob"] == td["head", "word_log_prob"]).all()


def test_a_function_that_makes_a_composite():
    make = functools.partial(CompositeDistribution, distribution_map=MAP)
    module = Prob(["params"], ["move", ("head", "word")], distribution_class=make)
    assert module(params_td())["move"].shape == (B, T)


@pytest.mark.parametrize("key", ["sample_log_prob", "total"])
def test_the_sum_of_a_composite(key):
    td = composite(return_log_prob=True)(params_td())
    with set_composite_lp_aggregate(True):
        module = composite(return_log_prob=True, log_prob_key=key)
        assert module.out_keys == ["move", ("head", "word"), key]
        summed = module(params_td())
        total = module.log_prob(summed)
    expected = td["move_log_prob"].sum(-1) + td["head", "word_log_prob"]
    torch.testing.assert_close(summed[key], expected)
    torch.testing.assert_close(total, expected)
    assert summed["move_log_prob"].shape == (B, T)  # the parts are written as well


def test_a_composite_needs_its_map():
    with pytest.raises(KeyError, match="distribution_map"):
        Prob(["params"], distribution_class=CompositeDistribution)


# ------------------------------------------------------------------------ calling


def test_tensors_instead_of_a_container():
    loc, scale = torch.ones(T), torch.ones(T)
    module = normal(return_log_prob=True)
    for action, log_prob in (
        module(loc, scale),
        module(loc=loc, scale=scale),
        module(loc, scale=scale),
    ):
        assert (action == 1).all() and log_prob.shape == (T,)
    nested = Prob({"loc": ("h", "mu"), "scale": "s"}, ["a"], distribution_class=d.Normal)
    assert (nested(h_mu=loc, s=scale) == 1).all()
    assert len(composite(return_log_prob=True)(params=params_td()["params"])) == 4


def test_another_container_takes_the_outputs():
    td, out = normal_td(), TensorDict(batch_size=[B])
    assert normal(return_log_prob=True)(td, tensordict_out=out) is out
    assert set(out.keys()) == {"action", "action_log_prob"} and set(td.keys()) == {"loc", "scale"}


def test_what_is_there_is_drawn_anew_unless_it_is_skipped():
    there = torch.full((B, T), 7.0)
    module = normal(return_log_prob=True)
    assert not (module(normal_td(action=there))["action"] == 7).any()
    with set_skip_existing(True):
        full = normal_td(action=there, action_log_prob=there)
        assert (module(full)["action"] == 7).all()
        assert not (module(normal_td(action=there))["action"] == 7).any()  # the score is missing


@pytest.mark.parametrize("num, sizes", [(4, (4,)), (torch.Size([4, 2]), (4, 2)), (0, (0,))])
@pytest.mark.parametrize("kind", ["random", "deterministic"])
def test_several_draws_expand_the_container(num, sizes, kind):
    module = normal(num_samples=num, return_log_prob=True, default_interaction_type=kind)
    td = normal_td()
    out = module(td)
    assert out.batch_size == (*sizes, B) and "action" not in td
    assert out["action"].shape == out["action_log_prob"].shape == out["loc"].shape == (*sizes, B, T)
    assert module.num_samples == torch.Size(sizes)
    if num:
        repeated = (out["action"] == out["action"][:1]).all()
        assert repeated == (kind == "deterministic")


def test_several_draws_of_a_composite():
    out = composite(num_samples=4, return_log_prob=True, default_interaction_type="random")(
        params_td()
    )
    assert out.batch_size == (4, B) and out["head", "word_log_prob"].shape == (4, B)


def test_several_draws_for_tensors():
    assert normal(num_samples=4)(torch.zeros(T), torch.ones(T)).shape == (4, T)


def test_a_lazy_stack():
    stack = lazy_stack([normal_td()[0], normal_td()[1]])
    out = normal(return_log_prob=True)(stack)
    assert out is stack and out["action"].shape == (B, T)


def test_it_can_be_copied():
    module = normal(generator=3, default_interaction_type="random", return_log_prob=True)
    twin = copy.deepcopy(module)
    assert (module(normal_td())["action"] == twin(normal_td())["action"]).all()


@pytest.mark.parametrize("kind", [list, tuple])
def test_log_prob_keys_are_several_keys_in_a_list_or_tuple(kind):
    module = composite(return_log_prob=True, log_prob_keys=kind(["a_lp", ("b", "lp")]))
    assert module.log_prob_keys == ["a_lp", ("b", "lp")]
    one = normal(return_log_prob=True, log_prob_keys=kind(["lp"]))
    assert one.out_keys[-1] == "lp" and one.log_prob_key == "lp"


def test_options_may_be_changed_later():
    module = normal()
    module.return_log_prob = True
    assert module.out_keys == ["action", "action_log_prob"]
    assert "action_log_prob" in module(normal_td())


def test_ours_options_are_read_as_the_constructor_reads_them():
    module = normal()
    module.default_interaction_type, module.num_samples = "random", 4
    assert module.default_interaction_type is InteractionType.RANDOM
    assert module(normal_td()).batch_size == (4, B)


# ------------------------------------------------------------------------ generators


def randn(seed):
    return torch.randn(T, generator=torch.Generator().manual_seed(seed))


def standard(**entries):
    return TensorDict(loc=torch.zeros(T), scale=torch.ones(T), **entries)


def test_a_seed_or_a_generator():
    for generator in (3, torch.Generator().manual_seed(3)):
        module = normal(generator=generator, default_interaction_type="random")
        first, second = module(standard())["action"], module(standard())["action"]
        assert (first == randn(3)).all() and not (first == second).any()


def test_the_global_generator_stays_as_it_is():
    module = normal(generator=3, default_interaction_type="random")
    before = torch.get_rng_state()
    module(standard())
    assert (torch.get_rng_state() == before).all()


def test_a_seed_in_an_entry_is_replaced():
    module = normal(generator="seed", default_interaction_type="random")
    td = module(standard(seed=torch.tensor(3)))
    assert (td["action"] == randn(3)).all() and td["seed"] != 3
    second = td["seed"].item()
    assert (module(td)["action"] == randn(second)).all()
    assert module.in_keys == ["loc", "scale"]


def test_a_generator_in_an_entry():
    module = normal(generator=("rng", "g"), default_interaction_type="random")
    td = standard(rng=TensorDict())
    td.set_non_tensor(("rng", "g"), torch.Generator().manual_seed(3))
    first = module(td)["action"]
    assert (first == randn(3)).all() and not (module(td)["action"] == first).any()


def test_without_the_entry_the_global_generator_draws():
    module = normal(generator="seed", default_interaction_type="random")
    torch.manual_seed(0)
    action = module(standard())["action"]
    torch.manual_seed(0)
    assert (action == d.Normal(torch.zeros(T), 1.0).rsample()).all()


@pytest.mark.parametrize("wrong", [3.5, True, torch.tensor(3)])
def test_what_is_no_generator(wrong):
    with pytest.raises(TypeError, match="generator must be a torch.Generator"):
        normal(generator=wrong)


def test_what_is_no_seed():
    module = normal(generator="seed", default_interaction_type="random")
    with pytest.raises(ValueError, match="3 elements"):
        module(standard(seed=torch.arange(3)))
    with pytest.raises(TypeError, match="of type str"):
        module(standard(seed="three"))


def test_a_generator_for_a_categorical():
    def draw():
        module = Prob(
            ["logits"],
            ["a"],
            distribution_class=d.Categorical,
            default_interaction_type="random",
            generator=3,
        )
        return module(TensorDict(logits=torch.zeros(100, A)))["a"]

    assert (draw() == draw()).all() and len(draw().unique()) == A


# ------------------------------------------------------------------------ errors


def test_a_wrong_keyword():
    module = Prob(["loc", "sigma"], ["a"], distribution_class=d.Normal)
    td = TensorDict(loc=torch.zeros(B), sigma=torch.ones(B))
    with pytest.raises(TypeError, match="distribution keywords and tensordict keys .* must match"):
        module(td)
    assert "a" not in td


def test_ours_a_wrong_keyword_names_those_that_the_class_takes():
    module = Prob(["loc", "scal"], ["a"], distribution_class=d.Normal)
    with pytest.raises(
        TypeError, match=r"takes \['loc', 'scale', .*not 'scal'. Did you mean \"scale\""
    ):
        module(TensorDict(loc=torch.zeros(B), scal=torch.ones(B)))
    with pytest.raises(TypeError, match="needs 'scale'"):
        Prob(["loc"], ["a"], distribution_class=d.Normal)(normal_td())
    with pytest.raises(TypeError, match="given by in_keys and by distribution_kwargs"):
        normal(distribution_kwargs={"loc": 1.0})(normal_td())


def test_a_parameter_out_of_its_domain():
    with pytest.raises(ValueError, match="Expected parameter scale"):
        normal()(normal_td(scale=-torch.ones(B, T)))
    no_check = normal(distribution_kwargs={"validate_args": False})
    no_check(normal_td(scale=-torch.ones(B, T)))


def test_ours_a_parameter_out_of_its_domain_names_module_class_and_key():
    module = Prob({"loc": "loc", "scale": ("head", "s")}, ["a"], distribution_class=d.Normal)
    td = normal_td(head=TensorDict(s=-torch.ones(B, T), batch_size=[B]))
    with pytest.raises(
        ValueError, match=r"Module\(Normal\) .* scale from \('head', 's'\): Expected"
    ):
        module(td)


def test_a_missing_entry():
    with pytest.raises(ValueError):
        normal()(TensorDict(loc=torch.zeros(B)))
    with pytest.raises(ValueError):
        normal().log_prob(normal_td())


def test_ours_a_missing_entry_is_named():
    with pytest.raises(KeyError, match="reads 'scale'. Did you mean \"scales\""):
        normal()(TensorDict(loc=torch.zeros(B), scales=torch.ones(B)))
    with pytest.raises(KeyError, match="reads 'action'. Did you mean \"actions\""):
        normal().log_prob(normal_td(actions=torch.zeros(B, T)))


def test_an_unknown_interaction_type():
    with pytest.raises(ValueError, match="'randm' is not a valid InteractionType"):
        normal(default_interaction_type="randm")


def test_ours_a_cached_distribution_is_given_again_while_its_entries_are_the_same():
    module = normal(cache_dist=True)
    td = standard()
    dist = module.get_dist(td)
    assert module.get_dist(td.copy()) is dist and normal().get_dist(td) is not dist
    td["loc"].add_(1)  # in place
    moved = module.get_dist(td)
    assert moved is not dist and (moved.loc == td["loc"]).all()
    td["loc"] = td["loc"].clone()
    assert module.get_dist(td) is not moved
    assert (module(td)["action"] == td["loc"]).all()


def test_ours_a_module_that_caches_can_be_copied_and_pickled():
    module = normal(cache_dist=True)
    td = TensorDict(loc=torch.ones(3, requires_grad=True) * 2, scale=torch.ones(3))
    module(td)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    assert (twin(td)["action"] == 2).all()


def test_ours_what_is_no_distribution_is_refused():
    module = Prob(["loc"], ["a"], distribution_class=lambda loc: loc)
    with pytest.raises(TypeError, match="Expected Distribution, but got.*Tensor"):
        module(TensorDict(loc=torch.ones(3)))


# ------------------------------------------------------------------------ torch's transforms


def test_gradients_flow_through_draw_and_score():
    def value(loc, scale):
        torch.manual_seed(0)
        module = normal(default_interaction_type="random", return_log_prob=True)
        td = module(TensorDict(loc=loc, scale=scale))
        return td["action"], td["action_log_prob"]

    loc = torch.randn(T, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(T, dtype=torch.float64).add(0.5).requires_grad_()
    assert torch.autograd.gradcheck(value, (loc, scale))


def compiled(module, **options):
    """The compiled module; checks of arguments are off, as after a process's first compilation."""
    torch._dynamo.reset()
    d.Distribution.set_default_validate_args(False)
    return torch.compile(module, **{"backend": "eager", "fullgraph": True, **options})


KINDS = ["random", "mean", "mode", "deterministic"]


def of_class(name, **options):
    key = {"Normal": "loc", "Delta": "param", "Categorical": "logits"}[name]
    cls = {"Normal": d.Normal, "Delta": Delta, "Categorical": d.Categorical}[name]
    kwargs = {"scale": 1.0} if name == "Normal" else {}
    module = Prob([key], ["a"], distribution_class=cls, distribution_kwargs=kwargs, **options)
    return module, TensorDict({key: torch.randn(B, A)}, batch_size=[B])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["Normal", "Delta", "Categorical"])
def test_ours_compiled_in_one_graph(name, kind):
    scored = (name, kind) != ("Categorical", "mean")  # which is nan
    module, td = of_class(name, default_interaction_type=kind, return_log_prob=scored)
    out = compiled(module)(td.copy())
    if kind != "random":
        torch.testing.assert_close(out["a"], module(td.copy())["a"], equal_nan=True)
    assert ("a_log_prob" in out) == scored


def test_ours_a_compiled_module_heeds_its_generator():
    module = normal(generator=3, default_interaction_type="random")
    assert (compiled(module, fullgraph=False)(standard())["action"] == randn(3)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["Normal", "Delta", "Categorical"])
def test_ours_vmap(name, kind):
    scored = (name, kind) != ("Categorical", "mean")
    module, td = of_class(name, default_interaction_type=kind, return_log_prob=scored)
    out = torch.vmap(module, randomness="different")(td.copy())
    if kind != "random":
        torch.testing.assert_close(out["a"], module(td.copy())["a"], equal_nan=True)
    assert out.batch_size == (B,)


def test_ours_members_of_a_vmap_draw_their_own_noise():
    module = Prob(["loc", "scale"], ["a"], distribution_class=d.Normal)
    td = TensorDict(loc=torch.zeros(B, T), scale=torch.ones(B, T), batch_size=[B])
    with set_interaction_type("random"):
        one = torch.vmap(module, randomness="different")(td.copy())["a"]
        same = torch.vmap(module, randomness="same")(td.copy())["a"]
        with pytest.raises(RuntimeError, match="randomness"):
            torch.vmap(module)(td.copy())
    assert not (one[0] == one[1]).any() and (same[0] == same[1]).all()


def test_nothing_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        normal(return_log_prob=True, default_interaction_type="random")(normal_td())


def test_ours_a_keyword_that_one_hot_categorical_does_not_take():
    module = Prob(["logit"], ["a"], distribution_class="onehotcategorical")
    with pytest.raises(TypeError, match="must match.*OneHotCategorical takes .*'logits'"):
        module(TensorDict(logit=torch.ones(3)))
