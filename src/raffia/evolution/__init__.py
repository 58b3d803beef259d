"""Populations: members of any learner stacked into one, selected and mutated.

Names are imported when first asked for, so that `config.py` comes without torch.

>>> from raffia.evolution import Evolution, MutationConfig, Population, SelectionConfig
"""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.evolution.agents import (
        Member,
        MutableAgent,
        Mutations,
        Reshapes,
        TournamentSelection,
    )
    from raffia.evolution.config import HyperRange, MutationConfig, SelectionConfig
    from raffia.evolution.generation import (
        Evolution,
        Generation,
        mean_fitness,
        tournament,
        truncation,
    )
    from raffia.evolution.mutate import MemberChange
    from raffia.evolution.population import Population, with_hyper

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

__getattr__, __dir__ = _lazy_names(__name__)
