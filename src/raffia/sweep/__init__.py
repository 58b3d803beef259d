"""Sweeps: many runs over seeds and settings, as a plan, a folder, and an engine that spreads them.

The first line of each file says what it is for; docs/sweep.md is the guide.
"""

from typing import TYPE_CHECKING

from raffia.lazy import public_names as _public_names
from raffia.sweep.api import sweep as sweep
from raffia.sweep.manifest import MANIFEST as MANIFEST
from raffia.sweep.manifest import Manifest as Manifest
from raffia.sweep.manifest import is_sweep as is_sweep
from raffia.sweep.manifest import read_manifest as read_manifest
from raffia.sweep.manifest import write_manifest as write_manifest
from raffia.sweep.plan import PlannedRun as PlannedRun
from raffia.sweep.plan import Range as Range
from raffia.sweep.plan import plan_runs as plan_runs
from raffia.sweep.plan import read_choices as read_choices
from raffia.sweep.plan import read_ranges as read_ranges
from raffia.sweep.plan import read_seeds as read_seeds
from raffia.sweep.search import Search as Search
from raffia.sweep.session import SweepResult as SweepResult
from raffia.sweep.session import SweepSession as SweepSession
from raffia.sweep.session import make_sweep_engine as make_sweep_engine
from raffia.sweep.worker import RunRole as RunRole

if not TYPE_CHECKING:
    __all__ = _public_names(__name__)
