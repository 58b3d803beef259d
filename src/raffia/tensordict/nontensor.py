"""Entries that are not tensors: one value for all rows, or a value for each row."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from raffia.tensordict import index, kinds, lock, stored_values
from raffia.tensordict.build import as_device, as_size
from raffia.tensordict.collection import TensorCollection
from raffia.tensordict.index import indexed_size, normalise
from raffia.tensordict.keys import is_key
from raffia.tensordict.lazy import LazyStackedTensorDict
from raffia.tensordict.lazy_rows import emptied
from raffia.tensordict.modes import capture_non_tensor_stack
from raffia.tensordict.node import (
    BatchSize,
    Device,
    Entries,
    LeafFn,
    Names,
    Node,
    Op,
    ValueNode,
    child_names,
)
from raffia.tensordict.signatures import shows_options_of
from raffia.tensordict.unbatched import UnbatchedTensor, WholeValue, joined
from raffia.tensordict.values import LinkedList, flat, interleaved, same

# Operations that only move rows about: what they do to data is read off a tensor of row numbers.
_MOVES = """view reshape unsqueeze squeeze permute transpose expand repeat repeat_interleave roll
flip rot90 pad""".split()


class NonTensor(ValueNode, TensorCollection):
    """Members of the entries that hold values: there is nothing in them that has a key.

    A subclass has `tolist`, `_put`, which takes over values, and the way in which it is indexed.

    >>> isinstance(NonTensorData("a"), NonTensor), isinstance(NonTensorStack("a"), NonTensor)
    (True, True)
    """

    if TYPE_CHECKING:

        def _put(self, data: Any) -> None: ...

    # -- the contract of Node

    def _set_str(self, name: str, value: Any) -> None:
        raise _no_entries(self, name)

    def _del_str(self, name: str) -> None:
        raise _no_entries(self, name)

    def _replace_str(self, name: str, value: Any) -> None:
        raise _no_entries(self, name)

    def _write(self, data: Any) -> None:
        with on_disk(self):
            self._put(data)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return shared_form(self) or super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name, shared in stored_values.SHARED.items():  # a copy has no home to share it by
            if shared in state:
                state[name] = state.pop(shared)
        return state

    def _where(self, condition: Tensor, other: Any) -> Any:
        """The values where `condition` is true, those of `other` elsewhere."""
        if not (isinstance(other, Node) and other._is_data()) or all_same([self, other]):
            return self
        entry: Any = self
        size = self._batch_size
        mask = index.expand_right(condition, entry).expand(size)
        choices = zip(mask.reshape(-1).tolist(), rows_of(self), rows_of(other), strict=True)
        rows = [NonTensorData(a if c else b, device=self._device) for c, a, b in choices]
        found = shaped(rows, size)
        if self._names is not None:
            found._set_names(list(self._names))
        return found

    def _compared(self, other: Any, compare: Callable[[Any, Any], Any]) -> Any:
        """Compare values row by row (eq, ne), or join bools (xor, or_, and_).

        Other values, and other comparisons, return the entry as it is.
        """
        tests = compare is operator.eq or compare is operator.ne
        if not tests and compare not in (operator.xor, operator.or_, operator.and_):
            return self
        if not (isinstance(other, Node) and other._is_data()):
            return NotImplemented if tests else self
        size = self._batch_size
        theirs: Any = other if other._batch_size == size else other.expand(size)
        if isinstance(self, NonTensorData) and isinstance(theirs, NonTensorData):
            whole, pairs = True, [(self._data, theirs._data)]
        else:
            whole, pairs = False, list(zip(rows_of(self), rows_of(theirs), strict=True))
        if tests:
            found = [same(a, b) is (compare is operator.eq) for a, b in pairs]
        elif all([isinstance(value, bool) for pair in pairs for value in pair]):
            found = [compare(a, b) for a, b in pairs]
        else:
            return self
        rows = torch.tensor(found, dtype=torch.bool)
        return torch.full(size, found[0]) if whole else rows.reshape(size)

    def _with_rows(self, idx: Any, value: Any) -> Any:
        """The entry with `value` in the rows `idx`: itself, or a stack if it holds one value."""
        at = normalise(idx, self._batch_size) if self._batch_size else ()
        size = indexed_size(self._batch_size, at)
        if not (isinstance(value, Node) and value._is_data()):
            if isinstance(value, list) and size and len(value) == size[0]:
                value = NonTensorStack.from_list(value, self._device)
            else:
                value = NonTensorData(value, size, self._device)
        if value._batch_size != size:
            value = value.expand(size)
        replaced = self._set_index(at, value, len(self._batch_size))
        return self if replaced is None else replaced

    def _stack_data(self, nodes: Sequence[Any], dim: int) -> Any:
        """The stack of nodes that hold values, of which this is the first.

        One `NonTensorData` only if all are `MetaData` of one object, or if that is asked for and
        the values are equal.
        """
        size = list(self._batch_size)
        size.insert(dim % (len(size) + 1), len(nodes))
        if any([isinstance(node, UnbatchedTensor) for node in nodes]):
            return joined(nodes, size, "stack")
        if all([node._batch_size == self._batch_size for node in nodes]) and _one_value(nodes):
            return nodes[0]._like(torch.Size(size))
        return NonTensorStack._of(list(nodes), dim)

    # -- public methods

    def where(
        self,
        condition: Tensor,
        other: Any,
        *,
        out: Any = None,
        pad: Any = None,
        update_batch_size: bool = False,
    ) -> Any:
        """Select these values in the rows where `condition` is true, those of `other` elsewhere.

        other: a `NonTensorData` or `NonTensorStack`, or one value for all rows.

        >>> rows = NonTensorData("a", [2]).where(torch.tensor([True, False]), NonTensorData("b"))
        >>> rows.tolist()
        ['a', 'b']
        """
        if not isinstance(other, Node):
            other = NonTensorData(other)
        if not other._is_data():
            raise TypeError(
                f"where: a {type(self).__name__} holds values, and the other operand is a "
                f"{type(other).__name__}, which has entries"
            )
        size = self._batch_size
        found = self._where(condition, other if other._batch_size == size else other.expand(size))
        return index.written(found, out, update_batch_size)

    def update(
        self, input_dict_or_td: Any = None, clone: bool = False, inplace: bool = False, **o: Any
    ) -> Self:
        """Replace the values by those of another entry.

        >>> NonTensorData("a").update(NonTensorData("b")).data
        'b'
        """
        self._write(input_dict_or_td)
        return self

    def update_(self, input_dict_or_td: Any = None, clone: bool = False, **o: Any) -> Self:
        """Replace the values by those of another entry; allowed when locked.

        >>> NonTensorStack("a", "b").update_(NonTensorStack("c", "d")).tolist()
        ['c', 'd']
        """
        self._write(input_dict_or_td)
        return self

    @shows_options_of(TensorCollection.update_at_)
    def update_at_(self, input_dict_or_td: Any, idx: Any, clone: bool = False, **o: Any) -> Self:
        """Write values into the rows `idx`; refused where there is one value for all rows.

        >>> NonTensorStack("a", "b").update_at_(NonTensorData("c"), 0).tolist()
        ['c', 'b']
        """
        self[idx] = input_dict_or_td
        return self

    def maybe_to_stack(self) -> NonTensor:
        """A stack with the value in each row; itself without batch dimensions.

        >>> NonTensorData("a", batch_size=[2]).maybe_to_stack().tolist()
        ['a', 'a']
        """
        return NonTensorStack.from_nontensordata(self)

    def contiguous(self, *, canonical: bool = False, inplace: bool = False) -> Self:
        """The entry itself, as it has no tensor; the options are those of `TensorDict.contiguous`.

        >>> NonTensorData("a").contiguous().data
        'a'
        """
        return self

    def densify(self, layout: torch.layout = torch.strided) -> Self:
        """The entry itself, as it has no lazy stacks of tensors.

        >>> NonTensorStack("a", "b").densify().tolist()
        ['a', 'b']
        """
        return self

    @shows_options_of(TensorCollection.to_tensordict)
    def to_tensordict(self, **options: Any) -> Self:
        """A copy of itself: there is no other form.

        >>> NonTensorData("a").to_tensordict().data
        'a'
        """
        return self._shallow()

    def __eq__(self, other: object) -> Any:
        return self._compared(other, operator.eq)

    def __ne__(self, other: object) -> Any:
        return self._compared(other, operator.ne)

    __hash__ = TensorCollection.__hash__


@kinds.enter
class NonTensorData(WholeValue, NonTensor):
    """One Python value that stands for all rows of an entry.

    data: the value, stored as it is.
    batch_size, device, names: as those of a container.

    >>> entry = NonTensorData("text", batch_size=[2])
    >>> entry.data, entry.tolist(), entry[0].data
    ('text', ['text', 'text'], 'text')
    """

    _data: Any = stored_values.ReadAgain()
    _rows: Any = None  # in `torch.vmap`: the values of the rows, and which dimension was taken away

    def __init__(
        self,
        data: Any,
        batch_size: BatchSize = None,
        device: Device = None,
        names: Sequence[str | None] | None = None,
        **metadata: Any,
    ) -> None:
        if isinstance(data, Node) and data._is_data():
            if batch_size is None:
                batch_size = data._batch_size
            data = data.data  # type: ignore[attr-defined]
        self._data = data
        self._batch_size = as_size(batch_size)
        if device is not None:
            self._device = as_device(device)
        if names is not None:
            self.names = names

    def _like(self, batch_size: torch.Size, names: Names = None) -> NonTensorData:
        """This value with another batch size."""
        out = object.__new__(type(self))
        out._data, out._batch_size = self._data, batch_size
        if self._device is not None:
            out._device = self._device
        if names is not None:
            out._names = names
        if self._rows is not None and batch_size == self._batch_size:
            out._rows = self._rows
        return out

    @property
    def data(self) -> Any:
        """The value; assign to change it.

        >>> NonTensorData("text").data
        'text'
        """
        return self._data

    @data.setter
    def data(self, value: Any) -> None:
        self._write(value)

    # -- the contract of Node

    def _set_str(self, name: str, value: Any) -> None:
        if name != "data":
            raise _no_entries(self, name)
        self._write(value)

    def _map(self, fn: LeafFn) -> NonTensorData:
        return self._like(self._batch_size, self._names)

    def _leaves(self, out: list[Tensor]) -> list[Tensor]:
        return out

    def _rebuild(self, leaves: Iterator[Tensor]) -> NonTensorData:
        return self._like(self._batch_size, self._names)

    def _batched(
        self, fn: LeafFn, ndim: int, batch_size: torch.Size, names: Names = None, op: Op = ()
    ) -> Any:
        if op and op[0] == "pad":
            out = _moved(self, fn, ndim, batch_size)
            if names is not None:
                out.names = child_names(self, ndim, batch_size, names)
            return out
        if names is not None or self._names is not None:
            names = child_names(self, ndim, batch_size, names)
        return self._like(batch_size + self._batch_size[ndim:], names)

    def _set_index(self, idx: Any, value: Any, ndim: int) -> Any:
        """Return None if the rows hold `value` already, else a stack in which they do."""
        if not isinstance(value, Node):
            return None
        if isinstance(value, NonTensorData) and same(value._data, self._data):
            return None
        if self._batch_size and is_shared_entry(self):
            raise RuntimeError(
                "this one value for all rows is shared with other processes, which cannot switch "
                "to a value for each row: replace it as a whole with td.set_(key, value), or "
                "store a value for each row before sharing it: entry.maybe_to_stack()"
            )
        if not self._batch_size:  # all dimensions of `value` are new ones of size 1
            given = len(value._batch_size)
            return value._index((0,) * given, given, None) if given else value
        stack = self.maybe_to_stack()
        stack._set_index(idx, value, ndim)
        return stack

    def _set_device(self, device: torch.device | None) -> None:
        self._device = device

    def _unwrapped(self) -> Any:
        return self._data

    def _put(self, data: Any) -> None:
        """Replace the value in memory, but not in a folder on disk."""
        if isinstance(data, NonTensorStack):
            values = rows_of(data)
            if not values or not all([same(values[0], v) for v in values]):
                raise RuntimeError(
                    "Cannot update a NonTensorData, which holds one value, with a NonTensorStack "
                    "of several. Call `non_tensor_data.maybe_to_stack()` before calling update(), "
                    "or store the stack: td[key] = stack"
                )
            data = values[0]
        elif isinstance(data, NonTensorData):
            data = data._data
        self.__dict__[stored_values.value_attribute(self, "_data")] = data

    # -- public methods

    def __setitem__(self, idx: Any, value: Any) -> None:
        if self._with_rows(idx, value) is not self:
            raise RuntimeError(
                "a NonTensorData holds one value for all its rows, so a single row cannot have "
                "another; entry.maybe_to_stack() returns a NonTensorStack, which holds a value "
                "per row"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the value, which is a function.

        >>> NonTensorData(len)("text")
        4
        """
        return self._data(*args, **kwargs)

    def is_empty(self) -> bool:
        """False: there is a value.

        >>> NonTensorData(None).is_empty()
        False
        """
        return False

    @shows_options_of(TensorCollection.to_dict)
    def to_dict(self, **options: Any) -> Any:
        """The value.

        >>> NonTensorData("text").to_dict()
        'text'
        """
        return self._data

    @shows_options_of(TensorCollection.tolist)
    def tolist(self, **options: Any) -> Any:
        """Nested lists over the batch dimensions, with the value everywhere.

        >>> NonTensorData("a", batch_size=[2]).tolist()
        ['a', 'a']
        """
        data = out = self._data
        for n in reversed(self._batch_size):
            a_list = out is data and isinstance(data, list)
            out = [list(data) for _ in range(n)] if a_list else [out] * n
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        out = self._like(self._batch_size, self._names)
        memo[id(self)] = out
        out._data = copy.deepcopy(self._data, memo)
        return out

    def __repr__(self) -> str:
        name, size, device = type(self).__name__, self._batch_size, self._device
        return f"{name}(data={self._data}, batch_size={size}, device={device})"


