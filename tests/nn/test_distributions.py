"""Distributions and the modules that make their parameters, against torch and quadrature."""

import math

import pytest
import torch
from torch import distributions as D
from torch import nn
from torch.testing import assert_close

from raffia.nn import (
    AddStateIndependentNormalScale,
    NormalParamExtractor,
    OneHotCategorical,
    TanhNormal,
    TruncatedNormal,
    add_custom_mapping,
    biased_softplus,
    inv_softplus,
    mappings,
    rand_one_hot,
)
from raffia.nn.distributions import Delta, NormalParamWrapper
from tests.marks import refusals

F64 = torch.float64
INF = math.inf


def f64(*values):
    return torch.tensor(values if len(values) > 1 else values[0], dtype=F64)


# -- mappings

MAPPINGS = {
    "exp": torch.exp,
    "none": lambda x: x,
    "expln": lambda x: torch.where(x > 0, (x.clamp(min=0) + 1).log() + 1, x.exp()),
    "biased_softplus": biased_softplus(1.0),
    "biased_softplus_2.0_0.1": biased_softplus(2.0, 0.1),
    "biased_softplus_1e-1": biased_softplus(0.1),
}


def test_mappings_are_found_by_name():
    x = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0])
    for name, mapping in MAPPINGS.items():
        assert_close(mappings(name)(x), mapping(x), msg=name)
    for more in (1, 2):  # a custom one can be named and replaced
        add_custom_mapping("test_shifted", lambda x, more=more: x + more)
        assert mappings("test_shifted")(torch.tensor(1.0)) == 1 + more
    assert NormalParamExtractor("test_shifted")(torch.ones(4))[1].tolist() == [3, 3]
    add_custom_mapping("biased_softplus_77", torch.exp)  # it takes precedence over the parsed name
    assert mappings("biased_softplus_77")(torch.tensor(0.0)) == 1


def test_softplus_and_its_inverse():
    bias = f64(1e-3, 0.1, 1.0, 5.0, 30.0)
    assert_close(nn.functional.softplus(inv_softplus(bias)), bias)
    number = inv_softplus(1.0)
    assert isinstance(number, float) and number == pytest.approx(math.log(math.e - 1), rel=1e-6)
    assert inv_softplus(0.0) == pytest.approx(math.log(1e-6), abs=1e-5)  # which has no inverse
    assert inv_softplus(-3.0) == inv_softplus(0.0)
    assert inv_softplus(800.0) == 800.0 and inv_softplus(torch.tensor(100.0)) == 100.0
    f = biased_softplus(3.0, 0.2)
    assert_close(f(torch.tensor([0.0, -200.0])), torch.tensor([3.0, 0.2]))
    assert isinstance(f, nn.Module) and not f.state_dict()
    x = torch.tensor([-1e4, -1.0, 0.0, 1.0, 1e4], requires_grad=True)
    (grad,) = torch.autograd.grad(mappings("expln")(x).sum(), x)
    assert_close(grad, torch.tensor([0.0, math.exp(-1), 1.0, 0.5, 1 / 10001]))


# -- modules that make parameters


def test_normal_param_extractor_and_wrapper():
    x = torch.tensor([[1.0, 2.0, 0.0, -30.0]])
    loc, scale = NormalParamExtractor("exp", scale_lb=1e-2)(x)
    assert loc.tolist() == [[1, 2]]
    assert_close(scale, torch.tensor([[1.0, 1e-2]]))
    assert_close(NormalParamExtractor()(torch.zeros(4))[1], torch.ones(2))
    loc, scale, *rest = NormalParamExtractor()(torch.zeros(2, 5), 1, "two")
    assert loc.shape == (2, 3) and scale.shape == (2, 2) and rest == [1, "two"]
    net, x = nn.Linear(3, 4), torch.randn(2, 3)
    wrapped = NormalParamWrapper(net, "exp", scale_lb=0.5)
    assert_close(wrapped(x), (net(x)[:, :2], net(x)[:, 2:].exp().clamp_min(0.5)))
    assert wrapped.operator is net and len(list(wrapped.parameters())) == 2
    loc, scale, (hidden, cell) = NormalParamWrapper(nn.LSTM(3, 4))(torch.zeros(5, 2, 3))
    assert loc.shape == scale.shape == (5, 2, 2) and hidden.shape == cell.shape == (1, 2, 4)


