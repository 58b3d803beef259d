"""Compiled inner loops of this room; each file is imported, and numba with it, at first use."""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.data.kernels import groups, priorities, ring, rows, table

__all__ = ["groups", "priorities", "ring", "rows", "table"]

__getattr__, __dir__ = _lazy_names(__name__)
