"""Distributions and the modules that make their parameters, against torch and quadrature."""

import math

import pytest
import torch
from torch import distributions as D
from torch import nn

from raffia.nn import (
    AddStateIndependentNormalScale,
    NormalParamExtractor,
    OneHotCategorical,
    TruncatedNormal,
    add_custom_mapping,
    biased_softplus,
    inv_softplus,
    mappings,
    rand_one_hot,
)
from raffia.nn.distributions import Delta

F64 = torch.float64
INF = math.inf


def f64(*values):
    return torch.tensor(values if len(values) > 1 else values[0], dtype=F64)


# -- mappings


def test_inv_softplus_inverts_softplus():
    bias = f64(1e-3, 0.1, 1.0, 5.0, 30.0)
    torch.testing.assert_close(nn.functional.softplus(inv_softplus(bias)), bias)


def test_inv_softplus_of_a_number_is_a_number():
    out = inv_softplus(1.0)
    assert isinstance(out, float)
    assert out == pytest.approx(math.log(math.e - 1), rel=1e-6)


def test_inv_softplus_is_finite_where_softplus_has_no_inverse():
    assert inv_softplus(0.0) == pytest.approx(math.log(1e-6), abs=1e-5)
    assert inv_softplus(-3.0) == inv_softplus(0.0)


def test_inv_softplus_of_large_numbers_does_not_overflow_ours():
    assert inv_softplus(800.0) == 800.0
    assert inv_softplus(torch.tensor(100.0)) == 100.0


@pytest.mark.parametrize("bias", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("min_val", [0.01, 0.2])
def test_biased_softplus_is_bias_at_zero_and_min_val_at_minus_infinity(bias, min_val):
    f = biased_softplus(bias, min_val)
    torch.testing.assert_close(f(torch.zeros(3)), torch.full((3,), bias))
    torch.testing.assert_close(f(torch.tensor(-200.0)), torch.tensor(min_val))
    assert isinstance(f, nn.Module) and not list(f.parameters()) and not f.state_dict()


@pytest.mark.parametrize(
    "key, function",
    [
        ("softplus", nn.functional.softplus),
        ("exp", torch.exp),
        ("relu", torch.relu),
        ("none", lambda x: x),
        ("expln", lambda x: torch.where(x > 0, (x.clamp(min=0) + 1).log() + 1, x.exp())),
        ("biased_softplus", lambda x: biased_softplus(1.0)(x)),
        ("biased_softplus_2.0", lambda x: biased_softplus(2.0)(x)),
        ("biased_softplus_2.0_0.1", lambda x: biased_softplus(2.0, 0.1)(x)),
        ("biased_softplus_1e-1", lambda x: biased_softplus(0.1)(x)),
    ],
)
def test_a_mapping_is_found_by_its_name(key, function):
    x = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0])
    torch.testing.assert_close(mappings(key)(x), function(x))


def test_expln_has_a_finite_gradient_everywhere():
    x = torch.tensor([-1e4, -1.0, 0.0, 1.0, 1e4], requires_grad=True)
    (grad,) = torch.autograd.grad(mappings("expln")(x).sum(), x)
    torch.testing.assert_close(grad, torch.tensor([0.0, math.exp(-1), 1.0, 0.5, 1 / 10001]))


def test_an_unknown_mapping_is_refused():
    with pytest.raises(NotImplementedError, match="Unknown mapping sofplus"):
        mappings("sofplus")


def test_an_unknown_mapping_names_the_nearest_ours():
    with pytest.raises(NotImplementedError, match='Did you mean "softplus"'):
        mappings("sofplus")
    with pytest.raises(TypeError, match="by its name"):
        mappings(torch.exp)


@pytest.mark.parametrize(
    "key", ["biased_softplus_1_2_3", "biased_softplus1.0", "biased_softplus_a"]
)
def test_biased_softplus_without_numbers_in_place_is_refused(key):
    with pytest.raises(ValueError):
        mappings(key)


def test_a_custom_mapping_can_be_named_and_replaced():
    add_custom_mapping("test_shifted", lambda x: x + 1)
    assert mappings("test_shifted")(torch.tensor(1.0)) == 2
    add_custom_mapping("test_shifted", lambda x: x + 2)
    _, scale = NormalParamExtractor("test_shifted")(torch.ones(4))
    assert scale.tolist() == [3, 3]


