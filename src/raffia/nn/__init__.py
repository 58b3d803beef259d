"""Keyed modules: they read named entries of a container and write named entries back."""

from raffia.nn import prototype as prototype
from raffia.nn.base import OutKeyNotFoundError, TensorDictModuleBase
from raffia.nn.cudagraphs import CudaGraphModule
from raffia.nn.dispatch import dispatch, set_skip_existing, skip_existing
from raffia.nn.distributions import (
    AddStateIndependentNormalScale,
    CompositeDistribution,
    Delta,
    NormalParamExtractor,
    NormalParamWrapper,
    OneHotCategorical,
    TruncatedNormal,
    add_custom_mapping,
    biased_softplus,
    composite_lp_aggregate,
    inv_softplus,
    mappings,
    rand_one_hot,
    set_composite_lp_aggregate,
)
from raffia.nn.ensemble import EnsembleModule
from raffia.nn.functional_modules import (
    get_functional,
    is_functional,
    make_functional,
    repopulate_module,
)
from raffia.nn.graph import Graph
from raffia.nn.modes import (
    InteractionType,
    interaction_mode,
    interaction_type,
    set_interaction_mode,
    set_interaction_type,
)
from raffia.nn.module import TensorDictModule
from raffia.nn.params import TensorDictParams, target_copy, update_target
from raffia.nn.probabilistic import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
)
from raffia.nn.sequence import TensorDictSequential
from raffia.nn.trace import TDGraphModule, symbolic_trace
from raffia.nn.wrappers import (
    TensorClassModuleBase,
    TensorClassModuleWrapper,
    TensorDictModuleWrapper,
    WrapModule,
    as_tensordict_module,
)
from raffia.tensordict.functions import make_tensordict

__all__ = [
    "AddStateIndependentNormalScale",
    "CompositeDistribution",
    "CudaGraphModule",
    "Delta",
    "EnsembleModule",
    "Graph",
    "InteractionType",
    "NormalParamExtractor",
    "NormalParamWrapper",
    "OneHotCategorical",
    "OutKeyNotFoundError",
    "ProbabilisticTensorDictModule",
    "ProbabilisticTensorDictSequential",
    "TDGraphModule",
    "TensorClassModuleBase",
    "TensorClassModuleWrapper",
    "TensorDictModule",
    "TensorDictModuleBase",
    "TensorDictModuleWrapper",
    "TensorDictParams",
    "TensorDictSequential",
    "TruncatedNormal",
    "WrapModule",
    "add_custom_mapping",
    "as_tensordict_module",
    "biased_softplus",
    "composite_lp_aggregate",
    "dispatch",
    "get_functional",
    "interaction_mode",
    "interaction_type",
    "inv_softplus",
    "is_functional",
    "make_functional",
    "make_tensordict",
    "mappings",
    "rand_one_hot",
    "repopulate_module",
    "set_composite_lp_aggregate",
    "set_interaction_mode",
    "set_interaction_type",
    "set_skip_existing",
    "skip_existing",
    "symbolic_trace",
    "target_copy",
    "update_target",
]
