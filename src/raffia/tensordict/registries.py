"""Registration of the tensors of a tree with a module, so that writes there reach the tree."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from raffia.tensordict.node import LeafFn, Node
from raffia.tensordict.tensordict import TensorDict


class Holder(Protocol):
    """The `TensorDictParams` whose tensors are registered."""

    def _register(self) -> None: ...
    def _follow(
        self, tree: TensorDict, path: tuple[str, ...], name: str, value: Tensor
    ) -> None: ...


Whole = TypeVar("Whole", bound=Holder)


@dataclass(eq=False, slots=True)
class Part(Generic[Whole]):
    """The tree that a `TensorDictParams` shows, and of which other one, where, it is a part.

    Not a pytree, as containers are: `torch.export` puts what the attributes of a module were
    before it back as copies, if they are pytrees.
    """

    tree: TensorDict
    root: Whole | None = None
    path: tuple[str, ...] = ()


class Registered(dict[str, Any]):
    """Tensors of a tree by dotted name, as `_parameters` or `_buffers` of a module.

    To put one here is to put it in the tree, for the tools that swap what a module computes with:
    also in a locked one, if it has that entry. The tree is the part of `root` at `path`.

    rows: the shapes in the tree of those that are one parameter expanded over the rows.
    """

    __slots__ = ("path", "root", "rows", "tree")

    def __init__(
        self,
        tensors: dict[str, Any],
        tree: TensorDict,
        root: weakref.ref[Holder],
        path: tuple[str, ...],
        rows: dict[str, torch.Size],
    ) -> None:
        super().__init__(tensors)
        self.tree, self.root, self.path, self.rows = tree, root, path, rows

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(
                f"an entry of TensorDictParams must be a tensor, got {type(value).__name__} for "
                f"{name!r}; `del params[key]` removes one"
            )
        nodes, key = nodes_to(self.tree, name)
        root = self.root()
        if nodes:
            rows = self.rows.get(name)
            if rows is None or value.shape != rows[1:]:
                nodes[-1]._d[key] = value
            else:
                nodes[-1]._d[key] = value.expand(rows)
            super().__setitem__(name, value)
            for node in nodes:
                forget_listings(node)
            if root is not None:
                root._follow(self.tree, self.path, name, value)
        else:
            self.tree.set(tuple(name.split(".")), value)
            super().__setitem__(name, value)
            if root is not None:
                root._register()

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        nodes, key = nodes_to(self.tree, name)
        if nodes:
            nodes[-1]._del_str(key)
        super().__delitem__(name)
        root = self.root()
        if root is not None:
            root._register()

    # a dict's own ones do not come by the two above
    pop = MutableMapping.pop
    popitem = MutableMapping.popitem
    clear = MutableMapping.clear
    update = MutableMapping.update
    setdefault = MutableMapping.setdefault

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def shared_by_rows(leaf: Tensor) -> Tensor | None:
    """The parameter that all rows of a leaf are, as `from_modules(expand_identical=True)` puts it.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(3))
    >>> shared_by_rows(weight.expand(2, 3)) is weight
    True
    """
    if isinstance(leaf, (nn.Parameter, UninitializedTensorMixin)) or not leaf.ndim:
        return None
    if leaf.layout is not torch.strided or leaf.shape[0] != 1 and leaf.stride(0) != 0:
        return None
    if torch.compiler.is_dynamo_compiling():  # which does not know what is a view of what
        return None
    base = leaf._base
    if not isinstance(base, nn.Parameter) or leaf.shape[1:] != base.shape:
        return None
    return base if leaf.stride()[1:] == base.stride() else None


def tree_of(node: Any) -> TensorDict:
    """The `TensorDict` that has the entries of a nested container."""
    if node.__class__ is TensorDict:
        return node
    return node._tree if hasattr(node, "_tree") else getattr(node, "_td", node)


def part_at(tree: TensorDict, path: tuple[str, ...]) -> TensorDict | None:
    """The container nested in a tree at `path`, or None."""
    node: Any = tree
    for name in path:
        if not isinstance(node, TensorDict):
            return None
        node = node._d.get(name)
        node = tree_of(node) if isinstance(node, Node) else None
    return node


def nodes_to(node: TensorDict, name: str) -> tuple[list[TensorDict], str]:
    """The nodes down to the one that has the tensor of a dotted name, and its name there."""
    if isinstance(node._d.get(name), Tensor):
        return [node], name
    parts = name.split(".")
    for i in range(1, len(parts)):  # a name may have dots in it
        child = node._d.get(".".join(parts[:i]))
        below = tree_of(child) if isinstance(child, Node) else None
        if isinstance(below, TensorDict):
            nodes, key = nodes_to(below, ".".join(parts[i:]))
            if nodes:
                return [node, *nodes], key
    return [], name


def forget_listings(node: Any) -> None:
    """Drop the entries that a locked container has listed before."""
    if node._cache:
        node._cache.clear()


def replace_leaves(node: Any, fn: LeafFn) -> None:
    """Replace each tensor of a container by `fn` of it."""
    for store in node._stores():
        for name, value in store.items():
            if not isinstance(value, Node):
                store[name] = fn(value)
    forget_listings(node)
    for child in node._children():
        replace_leaves(child, fn)
