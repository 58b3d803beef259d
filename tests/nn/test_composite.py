"""Composite distributions: against torch.distributions, sums by hand, and errors.

That any composite is its parts is a property in test_properties.py.
"""

import math
from collections.abc import Mapping

import pytest
import torch
from torch import distributions as d
from torch.testing import assert_close

from raffia import TensorDict
from raffia.nn import composite_lp_aggregate, set_composite_lp_aggregate
from raffia.nn.distributions import CompositeDistribution as Composite
from raffia.nn.distributions import Delta
from tests.marks import refusals

B, T, A = 2, 3, 5
SPEAK = ("head", "speak")
NAMES = {"move": d.Normal, SPEAK: d.Categorical}


@pytest.fixture(autouse=True)
def fixed_draws():
    torch.manual_seed(0)


def parameters():
    move = {"loc": torch.randn(B, T), "scale": torch.rand(B, T) + 0.1}
    return TensorDict({"move": move, SPEAK: {"logits": torch.randn(B, A)}}, [B])


def normals(**kwargs):
    """Two normals over the batch alone."""
    params = TensorDict(
        x=dict(loc=torch.tensor([0.0, 1.0]), scale=torch.tensor([1.0, 2.0])),
        y=dict(loc=torch.tensor([2.0, 3.0]), scale=torch.tensor([0.5, 1.0])),
        batch_size=[B],
    )
    return Composite(params, {"x": d.Normal, "y": d.Normal}, **kwargs)


def unit(*shape):
    return d.Normal(torch.zeros(shape or (B,)), torch.ones(shape or (B,)))


def coin(p=0.5):
    return d.Bernoulli(torch.full((B,), p))


def of(dists=None, name_map=None, /, **more):
    dists, params = {**(dists or {}), **more}, TensorDict(batch_size=[B])
    return Composite.from_distributions(params, dists, name_map=name_map)


def deep_keys(td):
    return set(td.keys(True, True))


# Types


def test_is_a_distribution_and_a_mapping():
    params = parameters()
    dist = Composite(params, NAMES)
    assert isinstance(dist, d.Distribution) and isinstance(dist, Mapping)
    assert list(dist) == ["move", SPEAK] and len(dist) == 2 and dist.dists["move"] is dist["move"]
    assert "move" in dist and "head" not in dist and dist.get("head") is None
    assert dist.batch_shape == (B,) and dist.event_shape == ()
    assert type(dist["move"]) is d.Normal and dist["move"].loc is params["move", "loc"]
    assert not dist.has_rsample and normals().has_rsample  # a Categorical has none
    shown = "CompositeDistribution({'go': Bernoulli(probs: torch.Size([2]))})"
    assert repr(of(go=coin())) == shown


def independent(loc, scale):
    return d.Independent(d.Normal(loc, scale), 1)


def renamed(name_map):
    return Composite(parameters(), NAMES, name_map=name_map)


MADE = {  # a composite, and its names
    "some": (lambda: Composite(parameters(), {("move",): independent}), ["move"]),
    "nested": (lambda: Composite(parameters(), {"head": {"speak": d.Categorical}}), [SPEAK]),
    "instances": (lambda: of({("n", ("go",)): coin()}), [("n", "go")]),
    "nested instances": (lambda: of({"n": {"go": coin()}}), [("n", "go")]),
    "renamed": (lambda: renamed({("move",): ("act", "m"), "other": "o"}), [("act", "m"), SPEAK]),
    "nested names": (lambda: renamed({"head": {"speak": "s"}}), ["move", "s"]),
    "renamed instances": (
        lambda: of(dict(normals()), {"x": ("z", "x"), "other": "o"}),
        [("z", "x"), "y"],
    ),
}


def suffixed(key, suffix):
    return key + suffix if isinstance(key, str) else (*key[:-1], key[-1] + suffix)


@pytest.mark.parametrize("name", MADE)
def test_names(name):
    make, names = MADE[name]
    dist = make()
    assert list(dist) == names and type(dist) is Composite
    sample = dist.sample()
    assert deep_keys(sample) == set(names)
    for got, suffix in ((dist.log_prob(sample), "_log_prob"), (dist.entropy(), "_entropy")):
        assert deep_keys(got) == {suffixed(key, suffix) for key in names}


