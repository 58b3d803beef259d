"""Language: models, tokenizers, dialogues with rewards, dialogue environments, decoding."""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.lm.data import (
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
    from raffia.lm.envs import (
        BatchLanguagePolicy,
        Draws,
        Language_Environment,
        Language_Observation,
        LanguagePolicy,
        Played,
        TabularPolicy,
        TabularValues,
        Utterance,
        check_language_environment,
        dialogue_row,
        play_dialogues,
        tabular_values,
        write_dialogues,
    )
    from raffia.lm.folder import load_gpt2, save_gpt2
    from raffia.lm.kv_cache import KeyValueCache
    from raffia.lm.tokenizers import (
        SPECIAL_TOKENS,
        HFTokenizer,
        PieceTokenizer,
        Tokenizer,
        WordTokenizer,
        character_tokenizer,
        load_tokenizer,
    )
    from raffia.lm.transformer import CausalLM

__all__ = [
    "BatchLanguagePolicy",
    "CausalLM",
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

_NAMES = {
    "data": [
        "ConstantTokenReward",
        "DataPoint",
        "DialogueDataset",
        "Iterable_RL_Dataset",
        "List_RL_Dataset",
        "RL_Dataset",
        "SpecifiedTokenReward",
        "TokenReward",
        "read_dialogues",
    ],
    "envs": [
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
    ],
    "folder": ["load_gpt2", "save_gpt2"],
    "kv_cache": ["KeyValueCache"],
    "tokenizers": [
        "HFTokenizer",
        "PieceTokenizer",
        "SPECIAL_TOKENS",
        "Tokenizer",
        "WordTokenizer",
        "character_tokenizer",
        "load_tokenizer",
    ],
    "transformer": ["CausalLM"],
}
_HOMES = {name: f"{__name__}.{home}" for home, names in _NAMES.items() for name in names}
__getattr__, __dir__ = _lazy_names(__name__, _HOMES)
