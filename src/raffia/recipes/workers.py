"""The workers of a run: engines, pools of each kind, and the processes that share batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raffia.distributed.engine import Engine, InlineEngine, Machine, Needs, Workers
from raffia.distributed.follow import FOLLOWER, Followers
from raffia.distributed.pool import Pool
from raffia.hints import plural
from raffia.recipes.devices import require_device
from raffia.recipes.scale_config import EngineConfig, WorkersConfig
from raffia.tensordict.tensordict import TensorDict
from raffia.train.evaluations import Evaluations, Outcome

ECHO = "raffia.distributed.check_engine:Echo"
NUM_CALLS = 50
NUM_BYTES = 16 * 2**20


def make_engine(config: EngineConfig, message: Callable[[str], None] | None = None) -> Engine:
    """The engine that a config names.

    message: is given lines for the user, such as that a worker waits for room.
    Raises ModuleNotFoundError without the extra it needs, ConnectionError if its cluster does not
    answer.

    >>> type(make_engine(EngineConfig())).__name__
    'InlineEngine'
    """
    if config.name == "process":
        from raffia.distributed.process import ProcessEngine

        return ProcessEngine(config.spares)
    if config.name == "ray":
        from raffia.distributed.ray import RayEngine

        return RayEngine(config.address, spares=config.spares, message=message)
    return InlineEngine()


def engine_for(
    config: EngineConfig,
    workers: Sequence[Workers],
    message: Callable[[str], None] | None = None,
    *,
    remark: str,
) -> Engine:
    """The engine that a config names, once it is certain that these workers can run there.

    remark: is added to the ValueError where there is no room for them.
    """
    engine = make_engine(config, message)
    try:
        engine.require(workers)
    except BaseException as error:
        engine.close()
        if isinstance(error, ValueError):
            error.add_note(remark)
        raise
    return engine


def where(engine: EngineConfig, num: int = 1) -> str:
    """Describe in words where an engine's workers run.

    num: how many they are; without any, the loop does their tasks.

    >>> where(EngineConfig(name="process")), where(EngineConfig(name="process"), num=0)
    ('in processes of this machine', 'in this process')
    """
    if not num:
        return "in this process"
    return {
        "inline": "in this process",
        "process": "in processes of this machine",
        "ray": f"on the Ray cluster {engine.address or 'of this machine'}",
    }[engine.name]


@dataclass(frozen=True)
class Speed:
    """How fast a worker started and answered."""

    seconds_to_first: float  # from nothing to the first answer
    seconds_of_call: float  # of a small task and its answer
    mib_per_second: float  # of a large one, there and back


@dataclass(frozen=True)
class TriedEngine:
    """A report on an engine: the resources for workers, and how fast one of them was.

    >>> TriedEngine("this process", (), None).description
    'this process'
    """

    description: str
    machines: Sequence[Machine]  # of a cluster
    speed: Speed | None  # None: a machine can't run workers of this program, so none was started


def try_engine(name: str, address: str = "") -> TriedEngine:
    """Check the machines of an engine; start a worker that answers with its task, and call it.

    >>> try_engine("inline").description
    'this process'
    """
    began = time.perf_counter()
    engine = make_engine(EngineConfig(name=name, address=address))  # type: ignore[arg-type]
    try:
        machines = engine.machines(ECHO)
        if any(machine.error is not None for machine in machines):
            return TriedEngine(engine.resources(), machines, None)
        worker = engine.start(ECHO, "{}", 0)

        def seconds(task: TensorDict, num: int) -> float:
            start = time.perf_counter()
            for _ in range(num):
                worker.ask(task)
                worker.take(60.0)
            return (time.perf_counter() - start) / num

        small = TensorDict(x=torch.zeros(8))
        large = TensorDict(x=torch.zeros(NUM_BYTES, dtype=torch.uint8))
        seconds(small, 1)
        first = time.perf_counter() - began
        call, copy = seconds(small, NUM_CALLS), seconds(large, 3)
        rate = 2 * NUM_BYTES / copy / 2**20
        return TriedEngine(engine.resources(), machines, Speed(first, call, rate))
    finally:
        engine.close()


POPULATION = "population"  # the kind of workers that members learn in
SETTINGS = {  # of kinds that do not have num, cpus and gpus
    POPULATION: "population.workers, num_threads",
    "learners": "learners.num, num_threads, learners.gpus",
}


def workers_config(config: Any, kind: str) -> WorkersConfig:
    """The settings of a run's workers of one kind.

    >>> from raffia.recipes.efficientzero.config import EfficientZeroRun
    >>> workers_config(EfficientZeroRun(num_threads=2), POPULATION).cpus
    2.0
    """
    if kind == POPULATION:
        cpus = float(max(1, config.num_threads))
        return WorkersConfig(num=config.population.workers, device="", cpus=cpus)
    settings: WorkersConfig = getattr(config, kind)
    return settings


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
        self._used = [kind for kind in roles if workers_config(config, kind).num]
        for kind in roles:
            device = workers_config(config, kind).device
            # Those of Ray are on other machines.
            if device and not (kind in self._used and config.engine.name == "ray"):
                require_device(device, f"{kind}.device")
        self._engine: Engine = InlineEngine()
        workers = [self._workers(kind) for kind in self._used]
        self._follow_on_ray = config.learners.num > 1 and config.engine.name == "ray"
        if self._follow_on_ray:
            needs = Needs(float(torch.get_num_threads()), config.learners.gpus)
            workers.append(Workers(FOLLOWER, config.learners.num - 1, needs))
        if workers:
            settings = [
                SETTINGS.get(kind, f"{kind}.num, {kind}.cpus, {kind}.gpus") for kind in self._used
            ]
            settings += [SETTINGS["learners"]] if self._follow_on_ray else []
            remark = f"Settings: {'; '.join(settings)}"
            self._engine = engine_for(config.engine, workers, message, remark=remark)

    def _workers(self, kind: str) -> Workers:
        """The workers of one kind; one where the settings have none, for this process."""
        settings = workers_config(self._config, kind)
        needs = Needs(cpus=settings.cpus, gpus=settings.gpus)
        return Workers(self._roles[kind], max(1, settings.num), needs)

    def pool(self, kind: str) -> Pool:
        """The workers of one kind; in this process, where the settings have none."""
        workers, settings = self._workers(kind), self._config.engine
        return Pool(
            self._engine if kind in self._used else InlineEngine(),
            workers.role,
            self._made_from,
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
    ) -> Evaluations:
        """Evaluations by workers; by this process, to join those that an earlier session began."""
        settings = self._config.evaluators
        return Evaluations(
            self.pool("evaluators"),
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
            gpus=learners.gpus if self._follow_on_ray else 0.0,
            engine=self._engine if self._follow_on_ray else None,
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
        at = f", {run.learners.num - 1} of them {where(run.engine)}"
        follow_at = at if run.engine.name == "ray" else ""
        lines.append(f"{run.learners.num} processes share {what}{follow_at}")
    if population.workers:
        at = where(run.engine)
        share = "share" if population.workers > 1 else "has all"
        lines.append(
            f"{plural(population.workers, 'worker')} {at} {share} {population.size} members"
        )
    if evaluators.play_elsewhere:
        lines.append(
            f"{plural(max(1, evaluators.num), 'evaluator')} "
            f"{where(run.engine, evaluators.num)}; results are collected "
            f"{plural(evaluators.join_after, 'update')} later"
        )
    return lines
