"""Cases of parametrized tests: which are slow, and calls that are refused."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_among(cases: Iterable[Any], *slow: Any) -> list[Any]:
    """The cases, of which these are slow: they show in more ways what the others show already."""
    cases = list(cases)
    assert all(case in cases for case in slow), f"not among the cases: {set(slow) - set(cases)}"

    def marked(case: Any) -> Any:
        values = case if isinstance(case, tuple) else (case,)
        return pytest.param(*values, marks=pytest.mark.slow) if case in slow else case

    return [marked(case) for case in cases]


def refusals(rows: Iterable[Any]) -> Callable[..., None]:
    """A test of each row: a call that is refused, its error, and words of the message.

    The error is a ValueError in rows that name none.
    """
    whole = [row if len(row) == 3 else (row[0], ValueError, row[1]) for row in rows]

    @pytest.mark.parametrize(("call", "error", "match"), whole)
    def test(call, error, match):
        with pytest.raises(error, match=re.compile(match, re.S)):
            call()

    return test
