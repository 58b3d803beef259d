"""Compiled inner loops of this room; each file is imported, and numba with it, at first use."""

__all__: list[str] = []
