"""Normal actions within bounds, as soft actor-critic draws them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
    constraints,
)

from raffia.functional.trees import is_traced


class TanhNormal(TransformedDistribution):
    """A normal distribution of independent numbers, each squashed by tanh into its bounds.

        y = low + (tanh(x) + 1) / 2 (high - low),  x ~ Normal(loc, scale)

    loc, scale: [*batch, D], before the tanh; the last dimension is the event.
    low, high: the bounds, of all numbers or [D].
    `log_prob` of a value at a bound, where tanh has rounded, is that of the nearest one within,
    unless it was drawn last: then what it was drawn from is known.
    Source: Haarnoja, Zhou, Abbeel & Levine (2018), "Soft Actor-Critic", appendix C.

    >>> dist = TanhNormal(torch.zeros(4, 2), torch.ones(4, 2), low=-2.0, high=2.0)
    >>> action = dist.rsample()
    >>> bool(action.abs().max() <= 2), dist.log_prob(action).shape
    (True, torch.Size([4]))
    >>> dist.deterministic_sample[0]
    tensor([0., 0.])
    """

    arg_constraints = {
        "loc": constraints.real_vector,
        "scale": constraints.independent(constraints.positive, 1),
    }
    base_dist: Any

    def __init__(
        self,
        loc: Tensor,
        scale: Tensor,
        low: Tensor | float = -1.0,
        high: Tensor | float = 1.0,
        validate_args: bool | None = None,
    ) -> None:
        low, high = torch.as_tensor(low), torch.as_tensor(high)
        if not is_traced() and not bool(((low < high) & (high - low).isfinite()).all()):
            raise ValueError(
                f"low={low.tolist()} must be below high={high.tolist()}, and both be finite"
            )
        low, high = low.to(loc), high.to(loc)
        base = Independent(Normal(loc, scale, validate_args=validate_args), 1)
        within = AffineTransform((low + high) / 2, (high - low) / 2, cache_size=1)
        super().__init__(base, [_Tanh(cache_size=1), within], validate_args=validate_args)

    @property
    def loc(self) -> Tensor:
        """The means before the tanh, [*batch, D]."""
        return self.base_dist.base_dist.loc

    @property
    def scale(self) -> Tensor:
        """The standard deviations before the tanh, [*batch, D]."""
        return self.base_dist.base_dist.scale

    @property
    def deterministic_sample(self) -> Tensor:
        """The median of each number, [*batch, D]."""
        out = self.loc
        for transform in self.transforms:
            out = transform._call(out)  # whose cache is of the last draw
        return out

    def expand(self, batch_shape: Any, _instance: Any = None) -> TanhNormal:
        """This distribution with a larger batch shape."""
        new: TanhNormal = self._get_checked_instance(TanhNormal, _instance)
        return super().expand(batch_shape, _instance=new)


class _Tanh(TanhTransform):
    def _inverse(self, y: Tensor) -> Tensor:
        bound = 1.0 - torch.finfo(y.dtype).eps
        return y.clamp(-bound, bound).atanh()
