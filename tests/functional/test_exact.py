"""Products that depend on the alignment of their factors are noticed; exact ones are requested."""

import os

import pytest
import torch

from raffia.functional import exact


def test_products_of_this_process_are_exact():
    assert exact.products_are_exact()


def test_products_that_depend_on_memory_are_noticed(monkeypatch):
    linear = torch.nn.functional.linear

    def by_alignment(x, weight):
        return linear(x, weight) * (1 + x.data_ptr() % 16 * 1e-6)

    monkeypatch.setattr(torch.nn.functional, "linear", by_alignment)
    assert not exact.products_are_exact()


@pytest.mark.parametrize("setting, expected", [(None, "AUTO"), ("COMPATIBLE", "COMPATIBLE")])
def test_a_setting_in_the_environment_variable_is_respected(setting, expected, monkeypatch):
    monkeypatch.setenv("MKL_CBWR", setting or "")
    if setting is None:
        monkeypatch.delenv("MKL_CBWR")
    assert exact.request_exact_products() and os.environ["MKL_CBWR"] == expected
