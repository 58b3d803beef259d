"""Atomic storing and writing of many entries: all of them, or none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from raffia.tensordict.atomic import all_or_nothing
from raffia.tensordict.entries import contains, get, holder, write
from raffia.tensordict.index import normalise
from raffia.tensordict.keys import NestedKey, raise_missing, unravel_key, unravel_key_to_tuple
from raffia.tensordict.lock import locked_error
from raffia.tensordict.node import Container, Node, Source
from raffia.tensordict.views import IsLeaf

_with_grad = attrgetter("requires_grad")


def update(
    td: Container,
    input_dict_or_td: Source | None = None,
    clone: bool = False,
    inplace: bool = False,
    *,
    non_blocking: bool = False,
    keys_to_update: Sequence[NestedKey] | None = None,
    is_leaf: IsLeaf | None = None,
    update_batch_size: bool = False,
    ignore_lock: bool = False,
    **entries: Any,
) -> Container:
    """Store all entries of a container or dict; nested ones are merged, not replaced.

    clone: store clones of the tensors.
    inplace: write into the tensors that are there already.
    keys_to_update: only these keys.
    update_batch_size: take over the batch size of the input.
    If an entry is refused, none is stored.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=dict(b=1))
    >>> td.update({"a": {"c": 2}, "d": 3}).to_dict()
    {'a': {'b': tensor(1), 'c': tensor(2)}, 'd': tensor(3)}
    """
    source = merged(input_dict_or_td, entries)
    if source is td:
        return td
    options: dict[str, Any] = dict(clone=clone, inplace=inplace, non_blocking=non_blocking)
    options |= dict(keys_to_update=keys_to_update, is_leaf=is_leaf)
    if td._locked and ignore_lock:
        with td.unlock_():
            return update(td, source, update_batch_size=update_batch_size, **options)
    if td._locked and not inplace:
        raise locked_error(td)
    like = source if update_batch_size and isinstance(source, Node) else None
    for_all = inplace and is_leaf is None and not update_batch_size
    if for_all and keys_to_update is None and written_at_once(td, source, non_blocking):
        return td
    if td._lazy and td._update_members(source, options, like is not None):
        return td
    source = restricted(source, keys_to_update)
    if for_all and keys_to_update is not None and written_at_once(td, source, non_blocking):
        return td
    if like is None:
        with all_or_nothing(td, source):
            merge(td, source, clone, inplace, non_blocking, is_leaf)
        return td
    resized = both_have(td, like)
    before = [node._batch_size for node, _ in resized]
    try:
        with all_or_nothing(td, source):
            for node, _ in resized:
                node._batch_size = torch.Size()
            merge(td, source, clone, inplace, non_blocking, is_leaf, sized=True)
            for node, theirs in reversed(resized):
                try:
                    node._set_batch_size(theirs._batch_size)
                except RuntimeError as error:
                    if absent := node.keys() - theirs.keys():
                        raise absent_keys(absent, before[0], like) from error
                    raise
    except BaseException:
        for (node, _), size in zip(resized, before, strict=True):
            node._batch_size = size
        raise
    return td


def absent_keys(absent: Iterable[NestedKey], batch_size: torch.Size, source: Any) -> RuntimeError:
    """The error for entries that a new batch size, that of the source, would not fit."""
    return RuntimeError(
        f"the source has no entries {sorted(absent, key=str)}, which its batch size "
        f"{list(source._batch_size)} would not fit: they are of batch size {list(batch_size)}; "
        "exclude them first"
    )


def both_have(td: Any, source: Any) -> list[tuple[Any, Any]]:
    """The plain containers in both, at any depth, whose batch size is to be that of `source`."""
    out = [(td, source)]
    for mine, theirs in out:
        for name, value in theirs._entries().items():
            below = mine._get_str(name)
            if type(below) is td._plain and isinstance(value, Node) and not value._is_data():
                out.append((below, value))
    return out


def merged(source: Any, entries: Mapping[str, Any]) -> Any:
    if source is None:
        return entries
    if not isinstance(source, (Node, Mapping)) and not hasattr(source, "items"):
        raise TypeError(
            f"update takes a container, a dict or keyword entries, got {type(source).__name__}"
        )
    return {**dict(source.items()), **entries} if entries else source


def pairs_of(source: Any) -> list[tuple[Any, Any]]:
    """Keys and entries of a container or a dict."""
    return list(source._entries().items() if isinstance(source, Node) else source.items())


def restricted(source: Any, keys_to_update: Sequence[NestedKey] | None) -> Any:
    """The entries of `source` under these keys; `source` itself, where none are given."""
    if keys_to_update is None:
        return source
    if isinstance(keys_to_update, str):
        raise TypeError(
            "keys_to_update must be a sequence of keys, got str: "
            f"keys_to_update=[{keys_to_update!r}]"
        )
    out: dict[NestedKey, Any] = {}
    for key in keys_to_update:
        value: Any = source
        for name in unravel_key_to_tuple(key):
            is_dict = isinstance(value, Mapping) and not isinstance(value, Node)
            read = value._get_str if isinstance(value, Node) else value.get if is_dict else None
            value = None if read is None else read(name)
        if value is not None:
            out[key] = value
    return out


def merge(
    td: Any,
    source: Any,
    clone: bool,
    inplace: bool,
    non_blocking: bool,
    is_leaf: IsLeaf | None,
    sized: bool = False,
) -> None:
    """Store every entry of `source`, descending where both sides are containers.

    sized: nested containers of other kinds take over the batch sizes of those in `source`.
    """
    for key, value in pairs_of(source):
        key = unravel_key(key)
        mine: Any = td._peek_str(key) if key.__class__ is str else get(td, key, None)
        nested = isinstance(mine, Node) and not mine._is_data()
        if nested and is_leaf is not None and is_leaf(type(value)):
            nested = False
        if (
            nested
            and isinstance(value, (Node, Mapping))
            and not (isinstance(value, Node) and value._is_data())
        ):
            if type(mine) is td._plain and type(value) in (td._plain, dict):
                merge(mine, value, clone, inplace, non_blocking, is_leaf, sized)
            elif sized and type(mine) is not td._plain:
                mine.update(value, clone, inplace, is_leaf=is_leaf, update_batch_size=True)
            else:
                mine.update(value, clone, inplace, non_blocking=non_blocking, is_leaf=is_leaf)
            continue
        if clone and isinstance(value, (Tensor, Node)):
            value = value.clone()
        td.set(key, value, inplace=inplace, non_blocking=non_blocking)


def update_(
    td: Container,
    input_dict_or_td: Source | None = None,
    clone: bool = False,
    *,
    non_blocking: bool = False,
    keys_to_update: Sequence[NestedKey] | None = None,
    **entries: Any,
) -> Container:
    """Write the entries of a container or dict into the tensors there; allowed when locked.

    Raises KeyError if a key is not there and RuntimeError if a shape does not fit, before anything
    is written.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2)).lock_().update_({"a": torch.ones(2)})["a"]
    tensor([1., 1.])
    """
    whole = keys_to_update is None and not entries
    if whole and written_at_once(td, input_dict_or_td, non_blocking):
        return td
    source = merged(input_dict_or_td, entries)
    parts = td._own_parts(source) if td._lazy and isinstance(source, Node) else None
    if parts is not None:
        parts = [restricted(part, keys_to_update) for part in parts]
        members = list(zip(td._children(), parts, strict=True))
        for member, part in members:
            for key in part.keys():
                if not contains(member, key):
                    raise_missing(key, member)
        for member, part in members:
            member.update_(part, clone, non_blocking=non_blocking)
        return td
    source = restricted(source, keys_to_update)
    if not whole and written_at_once(td, source, non_blocking):
        return td
    pairs = pairs_of(source)
    check_writes(td, pairs)
    for key, value in pairs:
        td.set_(key, value, non_blocking=non_blocking)
    return td


def written_at_once(td: Any, source: Any, non_blocking: bool = False) -> bool:
    """Write tensors into those of the same keys, all or none; False where that is not all of it."""
    into: list[Tensor] = []
    values: list[Tensor] = []
    return writes(td, source, into, values) and copied(into, values, non_blocking)


def writes(
    td: Any, source: Any, into: list[Tensor], values: list[Tensor], lazily: bool = True
) -> bool:
    """Append the tensor pairs that writing `source` into `td` copies, if that is all it does.

    False if a key is not there, or one of a pair is not a plain tensor.
    """
    plain = td._plain
    if td.__class__ is not plain:
        return lazily and writes_lazily(td, source, into, values)
    if source.__class__ is plain:
        source = source._d
    elif source.__class__ is not dict:
        return False
    d = td._d
    for name, value in source.items():
        mine = d.get(name)
        if value.__class__ is Tensor:
            if mine.__class__ is not Tensor:
                return False
            into.append(mine)
            values.append(value)
        elif not isinstance(mine, Node) or not writes(mine, value, into, values, lazily):
            return False
    return True


def writes_lazily(td: Any, source: Any, into: list[Tensor], values: list[Tensor]) -> bool:
    """`writes` for a lazy stack: each part of a tensor is written into one member's."""
    if not td._lazy or td._is_data() or td.hook_in is not None:
        return False
    parts = td._parts_of(source)
    if parts is None:
        return False
    for member, part in zip(td.tensordicts, parts, strict=True):
        if not writes(member, part, into, values):
            return False
    return True


