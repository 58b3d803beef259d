"""Dialogues with rewards: read, turned into tokens, stored and batched."""

from raffia.lm.data.dialogue import (
    ConstantTokenReward,
    DataPoint,
    DialogueDataset,
    Iterable_RL_Dataset,
    List_RL_Dataset,
    RL_Dataset,
    SpecifiedTokenReward,
    TokenReward,
    read_dialogues,
)

__all__ = [
    "ConstantTokenReward",
    "DataPoint",
    "DialogueDataset",
    "Iterable_RL_Dataset",
    "List_RL_Dataset",
    "RL_Dataset",
    "SpecifiedTokenReward",
    "TokenReward",
    "read_dialogues",
]
