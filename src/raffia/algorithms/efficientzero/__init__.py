"""EfficientZero: networks, loss and targets, learner and planning.

Names are imported when first asked for, so that `config.py` comes without torch.
"""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.algorithms.efficientzero.config import EfficientZeroConfig
    from raffia.algorithms.efficientzero.inference import FoldedModel, fold
    from raffia.algorithms.efficientzero.latent_model import LatentModel
    from raffia.algorithms.efficientzero.learner import EfficientZeroLearner
    from raffia.algorithms.efficientzero.model import (
        DynamicsNetwork,
        EfficientZeroModel,
        EfficientZeroModelMLP,
        NetworkOutput,
        PredictionNetwork,
        RepresentationNetwork,
        make_model,
    )
    from raffia.algorithms.efficientzero.planning import Planner

__all__ = [
    "DynamicsNetwork",
    "EfficientZeroConfig",
    "EfficientZeroLearner",
    "EfficientZeroModel",
    "EfficientZeroModelMLP",
    "FoldedModel",
    "LatentModel",
    "NetworkOutput",
    "Planner",
    "PredictionNetwork",
    "RepresentationNetwork",
    "fold",
    "make_model",
]

__getattr__, __dir__ = _lazy_names(__name__)
