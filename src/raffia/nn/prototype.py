"""Where older programs look for names that stand in `raffia.nn`."""

from raffia.nn.probabilistic import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from raffia.nn.trace import symbolic_trace

__all__ = ["ProbabilisticTensorDictModule", "ProbabilisticTensorDictSequential", "symbolic_trace"]