def test_a_composite_is_a_member_not_a_nested_name():
    inner = normals()
    dist = of({"in": inner, "b": unit()})
    sample, names = dist.sample(), {("in", "x"), ("in", "y"), "b"}
    assert dist["in"] is inner
    assert deep_keys(sample) == deep_keys(dist.deterministic_sample) == names
    scores = dist.log_prob_composite(sample, include_sum=True)
    parts = {("in_log_prob", "x_log_prob"), ("in_log_prob", "y_log_prob"), "b_log_prob"}
    assert deep_keys(scores) == {*parts, "sample_log_prob"}
    by_hand = sum(scores.exclude("sample_log_prob").values(True, True))
    assert_close(scores["sample_log_prob"], by_hand)
    with set_composite_lp_aggregate(True):
        assert_close(dist.log_prob(sample), by_hand)


EXTRA = [
    {"a": {"scale": 2.0}, "n": {"b": {"scale": 3.0}}},
    {("a",): {"scale": 2.0}, ("n", ("b",)): {"scale": 3.0}},
]


@pytest.mark.parametrize("extra", EXTRA)
def test_extra_kwargs_reach_their_member(extra):
    loc = {"loc": torch.zeros(B)}
    params = TensorDict({"a": loc, ("n", "b"): loc}, batch_size=[B])
    dist = Composite(params, {"a": d.Normal, ("n", "b"): d.Normal}, extra_kwargs=extra)
    assert dist["a"].scale.tolist() == [2.0, 2.0] and dist["n", "b"].scale.tolist() == [3.0, 3.0]


# Values


def test_expand_repeats_the_members():
    dist = Composite(parameters(), NAMES, log_prob_key="lp", entropy_key=("h", "e"))
    wide = dist.expand((4, B))
    assert type(wide) is Composite and wide.batch_shape == (4, B)
    assert wide["move"].batch_shape == (4, B, T)
    assert (wide.log_prob_key, wide.entropy_key) == ("lp", ("h", "e"))
    sample = wide.sample((7,))
    assert sample.batch_size == (7, 4, B)
    assert_close(wide.log_prob(sample)["move_log_prob"], dist.log_prob(sample)["move_log_prob"])


# Log-probabilities and entropies


def test_log_prob_and_entropy_by_hand():
    dist = of(x=unit(B, T), go=d.Bernoulli(torch.tensor([0.5, 0.25])))
    sample = TensorDict(x=torch.ones(B, T), go=torch.ones(B), batch_size=[B])
    one = -0.5 - 0.5 * math.log(2 * math.pi)
    go, spread = torch.tensor([0.5, 0.25]).log(), dist["go"].entropy()
    for got, x, y in ((dist.log_prob(sample), one, go), (dist.entropy(), -one, spread)):
        assert_close(list(got.values()), [torch.full((B, T), x), y])
    total, entropy = 3 * one + go, -3 * one + spread
    assert_close(dist.entropy(include_sum=True)["entropy"], entropy)
    with set_composite_lp_aggregate(True):
        assert_close(dist.log_prob(sample), total)
        for got in (dist.entropy(), dist.entropy(include_sum=False)):
            assert_close(got, entropy)
        assert_close(dist.entropy_composite()["entropy"], entropy)
        assert "entropy" not in dist.entropy_composite(include_sum=False)
        whole = TensorDict({"x": sample["x"], "go": sample["go"]})  # of no batch size
        assert_close(dist.log_prob(whole), total.sum())


def test_log_prob_composite():
    dist = Composite(parameters(), NAMES, log_prob_key="lp", entropy_key=("h", "sum"))
    parts = {"move_log_prob", ("head", "speak_log_prob")}
    for aggregate, options, more in (
        *((False, {}, set()), (False, {"include_sum": True}, {"lp"})),
        *((True, {}, {"lp"}), (True, {"include_sum": False}, set())),
    ):
        with set_composite_lp_aggregate(aggregate):
            sample = dist.sample()
            out = dist.log_prob_composite(sample, **options)
        assert (out is sample) == aggregate  # then it is written into the sample
        assert deep_keys(out) - {"move", SPEAK} == parts | more
        assert aggregate or deep_keys(sample) == {"move", SPEAK}
    assert ("h", "sum") in dist.entropy_composite(include_sum=True).keys(True)
    dist.log_prob_key, dist.entropy_key = None, None
    assert (dist.log_prob_key, dist.entropy_key) == ("sample_log_prob", "entropy")
    made = normals(log_prob_key="lp", entropy_key="h")
    assert (made.log_prob_key, made.entropy_key) == ("lp", "h")


