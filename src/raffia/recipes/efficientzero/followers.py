"""How other processes make the learner of a run, to share its batches or its members."""

from __future__ import annotations

from functools import partial

from raffia.algorithms.efficientzero.learner import EfficientZeroLearner
from raffia.distributed.group import device_of
from raffia.recipes.efficientzero.actors import configured_run, make_networks, spec_of
from raffia.recipes.members_across import MembersRole
from raffia.recipes.running import threads


def make_learner(config: str, index: int) -> EfficientZeroLearner:
    """The learner of a process that shares batches, or of a worker's members.

    config: JSON of the run.

    >>> from raffia.recipes.efficientzero.actors import actor_config
    >>> from raffia.recipes.efficientzero.presets import PRESETS
    >>> int(make_learner(actor_config(PRESETS["smoke"]), 0).init(0)["step"])
    0
    """
    run = configured_run(config)
    return make_networks(run, spec_of(run.env))


def make_members(config: str, index: int) -> MembersRole:
    """The role of a worker that some members of a population learn in, each by itself: so their
    bits don't depend on how many share a worker.

    config: as of `make_learner`.

    >>> from dataclasses import replace
    >>> from raffia.recipes.efficientzero.actors import actor_config
    >>> from raffia.recipes.efficientzero.presets import PRESETS
    >>> from raffia.recipes.population_config import PopulationConfig
    >>> run = replace(PRESETS["smoke"], population=PopulationConfig(size=4, workers=2))
    >>> make_members(actor_config(run), 0).learner.size
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