def test_a_custom_mapping_goes_before_the_parsed_name():
    add_custom_mapping("biased_softplus_77", torch.exp)
    assert mappings("biased_softplus_77")(torch.tensor(0.0)) == 1


def test_a_custom_mapping_that_is_no_function_is_refused_ours():
    with pytest.raises(TypeError, match="a name and a function"):
        add_custom_mapping("test_number", 3)


# -- modules that make parameters


def test_normal_param_extractor_splits_maps_and_clamps():
    x = torch.tensor([[1.0, 2.0, 0.0, -30.0]])
    loc, scale = NormalParamExtractor("exp", scale_lb=1e-2)(x)
    assert loc.tolist() == [[1, 2]]
    torch.testing.assert_close(scale, torch.tensor([[1.0, 1e-2]]))
    torch.testing.assert_close(NormalParamExtractor()(torch.zeros(4))[1], torch.ones(2))


def test_normal_param_extractor_passes_the_rest_through():
    loc, scale, one, two = NormalParamExtractor()(torch.zeros(2, 5), 1, "two")
    assert loc.shape == (2, 3) and scale.shape == (2, 2) and (one, two) == (1, "two")


@pytest.mark.parametrize("args", [(), (torch.zeros(3, 1),)])
def test_normal_param_extractor_refuses_what_it_cannot_split(args):
    with pytest.raises(ValueError):
        NormalParamExtractor()(*args)


def test_normal_param_extractor_refuses_an_unknown_mapping():
    with pytest.raises(NotImplementedError, match="Unknown mapping"):
        NormalParamExtractor("nothing")


def test_normal_param_wrapper_runs_the_operator_ours():
    from raffia.nn.distributions import NormalParamWrapper

    net = nn.Linear(3, 4)
    wrapped = NormalParamWrapper(net, "exp", scale_lb=0.5)
    x = torch.randn(2, 3)
    loc, scale = wrapped(x)
    torch.testing.assert_close(loc, net(x)[:, :2])
    torch.testing.assert_close(scale, net(x)[:, 2:].exp().clamp_min(0.5))
    assert wrapped.operator is net and len(list(wrapped.parameters())) == 2


def test_normal_param_wrapper_passes_extra_outputs_through_ours():
    from raffia.nn.distributions import NormalParamWrapper

    loc, scale, (hidden, cell) = NormalParamWrapper(nn.LSTM(3, 4))(torch.zeros(5, 2, 3))
    assert loc.shape == scale.shape == (5, 2, 2) and hidden.shape == cell.shape == (1, 2, 4)


@pytest.mark.parametrize("shape", [None, 3, (3,), (2, 3), torch.Size([2, 3])])
@pytest.mark.parametrize("make_param", [True, False])
def test_state_independent_scale_is_expanded_to_the_location(shape, make_param):
    module = AddStateIndependentNormalScale(shape, make_param=make_param, init_value=0.5)
    loc = torch.randn(5, 2, 3)
    out, scale, other = module(loc, "other")
    assert out is loc and other == "other"
    torch.testing.assert_close(scale.detach(), torch.full((5, 2, 3), math.exp(0.5)))
    assert len(list(module.parameters())) == make_param
    assert list(module.state_dict()) == ["state_independent_scale"]
    assert scale.requires_grad == make_param


def test_state_independent_scale_is_mapped_and_clamped():
    module = AddStateIndependentNormalScale(3, scale_mapping="softplus", scale_lb=3.0)
    assert module(torch.zeros(3))[1].tolist() == [3, 3, 3]
    assert (module.scale_shape, module.scale_mapping, module.scale_lb) == ((3,), "softplus", 3.0)


@pytest.mark.parametrize("loc", [torch.zeros(()), torch.zeros(1), torch.zeros(3, 2)])
def test_state_independent_scale_refuses_a_location_of_another_shape(loc):
    with pytest.raises(RuntimeError, match="Last dimensions of loc"):
        AddStateIndependentNormalScale(3)(loc)


# -- Delta


