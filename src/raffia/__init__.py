"""Raffia: reinforcement learning on keyed tensors: planning, language agents, populations.

The map of the package:

- `raffia.tensordict`: the container, whose names are also exported here.
- `raffia.nn`: keyed modules: they read entries of a container by name, and write entries.
- `raffia.data`: storage that is asked by content, and replay.
- `raffia.search`: planning: batched tree search with a model.
- `raffia.functional`: returns, transforms, losses, optimisers, seeds.
- `raffia.learner`: what a learner is.
- `raffia.envs`: environments, and the contract between them and who acts in them.
- `raffia.lm`: language models, tokenizers, dialogues with rewards, decoding.
- `raffia.algorithms.efficientzero`: EfficientZero: networks, targets, loss, learner, planner.
- `raffia.algorithms.ilql`: ILQL: networks, loss, learner, the agent.
- `raffia.evolution`: populations of agents, trained by one program.
- `raffia.distributed`: workers in other processes, shared gradients.
- `raffia.train`: the loop, streams, checkpoints, settings.
- `raffia.recipes`: whole runs: `train`, `resume`, `evaluate`, `load_agent`, presets.
- `raffia.report`: run folders as one page.
- `raffia.sweep`: many runs over seeds and settings.
- `raffia.cli`: the command line.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from raffia._version import __version__ as __version__
from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia import algorithms as algorithms
    from raffia import base as base
    from raffia import data as data
    from raffia import distributed as distributed
    from raffia import envs as envs
    from raffia import evolution as evolution
    from raffia import functional as functional
    from raffia import learner as learner
    from raffia import lm as lm
    from raffia import nn as nn
    from raffia import recipes as recipes
    from raffia import report as report
    from raffia import search as search
    from raffia import sweep as sweep
    from raffia import tensordict as tensordict
    from raffia import train as train
    from raffia import utils as utils
    from raffia.nn import TensorClassModuleBase as TensorClassModuleBase
    from raffia.nn import TensorClassModuleWrapper as TensorClassModuleWrapper
    from raffia.nn import as_tensordict_module as as_tensordict_module
    from raffia.tensordict import *

if not TYPE_CHECKING:  # checkers read the imports above, of `*` too
    # A room, and torch, is imported when first asked for: `raffia --help` answers at once.
    __getattr__, __dir__, _exported = _lazy_names(__name__)
    __all__ = [*_exported, "__version__"]


class _Package(ModuleType):
    """The package: `raffia.tensorclass` and `raffia.memmap` are functions, and modules to import.

    Importing a module puts it into the package under its name. Of these two the function stays.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in ("memmap", "tensorclass") and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
