"""Distributions and the modules that make their parameters."""

from typing import TYPE_CHECKING

from raffia.lazy import public_names as _public_names
from raffia.nn.distributions.composite import CompositeDistribution as CompositeDistribution
from raffia.nn.distributions.composite import composite_lp_aggregate as composite_lp_aggregate
from raffia.nn.distributions.composite import (
    set_composite_lp_aggregate as set_composite_lp_aggregate,
)
from raffia.nn.distributions.continuous import (
    AddStateIndependentNormalScale as AddStateIndependentNormalScale,
)
from raffia.nn.distributions.continuous import Delta as Delta
from raffia.nn.distributions.continuous import NormalParamExtractor as NormalParamExtractor
from raffia.nn.distributions.continuous import NormalParamWrapper as NormalParamWrapper
from raffia.nn.distributions.continuous import add_custom_mapping as add_custom_mapping
from raffia.nn.distributions.continuous import biased_softplus as biased_softplus
from raffia.nn.distributions.continuous import expln as expln
from raffia.nn.distributions.continuous import inv_softplus as inv_softplus
from raffia.nn.distributions.continuous import mappings as mappings
from raffia.nn.distributions.discrete import OneHotCategorical as OneHotCategorical
from raffia.nn.distributions.discrete import rand_one_hot as rand_one_hot
from raffia.nn.distributions.tanh_normal import TanhNormal as TanhNormal
from raffia.nn.distributions.truncated import TruncatedNormal as TruncatedNormal
from raffia.nn.modes import InteractionType as InteractionType
from raffia.nn.modes import set_interaction_type as set_interaction_type

if not TYPE_CHECKING:
    __all__ = _public_names(__name__)