@pytest.mark.parametrize(
    "shapes, batch, event",
    [
        ({}, (4,), (2,)),
        (dict(batch_shape=(), event_shape=()), (4,), (2,)),
        (dict(batch_shape=torch.Size([4, 2])), (4, 2), ()),
        (dict(batch_shape=torch.Size([4]), event_shape=torch.Size([2])), (4,), (2,)),
    ],
)
def test_delta_has_the_shapes_it_was_given(shapes, batch, event):
    param = torch.randn(4, 2)
    dist = Delta(param, **shapes)
    assert tuple(dist.batch_shape) == batch and tuple(dist.event_shape) == event
    assert dist.log_prob(param).shape == batch
    assert dist.sample((5,)).shape == (5, 4, 2)


def test_delta_reads_the_other_shape_off_the_parameter_ours():
    param = torch.randn(5, 4, 2)
    assert Delta(param, event_shape=(4, 2)).batch_shape == (5,)
    assert Delta(param, batch_shape=(5,)).event_shape == (4, 2)
    assert Delta(param, event_shape=(4, 2)).log_prob(param).shape == (5,)


def test_delta_refuses_shapes_that_are_not_the_parameter_s_ours():
    with pytest.raises(ValueError, match="leave one of them out"):
        Delta(torch.zeros(4, 2), event_shape=(3,))
    with pytest.raises(ValueError, match="leave one of them out"):
        Delta(torch.zeros(4, 2), batch_shape=(5,), event_shape=(2,))


def test_delta_log_prob_is_infinite_at_the_value_only():
    dist = Delta(f64(0.0, 1.0))
    value = torch.tensor([[0.0, 1.0], [0.0, 1.1], [1.0, 0.0]], dtype=F64)
    out = Delta(f64(0.0, 1.0).expand(3, 2)).log_prob(value)
    assert out.tolist() == [INF, -INF, -INF] and out.dtype == F64
    assert dist.log_prob(f64(0.0, 1 + 1e-7)) == INF


def test_delta_tolerances_add_up():
    param = torch.tensor([10.0])
    assert Delta(param, atol=0.1, rtol=0.0).log_prob(param + 0.05) == INF
    assert Delta(param, atol=0.1, rtol=0.0).log_prob(param + 0.15) == -INF
    assert Delta(param, atol=0.0, rtol=0.1).log_prob(param + 0.9) == INF
    assert Delta(param, atol=0.1, rtol=0.1).log_prob(param + 1.05) == INF


def test_delta_equality_needs_no_tolerance_ours():
    for param in (torch.tensor([INF]), torch.tensor([3]), torch.tensor([True])):
        assert Delta(param, atol=0.0, rtol=0.0).log_prob(param) == INF
        assert Delta(param, atol=0.0, rtol=0.0).log_prob(torch.zeros(1)) == -INF
    nan = torch.tensor([math.nan])
    assert Delta(nan).log_prob(nan) == -INF


def test_delta_statistics_are_the_parameter():
    param = torch.randn(4, 2, requires_grad=True)
    dist = Delta(param)
    for value in (dist.mean, dist.mode, dist.deterministic_sample, dist.rsample()):
        assert torch.equal(value, param) and value.requires_grad
    assert torch.equal(dist.sample(), param) and not dist.sample().requires_grad
    dist.rsample((3,)).sum().backward()
    assert (param.grad == 3).all()
    assert Delta.has_rsample is False and Delta.arg_constraints == {}


def test_delta_update_keeps_the_number_of_event_dimensions():
    dist = Delta(torch.zeros(4, 2))
    dist.update(torch.ones(3, 2))
    assert dist.mean.tolist() == [[1, 1]] * 3


def test_delta_expand_and_spread_ours():
    dist = Delta(torch.arange(2.0), atol=0.5).expand((3,))
    assert dist.batch_shape == (3,) and dist.event_shape == (2,)
    assert dist.sample((5,)).shape == (5, 3, 2)
    assert dist.log_prob(torch.tensor([0.3, 1.3])).tolist() == [INF] * 3
    assert not dist.variance.any() and not dist.stddev.any()
    independent = D.Independent(Delta(torch.zeros(4, 2), batch_shape=(4, 2)), 1)
    assert independent.log_prob(torch.zeros(4, 2)).shape == (4,)


# -- OneHotCategorical


