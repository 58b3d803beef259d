"""Where older programs look for `symbolic_trace`; it stands in `raffia.nn`."""

from raffia.prototype.fx import symbolic_trace

__all__ = ["symbolic_trace"]
