"""Keyed modules that make distributions and write values taken from them."""

from raffia.nn.modes import InteractionType as InteractionType
from raffia.nn.modes import interaction_mode as interaction_mode
from raffia.nn.modes import interaction_type as interaction_type
from raffia.nn.modes import set_interaction_mode as set_interaction_mode
from raffia.nn.modes import set_interaction_type as set_interaction_type
from raffia.nn.probabilistic_module import (
    ProbabilisticTensorDictModule as ProbabilisticTensorDictModule,
)
from raffia.nn.probabilistic_sequence import (
    ProbabilisticTensorDictSequential as ProbabilisticTensorDictSequential,
)
