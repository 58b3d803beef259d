"""Conversion of user data to rows: lists of items stacked, numpy arrays and numbers to tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raffia.data.structure import RowStructure
from raffia.tensordict.collection import TensorCollection
from raffia.tensordict.functions import is_tensor_collection
from raffia.tensordict.node import Node


def rows_of(data: Any, structure: RowStructure | None) -> Any:
    """Convert user data to data whose first dimension counts rows.

    data: a pytree of tensors [n, ...] or numpy arrays; or a list of n items without that dimension,
        which are stacked; or a range of numbers. A list as the outermost node of rows is taken as
        that only where such rows are stored already.
    structure: of the stored rows; None before the first.
    Raises ValueError or TypeError for items of different structure, and names them.

    >>> from raffia.data.items import rows_of
    >>> items = [{"obs": torch.ones(2), "reward": 0.5}, {"obs": torch.zeros(2), "reward": 1.0}]
    >>> rows_of(items, None)
    {'obs': tensor([[1., 1.],
            [0., 0.]]), 'reward': tensor([0.5000, 1.0000])}
    """
    if isinstance(data, (Tensor, Node)):
        return data
    if isinstance(data, range):
        data = list(data)
    if type(data) is not list:
        return tensors_of(data, numbers=False)
    items = [tensors_of(item, numbers=True) for item in data]
    if structure is not None and structure.spec.kind == "list" and _fits(items, structure):
        return items
    return _stacked(items, structure)


def tensors_of(data: Any, *, numbers: bool) -> Any:
    """Convert the numpy arrays of a pytree to tensors.

    numbers: whether numbers become tensors too. Those in a list never do: it is rather meant as
        one tensor, which the user should make of it.

    >>> from raffia.data.items import tensors_of
    >>> tensors_of((np.arange(3), 7, True), numbers=True)
    (tensor([0, 1, 2]), tensor(7), tensor(True))
    """
    if isinstance(data, (Tensor, Node)):
        return data
    if isinstance(data, np.ndarray):
        return _tensor_of(data)
    if isinstance(data, np.generic):
        return _tensor_of(np.asarray(data)) if numbers else data
    if isinstance(data, (bool, int, float)):
        return torch.tensor(data, device="cpu") if numbers else data
    if isinstance(data, dict):
        return {name: tensors_of(value, numbers=numbers) for name, value in data.items()}
    if type(data) is list:
        return [tensors_of(value, numbers=False) for value in data]
    if isinstance(data, tuple):
        values = [tensors_of(value, numbers=numbers) for value in data]
        return type(data)(*values) if hasattr(data, "_fields") else tuple(values)
    return data


def _tensor_of(array: np.ndarray) -> Tensor:
    """A tensor on the memory of an array, where that can be."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise TypeError(
            f"a numpy array of dtype {array.dtype} cannot be stored: {error}. Convert it with "
            "array.astype(...)"
        ) from None


def _fits(data: Any, structure: RowStructure) -> bool:
    try:
        structure.leaves(data, 1)
    except (ValueError, TypeError):
        return False
    return True


def _stacked(items: Sequence[Any], structure: RowStructure | None) -> Any:
    """Items without a dimension that counts rows, as rows."""
    if not items:
        if structure is None:
            raise ValueError("the list has no items, so there is nothing to store")
        leaves = [
            torch.empty((0, *layout.shape), dtype=layout.dtype, device="cpu")
            for layout in structure.layouts
        ]
        return structure.build(leaves, torch.Size([0]), torch.device("cpu"))
    like = RowStructure.of(items[0], 0) if structure is None else structure
    found = []
    for i, item in enumerate(items):
        try:
            found.append(like.leaves(item, 0)[0])
        except (ValueError, TypeError) as error:
            raise type(error)(
                f"in item {i} of the list, {error}. Items of a list are stacked; to store rows of "
                "several tensors [n, ...], pass them as a tuple or a dict"
            ) from None
    try:
        stacked = [torch.stack(leaves) for leaves in zip(*found, strict=True)]
    except RuntimeError as error:  # on different devices
        raise ValueError(f"the items of the list cannot be stacked: {error}") from None
    return like.build(stacked, torch.Size([len(items)]), stacked[0].device)


Path = tuple[Any, ...]


def value_at(data: Any, path: Path) -> Any:
    """The entry at a path of a container or of dicts, or None if it does not exist.

    >>> from raffia.data.items import value_at
    >>> value_at({"next": {"td_error": 2.0}}, ("next", "td_error"))
    2.0
    """
    for name in path:
        has_names = isinstance(data, dict) or is_tensor_collection(data)
        data = data.get(name, None) if has_names else None
    return data


def with_value(data: Any, path: Path, value: Tensor) -> Any:
    """A pytree with one more entry; the one given is not changed.

    >>> from raffia.data.items import with_value
    >>> with_value({"obs": torch.ones(2)}, ("td_error",), torch.zeros(2))
    {'obs': tensor([1., 1.]), 'td_error': tensor([0., 0.])}
    """
    if isinstance(data, TensorCollection):
        return data.copy().set(path if len(path) > 1 else path[0], value)
    below = with_value(data.get(path[0], {}), path[1:], value) if path[1:] else value
    return {**data, path[0]: below}


def without_value(data: Any, path: Path) -> Any:
    """A pytree without one of its entries; the one given is not changed.

    >>> from raffia.data.items import without_value
    >>> without_value({"obs": torch.ones(2), "td_error": torch.zeros(2)}, ("td_error",))
    {'obs': tensor([1., 1.])}
    """
    if isinstance(data, Node):
        return data.exclude(path if len(path) > 1 else path[0])
    below = {path[0]: without_value(data[path[0]], path[1:])} if path[1:] else {}
    return {name: value for name, value in data.items() if name != path[0]} | below


def batch_of(data: Any, batch_dims: int) -> torch.Size:
    """The first dimensions of a pytree: of the batch size, or of the first tensor.

    >>> from raffia.data.items import batch_of
    >>> batch_of({"obs": torch.ones(2, 3)}, 1)
    torch.Size([2])
    """
    if not batch_dims:
        return torch.Size()
    if is_tensor_collection(data):
        return data.batch_size[:batch_dims]
    if isinstance(data, (Tensor, np.ndarray)):
        return torch.Size(data.shape[:batch_dims])
    below = data.values() if isinstance(data, dict) else data
    return batch_of(next(iter(below)), batch_dims)