@kinds.enter
class MetaData(NonTensorData):
    """One Python object that stands for a whole batch, such as its configuration.

    Stacking entries that hold the same object (the same by `is`) gives one again, others a value
    per row. `MetaData[cls]` is a class of those that hold an instance of `cls`.
    Raises TypeError for a value of another class.

    >>> config = {"lr": 0.1}
    >>> from raffia import TensorDict
    >>> td = TensorDict(config=MetaData(config), a=torch.zeros(2))
    >>> torch.stack([td, td])["config"] is config
    True
    >>> MetaData[str](1)
    Traceback (most recent call last):
    ...
    TypeError: Expected data of type str, got int
    """

    _of: Any = object

    def __init__(
        self,
        data: Any,
        batch_size: BatchSize = None,
        device: Device = None,
        names: Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(data, batch_size, device, names)
        self._put(self._data)

    def __class_getitem__(cls, kind: Any) -> Any:
        return _meta_data_of(kind)

    def _put(self, data: Any) -> None:
        data = data._unwrapped() if isinstance(data, NonTensorData) else data
        if not isinstance(data, self._of) and not isinstance(data, Node):
            raise TypeError(f"Expected data of type {self._of.__name__}, got {type(data).__name__}")
        super()._put(data)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) is MetaData or self._of is object or shared_form(self):
            return super().__reduce_ex__(protocol)
        return _meta_data, (self._of, self.__getstate__())


