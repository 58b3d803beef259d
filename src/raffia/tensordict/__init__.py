"""The container: named tensors that share a batch shape."""

from typing import TYPE_CHECKING

from raffia.lazy import public_names as _public_names
from raffia.tensordict import pytrees as pytrees  # registers the containers with torch
from raffia.tensordict.collection import TensorCollection as TensorCollection
from raffia.tensordict.collection import TensorDictBase as TensorDictBase
from raffia.tensordict.functions import assert_allclose_td as assert_allclose_td
from raffia.tensordict.functions import assert_close as assert_close
from raffia.tensordict.functions import expand_as_right as expand_as_right
from raffia.tensordict.functions import expand_right as expand_right
from raffia.tensordict.functions import from_any as from_any
from raffia.tensordict.functions import from_consolidated as from_consolidated
from raffia.tensordict.functions import from_dataclass as from_dataclass
from raffia.tensordict.functions import from_dict as from_dict
from raffia.tensordict.functions import from_json as from_json
from raffia.tensordict.functions import from_module as from_module
from raffia.tensordict.functions import from_modules as from_modules
from raffia.tensordict.functions import from_namedtuple as from_namedtuple
from raffia.tensordict.functions import from_pytree as from_pytree
from raffia.tensordict.functions import from_struct_array as from_struct_array
from raffia.tensordict.functions import from_tuple as from_tuple
from raffia.tensordict.functions import fromkeys as fromkeys
from raffia.tensordict.functions import is_bool as is_bool
from raffia.tensordict.functions import is_floating as is_floating
from raffia.tensordict.functions import is_inexact as is_inexact
from raffia.tensordict.functions import is_integer as is_integer
from raffia.tensordict.functions import is_non_tensor as is_non_tensor
from raffia.tensordict.functions import is_tensor_collection as is_tensor_collection
from raffia.tensordict.functions import load as load
from raffia.tensordict.functions import load_memmap as load_memmap
from raffia.tensordict.functions import make_tensordict as make_tensordict
from raffia.tensordict.functions import memmap as memmap
from raffia.tensordict.functions import merge_tensordicts as merge_tensordicts
from raffia.tensordict.functions import pad as pad
from raffia.tensordict.functions import save as save
from raffia.tensordict.keys import KeyThroughLeafError as KeyThroughLeafError
from raffia.tensordict.keys import MissingKeyError as MissingKeyError
from raffia.tensordict.keys import NestedKey as NestedKey
from raffia.tensordict.keys import unravel_key as unravel_key
from raffia.tensordict.keys import unravel_key_list as unravel_key_list
from raffia.tensordict.keys import unravel_key_to_tuple as unravel_key_to_tuple
from raffia.tensordict.lazy import LazyStackedTensorDict as LazyStackedTensorDict
from raffia.tensordict.lazy import lazy_stack as lazy_stack
from raffia.tensordict.memmap import DamagedFileError as DamagedFileError
from raffia.tensordict.memmap import MemoryMappedTensor as MemoryMappedTensor
from raffia.tensordict.modes import capture_non_tensor_stack as capture_non_tensor_stack
from raffia.tensordict.modes import get_defaults_to_none as get_defaults_to_none
from raffia.tensordict.modes import lazy_legacy as lazy_legacy
from raffia.tensordict.modes import list_to_stack as list_to_stack
from raffia.tensordict.modes import set_capture_non_tensor_stack as set_capture_non_tensor_stack
from raffia.tensordict.modes import set_get_defaults_to_none as set_get_defaults_to_none
from raffia.tensordict.modes import set_lazy_legacy as set_lazy_legacy
from raffia.tensordict.modes import set_list_to_stack as set_list_to_stack
from raffia.tensordict.nontensor import MetaData as MetaData
from raffia.tensordict.nontensor import NonTensorData as NonTensorData
from raffia.tensordict.nontensor import NonTensorDataBase as NonTensorDataBase
from raffia.tensordict.nontensor import NonTensorStack as NonTensorStack
from raffia.tensordict.params import TensorDictParams as TensorDictParams
from raffia.tensordict.printing import get_printoptions as get_printoptions
from raffia.tensordict.printing import set_printoptions as set_printoptions
from raffia.tensordict.rows import collate as collate
from raffia.tensordict.rows import group_by as group_by
from raffia.tensordict.rows import unpad_sequence as unpad_sequence
from raffia.tensordict.stack import cat as cat
from raffia.tensordict.stack import dense_stack_tds as dense_stack_tds
from raffia.tensordict.stack import maybe_dense_stack as maybe_dense_stack
from raffia.tensordict.stack import pad_sequence as pad_sequence
from raffia.tensordict.stack import stack as stack
from raffia.tensordict.tensorclass import TensorClass as TensorClass
from raffia.tensordict.tensorclass import is_tensorclass as is_tensorclass
from raffia.tensordict.tensorclass import tensorclass as tensorclass
from raffia.tensordict.tensordict import TensorDict as TensorDict
from raffia.tensordict.typed import TypedTensorDict as TypedTensorDict
from raffia.tensordict.unbatched import UnbatchedTensor as UnbatchedTensor
from raffia.tensordict.views import default_is_leaf as default_is_leaf
from raffia.tensordict.views import is_leaf_nontensor as is_leaf_nontensor

if not TYPE_CHECKING:
    __all__ = _public_names(__name__)
