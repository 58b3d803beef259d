"""State dicts of a container."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import Tensor

from raffia.tensordict import kinds
from raffia.tensordict.entries import get, holder, non_tensor_items
from raffia.tensordict.keys import dotted, unravel_key_to_tuple
from raffia.tensordict.node import Container, Node
from raffia.tensordict.updates import written_at_once
from raffia.tensordict.values import flat as flat_values


class StateDictError(RuntimeError, KeyError):
    """The keys of a state dict are not those of the container that loads it.

    >>> from raffia import TensorDict
    >>> TensorDict(a=1).load_state_dict({"b": torch.zeros(())})
    Traceback (most recent call last):
    ...
    raffia.tensordict.state_dicts.StateDictError: the keys of the state dict and of this
    container do not match: missing keys ['a'], unexpected keys ['b']; strict=False loads the keys
    that match
    """

    __str__ = Exception.__str__


def state_dict(
    td: Any,
    destination: Any = None,
    prefix: str = "",
    keep_vars: bool = False,
    flatten: bool = True,
) -> collections.OrderedDict[str, Any]:
    """An ordered dict of all tensors, for `load_state_dict`.

    Its attribute `_metadata` holds the batch sizes, and the values of non-tensor entries.

    destination: dict to write into; prefix: what the keys begin with.
    keep_vars: do not detach the tensors.
    flatten: names of nested keys joined by "."; else nested dicts.
    Raises KeyError if the joined names of two entries are the same.

    >>> from raffia import TensorDict
    >>> list(TensorDict(a=dict(b=1)).state_dict())
    ['a.b']
    """
    out: Any = collections.OrderedDict()
    out._metadata = {}
    _write_state(td, out, prefix, keep_vars, flatten)
    if destination is None:
        return out
    if not hasattr(destination, "_metadata"):
        destination._metadata = {}
    destination.update(out)
    destination._metadata.update(out._metadata)
    return destination


def _write_state(td: Any, out: Any, prefix: str, keep_vars: bool, flatten: bool) -> None:
    wrapped = getattr(td, "_td", td)  # of a tensorclass
    if wrapped.__class__ is not td._plain and hasattr(wrapped, "tensordicts"):
        wrapped._all_shared("state_dict")
    out._metadata[prefix.rstrip(".")] = {"batch_size": tuple(td._batch_size)}
    for name, value in td._entries().items():
        if value.__class__ is not Tensor and isinstance(value, Node):
            if flatten and not value._is_data():
                _write_state(value, out, f"{prefix}{name}.", keep_vars, flatten)
                continue
        full = prefix + name
        if full in out:
            raise KeyError(
                f"two entries would be named {full!r} in the state dict; "
                "flatten=False gives nested dicts, in which they stay apart"
            )
        if isinstance(value, Tensor):
            out[full] = value if keep_vars else value.detach()
        elif value._is_data():
            out._metadata[full] = _data_state(value)
        else:
            out[full] = value.state_dict(None, "", keep_vars, False)


def _data_state(node: Any) -> dict[str, Any]:
    """A non-tensor entry in the metadata of a state dict: one value, or one for each row."""
    size = tuple(node._batch_size)
    if not hasattr(node, "tensordicts"):
        return {"batch_size": size, "data": node._data}
    return {"batch_size": size, "rows": flat_values(node.tolist(), len(size))}


def load_state_dict(
    td: Container,
    state_dict: Any,
    strict: bool = True,
    assign: bool = False,
    from_flatten: bool | None = None,
) -> Container:
    """Load the tensors of a `state_dict`, and the non-tensor values of its metadata.

    strict: RuntimeError if the keys of its tensors are not those of this container; False adds
        those that are new. Values that are not tensors are added in either case.
    assign: take its tensors themselves, instead of writing into these.
    from_flatten: whether it has flat keys; found out if not given.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.zeros(2)).load_state_dict(TensorDict(a=torch.ones(2)).state_dict())["a"]
    tensor([1., 1.])
    """
    flat: dict[str, Any] = {}
    data: dict[str, Any] = {}
    flat_state(state_dict, from_flatten, "", flat, data)
    mine = {dotted(key): key for key in td.keys(True, True)}
    mine_data = {dotted(key): key for key, _ in non_tensor_items(td, True)}
    if strict and flat.keys() != mine.keys():
        raise StateDictError(
            "the keys of the state dict and of this container do not match: missing keys "
            f"{sorted(mine.keys() - flat.keys())}, unexpected keys "
            f"{sorted(flat.keys() - mine.keys())}; strict=False loads the keys that match"
        )
    size = getattr(state_dict, "_metadata", {}).get("", {}).get("batch_size")
    if not assign and flat.keys() == mine.keys() and _written_at_once(td, mine, flat):
        flat = {}
    for name, value in flat.items():
        key = mine.get(name, tuple(name.split(".")))
        old = td.get(key) if name in mine else None
        if old is None or assign:
            td.set(key, value)
        elif old.shape != value.shape:
            raise RuntimeError(
                f"entry {key!r} has shape {tuple(old.shape)}, but in the state dict "
                f"{tuple(value.shape)}; assign=True replaces it"
            )
        else:
            td.set_(key, value)
    if size is not None and not mine:
        td._set_batch_size(torch.Size(size))
    for name, saved in data.items():
        _load_data(td, mine_data.get(name, tuple(name.split("."))), saved)
    return td


def _written_at_once(td: Any, keys: dict[str, Any], flat: dict[str, Any]) -> bool:
    """Write the tensors of a state dict into those with these keys; False if one does not fit."""
    source: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = unravel_key_to_tuple(keys[name])
        level = source
        for step in path:
            level = level.setdefault(step, {})
        level[last] = value
    return written_at_once(td, source)


def _load_data(td: Any, key: Any, saved: dict[str, Any]) -> None:
    """Store a non-tensor value of a state dict; as for tensors, also where it is locked."""
    size = torch.Size(saved["batch_size"])
    value = (
        kinds.NonTensorData(saved["data"], size)
        if "data" in saved
        else kinds.shaped([kinds.NonTensorData(row) for row in saved["rows"]], size)
    )
    old = get(td, key)
    if old is None:
        td.set(key, value)
        return
    node, name = holder(td, key)
    ndim = len(node._batch_size)
    if size[:ndim] != node._batch_size:
        if "rows" in saved:
            raise RuntimeError(
                f"the values of entry {key!r} in the state dict have the batch size "
                f"{tuple(size)}, but the container has {tuple(node._batch_size)}"
            )
        value = value.empty_like(old._batch_size)
    if node._device is not None:
        value._set_device(node._device)
    node._replace_str(name, value)


def flat_state(
    state: Any,
    from_flatten: bool | None,
    prefix: str,
    flat: dict[str, Any],
    data: dict[str, Any],
) -> None:
    """The tensors of a state dict by flat name, and the other values, from its metadata."""
    for name, saved in getattr(state, "_metadata", {}).items():
        if "data" in saved or "rows" in saved:
            data[prefix + name] = saved
    for name, value in state.items():
        if isinstance(value, dict) and from_flatten is not True:
            flat_state(value, from_flatten, prefix + name + ".", flat, data)
        else:
            flat[prefix + name] = value
