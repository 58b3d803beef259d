"""EfficientZero's whole runs: `train`, `resume`, `evaluate`, `load_agent`, and their presets."""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.recipes.efficientzero.api import Agent, evaluate, load_agent, resume, train
    from raffia.recipes.efficientzero.config import EfficientZeroRun
    from raffia.recipes.efficientzero.presets import PRESETS
    from raffia.recipes.running import Evaluation

__all__ = [
    "PRESETS",
    "Agent",
    "EfficientZeroRun",
    "Evaluation",
    "evaluate",
    "load_agent",
    "resume",
    "train",
]

__getattr__, __dir__ = _lazy_names(__name__)
