"""Where older programs look for `symbolic_trace`; it stands in `raffia.nn`."""

from raffia.nn.trace import symbolic_trace as symbolic_trace
