"""Complete runs, assembled from the parts of all other packages.

`train`, `resume`, `evaluate` and `load_agent` serve any algorithm.
"""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.recipes import efficientzero as efficientzero
    from raffia.recipes import ilql as ilql
    from raffia.recipes.algorithm import ALGORITHMS as ALGORITHMS
    from raffia.recipes.algorithm import Algorithm as Algorithm
    from raffia.recipes.algorithm import find_algorithm as find_algorithm
    from raffia.recipes.api import evaluate as evaluate
    from raffia.recipes.api import load_agent as load_agent
    from raffia.recipes.api import resume as resume
    from raffia.recipes.api import train as train
    from raffia.recipes.efficientzero.api import Agent as Agent
    from raffia.recipes.efficientzero.config import EfficientZeroRun as EfficientZeroRun
    from raffia.recipes.efficientzero.presets import PRESETS as PRESETS
    from raffia.recipes.ilql.config import ILQLRun as ILQLRun
    from raffia.recipes.ilql.presets import ILQL_PRESETS as ILQL_PRESETS
    from raffia.recipes.run_folder import read_run as read_run
    from raffia.recipes.running import Evaluation as Evaluation
    from raffia.recipes.scale_config import EngineConfig as EngineConfig
    from raffia.train.config import with_settings as with_settings
    from raffia.train.experiment import RunError as RunError
    from raffia.train.session import RunResult as RunResult

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = _lazy_names(__name__)
