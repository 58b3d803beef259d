"""Wordle: the game, scripted players, data sets, and how well a policy plays."""

from typing import TYPE_CHECKING

from raffia.lazy import public_names as _public_names
from raffia.lm.envs.wordle.data import LabelledGame as LabelledGame
from raffia.lm.envs.wordle.data import Part as Part
from raffia.lm.envs.wordle.data import branching_games as branching_games
from raffia.lm.envs.wordle.data import branching_scripts as branching_scripts
from raffia.lm.envs.wordle.data import sample_games as sample_games
from raffia.lm.envs.wordle.data import wordle_letter_tokenizer as wordle_letter_tokenizer
from raffia.lm.envs.wordle.data import wordle_word_tokenizer as wordle_word_tokenizer
from raffia.lm.envs.wordle.game import Wordle as Wordle
from raffia.lm.envs.wordle.game import WordleEnv as WordleEnv
from raffia.lm.envs.wordle.game import WordleObservation as WordleObservation
from raffia.lm.envs.wordle.game import colors as colors
from raffia.lm.envs.wordle.games import Games as Games
from raffia.lm.envs.wordle.games import game_seeds as game_seeds
from raffia.lm.envs.wordle.games import simulate as simulate
from raffia.lm.envs.wordle.play import Player as Player
from raffia.lm.envs.wordle.play import WordleEvaluation as WordleEvaluation
from raffia.lm.envs.wordle.play import evaluate as evaluate
from raffia.lm.envs.wordle.play import evaluation_of as evaluation_of
from raffia.lm.envs.wordle.policies import NON_WORD as NON_WORD
from raffia.lm.envs.wordle.policies import Fitting as Fitting
from raffia.lm.envs.wordle.policies import InformationGain as InformationGain
from raffia.lm.envs.wordle.policies import Mixture as Mixture
from raffia.lm.envs.wordle.policies import NonWord as NonWord
from raffia.lm.envs.wordle.policies import Positions as Positions
from raffia.lm.envs.wordle.policies import RandomWord as RandomWord
from raffia.lm.envs.wordle.policies import Repeat as Repeat
from raffia.lm.envs.wordle.policies import Say as Say
from raffia.lm.envs.wordle.policies import Script as Script
from raffia.lm.envs.wordle.policies import Switch as Switch
from raffia.lm.envs.wordle.policies import Wrong as Wrong
from raffia.lm.envs.wordle.policies import start_word as start_word
from raffia.lm.envs.wordle.vocabulary import Vocabulary as Vocabulary
from raffia.lm.envs.wordle.vocabulary import VocabularyError as VocabularyError

if not TYPE_CHECKING:
    __all__ = _public_names(__name__)
