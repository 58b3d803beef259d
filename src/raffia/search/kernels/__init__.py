"""The compiled inner steps of a search; each file is imported, and numba with it, at first use."""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.search.kernels import noise as noise
    from raffia.search.kernels import record as record
    from raffia.search.kernels import rows as rows
    from raffia.search.kernels import sampling as sampling
    from raffia.search.kernels import steps as steps

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = _lazy_names(__name__)
