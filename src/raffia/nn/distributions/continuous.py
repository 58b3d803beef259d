"""Distributions of real numbers: a normal one's location and scale out of a network, and `Delta`.

`mappings` are the functions that map what a network puts out to a positive scale, by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints
from torch.nn.functional import softplus

from raffia.nn.distributions.truncated import TruncatedNormal as TruncatedNormal
from raffia.tensordict.keys import nearest


class NormalParamExtractor(nn.Module):
    """Split the last dimension of a tensor in two: location, and scale through a positive mapping.

    scale_mapping: name of the mapping, see `mappings`.
    scale_lb: smallest scale.
    `forward(x, *others)` gives `(loc, scale, *others)`. With an odd size the location gets the
    middle element.

    >>> loc, scale = NormalParamExtractor()(torch.zeros(3, 4))
    >>> loc.shape, scale[0]
    (torch.Size([3, 2]), tensor([1., 1.]))
    """

    def __init__(self, scale_mapping: str = "biased_softplus_1.0", scale_lb: float = 1e-4) -> None:
        super().__init__()
        self.scale_mapping = mappings(scale_mapping)
        self.scale_lb = scale_lb

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Split the last dimension of the first tensor in two: loc, and scale after its map.

        tensors: [..., 2 n], then any others, which are passed on.
        Returns (loc [..., n], scale [..., n], *others).
        """
        if not tensors or tensors[0].shape[-1:] == (1,):
            found = list(tensors[0].shape) if tensors else "no tensor"
            raise ValueError(
                "NormalParamExtractor splits the last dimension in two, so it needs a tensor with "
                f"at least 2 elements there; got {found}. For a scale that does not depend on the "
                "input use AddStateIndependentNormalScale"
            )
        loc, scale = tensors[0].chunk(2, -1)
        return (loc, self.scale_mapping(scale).clamp_min(self.scale_lb), *tensors[1:])


class NormalParamWrapper(nn.Module):
    """Run a module and split its (first) output into the location and scale of a normal.

    operator: module whose first output has twice the size of the location in its last dimension.
    scale_mapping: name of the mapping, see `mappings`.
    scale_lb: smallest scale.
    Further outputs of the operator follow the scale.

    >>> from torch import nn
    >>> loc, scale = NormalParamWrapper(nn.Linear(3, 4))(torch.ones(5, 3))
    >>> loc.shape, scale.shape
    (torch.Size([5, 2]), torch.Size([5, 2]))
    """

    def __init__(
        self,
        operator: nn.Module,
        scale_mapping: str = "biased_softplus_1.0",
        scale_lb: float = 1e-4,
    ) -> None:
        super().__init__()
        self.operator = operator
        self.scale_mapping = scale_mapping
        self.scale_lb = scale_lb
        self._extract = NormalParamExtractor(scale_mapping, scale_lb)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Run the operator, and split its first output as `NormalParamExtractor` does."""
        output = self.operator(*args, **kwargs)
        return self._extract(*output) if isinstance(output, tuple) else self._extract(output)


class AddStateIndependentNormalScale(nn.Module):
    """Add to a location a scale that does not depend on the input, by default a learned one.

    scale_shape: shape of the scale, the last dimensions of the location; by default one number.
    scale_mapping: name of the mapping from `state_independent_scale` to the scale, see `mappings`.
    scale_lb: smallest scale.
    device: of the scale.
    make_param: False makes `state_independent_scale` a buffer.
    init_value: what it starts from, before the mapping.
    `forward(loc, *others)` gives `(loc, scale, *others)`.
    Raises RuntimeError where the last dimensions of the location are not `scale_shape`.

    >>> loc, scale = AddStateIndependentNormalScale(2)(torch.zeros(3, 2))
    >>> scale[0]
    tensor([1., 1.], grad_fn=<SelectBackward0>)
    """

    state_independent_scale: Tensor

    def __init__(
        self,
        scale_shape: torch.Size | int | tuple[int, ...] | None = None,
        *,
        scale_mapping: str = "exp",
        scale_lb: float = 1e-4,
        device: torch.device | str | None = None,
        make_param: bool = True,
        init_value: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = (scale_shape,) if isinstance(scale_shape, int) else scale_shape
        self.scale_lb = scale_lb
        self.scale_shape = torch.Size(sizes or ())
        self.scale_mapping = scale_mapping
        self._mapping = mappings(scale_mapping)
        scale = torch.full(self.scale_shape, float(init_value), device=device)
        if make_param:
            self.state_independent_scale = nn.Parameter(scale)
        else:
            self.register_buffer("state_independent_scale", scale)

    def forward(self, loc: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Add the scale, of the shape of `loc`: (loc, scale, *others)."""
        dims = len(self.scale_shape)
        if dims > loc.dim() or loc.shape[loc.dim() - dims :] != self.scale_shape:
            raise RuntimeError(
                f"Last dimensions of loc {list(loc.shape)} do not match scale_shape "
                f"{list(self.scale_shape)}; for one scale for all elements leave scale_shape out"
            )
        scale = self._mapping(self.state_independent_scale.expand_as(loc))
        return (loc, scale.clamp_min(self.scale_lb), *others)


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
        """This distribution with a larger batch shape."""
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
            f"{event_shape}; leave one of them out to infer it from param"
        )
    return batch, event