def test_one_hot_agrees_with_torch():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, dtype=F64)
    ours, theirs = OneHotCategorical(logits), D.OneHotCategorical(logits=logits)
    value = theirs.sample((5,))
    torch.testing.assert_close(ours.log_prob(value), theirs.log_prob(value))
    torch.testing.assert_close(ours.log_prob(value.long()), theirs.log_prob(value))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    torch.testing.assert_close(ours.mode, theirs.mode.long())
    torch.testing.assert_close(ours.deterministic_sample, theirs.mode.long())
    torch.testing.assert_close(ours.probs, theirs.probs)
    torch.testing.assert_close(ours.logits, theirs.logits)
    assert (ours.batch_shape, ours.event_shape, ours.num_params) == ((2,), (), 1)
    torch.testing.assert_close(OneHotCategorical(probs=ours.probs).logits, theirs.logits)


def test_one_hot_moments_and_support_agree_with_torch_ours():
    logits = torch.randn(2, 3)
    ours, theirs = OneHotCategorical(logits), D.OneHotCategorical(logits=logits)
    torch.testing.assert_close(ours.mean, theirs.mean)
    torch.testing.assert_close(ours.variance, theirs.variance)
    assert torch.equal(ours.enumerate_support().float(), theirs.enumerate_support())
    support = ours.enumerate_support()
    torch.testing.assert_close(ours.log_prob(support).exp().sum(0), torch.ones(2))
    big = ours.expand((5, 2))
    assert big.batch_shape == (5, 2) and big.sample((4,)).shape == (4, 5, 2, 3)
    torch.testing.assert_close(big.log_prob(big.mode), ours.log_prob(ours.mode).expand(5, 2))


def test_one_hot_samples_have_the_frequencies_of_the_probabilities():
    torch.manual_seed(0)
    probs = torch.tensor([[0.2, 0.0, 0.8], [0.5, 0.25, 0.25]])
    dist = OneHotCategorical(probs=probs)
    for draw in (dist.sample, dist.rsample):
        x = draw((20000,))
        assert x.shape == (20000, 2, 3) and (x.sum(-1) == 1).all()
        torch.testing.assert_close(x.float().mean(0), probs, atol=0.012, rtol=0)
    assert dist.sample().dtype == torch.long and dist.rsample().dtype == torch.float32


def test_one_hot_rsample_has_the_gradient_of_the_relaxed_sample_ours():
    logits = torch.randn(4, 3, dtype=F64, requires_grad=True)
    weight = torch.arange(3.0, dtype=F64)
    torch.manual_seed(1)
    relaxed = D.RelaxedOneHotCategorical(torch.tensor(1.0, dtype=F64), logits=logits).rsample()
    torch.manual_seed(1)
    hard = OneHotCategorical(logits).rsample()
    assert torch.equal(hard, (relaxed == relaxed.amax(-1, keepdim=True)).double())
    expected = torch.autograd.grad((relaxed * weight).sum(), logits)
    torch.testing.assert_close(torch.autograd.grad((hard * weight).sum(), logits), expected)
    assert not OneHotCategorical(logits).sample().requires_grad


def test_one_hot_log_prob_gradient():
    value = torch.eye(3, dtype=torch.long)[[0, 2]]
    logits = torch.randn(2, 3, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: OneHotCategorical(x).log_prob(value), logits)


def test_one_hot_never_draws_a_masked_category():
    logits = torch.tensor([0.0, -INF, 1.0], requires_grad=True)
    dist = OneHotCategorical(logits)
    assert dist.sample((500,)).sum(0)[1] == 0 and dist.rsample((500,)).sum(0)[1] == 0
    x = dist.rsample((50,))
    (grad,) = torch.autograd.grad((x * torch.arange(3)).sum(), logits)
    assert grad.isfinite().all() and grad[1] == 0
    assert dist.mode.tolist() == [0, 0, 1]


def test_one_hot_mode_of_tied_logits_is_one_hot():
    assert OneHotCategorical(torch.zeros(2, 3)).mode.tolist() == [[1, 0, 0]] * 2


def test_one_hot_drops_a_last_dimension_of_one():
    assert OneHotCategorical(torch.zeros(2, 3, 1)).sample().shape == (2, 3)
    assert OneHotCategorical(probs=torch.ones(2, 3, 1)).probs.shape == (2, 3)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        dict(logits=torch.zeros(3), probs=torch.ones(3)),
        dict(logits=torch.full((3,), -INF)),
        dict(logits=torch.tensor([0.0, math.nan])),
    ],
)
def test_one_hot_refuses_parameters_outside_their_domain(kwargs):
    with pytest.raises(ValueError):
        OneHotCategorical(**kwargs)


