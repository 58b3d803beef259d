"""The workers of a run of EfficientZero: actors, reanalyzers, evaluators, those of members."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from raffia.distributed.engine import InlineEngine, Needs, Workers
from raffia.distributed.pool import Pool
from raffia.hints import plural
from raffia.recipes.efficientzero.actors import actor_config
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.recipes.engines import (
    describe_evaluators,
    describe_members,
    make_engine,
    make_pool,
    require_devices,
    where,
    workers_of,
)
from raffia.train.shard_batches import holds

ROLES = {
    "actors": "raffia.recipes.efficientzero.actors:ActorRole",
    "reanalyzers": "raffia.recipes.efficientzero.reanalyzers:ReanalyzeRole",
    "evaluators": "raffia.recipes.efficientzero.evaluators:EvaluateRole",
    "population": "raffia.recipes.efficientzero.followers:make_members",
}


class RunWorkers:
    """Engine and pools of a run's workers; what can never run is refused before it is started.

    message: is given lines for the user.
    from_config: whether environments and networks are those of the config, which workers make
        theirs from.
    Raises ValueError for workers that can't be had.

    >>> workers = RunWorkers(EfficientZeroRun(), print, from_config=False)
    >>> workers.pool("evaluators").num_workers
    1
    """

    def __init__(
        self, config: EfficientZeroRun, message: Callable[[str], None], *, from_config: bool
    ) -> None:
        self._config = config
        used = [kind for kind in ROLES if self._is_elsewhere(kind)]
        others = [*used, *(["learners"] if config.learners.num > 1 else [])]
        if others and not from_config:
            raise ValueError(
                f"{others[0]}.* with a make_env or networks of your own: {others[0]} are made from "
                "the config alone. Register the environment with Gymnasium and name it in env.id, "
                f"or leave {others[0]}.* as they are"
            )
        kinds = ("actors", "reanalyzers", "evaluators")
        require_devices(config.engine, {kind: getattr(config, kind) for kind in kinds})
        self._engine = make_engine(config.engine, message) if used else InlineEngine()
        with contextlib.ExitStack() as failed:
            failed.callback(self._engine.close)
            self._engine.require([self._workers(kind) for kind in used])
            failed.pop_all()

    def _is_elsewhere(self, kind: str) -> bool:
        if kind == "population":
            return self._config.population.workers > 0
        elsewhere: bool = getattr(self._config, kind).play_elsewhere
        return elsewhere

    def _workers(self, kind: str) -> Workers:
        if kind == "population":
            cpus = float(self._config.num_threads)
            return Workers(ROLES[kind], self._config.population.workers, Needs(cpus=cpus))
        return workers_of(ROLES[kind], getattr(self._config, kind))

    def pool(self, kind: str) -> Pool:
        """The workers of one kind; in this process, where the settings have none."""
        engine = self._engine if self._is_elsewhere(kind) else InlineEngine()
        text = actor_config(self._config)
        return make_pool(engine, self._workers(kind), text, self._config.engine)

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


def describe_workers(run: EfficientZeroRun) -> list[str]:
    """Where what is done, for the start of a run; nothing of what the loop does itself.

    >>> from raffia.recipes.efficientzero.config import ReplayConfig
    >>> from raffia.recipes.scale_config import ActorsConfig, ReanalyzersConfig
    >>> print(*describe_workers(EfficientZeroRun(actors=ActorsConfig(num=2, ahead=8))))
    2 actors in this process play 4 environments each, 8 updates ahead; this process learns
    >>> print(*describe_workers(EfficientZeroRun(
    ...     replay=ReplayConfig(shards=4), reanalyzers=ReanalyzersConfig(num=2, ahead=8))))
    2 reanalyzers in this process make batches, 8 updates ahead, 2 of 4 shards of the replay with
    each
    """
    lines, actors, reanalyzers = [], run.actors, run.reanalyzers
    at = where(run.engine)
    if run.learners.num > 1:
        lines.append(f"{run.learners.num} processes share each batch")
    if run.population.workers:
        lines.append(describe_members(run.engine, run.population))
    if actors.play_elsewhere:
        num = max(1, actors.num)
        do, each = ("play", " each") if num > 1 else ("plays", "")
        lines.append(
            f"{plural(num, 'actor')} {at} {do} {run.env.num_envs // num} environments{each}, "
            f"{actors.ahead} updates ahead; this process learns"
        )
    if run.evaluators.play_elsewhere:
        lines.append(describe_evaluators(run.engine, run.evaluators))
    if reanalyzers.play_elsewhere:
        num = max(1, reanalyzers.num)
        do, held = "make" if num > 1 else "makes", ""
        if run.shards_elsewhere:
            share = len(holds(0, num, run.replay.shards))
            held = f", {share} of {run.replay.shards} shards of the replay with each"
        lines.append(
            f"{plural(num, 'reanalyzer')} {at} {do} batches, "
            f"{reanalyzers.ahead} updates ahead{held}"
        )
    return lines
