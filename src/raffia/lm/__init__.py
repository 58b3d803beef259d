"""Language: models, tokenizers, dialogues with rewards, dialogue environments, decoding."""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.lm.data.data_point import (
        ConstantTokenReward,
        DataPoint,
        SpecifiedTokenReward,
        TokenReward,
    )
    from raffia.lm.data.dialogue import DialogueDataset
    from raffia.lm.data.dialogue_sources import read_dialogues
    from raffia.lm.data.rl_dataset import Iterable_RL_Dataset, List_RL_Dataset, RL_Dataset
    from raffia.lm.data.utterances import Utterance
    from raffia.lm.envs.check import check_language_environment
    from raffia.lm.envs.contract import (
        BatchLanguagePolicy,
        Language_Environment,
        Language_Observation,
        LanguagePolicy,
    )
    from raffia.lm.envs.draws import Draws
    from raffia.lm.envs.play import Played, dialogue_row, play_dialogues, write_dialogues
    from raffia.lm.envs.tabular import TabularPolicy, TabularValues, tabular_values
    from raffia.lm.folder import load_gpt2, save_gpt2
    from raffia.lm.kv_cache import KeyValueCache
    from raffia.lm.tokenizers.chat_template import ChatTemplate
    from raffia.lm.tokenizers.hf_tokenizer import ChatTokenizer, HFTokenizer, load_tokenizer
    from raffia.lm.tokenizers.tokenizer import (
        SPECIAL_TOKENS,
        PieceTokenizer,
        Tokenizer,
        WordTokenizer,
        character_tokenizer,
    )
    from raffia.lm.transformer import CausalLM

__all__ = [
    "BatchLanguagePolicy",
    "CausalLM",
    "ChatTemplate",
    "ChatTokenizer",
    "ConstantTokenReward",
    "DataPoint",
    "DialogueDataset",
    "Draws",
    "HFTokenizer",
    "Iterable_RL_Dataset",
    "KeyValueCache",
    "LanguagePolicy",
    "Language_Environment",
    "Language_Observation",
    "List_RL_Dataset",
    "PieceTokenizer",
    "Played",
    "RL_Dataset",
    "SPECIAL_TOKENS",
    "SpecifiedTokenReward",
    "TabularPolicy",
    "TabularValues",
    "TokenReward",
    "Tokenizer",
    "Utterance",
    "WordTokenizer",
    "character_tokenizer",
    "check_language_environment",
    "dialogue_row",
    "load_gpt2",
    "load_tokenizer",
    "play_dialogues",
    "read_dialogues",
    "save_gpt2",
    "tabular_values",
    "write_dialogues",
]

__getattr__, __dir__ = _lazy_names(__name__)
