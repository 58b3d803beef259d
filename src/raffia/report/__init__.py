"""Run folders, read: a page that shows runs, and a line that sums one up. Files only, no torch."""

from typing import TYPE_CHECKING, Any

from raffia.report.folder import find_runs
from raffia.report.summary import RunSummary, summarise

if TYPE_CHECKING:
    from raffia.report.page import write_report

__all__ = ["RunSummary", "find_runs", "summarise", "write_report"]


def __getattr__(name: str) -> Any:
    if name == "write_report":  # numpy comes with it, which a list of runs can do without
        from raffia.report.page import write_report

        return write_report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
