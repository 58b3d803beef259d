"""What comes of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Outcome(Protocol):
    """The outcome of an evaluation: `Episodes`, `Evaluated` ...

    >>> from raffia.train.evaluate import Episodes
    >>> outcome: Outcome = Episodes([1.0, 3.0], [5, 6])
    >>> outcome.score
    2.0
    """

    @property
    def score(self) -> float:
        """The outcome's score: the larger the better."""

    @property
    def values(self) -> Mapping[str, Any]:
        """The values of its row."""


@dataclass(frozen=True)
class Evaluated:
    """An outcome of any kind.

    >>> Evaluated(score=-0.25, values={"loss": 0.25}).score
    -0.25
    """

    score: float  # the larger the better
    values: Mapping[str, Any]  # values of its row
