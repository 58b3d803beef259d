"""The content of a container in other forms: arrays, lists, named tuples, one tensor."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, TypeVar, overload

import numpy as np
import torch
from torch import Tensor, nn

from raffia.tensordict.entries import NO_DEFAULT, get
from raffia.tensordict.keys import NestedKey
from raffia.tensordict.node import Container, Node

Named = TypeVar("Named")  # a class of named tuples


def as_tensor(td: Container) -> Container:
    """The container with memory-mapped and other special tensors as plain ones; same memory.

    >>> from raffia import TensorDict
    >>> type(TensorDict(a=torch.zeros(2)).memmap()["a"]).__name__
    'MemoryMappedTensor'
    >>> type(TensorDict(a=torch.zeros(2)).memmap().as_tensor()["a"]).__name__
    'Tensor'
    """
    return td._map(
        lambda leaf: leaf if type(leaf) in (Tensor, nn.Parameter) else leaf.as_subclass(Tensor)
    )


def numpy(td: Any) -> dict[str, Any]:
    """Nested dicts of numpy arrays, without entries that are None.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2), b=None).numpy()
    {'a': array([0., 0.], dtype=float32)}
    """
    return td.to_dict(convert_tensors="numpy", retain_none=False)


def tolist(
    td: Any,
    *,
    convert_nodes: bool = True,
    convert_tensors: bool | str = False,
    tolist_first: bool = False,
) -> Any:
    """Nested lists over the batch dimensions, of dicts.

    convert_nodes: False gives containers instead of dicts.
    convert_tensors: True turns tensors into lists, "numpy" into arrays.
    tolist_first: lists over the batch dimensions of nested containers, too.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.tensor([1, 2]), batch_size=[2]).tolist()
    [{'a': tensor(1)}, {'a': tensor(2)}]
    """
    options = dict(convert_nodes=convert_nodes, convert_tensors=convert_tensors)
    if td._batch_size:
        return [tolist(row, **options, tolist_first=tolist_first) for row in td.unbind(0)]  # type: ignore[arg-type]
    if not convert_nodes:
        return td
    return td.to_dict(convert_tensors=convert_tensors, tolist_first=tolist_first)


@overload
def to_namedtuple(td: Node, dest_cls: None = None) -> Any: ...
@overload
def to_namedtuple(td: Node, dest_cls: type[Named]) -> Named: ...
def to_namedtuple(td: Any, dest_cls: Any = None) -> Any:
    """A named tuple with these entries, nested ones too.

    dest_cls: class of the named tuple; made from the keys if not given.

    >>> from raffia import TensorDict
    >>> TensorDict(a=1, b=dict(c=2)).to_namedtuple().b.c
    tensor(2)
    """
    values = {}
    for name, value in td._entries().items():
        if isinstance(value, Node):
            value = value._unwrapped() if value._is_data() else to_namedtuple(value)
        values[name] = value
    cls = dest_cls or collections.namedtuple("GenericDict", list(values))
    return cls(**values)


def to_struct_array(td: Any) -> np.ndarray:
    """A structured numpy array whose shape is the batch size.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.tensor([1, 2]), batch_size=[2]).to_struct_array()["a"]
    array([1, 2])
    """
    columns = {}
    for name, value in td._entries().items():
        if isinstance(value, Node):
            columns[name] = (
                np.asarray(value._unwrapped()) if value._is_data() else to_struct_array(value)
            )
        else:
            columns[name] = value.detach().numpy()
    shape = tuple(td._batch_size)
    fields = [(name, column.dtype, column.shape[len(shape) :]) for name, column in columns.items()]
    out = np.zeros(shape, dtype=fields)
    for name, column in columns.items():
        out[name] = column
    return out


def _keyed(td: Any, sorted: Any) -> list[Tensor]:
    if isinstance(sorted, (list, tuple)):
        return [get(td, key, NO_DEFAULT) for key in sorted]
    sort = True if sorted is None else bool(sorted)
    return [leaf for _, leaf in td.items(True, True, sort=sort)]


def stack_from_tensordict(
    td: Any,
    dim: int = 0,
    *,
    sorted: bool | Sequence[NestedKey] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Stack all entries into one tensor.

    sorted: in alphabetical order of the keys (the default), as stored (False), or in the order of
        this list of keys.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2), b=torch.ones(2)).stack_from_tensordict()
    tensor([[0., 0.],
            [1., 1.]])
    """
    return torch.stack(_keyed(td, sorted), dim, out=out)


def cat_from_tensordict(
    td: Any,
    dim: int = 0,
    *,
    sorted: bool | Sequence[NestedKey] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Concatenate all entries into one tensor; `sorted` as in `stack_from_tensordict`.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2), b=torch.ones(1)).cat_from_tensordict()
    tensor([0., 0., 1.])
    """
    return torch.cat(_keyed(td, sorted), dim, out=out)
