"""The truncated normal distribution, exact far out in the tails and on narrow intervals.

Everything is measured from the mode m, the point of [a, b] nearest to loc. With t = (x - m) / scale
and p = |m - loc| / scale the density at distance |t| from the mode is proportional to

    exp(-(p |t| + t^2 / 2))

which is 1 at the mode: nothing underflows however far loc is from [a, b], and m is a bound
whenever p > 0. Masses, quantiles and moments are integrals of this one function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.distributions.utils import broadcast_all, lazy_property

_SQRT_HALF = math.sqrt(0.5)
_SQRT_HALF_PI = math.sqrt(0.5 * math.pi)
_SMALLEST_SCALE = 1e-6
_DEPTH = 64.0  # beyond exp(-64) = 2e-28 of the density at the mode nothing is left to integrate


def _gauss_legendre(count: int) -> tuple[list[float], list[float]]:
    """Nodes and weights of Gauss-Legendre quadrature on [-1, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return nodes.tolist(), weights.tolist()


# Three nodes integrate what is narrow to 1e-11; at the limit a difference of tails loses a digit.
_NARROW = 0.1
_NARROW_RULE = [
    ((1 + node) / 2, weight / 2) for node, weight in zip(*_gauss_legendre(3), strict=True)
]
# For moments: where to cut the density, and the nodes that then integrate a whole normal one.
_MOMENT_RULES = {
    torch.float32: (18.0, *_gauss_legendre(24)),
    torch.float64: (40.0, *_gauss_legendre(48)),
}


def _mills(x: Tensor) -> Tensor:
    """Mills' ratio of the normal distribution, (1 - Phi(x)) / phi(x), for x >= 0.

    Far out it is the asymptotic series, because there the derivative of `erfcx` cancels.
    Source: Abramowitz & Stegun (1964), 26.2.12.
    """
    limit = 20.0 if x.dtype is torch.float32 else 100.0  # three terms reach the precision
    near = _erfcx_ratio(x.clamp(max=limit))
    far = 1 / x.clamp(min=limit)
    y = far * far
    series = 1 - y * (1 - 3 * y * (1 - 5 * y))
    return torch.where(x < limit, near, series * far)


def _erfcx_ratio(x: Tensor) -> Tensor:
    """Mills' ratio, without care for its derivative."""
    return _SQRT_HALF_PI * torch.special.erfcx(x * _SQRT_HALF)


def _depth(p: Tensor, t: Tensor) -> Tensor:
    """Minus the log of the density at distance t from the mode."""
    return torch.add(p, t, alpha=0.5) * t


def _mass(p: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Mass of the density from `start` to `end`, 0 <= start <= end."""
    from_start = torch.exp(-_depth(p, start)) * _mills(p + start)
    from_end = torch.exp(-_depth(p, end)) * _mills(p + end)
    # Where the interval is narrow the difference would cancel.
    return torch.where(
        _is_narrow(p, start, end), _narrow_mass(p, start, end), from_start - from_end
    )


def _is_narrow(p: Tensor, start: Tensor | float, end: Tensor) -> Tensor:
    return (end - start) * (p + end + 1) < _NARROW


def _narrow_mass(p: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """The mass of the density as in `_mass`, for narrow intervals."""
    width = end - start
    mean = torch.zeros_like(width)
    for node, weight in _NARROW_RULE:
        mean = mean + weight * torch.exp(-_depth(p, start + width * node))
    return width * mean


def _distance_of_mass(p: Tensor, end: Tensor, rest: Tensor) -> Tensor:
    """The t with mass `rest` from t to `end`, and its first two derivatives."""
    inputs = (p, end, rest)
    fixed = (p.detach(), end.detach(), rest.detach())
    t = _solve(*fixed)
    if not torch.is_grad_enabled():
        return t
    # What is added is 0. A tangent at `fixed` brings the first derivative; the trapezoid rule over
    # the slopes along it the second one too.
    moves = [moving - still for moving, still in zip(inputs, fixed, strict=True)]
    before = _slopes(*fixed, t)
    tangent = t + sum(slope * move for slope, move in zip(before, moves, strict=True))
    after = _slopes(*inputs, tangent)
    for one, two, move in zip(before, after, moves, strict=True):
        t = t + (one + two) / 2 * move
    return t


def _solve(p: Tensor, end: Tensor, rest: Tensor) -> Tensor:
    """The t with mass `rest` from t to `end`."""
    at_zero = _erfcx_ratio(p)
    target = torch.exp(-_depth(p, end)) * _erfcx_ratio(p + end) + rest
    # Solve depth(t) - log(mills(p + t) / mills(p)) = drop, which is convex and increasing in t.
    drop = torch.log(at_zero / target).clamp(min=torch.finfo(p.dtype).tiny)
    t = torch.minimum(drop * at_zero, 2 * drop / (p + torch.sqrt(p * p + 2 * drop)))
    for _ in range(3):  # Halley's method; both starts lie above the root
        mills = _erfcx_ratio(p + t)
        newton = (_depth(p, t) - torch.log(mills / at_zero) - drop) * mills
        t = (t - newton / (1 - newton * (1 / mills - p - t) / 2)).clamp(min=0)
    t = torch.minimum(t, end)
    # On a narrow interval the log hides the mass, so one step is made on the mass itself.
    polished = t + (_narrow_mass(p, t, end) - rest) * torch.exp(_depth(p, t))
    t = torch.where(_is_narrow(p, 0.0, end), polished, t)
    return torch.minimum(t.clamp(min=0), end)


def _slopes(p: Tensor, end: Tensor, rest: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives of t by p, end and rest where the mass from t to end is rest."""
    growth = torch.exp(_depth(p, t))
    by_end = torch.exp(_depth(p, t) - _depth(p, end))
    by_p = p * (rest * growth) - (1 - by_end)  # integration by parts of t * density
    return by_p, by_end, -growth


class _Finite(constraints.Constraint):
    """Constraint to finite values: those with a nearest point in [a, b] and a distance from it."""

    def check(self, value: Tensor) -> Tensor:
        return value.isfinite()


class TruncatedNormal(Distribution):
    """A normal distribution restricted to [a, b]; its samples carry gradients.

    loc: mean before truncation; it may lie outside [a, b].
    scale: standard deviation before truncation; what is below 1e-6 counts as 1e-6.
    a, b: bounds, a < b; a may be -inf, b may be inf.
    All broadcast together. The attributes `a` and `b` are the bounds in units of `scale` from
    `loc`; `support` has them as they were given. Samples are quantiles of uniform draws in
    [eps, 1 - eps]. Where samples are not checked, `log_prob` is -inf outside [a, b].
    Raises ValueError where a is not smaller than b.

    >>> dist = TruncatedNormal(loc=5.0, scale=1.0, a=4.0, b=6.0)
    >>> dist.mean, dist.support
    (tensor(5.), Interval(lower_bound=4.0, upper_bound=6.0))
    >>> TruncatedNormal(loc=torch.tensor(9.0), scale=0.1, a=-1.0, b=1.0).mean
    tensor(0.9988)
    """

    arg_constraints: ClassVar[dict[str, Any]] = {
        "loc": _Finite(),
        "scale": constraints.positive,
        "a": constraints.real,
        "b": constraints.real,
    }
    has_rsample = True
    eps = 1e-6

    def __init__(
        self,
        loc: float | Tensor,
        scale: float | Tensor,
        a: float | Tensor,
        b: float | Tensor,
        validate_args: bool | None = None,
    ) -> None:
        loc, scale, low, high = broadcast_all(loc, scale, a, b)
        _check_range(low, high)
        self.loc, self._low, self._high = loc, low, high
        self.scale = scale.clamp(min=_SMALLEST_SCALE)
        self.a = (low - loc) / self.scale
        self.b = (high - loc) / self.scale
        super().__init__(self.a.shape, validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> TruncatedNormal:
        """This distribution with a larger batch shape."""
        new = self._get_checked_instance(TruncatedNormal, _instance)
        shape = torch.Size(batch_shape)
        for name in ("loc", "scale", "a", "b", "_low", "_high"):
            setattr(new, name, getattr(self, name).expand(shape))
        super(TruncatedNormal, new).__init__(shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @constraints.dependent_property(is_discrete=False, event_dim=0)
    def support(self) -> constraints.Constraint:
        """[a, b], as the bounds were given."""
        return constraints.interval(self._low, self._high)

    @lazy_property
    def _frame(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mode, scale, signed distance of the mode from loc, distances to both ends [2, batch].

        An end that is too far to matter is moved to where no mass is left, so that infinity does
        not occur.
        """
        wide = torch.promote_types(self.a.dtype, torch.float32)
        loc, scale, low, high = (
            value.to(wide) for value in (self.loc, self.scale, self._low, self._high)
        )
        # Not by clamp, whose derivative at its bounds depends on torch's version.
        mode = torch.where(loc < low, low, torch.where(loc > high, high, loc))
        shift = (mode - loc) / scale
        ends = torch.stack((mode - low, high - mode))
        ends = torch.minimum(ends, scale * _reach(shift, _DEPTH)) / scale
        return mode, scale, shift, ends

    @lazy_property
    def _masses(self) -> tuple[Tensor, Tensor]:
        """Mass of the density left and right of the mode."""
        _, _, shift, ends = self._frame
        left, right = _mass(shift.abs(), torch.zeros_like(shift), ends).unbind(0)
        return left, right

    def _inside(self, value: Tensor) -> Tensor:
        """`value` within [a, b] in spite of rounding, with its gradient."""
        return value + (value.clamp(self._low, self._high) - value).detach()

    @property
    def auc(self) -> Tensor:
        """Mass of the untruncated normal distribution within [a, b], [batch]."""
        _, _, shift, _ = self._frame
        left, right = self._masses
        return (left + right) * torch.exp(-shift * shift / 2) / math.sqrt(2 * math.pi)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log of the density, -inf outside [a, b]; an error there if samples are checked."""
        value = torch.as_tensor(value, dtype=self._frame[0].dtype, device=self.loc.device)
        if self._validate_args:
            self._validate_sample(value)
        mode, scale, shift, _ = self._frame
        left, right = self._masses
        inside = (value >= self._low) & (value <= self._high)
        t = (torch.where(inside, value, mode) - mode) / scale
        log_density = -_depth(shift, t) - torch.log(left + right) - torch.log(scale)
        return torch.where(inside | value.isnan(), log_density, -math.inf)

    def cdf(self, value: Tensor) -> Tensor:
        """Probability of a draw not above `value`."""
        value = torch.as_tensor(value, dtype=self._frame[0].dtype, device=self.loc.device)
        if self._validate_args:
            self._validate_sample(value)
        mode, scale, shift, ends = self._frame
        left, right = self._masses
        t = torch.maximum(torch.minimum((value - mode) / scale, ends[1]), -ends[0])
        zero = torch.zeros_like(t)
        below = t < 0
        start, end = torch.where(below, -t, zero), torch.where(below, ends[0], t)
        mass = _mass(shift.abs(), start, end)
        return (torch.where(below, mass, left + mass)) / (left + right)

    def icdf(self, value: Tensor) -> Tensor:
        """The x with `cdf(x) == value`; probabilities outside [0, 1] give the bounds."""
        value = torch.as_tensor(value, dtype=self._frame[0].dtype, device=self.loc.device)
        x = self._quantile(value.clamp(0, 1))
        return torch.where(value <= 0, self._low, torch.where(value >= 1, self._high, x))

    def _quantile(self, u: Tensor) -> Tensor:
        """The x below which a fraction u of the mass falls, 0 < u < 1."""
        mode, scale, shift, ends = self._frame
        left, right = self._masses
        total = left + right
        below = u * total < left
        rest = torch.where(below, u, 1 - u) * total
        end = torch.where(below, ends[0], ends[1])
        distance = _distance_of_mass(*torch.broadcast_tensors(shift.abs(), end, rest))
        return self._inside(mode + scale * torch.where(below, -distance, distance))

    def rsample(self, sample_shape: Sequence[int] | None = None) -> Tensor:
        """Draws with gradients to loc, scale, a and b, [*sample_shape, *batch]."""
        shape = self._extended_shape(torch.Size(sample_shape or ()))
        mode = self._frame[0]
        uniform = torch.rand(shape, dtype=mode.dtype, device=mode.device)
        return self._quantile(self.eps + (1 - 2 * self.eps) * uniform)

    @lazy_property
    def _weighted(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Nodes t, their depths and weights [*batch, nodes], and the whole mass.

        Moments are sums of positive terms over these nodes, where formulas in closed form subtract
        large numbers.
        """
        _, _, shift, ends = self._frame
        cut, *rule = _MOMENT_RULES[shift.dtype]
        nodes, weights = (ends.new_tensor(values) for values in rule)
        left, right = torch.minimum(ends, _reach(shift, cut)).unsqueeze(-1).unbind(0)
        half = (right + left) / 2
        t = (right - left) / 2 + half * nodes
        depth = _depth(shift.unsqueeze(-1), t)
        weight = weights * half * torch.exp(-depth)
        return t, depth, weight, weight.sum(-1)

    @lazy_property
    def _mean_of_t(self) -> Tensor:
        t, _, weight, mass = self._weighted
        first = weight * t
        return (first + first.flip(-1)).sum(-1) / (2 * mass)  # exactly 0 where symmetric

    @property
    def mean(self) -> Tensor:
        """Mean after truncation, [batch]."""
        mode, scale, *_ = self._frame
        return self._inside(mode + scale * self._mean_of_t)

    deterministic_sample = mean

    @property
    def variance(self) -> Tensor:
        """Variance after truncation, [batch]."""
        t, _, weight, mass = self._weighted
        spread = (weight * (t - self._mean_of_t.unsqueeze(-1)) ** 2).sum(-1)
        return self._frame[1] ** 2 * spread / mass

    def entropy(self) -> Tensor:
        """Differential entropy, [batch], nats."""
        _, depth, weight, mass = self._weighted
        return (weight * depth).sum(-1) / mass + torch.log(mass) + torch.log(self._frame[1])

    @property
    def mode(self) -> Tensor:
        """The point of [a, b] nearest to loc, [batch]."""
        return self._frame[0]


def _reach(shift: Tensor, depth: float) -> Tensor:
    """Distance from the mode at which the density is exp(-depth) times its value at the mode."""
    p = shift.detach().abs()
    return 2 * depth / (torch.sqrt(p * p + 2 * depth) + p)


def _check_range(low: Tensor, high: Tensor) -> None:
    """Refuse bounds out of order; NaN is left to the validation of arguments."""
    if torch.compiler.is_compiling():  # a compiled program cannot branch on values
        return
    if not torch._is_all_true(~(low >= high)):
        raise ValueError(
            "Incorrect truncation range: a must be smaller than b everywhere, "
            "as in TruncatedNormal(loc, scale, a=-1.0, b=1.0)"
        )