def test_one_hot_log_prob_refuses_another_number_of_categories():
    with pytest.raises(ValueError):
        OneHotCategorical(torch.zeros(2, 3)).log_prob(torch.tensor([0, 0, 0, 1]))


def test_one_hot_log_prob_refuses_indices_and_takes_booleans_ours():
    dist = OneHotCategorical(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="use torch.distributions.Categorical"):
        dist.log_prob(torch.tensor([0, 1]))
    torch.testing.assert_close(dist.log_prob(dist.mode.bool()), dist.log_prob(dist.mode))


def test_rand_one_hot_draws_with_the_probabilities():
    torch.manual_seed(0)
    probs = torch.tensor([0.2, 0.0, 0.7, 0.1])
    x = rand_one_hot(probs.log().expand(20000, 4))
    assert x.dtype == torch.long and (x.sum(-1) == 1).all()
    torch.testing.assert_close(x.float().mean(0), probs, atol=0.012, rtol=0)
    y = rand_one_hot(probs.expand(20000, 4), do_softmax=False)
    torch.testing.assert_close(y.float().mean(0), probs, atol=0.012, rtol=0)
    assert y[:, 1].sum() == 0
    assert rand_one_hot(torch.zeros(2, 4, 3)).shape == (2, 4, 3)


def test_rand_one_hot_takes_probabilities_of_any_sum_ours():
    torch.manual_seed(0)
    x = rand_one_hot(torch.tensor([0.1, 0.3, 0.0]).expand(20000, 3), do_softmax=False)
    expected = torch.tensor([0.25, 0.75, 0.0])
    torch.testing.assert_close(x.float().mean(0), expected, atol=0.012, rtol=0)


# -- TruncatedNormal

EASY = [(0.0, 1.0, -1.0, 1.0), (0.3, 0.5, -1.0, 2.0), (1.5, 1.0, -1.0, 1.0), (0.0, 1.0, 0.0, 2.0)]
# Far out, hardly bent, at a bound, without bounds: where the formulas in closed form break.
HARD = [
    (50.0, 1.0, -1.0, 1.0),
    (-9.0, 0.1, -1.0, 1.0),
    (0.3, 1e3, -1.0, 1.0),
    (40.0, 1e3, -1.0, 1.0),
    (1.0, 1.0, -1.0, 1.0),
    (0.0, 1e-3, -1.0, 1.0),
    (0.5, 1.0, -INF, INF),
    (9.0, 2.0, -INF, 1.0),
    (-9.0, 2.0, 0.0, INF),
]


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


