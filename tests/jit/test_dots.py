"""Products with weights where they lie: right, whatever the sizes, and the same in every batch."""

import math

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("numba")

from raffia.jit.dots import dots
from raffia.jit.vectors import WIDTH


def product(x, weight, bias=None, floor=-math.inf, added=None):
    out = torch.full((len(x) + 1, len(weight)), 7.0)  # a row too many, which stays
    step = 4 * len(weight)
    dots(
        len(x), x.data_ptr(), 4 * x.shape[1], x.shape[1], len(weight), weight.data_ptr(),
        0 if bias is None else bias.data_ptr(), floor, 0 if added is None else added.data_ptr(),
        step, out.data_ptr(), step,
    )  # fmt: skip
    assert (out[-1] == 7).all()
    return out[:-1]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("outputs", [1, 3, 4, 9])
def test_it_is_a_linear_layer(rows, outputs):
    x, weight = torch.randn(rows, 3 * WIDTH), torch.randn(outputs, 3 * WIDTH)
    bias, added = torch.randn(outputs), torch.randn(rows, outputs)
    right = x @ weight.t()
    assert_close(product(x, weight), right, rtol=1e-5, atol=1e-5)
    assert_close(product(x, weight, bias), right + bias, rtol=1e-5, atol=1e-5)
    assert_close(
        product(x, weight, bias, 0.0, added), (right + bias).relu() + added, rtol=1e-5, atol=1e-5
    )


def test_a_row_is_the_same_beside_any_others():
    x, weight = torch.randn(11, 4 * WIDTH), torch.randn(7, 4 * WIDTH)
    together = product(x, weight)
    assert all(
        torch.equal(product(x[i : i + 1].clone(), weight)[0], together[i]) for i in range(11)
    )


def test_what_is_no_number_stays():
    x, weight = torch.ones(2, WIDTH), torch.ones(5, WIDTH)
    x[0, 3] = math.nan
    found = product(x, weight, floor=0.0)
    assert found[0].isnan().all() and (found[1] == WIDTH).all()
