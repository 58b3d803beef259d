"""Tokenizers: text to token numbers and back; ours, and those of Hugging Face folders."""

__all__: list[str] = []
