"""Settings typed as a Literal: by itself, in a tuple, or beside None."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, Optional

import pytest

from raffia.algorithms.efficientzero.config import OptimizerConfig
from raffia.envs.checked import (
    Checked,
    FractionBelowOne,
    NonNegativeFloat,
    PositiveFraction,
    PositiveInt,
    at_least,
    check_types,
)


@dataclass
class Settings:
    one: Literal["a", "b"] = "a"
    some: tuple[Literal["a", "b"], ...] = ()
    maybe: Literal["alpha", "beta"] | None = None
    older: Optional[Literal[1, 2]] = None  # noqa: UP045
    number: int | None = None
    text: Literal["auto"] | str = "auto"

    def __post_init__(self):
        check_types(self)


def test_listed_values_are_accepted():
    Settings("b", ("a", "b"), "beta", 2, 7, "anything")
    Settings(maybe=None, older=None)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"one": "c"}, "one='c' must be one of 'a', 'b'"),
        ({"one": None}, "one=None must be one of 'a', 'b'"),
        ({"some": ("a", "c")}, "some=.* must be one of 'a', 'b'"),
        (
            {"maybe": "alpa"},
            "maybe='alpa' must be one of None, 'alpha', 'beta'; did you mean 'alpha'",
        ),
        ({"older": 3}, "older=3 must be one of None, 1, 2"),
    ],
)
def test_other_values_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Settings(**wrong)


def test_infinity_is_allowed_for_limits_only():
    assert OptimizerConfig(max_grad_norm=math.inf).max_grad_norm == math.inf
    for wrong in ({"max_grad_norm": -math.inf}, {"weight_decay": math.inf}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}=-?inf must be finite"):
            OptimizerConfig(**wrong)


@dataclass
class Ranges(Checked):
    count: PositiveInt = 1
    some: tuple[PositiveInt, ...] = ()
    length: Annotated[int, at_least(2)] | None = None
    weight: NonNegativeFloat = 0.0
    kept: PositiveFraction = 1.0
    decay: FractionBelowOne = 0.0


def test_numbers_in_their_ranges_are_accepted():
    Ranges(3, (1, 2), 2, 0.5, 0.5, 0.999)
    Ranges(length=None)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"count": 0}, "count=0 must be at least 1"),
        ({"some": (1, 0)}, "some=0 must be at least 1"),
        ({"length": 1}, "length=1 must be at least 2"),
        ({"weight": -0.5}, "weight=-0.5 must be at least 0"),
        ({"kept": 1.5}, "kept=1.5 must be in 0..1"),
        ({"kept": 0.0}, "kept=0.0 must be above 0"),
        ({"decay": 1.0}, "decay=1.0 must be below 1"),
        ({"count": True}, "count=True must be a whole number"),
    ],
)
def test_a_number_out_of_its_fields_range_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Ranges(**wrong)
