"""How other processes make the learner with which they share a run's batches."""

from __future__ import annotations

import json
from pathlib import Path

from raffia.algorithms.ilql.learner import ILQLLearner
from raffia.distributed.follow import Followers
from raffia.learner import Accumulate, Learner
from raffia.recipes.ilql.config import ILQLRun
from raffia.recipes.ilql.language_model import Making, making_of
from raffia.train.config import from_json, to_json

__all__ = ["make_followers", "make_learner", "make_networks"]


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
    told = {"run": to_json(config), "folder": str(folder.resolve())}
    return Followers(
        f"{__name__}:make_learner",
        json.dumps(told),
        config.learners.num - 1,
        sums=config.learners.sums,
    )


def make_learner(config: str, index: int) -> Learner:
    """The learner of a process that shares batches.

    config: JSON of the run, and of the folder where what its language model keeps is read.

    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> told = {"run": to_json(ILQL_PRESETS["ilql-smoke"]), "folder": "nowhere"}
    >>> int(make_learner(json.dumps(told), 0).init(0)["step"])
    0
    """
    told = json.loads(config)
    run = from_json(ILQLRun, told["run"])
    learner: Learner = make_networks(making_of(run, told["folder"]))
    if run.num_micro_batches > 1:
        learner = Accumulate(learner, run.num_micro_batches)
    return learner
