"""The workers of a run: its engine, pools of each kind, and the processes that share batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raffia.distributed.engine import Engine, InlineEngine, Needs, Workers
from raffia.distributed.follow import Followers
from raffia.distributed.pool import Pool
from raffia.hints import plural
from raffia.recipes.devices import require_device
from raffia.recipes.engines import engine_for, where
from raffia.tensordict.tensordict import TensorDict
from raffia.train.evaluations import Evaluations, Outcome

POPULATION = "population"  # the kind of workers that members learn in


def kinds_elsewhere(config: Any, kinds: Sequence[str]) -> list[str]:
    """The kinds of workers that a run has, out of the given ones; the loop does the work of the
    others.

    >>> from raffia.recipes.efficientzero.config import EfficientZeroRun
    >>> from raffia.recipes.scale_config import ActorsConfig
    >>> kinds_elsewhere(EfficientZeroRun(actors=ActorsConfig(num=2)), ["actors", "evaluators"])
    ['actors']
    """
    return [
        kind
        for kind in kinds
        if (
            config.population.workers
            if kind == POPULATION
            else getattr(config, kind).play_elsewhere
        )
    ]


class RunWorkers:
    """Engine and pools of a run's workers; what can never run is refused before it is started.

    config: of the run; for each kind of workers it has settings of that name.
    roles: of each kind that the algorithm has, "package.module:name".
    made_from: JSON that roles and learners are made from.
    message: is given lines for the user.
    Raises RunError for a device that is not there, ValueError for workers that can't be had.

    >>> from raffia.recipes.efficientzero.config import EfficientZeroRun
    >>> roles = {"evaluators": "raffia.recipes.efficientzero.evaluation:EvaluateRole"}
    >>> RunWorkers(EfficientZeroRun(), roles, "{}", print).pool("evaluators").num_workers
    1
    """

    def __init__(
        self,
        config: Any,
        roles: Mapping[str, str],
        made_from: str,
        message: Callable[[str], None],
    ) -> None:
        self._config, self._roles, self._made_from = config, roles, made_from
        self._used = [kind for kind in roles if self._num(kind)]
        for kind in roles:
            device = "" if kind == POPULATION else getattr(config, kind).device
            # Those of Ray are on other machines.
            if device and not (kind in self._used and config.engine.name == "ray"):
                require_device(device, f"{kind}.device")
        self._engine: Engine = InlineEngine()
        if self._used:
            workers = [self._workers(kind) for kind in self._used]
            remark = f"Settings of each kind ({', '.join(self._used)}): num, cpus, gpus"
            self._engine = engine_for(config.engine, workers, message, remark=remark)

    def _num(self, kind: str) -> int:
        """How many workers of a kind there are; without any, the loop does their tasks."""
        config = self._config
        num: int = config.population.workers if kind == POPULATION else getattr(config, kind).num
        return num

    def _workers(self, kind: str) -> Workers:
        """The workers of one kind; one where the settings have none, for this process."""
        config, role = self._config, self._roles[kind]
        if kind == POPULATION:
            needs = Needs(cpus=float(max(1, config.num_threads)))
        else:
            needs = Needs(cpus=getattr(config, kind).cpus, gpus=getattr(config, kind).gpus)
        return Workers(role, max(1, self._num(kind)), needs)

    def pool(self, kind: str, made_from: str | None = None) -> Pool:
        """The workers of one kind; in this process, where the settings have none.

        made_from: instead of what the others are made from.
        """
        workers, settings = self._workers(kind), self._config.engine
        return Pool(
            self._engine if kind in self._used else InlineEngine(),
            workers.role,
            self._made_from if made_from is None else made_from,
            workers.num,
            needs=workers.needs,
            max_restarts=settings.max_restarts,
            patience=settings.patience_seconds,
        )

    def evaluations(
        self,
        *,
        acting: Callable[[TensorDict], TensorDict],
        outcome: Callable[[int, int, TensorDict], Outcome],
        made_from: str | None = None,
    ) -> Evaluations:
        """Evaluations by workers; by this process, to join those that an earlier session began."""
        settings = self._config.evaluators
        return Evaluations(
            self.pool("evaluators", made_from),
            join_after=settings.join_after,
            acting=acting,
            outcome=outcome,
            is_used=settings.play_elsewhere,
        )

    def followers(self, learner: str) -> Followers:
        """The processes that share batches with this one.

        learner: what makes it there, "package.module:name".
        """
        learners, engine = self._config.learners, self._config.engine
        return Followers(
            learner,
            self._made_from,
            learners.num - 1,
            sums=learners.sums,
            device=self._config.device,
            max_restarts=engine.max_restarts,
            spares=engine.spares,
            patience=engine.patience_seconds,
        )

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


def describe_workers(run: Any) -> list[str]:
    """Describe where a run learns and evaluates, for its start; empty if the loop does all of it.

    >>> from raffia.recipes.ilql.config import ILQLRun
    >>> from raffia.recipes.population_config import PopulationConfig
    >>> describe_workers(ILQLRun(population=PopulationConfig(size=4, workers=2)))
    ['2 workers in this process share 4 members']
    """
    lines = []
    population, evaluators = run.population, run.evaluators
    if run.learners.num > 1:
        what = "each batch and the state" if run.learners.state == "sharded" else "each batch"
        lines.append(f"{run.learners.num} processes share {what}")
    if population.workers:
        at = where(run.engine)
        lines.append(f"{population.workers} workers {at} share {population.size} members")
    if evaluators.play_elsewhere:
        lines.append(
            f"{plural(max(1, evaluators.num), 'evaluator')} "
            f"{where(run.engine, evaluators.num)}; results are collected "
            f"{evaluators.join_after:,} updates later"
        )
    return lines
