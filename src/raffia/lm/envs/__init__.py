"""Environments of dialogues, among them Wordle (`raffia.lm.envs.wordle`)."""

__all__: list[str] = []