Mapping = Callable[[Tensor], Tensor]

_SMALLEST = 1e-6  # of exp(bias) - 1, so that a bias of 0 or less has an inverse too


def inv_softplus(bias: float | Tensor) -> float | Tensor:
    """The x with softplus(x) = bias: log(exp(bias) - 1), finite for bias <= 0 as well.

    >>> inv_softplus(torch.tensor([1.0, 2.0]))
    tensor([0.5413, 1.8546])
    """
    if not isinstance(bias, Tensor):
        return inv_softplus(torch.tensor(bias, dtype=torch.float64)).item()  # type: ignore[union-attr]
    # bias + log(1 - exp(-bias)) does not overflow; clamped are the biases whose exp(bias) - 1 is.
    bias = bias.clamp(min=math.log1p(_SMALLEST))
    return bias + torch.log(-torch.expm1(-bias))


class biased_softplus(nn.Module):  # noqa: N801 # the name users of tensordict know
    """A softplus that is `bias` at 0 and stays above `min_val`.

    bias: the output for an input of 0.
    min_val: lower bound of the output.
    The attribute `bias` is the number added to the input.

    >>> biased_softplus(2.0)(torch.tensor([-100.0, 0.0]))
    tensor([0.0100, 2.0000])
    """

    def __init__(self, bias: float, min_val: float = 0.01) -> None:
        super().__init__()
        self.bias = inv_softplus(bias - min_val)
        self.min_val = min_val

    def forward(self, x: Tensor) -> Tensor:
        """The scale for what the network gave."""
        return softplus(x + self.bias) + self.min_val


def expln(x: Tensor) -> Tensor:
    """exp(x) up to 0 and 1 + log(1 + x) above: positive, smooth and slow to grow.

    Source: Rueckstiess et al. (2008), State-Dependent Exploration for Policy Gradient Methods.

    >>> expln(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([0.3679, 1.0000, 1.6931])
    """
    # Each branch sees only its own side: where the other overflows, its gradient would be NaN.
    # Not by clamp, whose derivative at its bound depends on torch's version: here it is 1 at 0.
    is_above = x > 0
    above, below = torch.where(is_above, x, 0.0), torch.where(is_above, 0.0, x)
    return torch.where(is_above, 1 + torch.log1p(above), torch.exp(below))


def _identity(x: Tensor) -> Tensor:
    return x


_mappings: dict[str, Mapping] = {
    "softplus": softplus,
    "exp": torch.exp,
    "relu": torch.relu,
    "expln": expln,
    "none": _identity,
}


def mappings(key: str) -> Mapping:
    """The mapping function of this name.

    key: "softplus", "exp", "relu", "expln", "none" (the identity), "biased_softplus" (with bias
        1), "biased_softplus_{bias}", "biased_softplus_{bias}_{min_val}", or a name given to
        `add_custom_mapping`.
    Raises NotImplementedError for a name that is not known, and ValueError for a "biased_softplus"
    that is not followed by numbers.

    >>> mappings("biased_softplus_2.0_0.1")(torch.zeros(2))
    tensor([2., 2.])
    """
    if not isinstance(key, str):
        raise TypeError(f'a mapping must be given by name, such as "softplus"; got {key!r}')
    if key in _mappings:
        return _mappings[key]
    if key.startswith("biased_softplus"):
        return _biased(key)
    known = [*_mappings, "biased_softplus"]
    raise NotImplementedError(
        f"Unknown mapping {key}; the mappings are {sorted(known)}{nearest(key, known) or '.'} "
        "To add one: add_custom_mapping(name, function)"
    )


def _biased(key: str) -> biased_softplus:
    name, *numbers = key.split("_softplus")[1].split("_")
    if name or len(numbers) > 2:
        raise ValueError(
            f"Invalid number of args in {key}: write biased_softplus, biased_softplus_{{bias}} or "
            "biased_softplus_{bias}_{min_val}"
        )
    try:
        return biased_softplus(*map(float, numbers or ["1.0"]))
    except ValueError as error:
        raise ValueError(
            f'{error} in "{key}": write numbers, such as biased_softplus_1.0_0.01'
        ) from None


def add_custom_mapping(name: str, mapping: Mapping) -> None:
    """Register a function under a name known to `mappings`; a name that exists is replaced.

    name: the name.
    mapping: a function from a tensor to a tensor of the same shape.

    >>> add_custom_mapping("halved", lambda x: x / 2)
    >>> mappings("halved")(torch.ones(2))
    tensor([0.5000, 0.5000])
    """
    if not isinstance(name, str) or not callable(mapping):
        raise TypeError(
            "add_custom_mapping takes a name and a function, as in "
            f'add_custom_mapping("twice", lambda x: 2 * x); got {name!r} and {mapping!r}'
        )
    _mappings[name] = mapping
