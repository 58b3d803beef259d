import math

import pytest
import torch

from raffia.jit.kernel import kernel
from raffia.jit.vectors import (
    FUSES,
    WIDTH,
    at_least,
    at_most,
    exp,
    gated,
    gated_tanh,
    greatest,
    load_floats,
    multiply_add,
    store_floats,
    total,
)

EXP, GATED, GATED_TANH = range(3)
NAN, INF = math.nan, math.inf


@kernel
def _apply(function, x, gate, out, n):
    for at in range(0, 4 * n, 4 * WIDTH):
        vector, opened = load_floats(x + at), load_floats(gate + at)
        if function == EXP:
            result = exp(vector)
        elif function == GATED:
            result = gated(opened, vector)
        else:
            result = gated_tanh(opened, vector)
        store_floats(out + at, result)


@kernel
def _arithmetic(a, b, c, out):
    x, y, z = load_floats(a), load_floats(b), load_floats(c)
    results = (x + y, x - y, x * y, x / y, multiply_add(x, y, z), at_least(x, y), at_most(x, y))
    for i, result in enumerate(results):
        store_floats(out + 4 * WIDTH * i, result)


@kernel
def _folded(x, largest):
    vector = load_floats(x)
    return greatest(vector) if largest else total(vector)


def applied(function, x, gate=INF):
    padded, gates = torch.zeros(2, -(-len(x) // WIDTH) * WIDTH)
    padded[: len(x)] = x
    gates[: len(x)] = gate
    out = torch.empty_like(padded)
    _apply(function, padded.data_ptr(), gates.data_ptr(), out.data_ptr(), len(padded))
    return out[: len(x)]


@pytest.mark.parametrize(
    ("function", "truth", "low", "high", "tolerance"),
    [
        (EXP, lambda x, gate: x.exp(), -86.9, 87.9, 2e-7),
        (GATED, lambda x, gate: x * gate.sigmoid(), -86.9, 86.9, 3e-7),
        (GATED_TANH, lambda x, gate: x.tanh() * gate.sigmoid(), -12.0, 12.0, 6e-7),
        (GATED_TANH, lambda x, gate: x.tanh() * gate.sigmoid(), -1e-3, 1e-3, 6e-7),
    ],
)
def test_relative_error(function, truth, low, high, tolerance):
    x, gate = torch.linspace(low, high, 20_000), 20 * torch.linspace(-300, 300, 20_000).sin()
    expected = truth(x.double(), gate.double())
    error = ((applied(function, x, gate) - expected) / expected).abs()
    assert error[expected != 0].max() < tolerance


def test_exact_values_and_the_ends():
    x = torch.tensor([0.0, -0.0, INF, -INF, NAN, 1e-42, 200.0])
    assert applied(EXP, x)[[0, 1, 5]].tolist() == [1, 1, 1]
    assert torch.isfinite(applied(EXP, x)[[2, 3, 6]]).all()
    assert applied(GATED, torch.ones(7), x)[:3].tolist() == [0.5, 0.5, 1.0]
    assert applied(GATED, torch.ones(7), x)[3] < 1e-37
    assert applied(GATED_TANH, x)[[0, 2, 3, 6]].tolist() == [0.0, 1.0, -1.0, 1.0]
    assert applied(GATED_TANH, x, -INF)[[0, 2, 3]].abs().max() < 1e-37
    assert applied(EXP, x)[4].isnan()
    for function in (GATED, GATED_TANH):
        assert applied(function, x)[4].isnan() and applied(function, x[:1], NAN).isnan()


def test_arithmetic_is_that_of_float32():
    a, b, c = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    out = torch.empty(7, WIDTH)
    _arithmetic(a.data_ptr(), b.data_ptr(), c.data_ptr(), out.data_ptr())
    fused = (a.double() * b.double() + c.double()).float() if FUSES else a * b + c
    expected = [a + b, a - b, a * b, a / b, fused, torch.maximum(a, b), torch.minimum(a, b)]
    assert out.tolist() == torch.stack(expected).tolist()


def test_a_limit_keeps_nan():
    a, b = torch.full((2, WIDTH), NAN), torch.zeros(7, WIDTH)
    out = torch.empty(7, WIDTH)
    _arithmetic(a.data_ptr(), b.data_ptr(), b.data_ptr(), out.data_ptr())
    assert out[5:].isnan().all()


def test_folds():
    x = torch.arange(WIDTH, dtype=torch.float32)
    assert _folded(x.data_ptr(), False) == x.sum()
    assert _folded(x.data_ptr(), True) == WIDTH - 1
    x[2] = NAN
    assert math.isnan(_folded(x.data_ptr(), False))
