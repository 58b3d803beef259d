"""Functions on containers: counterparts of the methods, and tests of what an object is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from raffia.tensordict import disk, shape
from raffia.tensordict.build import SizeOptions
from raffia.tensordict.lazy import LazyStackedTensorDict
from raffia.tensordict.node import BatchSize, Container, Device, Node
from raffia.tensordict.params import TensorDictParams
from raffia.tensordict.pointwise import key_mismatch
from raffia.tensordict.signatures import by_method, shows_options_of
from raffia.tensordict.tensorclass import from_dataclass as to_class
from raffia.tensordict.tensordict import TensorDict
from raffia.tensordict.views import entries_list

Rows = TypeVar("Rows", Tensor, Any)  # a tensor or a container

# The class methods of `TensorDict` that are functions too.
from_modules = TensorDict.from_modules
from_any = TensorDict.from_any
from_pytree = TensorDict.from_pytree
from_namedtuple = TensorDict.from_namedtuple
from_tuple = TensorDict.from_tuple
from_struct_array = TensorDict.from_struct_array
from_json = TensorDict.from_json
from_consolidated = TensorDict.from_consolidated
fromkeys = TensorDict.fromkeys
load_memmap = TensorDict.load_memmap
load = TensorDict.load

# Methods that are functions too, of any container.
memmap = by_method(disk.memmap, __name__)
save = by_method(disk.save, __name__)
pad = by_method(shape.pad, __name__)


def is_tensor_collection(datatype: Any) -> bool:
    """Whether an object or class is a container.

    >>> is_tensor_collection(TensorDict()), is_tensor_collection(torch.zeros(2))
    (True, False)
    """
    kind = datatype if isinstance(datatype, type) else type(datatype)
    return issubclass(kind, Node) and not issubclass(kind, Tensor)


def is_non_tensor(data: Any) -> bool:
    """Whether an object is the node of a non-tensor entry.

    >>> from raffia import NonTensorData
    >>> is_non_tensor(NonTensorData("text")), is_non_tensor(TensorDict())
    (True, False)
    """
    return isinstance(data, Node) and data._is_data() and not isinstance(data, Tensor)


@overload
def from_module(
    module: nn.Module,
    as_module: Literal[False] = False,
    lock: bool = True,
    use_state_dict: bool = False,
    filter_empty: bool = True,
) -> TensorDict: ...
@overload
def from_module(
    module: nn.Module,
    as_module: Literal[True],
    lock: bool = True,
    use_state_dict: bool = False,
    filter_empty: bool = True,
) -> TensorDictParams: ...
def from_module(
    module: nn.Module,
    as_module: bool = False,
    lock: bool = True,
    use_state_dict: bool = False,
    filter_empty: bool = True,
) -> TensorDict | TensorDictParams:
    """`TensorDict.from_module`, locked.

    >>> from_module(nn.Linear(2, 3)).is_locked
    True
    """
    return TensorDict.from_module(module, as_module, lock, use_state_dict, filter_empty)


@shows_options_of(TensorDict.from_dict)
def from_dict(d: Mapping[Any, Any], **options: Any) -> TensorDict:
    """`TensorDict.from_dict`.

    >>> from_dict({"a": torch.zeros(2, 3)}, batch_size=[2]).batch_size
    torch.Size([2])
    """
    return TensorDict.from_dict(d, **options)


@shows_options_of(TensorDict.from_dataclass, without="as_tensorclass")
def from_dataclass(
    obj: Any,
    *,
    dest_cls: Any = None,
    frozen: bool = False,
    autocast: bool = False,
    nocast: bool = False,
    shadow: bool = False,
    tensor_only: bool = False,
    **options: Unpack[SizeOptions],
) -> Any:
    """A tensorclass from a dataclass, or a tensorclass instance from an instance of one.

    dest_cls: the tensorclass to use.
    frozen, autocast, nocast, shadow, tensor_only: the options of the tensorclass that is made.

    >>> import dataclasses
    >>> @dataclasses.dataclass
    ... class Point:
    ...     x: torch.Tensor
    >>> from_dataclass(Point(torch.zeros(2))).x
    tensor([0., 0.])
    """
    flags = dict(
        frozen=frozen, autocast=autocast, nocast=nocast, shadow=shadow, tensor_only=tensor_only
    )
    chosen = {name: True for name, on in flags.items() if on}
    if chosen and dest_cls is not None:
        raise ValueError(
            f"from_dataclass: dest_cls has its options already, so {sorted(chosen)} cannot be "
            "passed too"
        )
    if dest_cls is None and chosen:
        dest_cls = to_class(obj, **chosen)
    return TensorDict.from_dataclass(obj, as_tensorclass=True, dest_cls=dest_cls, **options)


def make_tensordict(
    input_dict: Mapping[Any, Any] | None = None,
    batch_size: BatchSize = None,
    device: Device = None,
    auto_batch_size: bool | None = None,
    **entries: Any,
) -> TensorDict:
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


def merge_tensordicts(*tensordicts: Container, callback_exist: Any = None) -> Container:
    """One container with the entries of all (same tensors); the first that has an entry wins.

    callback_exist: `callback_exist(*values)` decides instead, for tensors that all have; a dict of
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
    out = tensordicts[0].copy()
    for td in (*tensordicts[1:], *reversed(tensordicts[:-1])):  # all keys in order, then the values
        out.update(td)
    for key in list(out.keys(True, True)) if callback_exist is not None else []:
        found = [td.get(key) for td in tensordicts if key in td]
        if isinstance(callback_exist, Mapping):
            decide = callback_exist.get(key)
        else:
            decide = callback_exist
        tensors = [value for value in found if isinstance(value, Tensor)]
        if len(tensors) == len(tensordicts) and decide is not None:
            out.set(key, decide(*tensors))
    return out


