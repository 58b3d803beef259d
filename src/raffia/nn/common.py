"""Names of `raffia.nn` under tensordict's module path `nn.common`."""

from raffia.nn.base import TensorDictModuleBase
from raffia.nn.dispatch import dispatch
from raffia.nn.module import TensorDictModule
from raffia.nn.wrappers import TensorDictModuleWrapper, WrapModule, as_tensordict_module
from raffia.tensordict.functions import make_tensordict

__all__ = [
    "TensorDictModule",
    "TensorDictModuleBase",
    "TensorDictModuleWrapper",
    "WrapModule",
    "as_tensordict_module",
    "dispatch",
    "make_tensordict",
]