def test_a_member_with_a_joint_method_is_called_once():
    class Sure(d.Normal):
        def sample_and_log_prob(self, shape=()):
            return self.loc, torch.full_like(self.loc, 7.0)

        def rsample_and_log_prob(self, shape=()):
            return self.loc, torch.full_like(self.loc, 9.0)

    dist = of(s=Sure(torch.ones(B), torch.ones(B)), x=unit())
    for method, score in (("sample_and_log_prob", 7.0), ("rsample_and_log_prob", 9.0)):
        assert getattr(dist, method)()[1]["s_log_prob"].tolist() == [score] * B
        sample, scores = getattr(normals(), method)((4,))
        assert_close(scores, normals().log_prob(sample))
        assert sample.batch_size == (4, B) and deep_keys(sample) == {"x", "y"}
    with set_composite_lp_aggregate(True):
        sample, score = normals().sample_and_log_prob((4,))
        assert_close(score, normals().log_prob(sample))
    sample = dist.sample()
    assert not sample.is_locked and sample.device is None and dist.sample([4]).shape == (4, B)


# Estimates


def tanh_normal():
    return d.TransformedDistribution(unit(), d.TanhTransform())


def mixture():
    return d.MixtureSameFamily(d.Categorical(torch.ones(B, 2)), unit(B, 2))


def tanh_entropy():
    """H(normal) + E[log(1 - tanh^2)], by quadrature."""
    x = torch.linspace(-8, 8, 4001).double()
    density = torch.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
    slope = torch.log1p(-(torch.tanh(x) ** 2).clamp(max=1 - 1e-12))
    return 0.5 + 0.5 * math.log(2 * math.pi) + torch.trapezoid(density * slope, x).item()


@pytest.mark.parametrize(
    "make, exact", [(tanh_normal, tanh_entropy()), (mixture, 0.5 + 0.5 * math.log(2 * math.pi))]
)
def test_entropies_without_a_formula_are_estimated_from_draws(make, exact):
    dist = of(x=make(), y=unit())
    assert dist.entropy(20_000)["x_entropy"].tolist() == pytest.approx([exact] * B, abs=0.03)
    assert_close(dist.entropy(4)["y_entropy"], dist["y"].entropy())
    with pytest.raises(ValueError, match="samples_mc=0 must be at least 1"):
        dist.entropy(0)
    assert normals().entropy(0)["x_entropy"].shape == (B,)  # none needed here


def test_an_estimate_without_rsample_has_a_gradient():
    # H(p) = -p log p - q log q, H' = log(q / p).
    class Coin(d.Bernoulli):
        def entropy(self):
            raise NotImplementedError

    p = torch.tensor([0.2, 0.7], requires_grad=True)
    entropy = of(c=Coin(probs=p)).entropy(40_000)["c_entropy"]
    assert_close(entropy, d.Bernoulli(probs=p).entropy(), atol=0.02, rtol=0)
    entropy.sum().backward()
    q = 1 - p.detach()
    assert_close(p.grad, torch.log(q / p.detach()), atol=0.05, rtol=0)


def test_the_entropy_of_a_certain_value_is_minus_infinity():
    assert of(x=Delta(torch.zeros(B, 1))).entropy()["x_entropy"].tolist() == [-math.inf] * B


def test_aggregate_probabilities_is_deprecated():
    with pytest.warns(DeprecationWarning, match="aggregate_probabilities"):
        entropies = normals().entropy(aggregate_probabilities=True)
    assert set(entropies.keys()) == {"x_entropy", "y_entropy"}


# Cumulative probabilities


def test_cdf_and_icdf_write_into_the_sample():
    dist = normals()
    sample = TensorDict(x=torch.tensor([0.0, 1.0]), y=torch.tensor([2.5, 2.0]), batch_size=[B])
    assert dist.cdf(sample) is dist.icdf(sample) is sample
    below = 0.5 * (1 + math.erf(1 / math.sqrt(2)))
    assert_close(sample["x_cdf"], torch.full((B,), 0.5))
    assert_close(sample["y_cdf"], torch.tensor([below, 1 - below]))
    assert_close(sample["y_icdf"], sample["y"])
    half = TensorDict(x_cdf=torch.full((B,), 0.5), y_cdf=torch.full((B,), 0.5), batch_size=[B])
    assert dist.icdf(half)["y_icdf"].tolist() == [2.0, 3.0]  # existing levels
    sample = dist.icdf(TensorDict(x=torch.ones(B), y=torch.zeros(B), batch_size=[B]))
    assert_close(sample["x_icdf"], torch.ones(B))
    assert "x_cdf" not in sample
    nested = of({("n", "x"): unit()}).cdf(TensorDict({("n", "x"): torch.zeros(B)}, [B]))
    assert nested["n", "x_cdf"].tolist() == [0.5, 0.5]


