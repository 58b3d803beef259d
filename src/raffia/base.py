"""Re-exports of `TensorDictBase` and the like, for programs written for tensordict."""

from raffia import tensordict as container
from raffia.tensordict.entries import NO_DEFAULT as NO_DEFAULT

NestedKey = container.NestedKey
TensorCollection = container.TensorCollection
TensorDictBase = container.TensorDictBase
default_is_leaf = container.default_is_leaf
from_any = container.from_any
from_dict = container.from_dict
from_json = container.from_json
from_namedtuple = container.from_namedtuple
from_struct_array = container.from_struct_array
from_tuple = container.from_tuple
get_defaults_to_none = container.get_defaults_to_none
is_leaf_nontensor = container.is_leaf_nontensor
is_tensor_collection = container.is_tensor_collection
set_get_defaults_to_none = container.set_get_defaults_to_none

_default_is_leaf = default_is_leaf
_is_leaf_nontensor = is_leaf_nontensor
_is_tensor_collection = is_tensor_collection
