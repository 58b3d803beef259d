"""Wordle as tokens, in two ways: letter by letter, or one for each word and row of colours."""

from __future__ import annotations

from raffia.lm.envs.wordle.colors import NUM_CODES, colors_of
from raffia.lm.envs.wordle.vocabulary import Vocabulary
from raffia.lm.tokenizers.tokenizer import SPECIAL_TOKENS, PieceTokenizer


def wordle_letter_tokenizer() -> PieceTokenizer:
    """35 tokens: a..z, <g>, <b>, <y>, the special ones. A turn is 12 tokens, 6 of them actions.

    >>> tokenizer = wordle_letter_tokenizer()
    >>> tokenizer.encode("cab"), tokenizer.encode("<g><b><y>"), tokenizer.pad_token_id
    ([2, 0, 1], [26, 27, 28], 29)
    """
    letters = (chr(ord("a") + i) for i in range(26))
    return PieceTokenizer((*letters, "<g>", "<b>", "<y>", *SPECIAL_TOKENS.values()))


def wordle_word_tokenizer(vocabulary: Vocabulary, *, non_word: str | None = None) -> PieceTokenizer:
    """A token for each word and each row of colours: a turn is 4 tokens, 2 of them actions.

    With fewer decisions a reward has a shorter way, so values are learnt sooner than by letters.

    non_word: a token that stands for every guess that is no word; None: such a guess is an error

    >>> tokenizer = wordle_word_tokenizer(Vocabulary(("crane", "slate")))
    >>> tokenizer.encode("slate"), tokenizer.encode("<b><b><g><b><g>"), tokenizer.num_tokens
    ([1], [182], 251)
    """
    rows = ("".join(f"<{color}>" for color in colors_of(code)) for code in range(NUM_CODES))
    more = () if non_word is None else (non_word,)
    return PieceTokenizer((*vocabulary, *rows, *more, *SPECIAL_TOKENS.values()), non_word)
