"""EfficientZero's whole runs: `train`, `resume`, `evaluate`, `load_agent`, and their presets."""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.recipes.api import resume as resume
    from raffia.recipes.api import train as train
    from raffia.recipes.efficientzero.api import Agent as Agent
    from raffia.recipes.efficientzero.api import evaluate as evaluate
    from raffia.recipes.efficientzero.api import load_agent as load_agent
    from raffia.recipes.efficientzero.config import EfficientZeroRun as EfficientZeroRun
    from raffia.recipes.efficientzero.presets import PRESETS as PRESETS
    from raffia.recipes.efficientzero.presets import gumbel as gumbel
    from raffia.recipes.efficientzero.presets import muzero as muzero
    from raffia.recipes.running import Evaluation as Evaluation

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = _lazy_names(__name__)
