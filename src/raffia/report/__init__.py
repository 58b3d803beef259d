"""Run folders, read: a page that shows runs, and a line that sums one up. Files only, no torch."""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.report.folder import RunSummary as RunSummary
    from raffia.report.folder import find_runs as find_runs
    from raffia.report.folder import summarise as summarise
    from raffia.report.page import write_report as write_report

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = _lazy_names(__name__)
