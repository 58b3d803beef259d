"""The compiled inner steps of language models; `raffia.lm.compiled` calls them."""

__all__: list[str] = []
