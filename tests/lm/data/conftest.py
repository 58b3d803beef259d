"""A tokenizer of letters and marks, with the token ids of the numeric cases."""

import json
import re
from pathlib import Path

import pytest

CASES = json.loads((Path(__file__).parent / "cases.json").read_text())
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
MARKS = ["<g>", "<b>", "<y>", "<|pad|>", "</a>", "</s>", "<s>", "<a>", "</eod>"]


class LetterTokenizer:
    """One token for each piece of the vocabulary."""

    def __init__(self, tokens, pad="<|pad|>", boa="<a>"):
        self.tokens = list(tokens)
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        self.num_tokens = len(self.tokens)
        self.pad_token_id = self.ids[pad]
        self.bos_token_id, self.eos_token_id = self.ids["<s>"], self.ids["</s>"]
        self.boa_token_id, self.eoa_token_id = self.ids[boa], self.ids["</a>"]
        self.eod_token_id = self.ids["</eod>"]

    def encode(self, text):
        return [self.ids[piece] for piece in re.findall("<[^<>]+>|.", text)]

    def save(self, folder):
        Path(folder, "tokens.json").write_text(json.dumps(self.tokens))


@pytest.fixture
def cases():
    return CASES


@pytest.fixture
def tokenizer():
    return LetterTokenizer(LETTERS + MARKS)


@pytest.fixture
def exact_tokenizer():
    return LetterTokenizer(CASES["exact_tokens"], pad="<pad>", boa="<s>")


@pytest.fixture
def make_tokenizer():
    """Makes another tokenizer: the letters in the given order."""
    return lambda letters: LetterTokenizer([*letters, *MARKS])
