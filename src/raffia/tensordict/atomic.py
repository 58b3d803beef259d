"""Blocks that change all entries or none: what they began is undone where they raise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from raffia.tensordict.keys import unravel_key_to_tuple
from raffia.tensordict.node import Node

Saved = list[tuple[dict[str, Any], dict[str, Any]]]  # the dict of a node, and what it held


def save(node: Any, out: Saved) -> None:
    """Append shallow copies of the dicts in which a node keeps its entries."""
    for store in node._stores():
        if not out or out[-1][0] is not store:  # as it often is for one key after the other
            out.append((store, store.copy()))


def save_tree(td: Any, out: Saved) -> None:
    """`save` for a container and for what is nested in it."""
    for store in td._stores():
        out.append((store, store.copy()))
        for value in store.values():
            if value.__class__ is not Tensor and isinstance(value, Node):
                save_tree(value, out)


def save_path(td: Any, path: tuple[str, ...], out: Saved) -> object:
    """`save` for each container on the way to the entry `path`.

    It returns the entry there, but None for a lazy stack, in which each member is saved.
    """
    node = td
    for i, name in enumerate(path):
        if not isinstance(node, Node):
            return None
        if node._lazy:
            for member in node._children():
                save_path(member, path[i:], out)
            return None
        save(node, out)
        node = node._peek_str(name)
    return node


def save_targets(td: Any, source: Any, out: Saved) -> None:
    """`save` for each container in which storing the entries of `source` changes something."""
    if td._lazy:
        for member in td._children():
            save_targets(member, source, out)
        return
    save(td, out)
    for key, value in source._peek().items() if isinstance(source, Node) else source.items():
        below = value.__class__ is not Tensor and isinstance(value, (Node, Mapping))
        if below or key.__class__ is not str:
            mine = save_path(td, unravel_key_to_tuple(key), out)
            if below and isinstance(mine, Node):
                save_targets(mine, value, out)


class all_or_nothing:
    """A block that puts the entries back as they were if it raises.

    source: it stores no entries but these, so that the rest of `td` need not be saved.
    paths: it stores or removes only these entries.
    """

    __slots__ = ("saved",)

    def __init__(
        self, td: Any, source: Any = None, paths: Iterable[tuple[str, ...]] | None = None
    ) -> None:
        self.saved: Saved = []
        if source is not None:
            save_targets(td, source, self.saved)
        elif paths is not None:
            for path in paths:
                save_path(td, path, self.saved)
        else:
            save_tree(td, self.saved)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is not None:
            for store, content in self.saved:
                store.clear()
                store.update(content)
