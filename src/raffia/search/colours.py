"""QScale: colours for Q, from orange for the worst over grey to blue for the best."""

from collections.abc import Sequence
from dataclasses import dataclass

# Orange and blue stay apart in all kinds of colour vision; each stands out on white and on black.
_WORST, _MIDDLE, _BEST = (217, 104, 11), (139, 149, 165), (31, 119, 208)


@dataclass(frozen=True)
class QScale:
    """The range of Q that the colours span.

    >>> scale = QScale.of([-0.5, 0.25])
    >>> scale
    QScale(low=-0.5, high=0.5)
    >>> scale.colour(-0.5), scale.colour(0.0), scale.colour(0.5)
    ('#d9680b', '#8b95a5', '#1f77d0')
    """

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "QScale":
        """From the least to the greatest; where signs differ, grey stands for 0.

        >>> QScale.of([2.0, 5.0])
        QScale(low=2.0, high=5.0)
        """
        low, high = min(values, default=0.0), max(values, default=0.0)
        if low < 0 < high:
            low, high = -max(-low, high), max(-low, high)
        return cls(low, high)

    def colour(self, q: float) -> str:
        """The colour of one Q, "#rrggbb"; grey where all are the same.

        >>> QScale(2.0, 2.0).colour(2.0)
        '#8b95a5'
        """
        position = (q - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        side, end = abs(2 * position - 1), _BEST if position > 0.5 else _WORST
        mixed = [round(m + (e - m) * side) for m, e in zip(_MIDDLE, end, strict=True)]
        return "#" + "".join([f"{part:02x}" for part in mixed])