@pytest.mark.parametrize("shape", [None, 3, (2, 3)])
@pytest.mark.parametrize("make_param", [True, False])
def test_state_independent_scale_is_expanded_to_the_location(shape, make_param):
    module = AddStateIndependentNormalScale(shape, make_param=make_param, init_value=0.5)
    loc = torch.randn(5, 2, 3)
    out, scale, other = module(loc, "other")
    assert out is loc and other == "other" and scale.requires_grad == make_param
    assert_close(scale.detach(), torch.full((5, 2, 3), math.exp(0.5)))
    assert len(list(module.parameters())) == make_param
    assert list(module.state_dict()) == ["state_independent_scale"]
    module = AddStateIndependentNormalScale(3, scale_mapping="softplus", scale_lb=3.0)
    assert module(torch.zeros(3))[1].tolist() == [3, 3, 3]
    assert (module.scale_shape, module.scale_mapping, module.scale_lb) == ((3,), "softplus", 3.0)


# -- Delta

SHAPES = [  # of a parameter [4, 2]
    ({}, (4,), (2,)),
    (dict(batch_shape=(), event_shape=()), (4,), (2,)),
    (dict(batch_shape=torch.Size([4, 2])), (4, 2), ()),
    (dict(event_shape=(4, 2)), (), (4, 2)),
    (dict(batch_shape=(4,)), (4,), (2,)),
]


@pytest.mark.parametrize("shapes, batch, event", SHAPES)
def test_delta_is_its_parameter(shapes, batch, event):
    param = torch.randn(4, 2, requires_grad=True)
    dist = Delta(param, **shapes)
    assert tuple(dist.batch_shape) == batch and tuple(dist.event_shape) == event
    assert dist.log_prob(param).shape == batch and dist.sample((5,)).shape == (5, 4, 2)
    for value in (dist.mean, dist.mode, dist.deterministic_sample, dist.rsample()):
        assert torch.equal(value, param) and value.requires_grad
    assert torch.equal(dist.sample(), param) and not dist.sample().requires_grad
    dist.rsample((3,)).sum().backward()
    assert (param.grad == 3).all() and not dist.variance.any() and not dist.stddev.any()
    assert Delta.has_rsample is False and Delta.arg_constraints == {}


PARAM = torch.tensor([10.0])
LOG_PROBS = [  # a Delta, values, and whether they are its own
    (Delta(f64(0.0, 1.0).expand(3, 2)), f64((0, 1), (0, 1.1), (1, 0)), [True, False, False]),
    (Delta(f64(0.0, 1.0)), f64(0.0, 1 + 1e-7), True),
    (Delta(PARAM, atol=0.1, rtol=0.0), PARAM + 0.05, True),
    (Delta(PARAM, atol=0.1, rtol=0.0), PARAM + 0.15, False),
    (Delta(PARAM, atol=0.1, rtol=0.1), PARAM + 1.05, True),
    (Delta(torch.arange(2.0), atol=0.5).expand((3,)), torch.tensor([0.3, 1.3]), [True] * 3),
    *(
        (Delta(param, atol=0.0, rtol=0.0), value, value is param)
        for param in (torch.tensor([INF]), torch.tensor([3]), torch.tensor([True]))
        for value in (param, torch.zeros(1))
    ),
    (Delta(torch.tensor([math.nan])), torch.tensor([math.nan]), False),
]


