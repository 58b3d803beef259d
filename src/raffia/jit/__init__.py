"""Compiled inner loops: numba kernels, records by name, small networks as one call."""

__all__: list[str] = []