def copied(into: list[Tensor], values: list[Tensor], non_blocking: bool = False) -> bool:
    """Write tensors into others, all or none; False where shapes differ, or torch refuses.

    The general way then writes them one by one, and its error names the key.
    """
    try:
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        if len(into) < 2 or transformed or forward_ad._current_level >= 0:
            return copied_singly(into, values, non_blocking)
        if any(map(_with_grad, into)):
            return False
        if any(map(_with_grad, values)):  # which torch's call for many tensors doesn't pass on
            return copied_singly(into, values, non_blocking)
        with torch._C._AutoDispatchBelowAutograd():  # which has nothing to do, and takes a fifth
            same_size = all(map(Tensor.is_same_size, into, values))
            if same_size:
                torch._foreach_copy_(into, values, non_blocking=non_blocking)
        return same_size
    except RuntimeError:  # a nested tensor has no shape; memory that is shown twice takes no write
        return False


def copied_singly(into: list[Tensor], values: list[Tensor], non_blocking: bool) -> bool:
    """`copied`, one pair after the other: with gradients or tangents, and under `torch.vmap`."""
    for leaf, value in zip(into, values, strict=True):
        if leaf.shape != value.shape or leaf.requires_grad:
            return False
    for leaf, value in zip(into, values, strict=True):
        leaf.copy_(value, non_blocking=non_blocking)
    return True


