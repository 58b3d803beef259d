"""ILQL's whole runs: `train`, `resume`, `evaluate`, `load_agent`, and their presets."""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.algorithms.ilql.policy import ILQL_Policy
    from raffia.recipes.ilql.api import evaluate, load_agent, member_config, resume, train
    from raffia.recipes.ilql.config import ILQLRun
    from raffia.recipes.ilql.evaluation import ILQLEvaluation
    from raffia.recipes.ilql.networks import with_sizes
    from raffia.recipes.ilql.presets import ILQL_PRESETS

__all__ = [
    "ILQL_PRESETS",
    "ILQLEvaluation",
    "ILQLRun",
    "ILQL_Policy",
    "evaluate",
    "with_sizes",
    "load_agent",
    "member_config",
    "resume",
    "train",
]

__getattr__, __dir__ = _lazy_names(__name__)
