"""Composite distributions: against torch.distributions, sums by hand, and what mistakes say."""

import copy
import math
import threading
from collections.abc import Mapping

import pytest
import torch
from torch import distributions as d

from raffia import TensorDict
from raffia.nn import composite_lp_aggregate, set_composite_lp_aggregate
from raffia.nn.distributions import CompositeDistribution

B, T, A = 2, 3, 5
NAMES = {"move": d.Normal, ("head", "speak"): d.Categorical}


@pytest.fixture(autouse=True)
def fixed_draws():
    torch.manual_seed(0)


def parameters(batch_size=(B,)):
    return TensorDict(
        {
            "move": {"loc": torch.randn(*batch_size, T), "scale": torch.rand(*batch_size, T) + 0.1},
            ("head", "speak"): {"logits": torch.randn(*batch_size, A)},
        },
        batch_size,
    )


def normals(**kwargs):
    """Two normals over the batch alone."""
    params = TensorDict(
        x=dict(loc=torch.tensor([0.0, 1.0]), scale=torch.tensor([1.0, 2.0])),
        y=dict(loc=torch.tensor([2.0, 3.0]), scale=torch.tensor([0.5, 1.0])),
        batch_size=[B],
    )
    return CompositeDistribution(params, {"x": d.Normal, "y": d.Normal}, **kwargs)


def of(**dists):
    batch_size = next(iter(dists.values())).batch_shape[:1]
    return CompositeDistribution.from_distributions(TensorDict(batch_size=batch_size), dists)


def deep_keys(td):
    return set(td.keys(True, True))


# What it is


def test_is_a_distribution_and_a_mapping():
    dist = CompositeDistribution(parameters(), NAMES)
    assert isinstance(dist, d.Distribution) and isinstance(dist, Mapping)
    assert list(dist) == ["move", ("head", "speak")] and len(dist) == 2
    assert isinstance(dist["move"], d.Normal) and isinstance(dist["head", "speak"], d.Categorical)
    assert dist.dists["move"] is dist["move"]
    assert "move" in dist and "head" not in dist and dist.get("head") is None
    assert dist.batch_shape == torch.Size([B]) and dist.event_shape == torch.Size([])
    assert not dist.has_rsample  # a Categorical has none


def test_repr_names_the_members():
    assert repr(of(go=d.Bernoulli(torch.full((B,), 0.5)))) == (
        "CompositeDistribution({'go': Bernoulli(probs: torch.Size([2]))})"
    )


def test_members_get_their_parameters():
    params = parameters()
    dist = CompositeDistribution(params, NAMES)
    torch.testing.assert_close(dist["move"].loc, params["move", "loc"])
    torch.testing.assert_close(dist["move"].scale, params["move", "scale"])
    expected = d.Categorical(logits=params["head", "speak", "logits"])
    torch.testing.assert_close(dist["head", "speak"].logits, expected.logits)


def test_from_distributions_keeps_the_instances():
    go = d.Bernoulli(torch.full((B,), 0.5))
    dist = CompositeDistribution.from_distributions(
        TensorDict(batch_size=[B]), {("n", ("go",)): go}, log_prob_key="lp", entropy_key="h"
    )
    assert dist["n", "go"] is go and type(dist) is CompositeDistribution
    assert (dist.log_prob_key, dist.entropy_key) == ("lp", "h")


def test_only_the_names_of_the_map_are_built():
    assert list(CompositeDistribution(parameters(), {"move": d.Normal})) == ["move"]


def test_a_function_may_build_a_member():
    def build(loc, scale):
        return d.Independent(d.Normal(loc, scale), 1)

    dist = CompositeDistribution(parameters(), {"move": build})
    assert dist.log_prob(dist.sample())["move_log_prob"].shape == (B,)


def test_names_of_the_map_may_be_nested_tuples():
    dist = CompositeDistribution(
        parameters(), {("move",): d.Normal, ("head", ("speak",)): d.Categorical}
    )
    assert list(dist) == ["move", ("head", "speak")]


