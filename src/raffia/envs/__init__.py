"""Environments: the contract, its check suite, and batches of them.

Names are imported when first asked for, so that `config.py` comes without torch.
"""

from typing import TYPE_CHECKING

from raffia.envs.config import AtariConfig, EnvConfig
from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.envs.batch import SerialBatch, TimeLimit
    from raffia.envs.check import check_env
    from raffia.envs.env import BatchEnv, Box, Discrete, Env, EnvSpec
    from raffia.envs.gym import GymEnv
    from raffia.envs.make import env_factory, env_names, make_env
    from raffia.envs.workers import WorkerBatch, WorkerError

__all__ = [
    "AtariConfig",
    "BatchEnv",
    "Box",
    "Discrete",
    "Env",
    "EnvConfig",
    "EnvSpec",
    "GymEnv",
    "SerialBatch",
    "TimeLimit",
    "WorkerBatch",
    "WorkerError",
    "check_env",
    "env_names",
    "make_env",
    "env_factory",
]

__getattr__, __dir__ = _lazy_names(__name__)
