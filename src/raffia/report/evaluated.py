"""An evaluation during training, read from its row of `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from raffia.report.rows import Row, number, numbers

_POSITION = ("kind", "update", "env_step", "seconds", "num_simulations")


@dataclass(frozen=True)
class Decoding:
    """The results of one decoding.

    >>> Decoding(mean=-2.5).share_won
    nan
    """

    mean: float
    low: float = math.nan  # the 95 % interval of the mean, over its episodes
    high: float = math.nan
    share_won: float = math.nan
    returns: tuple[float, ...] = ()  # where a file has them


@dataclass(frozen=True)
class EvaluationRow:
    """One evaluation during training: of episodes, or of held-out rows.

    >>> EvaluationRow(env_step=100.0, seconds=2.0, mean=9.5, returns=(9.0, 10.0)).score
    9.5
    >>> EvaluationRow(math.nan, 2.0, 0.5, update=100.0, held_out={"loss": 0.5}).score
    -0.5
    """

    env_step: float  # nan where none are played
    seconds: float
    mean: float  # return; the loss of held-out rows
    returns: tuple[float, ...] = ()
    as_first: tuple[bool, ...] = ()  # games of two players
    update: float = math.nan
    low: float = math.nan  # the 95 % interval of the mean, where the row has it
    high: float = math.nan
    decodings: Mapping[str, Decoding] = field(default_factory=dict)  # by name of the decoding
    held_out: Mapping[str, float] = field(default_factory=dict)  # losses and other means, by name

    @property
    def of_loss(self) -> bool:
        """Whether the mean is a loss: less is better."""
        return bool(self.held_out)

    @property
    def progress(self) -> float:
        """The count that the run had reached, environment steps or updates."""
        return self.update if math.isnan(self.env_step) else self.env_step

    @property
    def unit(self) -> str:
        """What `progress` counts."""
        return "updates" if math.isnan(self.env_step) else "env steps"

    @property
    def score(self) -> float:
        """The result as a number: the larger the better."""
        if self.of_loss:
            return self.held_out.get("score", -self.mean)
        return self.mean


def evaluations_of(rows: Iterable[Row]) -> list[EvaluationRow]:
    """The evaluations of rows that have a result and a time.

    >>> row = {"kind": "evaluate", "update": 9, "returns": [1.0, 3.0]}
    >>> [one.mean for one in evaluations_of([row, {"kind": "evaluate", "update": 12}])]
    [2.0]
    """
    found = []
    for row in rows:
        env_step, update = number(row.get("env_step")), number(row.get("update"))
        returns, mean = numbers(row.get("returns")), number(row.get("mean_return"))
        if math.isnan(mean) and returns:
            mean = sum(returns) / len(returns)
        held_out = {} if returns or "mean_return" in row else _held_out(row)
        mean = held_out.get("loss", mean)
        if math.isnan(mean) or (math.isnan(env_step) and math.isnan(update)):
            continue
        first = row.get("as_first")
        found.append(
            EvaluationRow(
                env_step=env_step,
                seconds=number(row.get("seconds")),
                mean=mean,
                returns=tuple(returns),
                as_first=tuple(map(bool, first)) if isinstance(first, list) else (),
                update=update,
                low=number(row.get("low")),
                high=number(row.get("high")),
                decodings=decodings_of(row.get("decodings")),
                held_out=held_out,
            )
        )
    return found


def decodings_of(value: object) -> dict[str, Decoding]:
    """The results of each decoding in a row, or in a file of an evaluation.

    >>> decodings_of({"decode": {"mean_return": -2, "share_won": 0.5}, "odd": 3})["decode"].mean
    -2.0
    """
    if not isinstance(value, dict):
        return {}
    found = {}
    for name, one in value.items():
        if isinstance(one, dict) and not math.isnan(number(one.get("mean_return"))):
            found[name] = Decoding(
                mean=number(one.get("mean_return")),
                low=number(one.get("low")),
                high=number(one.get("high")),
                share_won=number(one.get("share_won")),
                returns=tuple(numbers(one.get("returns"))),
            )
    return found


def _held_out(row: Row) -> dict[str, float]:
    """The means on held-out rows, if the loss is one of them."""
    means = {name: number(value) for name, value in row.items() if name not in _POSITION}
    means = {name: value for name, value in means.items() if not math.isnan(value)}
    return means if "loss" in means else {}
