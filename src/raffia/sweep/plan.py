"""The runs of a sweep: a grid of settings or random draws of them, each with every seed."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raffia.functional.seeds import derive_seed
from raffia.train.config import ConfigError

MOST_RUNS = 100_000
LONGEST_NAME = 80  # characters of a run's folder
MOST_TRIES = 50  # for each draw that is to differ from those before
_COMMAS = re.compile(r",(?![^\[]*\])")  # but for those of a list, as in [1,0.5]
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")


@dataclass(frozen=True)
class PlannedRun:
    """A run by the name of its folder, and what it has otherwise than the other runs of its sweep.

    >>> PlannedRun("0-seed=3", {}, 3).changed
    {}
    """

    name: str
    settings: Mapping[str, Any]  # by dotted name: those that the sweep varies, without the seed
    seed: int
    changed: Mapping[str, Any] | None = None  # all that differs from the sweep's config

    def __post_init__(self) -> None:
        if self.changed is None:
            object.__setattr__(self, "changed", dict(self.settings))


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, of which a draw takes one; whole ones if both ends are.

    By their logarithm where low is above 0 and high at least ten times as large.

    >>> Range(1e-5, 1e-2).is_log, Range(0.0, 1.0).is_log
    (True, False)
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ConfigError(
                f"{self.low}..{self.high}: the first number must be smaller than the second"
            )

    @property
    def is_log(self) -> bool:
        """Whether equal ratios are equally likely."""
        return self.low > 0 and self.high >= 10 * self.low

    @property
    def is_whole(self) -> bool:
        """Whether its numbers are whole."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def draw(self, generator: random.Random) -> float:
        """Draw a number from the range, rounded as `readable` does."""
        low, high = (self.low - 0.5, self.high + 0.5) if self.is_whole else (self.low, self.high)
        if self.is_log:
            return self.readable(math.exp(generator.uniform(math.log(low), math.log(high))))
        return self.readable(generator.uniform(low, high))

    def readable(self, number: float) -> float:
        """The number of the range that is meant: whole, or of four digits, to be read and typed.

        >>> Range(0.0, 1.0).readable(0.123456), Range(1, 9).readable(9.4)
        (0.1235, 9)
        """
        found = round(number) if self.is_whole else float(f"{number:.4g}")
        return min(max(found, self.low), self.high)


