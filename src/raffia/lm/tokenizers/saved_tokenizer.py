"""Tokenizers from the folders that they were saved in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raffia.files import foreign_reader, parse_json
from raffia.lm.tokenizers.hf_tokenizer import HFTokenizer
from raffia.lm.tokenizers.tokenizer import (
    TOKENIZER_FILE,
    PieceTokenizer,
    Tokenizer,
    WordTokenizer,
)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer that `save(folder)` wrote, of whatever kind.

    >>> import tempfile
    >>> from raffia.lm.tokenizers.tokenizer import character_tokenizer
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
    description: Any = parse_json(path, path.read_bytes())
    with foreign_reader(path, "it is damaged, or was not written by save()"):
        kind = description["kind"]
        if kind == HF_KIND:
            special = {
                str(role): _text(name) for role, name in description["special_tokens"].items()
            }
            return HFTokenizer(folder, special_tokens=special)
        unknown = description["unknown"]
        tokens = tuple(map(_text, description["tokens"]))
        return OF_KIND[kind](tokens, None if unknown is None else _text(unknown))


def _text(token: object) -> str:
    if not isinstance(token, str):
        raise TypeError(f"a token is a text, not {token!r:.40}")
    token.encode()  # half a surrogate pair is none
    return token


HF_KIND = "huggingface"
OF_KIND = {cls.kind: cls for cls in (PieceTokenizer, WordTokenizer)}
