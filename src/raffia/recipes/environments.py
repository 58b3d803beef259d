"""Environments by name: list them, and check whether one keeps the contract."""

from __future__ import annotations

import contextlib
from functools import partial

from raffia.envs.check import Report, check_env
from raffia.envs.config import EnvConfig
from raffia.envs.make import env_names, make_env


def env_ids() -> list[str]:
    """The names that `--env.id` accepts.

    >>> "tictactoe" in env_ids()
    True
    """
    return env_names()


def num_players(config: EnvConfig) -> int:
    """The number of players of an environment: 2 for board games, else 1.

    >>> num_players(EnvConfig(id="tictactoe"))
    2
    """
    with contextlib.closing(make_env(config, num_envs=1)) as env:
        return env.spec.num_players


def check_env_id(name: str, *, seed: int = 0, num_steps: int = 200, num_envs: int = 2) -> Report:
    """Check that the environment of this name keeps the contract, by playing in it.

    num_steps: in each of the num_envs that are stepped together

    >>> check_env_id("probe/value", num_steps=5).ok
    True
    """
    config = EnvConfig(id=name, num_envs=num_envs)
    return check_env(partial(make_env, config), seed=seed, num_steps=num_steps)