@pytest.mark.parametrize("row", range(len(LOG_PROBS)))
def test_delta_log_prob_is_infinite_at_the_value_only(row):
    dist, value, own = LOG_PROBS[row]
    out = dist.log_prob(value)
    assert torch.equal(out == INF, torch.tensor(own)) and (out.abs() == INF).all()
    assert out.dtype == value.dtype or not value.is_floating_point()


def test_delta_updated_and_expanded():
    dist = Delta(torch.zeros(4, 2))
    dist.update(torch.ones(3, 2))
    assert dist.mean.tolist() == [[1, 1]] * 3
    dist = Delta(torch.arange(2.0)).expand((3,))
    assert dist.batch_shape == (3,) and dist.event_shape == (2,)
    assert dist.sample((5,)).shape == (5, 3, 2)


# -- OneHotCategorical


def test_one_hot_agrees_with_torch():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, dtype=F64)
    theirs = D.OneHotCategorical(logits=logits)
    for ours in (OneHotCategorical(logits), OneHotCategorical(probs=logits.softmax(-1))):
        for value in (theirs.sample((5,)), theirs.enumerate_support()):
            for form in (value, value.long(), value.bool()):
                assert_close(ours.log_prob(form), theirs.log_prob(value))
        for name in ("entropy", "enumerate_support"):
            assert_close(getattr(ours, name)().to(F64), getattr(theirs, name)())
        for name in ("mode", "probs", "logits", "mean", "variance"):
            assert_close(getattr(ours, name).to(F64), getattr(theirs, name))
        assert torch.equal(ours.deterministic_sample, theirs.mode.long())
        assert (ours.batch_shape, ours.event_shape, ours.num_params) == ((2,), (), 1)
        big = ours.expand((5, 2))
        assert big.batch_shape == (5, 2) and big.sample((4,)).shape == (4, 5, 2, 3)
        assert_close(big.log_prob(big.mode), ours.log_prob(ours.mode).expand(5, 2))
    assert OneHotCategorical(torch.zeros(2, 3)).mode.tolist() == [[1, 0, 0]] * 2  # tied
    assert OneHotCategorical(torch.zeros(2, 3, 1)).sample().shape == (2, 3)
    assert OneHotCategorical(probs=torch.ones(2, 3, 1)).probs.shape == (2, 3)


