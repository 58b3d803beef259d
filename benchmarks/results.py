"""What an operation returned, as plain data, so that two packages' results can be held together."""

from typing import Any

import numpy as np
from torch import Tensor


def plain(x: Any, path: str = "") -> dict[str, Any]:
    """Leaves by dotted path, tensors as arrays; batch sizes and `requires_grad` stand at `path@`.

    >>> plain({"a": {"b": 1}, "c": [2, 3]})
    {'a.b': 1, 'c.0': 2, 'c.1': 3}
    """
    if isinstance(x, Tensor):
        return {path: x.detach().as_subclass(Tensor).numpy(), f"{path}@grad": x.requires_grad}
    if isinstance(x, dict) or hasattr(x, "batch_size"):
        found = {} if isinstance(x, dict) else {f"{path}@batch_size": tuple(x.batch_size)}
        pairs = x.items()
    elif isinstance(x, list | tuple):
        found, pairs = {}, enumerate(x)
    else:
        return {path: x}
    for key, value in pairs:
        found |= plain(value, f"{path}.{key}" if path else str(key))
    return found


def difference(ours: dict[str, Any], other: dict[str, Any]) -> str | None:
    """The first difference between two plain results, in words; None where they agree.

    >>> difference({"a": 1}, {"a": 1}), difference({"a": 1}, {"b": 1})
    (None, "only one result has ['a', 'b']")
    """
    if ours.keys() != other.keys():
        return f"only one result has {sorted(ours.keys() ^ other.keys())[:3]}"
    for path, value in ours.items():
        if not same(value, other[path]):
            return f"at {path!r}: {in_a_line(value)} against {in_a_line(other[path])}"
    return None


def same(x: Any, y: Any) -> bool:
    if not isinstance(x, np.ndarray):
        return type(x) is type(y) and x == y
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    exact = x.dtype.kind in "biu"  # whole numbers: a large hash is near to the next one
    return bool((x == y).all()) if exact else np.allclose(x, y, equal_nan=True)


def in_a_line(x: Any) -> str:
    kind = f"{x.dtype}{list(x.shape)} " if isinstance(x, np.ndarray) else ""
    return kind + " ".join(str(x).split())[:40]


def bare(result: dict[str, Any]) -> dict[str, Any]:
    """A plain result without batch sizes, which dicts do not have."""
    return {path: x for path, x in result.items() if not path.endswith("@batch_size")}
