"""Re-exports of names from `raffia.nn`, for older programs."""

from raffia.nn.probabilistic import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from raffia.nn.trace import symbolic_trace

__all__ = ["ProbabilisticTensorDictModule", "ProbabilisticTensorDictSequential", "symbolic_trace"]
