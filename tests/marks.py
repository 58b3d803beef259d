"""Marks of some cases of a parametrized test."""

from collections.abc import Iterable
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
