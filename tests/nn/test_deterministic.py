"""The value of a distribution where nothing is drawn, as a composite distribution shows it."""

import warnings

import pytest
import torch
from torch import distributions as d

from raffia import TensorDict
from raffia.nn.distributions import CompositeDistribution, OneHotCategorical, TruncatedNormal

HALF = torch.tensor([0.5, 0.3])
ROWS = torch.tensor([[0.2, 0.8], [0.6, 0.4]])


def value(dist):
    params = TensorDict(batch_size=dist.batch_shape)
    return CompositeDistribution.from_distributions(params, {"x": dist}).deterministic_sample["x"]


@pytest.mark.parametrize(
    "dist",
    [
        d.Bernoulli(torch.tensor([0.9, 0.3])),
        d.Binomial(5, HALF),
        d.Categorical(ROWS),
        d.OneHotCategorical(ROWS),
        d.OneHotCategoricalStraightThrough(ROWS),
    ],
    ids=lambda dist: type(dist).__name__,
)
def test_the_mode_where_the_support_can_be_enumerated(dist):
    torch.testing.assert_close(value(dist), dist.mode)


@pytest.mark.parametrize(
    "dist",
    [
        d.Normal(HALF, HALF),
        d.Beta(HALF, HALF + 1),
        d.ContinuousBernoulli(HALF),
        d.Dirichlet(ROWS),
        d.Gamma(HALF + 2, HALF),
        d.Geometric(HALF),
        d.Gumbel(HALF, HALF),
        d.LogNormal(HALF, HALF),
        d.MixtureSameFamily(d.Categorical(ROWS), d.Normal(ROWS, ROWS)),
        d.Multinomial(5, ROWS),
        d.MultivariateNormal(HALF, torch.eye(2)),
        d.Poisson(HALF),
        d.Uniform(HALF, HALF + 1),
        d.VonMises(HALF, HALF),
        d.Weibull(HALF, HALF),
    ],
    ids=lambda dist: type(dist).__name__,
)
def test_the_mean_elsewhere(dist):
    torch.testing.assert_close(value(dist), dist.mean)


def test_the_mean_may_be_infinite_or_none():
    assert value(d.HalfCauchy(HALF)).isinf().all() and value(d.Cauchy(HALF, HALF)).isnan().all()


def test_its_own_value_comes_first():
    class Shifted(d.Normal):
        @property
        def deterministic_sample(self):
            return self.loc + 100

    assert value(Shifted(HALF, HALF)).tolist() == (HALF + 100).tolist()


def test_independent_looks_at_its_base():
    torch.testing.assert_close(value(d.Independent(d.Normal(HALF, HALF), 1)), HALF)
    coin = d.Independent(d.Bernoulli(torch.tensor([[0.9, 0.3]])), 1)
    assert value(coin).tolist() == [[1.0, 0.0]]
    twice = d.Independent(d.Independent(d.Bernoulli(ROWS), 1), 1)
    torch.testing.assert_close(value(twice), ROWS.round())
    cut = TruncatedNormal(HALF, HALF, torch.tensor(-1.0), torch.tensor(1.0))
    torch.testing.assert_close(value(d.Independent(cut, 1)), cut.mean)


def test_independent_takes_the_own_value_of_its_base_ours():
    class Shifted(d.Normal):
        @property
        def deterministic_sample(self):
            return self.loc + 100

    assert value(d.Independent(Shifted(HALF, HALF), 1)).tolist() == (HALF + 100).tolist()


def test_our_own_distributions():
    cut = TruncatedNormal(HALF, HALF, torch.tensor(-1.0), torch.tensor(1.0))
    torch.testing.assert_close(value(cut), cut.mean)
    tied = OneHotCategorical(logits=torch.tensor([[1.0, 2.0, 0.0]]))
    assert value(tied).tolist() == [[0, 1, 0]]


def test_logistic_normal_sends_the_location_through_stick_breaking():
    loc = torch.tensor([0.3, -2.0])
    # Sticks broken off: sigmoid(loc_k - log(number of pieces left)), then what is left.
    first = torch.sigmoid(loc[0] - torch.tensor(2.0).log())
    second = (1 - first) * torch.sigmoid(loc[1])
    expected = torch.stack([first, second, 1 - first - second])
    torch.testing.assert_close(value(d.LogisticNormal(loc, torch.ones(2))), expected)
    rows = d.Independent(d.LogisticNormal(loc.expand(4, 2), torch.ones(4, 2)), 1)
    torch.testing.assert_close(value(rows), expected.expand(4, 3))