def test_names_of_the_map_may_be_nested_dicts_ours():
    dist = CompositeDistribution(parameters(), {"head": {"speak": d.Categorical}})
    assert list(dist) == [("head", "speak")]
    again = CompositeDistribution.from_distributions(
        TensorDict(batch_size=[B]), {"head": {"speak": dist["head", "speak"]}}
    )
    assert list(again) == [("head", "speak")]


def test_a_composite_is_a_member_not_a_nested_name():
    inner = normals()
    dist = CompositeDistribution.from_distributions(TensorDict(batch_size=[B]), {"in": inner})
    assert dist["in"] is inner
    assert deep_keys(dist.sample()) == {("in", "x"), ("in", "y")}
    assert deep_keys(dist.log_prob(dist.sample())) == {
        ("in_log_prob", "x_log_prob"),
        ("in_log_prob", "y_log_prob"),
    }
    assert deep_keys(dist.deterministic_sample) == {("in", "x"), ("in", "y")}


def test_sums_reach_into_a_nested_composite_ours():
    dist = of(a=normals(), b=d.Normal(torch.zeros(B), torch.ones(B)))
    sample = dist.sample()
    scores = dist.log_prob_composite(sample, include_sum=True)
    by_hand = sum(scores.exclude("sample_log_prob").values(True, True))
    torch.testing.assert_close(scores["sample_log_prob"], by_hand)
    with set_composite_lp_aggregate(True):
        torch.testing.assert_close(dist.log_prob(sample), by_hand)


def test_a_deep_copy_is_a_composite():
    dist = normals()
    twin = copy.deepcopy(dist)
    assert twin["x"] is not dist["x"] and list(twin) == list(dist)


# name_map and extra_kwargs


def test_name_map_moves_sample_log_prob_and_entropy():
    dist = CompositeDistribution(
        parameters(), NAMES, name_map={"move": ("act", "m"), ("head", "speak"): "s"}
    )
    assert list(dist) == [("act", "m"), "s"]
    sample = dist.sample()
    assert deep_keys(sample) == {("act", "m"), "s"}
    assert deep_keys(dist.log_prob(sample)) == {("act", "m_log_prob"), "s_log_prob"}
    assert deep_keys(dist.entropy()) == {("act", "m_entropy"), "s_entropy"}


def test_name_map_may_be_partial_and_speak_of_others():
    dist = CompositeDistribution(parameters(), NAMES, name_map={("move",): "m", "other": "o"})
    assert list(dist) == ["m", ("head", "speak")]
    dist = CompositeDistribution.from_distributions(
        TensorDict(batch_size=[B]), dict(normals()), name_map={"x": ("z", "x"), "other": "o"}
    )
    assert list(dist) == [("z", "x"), "y"]


def test_name_map_may_be_nested_dicts_ours():
    dist = CompositeDistribution(parameters(), NAMES, name_map={"head": {"speak": "s"}})
    assert list(dist) == ["move", "s"]


def test_extra_kwargs_reach_their_member():
    params = TensorDict(
        {"a": {"loc": torch.zeros(B)}, ("n", "b"): {"loc": torch.zeros(B)}}, batch_size=[B]
    )
    dist = CompositeDistribution(
        params,
        {"a": d.Normal, ("n", "b"): d.Normal},
        extra_kwargs={"a": {"scale": 2.0}, ("n", "b"): {"scale": 3.0}},
    )
    assert dist["a"].scale.tolist() == [2.0, 2.0] and dist["n", "b"].scale.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("extra", [{"n": {"b": {"scale": 3.0}}}, {("n", ("b",)): {"scale": 3.0}}])
def test_extra_kwargs_may_be_nested_ours(extra):
    params = TensorDict(n=dict(b=dict(loc=torch.zeros(B))), batch_size=[B])
    dist = CompositeDistribution(params, {("n", "b"): d.Normal}, extra_kwargs=extra)
    assert dist["n", "b"].scale.tolist() == [3.0, 3.0]


# Values


