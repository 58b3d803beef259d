"""Dialogues with rewards: read, turned into tokens, stored and batched."""

__all__: list[str] = []
