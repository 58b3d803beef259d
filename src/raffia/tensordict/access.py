"""Reads and writes without checks, for code of other rooms that has made sure already.

What these functions read is what a container stores: it is not copied, and not to be changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from raffia.tensordict.node import Names, Node, hold
from raffia.tensordict.tensordict import TensorDict

Container = TypeVar("Container", bound=Node)
Instance = TypeVar("Instance")  # a tensorclass


def unchecked(
    entries: dict[str, Any],
    batch_size: torch.Size,
    device: torch.device | None = None,
    names: Names = None,
) -> TensorDict:
    """A container over entries that have the batch size, and are on the device if there is one.

    >>> unchecked({"a": torch.zeros(2, 3)}, torch.Size([2]))["a"].shape
    torch.Size([2, 3])
    """
    for value in entries.values():
        if isinstance(value, Node):
            hold(value)
    return TensorDict._make(entries, batch_size, device, names)


def dense_entries(td: TensorDict) -> dict[str, Any]:
    """The entries of a `TensorDict`, and of no other kind, by name.

    >>> dense_entries(TensorDict(a=1))
    {'a': tensor(1)}
    """
    return td._d


def entries(node: Node) -> dict[str, Any]:
    """The entries of a container of any kind, by name; those of a lazy stack are stacked.

    >>> entries(TensorDict(a=1))
    {'a': tensor(1)}
    """
    return node._entries()


def peek(node: Node, name: str) -> Any:
    """An entry without stacking it: of a lazy stack, that of one of its members; None without one.

    >>> peek(TensorDict(a=1), "a"), peek(TensorDict(a=1), "b")
    (tensor(1), None)
    """
    return node._peek_str(name)


def is_value(entry: object) -> bool:
    """Whether an entry is a non-tensor value, or a tensor that belongs to the whole batch.

    >>> from raffia import NonTensorData
    >>> is_value(NonTensorData("a")), is_value(TensorDict()), is_value(torch.zeros(2))
    (True, False, False)
    """
    return isinstance(entry, Node) and entry._is_data()


def value_of(entry: Any) -> Any:
    """The value of `td[key]` for an entry that `td.get(key)` has returned.

    >>> value_of(TensorDict(a="text").get("a"))
    'text'
    """
    return entry._unwrapped() if isinstance(entry, Node) else entry


def leaves(node: Node) -> list[Tensor]:
    """All tensors of a container, depth first, in the order in which the entries were added.

    >>> leaves(TensorDict(a=1, n=dict(b=2)))
    [tensor(1), tensor(2)]
    """
    return node._leaves([])


def with_leaves(node: Container, leaves: Iterable[Tensor]) -> Container:
    """Rebuild a tree over other tensors, in the order of `leaves`.

    >>> with_leaves(TensorDict(a=1, n=dict(b=2)), [torch.tensor(3), torch.tensor(4)])["n", "b"]
    tensor(4)
    """
    rebuilt: Container = node._rebuild(iter(leaves))
    return rebuilt


def instance_over(kind: type[Instance], td: TensorDict) -> Instance:
    """An instance of a tensorclass over a container of its fields.

    >>> from raffia import TensorClass
    >>> class Step(TensorClass):
    ...     obs: torch.Tensor
    >>> instance_over(Step, TensorDict(obs=torch.ones(2))).obs
    tensor([1., 1.])
    """
    cls: Any = kind
    return cls._wrap(td.lock_() if cls._frozen else td)
