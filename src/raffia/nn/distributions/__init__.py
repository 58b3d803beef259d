"""Distributions and the modules that make their parameters."""

from raffia.nn.distributions.composite import (
    CompositeDistribution,
    composite_lp_aggregate,
    set_composite_lp_aggregate,
)
from raffia.nn.distributions.continuous import (
    AddStateIndependentNormalScale,
    Delta,
    NormalParamExtractor,
    NormalParamWrapper,
    add_custom_mapping,
    biased_softplus,
    expln,
    inv_softplus,
    mappings,
)
from raffia.nn.distributions.discrete import OneHotCategorical, rand_one_hot
from raffia.nn.distributions.truncated import TruncatedNormal
from raffia.nn.modes import InteractionType, set_interaction_type

__all__ = [
    "AddStateIndependentNormalScale",
    "CompositeDistribution",
    "Delta",
    "InteractionType",
    "NormalParamExtractor",
    "NormalParamWrapper",
    "OneHotCategorical",
    "TruncatedNormal",
    "add_custom_mapping",
    "biased_softplus",
    "composite_lp_aggregate",
    "expln",
    "inv_softplus",
    "mappings",
    "rand_one_hot",
    "set_composite_lp_aggregate",
    "set_interaction_type",
]
