"""How near a device's results are to those of the CPU, as a fraction of the tolerance."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from raffia.tensordict.keys import dotted
from raffia.tensordict.tensordict import TensorDict


@dataclass(frozen=True)
class Agreement:
    """What was compared, and how.

    >>> Agreement("update", "loss", 0.5, "1e-4 of each").holds
    True
    """

    check: str
    what: str
    difference: float  # as a fraction of the tolerance
    tolerance: str  # in words

    @property
    def holds(self) -> bool:
        """Whether the difference is within the tolerance; NaN is not."""
        return self.difference <= 1


def near(
    check: str, what: str, expected: Tensor, found: Tensor, *, rtol: float, atol: float = 0.0
) -> Agreement:
    """Number by number: |expected - found| <= atol + rtol |expected|.

    >>> near("a", "b", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.2]), rtol=0.2).difference
    0.5...
    """
    words = f"{rtol:g} of each" + (f" + {atol:g}" if atol else "")
    found = found.cpu()
    if expected.shape != found.shape:
        return Agreement(
            check, what, math.inf, f"{list(expected.shape)} against {list(found.shape)}"
        )
    expected, found = expected.double(), found.double()
    excess = (expected - found).abs() / (atol + rtol * expected.abs()).clamp_min(1e-300)
    excess = torch.where(expected == found, 0.0, excess)  # infinities, too
    return Agreement(check, what, float(excess.max()) if excess.numel() else 0.0, words)


def equal(check: str, what: str, expected: TensorDict, found: TensorDict) -> Agreement:
    """All entries bit by bit.

    >>> equal("a", "b", TensorDict(x=torch.ones(2)), TensorDict(x=torch.zeros(2))).difference
    inf
    """
    mine, theirs = leaves(expected), leaves(found)
    is_equal = mine.keys() == theirs.keys() and all(
        value.dtype == theirs[name].dtype and torch.equal(value.cpu(), theirs[name].cpu())
        for name, value in mine.items()
    )
    return Agreement(check, what, 0.0 if is_equal else math.inf, "equal bits")


def near_as_a_whole(
    check: str, what: str, expected: TensorDict, found: TensorDict, *, share: float
) -> Agreement:
    """Tensor by tensor: |expected - found| <= share |expected|, of norms.

    A tensor that is next to nothing beside the others, as the gradient of a bias before a
    normalisation, which is rounding alone, counts as a thousandth of all.

    >>> x = TensorDict(a=torch.full((4,), 2.0))
    >>> near_as_a_whole("a", "b", x, 1.001 * x, share=2e-3).difference < 1
    True
    """
    mine, theirs = leaves(expected), leaves(found)
    norm_of_all = math.sqrt(sum(float(x.double().square().sum()) for x in mine.values()))
    worst = 0.0
    for name, value in mine.items():
        own = value.double()
        difference = (own - theirs[name].cpu().double()).norm()
        allowed = share * max(float(own.norm()), 1e-3 * norm_of_all)
        worst = max(worst, float(difference) / allowed if allowed else float(difference > 0))
        if math.isnan(float(difference)):
            return Agreement(check, what, math.nan, f"{share:g} of a tensor's norm")
    return Agreement(check, what, worst, f"{share:g} of a tensor's norm")


def same_share(
    check: str, what: str, expected: Tensor, found: Tensor, *, allowed: float, of: str
) -> Agreement:
    """The fraction of counts that differs: |expected - found| / 2 |expected|, sums of all.

    >>> visits = torch.tensor([6, 4]), torch.tensor([5, 5])
    >>> same_share("a", "b", *visits, allowed=0.2, of="visits").difference
    0.5
    """
    expected, found = expected.double(), found.cpu().double()
    fraction = float((expected - found).abs().sum() / (2 * expected.abs().sum()))
    return Agreement(check, what, fraction / allowed, f"{allowed:.0%} of all {of}")


def leaves(td: TensorDict) -> dict[str, Tensor]:
    """All tensors, by dotted names.

    >>> list(leaves(TensorDict(a=dict(b=torch.ones(1)))))
    ['a.b']
    """
    return {dotted(key): value for key, value in td.items(True, True)}