@pytest.mark.parametrize("params", EASY + [pytest.param(p, id=f"ours-{p}") for p in HARD])
def test_truncated_normal_statistics_are_integrals_of_its_density(params):
    dist, (x, weight) = truncated(params), grid_of(params)
    log_density = dist.log_prob(x)
    mass = weight * log_density.exp()
    mean = (mass * x).sum()
    close = dict(rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(mass.sum(), f64(1.0), **close)
    torch.testing.assert_close(dist.mean, mean, **close)
    torch.testing.assert_close(dist.variance, (mass * (x - mean) ** 2).sum(), **close)
    torch.testing.assert_close(dist.stddev**2, dist.variance)
    torch.testing.assert_close(dist.entropy(), -(mass * log_density).sum(), **close)
    cdf = torch.cumsum(mass, 0) - mass / 2
    torch.testing.assert_close(dist.cdf(x)[5::500], cdf[5::500], rtol=0, atol=1e-4)


@pytest.mark.parametrize("params", EASY + [pytest.param(p, id=f"ours-{p}") for p in HARD])
def test_truncated_normal_icdf_inverts_cdf(params):
    dist = truncated(params)
    u = f64(1e-3, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999)
    torch.testing.assert_close(dist.cdf(dist.icdf(u)), u, rtol=0, atol=1e-6)


@pytest.mark.parametrize("params", EASY + HARD, ids=lambda p: f"ours-{p}")
def test_truncated_normal_icdf_reaches_both_bounds(params):
    bounds = [params[2], params[3]]
    assert truncated(params).icdf(f64(0.0, 1.0)).tolist() == bounds
    assert truncated(params, validate_args=False).cdf(f64(*bounds)).tolist() == [0, 1]


@pytest.mark.parametrize("params", EASY + HARD, ids=lambda p: f"ours-{p}")
def test_truncated_normal_in_single_precision_agrees_with_double_ours(params):
    one, two = truncated(params, torch.float32), truncated(params)
    u = f64(1e-3, 0.1, 0.5, 0.9, 0.999)
    tolerance = float(two.stddev) * 1e-4 + 2e-7 * abs(float(two.mean))
    single = dict(rtol=0, atol=tolerance, check_dtype=False)
    torch.testing.assert_close(one.icdf(u.float()), two.icdf(u), **single)
    torch.testing.assert_close(one.mean, two.mean, **single)
    torch.testing.assert_close(one.stddev, two.stddev, rtol=1e-4, atol=0, check_dtype=False)
    torch.testing.assert_close(one.entropy(), two.entropy(), rtol=0, atol=1e-4, check_dtype=False)
    assert one.mean.dtype == one.rsample().dtype == one.log_prob(one.mode).dtype == torch.float32


def test_truncated_normal_without_bounds_is_normal_ours():
    dist, normal = truncated((0.5, 2.0, -INF, INF)), D.Normal(f64(0.5), f64(2.0))
    x, u = torch.linspace(-5, 5, 11, dtype=F64), torch.linspace(0.1, 0.9, 9, dtype=F64)
    torch.testing.assert_close(dist.log_prob(x), normal.log_prob(x))
    torch.testing.assert_close(dist.cdf(x), normal.cdf(x), atol=1e-6, rtol=0)
    torch.testing.assert_close(dist.icdf(u), normal.icdf(u), atol=1e-6, rtol=0)
    torch.testing.assert_close(dist.entropy(), normal.entropy())
    torch.testing.assert_close(dist.variance, normal.variance)


def test_half_a_normal_is_half_normal():
    dist, half = truncated((0.0, 2.0, 0.0, INF)), D.HalfNormal(f64(2.0))
    x = f64(0.0, 0.1, 1.0, 5.0)
    single = dict(rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dist.log_prob(x), half.log_prob(x), **single)
    torch.testing.assert_close(dist.mean, half.mean, **single)
    torch.testing.assert_close(dist.variance, half.variance, **single)


def test_a_wide_normal_is_uniform_ours():
    dist = TruncatedNormal(0.0, 1e6, -1.0, 3.0)
    torch.testing.assert_close(dist.entropy(), torch.tensor(math.log(4)))
    torch.testing.assert_close(dist.variance, torch.tensor(16 / 12))
    torch.testing.assert_close(dist.icdf(torch.tensor([0.25, 0.75])), torch.tensor([0.0, 2.0]))


def test_far_in_the_tail_it_is_exponential_ours():
    """At distance p the density decays like exp(-p t), so the mean is 1 / p from the bound."""
    dist = TruncatedNormal(1e4, 1.0, -1.0, 1.0)
    torch.testing.assert_close(1 - dist.mean.double(), f64(1e-4), rtol=1e-2, atol=0)
    torch.testing.assert_close(dist.entropy(), torch.tensor(1 - math.log(9999)))
    torch.testing.assert_close(dist.stddev, torch.tensor(1 / 9999))


@pytest.mark.parametrize("params", EASY + [pytest.param(p, id=f"ours-{p}") for p in HARD])
def test_truncated_normal_samples_have_its_moments(params):
    torch.manual_seed(0)
    dist = truncated(params)
    x = dist.sample((20000,))
    assert (x >= params[2]).all() and (x <= params[3]).all()
    assert abs(x.mean() - dist.mean) < 4 * dist.stddev / math.sqrt(20000)
    torch.testing.assert_close(x.std(), dist.stddev, rtol=0.04, atol=0, check_dtype=False)


def test_truncated_normal_shapes_broadcast():
    dist = TruncatedNormal(torch.zeros(2, 1), 1.0, -torch.ones(3), 1.0)
    assert dist.batch_shape == (2, 3) and dist.event_shape == ()
    assert dist.loc.shape == dist.scale.shape == dist.mean.shape == dist.entropy().shape == (2, 3)
    for draw in (dist.sample, dist.rsample):
        assert draw().shape == (2, 3) and draw((5, 4)).shape == (5, 4, 2, 3)
    assert dist.log_prob(torch.zeros(5, 1, 1)).shape == (5, 2, 3)
    assert TruncatedNormal(0, 1, -1, 1).sample().shape == ()
    assert TruncatedNormal(torch.zeros(2, dtype=F64), 1.0, -1.0, 1.0).sample().dtype == F64


def test_truncated_normal_attributes():
    dist = TruncatedNormal(torch.tensor(5.0), 2.0, 4.0, 7.0)
    assert (dist.loc, dist.scale) == (5, 2)
    assert (dist.a, dist.b) == (-0.5, 1.0)  # in units of scale from loc
    assert (dist.support.lower_bound, dist.support.upper_bound) == (4, 7)
    assert TruncatedNormal.has_rsample and TruncatedNormal.eps == 1e-6
    normal = D.Normal(5.0, 2.0)
    torch.testing.assert_close(
        dist.auc, normal.cdf(torch.tensor(7.0)) - normal.cdf(torch.tensor(4.0))
    )


def test_the_smallest_scale_is_1e_6():
    assert (
        TruncatedNormal(0.0, torch.tensor([0.0, -1.0]), -1.0, 1.0).scale.tolist()
        == [pytest.approx(1e-6)] * 2
    )


def test_truncated_normal_mode_and_deterministic_sample_ours():
    dist = TruncatedNormal(torch.tensor([-3.0, 0.5, 9.0]), 1.0, -1.0, 1.0)
    assert dist.mode.tolist() == [-1, 0.5, 1]
    torch.testing.assert_close(dist.deterministic_sample, dist.mean)


@pytest.mark.parametrize("bounds", [(1.0, -1.0), (1.0, 1.0), (f64(0.0, 0.0), f64(1.0, -1.0))])
def test_bounds_out_of_order_are_refused(bounds):
    with pytest.raises(ValueError, match="Incorrect truncation range"):
        TruncatedNormal(0.0, 1.0, *bounds)


@pytest.mark.parametrize("position", range(4))
def test_nan_is_refused_where_arguments_are_checked(position):
    params = [0.0, 1.0, -1.0, 1.0]
    params[position] = math.nan
    with pytest.raises(ValueError, match="Expected parameter"):
        TruncatedNormal(*params, validate_args=True)
    assert TruncatedNormal(*params, validate_args=False).mean.isnan()


def test_a_location_that_is_infinite_is_refused():
    with pytest.raises(ValueError):
        TruncatedNormal(INF, 1.0, -1.0, 1.0)


def test_truncated_normal_log_prob_refuses_what_is_outside_if_checked():
    with pytest.raises(ValueError, match="within the support"):
        TruncatedNormal(0.0, 1.0, -1.0, 1.0, validate_args=True).log_prob(torch.tensor(1.1))


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


@pytest.mark.parametrize("params", EASY[:3] + [pytest.param(p, id=f"ours-{p}") for p in HARD[:2]])
def test_truncated_normal_gradients(params):
    args = [f64(p).requires_grad_() for p in params]
    u = f64(0.05, 0.3, 0.6, 0.95)
    x = truncated(params).icdf(u).detach().requires_grad_()

    def rsample(*args):
        torch.manual_seed(3)
        return TruncatedNormal(*args).rsample((4,))

    def log_prob(x, *args):
        return TruncatedNormal(*args, validate_args=False).log_prob(x)

    assert gradients_hold(rsample, *args)
    assert gradients_hold(log_prob, x, *args)
    for name in ("mean", "variance"):
        assert gradients_hold(lambda *args, name=name: getattr(TruncatedNormal(*args), name), *args)
    assert gradients_hold(lambda *args: TruncatedNormal(*args).entropy(), *args)


def test_truncated_normal_gradients_at_a_bound_and_without_one_ours():
    u = f64(0.05, 0.6, 0.95)
    for params in HARD[2:]:
        args = [f64(p).requires_grad_(math.isfinite(p)) for p in params]
        if params[1] < 100:
            assert torch.autograd.gradgradcheck(
                lambda *args: TruncatedNormal(*args).icdf(u), args, atol=1e-4, rtol=1e-3
            )
        assert gradients_hold(lambda *args: TruncatedNormal(*args).mean, *args)


def test_samples_at_a_bound_keep_their_gradient():
    loc = torch.tensor([100.0, -100.0], requires_grad=True)
    x = TruncatedNormal(loc, 1.0, -1.0, 1.0).rsample()
    torch.testing.assert_close(x.detach(), torch.tensor([1.0, -1.0]), atol=0.2, rtol=0)
    (grad,) = torch.autograd.grad(x.sum(), loc)
    assert grad.isfinite().all() and (grad != 0).all()
    assert not TruncatedNormal(loc, 1.0, -1.0, 1.0).sample().requires_grad


def test_truncated_normal_expand_ours():
    dist = TruncatedNormal(torch.zeros(3), 1.0, -1.0, 2.0).expand((2, 3))
    assert dist.batch_shape == (2, 3) and dist.rsample((5,)).shape == (5, 2, 3)
    x = torch.tensor([-0.5, 0.0, 1.5])
    expected = TruncatedNormal(torch.zeros(3), 1.0, -1.0, 2.0)
    torch.testing.assert_close(dist.log_prob(x), expected.log_prob(x).expand(2, 3))
    torch.testing.assert_close(dist.mean, expected.mean.expand(2, 3))
    with pytest.raises(ValueError, match="within the support"):
        dist.log_prob(x + 1)
    independent = D.Independent(expected, 1).expand((4,))
    assert independent.log_prob(x).shape == (4,)


def test_truncated_normal_takes_half_precision():
    dist = TruncatedNormal(torch.zeros(2, dtype=torch.float16), 1.0, -1.0, 1.0)
    assert dist.rsample().dtype == torch.float32
    torch.testing.assert_close(dist.variance.float(), torch.full((2,), 0.2911), atol=1e-3, rtol=0)


# -- transformations of torch


def test_distributions_map_over_a_batch_ours():
    def statistics(loc, logits):
        dist, categories = TruncatedNormal(loc, 1.0, -1.0, 1.0), OneHotCategorical(logits)
        delta = Delta(logits)
        return (
            (dist.log_prob(loc / 9), dist.icdf(loc.sigmoid()), dist.cdf(loc / 9), dist.mean)
            + (categories.log_prob(categories.mode), categories.mode, categories.entropy())
            + (delta.log_prob(logits), delta.rsample())
        )

    loc, logits = torch.tensor([-2.0, 0.0, 0.3, 5.0]), torch.randn(4, 3)
    torch.testing.assert_close(torch.vmap(statistics)(loc, logits), statistics(loc, logits))
    grad = torch.vmap(torch.func.grad(lambda x: TruncatedNormal(x, 1.0, -1.0, 1.0).icdf(x * 0.1)))
    x = torch.tensor([0.5, 2.0, 3.0], requires_grad=True)
    quantiles = TruncatedNormal(x, 1.0, -1.0, 1.0).icdf(x * 0.1)
    torch.testing.assert_close(grad(x), *torch.autograd.grad(quantiles.sum(), x))


def test_draws_map_over_a_batch_ours():
    def draw(loc, logits):
        categories = OneHotCategorical(logits)
        samples = (categories.sample(), categories.rsample(), rand_one_hot(logits))
        return TruncatedNormal(loc, 1.0, -1.0, 1.0).rsample((2,)), *samples

    shapes = [
        tuple(x.shape)
        for x in torch.vmap(draw, randomness="different")(torch.zeros(4), torch.zeros(4, 3))
    ]
    assert shapes == [(4, 2), (4, 3), (4, 3), (4, 3)]


def test_distributions_compile_whole_ours():
    def statistics(loc, logits):
        dist, categories = TruncatedNormal(loc, 1.0, -1.0, 1.0), OneHotCategorical(logits)
        return (
            (dist.log_prob(loc / 9), dist.mean, dist.entropy(), dist.icdf(loc.sigmoid()))
            + (categories.log_prob(categories.mode), categories.mode)
            + (Delta(logits).log_prob(logits), mappings("biased_softplus_2.0")(loc))
        )

    loc, logits = torch.tensor([-2.0, 0.0, 5.0]), torch.randn(3, 4)
    compiled = torch.compile(statistics, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(loc, logits), statistics(loc, logits))


def test_draws_compile_whole_with_gradients_ours():
    def draw(loc, logits):
        x = TruncatedNormal(loc, 1.0, -1.0, 1.0).rsample((2,))
        return x.sum() + (OneHotCategorical(logits).rsample() * torch.arange(4)).sum()

    loc, logits = torch.zeros(3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    compiled = torch.compile(draw, fullgraph=True, backend="aot_eager")
    for grad in torch.autograd.grad(compiled(loc, logits), (loc, logits)):
        assert grad.isfinite().all() and grad.abs().sum() > 0
