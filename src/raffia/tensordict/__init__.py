"""The container: named tensors that share a batch shape."""

from raffia.tensordict.disk import DamagedFileError
from raffia.tensordict.entries import default_is_leaf, is_leaf_nontensor
from raffia.tensordict.functions import (
    assert_allclose_td,
    assert_close,
    from_any,
    from_dataclass,
    from_dict,
    from_module,
    from_modules,
    from_namedtuple,
    from_pytree,
    from_struct_array,
    from_tuple,
    fromkeys,
    is_non_tensor,
    is_tensor_collection,
    load,
    load_memmap,
    make_tensordict,
    memmap,
    merge_tensordicts,
    pad,
    save,
)
from raffia.tensordict.keys import (
    KeyThroughLeafError,
    MissingKeyError,
    NestedKey,
    unravel_key,
    unravel_key_list,
    unravel_key_to_tuple,
)
from raffia.tensordict.lazy import (
    LazyStackedTensorDict,
    dense_stack_tds,
    lazy_stack,
    maybe_dense_stack,
)
from raffia.tensordict.memmap import MemoryMappedTensor
from raffia.tensordict.nontensor import (
    NonTensorData,
    NonTensorStack,
    capture_non_tensor_stack,
    list_to_stack,
    set_capture_non_tensor_stack,
    set_list_to_stack,
)
from raffia.tensordict import pytrees as _pytrees
from raffia.tensordict.params import TensorDictParams
from raffia.tensordict.stack import cat, pad_sequence, stack
from raffia.tensordict.tensorclass import TensorClass, is_tensorclass, tensorclass
from raffia.tensordict.tensordict import TensorCollection, TensorDict, TensorDictBase

__all__ = [
    "DamagedFileError",
    "KeyThroughLeafError",
    "LazyStackedTensorDict",
    "MemoryMappedTensor",
    "MissingKeyError",
    "NestedKey",
    "NonTensorData",
    "NonTensorStack",
    "TensorClass",
    "TensorCollection",
    "TensorDict",
    "TensorDictBase",
    "TensorDictParams",
    "assert_allclose_td",
    "assert_close",
    "capture_non_tensor_stack",
    "cat",
    "default_is_leaf",
    "dense_stack_tds",
    "from_any",
    "from_dataclass",
    "from_dict",
    "from_module",
    "from_modules",
    "from_namedtuple",
    "from_pytree",
    "from_struct_array",
    "from_tuple",
    "fromkeys",
    "is_leaf_nontensor",
    "is_non_tensor",
    "is_tensor_collection",
    "is_tensorclass",
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
    "set_list_to_stack",
    "stack",
    "tensorclass",
    "unravel_key",
    "unravel_key_list",
    "unravel_key_to_tuple",
]