# The setting


@pytest.mark.parametrize(("text", "value"), [("True", True), ("0", False)])
def test_the_environment_variable_is_the_default(monkeypatch, text, value):
    monkeypatch.setenv("COMPOSITE_LP_AGGREGATE", text)
    assert composite_lp_aggregate() is value
    with set_composite_lp_aggregate(not value):
        assert composite_lp_aggregate() is not value
    monkeypatch.setenv("COMPOSITE_LP_AGGREGATE", "perhaps")
    with pytest.raises(ValueError, match="COMPOSITE_LP_AGGREGATE is 'perhaps'; set it to 0 or 1"):
        composite_lp_aggregate()


# Errors


def made(names=NAMES, params=None, **options):
    return Composite(parameters() if params is None else params, names, **options)


NEGATIVE = TensorDict(n=dict(x=dict(loc=torch.zeros(B), scale=-torch.ones(B))), batch_size=[B])
BARE = TensorDict(x=torch.zeros(B), batch_size=[B])
ERRORS = [  # a call, its error, and words of its message
    (lambda: made({"mov": d.Normal}), KeyError, "no param 'mov' found.*Did you mean 'move'"),
    (lambda: made({("n", "x"): d.Normal}, NEGATIVE), ValueError, r"\('n', 'x'\): Expected"),
    (lambda: made({"move": d.Categorical}), TypeError, "distribution 'move': .*unexpected keyword"),
    (lambda: of(go=coin()).rsample(), NotImplementedError, "'go': a Bernoulli has no rsample"),
    (lambda: normals().icdf(TensorDict(y=torch.zeros(B), batch_size=[B])), KeyError, "x_cdf"),
    (lambda: made(name_map={"move": None}), RuntimeError, "name_map"),
    (lambda: made(name_map={5: "m"}), TypeError, "in name_map must be strings or.*got 5"),
    (lambda: made(params={"move": {}}), TypeError, "params must be a TensorDict, got dict"),
    (lambda: normals().log_prob({"x": torch.zeros(B)}), TypeError, "the sample must be a"),
    (lambda: made(None), TypeError, "distribution_map must be a dict, got NoneType"),
    (lambda: made({"move": "normal"}), TypeError, r"distribution_map\['move'\] must be a class"),
    (lambda: of(x=d.Normal), TypeError, "'x' must be an instance, got the class Normal"),
    (lambda: made({"x": d.Bernoulli}, BARE), TypeError, "must be a container of .*got a Tensor"),
    (lambda: made(extra_kwargs={"mov": {"scale": 2.0}}), KeyError, "extra_kwargs names .*mov"),
    (lambda: made(extra_kwargs={"move": 3}), TypeError, r"extra_kwargs\['move'\] must be a dict"),
    (lambda: made(name_map={"move": "a", SPEAK: "a"}), ValueError, "sample at 'a'"),
]


test_errors = refusals(ERRORS)


# Function transforms


def scores(loc, scale, logits, sample):
    params = TensorDict(
        {"move": dict(loc=loc, scale=scale), SPEAK: dict(logits=logits)}, batch_size=[B]
    )
    dist = Composite(params, NAMES)
    value, entropy = dist.deterministic_sample, dist.entropy_composite(include_sum=True)
    out = dist.log_prob_composite(sample, include_sum=True)
    return out["sample_log_prob"], out["head", "speak_log_prob"], value["move"], entropy["entropy"]


def arguments():
    params = parameters()
    sample = Composite(params, NAMES).sample()
    leaves = params["move", "loc"], params["move", "scale"], params["head", "speak", "logits"]
    return *leaves, sample


def test_compiled_and_vmapped_over_parameters_and_samples():
    many = [arguments() for _ in range(4)]
    stacked = [torch.stack(column) for column in zip(*many, strict=True)]
    out = torch.vmap(scores, randomness="error")(*stacked)
    for i, args in enumerate(many):
        assert_close([o[i] for o in out], list(scores(*args)))
    compiled = torch.compile(scores, fullgraph=True, backend="eager")
    assert_close(compiled(*args), scores(*args))
