"""The embeddings of all nodes: rows of any container, gathered for the model, stored after it."""

from array import array
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from raffia.search import kernels
from raffia.search.base import ValuePrefix
from raffia.search.memory import Arena, is_plain, plain
from raffia.tensordict.collection import TensorCollection
from raffia.tensordict.keys import unravel_key_to_tuple


class Embeddings:
    """The rows of a root's embedding container, for N nodes of each of B roots.

    A container is a TensorDict, a tensor, or any pytree of tensors (dict, tuple, ...).
    """

    def __init__(
        self, embedding: Any, batch: int, rows: int, prefix: ValuePrefix | None, *, compiled: bool
    ) -> None:
        self._template, self._kind = embedding, _kind(embedding)
        self._batch, self._rows = batch, rows
        self._spec: Any = None  # of a container other than a TensorDict
        self._num_entries = _num_entries(embedding)
        if isinstance(embedding, TensorCollection):
            entries = {unravel_key_to_tuple(key): leaf for key, leaf in embedding.items(True, True)}
            if len(embedding.filter_non_tensor_data().keys()) != len(embedding.keys()):
                raise TypeError("root.embedding holds entries that are not tensors; leave them out")
            self._paths: list[tuple[Any, ...]] = sorted(entries)
            leaves = [entries[path] for path in self._paths]
        else:
            found, self._spec = pytree.tree_flatten_with_path(embedding)
            self._paths, leaves = [path for path, _ in found], [leaf for _, leaf in found]
        for name, leaf in zip(self._names(), leaves, strict=True):
            _check_leaf(name, leaf, batch)
        # new memory, not zeros: rows are written before they are read
        self._arena = Arena([((rows * batch, *leaf.shape[1:]), leaf) for leaf in leaves])
        self._roots = [stored[:batch] for stored in self.memory]
        for stored, leaf in zip(self._roots, leaves, strict=True):
            stored.copy_(leaf)
        zeroed = [] if prefix is None else self.reset_leaves(prefix)
        self._new_transfer = partial(_row_transfer, self.memory, zeroed, compiled=compiled)
        self._transfer: _RowTransfer | None = None
        self._num = -1  # rows that the next three are for
        self._gathered: list[Tensor] = []
        self._container_of_gathered: Any = None
        self._layouts: list[tuple[torch.Size, torch.dtype, torch.device]] = []

    @property
    def memory(self) -> list[Tensor]:
        """The rows of all nodes, [N * B, ...] for each leaf."""
        return self._arena.tensors

    @property
    def device(self) -> torch.device | None:
        """The device of the embeddings; None if there are no embeddings."""
        return self.memory[0].device if self.memory else None

    @property
    def nbytes(self) -> int:
        """The bytes of the memory."""
        return sum([stored.nbytes for stored in self.memory])

    def refill(self, embedding: Any) -> bool:
        """Start with the rows of other roots; False if their container has another structure."""
        try:
            leaves = self._leaves(embedding)
        except (TypeError, ValueError):
            return False
        if list(map(_layout, leaves)) != list(map(_layout, self._roots)):
            return False
        torch._foreach_copy_(self._roots, leaves)
        self._template = embedding
        return True

    def release(self) -> None:
        """Release the memory at the end of a search."""
        self._roots = []
        self._arena.release()

    def for_thread(self) -> "Embeddings":
        """Embeddings that share this memory but have separate buffers, for another thread."""
        other = copy(self)
        other._transfer, other._num = None, -1
        return other

    def _names(self) -> list[str]:
        if self._spec is None:
            return [repr(path[0] if len(path) == 1 else path) for path in self._paths]
        if isinstance(self._template, Tensor):
            return ["the embedding"]
        return [f"embedding{pytree.keystr(path)}" for path in self._paths]

    def _leaves(self, container: Any) -> list[Tensor]:
        """The container's tensors in the order of the root's; ValueError if structures differ."""
        leaves: list[Any] | None = None
        if _kind(container) is self._kind:
            with suppress(AttributeError, LookupError, TypeError):
                if self._spec is None:
                    leaves = [container.get(path, None) for path in self._paths]
                elif _num_entries(container) == self._num_entries:
                    leaves = [_at(container, path) for path in self._paths]
        if leaves is None:
            raise ValueError(
                f"the model's embedding is a {type(container).__name__} and the root's a "
                f"{type(self._template).__name__}, or their structures differ: recurrent_fn must "
                "return the same kind of container as root.embedding"
            )
        for name, leaf in zip(self._paths, leaves, strict=True):
            if not isinstance(leaf, Tensor):
                raise self._no_tensor(container, name, leaf)
        return leaves

    def _no_tensor(self, container: Any, path: tuple[Any, ...], leaf: Any) -> Exception:
        """The error about an entry that is missing, or not a tensor."""
        name = self._names()[self._paths.index(path)]
        if leaf is not None or self._spec is not None:
            return TypeError(f"{name} of the model is a {type(leaf).__name__}")
        return ValueError(
            f"the model's embedding lacks [{name}], which the root's has; its entries are "
            f"{sorted(map(str, container.keys(True, True)))}"
        )

    def _container(self, leaves: Sequence[Tensor], batch_size: list[int]) -> Any:
        """The leaves in a container of the kind that the root's embedding has."""
        if isinstance(self._template, Tensor):
            return leaves[0]
        if self._spec is not None:
            return pytree.tree_unflatten(leaves, self._spec)
        by_path = dict(zip(self._paths, leaves, strict=True))
        return self._template.named_apply(  # which keeps tensorclasses
            lambda key, _: by_path[unravel_key_to_tuple(key)],
            nested_keys=True,
            batch_size=batch_size,
        )

    def all_rows(self) -> Any:
        """The container with batch [N * B], over the memory itself."""
        return self._container(self.memory, [self._batch * self._rows])

    def by_node(self) -> Any:
        """The container with batch [B, N]: a copy."""
        shape = self._rows, self._batch
        leaves = [
            leaf.unflatten(0, shape).transpose(0, 1).clone(memory_format=torch.contiguous_format)
            for leaf in self.memory
        ]
        return self._container(leaves, [self._batch, self._rows])

    def gather(self, rows: Tensor) -> Any:
        """Copy the rows [M] to a container that the next call overwrites."""
        num = rows.size(0)
        if num != self._num:
            self._num = num
            self._transfer = self._transfer or self._new_transfer()
            self._gathered = [stored.new_empty((num, *stored.shape[1:])) for stored in self.memory]
            self._layouts = list(map(_layout, self._gathered))
            self._container_of_gathered = self._container(self._gathered, [num])
        assert self._transfer is not None
        self._transfer.gather(rows, self._gathered)
        return self._container_of_gathered

    def store(self, rows: Tensor, container: Any, reset: Tensor | None) -> None:
        """Write rows [M], as many as were gathered; `reset` rows get zeros in the reset entries."""
        leaves = self._leaves(container)
        for leaf, (shape, dtype, device) in zip(leaves, self._layouts, strict=True):
            if leaf.shape != shape or leaf.dtype != dtype or leaf.device != device:
                raise ValueError(self._mismatch(leaves))
        assert self._transfer is not None  # rows were gathered before
        self._transfer.store(rows, leaves, reset)

    def _mismatch(self, leaves: list[Tensor]) -> str:
        wrong = [
            f"{name} of shape {list(leaf.shape)}, {leaf.dtype}, {leaf.device} "
            f"(needed {list(shape)}, {dtype}, {device})"
            for name, leaf, (shape, dtype, device) in zip(
                self._names(), leaves, self._layouts, strict=True
            )
            if _layout(leaf) != (shape, dtype, device)
        ]
        return (
            f"the model was given {self._num} rows; its embedding has {', '.join(wrong)}: rows "
            "must have the shape, dtype and device of root.embedding's"
        )

    def reset_leaves(self, prefix: ValuePrefix) -> list[int]:
        """The indices of the leaves that the reset of a value prefix zeroes."""
        found: list[int] = []
        for key in prefix.reset_keys:
            is_path = self._spec is None or isinstance(key, tuple)
            path = unravel_key_to_tuple(key) if is_path else (key,)  # or the index in a tuple
            chosen = [i for i, leaf in enumerate(self._paths) if _key(leaf)[: len(path)] == path]
            if not chosen:
                raise KeyError(
                    f"value_prefix resets {key!r}, which is not in the root's embedding; its "
                    f"entries are {self._names()}. Pass their names as ValuePrefix(reset_keys=...)"
                )
            found += chosen
        return found

    def clear(self, unused: Tensor) -> None:
        """Zero the rows of nodes that were never created, given as bool [B, N]."""
        for leaf in self.memory:
            leaf[unused.t().flatten()] = 0


