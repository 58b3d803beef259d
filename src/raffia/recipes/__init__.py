"""Whole runs, built and wired: the one room that knows all the others."""

__all__: list[str] = []
