"""Sweeps: many runs over seeds and settings, as a plan, a folder, and an engine that spreads them.

The first line of each file says what it is for; docs/sweep.md is the guide.
"""

from raffia.sweep.manifest import MANIFEST, Manifest, is_sweep, read_manifest, write_manifest
from raffia.sweep.plan import PlannedRun, Range, plan_runs, read_choices, read_ranges, read_seeds
from raffia.sweep.search import Search
from raffia.sweep.session import SweepResult, SweepSession, make_sweep_engine
from raffia.sweep.worker import RunRole

__all__ = [
    "MANIFEST",
    "Manifest",
    "PlannedRun",
    "Range",
    "RunRole",
    "Search",
    "SweepResult",
    "SweepSession",
    "is_sweep",
    "make_sweep_engine",
    "plan_runs",
    "read_choices",
    "read_manifest",
    "read_ranges",
    "read_seeds",
    "write_manifest",
]
