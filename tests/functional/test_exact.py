"""Products that depend on the alignment of their factors are noticed; exact ones are requested."""

import os
import subprocess
import sys

import pytest
import torch

from raffia.functional import exact
from tests.marks import slow_among


def test_products_of_this_process_are_exact():
    assert exact.products_are_exact()


def test_products_that_depend_on_memory_are_noticed(monkeypatch):
    linear = torch.nn.functional.linear

    def by_alignment(x, weight):
        return linear(x, weight) * (1 + x.data_ptr() % 16 * 1e-6)

    monkeypatch.setattr(torch.nn.functional, "linear", by_alignment)
    assert not exact.products_are_exact()


@pytest.mark.parametrize(
    "setting, expected",
    slow_among([(None, "AUTO"), ("COMPATIBLE", "COMPATIBLE")], ("COMPATIBLE", "COMPATIBLE")),
)
def test_a_setting_in_the_environment_variable_is_respected(setting, expected):
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    program = (
        "import os\n"
        "from raffia.functional.exact import request_exact_products\n"
        "print(request_exact_products(), os.environ['MKL_CBWR'])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | ({} if setting is None else {"MKL_CBWR": setting}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.split() == ["True", expected]
