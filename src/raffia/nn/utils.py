"""Re-exports of names from `raffia.nn`, for programs written for tensordict."""

from raffia.nn.dispatch import set_skip_existing as set_skip_existing
from raffia.nn.dispatch import skip_existing as skip_existing
from raffia.nn.distributions.continuous import add_custom_mapping as add_custom_mapping
from raffia.nn.distributions.continuous import biased_softplus as biased_softplus
from raffia.nn.distributions.continuous import expln as expln
from raffia.nn.distributions.continuous import inv_softplus as inv_softplus
from raffia.nn.distributions.continuous import mappings as mappings
from raffia.nn.modes import composite_lp_aggregate as composite_lp_aggregate
from raffia.nn.modes import set_composite_lp_aggregate as set_composite_lp_aggregate
