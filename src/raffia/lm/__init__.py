"""Language: models, tokenizers, dialogues with rewards, dialogue environments, decoding."""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.lm.data.data_point import ConstantTokenReward as ConstantTokenReward
    from raffia.lm.data.data_point import DataPoint as DataPoint
    from raffia.lm.data.data_point import SpecifiedTokenReward as SpecifiedTokenReward
    from raffia.lm.data.data_point import TokenReward as TokenReward
    from raffia.lm.data.dialogue import DialogueDataset as DialogueDataset
    from raffia.lm.data.dialogue_rows import Dialogue as Dialogue
    from raffia.lm.data.dialogue_sources import ObservationDialogues as ObservationDialogues
    from raffia.lm.data.dialogue_sources import read_dialogues as read_dialogues
    from raffia.lm.data.rl_dataset import Iterable_RL_Dataset as Iterable_RL_Dataset
    from raffia.lm.data.rl_dataset import List_RL_Dataset as List_RL_Dataset
    from raffia.lm.data.rl_dataset import RL_Dataset as RL_Dataset
    from raffia.lm.data.rl_dataset import Vocabulary as Vocabulary
    from raffia.lm.data.utterances import Utterance as Utterance
    from raffia.lm.decoding.generations import Stop as Stop
    from raffia.lm.envs.check import check_language_environment as check_language_environment
    from raffia.lm.envs.contract import BatchLanguagePolicy as BatchLanguagePolicy
    from raffia.lm.envs.contract import Language_Environment as Language_Environment
    from raffia.lm.envs.contract import Language_Observation as Language_Observation
    from raffia.lm.envs.contract import LanguagePolicy as LanguagePolicy
    from raffia.lm.envs.draws import Draws as Draws
    from raffia.lm.envs.play import Played as Played
    from raffia.lm.envs.play import dialogue_row as dialogue_row
    from raffia.lm.envs.play import play_dialogues as play_dialogues
    from raffia.lm.envs.play import write_dialogues as write_dialogues
    from raffia.lm.envs.tabular import TabularPolicy as TabularPolicy
    from raffia.lm.envs.tabular import TabularValues as TabularValues
    from raffia.lm.envs.tabular import tabular_values as tabular_values
    from raffia.lm.folder import load_gpt2 as load_gpt2
    from raffia.lm.folder import save_gpt2 as save_gpt2
    from raffia.lm.kv_cache import KeyValueCache as KeyValueCache
    from raffia.lm.tokenizers.chat_template import ChatTemplate as ChatTemplate
    from raffia.lm.tokenizers.hf_tokenizer import ChatTokenizer as ChatTokenizer
    from raffia.lm.tokenizers.hf_tokenizer import HFTokenizer as HFTokenizer
    from raffia.lm.tokenizers.hf_tokenizer import load_tokenizer as load_tokenizer
    from raffia.lm.tokenizers.tokenizer import SPECIAL_TOKENS as SPECIAL_TOKENS
    from raffia.lm.tokenizers.tokenizer import PieceTokenizer as PieceTokenizer
    from raffia.lm.tokenizers.tokenizer import Tokenizer as Tokenizer
    from raffia.lm.tokenizers.tokenizer import WordTokenizer as WordTokenizer
    from raffia.lm.tokenizers.tokenizer import character_tokenizer as character_tokenizer
    from raffia.lm.transformer import CausalLM as CausalLM

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = _lazy_names(__name__)
