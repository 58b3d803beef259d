"""Re-exports of typed containers from `raffia`, for programs written for tensordict.

`raffia.tensorclass` stays the decorator, also after `from raffia.tensorclass import ...`.
"""

from raffia import tensordict as container
from raffia.tensordict.values import LinkedList as LinkedList

MetaData = container.MetaData
NonTensorData = container.NonTensorData
NonTensorDataBase = container.NonTensorDataBase
NonTensorStack = container.NonTensorStack
TensorClass = container.TensorClass
from_dataclass = container.from_dataclass
is_non_tensor = container.is_non_tensor
is_tensorclass = container.is_tensorclass
tensorclass = container.tensorclass
