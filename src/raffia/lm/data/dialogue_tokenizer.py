"""Whether a tokenizer has what rows of dialogue are made with."""

from __future__ import annotations

from numbers import Integral
from typing import Any, TypeGuard

__all__ = ["check_tokenizer"]

PURPOSES = {
    "pad": "fills rows up",
    "bos": "begins a dialogue that the environment begins",
    "boa": "begins a dialogue that the agent begins",
    "eos": "ends an utterance of the environment",
    "eoa": "ends an utterance of the agent",
    "eod": "ends a dialogue that is over",
}
MEND = (
    "HFTokenizer(folder, add_missing=True) of raffia.lm.envs adds the special tokens that one of "
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
    fills rows up: HFTokenizer(folder, add_missing=True) of raffia.lm.envs adds the special ...
    """
    kind = f"this {type(tokenizer).__name__} as a tokenizer"
    num_tokens = getattr(tokenizer, "num_tokens", None)
    if not _is_number(num_tokens) or num_tokens < 1:
        raise ValueError(
            f"{kind} has no num_tokens, which is one more than the largest number of its tokens: "
            f"{MEND}"
        )
    for role, purpose in PURPOSES.items():
        name = f"{role}_token_id"
        number = getattr(tokenizer, name, None)
        if not _is_number(number):
            raise ValueError(f"{kind} has no {name}, a number of a token, which {purpose}: {MEND}")
        if not 0 <= number < num_tokens:
            raise ValueError(
                f"its {name} is {number}, and {kind} has num_tokens={num_tokens}, so that they are "
                f"0..{num_tokens - 1}: raise num_tokens, and the model's vocab_size with it"
            )


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)
