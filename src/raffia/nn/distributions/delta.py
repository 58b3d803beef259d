"""A distribution with all its mass on one value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints


class Delta(Distribution):
    """A distribution with all its mass on one value.

    param: the value, [*batch, *event].
    atol, rtol: `log_prob` takes a value for `param` if no element of the event is further from it
        than atol + rtol * |param|.
    batch_shape, event_shape: one of them is enough; with neither (or two empty ones) the last
        dimension of `param` is the event.
    `log_prob` is inf at `param` and -inf elsewhere. Draws are `param` itself, expanded.
    Raises ValueError where `param` does not fit the shapes.

    >>> dist = Delta(torch.tensor([1.0, 2.0]))
    >>> dist.sample((2,))
    tensor([[1., 2.],
            [1., 2.]])
    >>> dist.log_prob(torch.tensor([[1.0, 2.0], [1.0, 3.0]]))
    tensor([inf, -inf])
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        param: Tensor,
        atol: float = 1e-6,
        rtol: float = 1e-6,
        batch_shape: Sequence[int] | None = None,
        event_shape: Sequence[int] | None = None,
    ) -> None:
        self.atol, self.rtol = atol, rtol
        batch, event = _split(param.shape, batch_shape, event_shape)
        super().__init__(batch, event, validate_args=False)
        self.update(param)

    def update(self, param: Tensor) -> None:
        """Move the mass to `param`; the number of event dimensions stays."""
        batch_dims = max(param.dim() - len(self._event_shape), 0)
        self._batch_shape = param.shape[:batch_dims]
        self._event_shape = param.shape[batch_dims:]
        self.param = param

    def expand(self, batch_shape: Any, _instance: Any = None) -> Delta:
        """The same distribution with a larger batch shape."""
        new = self._get_checked_instance(Delta, _instance)
        shape = torch.Size(batch_shape)
        new.param = self.param.expand(shape + self._event_shape)
        new.atol, new.rtol = self.atol, self.rtol
        super(Delta, new).__init__(shape, self._event_shape, validate_args=False)
        return new

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> constraints.Constraint:
        """Every real event."""
        return constraints.independent(constraints.real, len(self._event_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """inf where `value` is `param`, -inf elsewhere, [*sample, *batch]."""
        dtype = torch.promote_types(self.param.dtype, value.dtype)
        if not dtype.is_floating_point:
            dtype = torch.get_default_dtype()
        value, param = torch.broadcast_tensors(value.to(dtype), self.param.to(dtype))
        # Equality comes first: the difference of two infinities is not a number.
        equal = (value == param) | ((value - param).abs() < self.atol + self.rtol * param.abs())
        if self._event_shape:
            equal = equal.flatten(-len(self._event_shape)).all(-1)
        certain = torch.full_like(equal, math.inf, dtype=dtype)
        return torch.where(equal, certain, -certain)

    def rsample(self, sample_shape: Sequence[int] | None = None) -> Tensor:
        """`param`, with its gradient, [*sample_shape, *batch, *event]."""
        return self.param.expand(torch.Size(sample_shape or ()) + self.param.shape)

    def sample(self, sample_shape: Sequence[int] | None = None) -> Tensor:
        """`param`, without its gradient, [*sample_shape, *batch, *event]."""
        return self.rsample(sample_shape).detach()

    @property
    def mean(self) -> Tensor:
        """`param`"""
        return self.param

    mode = deterministic_sample = mean

    @property
    def variance(self) -> Tensor:
        """Zeros, [*batch, *event]."""
        return torch.zeros_like(self.param)


def _split(
    shape: torch.Size, batch_shape: Sequence[int] | None, event_shape: Sequence[int] | None
) -> tuple[torch.Size, torch.Size]:
    """Batch and event shape of a parameter, of which either may be left out."""
    if not batch_shape and not event_shape:
        return shape[:-1], shape[-1:]
    if event_shape is None:
        batch_dims = len(batch_shape or ())
    else:
        batch_dims = max(len(shape) - len(event_shape), 0)
    batch, event = shape[:batch_dims], shape[batch_dims:]
    fits = batch == torch.Size(batch if batch_shape is None else batch_shape)
    if not (fits and event == torch.Size(event if event_shape is None else event_shape)):
        raise ValueError(
            f"param of shape {list(shape)} is not batch_shape {batch_shape} + event_shape "
            f"{event_shape}; leave one of them out to have it read off param"
        )
    return batch, event
