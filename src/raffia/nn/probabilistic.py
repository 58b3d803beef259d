"""Keyed modules that make distributions and write values taken from them."""

from raffia.nn.modes import (
    InteractionType,
    interaction_mode,
    interaction_type,
    set_interaction_mode,
    set_interaction_type,
)
from raffia.nn.probabilistic_module import ProbabilisticTensorDictModule
from raffia.nn.probabilistic_sequence import ProbabilisticTensorDictSequential

__all__ = [
    "InteractionType",
    "ProbabilisticTensorDictModule",
    "ProbabilisticTensorDictSequential",
    "interaction_mode",
    "interaction_type",
    "set_interaction_mode",
    "set_interaction_type",
]
