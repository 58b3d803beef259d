"""Where programs written for tensordict look for `TensorDictBase`; it stands in `raffia`."""

from raffia.tensordict import (
    NestedKey as NestedKey,
)
from raffia.tensordict import (
    TensorCollection as TensorCollection,
)
from raffia.tensordict import (
    TensorDictBase as TensorDictBase,
)
from raffia.tensordict import (
    default_is_leaf as default_is_leaf,
)
from raffia.tensordict import (
    get_defaults_to_none as get_defaults_to_none,
)
from raffia.tensordict import (
    is_leaf_nontensor as is_leaf_nontensor,
)
from raffia.tensordict import (
    is_tensor_collection as is_tensor_collection,
)
from raffia.tensordict import (
    set_get_defaults_to_none as set_get_defaults_to_none,
)
from raffia.tensordict.entries import NO_DEFAULT as NO_DEFAULT

_default_is_leaf = default_is_leaf
_is_leaf_nontensor = is_leaf_nontensor
_is_tensor_collection = is_tensor_collection
