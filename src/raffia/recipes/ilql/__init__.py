"""ILQL's whole runs: `train`, `resume`, `evaluate`, `load_agent`, and their presets."""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.algorithms.ilql.policy import ILQL_Policy as ILQL_Policy
    from raffia.recipes.api import resume as resume
    from raffia.recipes.api import train as train
    from raffia.recipes.ilql.api import evaluate as evaluate
    from raffia.recipes.ilql.api import load_agent as load_agent
    from raffia.recipes.ilql.api import member_config as member_config
    from raffia.recipes.ilql.config import ILQLRun as ILQLRun
    from raffia.recipes.ilql.evaluation import ILQLEvaluation as ILQLEvaluation
    from raffia.recipes.ilql.networks import with_sizes as with_sizes
    from raffia.recipes.ilql.presets import ILQL_PRESETS as ILQL_PRESETS

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = _lazy_names(__name__)
