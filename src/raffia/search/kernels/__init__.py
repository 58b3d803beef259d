"""The compiled inner steps of a search; each file is imported, and numba with it, at first use."""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.search.kernels import noise, record, rows, sampling, steps

__all__ = ["noise", "record", "rows", "sampling", "steps"]

__getattr__, __dir__ = _lazy_names(__name__)
