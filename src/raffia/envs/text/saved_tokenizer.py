"""Tokenizers from the folders that they were saved in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raffia.envs.text.hf_tokenizer import HFTokenizer
from raffia.envs.text.tokenizer import (
    TOKENIZER_FILE,
    PieceTokenizer,
    Tokenizer,
    WordTokenizer,
)

__all__ = ["load_tokenizer"]


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer that `save(folder)` wrote, of whatever kind.

    >>> import tempfile
    >>> from raffia.envs.text.tokenizer import character_tokenizer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     character_tokenizer(["abc"]).save(folder)
    ...     load_tokenizer(folder).encode("cab")
    [2, 0, 1]
    """
    path = Path(folder, TOKENIZER_FILE)
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no {path}; tokenizer.save(folder) writes it. For a folder of Hugging Face: "
            "HFTokenizer(folder)"
        )
    try:
        description: Any = json.loads(path.read_text("utf-8"))
        kind = description["kind"]
        if kind == HF_KIND:
            return HFTokenizer(folder, special_tokens=description["special_tokens"])
        tokens, unknown = tuple(description["tokens"]), description["unknown"]
        return OF_KIND[kind](tokens, unknown)
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged, or was not written by save(): {error!r}") from error


HF_KIND = "huggingface"
OF_KIND = {cls.kind: cls for cls in (PieceTokenizer, WordTokenizer)}
