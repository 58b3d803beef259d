"""Whole runs, built and wired: the one room that knows all the others.

The functions here are EfficientZero's; those of ILQL have the same names in `raffia.recipes.ilql`.

Names are imported when first asked for, so that configs and presets come without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raffia.recipes.config import EfficientZeroRun
    from raffia.recipes.efficientzero import (
        Agent,
        Evaluation,
        evaluate,
        load_agent,
        resume,
        train,
    )
    from raffia.recipes.ilql_config import ILQLRun
    from raffia.recipes.ilql_presets import ILQL_PRESETS
    from raffia.recipes.presets import PRESETS
    from raffia.recipes.run_folder import RunError, read_run
    from raffia.train.sitting import RunResult

__all__ = [
    "ILQL_PRESETS",
    "PRESETS",
    "Agent",
    "EfficientZeroRun",
    "Evaluation",
    "ILQLRun",
    "RunError",
    "RunResult",
    "evaluate",
    "load_agent",
    "read_run",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    match name:
        case "EfficientZeroRun":
            return import_module("raffia.recipes.config").EfficientZeroRun
        case "ILQLRun":
            return import_module("raffia.recipes.ilql_config").ILQLRun
        case "ILQL_PRESETS":
            return import_module("raffia.recipes.ilql_presets").ILQL_PRESETS
        case "PRESETS":
            return import_module("raffia.recipes.presets").PRESETS
        case "RunError" | "read_run":
            return getattr(import_module("raffia.recipes.run_folder"), name)
        case "RunResult":
            return import_module("raffia.train.sitting").RunResult
    if name in __all__:
        return getattr(import_module("raffia.recipes.efficientzero"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
