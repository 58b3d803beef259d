"""Re-export of `symbolic_trace` from `raffia.nn`, for older programs."""

from raffia.nn.trace import symbolic_trace as symbolic_trace
