"""Tasks in language: dialogues, tokenizers, and Wordle (`raffia.envs.text.wordle`)."""

from raffia.envs.text.check import check_language_environment
from raffia.envs.text.contract import (
    BatchLanguagePolicy,
    Language_Environment,
    Language_Observation,
    LanguagePolicy,
    Utterance,
)
from raffia.envs.text.dialogues import dialogue_row, write_dialogues
from raffia.envs.text.draws import Draws
from raffia.envs.text.hf_tokenizer import HFTokenizer
from raffia.envs.text.play import Played, play_dialogues
from raffia.envs.text.saved_tokenizer import load_tokenizer
from raffia.envs.text.tabular import TabularPolicy, TabularValues, tabular_values
from raffia.envs.text.tokenizer import (
    SPECIAL_TOKENS,
    PieceTokenizer,
    Tokenizer,
    WordTokenizer,
    character_tokenizer,
)

__all__ = [
    "BatchLanguagePolicy",
    "Draws",
    "HFTokenizer",
    "LanguagePolicy",
    "Language_Environment",
    "Language_Observation",
    "PieceTokenizer",
    "Played",
    "SPECIAL_TOKENS",
    "TabularPolicy",
    "TabularValues",
    "Tokenizer",
    "Utterance",
    "WordTokenizer",
    "character_tokenizer",
    "check_language_environment",
    "dialogue_row",
    "load_tokenizer",
    "play_dialogues",
    "tabular_values",
    "write_dialogues",
]