@pytest.mark.parametrize("shape", [None, (), (4,), [4], torch.Size([4, 7])])
def test_sample_has_the_shape_in_front_of_the_batch(shape):
    sample = CompositeDistribution(parameters(), NAMES).sample(shape)
    lead = torch.Size(shape or ())
    assert sample.batch_size == lead + (B,)
    assert sample["head"].batch_size == lead + (B,)
    assert sample["move"].shape == lead + (B, T)
    assert sample["head", "speak"].shape == lead + (B,)
    assert not sample.is_locked and sample.device is None


def test_sample_is_what_the_members_draw():
    dist = CompositeDistribution(parameters(), NAMES)
    torch.manual_seed(1)
    sample = dist.sample((4,))
    torch.manual_seed(1)
    torch.testing.assert_close(sample["move"], dist["move"].sample((4,)))
    torch.testing.assert_close(sample["head", "speak"], dist["head", "speak"].sample((4,)))


def test_gradients_flow_through_rsample_and_not_through_sample():
    loc = torch.zeros(B, requires_grad=True)
    dist = of(x=d.Normal(loc, torch.ones(B)))
    assert not dist.sample()["x"].requires_grad
    dist.rsample((4,))["x"].sum().backward()
    assert loc.grad.tolist() == [4.0, 4.0]


def test_gradcheck_through_rsample_and_log_prob():
    loc, scale = torch.randn(B, T).double(), torch.rand(B, T).double() + 0.5
    given = TensorDict(x=torch.randn(B, T).double(), batch_size=[B])

    def score(loc, scale):
        params = TensorDict(x=dict(loc=loc, scale=scale), batch_size=[B])
        dist = CompositeDistribution(params, {"x": d.Laplace})
        torch.manual_seed(0)
        sample, scores = dist.rsample_and_log_prob((2,))
        return sample["x"], scores["x_log_prob"], dist.log_prob(given)["x_log_prob"]

    assert torch.autograd.gradcheck(score, (loc.requires_grad_(), scale.requires_grad_()))


def test_mode_mean_and_deterministic_sample_ask_each_member():
    dist = of(
        k=d.Categorical(probs=torch.tensor([[0.1, 0.9], [0.8, 0.2]])),
        g=d.Gamma(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0])),
    )
    assert dist.mode["k"].tolist() == [1, 0] and dist.mode["g"].tolist() == [1.0, 1.0]
    assert dist.mean["k"].isnan().all() and dist.mean["g"].tolist() == [2.0, 1.5]
    value = dist.deterministic_sample
    assert value["k"].tolist() == [1, 0] and value["g"].tolist() == [2.0, 1.5]
    assert value.batch_size == dist.mode.batch_size == dist.mean.batch_size == (B,)


def test_expand_repeats_the_members_ours():
    dist = CompositeDistribution(parameters(), NAMES, log_prob_key="lp", entropy_key=("h", "e"))
    wide = dist.expand((4, B))
    assert type(wide) is CompositeDistribution and wide.batch_shape == (4, B)
    assert wide["move"].batch_shape == (4, B, T)
    assert (wide.log_prob_key, wide.entropy_key) == ("lp", ("h", "e"))
    sample = wide.sample((7,))
    assert sample.batch_size == (7, 4, B)
    torch.testing.assert_close(
        wide.log_prob(sample)["move_log_prob"], dist.log_prob(sample)["move_log_prob"]
    )


# Log-probabilities


def test_log_prob_by_hand():
    dist = of(
        x=d.Normal(torch.zeros(B, T), torch.ones(B, T)), go=d.Bernoulli(torch.tensor([0.5, 0.25]))
    )
    sample = TensorDict(x=torch.ones(B, T), go=torch.ones(B), batch_size=[B])
    scores = dist.log_prob(sample)
    one = -0.5 - 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(scores["x_log_prob"], torch.full((B, T), one))
    torch.testing.assert_close(scores["go_log_prob"], torch.tensor([math.log(0.5), math.log(0.25)]))
    with set_composite_lp_aggregate(True):
        total = dist.log_prob(sample)
    torch.testing.assert_close(
        total, torch.tensor([3 * one + math.log(0.5), 3 * one + math.log(0.25)])
    )


