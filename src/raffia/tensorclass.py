"""Where programs written for tensordict look for typed containers; they stand in `raffia`.

`raffia.tensorclass` stays the decorator, also after `from raffia.tensorclass import ...`.
"""

from raffia.tensordict import (
    MetaData as MetaData,
)
from raffia.tensordict import (
    NonTensorData as NonTensorData,
)
from raffia.tensordict import (
    NonTensorDataBase as NonTensorDataBase,
)
from raffia.tensordict import (
    NonTensorStack as NonTensorStack,
)
from raffia.tensordict import (
    TensorClass as TensorClass,
)
from raffia.tensordict import (
    is_non_tensor as is_non_tensor,
)
from raffia.tensordict import (
    is_tensorclass as is_tensorclass,
)
from raffia.tensordict import (
    tensorclass as tensorclass,
)
from raffia.tensordict.tensorclass import from_dataclass as from_dataclass
from raffia.tensordict.values import LinkedList as LinkedList
