"""Numbers of scalar_transform.json are LightZero's, see its "source"."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad

from raffia.functional.transforms import (
    Support,
    categorical_to_scalar,
    expected_value,
    scalar_to_categorical,
    signed_hyperbolic,
    signed_parabolic,
    two_hot,
)

ORACLE = json.loads((Path(__file__).parent / "scalar_transform.json").read_text())
NAN = float("nan")


def test_the_transform_equals_the_oracle():
    x = torch.tensor(ORACLE["x"], dtype=torch.float64)
    torch.testing.assert_close(
        signed_hyperbolic(x), torch.tensor(ORACLE["h"], dtype=torch.float64), rtol=0, atol=1e-9
    )
    h_inverse = torch.tensor(ORACLE["h_inverse_of_h"], dtype=torch.float64)
    torch.testing.assert_close(
        signed_parabolic(signed_hyperbolic(x)), h_inverse, rtol=1e-9, atol=1e-9
    )


def test_in_float32_the_inverse_does_not_cancel():
    x = torch.tensor([0.0, 3.0, -3.0, 200.0])
    error = (signed_parabolic(signed_hyperbolic(x)) - x).abs()
    assert (error <= torch.tensor([0.0, 2e-6, 2e-6, 5e-5])).all()
    assert signed_parabolic(torch.tensor(1e-6)).item() == pytest.approx(2e-6, abs=5e-7)


def test_nan_stays_nan():
    x = torch.tensor([1.0, NAN])
    for function in (signed_hyperbolic, signed_parabolic):
        assert function(x).isnan().tolist() == [False, True]
    support = Support(-2, 3)
    assert scalar_to_categorical(x, support).isnan().all(-1).tolist() == [False, True]
    assert categorical_to_scalar(torch.full((2, 5), NAN), support).isnan().all()


@pytest.mark.parametrize("case", ORACLE["supports"], ids=lambda c: f"{c['start']}..{c['step']}")
def test_two_hot_equals_the_oracle(case):
    support = Support(case["start"], case["stop_exclusive"], case["step"])
    assert support.size == case["size"]
    got = scalar_to_categorical(torch.tensor(ORACLE["x"]), support)
    want = torch.zeros(len(ORACLE["x"]), support.size)
    for row, pairs in zip(want, case["two_hot"], strict=True):
        for index, probability in pairs:
            row[index] = probability
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
    torch.testing.assert_close(got.sum(-1), torch.ones(len(got)))


@pytest.mark.parametrize("case", ORACLE["logits"], ids=["601", "21"])
def test_decoding_equals_the_oracle(case):
    support = Support(case["start"], case["stop_exclusive"])
    value = categorical_to_scalar(torch.tensor(case["logits"]), support)
    torch.testing.assert_close(value, torch.tensor(case["value"]), rtol=1e-4, atol=1e-4)


def test_a_value_within_the_support_round_trip():
    support = Support(-20, 21, 0.5)
    x = torch.linspace(-100, 100, 2 * 3 * 5, dtype=torch.float64).reshape(2, 3, 5)
    target = scalar_to_categorical(x, support)
    assert target.shape == (2, 3, 5, 82)
    torch.testing.assert_close(categorical_to_scalar(target.log(), support), x)


def test_beyond_the_support_all_mass_is_on_the_end():
    got = two_hot(torch.tensor([-math.inf, -9.0, 2.0, 9.0, math.inf]), Support(-2, 3))
    assert got.argmax(-1).tolist() == [0, 0, 4, 4, 4] and (got.amax(-1) == 1).all()


def test_equal_logits_give_exactly_the_middle():
    for support in (Support(-300, 301), Support(-50, 51), Support(-2, 2.5, 0.5), Support(-1, 2, 2)):
        assert categorical_to_scalar(torch.zeros(2, support.size), support).tolist() == [0, 0]
    logits = torch.randn(7, 601)
    value = categorical_to_scalar(logits, Support(-300, 301))
    mirrored = categorical_to_scalar(logits.flip(-1), Support(-300, 301))
    torch.testing.assert_close(value, -mirrored)
    assert expected_value(torch.randn(2, 1), Support(3, 4)).tolist() == [3, 3]


@pytest.mark.parametrize(
    "support", [Support(-3, 4), Support(-3, 3), Support(1, 9, 2), Support(0, 2)]
)
def test_an_expected_value_is_the_sum_over_the_support(support):
    logits = torch.randn(3, 2, support.size, dtype=torch.float64)
    want = (logits.softmax(-1) * support.values(torch.float64)).sum(-1)
    torch.testing.assert_close(expected_value(logits, support), want)


def test_logits_of_half_precision_are_decoded_in_float32():
    logits = torch.randn(3, 601).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        value = categorical_to_scalar(logits, Support(-300, 301))
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, categorical_to_scalar(logits.float(), Support(-300, 301)))


def test_gradients_flow_and_are_finite():
    logits = torch.randn(2, 5, requires_grad=True)
    (categorical_to_scalar(logits, Support(-2, 3)).sum()).backward()
    assert logits.grad.isfinite().all() and logits.grad.abs().sum() > 0
    zero = torch.zeros(1, requires_grad=True)
    signed_hyperbolic(zero).backward()
    assert zero.grad.isfinite().all()


def test_the_functions_run_under_vmap():
    x = torch.randn(2, 3)
    support = Support(-2, 3)
    rows = torch.vmap(lambda row: scalar_to_categorical(row, support))(x)
    assert torch.equal(rows, scalar_to_categorical(x, support))


def test_a_support_of_inexact_steps_leaves_its_stop_out():
    assert Support(0, 0.3, 0.1).size == 3
    assert Support(-1, 1, 0.4).size == 5  # -1, -0.6, -0.2, 0.2, 0.6
    assert Support(-1, 1, 0.4).last == pytest.approx(0.6)
    assert Support(0, 1).values(torch.float64).dtype == torch.float64


@pytest.mark.parametrize("arguments", [(3, 3), (3, 1), (0, 3, 0), (0, 3, -1), (0, math.inf)])
def test_an_empty_support_is_refused(arguments):
    with pytest.raises(ValueError, match=r"start must be below stop.*Support\(-300, 301, 1\)"):
        Support(*arguments)


def test_logits_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"5 entries in their last dimension, got shape \[2, 6\]"):
        expected_value(torch.zeros(2, 6), Support(-2, 3))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")  # of forward mode
def test_gradients_are_those_of_the_formulas_also_at_zero():
    x = torch.tensor([-3.0, -1e-3, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    for function in (signed_hyperbolic, signed_parabolic):
        assert torch.autograd.gradcheck(function, x)
        [gradient] = torch.autograd.grad(function(x).sum(), x)
        with forward_ad.dual_level():
            found = function(forward_ad.make_dual(x.detach(), torch.ones_like(x)))
            torch.testing.assert_close(forward_ad.unpack_dual(found).tangent, gradient)
    logits = torch.zeros(5, dtype=torch.float64, requires_grad=True)  # as of a head of zeros
    assert torch.autograd.gradcheck(
        lambda logits: categorical_to_scalar(logits, Support(-2, 3)), logits
    )
