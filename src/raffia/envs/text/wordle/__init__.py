"""Wordle: the game, scripted players, data sets, and how well a policy plays."""

from raffia.envs.text.wordle.branching import BranchingConfig, branching_games, branching_scripts
from raffia.envs.text.wordle.colors import colors
from raffia.envs.text.wordle.data import LabelledGame, Part, sample_games
from raffia.envs.text.wordle.env import WordleEnv
from raffia.envs.text.wordle.game import Wordle, WordleObservation
from raffia.envs.text.wordle.games import Games, game_seeds, simulate
from raffia.envs.text.wordle.play import Player, WordleEvaluation, evaluate, evaluation_of
from raffia.envs.text.wordle.policies import (
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
from raffia.envs.text.wordle.tokens import wordle_letter_tokenizer, wordle_word_tokenizer
from raffia.envs.text.wordle.vocabulary import Vocabulary, VocabularyError

__all__ = [
    "NON_WORD",
    "BranchingConfig",
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
