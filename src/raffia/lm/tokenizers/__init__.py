"""Tokenizers: text to token numbers and back; ours, and those of Hugging Face folders."""

from raffia.lm.tokenizers.hf_tokenizer import HFTokenizer
from raffia.lm.tokenizers.saved_tokenizer import load_tokenizer
from raffia.lm.tokenizers.tokenizer import (
    SPECIAL_TOKENS,
    PieceTokenizer,
    Tokenizer,
    WordTokenizer,
    character_tokenizer,
)

__all__ = [
    "HFTokenizer",
    "PieceTokenizer",
    "SPECIAL_TOKENS",
    "Tokenizer",
    "WordTokenizer",
    "character_tokenizer",
    "load_tokenizer",
]
