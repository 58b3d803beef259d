"""Parameters of lazy layers that have not run yet, for several modules together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import _add_batch_dim, get_unwrapped, maybe_get_bdim, maybe_get_level
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

_SIZES = [Tensor.dim, Tensor.size]
_ALLOWED: Any = vars(torch.nn.parameter)["UninitializedTensorMixin"]._allowed_methods


class _Batched:
    """The shared base: until a layer runs, an empty tensor with one row for each module."""

    _allowed_methods = [*_ALLOWED, *_SIZES]

    def materialize(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        """Turn this into a tensor with rows of the given shape."""
        rows = self.size(0)
        super().materialize((rows, *shape), device, dtype)  # type: ignore[misc]

    @property
    def shape(self: Any) -> torch.Size:
        return self.size()

    def __reduce_ex__(self: Any, proto: Any) -> Any:
        return _made, (type(self), self.size(0), self.requires_grad, self.dtype, self.device)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        make, args = self.__reduce_ex__(2)
        memo[id(self)] = new = make(*args)
        return new


class BatchedUninitializedParameter(_Batched, UninitializedParameter):  # type: ignore[override]
    """The parameter of a lazy layer, for several modules."""


class BatchedUninitializedBuffer(_Batched, UninitializedBuffer):  # type: ignore[override]
    """The buffer of a lazy layer, for several modules."""


def _made(kind: Any, rows: int, requires_grad: bool, dtype: Any, device: Any) -> Any:
    data = torch.empty(rows, 0, dtype=dtype, device=device)
    return torch.Tensor._make_subclass(kind, data, requires_grad)


def uninitialised_rows(first: Tensor, rows: int) -> Tensor:
    """One uninitialised tensor with `rows` rows, each like `first`.

    >>> layer = nn.LazyLinear(2)
    >>> type(uninitialised_rows(layer.weight, 3)).__name__
    'BatchedUninitializedParameter'
    """
    is_parameter = isinstance(first, UninitializedParameter)
    kind = BatchedUninitializedParameter if is_parameter else BatchedUninitializedBuffer
    return _made(kind, rows, first.requires_grad, first.dtype, first.device)


def is_uninitialised_row(value: Tensor) -> bool:
    """Whether `torch.vmap` shows a row of an uninitialised tensor by `value`."""
    return isinstance(get_unwrapped(value), _Batched)


class Initialises:
    """The hook by which a lazy layer, called with a row of such tensors, initialises all rows.

    It runs once, before the layer's own, outside of `torch.vmap`: each row is drawn by itself, as
    the layer alone would draw it. Then the layer computes with the row it was given.
    """

    def __init__(self, rows: dict[str, tuple[Any, Any, int]]) -> None:
        self.rows = rows  # name -> the tensor of all rows, the dimension, the level of vmap
        self.handle: Any = None

    def __call__(self, layer: Any, args: Any, kwargs: Any) -> None:
        self.handle.remove()
        stores = {name: _store(layer, name) for name in self.rows}
        with temporarily_clear_interpreter_stack():
            if any([isinstance(whole, _Batched) for whole, _, _ in self.rows.values()]):
                layer.initialize_parameters(*args, **kwargs)
                for i in range(min(len(whole) for whole, _, _ in self.rows.values())):
                    for name, (whole, _, _) in self.rows.items():
                        row = whole.detach()[i]
                        is_parameter = isinstance(whole, nn.Parameter)
                        stores[name][name] = nn.Parameter(row) if is_parameter else row
                    layer.reset_parameters()
        for name, (whole, dim, level) in self.rows.items():
            stores[name][name] = _add_batch_dim(whole, dim, level)


def _store(layer: Any, name: str) -> dict[str, Any]:
    """The dict in which a layer has a parameter or buffer."""
    store: dict[str, Any] = layer._parameters if name in layer._parameters else layer._buffers
    return store


def wait_for_input(layer: Any, rows: dict[str, Tensor]) -> Initialises:
    """Make a lazy layer initialise the tensors of all rows when it is called; returns the hook.

    rows: what was put into the layer that is a row of a tensor, by name.
    """
    found = {
        name: (get_unwrapped(row), maybe_get_bdim(row), maybe_get_level(row))
        for name, row in rows.items()
    }
    for name, (whole, _, _) in found.items():
        _store(layer, name)[name] = whole
    hook = Initialises(found)
    hook.handle = layer.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    return hook
