"""Distributed computation of the parts of a run: engines, pools of workers, weights, gradients.

Knows no algorithm and no loop.
"""

from typing import TYPE_CHECKING

from raffia.distributed.board import Board as Board
from raffia.distributed.chaos import ChaosEngine as ChaosEngine
from raffia.distributed.check_engine import check_engine as check_engine
from raffia.distributed.data_parallel import DataParallel as DataParallel
from raffia.distributed.engine import Engine as Engine
from raffia.distributed.engine import InlineEngine as InlineEngine
from raffia.distributed.engine import Lost as Lost
from raffia.distributed.engine import Needs as Needs
from raffia.distributed.engine import Role as Role
from raffia.distributed.engine import RoleError as RoleError
from raffia.distributed.engine import Worker as Worker
from raffia.distributed.engine import Workers as Workers
from raffia.distributed.follow import Followers as Followers
from raffia.distributed.group import Group as Group
from raffia.distributed.group import Rendezvous as Rendezvous
from raffia.distributed.pool import Pool as Pool
from raffia.distributed.process import ProcessEngine as ProcessEngine
from raffia.distributed.sharded import Sharded as Sharded
from raffia.distributed.sharded import StateLost as StateLost
from raffia.lazy import public_names as _public_names

if not TYPE_CHECKING:
    __all__ = _public_names(__name__)
