"""EfficientZero: networks, loss and targets, learner and planning.

Names are imported when first asked for, so that `config.py` comes without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raffia.algorithms.efficientzero.build import make_model
    from raffia.algorithms.efficientzero.config import EfficientZeroConfig
    from raffia.algorithms.efficientzero.inference import FoldedModel, fold
    from raffia.algorithms.efficientzero.learner import EfficientZeroLearner
    from raffia.algorithms.efficientzero.model import (
        DynamicsNetwork,
        EfficientZeroModel,
        EfficientZeroModelMLP,
        NetworkOutput,
        PredictionNetwork,
        RepresentationNetwork,
    )
    from raffia.algorithms.efficientzero.planning import Planner

__all__ = [
    "DynamicsNetwork",
    "EfficientZeroConfig",
    "EfficientZeroLearner",
    "EfficientZeroModel",
    "EfficientZeroModelMLP",
    "FoldedModel",
    "NetworkOutput",
    "Planner",
    "PredictionNetwork",
    "RepresentationNetwork",
    "fold",
    "make_model",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    match name:
        case "make_model":
            return import_module("raffia.algorithms.efficientzero.build").make_model
        case "EfficientZeroConfig":
            return import_module("raffia.algorithms.efficientzero.config").EfficientZeroConfig
        case "FoldedModel" | "fold":
            return getattr(import_module("raffia.algorithms.efficientzero.inference"), name)
        case "EfficientZeroLearner":
            return import_module("raffia.algorithms.efficientzero.learner").EfficientZeroLearner
        case "Planner":
            return import_module("raffia.algorithms.efficientzero.planning").Planner
    if name in __all__:
        return getattr(import_module("raffia.algorithms.efficientzero.model"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