@pytest.mark.parametrize("aggregate", [False, True])
@pytest.mark.parametrize("shape", [(), (4,)])
def test_log_prob_leaves_the_sample_alone(aggregate, shape):
    dist = CompositeDistribution(parameters(), NAMES)
    sample = dist.sample(shape)
    with set_composite_lp_aggregate(aggregate):
        scores = dist.log_prob(sample)
    assert deep_keys(sample) == {"move", ("head", "speak")}
    if aggregate:
        assert isinstance(scores, torch.Tensor) and scores.shape == shape + (B,)
    else:
        assert scores.batch_size == shape + (B,)
        assert scores["move_log_prob"].shape == shape + (B, T)
        assert deep_keys(scores) == {"move_log_prob", ("head", "speak_log_prob")}


def test_the_sum_goes_down_to_the_batch_of_the_sample():
    dist = CompositeDistribution(parameters(), {"move": d.Normal})
    sample = dist.sample()
    scores = dist["move"].log_prob(sample["move"])
    with set_composite_lp_aggregate(True):
        torch.testing.assert_close(dist.log_prob(sample), scores.sum(-1))
        loose = TensorDict(move=sample["move"])
        torch.testing.assert_close(dist.log_prob(loose), scores.sum())
        tight = TensorDict(move=sample["move"], batch_size=[B, T])
        torch.testing.assert_close(dist.log_prob(tight), scores)


def test_log_prob_composite_without_aggregation_is_a_new_container():
    dist = CompositeDistribution(parameters(), NAMES)
    sample = dist.sample((4,))
    plain = dist.log_prob_composite(sample)
    assert deep_keys(plain) == {"move_log_prob", ("head", "speak_log_prob")}
    summed = dist.log_prob_composite(sample, include_sum=True)
    assert deep_keys(summed) == deep_keys(plain) | {"sample_log_prob"}
    torch.testing.assert_close(
        summed["sample_log_prob"],
        plain["move_log_prob"].sum(-1) + plain["head", "speak_log_prob"],
    )
    assert deep_keys(sample) == {"move", ("head", "speak")}


def test_log_prob_composite_with_aggregation_writes_into_the_sample():
    dist = CompositeDistribution(parameters(), NAMES)
    with set_composite_lp_aggregate(True):
        sample = dist.sample()
        assert dist.log_prob_composite(sample) is sample
        assert {"move_log_prob", "sample_log_prob", "move"} <= set(sample.keys())
        sample = dist.sample()
        assert "sample_log_prob" not in dist.log_prob_composite(sample, include_sum=False)
        assert ("head", "speak_log_prob") in sample.keys(True)


def test_the_keys_of_the_sums_can_be_chosen():
    dist = CompositeDistribution(parameters(), NAMES, log_prob_key="lp", entropy_key=("h", "sum"))
    assert "lp" in dist.log_prob_composite(dist.sample(), include_sum=True)
    assert ("h", "sum") in dist.entropy_composite(include_sum=True).keys(True)
    dist.log_prob_key, dist.entropy_key = None, None
    assert (dist.log_prob_key, dist.entropy_key) == ("sample_log_prob", "entropy")
    dist.log_prob_key = "again"
    assert dist.log_prob_key == "again"


@pytest.mark.parametrize("method", ["sample_and_log_prob", "rsample_and_log_prob"])
@pytest.mark.parametrize("aggregate", [False, True])
def test_draw_and_log_prob_belong_together(method, aggregate):
    dist = normals()
    with set_composite_lp_aggregate(aggregate):
        sample, scores = getattr(dist, method)((4,))
        torch.testing.assert_close(scores, dist.log_prob(sample))
    assert sample.batch_size == (4, B) and deep_keys(sample) == {"x", "y"}


def test_a_member_with_a_joint_method_is_asked_once():
    class Sure(d.Normal):
        def sample_and_log_prob(self, shape=()):
            return self.loc, torch.full_like(self.loc, 7.0)

        def rsample_and_log_prob(self, shape=()):
            return self.loc, torch.full_like(self.loc, 9.0)

    dist = of(s=Sure(torch.ones(B), torch.ones(B)), x=d.Normal(torch.zeros(B), torch.ones(B)))
    assert dist.sample_and_log_prob()[1]["s_log_prob"].tolist() == [7.0, 7.0]
    assert dist.rsample_and_log_prob()[1]["s_log_prob"].tolist() == [9.0, 9.0]


