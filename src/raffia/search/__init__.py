"""Planning: batched tree search with a model; no network and no environment in here."""

from typing import TYPE_CHECKING

from raffia.functional.draws import dirichlet_noise as dirichlet_noise
from raffia.functional.draws import gumbel_noise as gumbel_noise
from raffia.lazy import public_names as _public_names
from raffia.search.base import BoundModel as BoundModel
from raffia.search.base import RecurrentOutput as RecurrentOutput
from raffia.search.base import RootOutput as RootOutput
from raffia.search.base import SearchMemory as SearchMemory
from raffia.search.base import UnfitOutputError as UnfitOutputError
from raffia.search.base import ValuePrefix as ValuePrefix
from raffia.search.graph import TreeEdge as TreeEdge
from raffia.search.graph import TreeGraph as TreeGraph
from raffia.search.graph import TreeNode as TreeNode
from raffia.search.keyed import FunctionModel as FunctionModel
from raffia.search.keyed import KeyedSearch as KeyedSearch
from raffia.search.keyed import PlanningModel as PlanningModel
from raffia.search.mcts import search as search
from raffia.search.nodes import Nodes as Nodes
from raffia.search.policies import PolicyOutput as PolicyOutput
from raffia.search.policies import gumbel_policy as gumbel_policy
from raffia.search.policies import muzero_policy as muzero_policy
from raffia.search.policies import sample_visits as sample_visits
from raffia.search.sampled import ActionSampler as ActionSampler
from raffia.search.sampled import CategoricalSampler as CategoricalSampler
from raffia.search.sampled import GaussianSampler as GaussianSampler
from raffia.search.sampled import Samples as Samples
from raffia.search.sampled import sampled_policy as sampled_policy
from raffia.search.sampled import with_sampled_actions as with_sampled_actions
from raffia.search.selection import PUCT as PUCT
from raffia.search.selection import Gumbel as Gumbel
from raffia.search.selection import Selection as Selection
from raffia.search.transpositions import state_key as state_key
from raffia.search.tree import Tree as Tree

if not TYPE_CHECKING:
    __all__ = _public_names(__name__)
