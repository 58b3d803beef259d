"""Values that are not tensors: whether two are equal, and those of rows as nested lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class LinkedList(list):  # type: ignore[type-arg]
    """The values of a `NonTensorStack` as nested lists; assigning to an element writes through.

    >>> from raffia import TensorDict
    >>> td = TensorDict(words=["a", "b"], batch_size=[2])
    >>> td["words"][1] = "c"
    >>> td["words"]
    ['a', 'c']
    >>> alone = LinkedList(["a"])  # of no stack: a list
    >>> alone[0] = "b"
    >>> alone
    ['b']
    """

    stack: Any = None
    at: tuple[int, ...]

    @classmethod
    def over(cls, values: list[Any], stack: Any, at: tuple[int, ...], depth: int) -> LinkedList:
        if depth > 1:
            values = [cls.over(v, stack, (*at, i), depth - 1) for i, v in enumerate(values)]
        out = cls(values)
        out.stack, out.at = stack, at
        return out

    def __setitem__(self, i: Any, value: Any) -> None:
        super().__setitem__(i, value)
        if self.stack is not None:
            self.stack[(*self.at, i)] = value

    def tolist(self) -> list[Any]:
        """The values as plain lists, which belong to no stack.

        >>> LinkedList(["a"]).tolist()
        ['a']
        """
        return [each.tolist() if isinstance(each, LinkedList) else each for each in self]

    def __reduce__(self) -> Any:
        return list, (list(self),)


def same(a: Any, b: Any) -> bool:
    """Whether two Python values are equal; arrays and tensors are compared as a whole.

    >>> same("a", "a"), same(torch.zeros(2), torch.zeros(2)), same(1, "1")
    (True, True, False)
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    try:
        if isinstance(a, Tensor):
            return torch.equal(a, b)
        equal = a == b
        return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
    except (TypeError, ValueError, RuntimeError):
        return False


def flat(values: Any, depth: int) -> list[Any]:
    """The values in `depth` nested lists as one list.

    >>> flat([["a"], ["b"]], 2)
    ['a', 'b']
    """
    for _ in range(depth - 1):
        values = [value for row in values for value in row]
    return values if depth else [values]


def interleaved(rows: list[Any], dim: int, size: Sequence[int]) -> list[Any]:
    """Nested lists with the rows stacked along `dim`; `size` is that of the result.

    >>> interleaved([["a", "b"], ["c", "d"]], 1, [2, 2])
    [['a', 'c'], ['b', 'd']]
    """
    if dim == 0:
        return rows
    return [interleaved([row[i] for row in rows], dim - 1, size[1:]) for i in range(size[0])]