# Entropies


def test_entropy_by_hand():
    dist = of(
        x=d.Normal(torch.zeros(B, T), torch.ones(B, T)), go=d.Bernoulli(torch.full((B,), 0.5))
    )
    one, two = 0.5 + 0.5 * math.log(2 * math.pi), math.log(2)
    entropies = dist.entropy()
    torch.testing.assert_close(entropies["x_entropy"], torch.full((B, T), one))
    torch.testing.assert_close(entropies["go_entropy"], torch.full((B,), two))
    assert set(entropies.keys()) == {"x_entropy", "go_entropy"}
    total = torch.full((B,), 3 * one + two)
    torch.testing.assert_close(dist.entropy(include_sum=True)["entropy"], total)
    with set_composite_lp_aggregate(True):
        torch.testing.assert_close(dist.entropy(), total)
        torch.testing.assert_close(dist.entropy(include_sum=False), total)
        torch.testing.assert_close(dist.entropy_composite()["entropy"], total)
        assert "entropy" not in dist.entropy_composite(include_sum=False)


def tanh_normal():
    return d.TransformedDistribution(d.Normal(torch.zeros(B), torch.ones(B)), d.TanhTransform())


def test_entropy_without_closed_form_is_estimated_from_draws():
    dist = of(x=tanh_normal(), y=d.Normal(torch.zeros(B), torch.ones(B)))
    torch.manual_seed(1)
    estimate = dist.entropy(4)
    torch.manual_seed(1)
    expected = -dist["x"].log_prob(dist["x"].rsample((4,))).mean(0)
    torch.testing.assert_close(estimate["x_entropy"], expected)
    torch.testing.assert_close(estimate["y_entropy"], dist["y"].entropy())


def test_the_estimate_comes_near_the_entropy():
    # tanh of a normal: H = H(normal) + E[log(1 - tanh^2)], by quadrature.
    x = torch.linspace(-8, 8, 4001).double()
    density = torch.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
    slope = torch.log1p(-(torch.tanh(x) ** 2).clamp(max=1 - 1e-12))
    exact = 0.5 + 0.5 * math.log(2 * math.pi) + torch.trapezoid(density * slope, x).item()
    with set_composite_lp_aggregate(True):
        estimate = of(x=tanh_normal()).entropy(samples_mc=20_000)
    assert estimate.tolist() == pytest.approx([exact, exact], abs=0.03)


def test_entropy_of_what_has_no_rsample_is_estimated_with_its_gradient_ours():
    # H(p) = -p log p - q log q, H' = log(q / p).
    class Coin(d.Bernoulli):
        def entropy(self):
            raise NotImplementedError

    p = torch.tensor([0.2, 0.7], requires_grad=True)
    entropy = of(c=Coin(probs=p)).entropy(40_000)["c_entropy"]
    exact = d.Bernoulli(probs=p).entropy()
    torch.testing.assert_close(entropy, exact, atol=0.02, rtol=0)
    entropy.sum().backward()
    q = 1 - p.detach()
    torch.testing.assert_close(p.grad, torch.log(q / p.detach()), atol=0.05, rtol=0)


def test_mixtures_have_an_estimated_entropy_ours():
    mixture = d.MixtureSameFamily(
        d.Categorical(torch.ones(B, 2)), d.Normal(torch.zeros(B, 2), torch.ones(B, 2))
    )
    estimate = of(m=mixture).entropy(20_000)["m_entropy"]
    exact = 0.5 + 0.5 * math.log(2 * math.pi)  # both halves are the same normal
    torch.testing.assert_close(estimate, torch.full((B,), exact), atol=0.03, rtol=0)


def test_no_draws_give_no_estimate_ours():
    with pytest.raises(ValueError, match="samples_mc=0 draws give no estimate; pass 1 or more"):
        of(x=tanh_normal()).entropy(0)
    assert normals().entropy(0)["x_entropy"].shape == (B,)  # none needed here


