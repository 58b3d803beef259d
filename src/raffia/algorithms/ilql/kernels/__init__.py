"""The compiled inner steps of decoding; `compiled_heads.py` calls them."""

__all__: list[str] = []
