"""The names that the published page of keyed modules shows, and its program of a Gaussian cell.

Its other programs are covered by the tests of modules, sequences, functional nets, ensembles,
traces and distributions.
"""

import importlib

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.testing import assert_close

import raffia.nn as keyed
from raffia import TensorDict
from raffia.nn import TensorDictModule

T = 3
NAMES = {
    "nn": (
        "TensorDictModuleBase TensorDictModule ProbabilisticTensorDictModule TensorDictSequential "
        "TensorDictModuleWrapper get_functional is_functional make_functional repopulate_module "
        "EnsembleModule AddStateIndependentNormalScale CompositeDistribution OneHotCategorical "
        "TruncatedNormal make_tensordict dispatch set_interaction_type inv_softplus "
        "biased_softplus set_skip_existing skip_existing TensorDictParams symbolic_trace"
    ),
    "nn.distributions": "NormalParamWrapper Delta",
    "nn.functional_modules": "make_functional",
    "nn.prototype": "ProbabilisticTensorDictModule ProbabilisticTensorDictSequential",
    "prototype.fx": "symbolic_trace",
}


def known(module, name):
    """A name of the page, imported as on the page."""
    return getattr(importlib.import_module(f"raffia.{module}"), name)


@pytest.mark.parametrize("module", NAMES)
def test_every_name_of_the_page_exists(module):
    for name in NAMES[module].split():
        assert callable(known(module, name))
        if module in ("nn.prototype", "prototype.fx", "nn.functional_modules"):
            assert known(module, name) is getattr(keyed, name)


class Extracted(nn.Module):
    """A cell whose output is split by the current extractor."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.split = cell, keyed.NormalParamExtractor()

    def forward(self, x, h):
        return self.split(self.cell(x, h))


@pytest.mark.parametrize("room", ["nn", "nn.prototype"])
@pytest.mark.parametrize("wrapper", [Extracted, keyed.distributions.NormalParamWrapper])
def test_a_gaussian_cell(wrapper, room):
    cell = nn.GRUCell(4, 8)
    module = known(room, "ProbabilisticTensorDictSequential")(
        TensorDictModule(wrapper(cell), in_keys=["input", "hidden"], out_keys=["loc", "scale"]),
        known(room, "ProbabilisticTensorDictModule")(
            in_keys=["loc", "scale"],
            out_keys=["sample"],
            distribution_class=Normal,
            return_log_prob=True,
        ),
    )
    td = TensorDict({"input": torch.randn(T, 4), "hidden": torch.randn(T, 8)}, [T])
    inputs = td.clone()
    assert module(td) is td
    assert set(td.keys()) == {"hidden", "input", "loc", "sample", "sample_log_prob", "scale"}
    loc, raw = cell(td["input"], td["hidden"]).chunk(2, -1)
    scale = nn.functional.softplus(raw + torch.tensor(0.99).expm1().log()) + 0.01  # 1 at raw = 0
    assert_close(td["scale"], scale)
    assert_close([td["loc"], td["sample"]], [loc, loc])  # by default the value is not random
    assert_close(td["sample_log_prob"], Normal(loc, scale).log_prob(loc))
    with keyed.set_interaction_type(keyed.InteractionType.RANDOM):
        one, other = module(inputs.clone())["sample"], module(inputs.clone())["sample"]
    assert not torch.equal(one, other)
    assert_close(module.get_dist(inputs).mean, loc)
