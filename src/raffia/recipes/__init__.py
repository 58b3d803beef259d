"""Complete runs of the built-in algorithms, assembled from the parts of all other packages.

The functions here are EfficientZero's; those of ILQL have the same names in `raffia.recipes.ilql`.
"""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.recipes.algorithm import ALGORITHMS, Algorithm, find_algorithm
    from raffia.recipes.efficientzero.api import Agent, evaluate, load_agent, resume, train
    from raffia.recipes.efficientzero.config import EfficientZeroRun
    from raffia.recipes.efficientzero.presets import PRESETS
    from raffia.recipes.ilql.config import ILQLRun
    from raffia.recipes.ilql.presets import ILQL_PRESETS
    from raffia.recipes.run_folder import read_run
    from raffia.recipes.running import Evaluation, evaluate_run, resume_run, train_run
    from raffia.train.experiment import RunError
    from raffia.train.session import RunResult

__all__ = [
    "ALGORITHMS",
    "ILQL_PRESETS",
    "PRESETS",
    "Agent",
    "Algorithm",
    "EfficientZeroRun",
    "Evaluation",
    "ILQLRun",
    "RunError",
    "RunResult",
    "evaluate",
    "evaluate_run",
    "find_algorithm",
    "load_agent",
    "read_run",
    "resume",
    "resume_run",
    "train",
    "train_run",
]

__getattr__, __dir__ = _lazy_names(__name__, ["efficientzero", "ilql"])
