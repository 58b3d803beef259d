"""The functions of the container: its methods that other things have too, and tests for kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raffia.tensordict.entries import entries_list
from raffia.tensordict.keys import NestedKey
from raffia.tensordict.lazy import LazyStackedTensorDict
from raffia.tensordict.node import Node
from raffia.tensordict.pointwise import unlike
from raffia.tensordict.tensordict import TensorDict


def is_tensor_collection(obj: Any) -> bool:
    """Whether an object or class is a container.

    >>> is_tensor_collection(TensorDict()), is_tensor_collection(torch.zeros(2))
    (True, False)
    """
    return issubclass(obj, Node) if isinstance(obj, type) else isinstance(obj, Node)


def is_non_tensor(obj: Any) -> bool:
    """Whether an object is the node of a non-tensor entry.

    >>> from raffia import NonTensorData
    >>> is_non_tensor(NonTensorData("text")), is_non_tensor(TensorDict())
    (True, False)
    """
    return isinstance(obj, Node) and obj._is_data()


def from_module(
    module: nn.Module,
    as_module: bool = False,
    lock: bool = True,
    use_state_dict: bool = False,
    filter_empty: bool = True,
) -> Any:
    """`TensorDict.from_module`, locked.

    >>> from_module(nn.Linear(2, 3)).is_locked
    True
    """
    return TensorDict.from_module(
        module,
        as_module=as_module,
        lock=lock,
        use_state_dict=use_state_dict,
        filter_empty=filter_empty,
    )


def from_modules(
    *modules: nn.Module,
    as_module: bool = False,
    lock: bool = True,
    use_state_dict: bool = False,
    lazy_stack: bool = False,
    expand_identical: bool = False,
) -> Any:
    """`TensorDict.from_modules`.

    >>> from_modules(nn.Linear(2, 3), nn.Linear(2, 3))["weight"].shape
    torch.Size([2, 3, 2])
    """
    return TensorDict.from_modules(
        *modules,
        as_module=as_module,
        lock=lock,
        use_state_dict=use_state_dict,
        lazy_stack=lazy_stack,
        expand_identical=expand_identical,
    )


def from_dict(input_dict: Mapping[Any, Any], **options: Any) -> Any:
    """`TensorDict.from_dict`.

    >>> from_dict({"a": torch.zeros(2, 3)}, batch_size=[2]).batch_size
    torch.Size([2])
    """
    return TensorDict.from_dict(input_dict, **options)


def from_any(obj: Any, **options: Any) -> Any:
    """`TensorDict.from_any`.

    >>> from_any({"a": {"b": 1}}).to_dict()
    {'a': {'b': tensor(1)}}
    """
    return TensorDict.from_any(obj, **options)


def from_pytree(pytree: Any, **options: Any) -> Any:
    """`TensorDict.from_pytree`.

    >>> from_pytree([torch.zeros(2)]).to_dict()
    {'0': tensor([0., 0.])}
    """
    return TensorDict.from_pytree(pytree, **options)


def from_namedtuple(named_tuple: Any, **options: Any) -> Any:
    """`TensorDict.from_namedtuple`.

    >>> from collections import namedtuple
    >>> from_namedtuple(namedtuple("Point", "x")(torch.zeros(2))).to_dict()
    {'x': tensor([0., 0.])}
    """
    return TensorDict.from_namedtuple(named_tuple, **options)


def from_tuple(obj: tuple[Any, ...], **options: Any) -> Any:
    """`TensorDict.from_tuple`.

    >>> from_tuple((torch.zeros(2),)).to_dict()
    {'0': tensor([0., 0.])}
    """
    return TensorDict.from_tuple(obj, **options)


def from_struct_array(struct_array: Any, **options: Any) -> Any:
    """`TensorDict.from_struct_array`.

    >>> import numpy as np
    >>> from_struct_array(np.zeros(2, dtype=[("a", "f4")])).batch_size
    torch.Size([2])
    """
    return TensorDict.from_struct_array(struct_array, **options)


def from_dataclass(obj: Any, **options: Any) -> Any:
    """A tensorclass from a dataclass, or a tensorclass instance from an instance of one.

    >>> import dataclasses
    >>> @dataclasses.dataclass
    ... class Point:
    ...     x: torch.Tensor
    >>> from_dataclass(Point(torch.zeros(2))).x
    tensor([0., 0.])
    """
    return TensorDict.from_dataclass(obj, as_tensorclass=True, **options)


def fromkeys(keys: Sequence[NestedKey], value: Any = 0) -> Any:
    """`TensorDict.fromkeys`.

    >>> fromkeys(["a", "b"]).to_dict()
    {'a': tensor(0), 'b': tensor(0)}
    """
    return TensorDict.fromkeys(keys, value)


def make_tensordict(
    input_dict: Mapping[Any, Any] | None = None,
    batch_size: Any = None,
    device: Any = None,
    auto_batch_size: bool | None = None,
    **entries: Any,
) -> Any:
    """A container from a dict and from keywords; the dict wins where both have an entry.

    auto_batch_size: take as batch size the longest leading dimensions that all entries share.

    >>> make_tensordict(a=torch.zeros(2, 3), b=torch.zeros(2), auto_batch_size=True).batch_size
    torch.Size([2])
    """
    return TensorDict.from_dict(
        {**entries, **(input_dict or {})},
        batch_size=batch_size,
        device=device,
        auto_batch_size=auto_batch_size,
    )


def merge_tensordicts(*tensordicts: Any, callback_exist: Any = None) -> Any:
    """One container with the entries of all (same tensors); the first that has an entry wins.

    callback_exist: `callback_exist(*values)` decides instead, for keys that several have; a dict of
        such functions decides for its keys.

    >>> one, two = TensorDict(a=1), TensorDict(a=2, b=3)
    >>> merge_tensordicts(one, two).to_dict()
    {'a': tensor(1), 'b': tensor(3)}
    >>> merge_tensordicts(one, two, callback_exist=lambda *values: sum(values)).to_dict()
    {'a': tensor(3), 'b': tensor(3)}
    """
    if len(tensordicts) < 2:
        raise RuntimeError(
            f"merge_tensordicts needs at least two containers, got {len(tensordicts)}"
        )
    out = tensordicts[-1].copy()
    for td in reversed(tensordicts[:-1]):
        out.update(td)
    for key in list(out.keys(True, True)) if callback_exist is not None else []:
        found = [td.get(key) for td in tensordicts if key in td]
        if isinstance(callback_exist, Mapping):
            decide = callback_exist.get(key)
        else:
            decide = callback_exist
        if len(found) > 1 and decide is not None:
            out.set(key, decide(*found))
    return out


def pad(tensordict: Any, pad_size: Sequence[int], value: float = 0.0, inplace: bool = False) -> Any:
    """A container whose batch dimensions are longer; see `TensorDict.pad`.

    >>> pad(TensorDict(a=torch.ones(2), batch_size=[2]), [0, 1])["a"]
    tensor([1., 1., 0.])
    """
    return tensordict.pad(pad_size, value, inplace)


def memmap(tensordict: Any, prefix: str | Path | None = None, **options: Any) -> Any:
    """`TensorDict.memmap` of a container.

    >>> memmap(TensorDict(a=torch.zeros(2))).is_memmap()
    True
    """
    return tensordict.memmap(prefix, **options)


def from_consolidated(filename: str | Path) -> Any:
    """`TensorDict.from_consolidated`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = TensorDict(a=[1, 2]).consolidate(f"{folder}/td")
    ...     from_consolidated(f"{folder}/td")["a"].tolist()
    [1, 2]
    """
    return TensorDict.from_consolidated(filename)


def load_memmap(prefix: str | Path, **options: Any) -> Any:
    """`TensorDict.load_memmap`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = TensorDict(a=torch.ones(2)).memmap(folder)
    ...     load_memmap(folder)["a"].tolist()
    [1.0, 1.0]
    """
    return TensorDict.load_memmap(prefix, **options)


def save(tensordict: Any, prefix: str | Path, **options: Any) -> Any:
    """`TensorDict.save` of a container.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save(TensorDict(a=torch.ones(2)), folder + "/td.safetensors")
    ...     load(folder + "/td.safetensors")["a"]
    tensor([1., 1.])
    """
    return tensordict.save(prefix, **options)


def load(prefix: str | Path, **options: Any) -> Any:
    """`TensorDict.load`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save(TensorDict(a=torch.ones(2)), folder)
    ...     load(folder)["a"].tolist()
    [1.0, 1.0]
    """
    return TensorDict.load(prefix, **options)


def assert_close(
    actual: Any,
    expected: Any,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = True,
    intersection: bool = False,
    msg: str = "",
) -> bool:
    """Raise AssertionError, naming the entry, unless both have the same keys and close values.

    rtol, atol: tolerances of `torch.testing.assert_close`.
    intersection: compare the entries that both have.

    >>> assert_close(TensorDict(a=1.0), TensorDict(a=1.0 + 1e-9))
    True
    """
    if not isinstance(actual, Node) or not isinstance(expected, Node):
        raise TypeError(
            "assert_close compares two containers (TensorDict ...), "
            f"got {type(actual).__name__} and {type(expected).__name__}"
        )
    if isinstance(actual, LazyStackedTensorDict) and isinstance(expected, LazyStackedTensorDict):
        theirs = actual._split(expected)
        if theirs is not None:  # member by member, as their shapes may be unlike
            for a, b in zip(actual.tensordicts, theirs, strict=True):
                assert_close(a, b, rtol, atol, equal_nan, intersection, msg)
            return True
    for is_leaf in (_tensor_or_stack, None):  # lazy stacks below one by one, if both have them
        left = dict(entries_list(actual, True, True, is_leaf, False))
        right = dict(entries_list(expected, True, True, is_leaf, False))
        if left.keys() == right.keys():
            break
    if intersection:
        left = {key: value for key, value in left.items() if key in right}
    elif left.keys() != right.keys():
        raise unlike(
            {str(k): v for k, v in left.items()},
            {str(k): v for k, v in right.items()},
        )
    for key, value in left.items():
        if isinstance(value, Node) and isinstance(right[key], Node):
            assert_close(value, right[key], rtol, atol, equal_nan, intersection, msg)
            continue
        torch.testing.assert_close(
            value,
            right[key],
            rtol=rtol,
            atol=atol,
            equal_nan=equal_nan,
            msg=lambda text, key=key: f"entry {key!r}: {text} {msg}".rstrip(),  # type: ignore[misc]
        )
    return True


def _tensor_or_stack(cls: type) -> bool:
    return issubclass(cls, Tensor) or cls is LazyStackedTensorDict


def assert_allclose_td(actual: Any, expected: Any, **options: Any) -> bool:
    """Another name of `assert_close`.

    >>> assert_allclose_td(TensorDict(a=1.0), TensorDict(a=1.0))
    True
    """
    return assert_close(actual, expected, **options)