def test_aggregate_probabilities_is_deprecated():
    with pytest.warns(DeprecationWarning, match="aggregate_probabilities"):
        entropies = normals().entropy(aggregate_probabilities=True)
    assert set(entropies.keys()) == {"x_entropy", "y_entropy"}


# Cumulative probabilities


def test_cdf_and_icdf_write_into_the_sample():
    dist = normals()
    sample = TensorDict(x=torch.tensor([0.0, 1.0]), y=torch.tensor([2.5, 2.0]), batch_size=[B])
    assert dist.cdf(sample) is sample
    below = 0.5 * (1 + math.erf(1 / math.sqrt(2)))
    torch.testing.assert_close(sample["x_cdf"], torch.full((B,), 0.5))
    torch.testing.assert_close(sample["y_cdf"], torch.tensor([below, 1 - below]))
    assert dist.icdf(sample) is sample
    torch.testing.assert_close(sample["y_icdf"], sample["y"])
    assert set(sample.keys()) == {"x", "y", "x_cdf", "y_cdf", "x_icdf", "y_icdf"}


def test_icdf_reads_levels_or_makes_them():
    dist = normals()
    half = TensorDict(x_cdf=torch.full((B,), 0.5), y_cdf=torch.full((B,), 0.5), batch_size=[B])
    assert dist.icdf(half)["y_icdf"].tolist() == [2.0, 3.0]
    sample = dist.icdf(TensorDict(x=torch.ones(B), y=torch.zeros(B), batch_size=[B]))
    torch.testing.assert_close(sample["x_icdf"], torch.ones(B))
    assert "x_cdf" not in sample


def test_cdf_of_a_nested_name():
    dist = CompositeDistribution.from_distributions(
        TensorDict(batch_size=[B]), {("n", "x"): d.Normal(torch.zeros(B), torch.ones(B))}
    )
    sample = dist.cdf(TensorDict({("n", "x"): torch.zeros(B)}, [B]))
    assert sample["n", "x_cdf"].tolist() == [0.5, 0.5]


# The setting


def test_nothing_is_aggregated_by_default(monkeypatch):
    monkeypatch.delenv("COMPOSITE_LP_AGGREGATE", raising=False)
    assert composite_lp_aggregate() is False and composite_lp_aggregate(nowarn=True) is False


def test_the_setting_as_block_decorator_and_for_good():
    with set_composite_lp_aggregate():
        assert composite_lp_aggregate()
        with set_composite_lp_aggregate(False):
            assert not composite_lp_aggregate()
        assert composite_lp_aggregate()
    assert not composite_lp_aggregate()
    assert set_composite_lp_aggregate(True)(composite_lp_aggregate)()
    setting = set_composite_lp_aggregate(True)
    assert setting.mode is True
    setting.set()
    assert composite_lp_aggregate()
    setting.unset()
    assert not composite_lp_aggregate()


def test_a_thread_may_have_a_value_of_its_own():
    seen = []
    with set_composite_lp_aggregate(True, thread_local=True):
        thread = threading.Thread(target=lambda: seen.append(composite_lp_aggregate()))
        thread.start()
        thread.join()
        assert composite_lp_aggregate()
    assert seen == [False]


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("True", True), ("no", False), ("0", False)]
)
def test_the_environment_decides_where_nothing_is_set_ours(monkeypatch, text, value):
    monkeypatch.setenv("COMPOSITE_LP_AGGREGATE", text)
    assert composite_lp_aggregate() is value
    with set_composite_lp_aggregate(not value):
        assert composite_lp_aggregate() is not value
    monkeypatch.setenv("COMPOSITE_LP_AGGREGATE", "perhaps")
    with pytest.raises(ValueError, match="COMPOSITE_LP_AGGREGATE is 'perhaps'; set it to 0 or 1"):
        composite_lp_aggregate()


# What mistakes say


@pytest.mark.parametrize("name", ["mov", "nothing", ("head", "speek")])
def test_a_name_without_parameters(name):
    with pytest.raises(KeyError, match="no param .* found in params"):
        CompositeDistribution(parameters(), {name: d.Normal})


