"""Views of the content of a container: its keys, values and items, nested ones included."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

from torch import Tensor

from raffia.tensordict.keys import dotted, unravel_key
from raffia.tensordict.node import Node
from raffia.tensordict.signatures import Function, documented_as

IsLeaf = Callable[[type], bool]


def default_is_leaf(cls: type) -> bool:
    """Whether entries of class `cls` are leaves: everything that is not a container.

    >>> default_is_leaf(torch.Tensor)
    True
    """
    return not issubclass(cls, Node) or issubclass(cls, Tensor)


def is_leaf_nontensor(cls: type) -> bool:
    """Whether entries of class `cls` are leaves when non-tensor values count as leaves too.

    >>> from raffia import NonTensorData
    >>> is_leaf_nontensor(NonTensorData), default_is_leaf(NonTensorData)
    (True, False)
    """
    return not issubclass(cls, Node) or getattr(cls, "_holds_data", False)


def collect(
    node: Node, prefix: tuple[str, ...], leaves_only: bool, is_leaf: IsLeaf | None, out: list[Any]
) -> None:
    """Append `(nested key, value)` for each entry below `node`; content comes before its node."""
    for name, value in node._entries().items():
        leaf = isinstance(value, Tensor) or (is_leaf is not None and is_leaf(type(value)))
        if not leaf:
            collect(value, (*prefix, name), leaves_only, is_leaf, out)
        if leaf or not leaves_only:
            out.append(((*prefix, name) if prefix else name, value))


def collect_leaves(node: Node, prefix: tuple[str, ...] | None, out: list[Any]) -> None:
    """`collect` for the tensors only."""
    append = out.append
    for name, value in node._entries().items():
        if isinstance(value, Tensor):
            append((name if prefix is None else (*prefix, name), value))
        else:
            collect_leaves(value, (name,) if prefix is None else (*prefix, name), out)


def keys_list(
    td: Any, include_nested: bool, leaves_only: bool, is_leaf: IsLeaf | None
) -> list[Any]:
    """The keys alone, for which the members of a lazy stack need not be stacked."""
    out: list[Any] = []
    if include_nested:
        collect_keys(td, (), leaves_only, is_leaf, out)
        return out
    if not leaves_only:
        return list(td._entry_names())
    leaf = is_leaf or default_is_leaf
    for name, value in td._peek().items():
        if not isinstance(value, Node) or leaf(type(value)):
            out.append(name)
    return out


def collect_keys(
    node: Any, prefix: tuple[str, ...], leaves_only: bool, is_leaf: IsLeaf | None, out: list[Any]
) -> None:
    """Append the nested key of each entry below `node`; content comes before its node."""
    append = out.append
    for name, value in (node._d if node.__class__ is node._plain else node._peek()).items():
        key = prefix + (name,) if prefix else name  # noqa: RUF005 (faster than unpacking)
        if value.__class__ is Tensor:
            append(key)
            continue
        # an UnbatchedTensor is a node and a tensor: a leaf
        if not isinstance(value, Tensor) and (is_leaf is None or not is_leaf(type(value))):
            collect_keys(value, key if prefix else (name,), leaves_only, is_leaf, out)
            if leaves_only:
                continue
        append(key)


def every(node: Any, test: Callable[[Tensor], Any]) -> bool:
    """Whether `test` is true of all leaves; the first that it is false of is the last it sees."""
    if node.__class__ is not node._plain:
        if not node._lazy:
            return all(map(test, node._leaves([])))
        return all([every(member, test) for member in node.tensordicts])
    for value in node._d.values():
        if value.__class__ is Tensor or not isinstance(value, Node):
            if not test(value):
                return False
        elif not every(value, test):
            return False
    return True


def paired(td: Any, source: Any) -> Iterator[tuple[Any, str, Any, Any]]:
    """Entries of `source` that are no containers, next to those of `td` under the same keys.

    As (the node of `td`, the name there, its entry or None, the entry of `source`). Lazy stacks are
    paired member by member.
    """
    members, others = getattr(td, "tensordicts", None), getattr(source, "tensordicts", None)
    if members is not None and others is not None:
        if (td.stack_dim, len(members)) == (source.stack_dim, len(others)):
            for member, other in zip(members, others, strict=True):
                yield from paired(member, other)
            return
    for name, value in source._entries().items():
        mine = td._get_str(name)
        if all([isinstance(node, Node) and not node._is_data() for node in (mine, value)]):
            yield from paired(mine, value)
        else:
            yield td, name, mine, value


def completed(td: Any, other: Any, fill: Callable[[Tensor], Any] | None) -> tuple[Any, Any]:
    """Two containers with the keys of both: for an entry that one lacks, `fill` of the other's.

    fill: None leaves these entries out.
    """
    parts = td._split(other) if td._lazy else None
    if parts is not None:
        pairs = [completed(*pair, fill) for pair in zip(td.tensordicts, parts, strict=True)]
        return td._of_members([a for a, _ in pairs]), td._of_members([b for _, b in pairs])
    mine, theirs = td._entries(), other._entries()
    left, right = {}, {}
    for name in dict.fromkeys([*mine, *theirs]):
        a, b = mine.get(name), theirs.get(name)
        if a is None or b is None:
            if fill is None:
                continue
            there = b if a is None else a
            filler = there._map(fill) if isinstance(there, Node) else fill(there)
            a, b = (filler if a is None else a), (filler if b is None else b)
        elif all([isinstance(node, Node) and not node._is_data() for node in (a, b)]):
            a, b = completed(a, b, fill)
        left[name], right[name] = a, b
    first = td._new(left, td._batch_size, td._names)
    return first, other._new(right, other._batch_size, other._names)


def entries_list(
    td: Node, include_nested: bool, leaves_only: bool, is_leaf: IsLeaf | None, sort: bool
) -> list[tuple[Any, Any]]:
    """The `(key, value)` pairs that `keys`, `values` and `items` show for these flags."""
    out: list[tuple[Any, Any]] = []
    if include_nested and leaves_only and is_leaf is None:
        collect_leaves(td, None, out)
    elif include_nested:
        collect(td, (), leaves_only, is_leaf, out)
    else:
        leaf = is_leaf or default_is_leaf
        for name, value in td._entries().items():
            if not leaves_only or leaf(type(value)):
                out.append((name, value))
    if sort:
        out.sort(key=lambda pair: pair[0] if pair[0].__class__ is str else dotted(pair[0]))
    return out


class NestedView:
    """A live view of keys, values or items of a container, also of what is nested in it."""

    __slots__ = ("td", "flags", "part")

    def __init__(self, td: Node, flags: tuple[Any, ...], part: int | None) -> None:
        self.td, self.flags, self.part = td, flags, part  # part: 0 keys, 1 values, None both

    def _list(self) -> list[Any]:
        td = self.td
        cache = td._cache if td._locked else None
        pairs = None if cache is None else cache.get(self.flags)
        if pairs is None:
            pairs = entries_list(td, *self.flags)
            if cache is not None:
                cache[self.flags] = pairs
        return pairs

    def __iter__(self) -> Iterator[Any]:
        part = self.part
        return iter(self._list()) if part is None else iter([pair[part] for pair in self._list()])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"


class KeysView(NestedView, Set[Any]):
    """Keys of a container, as a set: with a length, `in`, comparisons, `&`, `|`, `-` and `^`.

    >>> from raffia import TensorDict
    >>> view = TensorDict(a=1, b=dict(c=2)).keys(True)
    >>> view == {"a", "b", ("b", "c")}, view - {"b", ("b", "c")}
    (True, {'a'})
    """

    __slots__ = ()

    def _names(self) -> list[Any]:
        td = self.td
        cache = td._cache if td._locked else None
        names = None if cache is None else cache.get(("keys", *self.flags))
        if names is None:
            *flags, sort = self.flags
            names = keys_list(td, *flags)
            if sort:
                names.sort(key=dotted)
            if cache is not None:
                cache[("keys", *self.flags)] = names
        return names

    def __iter__(self) -> Iterator[Any]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __contains__(self, key: object) -> bool:
        include_nested, leaves_only, is_leaf, _ = self.flags
        path: Any = key
        if path.__class__ is not str:
            path = unravel_key(path)
        if path.__class__ is str:
            value = self.td._peek_str(path)
        else:
            if not include_nested:
                return False
            value = self.td
            for name in path:
                if not isinstance(value, Node):
                    return False
                value = value._peek_str(name)
        if value is None:
            return False
        return not leaves_only or (is_leaf or default_is_leaf)(type(value))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Iterable):
            return NotImplemented
        return builtins.set(self) == builtins.set(other)  # `set` is the function below

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> Any:  # what `&` and its like make
        return builtins.set(it)


def keys(
    td: Any,
    include_nested: bool = False,
    leaves_only: bool = False,
    is_leaf: IsLeaf | None = None,
    *,
    sort: bool = False,
) -> KeysView:
    """A live view of the keys; nested ones are tuples.

    include_nested: also the keys of nested containers, each after its content.
    leaves_only: without the containers themselves.
    is_leaf: which classes count as leaves, `default_is_leaf` if not given.
    sort: in alphabetical order.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.zeros(2), b=dict(c=torch.ones(3)))
    >>> list(td.keys()), list(td.keys(True, True))
    (['a', 'b'], ['a', ('b', 'c')])
    """
    return KeysView(td, (include_nested, leaves_only, is_leaf, sort), 0)


def values(
    td: Any,
    include_nested: bool = False,
    leaves_only: bool = False,
    is_leaf: IsLeaf | None = None,
    *,
    sort: bool = False,
) -> NestedView:
    """A live view of the values; the flags are those of `keys`.

    >>> from raffia import TensorDict
    >>> [v.shape for v in TensorDict(a=torch.zeros(2), b=dict(c=torch.ones(3))).values(True, True)]
    [torch.Size([2]), torch.Size([3])]
    """
    return NestedView(td, (include_nested, leaves_only, is_leaf, sort), 1)


def items(
    td: Any,
    include_nested: bool = False,
    leaves_only: bool = False,
    is_leaf: IsLeaf | None = None,
    *,
    sort: bool = False,
) -> NestedView:
    """A live view of the `(key, value)` pairs; the flags are those of `keys`.

    >>> from raffia import TensorDict
    >>> list(TensorDict(a=1, b=dict(c=2)).items(True, True))
    [('a', tensor(1)), (('b', 'c'), tensor(2))]
    """
    return NestedView(td, (include_nested, leaves_only, is_leaf, sort), None)


def of_dict(view: Function) -> Function:
    """The method of plain containers for a view; without flags, their dict has a faster one."""

    name = view.__name__

    @documented_as(view)
    def listing(
        td: Any,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> Any:
        if include_nested or leaves_only or sort:
            return view(td, include_nested, leaves_only, is_leaf, sort=sort)
        return getattr(td._d, name)()

    listing.__name__, listing.__qualname__ = name, f"TensorDict.{name}"
    listing.__module__ = "raffia.tensordict.tensordict"
    made: Any = listing
    return made
