"""The deterministic value of a distribution, as a composite distribution gives it."""

import warnings

import pytest
import torch
from torch import distributions as d
from torch.testing import assert_close

from raffia import TensorDict
from raffia.nn.distributions import CompositeDistribution, OneHotCategorical, TruncatedNormal
from raffia.nn.sampling import NoMeanError, deterministic_sample

HALF = torch.tensor([0.5, 0.3])
COINS = torch.tensor([0.9, 0.3])
ROWS = torch.tensor([[0.2, 0.8], [0.6, 0.4]])


def value(dist):
    params = TensorDict(batch_size=dist.batch_shape)
    return CompositeDistribution.from_distributions(params, {"x": dist}).deterministic_sample["x"]


class Shifted(d.Normal):
    deterministic_sample = property(lambda self: self.loc + 100)


def stick_breaking(loc):
    """Sticks broken off: sigmoid(loc_k - log(number of pieces left)), then the rest."""
    first = torch.sigmoid(loc[0] - torch.tensor(2.0).log())
    second = (1 - first) * torch.sigmoid(loc[1])
    return torch.stack([first, second, 1 - first - second])


def relaxed(probs):
    return d.RelaxedBernoulli(torch.tensor(0.5), probs)


def squashed():
    return d.TransformedDistribution(d.Normal(HALF, HALF), d.TanhTransform())


LOC = torch.tensor([0.3, -2.0])
CUT = TruncatedNormal(HALF, HALF, torch.tensor(-1.0), torch.tensor(1.0))
STICKS = d.LogisticNormal(LOC, torch.ones(2))
STICK_ROWS = d.LogisticNormal(LOC.expand(4, 2), torch.ones(4, 2))
TIED = d.RelaxedOneHotCategorical(torch.tensor(0.5), logits=torch.tensor([[1.0, 1.0, 0.0]]))
MODES = [  # the support can be enumerated
    d.Bernoulli(COINS),
    d.Binomial(5, HALF),
    d.Categorical(ROWS),
    d.OneHotCategorical(ROWS),
    d.OneHotCategoricalStraightThrough(ROWS),
]
MEANS = [
    d.Normal(HALF, HALF),
    d.Dirichlet(ROWS),
    d.Geometric(HALF),
    d.MixtureSameFamily(d.Categorical(ROWS), d.Normal(ROWS, ROWS)),
    d.Multinomial(5, ROWS),
    d.MultivariateNormal(HALF, torch.eye(2)),
    d.VonMises(HALF, HALF),
    d.HalfCauchy(HALF),  # infinite
    d.Cauchy(HALF, HALF),  # none
    CUT,
]
VALUES = [
    *((dist, dist.mode) for dist in MODES),
    *((dist, dist.mean) for dist in MEANS),
    (Shifted(HALF, HALF), HALF + 100),  # its own value comes first
    (d.Independent(Shifted(HALF, HALF), 1), HALF + 100),
    (d.Independent(d.Normal(HALF, HALF), 1), HALF),
    (d.Independent(d.Bernoulli(COINS[None]), 1), torch.tensor([[1.0, 0.0]])),
    (d.Independent(d.Independent(d.Bernoulli(ROWS), 1), 1), ROWS.round()),
    (d.Independent(CUT, 1), CUT.mean),
    (OneHotCategorical(logits=torch.tensor([[1.0, 2.0, 0.0]])), torch.tensor([[0, 1, 0]])),
    (STICKS, stick_breaking(LOC)),
    (d.Independent(STICK_ROWS, 1), stick_breaking(LOC).expand(4, 3)),
    (TIED, torch.tensor([[1.0, 0.0, 0.0]])),  # relaxed distributions equal the ones they relax
    (relaxed(COINS), torch.tensor([1.0, 0.0])),
    (d.Independent(relaxed(COINS), 1), torch.tensor([1.0, 0.0])),
]


@pytest.mark.parametrize("row", range(len(VALUES)))
def test_values(row):
    dist, expected = VALUES[row]
    assert_close(value(dist), expected, equal_nan=True)


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


class Bare(d.Distribution):
    support = d.constraints.positive

    def __init__(self):
        super().__init__(torch.Size([2]), validate_args=False)


UNKNOWN = {  # a distribution, its value, and the statistic that this is
    "no support": (Unknown(), [1.0, 1.0], "mean"),
    "real": (OnTheLine(), [1.0, 1.0], "mean"),
    "positive": (Positive(), [2.0, 2.0], "mode"),
    "independent": (d.Independent(Positive(), 1), [2.0, 2.0], "mode"),
    "subclass": (Wedge(HALF, HALF), HALF.tolist(), "mean"),  # it may mean something else
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_class_gives_mean_or_mode_and_a_warning(name):
    dist, expected, statistic = UNKNOWN[name]
    words = rf"deterministic_sample wasn't found.* {statistic}"
    with pytest.warns(UserWarning, match=words):
        assert value(dist).tolist() == expected


ERRORS = [  # a distribution, the call, the error, and part of its message
    (d.LKJCholesky(3, 0.5), value, RuntimeError, "set_interaction_type.'random'"),
    (d.Independent(d.LKJCholesky(3, HALF), 1), value, RuntimeError, "LKJCholesky|Independent"),
    (squashed(), value, NotImplementedError, "has no deterministic_sample"),
    (squashed(), deterministic_sample, NoMeanError, "no mean to use instead"),
    (Bare(), value, NotImplementedError, "has no deterministic_sample"),
    (Bare(), deterministic_sample, NotImplementedError, "no mode"),
]


@pytest.mark.parametrize("row", range(len(ERRORS)))
def test_distributions_without_a_deterministic_value(row):
    """A module averages draws after a NoMeanError, and after no other error."""
    dist, ask, kind, match = ERRORS[row]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the error says it all, with or without a warning before
        with pytest.raises(kind, match=match) as error:
            ask(dist)
    assert isinstance(error.value, NotImplementedError) is (kind is not RuntimeError)
    assert ask is value or isinstance(error.value, NoMeanError) is (kind is NoMeanError)
