"""Whether a tokenizer has what rows of dialogue are made with, and whether it is the same one."""

from __future__ import annotations

import hashlib
import os
import tempfile
from numbers import Integral
from typing import Any, TypeGuard

from raffia.lm.tokenizers.tokenizer import Tokenizer, special_ids

PURPOSES = {
    "pad": "fills rows up",
    "bos": "begins a dialogue that the environment begins",
    "boa": "begins a dialogue that the agent begins",
    "eos": "ends an utterance of the environment",
    "eoa": "ends an utterance of the agent",
    "eod": "ends a dialogue that is over",
}
FIX = (
    "HFTokenizer(folder, add_missing=True) of raffia.lm adds the special tokens that one of "
    "Hugging Face lacks (the model's vocabulary must be as large then), and those of Raffia have "
    "them all"
)


def check_tokenizer(tokenizer: Any) -> None:
    """Raise ValueError unless there is a number for each special token.

    >>> from types import SimpleNamespace
    >>> check_tokenizer(SimpleNamespace(num_tokens=50257, pad_token_id=None, bos_token_id=50256))
    Traceback (most recent call last):
    ...
    ValueError: this SimpleNamespace as a tokenizer has no pad_token_id, a number of a token, which
    fills rows up: HFTokenizer(folder, add_missing=True) of raffia.lm adds the special ...
    """
    kind = f"this {type(tokenizer).__name__} as a tokenizer"
    num_tokens = getattr(tokenizer, "num_tokens", None)
    if not _is_number(num_tokens) or num_tokens < 1:
        raise ValueError(
            f"{kind} has no num_tokens, which is one more than the largest number of its tokens: "
            f"{FIX}"
        )
    for role, purpose in PURPOSES.items():
        name = f"{role}_token_id"
        number = getattr(tokenizer, name, None)
        if not _is_number(number):
            raise ValueError(f"{kind} has no {name}, a number of a token, which {purpose}: {FIX}")
        if not 0 <= number < num_tokens:
            raise ValueError(
                f"its {name} is {number}, and {kind} has num_tokens={num_tokens}, so that they are "
                f"0..{num_tokens - 1}: raise num_tokens, and the model's vocab_size with it"
            )


def tokenizer_checksum(tokenizer: Tokenizer) -> str:
    """Of all that a tokenizer saves, and of its kind.

    >>> from types import SimpleNamespace
    >>> ids = dict(num_tokens=9, pad_token_id=0, bos_token_id=1, eos_token_id=2, boa_token_id=3,
    ...            eoa_token_id=4, eod_token_id=5)
    >>> first = SimpleNamespace(**ids, save=lambda folder: None)
    >>> second = SimpleNamespace(**{**ids, "num_tokens": 10}, save=lambda folder: None)
    >>> tokenizer_checksum(first) == tokenizer_checksum(second)
    False
    """
    code = hashlib.sha256()
    order = ("pad", "bos", "eos", "boa", "eoa", "eod")
    numbers = [tokenizer.num_tokens, *map(special_ids(tokenizer).__getitem__, order)]
    code.update(f"{type(tokenizer).__qualname__} {numbers}".encode())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        for root, folders, names in os.walk(folder):
            folders.sort()
            for name in sorted(names):
                path = os.path.join(root, name)
                with open(path, "rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                code.update(f"\n{os.path.relpath(path, folder)} {content}".encode())
    return code.hexdigest()


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)
