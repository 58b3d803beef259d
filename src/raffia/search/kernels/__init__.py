"""The compiled inner steps of a search; `raffia.search.compiled` calls them."""

__all__: list[str] = []
