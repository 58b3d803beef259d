"""How near what a device gives is to what the CPU gives, in shares of what is allowed."""

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
    difference: float  # in shares of the tolerance
    tolerance: str  # in words

    @property
    def holds(self) -> bool:
        """Whether the difference is within the tolerance; NaN is not."""
        return self.difference <= 1


def near(
    check: str, what: str, here: Tensor, there: Tensor, *, rtol: float, atol: float = 0.0
) -> Agreement:
    """Number by number: |here - there| <= atol + rtol |here|.

    >>> near("a", "b", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.2]), rtol=0.2).difference
    0.5...
    """
    words = f"{rtol:g} of each" + (f" + {atol:g}" if atol else "")
    there = there.cpu()
    if here.shape != there.shape:
        return Agreement(check, what, math.inf, f"{list(here.shape)} against {list(there.shape)}")
    here, there = here.double(), there.double()
    excess = (here - there).abs() / (atol + rtol * here.abs()).clamp_min(1e-300)
    excess = torch.where(here == there, 0.0, excess)  # infinities, too
    return Agreement(check, what, float(excess.max()) if excess.numel() else 0.0, words)


def equal(check: str, what: str, here: TensorDict, there: TensorDict) -> Agreement:
    """All entries bit by bit.

    >>> equal("a", "b", TensorDict(x=torch.ones(2)), TensorDict(x=torch.zeros(2))).difference
    inf
    """
    mine, theirs = leaves(here), leaves(there)
    alike = mine.keys() == theirs.keys() and all(
        value.dtype == theirs[name].dtype and torch.equal(value.cpu(), theirs[name].cpu())
        for name, value in mine.items()
    )
    return Agreement(check, what, 0.0 if alike else math.inf, "equal bits")


def near_as_a_whole(
    check: str, what: str, here: TensorDict, there: TensorDict, *, share: float
) -> Agreement:
    """Tensor by tensor: |here - there| <= share |here|, of norms.

    A tensor that is next to nothing beside the others, as the gradient of a bias before a
    normalisation, which is rounding alone, counts as a thousandth of all.

    >>> x = TensorDict(a=torch.full((4,), 2.0))
    >>> near_as_a_whole("a", "b", x, 1.001 * x, share=2e-3).difference < 1
    True
    """
    mine, theirs = leaves(here), leaves(there)
    whole = math.sqrt(sum(float(x.double().square().sum()) for x in mine.values()))
    worst = 0.0
    for name, value in mine.items():
        own = value.double()
        difference = (own - theirs[name].cpu().double()).norm()
        allowed = share * max(float(own.norm()), 1e-3 * whole)
        worst = max(worst, float(difference) / allowed if allowed else float(difference > 0))
        if math.isnan(float(difference)):
            return Agreement(check, what, math.nan, f"{share:g} of a tensor's norm")
    return Agreement(check, what, worst, f"{share:g} of a tensor's norm")


def same_share(
    check: str, what: str, here: Tensor, there: Tensor, *, allowed: float, of: str
) -> Agreement:
    """How much of what was counted lies elsewhere: |here - there| / 2 |here|, sums of all.

    >>> visits = torch.tensor([6, 4]), torch.tensor([5, 5])
    >>> same_share("a", "b", *visits, allowed=0.2, of="visits").difference
    0.5
    """
    here, there = here.double(), there.cpu().double()
    elsewhere = float((here - there).abs().sum() / (2 * here.abs().sum()))
    return Agreement(check, what, elsewhere / allowed, f"{allowed:.0%} of all {of}")


def leaves(td: TensorDict) -> dict[str, Tensor]:
    """All tensors, by dotted names.

    >>> list(leaves(TensorDict(a=dict(b=torch.ones(1)))))
    ['a.b']
    """
    return {dotted(key): value for key, value in td.items(True, True)}
