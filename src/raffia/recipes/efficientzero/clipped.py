"""Warnings about targets beyond the supports of value and value prefix, where they are clipped."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from raffia.functional.transforms import signed_hyperbolic
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.tensordict.tensordict import TensorDict

NOTABLE = 0.01  # fraction of a batch's targets
MOST_ATOMS = 600  # of a range that is proposed
SETTINGS = {"value": "value_support_range", "value_prefix": "reward_support_range"}


class ClippedTargets:
    """Says once for each of the two supports that targets lie beyond it, and which range fits.

    >>> config = EfficientZeroRun()
    >>> batch = TensorDict(target_value=torch.full((2, 3), 1e6), batch_size=[2])
    >>> batch["target_value_prefix"] = torch.full((2, 2), 5e3)
    >>> metrics = TensorDict(value_clipped=torch.tensor(1.0))
    >>> for line in ClippedTargets(config).lines(batch, metrics):
    ...     print(line)
    100 % of the value targets are beyond the range of model.value_support_range and clipped, ...
    """

    def __init__(self, config: EfficientZeroRun) -> None:
        self._config, self._left = config, dict(SETTINGS)

    def lines(self, batch: TensorDict, metrics: TensorDict) -> Iterator[str]:
        """The warnings that the metrics of a batch give cause for."""
        for kind, setting in list(self._left.items()):
            clipped = metrics.get(f"{kind}_clipped", None)  # of own networks there may be none
            fraction = 0.0 if clipped is None else float(clipped.max())
            if fraction < NOTABLE or f"target_{kind}" not in batch.keys():
                continue
            del self._left[kind]
            largest = float(batch[f"target_{kind}"].abs().max())
            if kind == "value" and self._config.targets.discount < 1:
                # Targets grow with the values that they bootstrap from: as far as the rewards go.
                reward = float(batch["target_value_prefix"][..., 0].abs().mean())
                largest = max(largest, reward / (1 - self._config.targets.discount))
            start, stop, step = fitting_range(largest, self._step_of(setting))
            targets = f"{100 * fraction:.0f} % of the {kind.replace('_', ' ')} targets"
            yield (
                f"{targets} are beyond the range of model.{setting} and clipped, so that they "
                "cannot be learnt. For rewards such as these: "
                f"--model.{setting} {start:g} {stop:g} {step:g}; or scale the rewards down"
            )

    def _step_of(self, setting: str) -> float:
        return float(getattr(self._config.model, setting)[2])


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
