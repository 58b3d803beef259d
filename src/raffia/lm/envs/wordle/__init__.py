"""Wordle: the game, scripted players, data sets, and how well a policy plays."""

from raffia.lm.envs.wordle.data import (
    LabelledGame,
    Part,
    branching_games,
    branching_scripts,
    sample_games,
    wordle_letter_tokenizer,
    wordle_word_tokenizer,
)
from raffia.lm.envs.wordle.game import Wordle, WordleEnv, WordleObservation, colors
from raffia.lm.envs.wordle.games import Games, game_seeds, simulate
from raffia.lm.envs.wordle.play import Player, WordleEvaluation, evaluate, evaluation_of
from raffia.lm.envs.wordle.policies import (
    NON_WORD,
    Fitting,
    InformationGain,
    Mixture,
    NonWord,
    Positions,
    RandomWord,
    Repeat,
    Say,
    Script,
    Switch,
    Wrong,
    start_word,
)
from raffia.lm.envs.wordle.vocabulary import Vocabulary, VocabularyError

__all__ = [
    "NON_WORD",
    "Fitting",
    "Games",
    "InformationGain",
    "LabelledGame",
    "Mixture",
    "NonWord",
    "Part",
    "Player",
    "Positions",
    "RandomWord",
    "Repeat",
    "Say",
    "Script",
    "Switch",
    "Vocabulary",
    "VocabularyError",
    "Wordle",
    "WordleEnv",
    "WordleEvaluation",
    "WordleObservation",
    "Wrong",
    "branching_games",
    "branching_scripts",
    "colors",
    "evaluate",
    "evaluation_of",
    "game_seeds",
    "sample_games",
    "simulate",
    "start_word",
    "wordle_letter_tokenizer",
    "wordle_word_tokenizer",
]
