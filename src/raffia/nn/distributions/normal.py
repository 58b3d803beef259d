"""Modules that make the location and scale of a normal distribution out of network outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from raffia.nn.distributions.mappings import mappings


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

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
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

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
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

    def forward(self, loc: Tensor, *others: Any) -> tuple[Any, ...]:
        """Add the scale, of the shape of `loc`: (loc, scale, *others)."""
        dims = len(self.scale_shape)
        if dims > loc.dim() or loc.shape[loc.dim() - dims :] != self.scale_shape:
            raise RuntimeError(
                f"Last dimensions of loc {list(loc.shape)} do not match scale_shape "
                f"{list(self.scale_shape)}; for one scale for all elements leave scale_shape out"
            )
        scale = self._mapping(self.state_independent_scale.expand_as(loc))
        return (loc, scale.clamp_min(self.scale_lb), *others)