def _at(container: Any, path: tuple[Any, ...]) -> Any:
    """The entry of a pytree at the end of a path."""
    for key in path:
        is_node = isinstance(container, TensorCollection)  # a tensorclass has no entries by index
        container = container.get(key.key) if is_node else key.get(container)
    return container


def _key(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key of an entry: of names, or of what `pytree` has for keys, indices and fields."""
    return tuple(getattr(x, "key", getattr(x, "idx", getattr(x, "name", x))) for x in path)


def _num_entries(container: Any) -> int:
    """The number of entries of a dict, a tuple or a list, nested ones included; else 1."""
    if isinstance(container, dict):
        container = container.values()
    elif not isinstance(container, tuple | list):
        return 1
    return sum([_num_entries(entry) for entry in container])


def _kind(container: Any) -> type:
    """The kind of a container: a TensorDict, a tensor, or a pytree of tensors."""
    if isinstance(container, TensorCollection):
        return TensorCollection
    return Tensor if isinstance(container, Tensor) else object


def _layout(leaf: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return leaf.shape, leaf.dtype, leaf.device


def _check_leaf(name: str, leaf: Any, batch: int) -> None:
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"{name} of root.embedding is a {type(leaf).__name__}; an embedding holds tensors "
            "only: keep objects in a list, and make their numbers the embedding"
        )
    if leaf.ndim == 0 or len(leaf) != batch:
        raise ValueError(
            f"{name} of root.embedding has shape {list(leaf.shape)}; its first dimension must be "
            f"the {batch} roots"
        )


class _RowTransfer:
    """Copies rows of tensors `memory` [R, ...] to and from tensors [M, ...]."""

    def __init__(self, memory: Sequence[Tensor], zeroed: Sequence[int]) -> None:
        self._memory, self._zeroed = memory, frozenset(zeroed)

    def gather(self, rows: Tensor, buffers: Sequence[Tensor]) -> None:
        """Copy memory[rows] to `buffers`, which are contiguous."""
        for stored, buffer in zip(self._memory, buffers, strict=True):
            torch.index_select(stored, 0, rows, out=buffer)

    def store(self, rows: Tensor, buffers: Sequence[Tensor], reset: Tensor | None) -> None:
        """Copy `buffers` to memory[rows], zeros where `reset` in the tensors that were named."""
        for number, (stored, leaf) in enumerate(zip(self._memory, buffers, strict=True)):
            if reset is not None and number in self._zeroed:
                leaf = leaf.masked_fill(reset.view(-1, *[1] * (leaf.ndim - 1)), 0)
            stored.index_copy_(0, rows, leaf)


class _KernelTransfer(_RowTransfer):
    """Transfer of embeddings to and from memory by one kernel call."""

    def __init__(self, memory: Sequence[Tensor], zeroed: Sequence[int]) -> None:
        super().__init__(memory, zeroed)  # the memory that the table's addresses refer to
        self._num, self._bits = len(memory), sum(1 << number for number in zeroed)
        self._table = array("q", [0] * (3 * self._num))
        self._address = self._table.buffer_info()[0]
        for number, tensor in enumerate(memory):
            self._table[3 * number] = tensor.data_ptr()
            self._table[3 * number + 2] = tensor[0].numel() * tensor.element_size()
        self._gather, self._store = kernels.rows.gather, kernels.rows.store

    def gather(self, rows: Tensor, buffers: Sequence[Tensor]) -> None:
        self._set_buffers(buffers)
        self._gather(self._address, self._num, rows.data_ptr(), rows.size(0))

    def store(self, rows: Tensor, buffers: Sequence[Tensor], reset: Tensor | None) -> None:
        buffers = [
            tensor if is_plain(tensor) else plain(tensor, tensor.dtype, tensor.device)
            for tensor in buffers
        ]
        self._set_buffers(buffers)
        zeroed = (0, 0) if reset is None else (reset.data_ptr(), self._bits)
        self._store(self._address, self._num, rows.data_ptr(), rows.size(0), *zeroed)

    def _set_buffers(self, buffers: Sequence[Tensor]) -> None:
        table, slot = self._table, 1
        for tensor in buffers:
            table[slot] = tensor.data_ptr()
            slot += 3


def _row_transfer(
    memory: Sequence[Tensor], zeroed: Sequence[int], *, compiled: bool
) -> _RowTransfer:
    """The row copies for these tensors; `zeroed` are the numbers of those that a reset zeroes.

    >>> memory = [torch.zeros(3, 2)]
    >>> transfer = _row_transfer(memory, [0], compiled=False)
    >>> transfer.store(torch.tensor([2, 0]), [torch.ones(2, 2)], torch.tensor([True, False]))
    >>> memory[0]
    tensor([[1., 1.],
            [0., 0.],
            [0., 0.]])
    """
    on_cpu = all(tensor.device.type == "cpu" for tensor in memory)
    if compiled and on_cpu and 0 < len(memory) <= 62:
        return _KernelTransfer(memory, zeroed)
    return _RowTransfer(memory, zeroed)