def check_writes(td: Any, pairs: Iterable[tuple[Any, Any]], rows: tuple[Any, ...] = ()) -> None:
    """Raise what a later write would raise, so that nothing is written if any entry can't be.

    rows: empty, or the index of the rows that are to be written.
    """
    for key, value in pairs:
        if not contains(td, key):
            raise_missing(key, td)
        node, name = holder(td, key)
        mine = node._peek_str(name)
        if isinstance(mine, Node) and type(value) in (td._plain, dict):
            if not mine._is_data():
                check_writes(mine, pairs_of(value), rows)
        elif not rows and node._lazy and type(value) is Tensor and value.dim():
            for member, part in zip(node.tensordicts, node._parts(name, value), strict=True):
                check_writes(member, [(name, part)])
        elif isinstance(mine, Tensor) and isinstance(value, Tensor) and type(node) is td._plain:
            if not rows and not (value.dim() <= mine.dim() and broadcasts(value.shape, mine.shape)):
                write(mine, value, unravel_key(key))  # which refuses
            elif rows and type(mine) is type(value) is Tensor and not fits_rows(mine, value, *rows):
                node.set_at_(name, value, *rows)  # which refuses


def broadcasts(shape: torch.Size, into: torch.Size) -> bool:
    """Whether the last dimensions of a shape, as many as both have, broadcast to another."""
    return all([n in (1, m) for n, m in zip(reversed(shape), reversed(into), strict=False)])


def update_at_(
    td: Container,
    input_dict_or_td: Source,
    idx: Any,
    clone: bool = False,
    *,
    non_blocking: bool = False,
    keys_to_update: Sequence[NestedKey] | None = None,
) -> Container:
    """Write the entries of a container or dict into the rows `idx` of the existing tensors.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.zeros(3), batch_size=[3])
    >>> td.update_at_({"a": torch.ones(2)}, slice(1, 3))["a"]
    tensor([0., 1., 1.])
    """
    if idx is Ellipsis or type(idx) is tuple and any([part is Ellipsis for part in idx]):
        idx = normalise(idx, td._batch_size)  # as entries have more dimensions
    source = restricted(merged(input_dict_or_td, {}), keys_to_update)
    into: list[Tensor] = []
    given: list[Tensor] = []
    if td.__class__ is td._plain and writes(td, source, into, given, lazily=False):
        if fit_rows(td, into, given, idx):
            for leaf, value in zip(into, given, strict=True):
                leaf[idx] = value
            return td
    pairs = pairs_of(source)
    check_writes(td, pairs, (idx,))
    for key, value in pairs:
        mine: Any = td
        for name in unravel_key_to_tuple(key):
            mine = mine._peek_str(name)
        nested = isinstance(mine, Node) and not mine._is_data()
        if nested and isinstance(value, (Node, Mapping)):
            mine.update_at_(value, idx, non_blocking=non_blocking)
        else:
            td.set_at_(key, value, idx, non_blocking=non_blocking)
    return td


def fit_rows(td: Any, into: list[Tensor], values: list[Tensor], idx: Any) -> bool:
    """Whether each tensor can be written into the rows `idx` of another without conversion."""
    for leaf, value in zip(into, values, strict=True):
        if leaf.dtype is not value.dtype or leaf.requires_grad or leaf.device != value.device:
            return False
    size = td._batch_size
    if idx.__class__ is int and size:
        ndim = len(size)
        row, pairs = size[1:], zip(into, values, strict=True)
        if all([value.shape == row + leaf.shape[ndim:] for leaf, value in pairs]):
            return -size[0] <= idx < size[0]
    return all([fits_rows(*pair, idx) for pair in zip(into, values, strict=True)])


def fits_rows(leaf: Tensor, value: Tensor, idx: Any) -> bool:
    """Whether `leaf[idx] = value` is possible."""
    shape, rows = value.shape, leaf[idx].shape
    if shape == rows:
        return True
    leading = shape[: max(0, len(shape) - len(rows))]
    return broadcasts(shape, rows) and all([n == 1 for n in leading])
