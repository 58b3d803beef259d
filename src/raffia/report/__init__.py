"""Run folders, read: a page that shows runs, and a line that sums one up. Files only, no torch."""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names
from raffia.report.folder import RunSummary, find_runs, summarise

if TYPE_CHECKING:
    from raffia.report.page import write_report

__all__ = ["RunSummary", "find_runs", "summarise", "write_report"]

__getattr__, __dir__ = _lazy_names(__name__)
