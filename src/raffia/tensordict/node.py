"""The interface of every container class, against which the files of this folder are written.

A container is a tree of *nodes*; a leaf is a tensor. Functions over containers (shape.py, index.py,
tree.py, pointwise.py ...) touch a node only through the members listed in `Node`, so that a dense
`TensorDict`, a `LazyStackedTensorDict`, a `TensorDictParams`, a tensorclass and a `NonTensorData`
all work in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

Entries = dict[str, Any]  # name -> Tensor | Node
Device = torch.device | str | int | None
BatchSize = int | Sequence[int] | None
REGISTRY: dict[str, Any] = {}  # tensorclasses by qualified name, for loading from disk
LeafFn = Callable[[Tensor], Tensor]  # what an operation does to each leaf
Op = tuple[Any, ...]  # a shape operation: its name and arguments
Names = list[str | None] | None  # of the batch dimensions; None if none is named
Container = TypeVar("Container", bound="Node")  # of what a method is called on

Plain = TypeVar("Plain", covariant=True)


class HasPlain(Protocol[Plain]):
    """Any node, as argument of functions that return a plain container; `Plain` is `TensorDict`."""

    @property
    def _plain(self) -> type[Plain]: ...


class Node:
    """A container in the tree; subclasses store entries, all else is built on these members.

    Every node has `batch_size`, `device`, `names`, `is_locked` and the public methods of
    `TensorCollection`.
    """

    _batch_size: torch.Size = torch.Size()
    _device: torch.device | None = None
    _names: Names = None  # one per batch dimension, None if none is named
    _locked: bool = False
    _home: Any = None  # where on disk the value is, of a non-tensor entry of a mapped container
    # False while no container holds this one, a stack's mark while that stack alone does, and True
    # where it isn't known: what is stored in it is searched for it, as that would be a loop. What
    # a user makes starts at False; what takes in a container that a user may have made calls `hold`
    _held: Any = True
    _lazy = False  # True of a lazy stack, whose entries are those of its members

    if TYPE_CHECKING:  # of what `TensorCollection` gives every node: what functions over nodes use
        _cache: dict[Any, Any] | None
        _parents: list[Any] | None
        _origin: tuple[Any, ...] | None
        _exits: list[Any] | None
        _plain: Any

        @classmethod
        def _from_entries(cls, entries: Any, batch_size: Any, device: Any) -> Any: ...
        def _peek(self) -> Entries: ...
        def _peek_str(self, name: str) -> Any: ...
        def _get_lazy(self, name: str, **options: Any) -> Any: ...
        def _write(self, data: Any) -> None: ...
        def _set_index(self, idx: Any, value: Any, ndim: int) -> Any: ...
        def _shallow(self) -> Any: ...
        def _pairs(self, other: Any) -> list[tuple[Any, Any]]: ...
        def _where(self, condition: Tensor, other: Any) -> Any: ...
        def _children(self) -> list[Any]: ...
        def _emptied(self, recurse: bool, batch_size: torch.Size | None) -> Any: ...
        def _cast(self, dtype: torch.dtype) -> Any: ...
        def _spread(self, tensor: Tensor, out: list[Tensor]) -> list[Tensor]: ...
        def _member_wise(self, others: tuple[Any, ...], default: Any) -> bool: ...
        def _apply_members(self, *args: Any) -> Any: ...
        def _cut(self, lengths: list[int], dim: int) -> tuple[Self, ...]: ...
        def __enter__(self) -> Self: ...
        def __exit__(self, *error: Any) -> None: ...
        def __getitem__(self, idx: Any) -> Any: ...
        def __contains__(self, key: Any) -> bool: ...

        # Names without a declared type: checkers take it from the class that defines the member.
        _unknown: Any = None
        batch_size = device = names = _unknown

        def _gives(self, *args: Any, **kwargs: Any) -> Any: ...
        def _gives_alike(self, *args: Any, **kwargs: Any) -> Self: ...
        def _gives_rows(self, *args: Any, **kwargs: Any) -> tuple[Self, ...]: ...
        def _tells(self) -> bool: ...

        get = keys = apply = named_apply = state_dict = to_dict = tolist = to_tensordict = _gives
        set = set_ = set_at_ = del_ = update = update_ = update_at_ = select = _gives_alike
        clone = copy = contiguous = densify = pad = reshape = expand = where = empty = _gives_alike
        exclude = to = unflatten_keys = lock_ = unlock_ = refine_names = _gives_alike
        filter_non_tensor_data = _gives_alike
        unbind = _gives_rows
        is_empty = is_memmap = is_shared = _tells

        # of lazy stacks
        def _split(self, other: Any) -> Any: ...
        def _own_parts(self, other: Any) -> Any: ...
        def _update_members(self, source: Any, options: Any, is_sized: bool) -> bool: ...

        # and of what nodes have for which `_is_data` is true
        def _compared(self, other: Any, compare: Callable[[Any, Any], Any]) -> Any: ...
        def _with_rows(self, idx: Any, value: Any) -> Any: ...
        def _filled(self, shape: torch.Size) -> Any: ...
        def _stack_data(self, nodes: Any, dim: int) -> Any: ...
        def empty_like(self, batch_size: torch.Size) -> Any: ...

    def _entries(self) -> Entries:
        """Entries by name, to be read only: the storage of a `TensorDict`, else a fresh dict."""
        raise NotImplementedError

    def _get_str(self, name: str) -> Any:
        """The stored entry `name` (a tensor or a node), or None."""
        return self._entries().get(name)

    def _set_str(self, name: str, value: Any) -> None:
        """Store `value` under `name` after the checks (lock, batch size, device).

        Nothing is changed if they fail.
        """
        raise NotImplementedError

    def _del_str(self, name: str) -> None:
        """Remove the entry `name`, which must exist."""
        raise NotImplementedError

    def _replace_str(self, name: str, value: Any) -> None:
        """Store another node for the same entry, also when locked."""
        raise NotImplementedError

    def _stores(self) -> list[Entries]:
        """The dicts in which this node keeps its entries."""
        raise NotImplementedError

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        raise NotImplementedError

    def _set_device(self, device: torch.device | None) -> None:
        raise NotImplementedError

    def _new(self, entries: Entries, batch_size: torch.Size, names: Names = None) -> Any:
        """The result node of an operation on this one, over unchecked `entries`; same device."""
        raise NotImplementedError

    def _map(self, fn: LeafFn) -> Any:
        """Apply `fn` to every leaf; batch sizes and names are preserved, locks are not."""
        raise NotImplementedError

    def _batched(
        self,
        fn: LeafFn,
        ndim: int,  # how many leading dimensions `fn` replaces
        batch_size: torch.Size,  # what it replaces them by
        names: Names = None,  # names of these new dimensions
        op: Op = (),  # (name, *arguments), for nodes that have a way of their own
    ) -> Any:
        """Apply a shape operation on the first `ndim` dimensions to every leaf."""
        raise NotImplementedError

    def _index(self, index: Any, ndim: int, batch_size: torch.Size | None) -> Any:
        """`leaf[index]` for every leaf; `index` is normalised and covers at most `ndim` dimensions.

        `batch_size` is the shape by which the first `ndim` dimensions are replaced, or None if not
        yet known.
        """
        raise NotImplementedError

    def _leaves(self, out: list[Tensor]) -> list[Tensor]:
        """Append all leaf tensors, depth first, in order of insertion, and return `out`."""
        raise NotImplementedError

    def _rebuild(self, leaves: Iterator[Tensor]) -> Any:
        """Rebuild the tree over other leaves, in the order of `_leaves`."""
        raise NotImplementedError

    def _unwrapped(self) -> Any:
        """The value of `td[key]` for this entry: the node, or the value that it wraps."""
        return self

    def _is_data(self) -> bool:
        """True for nodes that stand for a non-tensor value."""
        return False


Source = Node | Mapping[Any, Any]  # what entries are taken from


class ValueNode(Node):
    """A node that is a value of its container, with nothing in it that has a key.

    >>> from raffia import NonTensorData, UnbatchedTensor
    >>> issubclass(NonTensorData, ValueNode), issubclass(UnbatchedTensor, ValueNode)
    (True, True)
    """

    _holds_data = True

    def _entries(self) -> Entries:
        return {}

    def _peek(self) -> Entries:
        return {}

    def _get_str(self, name: str) -> Any:
        return None

    def _peek_str(self, name: str) -> Any:
        return None

    def _stores(self) -> list[Entries]:
        return []

    def _is_data(self) -> bool:
        return True


def has_tensors(entry: Any) -> bool:
    """Whether an entry is a tensor, or a container with one in it; a text, for one, is not."""
    return not isinstance(entry, Node) or bool(entry._leaves([]))


def hold(node: Any) -> None:
    """Note that a container holds a node."""
    if node._held is not True:
        node._held = True


def child_names(node: Node, ndim: int, batch_size: torch.Size, names: Names) -> Names:
    """Names of a nested node whose first `ndim` dimensions became `batch_size`, named `names`."""
    rest = node._names[ndim:] if node._names is not None else None
    if names is None and (rest is None or not any(rest)):
        return None
    extra = len(node._batch_size) - ndim
    return (names or [None] * len(batch_size)) + (rest or [None] * extra)
