"""Names of `raffia.nn` under tensordict's module path `nn.common`."""

from raffia.nn.base import TensorDictModuleBase as TensorDictModuleBase
from raffia.nn.dispatch import dispatch as dispatch
from raffia.nn.module import TensorDictModule as TensorDictModule
from raffia.nn.wrappers import TensorDictModuleWrapper as TensorDictModuleWrapper
from raffia.nn.wrappers import WrapModule as WrapModule
from raffia.nn.wrappers import as_tensordict_module as as_tensordict_module
from raffia.tensordict.functions import make_tensordict as make_tensordict
