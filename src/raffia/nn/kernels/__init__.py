"""The compiled inner steps of language models; `raffia.nn.compiled_lm` calls them."""

__all__: list[str] = []
