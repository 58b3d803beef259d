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
- `raffia.train`: the loop, streams, checkpoints, settings.
- `raffia.recipes`: whole runs: `train`, `resume`, `evaluate`, `load_agent`, presets.
- `raffia.report`: run folders as one page.
- `raffia.cli`: the command line.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from raffia._version import __version__
from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.nn import (
        TensorClassModuleBase,
        TensorClassModuleWrapper,
        as_tensordict_module,
    )
    from raffia.tensordict import *

__all__ = [
    "DamagedFileError",
    "KeyThroughLeafError",
    "LazyStackedTensorDict",
    "MemoryMappedTensor",
    "MetaData",
    "MissingKeyError",
    "NestedKey",
    "NonTensorData",
    "NonTensorDataBase",
    "NonTensorStack",
    "TensorClass",
    "TensorClassModuleBase",
    "TensorClassModuleWrapper",
    "TensorCollection",
    "TensorDict",
    "TensorDictBase",
    "TensorDictParams",
    "TypedTensorDict",
    "UnbatchedTensor",
    "__version__",
    "as_tensordict_module",
    "assert_allclose_td",
    "assert_close",
    "capture_non_tensor_stack",
    "cat",
    "collate",
    "default_is_leaf",
    "dense_stack_tds",
    "expand_as_right",
    "expand_right",
    "from_any",
    "from_consolidated",
    "from_dataclass",
    "from_dict",
    "from_json",
    "from_module",
    "from_modules",
    "from_namedtuple",
    "from_pytree",
    "from_struct_array",
    "from_tuple",
    "fromkeys",
    "get_defaults_to_none",
    "get_printoptions",
    "group_by",
    "is_bool",
    "is_floating",
    "is_inexact",
    "is_integer",
    "is_leaf_nontensor",
    "is_non_tensor",
    "is_tensor_collection",
    "is_tensorclass",
    "lazy_legacy",
    "lazy_stack",
    "list_to_stack",
    "load",
    "load_memmap",
    "make_tensordict",
    "maybe_dense_stack",
    "memmap",
    "merge_tensordicts",
    "pad",
    "pad_sequence",
    "save",
    "set_capture_non_tensor_stack",
    "set_get_defaults_to_none",
    "set_lazy_legacy",
    "set_list_to_stack",
    "set_printoptions",
    "stack",
    "tensorclass",
    "unpad_sequence",
    "unravel_key",
    "unravel_key_list",
    "unravel_key_to_tuple",
]


_ROOMS = (
    *("algorithms", "data", "envs", "functional", "learner", "lm", "nn"),
    *("recipes", "report", "search", "tensordict", "train"),
)
# A room, and torch, is imported when first asked for: `raffia --help` answers at once.
__getattr__, __dir__ = _lazy_names(__name__, _ROOMS)


class _Package(ModuleType):
    """The package: `raffia.tensorclass` and `raffia.memmap` are functions, and modules to import.

    Importing a module puts it into the package under its name. Of these two the function stays.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in ("memmap", "tensorclass") and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
