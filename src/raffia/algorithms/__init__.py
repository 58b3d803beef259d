"""Algorithms, each in a room of its own."""

__all__: list[str] = []
