"""Our tokenizers as files that `transformers` reads: the same numbers for the same texts.

The one difference is that of all its tokenizers: where a text has the characters of a special
token, such as `</s>`, it is taken for that token, which ours never do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raffia.files import write_atomically, write_json
from raffia.lm.tokenizers.chat_template import CONFIG_FILE, TEMPLATE_FILE
from raffia.lm.tokenizers.hf_tokenizer import ChatTokenizer, HFTokenizer
from raffia.lm.tokenizers.tokenizer import (
    SPECIAL_TOKENS,
    PieceTokenizer,
    Tokenizer,
    WordTokenizer,
    special_ids,
)

TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", CONFIG_FILE, TEMPLATE_FILE
CLASS = "PreTrainedTokenizerFast"  # any that has a tokenizer.json
# What Python's str.split() takes for space; theirs leaves out \x1c to \x1f.
SPACES = "\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
NO_UNKNOWN = "<|there is no token for unknown text|>"  # none of the tokens: so it is an error


def save_for_transformers(tokenizer: Tokenizer, folder: str | Path, *, max_length: int) -> None:
    """Write what `AutoTokenizer.from_pretrained(folder)` and `load_tokenizer(folder)` read.

    max_length: tokens that the model's context holds.
    A tokenizer with a chat template keeps it; others get one for their special tokens.
    Raises ValueError for a tokenizer that theirs cannot be, with the reason.

    >>> import tempfile
    >>> from raffia.lm.tokenizers.tokenizer import character_tokenizer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_for_transformers(character_tokenizer(["abc"]), folder, max_length=16)
    ...     HFTokenizer(folder).encode("cab")
    [2, 0, 1]
    """
    folder = Path(folder)
    if isinstance(tokenizer, ChatTokenizer):
        tokenizer.save(folder)
        own = {"tokenizer_class": CLASS, **tokenizer.template.variables}
        write_json(folder / CONFIG, {**own, "model_max_length": max_length}, indent=1)
        write_atomically(folder / TEMPLATE, tokenizer.template.source.encode())
        return
    described: dict[str, Any] | None
    match tokenizer:
        case PieceTokenizer():
            described = _pieces(tokenizer)
        case WordTokenizer():
            described = _word_level(tokenizer, _split(f"[{SPACES}]+", "Removed"), None)
        case HFTokenizer():
            described = None  # what it saves is theirs
        case _:
            raise ValueError(
                f"a {type(tokenizer).__name__} cannot be converted for transformers: supported "
                "are PieceTokenizer (characters, Wordle), WordTokenizer and HFTokenizer"
            )
    tokenizer.save(folder)
    if described is None:
        described = json.loads((folder / TOKENIZER).read_text("utf-8"))
        kind = (described.get("post_processor") or {}).get("type")
        if kind != "ByteLevel":  # others add marks, which no row of the data had
            described["post_processor"] = None
    names = special_tokens_of(tokenizer)
    config = {
        "tokenizer_class": CLASS,
        "bos_token": names["bos"],
        "eos_token": names["eoa"],  # where generation is to end
        "pad_token": names["pad"],
        "additional_special_tokens": [names[role] for role in ("boa", "eos", "eod")],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    write_json(folder / TOKENIZER, described, indent=1)
    write_json(folder / CONFIG, config, indent=1)
    if not _begins_otherwise(described):
        write_atomically(folder / TEMPLATE, chat_template(names).encode())


def special_tokens_of(tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens, by their roles.

    >>> from raffia.lm.tokenizers.tokenizer import character_tokenizer
    >>> special_tokens_of(character_tokenizer(["abc"]))["eoa"]
    '</a>'
    """
    return {role: tokenizer.id_to_token(i) for role, i in special_ids(tokenizer).items()}


def chat_template(names: Mapping[str, str]) -> str:
    """The template by which messages become a prompt as the rows of the data have it.

    names: the special tokens, by their roles.

    >>> import jinja2
    >>> messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "oh"}]
    >>> jinja2.Template(chat_template(SPECIAL_TOKENS)).render(messages=messages)
    '<s>hi</s>oh</a>'
    """
    mark = {role: "{{ " + json.dumps(name) + " }}" for role, name in names.items()}
    agents = "['assistant', 'agent']"
    return (
        "{% if messages and messages[0]['role'] not in " + agents + " %}"
        f"{mark['bos']}{{% else %}}{mark['boa']}{{% endif %}}"
        "{% for message in messages %}{{ message['content'] }}"
        "{% if message['role'] in " + agents + " %}"
        f"{mark['eoa']}{{% else %}}{mark['eos']}{{% endif %}}{{% endfor %}}"
    )


def _pieces(tokenizer: PieceTokenizer) -> dict[str, Any]:
    """Split text into the longest tokens at each position; text between tokens is one unknown
    piece.
    """
    content = [token for token in tokenizer.tokens if token not in SPECIAL_TOKENS.values()]
    for token in content:
        held = next((mark for mark in SPECIAL_TOKENS.values() if mark in token), None)
        if held is not None:
            raise ValueError(
                f"the tokenizer cannot be converted for transformers: its token {token!r} "
                f"contains {held!r}, which is a separate token there, wherever it occurs"
            )
    longest_first = sorted(content, key=len, reverse=True)
    pattern = "|".join(map(_escaped, longest_first)) or "(?!)"
    return _word_level(tokenizer, _split(pattern, "Isolated"), {"type": "Fuse"})


def _word_level(
    tokenizer: PieceTokenizer | WordTokenizer,
    split: dict[str, Any],
    decoder: dict[str, Any] | None,  # None: tokens with a space between them
) -> dict[str, Any]:
    numbers = {token: number for number, token in enumerate(tokenizer.tokens)}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, **plain, "special": True}
            for token, number in numbers.items()
            if token in SPECIAL_TOKENS.values()
        ],
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": None,
        "decoder": decoder,
        "model": {
            "type": "WordLevel",
            "vocab": numbers,
            "unk_token": NO_UNKNOWN if tokenizer.unknown is None else tokenizer.unknown,
        },
    }


def _split(pattern: str, behavior: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": behavior,
        "invert": False,
    }


def _escaped(token: str) -> str:
    """Escape special characters only, since these expressions differ slightly from Python's."""
    return re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", token)


def _begins_otherwise(described: Mapping[str, Any]) -> bool:
    """Whether the beginning of a whole text is read otherwise than what follows a special token.

    Then a prompt in one text is not what the rows were made of, one utterance after the other.
    """
    return '"prepend_scheme": "first"' in json.dumps(described)
