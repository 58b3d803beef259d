"""Distributed computation of the parts of a run: engines, pools of workers, weights, gradients.

Knows no algorithm and no loop.
"""

from raffia.distributed.board import Board
from raffia.distributed.chaos import ChaosEngine
from raffia.distributed.check_engine import check_engine
from raffia.distributed.data_parallel import DataParallel
from raffia.distributed.engine import (
    Engine,
    InlineEngine,
    Lost,
    Needs,
    Role,
    RoleError,
    Worker,
    Workers,
)
from raffia.distributed.follow import Followers
from raffia.distributed.group import Group, Rendezvous
from raffia.distributed.pool import Pool
from raffia.distributed.process import ProcessEngine
from raffia.distributed.sharded import Sharded, StateLost

__all__ = [
    "Board",
    "ChaosEngine",
    "DataParallel",
    "Engine",
    "Followers",
    "Group",
    "InlineEngine",
    "Lost",
    "Rendezvous",
    "Needs",
    "Pool",
    "ProcessEngine",
    "Role",
    "RoleError",
    "Sharded",
    "StateLost",
    "Worker",
    "Workers",
    "check_engine",
]
