"""Populations: members of any learner stacked into one, selected and mutated.

Names are imported when first asked for, so that `config.py` comes without torch.

>>> from raffia.evolution import Evolution, MutationConfig, Population, SelectionConfig
"""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.evolution.agents import Member as Member
    from raffia.evolution.agents import MutableAgent as MutableAgent
    from raffia.evolution.agents import Mutations as Mutations
    from raffia.evolution.agents import Reshapes as Reshapes
    from raffia.evolution.agents import TournamentSelection as TournamentSelection
    from raffia.evolution.config import HyperRange as HyperRange
    from raffia.evolution.config import MutationConfig as MutationConfig
    from raffia.evolution.config import SelectionConfig as SelectionConfig
    from raffia.evolution.generation import Evolution as Evolution
    from raffia.evolution.generation import Generation as Generation
    from raffia.evolution.generation import mean_fitness as mean_fitness
    from raffia.evolution.generation import tournament as tournament
    from raffia.evolution.generation import truncation as truncation
    from raffia.evolution.mutate import MemberChange as MemberChange
    from raffia.evolution.population import Population as Population
    from raffia.evolution.population import with_hyper as with_hyper

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = _lazy_names(__name__)
