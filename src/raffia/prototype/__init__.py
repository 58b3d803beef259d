"""Re-export of `symbolic_trace` from `raffia.nn`, for older programs."""

from raffia.prototype.fx import symbolic_trace

__all__ = ["symbolic_trace"]