def expand_right(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A view of a tensor with this shape: dimensions are added at its end, and expanded.

    Raises RuntimeError if the leading dimensions differ and are not 1.

    >>> expand_right(torch.arange(2), (2, 3)).tolist()
    [[0, 0, 0], [1, 1, 1]]
    """
    extra = len(shape) - tensor.dim()
    if extra < 0:
        raise RuntimeError(
            f"expand_right: the tensor has {tensor.dim()} dimensions, more than the shape "
            f"{tuple(shape)}"
        )
    return tensor.reshape(tensor.shape + (1,) * extra).expand(tuple(shape))


def expand_as_right(tensor: Rows, dest: Any) -> Rows:
    """A view of a tensor or container with the shape of `dest`: dimensions are added at its end.

    dest: a tensor or a container, of which the batch size counts.
    Raises RuntimeError if the leading dimensions differ and are not 1.

    >>> expand_as_right(torch.ones(2), torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """
    shape = dest.shape
    if isinstance(tensor, Tensor):
        return expand_right(tensor, shape)
    extra = len(shape) - tensor.batch_dims
    if extra < 0:
        raise RuntimeError(
            f"expand_as_right: the container has the batch size {tuple(tensor.batch_size)}, "
            f"which is longer than the shape {tuple(shape)}"
        )
    for _ in range(extra):
        tensor = tensor.unsqueeze(-1)
    return tensor.expand(shape)


def is_bool(*args: Any) -> bool:
    """Whether the last argument is a tensor of truth values; also usable as `cast_filter`.

    >>> is_bool(torch.zeros(2)), is_bool(("key",), torch.tensor([True]))
    (False, True)
    """
    return _dtype(args) is torch.bool


def is_floating(*args: Any) -> bool:
    """Whether the last argument is a real floating point tensor; also usable as `cast_filter`.

    >>> is_floating(torch.zeros(2)), is_floating(("key",), torch.tensor([1]))
    (True, False)
    """
    dtype = _dtype(args)
    return dtype is not None and dtype.is_floating_point


def is_inexact(*args: Any) -> bool:
    """Whether the last argument is a floating point or complex tensor; also usable as
    `cast_filter`.

    >>> TensorDict(x=torch.ones(1), i=torch.tensor([1])).half(cast_filter=is_inexact)["i"].dtype
    torch.int64
    """
    dtype = _dtype(args)
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex)


def is_integer(*args: Any) -> bool:
    """Whether the last argument is a tensor of whole numbers; also usable as `cast_filter`.

    >>> is_integer(torch.tensor([1])), is_integer(torch.tensor([True]))
    (True, False)
    """
    dtype = _dtype(args)
    exact = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    return exact and dtype is not torch.bool


def _dtype(args: tuple[Any, ...]) -> torch.dtype | None:
    return args[-1].dtype if isinstance(args[-1], Tensor) else None


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
        if theirs is not None:  # member by member, as their shapes may differ
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
        raise key_mismatch(
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


assert_allclose_td = assert_close
