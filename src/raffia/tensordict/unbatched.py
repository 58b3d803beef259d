"""Tensors that belong to a whole batch: entries without the batch dimensions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from raffia.tensordict.build import as_size
from raffia.tensordict.index import indexed_size
from raffia.tensordict.node import BatchSize, Entries, LeafFn, Names, Op, ValueNode


class WholeValue(ValueNode):
    """A value that all rows share: operations on rows change the batch size only.

    >>> from raffia import NonTensorData
    >>> issubclass(NonTensorData, WholeValue), issubclass(UnbatchedTensor, WholeValue)
    (True, True)
    """

    if TYPE_CHECKING:

        def _like(self, batch_size: torch.Size, names: Names = None) -> Any: ...

    def _new(self, entries: Entries, batch_size: torch.Size, names: Names = None) -> Any:
        return self._like(batch_size, names)

    def _shallow(self) -> Any:
        return self._like(self._batch_size, self._names)

    def _index(self, idx: Any, ndim: int, batch_size: torch.Size | None) -> Any:
        if batch_size is None:
            batch_size = indexed_size(self._batch_size[:ndim], idx)
        return self._like(batch_size + self._batch_size[ndim:])

    def _filled(self, shape: torch.Size) -> Any:
        """The content of a new entry in the rows that are not written."""
        return self._like(shape)

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        self._batch_size = batch_size
        if self._names is not None:
            self._names = (self._names + [None] * len(batch_size))[: len(batch_size)]

    def empty_like(self, batch_size: torch.Size) -> Self:
        """This value with another batch size.

        >>> from raffia import NonTensorData
        >>> NonTensorData("text").empty_like(torch.Size([2])).batch_size
        torch.Size([2])
        """
        return self._like(batch_size)


class UnbatchedTensor(Tensor, WholeValue):  # type: ignore[misc] # its methods are a tensor's
    """A tensor entry that belongs to the whole batch: operations on the batch leave it unchanged.

    data: a tensor, or what `torch.as_tensor` takes; of any shape, and shared, not copied.
    batch_size: that of the container it is stored in, which sets it.

    A lookup table, a mask or a set of weights that all rows share. Shape operations, indexing and
    reductions over the batch leave it alone; arithmetic, `clone`, `to` and `apply` reach it.
    Writing rows writes the whole of it, since all rows share it. Containers are stacked and
    concatenated where theirs are equal, else RuntimeError is raised.

    >>> from raffia import TensorDict
    >>> td = TensorDict(table=UnbatchedTensor(torch.zeros(3, 4)), b=torch.zeros(2), batch_size=[2])
    >>> td[0]["table"].shape, td.reshape(1, 2)["table"].shape, (td + 1)["table"].sum()
    (torch.Size([3, 4]), torch.Size([3, 4]), UnbatchedTensor(tensor(12.)))
    """

    _plain: Any = None  # of no class of containers
    _parents: Any = None  # those of the locked containers that hold it, as for any node
    _kids: Any = None
    _buffer: Any = None
    _cache: Any = None
    _lasting = True

    def __new__(cls, data: Any, batch_size: Any = None) -> UnbatchedTensor:
        return _over(torch.as_tensor(data), as_size(batch_size))

    def __init__(self, data: Any, batch_size: BatchSize = None) -> None:
        pass

    @property
    def batch_size(self) -> torch.Size:
        """The batch size of the container that holds it; the shape has nothing to do with it.

        >>> UnbatchedTensor(torch.zeros(3), batch_size=[2]).batch_size
        torch.Size([2])
        """
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: Any) -> None:
        self._batch_size = as_size(value)

    @property
    def data(self) -> UnbatchedTensor:
        """The values without a gradient.

        >>> UnbatchedTensor(torch.ones(2)).data
        UnbatchedTensor(tensor([1., 1.]))
        """
        return _over(self._plain_tensor().data, self._batch_size)

    @data.setter
    def data(self, value: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    def _plain_tensor(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def _like(self, batch_size: torch.Size, names: Names = None) -> UnbatchedTensor:
        return _over(self._plain_tensor(), batch_size)

    def _made(self, tensor: Tensor) -> UnbatchedTensor:
        return _over(tensor, self._batch_size)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out: Any = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, UnbatchedTensor) and args and isinstance(args[0], UnbatchedTensor):
            out._batch_size = args[0]._batch_size
        return out

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UnbatchedTensor({self._plain_tensor()!r})"

    def copy(self) -> UnbatchedTensor:
        """A new entry over the same tensor, like `copy` of a container.

        >>> UnbatchedTensor(torch.ones(2)).copy()
        UnbatchedTensor(tensor([1., 1.]))
        """
        return self._shallow()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unpickled, (self._plain_tensor(), tuple(self._batch_size))

    def __deepcopy__(self, memo: dict[int, Any]) -> UnbatchedTensor:
        out = memo[id(self)] = self._made(copy.deepcopy(self._plain_tensor().detach(), memo))
        out.requires_grad_(self.requires_grad)
        return out

    # -- the contract of Node

    def _get_lazy(self, name: str, **options: Any) -> Any:
        return None

    def _children(self) -> list[Any]:
        return []

    def _named_children(self) -> list[Any]:
        return []

    def _set_names(self, names: Names) -> None:
        """Do nothing: no dimension of the tensor is a batch dimension."""

    def _set_device(self, device: torch.device | None) -> None:
        """Do nothing: a container without a device leaves its tensors where they are."""

    def _map(self, fn: LeafFn) -> Any:
        return self._made(fn(self._plain_tensor()))

    def _cast(self, dtype: torch.dtype) -> Any:
        return self._made(self._plain_tensor().to(dtype))

    def _leaves(self, out: list[Tensor]) -> list[Tensor]:
        out.append(self._plain_tensor())
        return out

    def _rebuild(self, leaves: Iterator[Tensor]) -> Any:
        return self._made(next(leaves))

    def _batched(
        self, fn: LeafFn, ndim: int, batch_size: torch.Size, names: Names = None, op: Op = ()
    ) -> Any:
        return self._like(batch_size + self._batch_size[ndim:])

    def _spread(self, tensor: Tensor, out: list[Tensor]) -> list[Tensor]:
        raise RuntimeError(
            f"a tensor over the rows, of shape {tuple(tensor.shape)}, can't be applied to an "
            f"UnbatchedTensor of shape {tuple(self.shape)}, which has no rows; leave the entry out "
            "with td.exclude(key)"
        )

    def _set_index(self, idx: Any, value: Any, ndim: int) -> Any:
        if isinstance(value, Tensor):
            self._write(value)

    def _write(self, value: Any) -> None:
        """Copy a tensor of the same shape, or a number, into this one."""
        if not isinstance(value, Tensor):
            value = torch.as_tensor(value).expand(self.shape)
        if value.shape != self.shape:
            raise RuntimeError(
                f"an UnbatchedTensor of shape {tuple(self.shape)} is written as a whole, also "
                "through rows of its container, so the value must have its shape, not "
                f"{tuple(value.shape)}"
            )
        plain = value._plain_tensor() if isinstance(value, UnbatchedTensor) else value
        mine = self._plain_tensor()
        (mine.data if mine.requires_grad and mine.is_leaf else mine).copy_(plain)

    def _with_rows(self, idx: Any, value: Any) -> Any:
        if isinstance(value, UnbatchedTensor):
            self._write(value)
        else:
            self._plain_tensor()[idx] = value
        return self

    def _where(self, condition: Tensor, other: Any) -> Any:
        if isinstance(other, UnbatchedTensor) and not same_tensor(self, other):
            raise RuntimeError(
                "where: the two containers hold different UnbatchedTensors, which have no rows to "
                "choose from; leave them out with td.exclude(key)"
            )
        return self

    def _compared(self, other: Any, compare: Callable[[Any, Any], Any]) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = compare(self._plain_tensor(), other)
        return self._made(out) if isinstance(out, Tensor) else out

    def _stack_data(self, nodes: Sequence[Any], dim: int) -> Any:
        size = list(self._batch_size)
        size.insert(dim % (len(size) + 1), len(nodes))
        return joined(nodes, size, "stack")


def _over(tensor: Tensor, batch_size: torch.Size) -> UnbatchedTensor:
    with torch._C.DisableTorchFunctionSubclass():
        out = tensor.as_subclass(UnbatchedTensor)
    out._batch_size = batch_size
    return out


def _unpickled(tensor: Tensor, batch_size: tuple[int, ...]) -> UnbatchedTensor:
    """Restore a pickled `UnbatchedTensor`."""
    return _over(tensor, torch.Size(batch_size))


def same_tensor(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same one, or hold the same.

    >>> same_tensor(torch.ones(2), torch.ones(2)), same_tensor(torch.ones(2), torch.ones(1))
    (True, False)
    """
    if one.shape != other.shape or one.dtype is not other.dtype or one.device != other.device:
        return False
    same: bool = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return same or bool(torch.equal(one.as_subclass(Tensor), other.as_subclass(Tensor)))


def joined(nodes: Sequence[Any], batch_size: Sequence[int], what: str) -> UnbatchedTensor:
    """The one tensor that containers which are stacked or concatenated share."""
    first = nodes[0]
    if not all([isinstance(n, UnbatchedTensor) and same_tensor(first, n) for n in nodes]):
        raise RuntimeError(
            f"{what}: containers with an UnbatchedTensor under one key need the same one, since "
            "there is one for all rows; leave it out with td.exclude(key), or store it as an entry "
            "with the batch dimensions"
        )
    out: UnbatchedTensor = first._like(torch.Size(batch_size))
    return out


torch.serialization.add_safe_globals([_unpickled])