P = torch.tensor([0.2, 0.0, 0.7, 0.1])
DRAWS = {
    "sample": lambda n: OneHotCategorical(probs=P).sample((n,)),
    "rsample": lambda n: OneHotCategorical(probs=P).rsample((n,)),
    "by logits": lambda n: rand_one_hot(P.log().expand(n, 4)),
    "of any sum": lambda n: rand_one_hot(0.4 * P.expand(n, 4), do_softmax=False),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_have_the_frequencies_of_the_probabilities(name):
    torch.manual_seed(0)
    x = DRAWS[name](20000)
    assert x.dtype == (torch.float32 if name == "rsample" else torch.long)
    assert x.shape == (20000, 4) and (x.sum(-1) == 1).all() and x[:, 1].sum() == 0
    assert_close(x.float().mean(0), P, atol=0.012, rtol=0)
    assert rand_one_hot(torch.zeros(2, 4, 3)).shape == (2, 4, 3)


def test_one_hot_gradients():
    logits = torch.randn(4, 3, dtype=F64, requires_grad=True)
    weight = torch.arange(3.0, dtype=F64)
    torch.manual_seed(1)
    relaxed = D.RelaxedOneHotCategorical(torch.tensor(1.0, dtype=F64), logits=logits).rsample()
    torch.manual_seed(1)
    hard = OneHotCategorical(logits).rsample()
    assert torch.equal(hard, (relaxed == relaxed.amax(-1, keepdim=True)).double())
    expected = torch.autograd.grad((relaxed * weight).sum(), logits)
    assert_close(torch.autograd.grad((hard * weight).sum(), logits), expected)
    assert not OneHotCategorical(logits).sample().requires_grad
    masked = torch.tensor([0.0, -INF, 1.0], requires_grad=True)
    dist = OneHotCategorical(masked)
    (grad,) = torch.autograd.grad((dist.rsample((50,)) * torch.arange(3)).sum(), masked)
    assert grad.isfinite().all() and grad[1] == 0 and dist.mode.tolist() == [0, 0, 1]


# -- TanhNormal


def test_a_tanh_normal_is_a_density_within_its_bounds_whose_own_draws_and_extremes_are_finite():
    low, high = f64(-2.0, 0.0), f64(1.0, 0.5)
    dist = TanhNormal(f64(0.3, -1.0), f64(0.7, 0.4), low, high)
    line = [
        torch.linspace(a + 1e-6, b - 1e-6, 1501, dtype=F64) for a, b in zip(low, high, strict=True)
    ]
    density = dist.log_prob(torch.cartesian_prod(*line)).exp().view(1501, 1501)
    total = torch.trapezoid(torch.trapezoid(density, line[1]), line[0])
    assert_close(total, f64(1.0), atol=1e-4, rtol=0)
    assert_close(dist.deterministic_sample, low + (dist.loc.tanh() + 1) / 2 * (high - low))
    drawn = TanhNormal(f64(30.0, -30.0), f64(0.1, 0.1)).expand((4,)).rsample()
    assert bool(dist.log_prob(torch.stack([low, high])).isfinite().all())
    assert drawn.shape == (4, 2) and bool((drawn.abs() <= 1).all())
    far = TanhNormal(f64(12.0, 12.0), f64(1.0, 1.0))
    action = far.rsample()
    before, _ = far.log_prob(action), far.deterministic_sample
    assert_close(far.log_prob(action), before, atol=0, rtol=0)
    with pytest.raises(ValueError, match="must be below high"):
        TanhNormal(f64(0.0, 0.0), f64(1.0, 1.0), low=1.0, high=-1.0)


# -- TruncatedNormal

EASY = [(0.0, 1.0, -1.0, 1.0), (0.3, 0.5, -1.0, 2.0), (1.5, 1.0, -1.0, 1.0), (0.0, 1.0, 0.0, 2.0)]
# Far in the tail, nearly flat, at a bound, without bounds: cases that break closed formulas.
BOUNDED = [(50.0, 1.0), (-9.0, 0.1), (0.3, 1e3), (40.0, 1e3), (1.0, 1.0), (0.0, 1e-3)]
HARD = [(*params, -1.0, 1.0) for params in BOUNDED]
HARD += [(0.5, 1.0, -INF, INF), (9.0, 2.0, -INF, 1.0), (-9.0, 2.0, 0.0, INF)]
all_params = pytest.mark.parametrize("params", EASY + HARD, ids=str)


def grid_of(params, points=40001):
    """Points and trapezoid weights that cover all but 1e-20 of the density (log-concave)."""
    loc, scale, a, b = params
    mode = min(max(loc, a), b)
    slope = abs(mode - loc) / scale
    reach = scale * 2 * 48 / (math.sqrt(slope**2 + 96) + slope)
    x = torch.linspace(max(a, mode - reach), min(b, mode + reach), points, dtype=F64)
    weight = torch.full_like(x, float(x[-1] - x[0]) / (points - 1))
    weight[[0, -1]] /= 2
    return x, weight


def truncated(params, dtype=F64, **kwargs):
    return TruncatedNormal(*(torch.tensor(p, dtype=dtype) for p in params), **kwargs)


@all_params
def test_truncated_normal_statistics_are_integrals_of_its_density(params):
    dist, (x, weight) = truncated(params), grid_of(params)
    log_density = dist.log_prob(x)
    mass = weight * log_density.exp()
    mean = (mass * x).sum()
    close = dict(rtol=1e-5, atol=1e-9)
    assert_close(mass.sum(), f64(1.0), **close)
    assert_close(dist.mean, mean, **close)
    assert_close(dist.deterministic_sample, dist.mean)
    assert_close(dist.variance, (mass * (x - mean) ** 2).sum(), **close)
    assert_close(dist.stddev**2, dist.variance)
    assert_close(dist.entropy(), -(mass * log_density).sum(), **close)
    cdf = torch.cumsum(mass, 0) - mass / 2
    assert_close(dist.cdf(x)[5::500], cdf[5::500], rtol=0, atol=1e-4)
    u = f64(1e-3, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999)
    assert_close(dist.cdf(dist.icdf(u)), u, rtol=0, atol=1e-6)
    bounds = [params[2], params[3]]
    assert dist.icdf(f64(0.0, 1.0)).tolist() == bounds
    assert dist.mode == min(max(params[0], params[2]), params[3])
    assert truncated(params, validate_args=False).cdf(f64(*bounds)).tolist() == [0, 1]


@all_params
def test_truncated_normal_samples_and_single_precision(params):
    torch.manual_seed(0)
    dist = truncated(params)
    x = dist.sample((20000,))
    assert (x >= params[2]).all() and (x <= params[3]).all()
    assert abs(x.mean() - dist.mean) < 4 * dist.stddev / math.sqrt(20000)
    assert_close(x.std(), dist.stddev, rtol=0.04, atol=0, check_dtype=False)
    one, u = truncated(params, torch.float32), f64(1e-3, 0.1, 0.5, 0.9, 0.999)
    tolerance = float(dist.stddev) * 1e-4 + 2e-7 * abs(float(dist.mean))
    single = dict(rtol=0, atol=tolerance, check_dtype=False)
    assert_close(one.icdf(u.float()), dist.icdf(u), **single)
    assert_close(one.mean, dist.mean, **single)
    assert_close(one.stddev, dist.stddev, rtol=1e-4, atol=0, check_dtype=False)
    assert_close(one.entropy(), dist.entropy(), rtol=0, atol=1e-4, check_dtype=False)
    assert one.mean.dtype == one.rsample().dtype == one.log_prob(one.mode).dtype == torch.float32


X, U = torch.linspace(0.1, 0.9, 9, dtype=F64), torch.linspace(0.1, 0.9, 9, dtype=F64)
LIKE = [  # a truncated normal, a distribution that it is like, and to which tolerance
    ((0.5, 2.0, -INF, INF), D.Normal(f64(0.5), f64(2.0)), 1e-6),
    ((0.0, 2.0, 0.0, INF), D.HalfNormal(f64(2.0)), 1e-5),
    ((0.0, 1e6, -1.0, 3.0), D.Uniform(f64(-1.0), f64(3.0)), 1e-5),
]


@pytest.mark.parametrize("params, like, atol", LIKE)
def test_limits_of_a_truncated_normal(params, like, atol):
    dist = truncated(params)
    for name, at in (("log_prob", X), ("cdf", X), ("icdf", U)):
        assert_close(getattr(dist, name)(at), getattr(like, name)(at), rtol=1e-5, atol=atol)
    assert_close(dist.entropy(), like.entropy(), rtol=1e-5, atol=atol)
    for name in ("mean", "variance"):
        assert_close(getattr(dist, name), getattr(like, name), rtol=1e-5, atol=atol)


def test_far_in_the_tail_it_is_exponential():
    """At distance p the density decays like exp(-p t), so the mean is 1 / p from the bound."""
    dist = TruncatedNormal(1e4, 1.0, -1.0, 1.0)
    assert_close(1 - dist.mean.double(), f64(1e-4), rtol=1e-2, atol=0)
    assert_close(dist.entropy(), torch.tensor(1 - math.log(9999)))
    assert_close(dist.stddev, torch.tensor(1 / 9999))


def test_truncated_normal_shapes_and_attributes():
    dist = TruncatedNormal(torch.zeros(2, 1), 1.0, -torch.ones(3), 1.0)
    assert dist.batch_shape == (2, 3) and dist.event_shape == ()
    assert dist.loc.shape == dist.scale.shape == dist.mean.shape == dist.entropy().shape == (2, 3)
    for draw in (dist.sample, dist.rsample):
        assert draw((5, 4)).shape == (5, 4, 2, 3)
    assert dist.log_prob(torch.zeros(5, 1, 1)).shape == (5, 2, 3)
    assert TruncatedNormal(0, 1, -1, 1).sample().shape == ()
    half = TruncatedNormal(torch.zeros(2, dtype=torch.float16), 1.0, -1.0, 1.0)
    assert half.rsample().dtype == torch.float32
    assert_close(half.variance.float(), torch.full((2,), 0.2911), atol=1e-3, rtol=0)
    dist, normal = TruncatedNormal(torch.tensor(5.0), 2.0, 4.0, 7.0), D.Normal(5.0, 2.0)
    assert (dist.loc, dist.scale, dist.a, dist.b) == (5, 2, -0.5, 1.0)  # bounds in units of scale
    assert (dist.support.lower_bound, dist.support.upper_bound) == (4, 7)
    assert TruncatedNormal.has_rsample and TruncatedNormal.eps == 1e-6
    assert_close(dist.auc, normal.cdf(torch.tensor(7.0)) - normal.cdf(torch.tensor(4.0)))
    small = TruncatedNormal(0.0, torch.tensor([0.0, -1.0]), -1.0, 1.0)
    assert small.scale.tolist() == [pytest.approx(1e-6)] * 2


def test_truncated_normal_expanded():
    dist = TruncatedNormal(torch.zeros(3), 1.0, -1.0, 2.0)
    big, x = dist.expand((2, 3)), torch.tensor([-0.5, 0.0, 1.5])
    assert big.batch_shape == (2, 3) and big.rsample((5,)).shape == (5, 2, 3)
    assert_close(big.log_prob(x), dist.log_prob(x).expand(2, 3))
    assert_close(big.mean, dist.mean.expand(2, 3))
    with pytest.raises(ValueError, match="within the support"):
        big.log_prob(x + 1)


def test_truncated_normal_log_prob_outside_is_minus_infinity_ours():
    loc = torch.zeros(4, requires_grad=True)
    dist = TruncatedNormal(loc, 1.0, -1.0, 1.0, validate_args=False)
    out = dist.log_prob(torch.tensor([-INF, -1.1, 0.5, 1.1]))
    assert out[[0, 1, 3]].tolist() == [-INF] * 3 and out[2].isfinite()
    (grad,) = torch.autograd.grad(out[2], loc)
    assert grad.isfinite().all()
    assert dist.cdf(torch.tensor([-INF, -2.0, 2.0, INF])).tolist() == [0, 0, 1, 1]


def gradients_hold(function, *args):
    return torch.autograd.gradcheck(function, args, eps=1e-6, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("params", EASY[:3] + HARD, ids=str)
def test_truncated_normal_gradients(params):
    args = [f64(p).requires_grad_(math.isfinite(p)) for p in params]
    u = f64(0.05, 0.3, 0.6, 0.95)
    assert gradients_hold(lambda *args: TruncatedNormal(*args).mean, *args)
    if params in HARD[2:]:
        if params[1] < 100:
            assert torch.autograd.gradgradcheck(
                lambda *args: TruncatedNormal(*args).icdf(u[1:]), args, atol=1e-4, rtol=1e-3
            )
        return
    x = truncated(params).icdf(u).detach().requires_grad_()

    def rsample(*args):
        torch.manual_seed(3)
        return TruncatedNormal(*args).rsample((4,))

    def log_prob(x, *args):
        return TruncatedNormal(*args, validate_args=False).log_prob(x)

    assert gradients_hold(rsample, *args)
    assert gradients_hold(log_prob, x, *args)
    assert gradients_hold(lambda *args: TruncatedNormal(*args).variance, *args)
    assert gradients_hold(lambda *args: TruncatedNormal(*args).entropy(), *args)


def test_samples_at_a_bound_keep_their_gradient():
    loc = torch.tensor([100.0, -100.0], requires_grad=True)
    x = TruncatedNormal(loc, 1.0, -1.0, 1.0).rsample()
    assert_close(x.detach(), torch.tensor([1.0, -1.0]), atol=0.2, rtol=0)
    (grad,) = torch.autograd.grad(x.sum(), loc)
    assert grad.isfinite().all() and (grad != 0).all()
    assert not TruncatedNormal(loc, 1.0, -1.0, 1.0).sample().requires_grad


# -- mistakes

RANGE, ZEROS = "Incorrect truncation range", torch.zeros(4, 2)


def scaled(*shape):
    return lambda: AddStateIndependentNormalScale(3)(torch.zeros(shape))


ERRORS = [  # a call, its error, and words of its message
    (lambda: mappings("sofplus"), NotImplementedError, 'Unknown mapping sofplus.*mean "softplus"'),
    (lambda: mappings(torch.exp), TypeError, "must be given by name"),
    (lambda: mappings("biased_softplus_1_2_3"), ValueError, "softplus"),
    (lambda: mappings("biased_softplus_a"), ValueError, "softplus"),
    (lambda: add_custom_mapping("test_number", 3), TypeError, "a name and a function"),
    (lambda: NormalParamExtractor()(torch.zeros(3, 1)), ValueError, "split"),
    *((scaled(*shape), RuntimeError, "Last dimensions of") for shape in ((), (1,), (3, 2))),
    (lambda: Delta(ZEROS, event_shape=(3,)), ValueError, "leave one of them out"),
    (lambda: Delta(ZEROS, batch_shape=(5,), event_shape=(2,)), ValueError, "leave one of them out"),
    (lambda: OneHotCategorical(torch.zeros(2, 3)).log_prob(torch.eye(4)[0]), ValueError, "categor"),
    (lambda: TruncatedNormal(0.0, 1.0, 1.0, 1.0), ValueError, RANGE),
]


test_errors = refusals(ERRORS)


# -- transformations of torch


def statistics(loc, logits):
    dist, categories = TruncatedNormal(loc, 1.0, -1.0, 1.0), OneHotCategorical(logits)
    delta = Delta(logits)
    return (
        *(dist.log_prob(loc / 9), dist.icdf(loc.sigmoid()), dist.mean, dist.entropy()),
        *(categories.log_prob(categories.mode), categories.mode, categories.entropy()),
        *(delta.log_prob(logits), delta.rsample(), mappings("biased_softplus_2.0")(loc)),
    )


def test_distributions_map_over_a_batch():
    loc, logits = torch.tensor([-2.0, 0.0, 0.3, 5.0]), torch.randn(4, 3)
    assert_close(torch.vmap(statistics)(loc, logits), statistics(loc, logits))

    def draw(loc, logits):
        categories = OneHotCategorical(logits)
        samples = (categories.sample(), categories.rsample(), rand_one_hot(logits))
        return TruncatedNormal(loc, 1.0, -1.0, 1.0).rsample((2,)), *samples

    drawn = torch.vmap(draw, randomness="different")(torch.zeros(4), torch.zeros(4, 3))
    assert [tuple(x.shape) for x in drawn] == [(4, 2), (4, 3), (4, 3), (4, 3)]


def test_distributions_compile_as_one_graph():
    def draw(loc, logits):
        x = TruncatedNormal(loc, 1.0, -1.0, 1.0).rsample((2,))
        return x.sum() + (OneHotCategorical(logits).rsample() * torch.arange(4)).sum()

    args = torch.tensor([-2.0, 0.0, 5.0]), torch.randn(3, 4)
    compiled = torch.compile(statistics, fullgraph=True, backend="eager")
    assert_close(compiled(*args), statistics(*args))
    args = [x.requires_grad_() for x in args]
    compiled = torch.compile(draw, fullgraph=True, backend="eager")
    for grad in torch.autograd.grad(compiled(*args), args):
        assert grad.isfinite().all() and grad.abs().sum() > 0
