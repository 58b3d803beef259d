"""Compiled inner loops of this room; each file is imported, and numba with it, at first use."""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.data.kernels import groups as groups
    from raffia.data.kernels import priorities as priorities
    from raffia.data.kernels import ring as ring
    from raffia.data.kernels import rows as rows
    from raffia.data.kernels import table as table

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = _lazy_names(__name__)
