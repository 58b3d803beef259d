"""Planning: batched tree search with a model; no network and no environment in here."""

from raffia.functional.draws import dirichlet_noise, gumbel_noise
from raffia.search.base import (
    BoundModel,
    RecurrentOutput,
    RootOutput,
    SearchMemory,
    UnfitOutputError,
    ValuePrefix,
)
from raffia.search.graph import TreeEdge, TreeGraph, TreeNode
from raffia.search.gumbel import Gumbel
from raffia.search.keyed import FunctionModel, KeyedSearch, PlanningModel
from raffia.search.mcts import search
from raffia.search.nodes import Nodes
from raffia.search.policies import PolicyOutput, gumbel_policy, muzero_policy, sample_visits
from raffia.search.puct import PUCT
from raffia.search.sampled import (
    ActionSampler,
    CategoricalSampler,
    GaussianSampler,
    Samples,
    sampled_policy,
    with_sampled_actions,
)
from raffia.search.selection import Selection
from raffia.search.transpositions import state_key
from raffia.search.tree import Tree

__all__ = [
    "PUCT",
    "BoundModel",
    "CategoricalSampler",
    "FunctionModel",
    "GaussianSampler",
    "Gumbel",
    "KeyedSearch",
    "Nodes",
    "PlanningModel",
    "PolicyOutput",
    "RecurrentOutput",
    "RootOutput",
    "ActionSampler",
    "Samples",
    "SearchMemory",
    "Selection",
    "Tree",
    "TreeEdge",
    "TreeGraph",
    "TreeNode",
    "UnfitOutputError",
    "ValuePrefix",
    "dirichlet_noise",
    "gumbel_noise",
    "gumbel_policy",
    "muzero_policy",
    "sample_visits",
    "sampled_policy",
    "search",
    "state_key",
    "with_sampled_actions",
]