def test_a_name_without_parameters_gets_the_nearest_ours():
    with pytest.raises(KeyError, match="no param 'mov' found.*Did you mean 'move'"):
        CompositeDistribution(parameters(), {"mov": d.Normal})
    with pytest.raises(KeyError, match=r"Did you mean \('head', 'speak'\)"):
        CompositeDistribution(parameters(), {("head", "speek"): d.Normal})
    with pytest.raises(KeyError, match=r"no distribution 'mov' here.*Did you mean 'move'"):
        CompositeDistribution(parameters(), NAMES)["mov"]


def test_a_parameter_out_of_its_domain():
    params = TensorDict(n=dict(x=dict(loc=torch.zeros(B), scale=-torch.ones(B))), batch_size=[B])
    with pytest.raises(ValueError, match="Expected parameter scale"):
        CompositeDistribution(params, {("n", "x"): d.Normal})


def test_errors_of_a_member_name_it_ours():
    params = TensorDict(n=dict(x=dict(loc=torch.zeros(B), scale=-torch.ones(B))), batch_size=[B])
    with pytest.raises(ValueError, match=r"distribution \('n', 'x'\): Expected parameter scale"):
        CompositeDistribution(params, {("n", "x"): d.Normal})
    with pytest.raises(TypeError, match=r"distribution 'move': .*unexpected keyword"):
        CompositeDistribution(parameters(), {"move": d.Categorical})
    dist = of(go=d.Bernoulli(torch.full((B,), 0.5)))
    with pytest.raises(ValueError, match="distribution 'go': Expected value argument"):
        dist.log_prob(TensorDict(go=torch.full((B,), 3.0), batch_size=[B]))
    with pytest.raises(NotImplementedError, match="distribution 'go': a Bernoulli has no rsample"):
        dist.rsample()
    with pytest.raises(NotImplementedError, match="distribution 'go': a Bernoulli has no cdf"):
        dist.cdf(dist.sample())


def test_a_sample_without_an_entry():
    dist = CompositeDistribution(parameters(), NAMES)
    for lacking in ("move", ("head", "speak")):
        with pytest.raises(ValueError):
            dist.log_prob(dist.sample().exclude(lacking))
        with set_composite_lp_aggregate(True), pytest.raises(ValueError):
            dist.log_prob(dist.sample().exclude(lacking))
    with pytest.raises(KeyError, match="x_cdf"):
        normals().icdf(TensorDict(y=torch.zeros(B), batch_size=[B]))


def test_a_sample_without_an_entry_gets_the_nearest_ours():
    sample = TensorDict(mov=torch.zeros(B, T), batch_size=[B])
    with pytest.raises(KeyError, match="the sample has no entry 'move'.*Did you mean 'mov'"):
        CompositeDistribution(parameters(), {"move": d.Normal}).log_prob(sample)


def test_something_else_than_a_container():
    with pytest.raises((RuntimeError, AttributeError)):
        normals().log_prob(None)


@pytest.mark.parametrize("bad", [{"move": 5}, {5: "m"}, {"move": None}])
def test_a_name_map_of_wrong_types(bad):
    with pytest.raises(RuntimeError):
        CompositeDistribution(parameters(), NAMES, name_map=bad)


def test_arguments_of_wrong_types_ours():
    with pytest.raises(TypeError, match="name_map must be a dict, got list"):
        CompositeDistribution(parameters(), NAMES, name_map=[("move", "m")])
    with pytest.raises(TypeError, match=r"name_map\['move'\] must be a string or a tuple"):
        CompositeDistribution(parameters(), NAMES, name_map={"move": 5})
    with pytest.raises(TypeError, match="names in name_map are strings or tuples.*got 5"):
        CompositeDistribution(parameters(), NAMES, name_map={5: "m"})
    with pytest.raises(TypeError, match="params must be a TensorDict, got dict"):
        CompositeDistribution({"move": {}}, NAMES)
    with pytest.raises(TypeError, match="the sample must be a TensorDict, got dict"):
        normals().log_prob({"x": torch.zeros(B)})
    with pytest.raises(TypeError, match="distribution_map must be a dict, got NoneType"):
        CompositeDistribution(parameters(), None)
    with pytest.raises(TypeError, match=r"distribution_map\['move'\] must be a class"):
        CompositeDistribution(parameters(), {"move": "normal"})
    with pytest.raises(TypeError, match="'x' must be an instance, got the class Normal"):
        CompositeDistribution.from_distributions(TensorDict(), {"x": d.Normal})
    with pytest.raises(TypeError, match="must be a container of keyword arguments.*got a Tensor"):
        CompositeDistribution(TensorDict(x=torch.zeros(B), batch_size=[B]), {"x": d.Bernoulli})