def test_the_relaxed_ones_answer_as_what_they_relax():
    temperature = torch.tensor(0.5)
    one_hot = d.RelaxedOneHotCategorical(temperature, logits=torch.tensor([[1.0, 1.0, 0.0]]))
    assert value(one_hot).tolist() == [[1.0, 0.0, 0.0]]  # the first of tied ones
    coin = d.RelaxedBernoulli(temperature, torch.tensor([0.9, 0.3]))
    assert value(coin).tolist() == [1.0, 0.0]


def test_the_relaxed_ones_inside_independent_ours():
    coin = d.RelaxedBernoulli(torch.tensor(0.5), torch.tensor([0.9, 0.3]))
    assert value(d.Independent(coin, 1)).tolist() == [1.0, 0.0]


def test_no_value_for_cholesky_factors_of_correlations():
    for dist in (d.LKJCholesky(3, 0.5), d.Independent(d.LKJCholesky(3, HALF), 1)):
        with pytest.raises(RuntimeError, match="LKJCholesky|Independent"):
            value(dist)


def test_what_has_no_value_at_all_is_not_averaged_either_ours():
    with pytest.raises(RuntimeError, match="set_interaction_type.'random'") as error:
        value(d.LKJCholesky(3, 0.5))
    assert not isinstance(error.value, NotImplementedError)  # which a module answers by averaging


def test_a_mean_without_formula_has_an_error_of_its_own_ours():
    from raffia.nn.distributions.deterministic import NoMeanError, deterministic_sample

    squashed = d.TransformedDistribution(d.Normal(HALF, HALF), d.TanhTransform())
    with pytest.raises(NoMeanError, match="no mean to replace it"):
        deterministic_sample(squashed)

    class Positive(d.Distribution):
        support = d.constraints.positive

    with pytest.warns(UserWarning), pytest.raises(NotImplementedError, match="no mode") as error:
        deterministic_sample(Positive(validate_args=False))
    assert not isinstance(error.value, NoMeanError)


def test_no_mean_to_take_the_place():
    with pytest.raises(NotImplementedError, match="has no deterministic_sample"):
        value(d.TransformedDistribution(d.Normal(HALF, HALF), d.TanhTransform()))


class Unknown(d.Distribution):
    mean, mode = torch.full((2,), 1.0), torch.full((2,), 2.0)

    def __init__(self):
        super().__init__(torch.Size([2]), validate_args=False)


class OnTheLine(Unknown):
    support = d.constraints.real


class Positive(Unknown):
    support = d.constraints.positive


class Wedge(d.Normal):
    pass


@pytest.mark.parametrize(
    ("dist", "expected", "statistic"),
    [
        (Unknown(), [1.0, 1.0], "mean"),
        (OnTheLine(), [1.0, 1.0], "mean"),
        (Positive(), [2.0, 2.0], "mode"),
        (d.Independent(Positive(), 1), [2.0, 2.0], "mode"),
        (Wedge(HALF, HALF), HALF.tolist(), "mean"),  # a subclass may mean something else
    ],
    ids=["no support", "real", "positive", "independent", "subclass"],
)
def test_an_unknown_class_gives_mean_or_mode_and_a_warning(dist, expected, statistic):
    with pytest.warns(UserWarning, match=rf"deterministic_sample wasn't found.* {statistic}"):
        assert value(dist).tolist() == expected


def test_an_unknown_class_without_the_statistic():
    class Bare(d.Distribution):
        support = d.constraints.positive

        def __init__(self):
            super().__init__(torch.Size([2]), validate_args=False)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the error says it all, with or without a warning before
        with pytest.raises(NotImplementedError, match="has no deterministic_sample"):
            value(Bare())


def test_gradients_reach_the_parameters():
    loc = HALF.clone().requires_grad_()
    value(d.Normal(loc, HALF)).sum().backward()
    assert loc.grad.tolist() == [1.0, 1.0]


def test_under_compile_and_vmap():
    def known(loc):
        return value(d.Independent(d.Normal(loc, torch.ones_like(loc)), 1))

    rows = torch.randn(3, 2)
    torch.testing.assert_close(torch.compile(known, fullgraph=True, backend="eager")(rows), rows)
    torch.testing.assert_close(torch.vmap(known)(rows), rows)
