"""Whole runs, built and wired: the one room that knows all the others.

The functions here are EfficientZero's; those of ILQL have the same names in `raffia.recipes.ilql`.
"""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.recipes.algorithm import ALGORITHMS, Algorithm, find_algorithm
    from raffia.recipes.efficientzero import (
        PRESETS,
        Agent,
        EfficientZeroRun,
        Evaluation,
        evaluate,
        load_agent,
        resume,
        train,
    )
    from raffia.recipes.ilql import ILQL_PRESETS, ILQLRun
    from raffia.recipes.run_folder import read_run
    from raffia.recipes.running import evaluate_run, resume_run, train_run
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
