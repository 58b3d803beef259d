"""How other processes make the learner of a run, to share its batches or its members."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from raffia.algorithms.ilql.learner import ILQLLearner
from raffia.distributed.engine import Engine, Needs, Workers
from raffia.distributed.follow import Followers
from raffia.distributed.group import device_of
from raffia.evolution.population import Population
from raffia.learner import Accumulate, Learner
from raffia.recipes.engines import make_pool
from raffia.recipes.ilql.config import ILQLRun
from raffia.recipes.ilql.language_model import Making, making_of
from raffia.recipes.members_across import MembersAcross, MembersRole
from raffia.recipes.running import threads
from raffia.tensordict.tensordict import TensorDict
from raffia.train.config import from_json, to_json


def make_networks(making: Making) -> ILQLLearner:
    """The learner of a run, which makes its networks.

    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> int(make_networks(Making(ILQL_PRESETS["ilql-smoke"])).init(0)["step"])
    0
    """
    config = making.config
    return ILQLLearner(
        config,
        num_updates=config.num_updates,
        model_factory=making.fresh,
        fixed=making.fixed,
    )


def make_followers(config: ILQLRun, folder: Path) -> Followers:
    """The processes that share batches with the one that has the run's folder."""
    return Followers(
        f"{__name__}:make_learner",
        _settings(config, folder),
        config.learners.num - 1,
        sums=config.learners.sums,
        device=config.device,
        max_restarts=config.engine.max_restarts,
        spares=config.engine.spares,
        patience=config.engine.patience_seconds,
    )


def make_learner(config: str, index: int) -> Learner:
    """The learner of a process that shares batches.

    config: JSON of the run, and of the folder where what its language model keeps is read.

    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> settings = {"run": to_json(ILQL_PRESETS["ilql-smoke"]), "folder": "nowhere"}
    >>> int(make_learner(json.dumps(settings), 0).init(0)["step"])
    0
    """
    settings = json.loads(config)
    run = from_json(ILQLRun, settings["run"])
    making = making_of(run, settings["folder"]).on(str(device_of(run.device, index + 1)))
    learner: Learner = make_networks(making)
    if run.num_micro_batches > 1:
        learner = Accumulate(learner, run.num_micro_batches)
    return learner


def make_across(
    config: ILQLRun,
    folder: Path,
    population: Population,
    engine: Engine,
    batches: Callable[[int], Iterator[TensorDict]],
) -> MembersAcross:
    """The population of a run with its members in workers.

    >>> from dataclasses import replace
    >>> from raffia.distributed.engine import InlineEngine
    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> from raffia.recipes.population_config import PopulationConfig
    >>> run = replace(ILQL_PRESETS["ilql-smoke"], population=PopulationConfig(size=4, workers=2))
    >>> population = Population(make_networks(Making(run)), 4)
    >>> there = Path("nowhere")
    >>> make_across(run, there, population, InlineEngine(), lambda update: iter([])).share
    2
    """
    needs = Needs(cpus=max(1, config.num_threads))
    workers = Workers(f"{__name__}:make_members", config.population.workers, needs)
    pool = make_pool(engine, workers, _settings(config, folder), config.engine)
    return MembersAcross(population, pool, batches=batches, device=config.device)


def make_members(config: str, index: int) -> MembersRole:
    """The role of a worker that some members of a population learn in.

    config: as of `make_learner`.

    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> from raffia.recipes.population_config import PopulationConfig
    >>> from dataclasses import replace
    >>> run = replace(ILQL_PRESETS["ilql-smoke"], population=PopulationConfig(size=4, workers=2))
    >>> make_members(_settings(run, Path("nowhere")), 0).learner.size
    2
    """
    run = from_json(ILQLRun, json.loads(config)["run"])
    population = run.population
    return MembersRole(
        make_learner(config, index),
        population.size // population.workers,
        context=partial(threads, run.num_threads),
        device=device_of(run.device, index + 1),
    )


def _settings(config: ILQLRun, folder: Path) -> str:
    return json.dumps({"run": to_json(config), "folder": str(folder.resolve())})