@functools.cache
def _meta_data_of(kind: type) -> type[MetaData]:
    """The class of `MetaData` that hold an instance of `kind`."""
    return type(f"MetaData[{kind.__name__}]", (MetaData,), {"_of": kind, "__module__": __name__})


def _meta_data(kind: type, state: dict[str, Any]) -> MetaData:
    """Restore a pickled `MetaData[kind]`."""
    out = object.__new__(_meta_data_of(kind))
    out.__setstate__(state)
    return out


NonTensorDataBase = NonTensorData  # as older programs name it


@kinds.enter
class NonTensorStack(NonTensor, LazyStackedTensorDict):  # type: ignore[misc] # `contiguous`
    """A Python value for each row of an entry.

    args: the values, or `NonTensorData` and `NonTensorStack` to put together.
    stack_dim: the position of the new dimension.

    >>> stack = NonTensorStack("a", "b", "c")
    >>> stack.tolist(), stack[0].data, stack[1:].tolist()
    (['a', 'b', 'c'], 'a', ['b', 'c'])
    """

    def __init__(self, *args: Any, stack_dim: int = 0, **options: Any) -> None:
        super().__init__(*[as_data(arg) for arg in args], stack_dim=stack_dim, **options)

    tensordicts: list[Any] = stored_values.ReadAgain()  # type: ignore[assignment]

    def _set_members(self, members: list[Any]) -> None:
        super()._set_members(members)
        if self._home is not None:
            self._home.hold(self)

    @classmethod
    @shows_options_of(TensorCollection.from_list, without="lazy")
    def from_list(cls, non_tensors: list[Any], device: Device = None, **options: Any) -> Self:  # type: ignore[override]
        """A stack with a dimension for each level of a nested list.

        >>> NonTensorStack.from_list([["a", "b"], ["c", "d"]]).batch_size
        torch.Size([2, 2])
        """
        members: list[Any] = []
        if non_tensors and all([isinstance(value, list) for value in non_tensors]):
            members = [cls.from_list(value, device) for value in non_tensors]
        if not members or len({len(m._batch_size) for m in members}) > 1:
            members = [as_data(value, device) for value in non_tensors]
        return cls._of(members, 0)

    @classmethod
    def from_nontensordata(cls, non_tensor: Any) -> NonTensor:
        """A stack with a copy of the value in each row; the value itself without batch dimensions.

        >>> NonTensorStack.from_nontensordata(NonTensorData("a", batch_size=[2, 1])).tolist()
        [['a'], ['a']]
        """
        size = non_tensor._batch_size
        if not size or isinstance(non_tensor, NonTensorStack):
            return non_tensor
        members = [
            cls.from_nontensordata(non_tensor._like(torch.Size(size[1:]))) for _ in range(size[0])
        ]
        return cls._of(members, 0, torch.Size(size[1:]))

    @property
    def data(self) -> Any:  # type: ignore[override]
        """The value, if it is the same in all rows.

        >>> NonTensorStack("a", "a").data
        'a'
        """
        values = rows_of(self)
        if values and all([same(values[0], value) for value in values]):
            return values[0]
        raise AttributeError(
            "the rows of this NonTensorStack hold different values: use .tolist() instead of .data"
        )

    # -- the contract of Node

    def _new(self, entries: Entries, batch_size: torch.Size, names: Names = None) -> Any:
        if batch_size == self._batch_size:
            return self._shallow()
        return NonTensorData(self.tolist(), batch_size, self._device, names)

    def _batched_dense(
        self, fn: LeafFn, ndim: int, batch_size: torch.Size, names: Names, op: Op
    ) -> Any:
        if op and op[0] not in _MOVES:
            return self._new({}, batch_size + self._batch_size[ndim:])
        return _moved(self, fn, ndim, batch_size)

    def _no_rows(self, plan: Any, ndim: int) -> Any:
        return emptied(self, plan, ndim)

    def _set_index(self, idx: Any, value: Any, ndim: int) -> Any:
        if isinstance(value, Node):
            with on_disk(self):
                super()._set_index(idx, value, ndim)

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        if len(batch_size) > len(self._batch_size):
            raise RuntimeError(
                f"a NonTensorStack of batch size {tuple(self._batch_size)} has no values for "
                f"{tuple(batch_size)}"
            )
        super()._set_batch_size(batch_size)

    def _unwrapped(self) -> Any:
        return LinkedList.over(self.tolist(), self, (), len(self._batch_size))

    def _put(self, data: Any) -> None:
        parts: Sequence[Any] = [data] * len(self.tensordicts)
        if isinstance(data, list) and len(data) == self._batch_size[0]:
            data = NonTensorStack.from_list(data, self._device)
        if isinstance(data, Node):
            size = self._batch_size
            if data._batch_size[: len(size)] != size:
                if data._batch_size:
                    raise RuntimeError(
                        f"values of batch size {tuple(data._batch_size)} can't be written into a "
                        f"NonTensorStack of batch size {tuple(size)}"
                    )
                data = data._like(size)  # type: ignore[attr-defined]
            parts = data.unbind(self.stack_dim)
        for i, (td, part) in enumerate(zip(self.tensordicts, parts, strict=True)):
            if isinstance(td, NonTensorData) and isinstance(part, NonTensorStack):
                self.tensordicts[i] = part
                if self._own_lock:
                    lock.relink(self, td, part)
            else:
                td._put(part)

    def _filled(self, shape: torch.Size) -> Any:
        return NonTensorStack.from_nontensordata(NonTensorData(None, shape, self._device))

    def empty_like(self, batch_size: torch.Size) -> NonTensor:
        """These values with another batch size.

        >>> NonTensorStack("a", "b").empty_like(torch.Size([2])).tolist()
        ['a', 'b']
        """
        return self._new({}, batch_size)

    # -- public methods

    def __setitem__(self, idx: Any, value: Any) -> None:
        if isinstance(idx, str) or (isinstance(idx, tuple) and idx and is_key(idx)):
            raise _no_entries(self, idx)
        self._with_rows(idx, value)

    def is_empty(self) -> bool:
        """Whether there are no rows.

        >>> NonTensorStack("a").is_empty()
        False
        """
        return not self.tensordicts

    @shows_options_of(TensorCollection.to_dict)
    def to_dict(self, **options: Any) -> Any:
        """Nested lists of the values.

        >>> NonTensorStack("a", "b").to_dict()
        ['a', 'b']
        """
        return self.tolist()

    @shows_options_of(TensorCollection.tolist)
    def tolist(self, **options: Any) -> Any:
        """Nested lists of the values.

        >>> NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d"), stack_dim=1).tolist()
        [['a', 'c'], ['b', 'd']]
        """
        return interleaved(
            [td.tolist() for td in self.tensordicts], self.stack_dim, self._batch_size
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(\n    {self.tolist()},\n    batch_size={self._batch_size},\n"
            f"    device={self._device})"
        )


def on_disk(node: Any) -> AbstractContextManager[None]:
    """A block that changes a value; one of a memory-mapped container is changed on disk as well."""
    return _NOWHERE if node._home is None else node._home.changing()


_NOWHERE = contextlib.nullcontext()


def shared_form(node: Any) -> tuple[Any, ...] | None:
    """The pickled form of a value that is shared with other processes; None for others."""
    if not is_shared_entry(node):
        return None
    return stored_values.reopened, (node._shallow(), node._home.folder, node._home.name)


def is_shared_entry(node: Any) -> bool:
    """Whether this is an entry, as a whole, that is shared with other processes."""
    return node._home is not None and node._home.is_shared and node._home.is_of(node)


def _no_entries(node: Any, name: Any) -> KeyError:
    return KeyError(f"{name!r}: a {type(node).__name__} holds values, not entries")


def as_data(value: Any, device: Device = None) -> Node:
    """The entry that holds a value: itself, if it is one."""
    is_data = isinstance(value, Node) and value._is_data()
    return value if is_data else NonTensorData(value, device=device)


def rows_of(node: Any) -> list[Any]:
    """The values of all rows, in row-major order."""
    return flat(node.tolist(), len(node._batch_size))


@kinds.enter
def shaped(members: list[Any], size: Sequence[int]) -> NonTensor:
    """Data nodes in row-major order as stacks of the given size."""
    inner = members[0]._batch_size if members else torch.Size()
    for i in range(len(size) - 1, -1, -1):
        n, below = size[i], torch.Size((*size[i + 1 :], *inner))
        starts = range(0, n * math.prod(size[:i]), n) if n else range(math.prod(size[:i]))
        members = [NonTensorStack._of(members[at : at + n], 0, below) for at in starts]
    return members[0]


def _moved(node: Any, fn: LeafFn, ndim: int, batch_size: torch.Size) -> Any:
    """Apply an operation that moves rows to non-tensor data, by running it on the row numbers.

    Rows that the operation makes up (padding) hold None: their number does not grow when all do.
    """
    size, rest = node._batch_size[:ndim], node._batch_size[ndim:]
    numbers = torch.arange(size.numel()).reshape(size)
    cells = zip(fn(numbers).reshape(-1).tolist(), fn(numbers + 1).reshape(-1).tolist(), strict=True)
    positions = list(np.ndindex(*size))
    members = [
        node._index(positions[at], ndim, None)
        if check == at + 1
        else NonTensorData(None, rest, node._device)
        for at, check in cells
    ]
    return shaped(members, batch_size)


# ------------------------------------------------------------------------------------- stacking


def _one_value(nodes: Sequence[Any]) -> bool:
    """Whether stacking these nodes results in one value for all of them."""
    first = nodes[0]
    if isinstance(first, MetaData):
        if all([type(node) is type(first) and node._data is first._data for node in nodes]):
            return True
    return capture_non_tensor_stack() and all_same(nodes)


def all_same(nodes: Sequence[Any]) -> bool:
    """Whether all data nodes hold one value each, the same."""
    data = [node._data for node in nodes if isinstance(node, NonTensorData)]
    return len(data) == len(nodes) and all([same(value, data[0]) for value in data])
