"""Keyed modules: they read named entries of a container and write named entries back."""

from typing import TYPE_CHECKING

from raffia.lazy import public_names as _public_names
from raffia.nn import common as common
from raffia.nn import prototype as prototype
from raffia.nn import utils as utils
from raffia.nn.base import OutKeyNotFoundError as OutKeyNotFoundError
from raffia.nn.base import TensorDictModuleBase as TensorDictModuleBase
from raffia.nn.cudagraphs import CudaGraphModule as CudaGraphModule
from raffia.nn.dispatch import dispatch as dispatch
from raffia.nn.dispatch import set_skip_existing as set_skip_existing
from raffia.nn.dispatch import skip_existing as skip_existing
from raffia.nn.distributions import AddStateIndependentNormalScale as AddStateIndependentNormalScale
from raffia.nn.distributions import CompositeDistribution as CompositeDistribution
from raffia.nn.distributions import Delta as Delta
from raffia.nn.distributions import NormalParamExtractor as NormalParamExtractor
from raffia.nn.distributions import NormalParamWrapper as NormalParamWrapper
from raffia.nn.distributions import OneHotCategorical as OneHotCategorical
from raffia.nn.distributions import TanhNormal as TanhNormal
from raffia.nn.distributions import TruncatedNormal as TruncatedNormal
from raffia.nn.distributions import add_custom_mapping as add_custom_mapping
from raffia.nn.distributions import biased_softplus as biased_softplus
from raffia.nn.distributions import composite_lp_aggregate as composite_lp_aggregate
from raffia.nn.distributions import inv_softplus as inv_softplus
from raffia.nn.distributions import mappings as mappings
from raffia.nn.distributions import rand_one_hot as rand_one_hot
from raffia.nn.distributions import set_composite_lp_aggregate as set_composite_lp_aggregate
from raffia.nn.ensemble import EnsembleModule as EnsembleModule
from raffia.nn.functional_modules import get_functional as get_functional
from raffia.nn.functional_modules import is_functional as is_functional
from raffia.nn.functional_modules import make_functional as make_functional
from raffia.nn.functional_modules import repopulate_module as repopulate_module
from raffia.nn.graph import Graph as Graph
from raffia.nn.modes import InteractionType as InteractionType
from raffia.nn.modes import interaction_mode as interaction_mode
from raffia.nn.modes import interaction_type as interaction_type
from raffia.nn.modes import set_interaction_mode as set_interaction_mode
from raffia.nn.modes import set_interaction_type as set_interaction_type
from raffia.nn.module import TensorDictModule as TensorDictModule
from raffia.nn.params import TensorDictParams as TensorDictParams
from raffia.nn.params import target_copy as target_copy
from raffia.nn.params import update_target as update_target
from raffia.nn.probabilistic import ProbabilisticTensorDictModule as ProbabilisticTensorDictModule
from raffia.nn.probabilistic import (
    ProbabilisticTensorDictSequential as ProbabilisticTensorDictSequential,
)
from raffia.nn.sequence import TensorDictSequential as TensorDictSequential
from raffia.nn.trace import TDGraphModule as TDGraphModule
from raffia.nn.trace import symbolic_trace as symbolic_trace
from raffia.nn.wrappers import TensorClassModuleBase as TensorClassModuleBase
from raffia.nn.wrappers import TensorClassModuleWrapper as TensorClassModuleWrapper
from raffia.nn.wrappers import TensorDictModuleWrapper as TensorDictModuleWrapper
from raffia.nn.wrappers import WrapModule as WrapModule
from raffia.nn.wrappers import as_tensordict_module as as_tensordict_module
from raffia.tensordict.functions import make_tensordict as make_tensordict

if not TYPE_CHECKING:
    __all__ = _public_names(__name__)
