"""The targets of batches beyond the supports of value and value prefix, where they are clipped."""

from __future__ import annotations

import math

import torch

from raffia.algorithms.efficientzero.latent_model import LatentModel
from raffia.functional.transforms import signed_hyperbolic, signed_parabolic
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.tensordict.tensordict import TensorDict

NOTABLE = 0.01  # fraction of a batch's targets
MOST_ATOMS = 600  # of a range that is proposed
SETTINGS = {"value": "value_support_range", "value_prefix": "reward_support_range"}


class ClippedTargets:
    """Looks at a batch now and then, and says once that targets lie beyond a support.

    model: whose supports they are.

    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> clipped = ClippedTargets(EfficientZeroRun(), EfficientZeroModelMLP(4, 2))
    >>> batch = TensorDict(target_value=torch.tensor([[1e6], [0.0]]), batch_size=[2])
    >>> fractions = clipped.fractions(batch.set("target_value_prefix", torch.full((2, 1), 5e3)))
    >>> fractions
    {'value_clipped': 0.5, 'value_prefix_clipped': 0.0}
    >>> for line in clipped.lines(batch, fractions):
    ...     print(line)
    50 % of the value targets are beyond the range of model.value_support_range and clipped, so ...
    """

    def __init__(self, config: EfficientZeroRun, model: LatentModel) -> None:
        self._config, self._left = config, dict(SETTINGS)
        self._reach: dict[str, tuple[float, float]] = {}  # least and greatest number
        supports = {"value": model.value_support, "value_prefix": model.reward_support}
        for kind, support in supports.items():
            if support is not None:
                ends = torch.tensor([support.start, support.last], dtype=torch.float64)
                low, high = signed_parabolic(ends).tolist()
                self._reach[kind] = low, high

    def fractions(self, batch: TensorDict) -> dict[str, float]:
        """The fractions of the batch's targets that are clipped."""
        found = {}
        for kind, (low, high) in self._reach.items():
            target = batch[f"target_{kind}"]
            found[f"{kind}_clipped"] = float((target.clamp(low, high) != target).float().mean())
        return found

    def lines(self, batch: TensorDict, fractions: dict[str, float]) -> list[str]:
        """The warnings that a batch gives cause for, each of them once."""
        notable = [kind for kind in self._left if fractions.get(f"{kind}_clipped", 0.0) >= NOTABLE]
        return [self._line(kind, batch, fractions[f"{kind}_clipped"]) for kind in notable]

    def _line(self, kind: str, batch: TensorDict, fraction: float) -> str:
        setting = self._left.pop(kind)
        largest = float(batch[f"target_{kind}"].abs().max())
        if kind == "value" and self._config.targets.discount < 1:
            # Targets grow with the values that they bootstrap from: as far as the rewards go.
            reward = float(batch["target_value_prefix"][..., 0].abs().mean())
            largest = max(largest, reward / (1 - self._config.targets.discount))
        step = float(getattr(self._config.model, setting)[2])
        start, stop, step = fitting_range(largest, step)
        return (
            f"{100 * fraction:.0f} % of the {kind.replace('_', ' ')} targets are beyond the range "
            f"of model.{setting} and clipped, so that they cannot be learnt. For rewards such as "
            f"these: --model.{setting} {start:g} {stop:g} {step:g}; or scale the rewards down"
        )


def fitting_range(largest: float, step: float) -> tuple[float, float, float]:
    """Start, stop and step of a support that holds values up to this one, of either sign.

    step: to be kept, unless there were too many categories.

    >>> fitting_range(1000.0, 1.0), fitting_range(1.5e6, 1.0)
    ((-32.0, 33.0, 1.0), (-2730.0, 2740.0, 10.0))
    """
    reach = float(signed_hyperbolic(torch.tensor(largest, dtype=torch.float64)))
    if 2 * reach > step * MOST_ATOMS:
        step = float(math.ceil(2 * reach / MOST_ATOMS))
    num = math.ceil(reach / step)
    return -num * step, (num + 1) * step, step
