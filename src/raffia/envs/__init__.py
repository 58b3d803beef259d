"""Environments: the contract, its check suite, and batches of them.

Names are imported when first asked for, so that `config.py` comes without torch.
"""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.envs.batch import SerialBatch as SerialBatch
    from raffia.envs.batch import TimeLimit as TimeLimit
    from raffia.envs.check import check_env as check_env
    from raffia.envs.config import AtariConfig as AtariConfig
    from raffia.envs.config import EnvConfig as EnvConfig
    from raffia.envs.env import BatchEnv as BatchEnv
    from raffia.envs.env import Box as Box
    from raffia.envs.env import Discrete as Discrete
    from raffia.envs.env import Env as Env
    from raffia.envs.env import EnvSpec as EnvSpec
    from raffia.envs.gym import GymEnv as GymEnv
    from raffia.envs.make import env_factory as env_factory
    from raffia.envs.make import env_names as env_names
    from raffia.envs.make import make_env as make_env
    from raffia.envs.workers import WorkerBatch as WorkerBatch
    from raffia.envs.workers import WorkerError as WorkerError

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = _lazy_names(__name__)
