"""Products with weights in place: right for all sizes, and the same in every batch."""

import math
import os
import subprocess
import sys

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
def test_it_equals_a_linear_layer(rows, outputs):
    x, weight = torch.randn(rows, 3 * WIDTH), torch.randn(outputs, 3 * WIDTH)
    bias, added = torch.randn(outputs), torch.randn(rows, outputs)
    right = x @ weight.t()
    assert_close(product(x, weight), right, rtol=1e-5, atol=1e-5)
    assert_close(product(x, weight, bias), right + bias, rtol=1e-5, atol=1e-5)
    assert_close(
        product(x, weight, bias, 0.0, added), (right + bias).relu() + added, rtol=1e-5, atol=1e-5
    )


def test_a_row_is_the_same_in_every_batch():
    x, weight = torch.randn(11, 4 * WIDTH), torch.randn(7, 4 * WIDTH)
    together = product(x, weight)
    assert all(
        torch.equal(product(x[i : i + 1].clone(), weight)[0], together[i]) for i in range(11)
    )


def test_nan_and_infinity_stay():
    x, weight = torch.ones(2, WIDTH), torch.ones(5, WIDTH)
    x[0, 3] = math.nan
    found = product(x, weight, floor=0.0)
    assert found[0].isnan().all() and (found[1] == WIDTH).all()


AT_THE_EDGE = """
import ctypes, math, mmap, torch
from raffia.jit.dots import dots
from raffia.jit.vectors import WIDTH
memory = mmap.mmap(-1, 3 * mmap.PAGESIZE)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
for page in (0, 2):  # reading these kills the process
    guarded = ctypes.c_void_p(start + page * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mprotect(guarded, mmap.PAGESIZE, 0) == 0
for rows in (1, 2, 3):
    for outputs in range(1, 10):
        size = 4 * 2 * WIDTH * outputs
        weight = torch.frombuffer(memory, dtype=torch.float32, count=size // 4,
                                  offset=2 * mmap.PAGESIZE - size)
        weight.fill_(2.0)
        x, out = torch.ones(rows, 2 * WIDTH), torch.empty(rows, outputs)
        dots(rows, x.data_ptr(), 8 * WIDTH, 2 * WIDTH, outputs, weight.data_ptr(), 0, -math.inf,
             0, 0, out.data_ptr(), 4 * outputs)
        assert (out == 4 * WIDTH).all()
print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is guarded as Linux does")
def test_weights_may_lie_at_the_end_of_memory():
    """The next tile's weights are prefetched, also behind the last; a prefetch reads nothing."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", AT_THE_EDGE]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "done\n"
