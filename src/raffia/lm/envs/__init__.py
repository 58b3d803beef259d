"""Environments of dialogues, among them Wordle (`raffia.lm.envs.wordle`)."""

from raffia.lm.envs.check import check_language_environment
from raffia.lm.envs.contract import (
    BatchLanguagePolicy,
    Language_Environment,
    Language_Observation,
    LanguagePolicy,
    Utterance,
)
from raffia.lm.envs.dialogues import dialogue_row, write_dialogues
from raffia.lm.envs.draws import Draws
from raffia.lm.envs.play import Played, play_dialogues
from raffia.lm.envs.tabular import TabularPolicy, TabularValues, tabular_values

__all__ = [
    "BatchLanguagePolicy",
    "Draws",
    "LanguagePolicy",
    "Language_Environment",
    "Language_Observation",
    "Played",
    "TabularPolicy",
    "TabularValues",
    "Utterance",
    "check_language_environment",
    "dialogue_row",
    "play_dialogues",
    "tabular_values",
    "write_dialogues",
]
