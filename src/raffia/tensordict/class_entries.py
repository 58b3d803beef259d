"""Reading and writing the fields of tensorclasses by key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

from raffia.tensordict import entries, updates
from raffia.tensordict.class_fields import is_dict
from raffia.tensordict.keys import NestedKey, unravel_key_to_tuple
from raffia.tensordict.node import Node, Source
from raffia.tensordict.nontensor import NonTensorData
from raffia.tensordict.signatures import shows_options_of
from raffia.tensordict.tensordict import TensorDict

Instance = TypeVar("Instance", bound=Node)  # of a tensorclass


def get(obj: Any, key: NestedKey, default: Any = None, **lazy_options: Any) -> Any:
    """The value of a field, or of an entry nested in one; `default` for a key that is not a field.

    lazy_options: as in `TensorDict.get`.

    >>> from raffia import tensorclass
    >>> @tensorclass
    ... class Point:
    ...     x: torch.Tensor
    >>> Point(x=torch.ones(2)).get("x"), Point(x=torch.ones(2)).get("y", "none")
    (tensor([1., 1.]), 'none')
    """
    value = obj._td.get(key, None, **lazy_options)
    if value is None:
        return None if key.__class__ is str and key in obj._fields else default
    return value._unwrapped() if isinstance(value, Node) else value


def set(
    obj: Instance, key: NestedKey, value: Any, inplace: bool = False, non_blocking: bool = False
) -> Instance:
    """Assign to a field, or to an entry nested in one, and return the instance.

    inplace: write into the tensor that is there already.
    Raises AttributeError for a key that is not a field, RuntimeError if locked.

    >>> from raffia import tensorclass
    >>> @tensorclass
    ... class Point:
    ...     x: torch.Tensor
    >>> Point(x=torch.ones(2)).set("x", torch.zeros(2)).x
    tensor([0., 0.])
    """
    instance: Any = obj
    if key.__class__ is str and not inplace:
        instance._set_str(key, value)
        return obj
    path = unravel_key_to_tuple(key)
    if path[0] not in instance._fields:
        raise instance._no_field(path[0])
    if len(path) > 1 and instance._get_str(path[0]) is None:
        raise AttributeError(
            f"field {path[0]!r} is None, so {path[1]!r} can't be set in it; "
            "assign a container first"
        )
    entries.set(instance, key, value, inplace, non_blocking=non_blocking)
    return obj


def set_at_(
    obj: Instance, key: NestedKey, value: Any, idx: Any, non_blocking: bool = False
) -> Instance:
    """Write `value` into the rows `idx` of a field, and return the instance.

    >>> from raffia import tensorclass
    >>> @tensorclass
    ... class Point:
    ...     x: torch.Tensor
    >>> Point(x=torch.zeros(3), batch_size=[3]).set_at_("x", 1.0, slice(1, 3)).x
    tensor([0., 1., 1.])
    """
    instance: Any = obj
    instance._td.set_at_(key, value, idx, non_blocking=non_blocking)
    return obj


def update(
    obj: Instance,
    input_dict_or_td: Source | None = None,
    clone: bool = False,
    inplace: bool = False,
    *,
    non_blocking: bool = False,
    keys_to_update: Sequence[NestedKey] | None = None,
    is_leaf: Any = None,
    update_batch_size: bool = False,
    ignore_lock: bool = False,
    **values: Any,
) -> Instance:
    """Assign to several fields, from an instance, a container, a dict or keywords.

    The arguments are those of `TensorDict.update`; the instance is returned.
    Raises ValueError for a key that is not a field.

    >>> from raffia import tensorclass
    >>> @tensorclass
    ... class Point:
    ...     x: torch.Tensor
    >>> Point(x=torch.ones(2)).update({"x": torch.zeros(2)}).x
    tensor([0., 0.])
    """
    instance: Any = obj
    source = updates.merged(input_dict_or_td, values)
    if keys_to_update is not None:
        source = updates.restricted(source, keys_to_update)
    if hasattr(source, "_wrap"):
        source = source._td
    instance._check_keys([unravel_key_to_tuple(key)[0] for key in source.keys()])
    empty: list[str] = []
    if instance._autocast and isinstance(source, Node):
        source = source._entries()
    if not isinstance(source, Node):
        source = {key: _assigned(instance, key, value, empty) for key, value in source.items()}
        source = {key: value for key, value in source.items() if value is not None}
    options: dict[str, Any] = dict(
        non_blocking=non_blocking, is_leaf=is_leaf, ignore_lock=ignore_lock
    )
    instance._td.update(source, clone, inplace, update_batch_size=update_batch_size, **options)
    for name in empty:
        instance._set_str(name, None)
    return obj


def _assigned(obj: Any, key: NestedKey, value: Any, empty: list[str]) -> Any:
    """The value that `update` stores; fields that turn into None are appended to `empty`."""
    name, *rest = unravel_key_to_tuple(key)
    if rest:
        return value
    if value is None:
        empty.append(name)
    if is_dict(value):
        mine, kind = obj._get_str(name), obj._class_of(name)
        if isinstance(mine, Node) and not mine._is_data():
            return value
        return (kind or TensorDict).from_dict(value, batch_size=obj._td._batch_size)
    return obj._entry(name, value, obj._td._batch_size, obj._td._device)


def replace(obj: Instance, input_dict_or_td: Source | None = None, **values: Any) -> Instance:
    """A copy (same tensors) in which the given fields are assigned.

    >>> from raffia import tensorclass
    >>> @tensorclass
    ... class Point:
    ...     x: torch.Tensor
    >>> Point(x=torch.ones(2)).replace(x=torch.zeros(2)).x
    tensor([0., 0.])
    """
    instance: Any = obj
    source = updates.merged(input_dict_or_td, values)
    if not source.keys():
        return obj
    out = instance._over(instance._td.copy())
    if source is not values or any([is_dict(value) for value in values.values()]):
        update(out, source)
    else:
        instance._check_keys(values)
        for name, value in values.items():
            out._set_str(name, value)
    if instance._follows_rebuild:
        out._follow_rebuild()
    return out


def create_nested(obj: Instance, key: NestedKey) -> Instance:
    """Assign an empty `TensorDict` to a field, or to an entry nested in one.

    >>> from raffia import tensorclass
    >>> @tensorclass
    ... class Point:
    ...     x: Any
    >>> Point(x=None, batch_size=[3]).create_nested("x").x.batch_size
    torch.Size([3])
    """
    return set(obj, key, TensorDict(batch_size=obj._batch_size, device=obj._device))


@overload
def select(
    obj: Instance,
    *keys: NestedKey,
    inplace: bool = False,
    strict: bool = True,
    as_tensordict: Literal[False] = False,
) -> Instance: ...
@overload
def select(
    obj: Instance,
    *keys: NestedKey,
    inplace: bool = False,
    strict: bool = True,
    as_tensordict: bool,
) -> Instance | TensorDict: ...
def select(
    obj: Any,
    *keys: NestedKey,
    inplace: bool = False,
    strict: bool = True,
    as_tensordict: bool = False,
) -> Any:
    """An instance with only these fields, or with `as_tensordict` a container of them.

    >>> from raffia import tensorclass
    >>> @tensorclass
    ... class Point:
    ...     x: torch.Tensor
    ...     y: torch.Tensor
    >>> Point(x=1, y=2).select("x", as_tensordict=True).to_dict()
    {'x': tensor(1)}
    """
    out = obj._td.select(*keys, inplace=inplace, strict=strict)
    return out if as_tensordict and not inplace else obj._again(out)


@shows_options_of(entries.to_dict)
def to_dict(obj: Any, *, retain_none: bool = True, **options: Any) -> dict[str, Any]:
    """Plain nested dicts; fields that are None are in it too.

    retain_none: False leaves them out.
    options: those of `TensorDict.to_dict`.

    >>> from raffia import tensorclass
    >>> @tensorclass
    ... class Point:
    ...     x: torch.Tensor
    ...     y: torch.Tensor = None
    >>> Point(x=torch.ones(2)).to_dict()
    {'x': tensor([1., 1.]), 'y': None}
    """
    out = obj._td.to_dict(retain_none=retain_none, **options)
    if retain_none:
        for name in obj._fields:
            out.setdefault(name, None)
    return out


def to_tensordict(obj: Any, *, retain_none: bool | None = None) -> TensorDict:
    """A plain `TensorDict` with clones of all entries, nested ones too.

    retain_none: True keeps fields that are None.

    >>> from raffia import tensorclass
    >>> @tensorclass
    ... class Point:
    ...     x: torch.Tensor
    ...     y: torch.Tensor = None
    >>> list(Point(x=torch.ones(2)).to_tensordict().keys())
    ['x']
    """
    td = obj._td.to_tensordict(retain_none=retain_none)
    if retain_none:
        for name in obj._fields:
            if td._get_str(name) is None:
                td._set_str(name, NonTensorData(None, td._batch_size, td._device))
    return td
