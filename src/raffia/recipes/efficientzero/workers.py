"""The workers of a run of EfficientZero: actors, reanalyzers, evaluators, those of members.

Other processes make the learner of a run here, too, to share its batches or its members.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from raffia.distributed.group import device_of
from raffia.hints import plural
from raffia.learner import Learner
from raffia.recipes import workers
from raffia.recipes.efficientzero.actors import (
    accelerated_by,
    configured_run,
    make_networks,
    process_config,
    spec_of,
)
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.recipes.members import MembersRole
from raffia.recipes.running import threads
from raffia.recipes.workers import RunWorkers, where, workers_config
from raffia.train.ahead import holds

ROLES = {
    "actors": "raffia.recipes.efficientzero.actors:ActorRole",
    "reanalyzers": "raffia.recipes.efficientzero.reanalyzers:ReanalyzeRole",
    "evaluators": "raffia.recipes.efficientzero.evaluation:EvaluateRole",
    "population": "raffia.recipes.efficientzero.workers:make_members",
}


def make_workers(
    config: EfficientZeroRun, message: Callable[[str], None], *, from_config: bool
) -> RunWorkers:
    """The workers of a run.

    from_config: whether environments and networks are those of the config, which workers make
        theirs from; ValueError if they are not, and there are workers.

    >>> workers = make_workers(EfficientZeroRun(), print, from_config=False)
    >>> workers.pool("evaluators").num_workers
    1
    """
    others = [kind for kind in ROLES if workers_config(config, kind).play_elsewhere]
    others += ["learners"] if config.learners.num > 1 else []
    if others and not from_config:
        raise ValueError(
            f"{others[0]}.* cannot be used with a custom make_env or custom networks, because "
            f"{others[0]} are built from the config alone. Name them there, as in "
            "make_env='file.py:Environment', networks='file.py:networks', or leave "
            f"{others[0]}.* as they are"
        )
    return RunWorkers(config, ROLES, process_config(config), message)


def describe_workers(run: EfficientZeroRun) -> list[str]:
    """Describe which workers do what, for the start of a run; empty if the loop does all of it.

    >>> from raffia.recipes.efficientzero.config import ReplayConfig
    >>> from raffia.recipes.scale_config import ActorsConfig, ReanalyzersConfig
    >>> print(*describe_workers(EfficientZeroRun(actors=ActorsConfig(num=2, ahead=8))))
    2 actors in this process play 4 environments each, 8 updates ahead; this process trains
    >>> print(*describe_workers(EfficientZeroRun(
    ...     replay=ReplayConfig(shards=4), reanalyzers=ReanalyzersConfig(num=2, ahead=8))))
    2 reanalyzers in this process make batches, 8 updates ahead, with 2 of 4 replay shards each
    >>> print(*describe_workers(EfficientZeroRun(actors=ActorsConfig(num=8, ahead=1))))
    8 actors in this process play 1 environment each, 1 update ahead; this process trains
    """
    actors, reanalyzers = run.actors, run.reanalyzers
    lines = workers.describe_workers(run)
    if actors.play_elsewhere:
        num = max(1, actors.num)
        do, each = ("play", " each") if num > 1 else ("plays", "")
        lines.append(
            f"{plural(num, 'actor')} {where(run.engine, actors.num)} {do} "
            f"{plural(run.env.num_envs // num, 'environment')}{each}, "
            f"{plural(actors.ahead, 'update')} ahead; this process trains"
        )
    if reanalyzers.play_elsewhere:
        num = max(1, reanalyzers.num)
        do, held = "make" if num > 1 else "makes", ""
        if run.shards_elsewhere:
            share = len(holds(0, num, run.replay.shards))
            held = f", with {share} of {run.replay.shards} replay shards each"
        lines.append(
            f"{plural(num, 'reanalyzer')} {where(run.engine, reanalyzers.num)} {do} batches, "
            f"{plural(reanalyzers.ahead, 'update')} ahead{held}"
        )
    return lines


def make_learner(config: str, index: int) -> Learner:
    """The learner of a process that shares batches, or of a worker's members.

    config: JSON of the run.

    >>> from raffia.recipes.efficientzero.actors import process_config
    >>> from raffia.recipes.efficientzero.presets import PRESETS
    >>> int(make_learner(process_config(PRESETS["smoke"]), 0).init(0)["step"])
    0
    """
    run = configured_run(config)
    return accelerated_by(run, make_networks(run, spec_of(run.env)))


def make_members(config: str, index: int) -> MembersRole:
    """The role of a worker that some members of a population learn in, each by itself: so their
    bits don't depend on how many share a worker.

    config: as of `make_learner`.

    >>> from dataclasses import replace
    >>> from raffia.recipes.efficientzero.actors import process_config
    >>> from raffia.recipes.efficientzero.presets import PRESETS
    >>> from raffia.recipes.population_config import PopulationConfig
    >>> run = replace(PRESETS["smoke"], population=PopulationConfig(size=4, workers=2))
    >>> make_members(process_config(run), 0).learner.size
    2
    """
    run = configured_run(config)
    return MembersRole(
        make_learner(config, index),
        run.population.size // run.population.workers,
        batches="own",
        grads="each",
        context=partial(threads, run.num_threads),
        device=device_of(run.device, index + 1),
    )
