"""How other processes make the learner of a run, to share its batches or its members."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from raffia.algorithms.ilql.learner import ILQLLearner
from raffia.distributed.group import device_of
from raffia.learner import Accumulate, Learner
from raffia.recipes.ilql.config import ILQLRun
from raffia.recipes.ilql.language_model import Making, making_of
from raffia.recipes.members_across import MembersRole
from raffia.recipes.running import threads
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


def make_members(config: str, index: int) -> MembersRole:
    """The role of a worker that some members of a population learn in.

    config: as of `make_learner`.

    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> from raffia.recipes.population_config import PopulationConfig
    >>> from dataclasses import replace
    >>> run = replace(ILQL_PRESETS["ilql-smoke"], population=PopulationConfig(size=4, workers=2))
    >>> make_members(process_config(run, Path("nowhere")), 0).learner.size
    2
    """
    run = from_json(ILQLRun, json.loads(config)["run"])
    return MembersRole(
        make_learner(config, index),
        run.population.size // run.population.workers,
        context=partial(threads, run.num_threads),
        device=device_of(run.device, index + 1),
    )


def process_config(config: ILQLRun, folder: Path) -> str:
    """What other processes make the learner of a run from.

    folder: where what its language model keeps is read.

    >>> process_config(ILQLRun(), Path("/runs/a"))[-20:]
    '"folder": "/runs/a"}'
    """
    return json.dumps({"run": to_json(config), "folder": str(folder.resolve())})
