"""The contract of a batched dictionary, and the error of a query for rows that are not in it."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from torch import Tensor

K = TypeVar("K")
V = TypeVar("V")


class UnknownRowError(KeyError, IndexError):
    """Rows that are not in the map were queried; the message names them.

    A KeyError, as of any dictionary, and an IndexError, as programs for TorchRL expect it.

    >>> from raffia.data.map import TensorDictMap
    >>> TensorDictMap(in_keys=["obs"])[TensorDict(obs=torch.zeros(2, 3), batch_size=[2])]
    Traceback (most recent call last):
    ...
    raffia.data.map_contract.UnknownRowError: 2 of 2 rows are not in the map, ...
    """

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class TensorMap(ABC, Generic[K, V]):
    """The contract of a dictionary from batches of keys to batches of values.

    >>> from raffia.data.map import TensorDictMap
    >>> issubclass(TensorDictMap, TensorMap)
    True
    """

    @abstractmethod
    def clear(self) -> None:
        """Take all rows out."""

    @abstractmethod
    def __getitem__(self, item: K) -> V:
        """The values of the rows of a key."""

    @abstractmethod
    def __setitem__(self, key: K, value: V) -> None:
        """Write a value for each row of a key."""

    @abstractmethod
    def __len__(self) -> int:
        """How many rows there are."""

    @abstractmethod
    def contains(self, item: K) -> Tensor:
        """Whether each row of a key is here: bool [*batch]."""

    def __contains__(self, item: K) -> bool:
        """Whether all rows of a key are here."""
        return bool(self.contains(item).all())
