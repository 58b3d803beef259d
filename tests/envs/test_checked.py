"""Settings typed as a Literal: by itself, in a tuple, or beside None."""

import math
from dataclasses import dataclass
from typing import Literal, Optional

import pytest

from raffia.algorithms.efficientzero.config import OptimizerConfig
from raffia.envs.checked import check_types


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
