"""How other processes make the learner of a run, to share its batches."""

from __future__ import annotations

import json

from raffia.algorithms.efficientzero.learner import EfficientZeroLearner
from raffia.distributed.follow import Followers
from raffia.envs.env import EnvSpec
from raffia.envs.make import make_env
from raffia.recipes.efficientzero.actors import actor_config, make_networks, one_env
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.train.config import from_json

__all__ = ["make_followers", "make_learner"]


def make_followers(config: EfficientZeroRun) -> Followers:
    """The processes that share batches with the one that has the run's folder."""
    return Followers(
        f"{__name__}:make_learner",
        actor_config(config),
        config.learners.num - 1,
        sums=config.learners.sums,
        max_restarts=config.engine.max_restarts,
        patience=config.engine.patience_seconds,
    )


def make_learner(config: str, index: int) -> EfficientZeroLearner:
    """The learner of a process that shares batches.

    config: JSON of the run.

    >>> from raffia.recipes.efficientzero.presets import PRESETS
    >>> int(make_learner(actor_config(PRESETS["smoke"]), 0).init(0)["step"])
    0
    """
    run = from_json(EfficientZeroRun, json.loads(config)["run"])
    return make_networks(run, _spec(run))


def _spec(run: EfficientZeroRun) -> EnvSpec:
    env = make_env(one_env(run.env))
    try:
        return env.spec
    finally:
        env.close()
