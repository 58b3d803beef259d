"""EfficientZero: its networks, and their snapshots for planning."""

from raffia.algorithms.efficientzero.inference import FoldedModel, fold
from raffia.algorithms.efficientzero.model import (
    DynamicsNetwork,
    EfficientZeroModel,
    EfficientZeroModelMLP,
    NetworkOutput,
    PredictionNetwork,
    RepresentationNetwork,
)

__all__ = [
    "DynamicsNetwork",
    "EfficientZeroModel",
    "EfficientZeroModelMLP",
    "FoldedModel",
    "NetworkOutput",
    "PredictionNetwork",
    "RepresentationNetwork",
    "fold",
]