def test_extra_kwargs_of_nothing_ours():
    with pytest.raises(KeyError, match="extra_kwargs names .*mov.*, which is no distribution"):
        CompositeDistribution(parameters(), NAMES, extra_kwargs={"mov": {"scale": 2.0}})
    with pytest.raises(TypeError, match=r"extra_kwargs\['move'\] must be a dict of keyword"):
        CompositeDistribution(parameters(), NAMES, extra_kwargs={"move": 3})


def test_two_samples_cannot_share_a_key_ours():
    with pytest.raises(ValueError, match="two distributions would write their sample at 'a'"):
        CompositeDistribution(parameters(), NAMES, name_map={"move": "a", ("head", "speak"): "a"})


# Function transforms


def scores(loc, scale, logits, sample):
    params = TensorDict(
        {"move": dict(loc=loc, scale=scale), ("head", "speak"): dict(logits=logits)}, batch_size=[B]
    )
    dist = CompositeDistribution(params, NAMES)
    value, entropy = dist.deterministic_sample, dist.entropy_composite(include_sum=True)
    out = dist.log_prob_composite(sample, include_sum=True)
    return out["sample_log_prob"], out["head", "speak_log_prob"], value["move"], entropy["entropy"]


def arguments():
    params = parameters()
    sample = CompositeDistribution(params, NAMES).sample()
    leaves = params["move", "loc"], params["move", "scale"], params["head", "speak", "logits"]
    return *leaves, sample


def test_one_graph_under_compile():
    args = arguments()
    compiled = torch.compile(scores, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*args), scores(*args))


@pytest.mark.parametrize("aggregate", [False, True])
def test_draws_and_both_modes_compile(aggregate):
    def draw(loc, scale):
        params = TensorDict(x=dict(loc=loc, scale=scale), batch_size=[B])
        dist = CompositeDistribution(params, {"x": d.Normal}, name_map={"x": ("n", "x")})
        sample, score = dist.sample_and_log_prob((4,))
        return sample["n", "x"], score if aggregate else score["n", "x_log_prob"]

    args = torch.zeros(B, T), torch.ones(B, T)
    with set_composite_lp_aggregate(aggregate):
        value, score = torch.compile(draw, fullgraph=True, backend="eager")(*args)
    expected = d.Normal(*args).log_prob(value)
    torch.testing.assert_close(score, expected.sum(-1) if aggregate else expected)


def test_vmap_over_parameters_and_samples():
    many = [arguments() for _ in range(4)]
    stacked = [torch.stack(column) for column in zip(*many, strict=True)]
    out = torch.vmap(scores)(*stacked)
    for i, args in enumerate(many):
        torch.testing.assert_close([o[i] for o in out], list(scores(*args)))


def test_the_core_draws_nothing_hidden_under_vmap():
    args = [torch.stack([a, a]) for a in arguments()]
    torch.vmap(scores, randomness="error")(*args)


def test_random_draws_of_a_module_carry_gradients_if_all_members_can_ours():
    from raffia.nn import ProbabilisticTensorDictModule

    loc = torch.zeros(3, requires_grad=True)
    params = TensorDict(x=TensorDict(loc=loc, scale=torch.ones(3)), batch_size=[])
    module = ProbabilisticTensorDictModule(
        ["params"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": {"x": d.Normal}},
        default_interaction_type="random",
    )
    module(TensorDict(params=params))["x"].sum().backward()
    assert loc.grad.tolist() == [1.0] * 3
    coin = CompositeDistribution(
        TensorDict(c=TensorDict(logits=torch.zeros(3))), {"c": d.Bernoulli}
    )
    assert not coin.has_rsample
