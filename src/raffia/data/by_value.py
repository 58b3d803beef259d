"""What is sent to another process as a copy: nothing is shared with it afterwards.

Tensors that torch.multiprocessing sends are shared memory; a buffer's rows would then change under
the other process, whose state would not tell.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Bytes(NamedTuple):
    """A tensor by value."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device
    content: np.ndarray  # uint8


class State(NamedTuple):
    """A generator by value."""

    device: torch.device
    content: Bytes


def by_value(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of an object with its tensors and generators as bytes, also in lists.

    >>> from raffia.data.by_value import by_value, from_value
    >>> from_value(by_value({"x": torch.tensor([1, 2]), "n": 3}))
    {'x': tensor([1, 2]), 'n': 3}
    """
    return {name: _packed(value) for name, value in fields.items()}


def from_value(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that `by_value` was given."""
    return {name: _unpacked(value) for name, value in fields.items()}


def _packed(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return State(value.device, _packed(value.get_state()))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_packed(part) for part in value])
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return Bytes(value.dtype, tuple(value.shape), value.device, flat.numpy().copy())
    return [_packed(part) for part in value] if type(value) is list else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, State):
        return torch.Generator(value.device).set_state(_unpacked(value.content))
    if isinstance(value, Bytes):
        if not len(value.content):
            return torch.empty(value.shape, dtype=value.dtype, device=value.device)
        flat = torch.from_numpy(value.content.copy()).view(value.dtype)
        return flat.view(value.shape).to(value.device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_unpacked(part) for part in value])
    return [_unpacked(part) for part in value] if type(value) is list else value
