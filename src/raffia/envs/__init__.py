"""Worlds: the contract, its check, and ways to make one of a name, of Gymnasium's, or of many.

Names are imported when first asked for, so that `config.py` comes without torch.
"""

from typing import TYPE_CHECKING, Any

from raffia.envs.config import AtariConfig, EnvConfig

if TYPE_CHECKING:
    from raffia.envs.batch import SerialBatch
    from raffia.envs.check import check_env
    from raffia.envs.env import BatchEnv, Box, Discrete, Env, EnvSpec
    from raffia.envs.gym import GymEnv
    from raffia.envs.make import env_names, make_env, worlds_of
    from raffia.envs.timelimit import TimeLimit
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
    "worlds_of",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    match name:
        case "BatchEnv" | "Box" | "Discrete" | "Env" | "EnvSpec":
            return getattr(import_module("raffia.envs.env"), name)
        case "SerialBatch":
            return import_module("raffia.envs.batch").SerialBatch
        case "WorkerBatch" | "WorkerError":
            return getattr(import_module("raffia.envs.workers"), name)
        case "GymEnv":
            return import_module("raffia.envs.gym").GymEnv
        case "TimeLimit":
            return import_module("raffia.envs.timelimit").TimeLimit
        case "check_env":
            return import_module("raffia.envs.check").check_env
        case "env_names" | "make_env" | "worlds_of":
            return getattr(import_module("raffia.envs.make"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
