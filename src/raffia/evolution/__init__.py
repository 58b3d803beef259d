"""Populations: members of any learner stacked into one, selected and mutated.

Names are imported when first asked for, so that `config.py` comes without torch.

>>> from raffia.evolution import Evolution, MutationConfig, Population, SelectionConfig
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raffia.evolution.agents import (
        Member,
        MutableAgent,
        Mutations,
        Reshapes,
        TournamentSelection,
    )
    from raffia.evolution.config import HyperRange, MutationConfig, SelectionConfig
    from raffia.evolution.generation import Evolution, Generation
    from raffia.evolution.mutate import MemberChange
    from raffia.evolution.population import Population, with_hyper
    from raffia.evolution.select import mean_fitness, tournament, truncation

__all__ = [
    "MutableAgent",
    "MemberChange",
    "Evolution",
    "Generation",
    "HyperRange",
    "Member",
    "MutationConfig",
    "Mutations",
    "Population",
    "Reshapes",
    "SelectionConfig",
    "TournamentSelection",
    "mean_fitness",
    "tournament",
    "truncation",
    "with_hyper",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    match name:
        case "HyperRange" | "MutationConfig" | "SelectionConfig":
            return getattr(import_module("raffia.evolution.config"), name)
        case "Evolution" | "Generation":
            return getattr(import_module("raffia.evolution.generation"), name)
        case "MemberChange":
            return import_module("raffia.evolution.mutate").MemberChange
        case "Population" | "with_hyper":
            return getattr(import_module("raffia.evolution.population"), name)
        case "mean_fitness" | "tournament" | "truncation":
            return getattr(import_module("raffia.evolution.select"), name)
    if name in __all__:
        return getattr(import_module("raffia.evolution.agents"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
