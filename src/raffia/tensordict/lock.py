"""Locked containers: nothing is added, replaced or removed; tensors can still be written."""

from __future__ import annotations

import weakref
from typing import Any

from raffia.tensordict.node import Container


def live_parents(node: Any) -> list[Any]:
    """Locked containers of which this node is an entry."""
    return [ref for ref in node._parents or () if ref() is not None]


def lock_(td: Container) -> Container:
    """Lock this container and what is nested in it, and return it; also as a context manager.

    While locked, `keys`, `values` and `items` are remembered.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=0)
    >>> with td.lock_():
    ...     td.is_locked
    True
    >>> td.is_locked
    False
    """
    td._origin = ("lock", td._locked)
    if not td._locked:
        _lock(td, None)
    return td


def _lock(node: Any, parent: Any) -> None:
    if parent is not None:
        node._parents = [parent] if node._parents is None else [*node._parents, parent]
    if not node._locked:
        node._locked = True
        lasting = node._lasting
        node._kids = children = node._children()
        if children:
            ref = weakref.ref(node)
            for child in children:
                _lock(child, ref)
                lasting = lasting and child._cache is not None
        if lasting:
            node._cache = {}


def lock_made(td: Any, nodes: list[Any]) -> None:
    """Lock a container just made over these nodes, of which those just made are locked already."""
    td._locked, td._kids, td._cache = True, nodes, {}
    if nodes:
        ref = weakref.ref(td)
        for node in nodes:
            if node._locked and node._parents is None:
                node._parents = [ref]
            else:
                _lock(node, ref)
            if node._cache is None:
                td._cache = None


def unlock_(td: Container) -> Container:
    """Unlock this container and what is nested in it, and return it; also as a context manager.

    Raises RuntimeError if this container is an entry of one that stays locked.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=0).lock_()
    >>> with td.unlock_():
    ...     td["b"] = 1
    >>> td.is_locked, list(td.keys())
    (True, ['a', 'b'])
    """
    was, parts = td._locked, _locked_parts(td)
    for part in parts:
        _require_free(part)
    for part in parts:
        _unlock(part)
    td._origin = ("lock", was)
    return td


def _locked_parts(td: Any) -> list[Any]:
    """The container, or, where it is not locked itself, the locked ones that were set in it."""
    if td._locked:
        return [td]
    return [one for node in td._children() if not node._is_data() for one in _locked_parts(node)]


def _require_free(td: Any) -> None:
    """RuntimeError if the container is an entry of one that stays locked."""
    if td._parents and live_parents(td):
        raise _in_locked_graph()
    if not _is_tree(td):
        graph: dict[int, Any] = {}
        _collect(td, graph)
        for node in graph.values():
            if node is not td and any([id(ref()) not in graph for ref in live_parents(node)]):
                raise _in_locked_graph()


def relink(node: Any, old: Any, new: Any) -> None:
    """Unlink an entry that was replaced in a locked container, and lock its replacement."""
    if new is old:
        return
    ref = weakref.ref(node)
    if old is not None and hasattr(old, "_parents"):
        old = getattr(old, "_td", old)
        rest = [parent for parent in live_parents(old) if parent() is not node]
        old._parents = rest or None
        if not rest:
            _unlock(old)
    if new is not None and hasattr(new, "_parents"):
        _lock(getattr(new, "_td", new), ref)
    node._kids = node._children()


def _in_locked_graph() -> RuntimeError:
    return RuntimeError(
        "Cannot unlock a container that is part of a locked graph: "
        "it is an entry of another locked container. "
        "Unlock the root of that graph, which unlocks its entries too."
    )


def _is_tree(node: Any) -> bool:
    """Whether each node below has been locked by the one above it only."""
    if node._kids is None:
        return False
    for child in node._kids:
        if child._parents is None or len(child._parents) != 1 or not _is_tree(child):
            return False
    return True


def _collect(node: Any, graph: dict[int, Any]) -> None:
    graph[id(node)] = node
    for child in node._children():
        _collect(child, graph)


def _unlock(node: Any) -> None:
    node._locked = False
    if node._parents is not None:
        node._parents = None
    node._cache = None
    node.__dict__.pop("_mapped_to", None)
    if node._home is not None and not node._home.is_shared:
        node._home = None
    if node._buffer is not None:  # entries may now leave it
        node._buffer = None
    kids, node._kids = node._kids, None
    for child in node._children() if kids is None else kids:
        _unlock(child)


def is_locked(td: Any) -> bool:
    """Whether nothing can be added, replaced or removed; assign to lock or unlock.

    >>> from raffia import TensorDict
    >>> TensorDict().is_locked
    False
    """
    return td._locked


def set_locked(td: Any, value: bool) -> None:
    if value:
        lock_(td)
    else:
        unlock_(td)


def enter(td: Container) -> Container:
    """Enter a block that, when it ends, undoes what made this container and writes back changes."""
    if td._origin is None:
        raise RuntimeError(
            "this container can't be used in a `with` statement: "
            "it must come from lock_, unlock_, to_module, flatten_keys, unflatten_keys "
            "or a shape operation such as view"
        )
    if td._origin[0] == "squeeze":
        raise RuntimeError(
            "with td.squeeze(): it is not known which dimensions to restore; name one: with "
            "td.squeeze(dim)"
        )
    if td._exits is None:
        td._exits = []
    td._exits.append(td._origin)
    return td


def exit_(td: Any, kind: Any, error: Any, traceback: Any) -> None:
    """End a block begun by `enter`."""
    origin = td._exits.pop()
    what = origin[0]
    if what == "same":
        return
    if what == "lock":
        set_locked(td, origin[1])
        return
    if what == "module":
        if error is not None:
            origin[2](error)
        origin[1](td)
        return
    if kind is not None:
        return
    source = origin[1]()
    if source is None:  # made in the `with` line itself
        raise RuntimeError(
            "the container that this one was made from is gone, so nothing can be written back"
        )
    if what == "to":
        known = source.keys(True, True)
        source.update_(td.select(*[key for key in td.keys(True, True) if key in known]))
        back = td.exclude(*[key for key in td.keys(True, True) if key in known])
    else:  # the method that undoes it
        back = getattr(td, what)(*origin[2:] or (source._batch_size,))
    if source._locked:
        source.update_(back)
    else:
        source.update(back)


def locked_error(td: Any, key: Any = None) -> RuntimeError:
    what = "" if key is None else f" (entry {key!r})"
    return RuntimeError(
        f"Cannot modify locked {type(td).__name__}{what}: "
        "entries of a locked container can't be set, replaced or removed. "
        "Write into what is there with td.set_(key, value), or unlock it first with td.unlock_()."
    )
