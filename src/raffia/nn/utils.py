"""Re-exports of names from `raffia.nn`, for programs written for tensordict."""

from raffia.nn.dispatch import set_skip_existing, skip_existing
from raffia.nn.distributions.composite import composite_lp_aggregate, set_composite_lp_aggregate
from raffia.nn.distributions.continuous import (
    add_custom_mapping,
    biased_softplus,
    expln,
    inv_softplus,
    mappings,
)

__all__ = [
    "add_custom_mapping",
    "biased_softplus",
    "composite_lp_aggregate",
    "expln",
    "inv_softplus",
    "mappings",
    "set_composite_lp_aggregate",
    "set_skip_existing",
    "skip_existing",
]