def read_seeds(text: str) -> list[int]:
    """Parse the seeds of a command line.

    >>> read_seeds("0..4"), read_seeds("7"), read_seeds("1,3,8..9")
    ([0, 1, 2, 3, 4], [7], [1, 3, 8, 9])
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        if not first.isdecimal() or (dots and not last.isdecimal()):
            raise ConfigError(f"--seeds {text}: {part!r} is not a seed; write 0..4, or 0,1,7")
        low, high = int(first), int(last or first)
        if high < low or high - low >= MOST_RUNS:
            raise ConfigError(f"--seeds {text}: {part!r} is not a range of seeds such as 0..4")
        seeds += range(low, high + 1)
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text}: a seed occurs twice")
    return seeds


def read_choices(words: Sequence[str], flag: str = "--grid") -> dict[str, list[Any]]:
    """Settings, each with the values it takes, from words like name=one,two.

    >>> read_choices(["optimizer.learning_rate=1e-3,2e-3", "search.temperatures=[1,0.5],[1]"])
    {'optimizer.learning_rate': [0.001, 0.002], 'search.temperatures': [[1, 0.5], [1]]}
    """
    found: dict[str, list[Any]] = {}
    for name, text in _assignments(words, flag).items():
        values = [_value(part) for part in _COMMAS.split(text)]
        if len({json.dumps(value) for value in values}) < len(values):
            raise ConfigError(f"{flag} {name}={text}: a value occurs twice")
        found[name] = values
    return found


def read_ranges(words: Sequence[str]) -> dict[str, Range | list[Any]]:
    """Settings with the range, or the values, that random draws take them from.

    >>> read_ranges(["optimizer.learning_rate=1e-5..1e-2", "loss.lstm_horizon=1,5"])
    {'optimizer.learning_rate': Range(low=1e-05, high=0.01), 'loss.lstm_horizon': [1, 5]}
    """
    found: dict[str, Range | list[Any]] = {}
    for name, text in _assignments(words, "--ranges").items():
        ends = _RANGE.fullmatch(text)
        if ends:
            low, high = (
                int(end) if re.fullmatch(r"[-+]?\d+", end) else float(end) for end in ends.groups()
            )
            found[name] = Range(low, high)
        else:
            found |= read_choices([f"{name}={text}"], "--ranges")
    return found


def plan_runs(
    seeds: Sequence[int],
    grid: Mapping[str, Sequence[Any]] | None = None,
    ranges: Mapping[str, Range | Sequence[Any]] | None = None,
    num_draws: int = 0,
    seed: int = 0,
) -> list[PlannedRun]:
    """The runs: every draw, with every point of the grid, with every seed.

    seed: of the draws, which differ from one another. More of them begin with the same.
    The same arguments give the same runs in the same order; ConfigError for what makes no plan.

    >>> [run.name for run in plan_runs([0, 1], {"optimizer.learning_rate": [0.001, 0.002]})][1:3]
    ['1-learning_rate=0.001-seed=1', '2-learning_rate=0.002-seed=0']
    >>> rates = {"optimizer.learning_rate": Range(1e-5, 1e-2)}
    >>> plan_runs([0], ranges=rates, num_draws=2) == plan_runs([0], ranges=rates, num_draws=9)[:2]
    True
    """
    grid, ranges = grid or {}, ranges or {}
    both = sorted(grid.keys() & ranges.keys())
    if both:
        raise ConfigError(
            f"{', '.join(both)}: given in --grid and in --ranges; use only one of them"
        )
    check_names([*grid, *ranges])
    if bool(ranges) != (num_draws > 0):
        raise ConfigError(
            "--random N and --ranges NAME=LOW..HIGH must be given together (in Python num_draws=N "
            "and ranges={NAME: Range(LOW, HIGH)})"
        )
    num = max(num_draws, 1) * math.prod(map(len, grid.values())) * len(seeds)
    if not 0 < num <= MOST_RUNS:
        raise ConfigError(f"this makes {num:,} runs, but a sweep can have 1 to {MOST_RUNS:,}")
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    draws = _draws(ranges, seed, num_draws) or [{}]
    runs = []
    for index, (draw, point, one) in enumerate(itertools.product(draws, points, seeds)):
        settings = draw | point
        runs.append(PlannedRun(run_name(index, num - 1, settings, one), settings, one))
    return runs


def check_names(names: Collection[str]) -> None:
    """Raise ConfigError for settings that cannot be varied together.

    >>> check_names(["loss", "loss.tau"])
    Traceback (most recent call last):
    ...
    raffia.train.settings.ConfigError: loss contains loss.tau: vary only one of them
    """
    for name in names:
        inner = [other for other in names if other.startswith(f"{name}.")]
        if inner:
            raise ConfigError(f"{name} contains {', '.join(inner)}: vary only one of them")
    if "seed" in names:
        raise ConfigError("seeds are varied by --seeds, as in --seeds 0..4")


def _draws(
    ranges: Mapping[str, Range | Sequence[Any]], seed: int, num_draws: int
) -> list[dict[str, Any]]:
    """Draws without repetition: a run with settings and seed of another would count as a sample."""
    found: dict[str, dict[str, Any]] = {}
    for index in range(MOST_TRIES * num_draws):
        draw = _draw(ranges, seed, index)
        found.setdefault(json.dumps(draw), draw)
        if len(found) == num_draws:
            return list(found.values())
    if num_draws:
        raise ConfigError(
            f"--random {num_draws}: only {len(found)} different draws were found in these ranges: "
            f"lower it to --random {len(found)}, or train all combinations with --grid"
        )
    return []


def _draw(ranges: Mapping[str, Range | Sequence[Any]], seed: int, index: int) -> dict[str, Any]:
    def one(name: str, kind: Range | Sequence[Any]) -> object:
        generator = random.Random(derive_seed(seed, "sweep", index, name))
        return kind.draw(generator) if isinstance(kind, Range) else generator.choice(kind)

    return {name: one(name, kind) for name, kind in ranges.items()}


def _assignments(words: Sequence[str], flag: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not (name and equals and text):
            raise ConfigError(
                f"{flag} {word}: write NAME=ONE,TWO, as in optimizer.learning_rate=1e-3,2e-3"
            )
        name = name.replace("-", "_")
        if name in found:
            raise ConfigError(f"{flag}: {name} occurs twice")
        found[name] = text
    return found


def _value(text: str) -> Any:
    """A value as JSON represents it; as text where JSON can't."""
    if text in ("none", "None"):
        return None
    try:
        return json.loads(text)
    except ValueError:  # JSON has no .5
        return float(text) if "." in text and re.fullmatch(_NUMBER, text) else text


def run_name(index: int, last: int, settings: Mapping[str, Any], seed: int) -> str:
    """The name of a run's folder; last: the highest index of the sweep.

    >>> run_name(3, 99, {"loss.tau": 0.5}, 1)
    '03-tau=0.5-seed=1'
    """
    return f"{index:0{len(str(last))}}-{_slug(settings, seed)}"


def _slug(settings: Mapping[str, Any], seed: int) -> str:
    parts = [f"{name.rpartition('.')[2]}={value}" for name, value in settings.items()]
    text = re.sub(r"[^A-Za-z0-9._=+-]+", "_", "-".join(parts))
    return f"{text[:LONGEST_NAME]}-seed={seed}" if text else f"seed={seed}"
