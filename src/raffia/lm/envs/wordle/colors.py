"""What colours a guess gets, by either of two rules, one by one and as a table of all pairs.

A row of colours is a text of g (right letter and position), y (the letter is elsewhere), b (not),
or a number: its code, in base 3 with b = 0, y = 1, g = 2 and the first letter's digit last.

Legend: G guesses, S secrets.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import numpy as np
import numpy.typing as npt

from raffia.lm.envs.wordle.vocabulary import NUM_LETTERS

Rule = Literal["newspaper", "paper"]
Codes = npt.NDArray[np.uint8]

NUM_CODES = 3**NUM_LETTERS
ALL_BLACK = 0
ALL_GREEN = NUM_CODES - 1
_DIGITS = "byg"


def colors(secret: str, guess: str, rule: Rule = "newspaper") -> str:
    """The colours of a guess.

    rule: "newspaper": a letter is yellow only while copies of it are left in the secret, where
        green ones count first, then yellow ones from the left. "paper": yellow wherever the letter
        is anywhere in the secret, as in the code of Snell et al. (2022).

    >>> colors("taste", "alarm"), colors("taste", "alarm", "paper")
    ('ybbbb', 'ybybb')
    """
    require_rule(rule)
    if rule == "paper":
        left = Counter({letter: NUM_LETTERS for letter in secret})
    else:
        left = Counter(s for s, g in zip(secret, guess, strict=True) if s != g)
    row = ""
    for s, g in zip(secret, guess, strict=True):
        if s == g:
            row += "g"
        elif left[g] > 0:
            row += "y"
            left[g] -= 1
        else:
            row += "b"
    return row


def color_codes(secrets: tuple[str, ...], guesses: tuple[str, ...], rule: Rule) -> Codes:
    """The codes of all pairs: [G, S].

    >>> codes = color_codes(("taste", "robot"), ("alarm", "taste", "broom"), "newspaper")
    >>> [[colors_of(code) for code in row] for row in codes.tolist()]
    [['ybbbb', 'bbbyb'], ['ggggg', 'ybbbb'], ['bbbbb', 'yyygb']]
    """
    require_rule(rule)
    of_guesses, of_secrets = _letters(guesses), _letters(secrets)
    same = [of_guesses[:, None, i] == of_secrets[None, :, i] for i in range(NUM_LETTERS)]
    codes = np.zeros((len(guesses), len(secrets)), np.uint8)
    for i in range(NUM_LETTERS):
        # Copies of this letter in the secret that no green takes, less those that went to the left.
        left = np.zeros(codes.shape, np.int8)
        for j in range(NUM_LETTERS):
            there = of_guesses[:, None, i] == of_secrets[None, :, j]
            left += there if rule == "paper" else there & ~same[j]
        if rule == "newspaper":
            for k in range(i):
                left -= (of_guesses[:, k] == of_guesses[:, i])[:, None] & ~same[k]
        codes += np.uint8(3**i) * np.where(same[i], 2, left > 0).astype(np.uint8)
    return codes


def colors_of(code: int) -> str:
    """The colours of a code.

    >>> colors_of(ALL_BLACK), colors_of(1), colors_of(ALL_GREEN)
    ('bbbbb', 'ybbbb', 'ggggg')
    """
    return "".join(_DIGITS[code // 3**i % 3] for i in range(NUM_LETTERS))


def code_of(row: str) -> int:
    """The code of a row of colours.

    >>> code_of("ybbbb")
    1
    """
    if len(row) != NUM_LETTERS or not set(row) <= set(_DIGITS):
        raise ValueError(f"{row!r} is no row of colours; it has {NUM_LETTERS} letters of g, y, b")
    return sum(_DIGITS.index(color) * 3**i for i, color in enumerate(row))


def require_rule(rule: str) -> None:
    """An error for a rule that there is not.

    >>> require_rule("newspaper")
    """
    if rule not in ("newspaper", "paper"):
        raise ValueError(f"there is no rule {rule!r}; the rules are 'newspaper' and 'paper'")


def _letters(words: tuple[str, ...]) -> npt.NDArray[np.uint8]:
    """[number of words, NUM_LETTERS]"""
    data = np.frombuffer("".join(words).encode("ascii"), dtype=np.uint8)
    return data.reshape(len(words), NUM_LETTERS)
