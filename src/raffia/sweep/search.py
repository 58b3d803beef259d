"""A sweep whose settings Optuna suggests from the scores of earlier trials. Only this file imports
Optuna.

Trial i is suggested from its number and from trials 0 to i - lag, whatever has ended by then: an
early end waits, a late one is waited for. So the plan follows from the command and scores alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from raffia.functional.seeds import derive_seed
from raffia.sweep.plan import MOST_TRIES, PlannedRun, Range, check_names, run_name
from raffia.train.config import ConfigError

MISSING = (
    "--optuna needs Optuna, which is not installed: pip install 'raffia[sweep]'; or --random N, "
    "for draws that do not learn from each other"
)


@dataclass(frozen=True, kw_only=True)
class Search:
    """Trials that Optuna suggests, each with every seed; the larger the mean score the better.

    >>> search = Search(num_trials=20, ranges={"loss.tau": Range(0.5, 0.9)}, seeds=(0, 1))
    >>> search.num_runs, search.may_suggest(0), search.may_suggest(1)
    (40, True, False)
    """

    num_trials: int
    ranges: Mapping[str, Range | Sequence[Any]]
    seeds: tuple[int, ...] = (0,)
    seed: int = 0  # of Optuna's draws
    lag: int = 1  # trials that are open at a time; another number is another search
    scores: tuple[float | None, ...] = ()  # scores of the first trials; None of one that failed

    def __post_init__(self) -> None:
        if self.num_trials < 1 or self.lag < 1 or not self.ranges:
            raise ConfigError(
                "--optuna N and --ranges NAME=LOW..HIGH must be given together, with N of 1 or more"
            )
        check_names(self.ranges)

    @property
    def num_runs(self) -> int:
        """The runs of all trials."""
        return self.num_trials * len(self.seeds)

    def may_suggest(self, trial: int) -> bool:
        """Whether a trial can be suggested now."""
        return trial < self.num_trials and trial - len(self.scores) < self.lag


def next_trial(search: Search, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The runs of the next trial; ModuleNotFoundError without the extra `sweep`.

    runs: of the trials before it.
    """
    num = len(search.seeds)
    settings = suggest(search, [run.settings for run in runs[::num]])
    first, last = len(runs), search.num_runs - 1
    return [
        PlannedRun(run_name(first + at, last, settings, seed), settings, seed)
        for at, seed in enumerate(search.seeds)
    ]


def suggest(search: Search, before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings of the next trial, by Optuna's TPE sampler.

    before: of the trials so far, of which the first `search.scores` have ended. A score that is
        known early, as trials ended together, does not count yet.
    """
    optuna = require_optuna()
    scores = search.scores[: max(0, len(before) - search.lag + 1)]
    kinds = {name: _distribution(optuna, kind) for name, kind in search.ranges.items()}
    state = optuna.trial.TrialState
    with _quiet(optuna):
        # Each trial has a sampler of its own: what it draws depends on its number alone.
        seed = derive_seed(search.seed, "optuna", len(before)) % 2**32
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=search.lag > 1)
        others = optuna.samplers.RandomSampler(seed=seed)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for number, settings in enumerate(before):
            score = scores[number] if number < len(scores) else None
            failed = number < len(scores) and score is None
            ended = state.FAIL if failed else state.RUNNING if score is None else state.COMPLETE
            params = {
                name: settings[name] if isinstance(kind, Range) else kind.index(settings[name])
                for name, kind in search.ranges.items()
            }
            study.add_trial(
                optuna.trial.create_trial(
                    state=ended, value=score, params=params, distributions=kinds
                )
            )
        for _ in range(MOST_TRIES):
            asked = study.ask(kinds).params
            found = {name: _from_optuna(search.ranges[name], asked[name]) for name in search.ranges}
            if found not in before:
                break
            study.sampler = others  # a trial again would be the same runs again
    return found


def probes(search: Search) -> list[PlannedRun]:
    """Runs at the ends of the ranges, and of each choice: what is wrong with one is known early.

    >>> [run.settings for run in probes(Search(num_trials=1, ranges={"a": Range(1, 5)}))]
    [{'a': 1}, {'a': 5}]
    """
    ends = {
        name: [kind.low, kind.high] if isinstance(kind, Range) else [*kind]
        for name, kind in search.ranges.items()
    }
    first = {name: values[0] for name, values in ends.items()}
    found = [first | {name: value} for name, values in ends.items() for value in values]
    return [
        PlannedRun(
            run_name(number, len(found), settings, search.seeds[0]), settings, search.seeds[0]
        )
        for number, settings in enumerate(found)
    ]


def require_optuna() -> ModuleType:
    """The package; ModuleNotFoundError, with the extra's name, if it is not installed."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise ModuleNotFoundError(MISSING, name="optuna") from None
    return optuna


def _distribution(optuna: Any, kind: Range | Sequence[Any]) -> Any:
    of = optuna.distributions
    if not isinstance(kind, Range):
        return of.CategoricalDistribution([*range(len(kind))])  # values may be lists
    if kind.is_whole:
        return of.IntDistribution(kind.low, kind.high, log=kind.is_log)
    return of.FloatDistribution(kind.low, kind.high, log=kind.is_log)


def _from_optuna(kind: Range | Sequence[Any], found: Any) -> Any:
    return kind.readable(found) if isinstance(kind, Range) else kind[found]


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """Silence Optuna's messages about each study and its warnings of experimental features."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
