"""The algorithms, each in a package."""

__all__: list[str] = []
