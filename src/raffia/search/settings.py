"""Settings of a search besides its model: simulations, discounts, prefixes, depth, ranges."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from raffia.tensordict.keys import NestedKey

RootValue = Literal["exclude", "include", "zero"]
Backend = Literal["auto", "compiled", "reference"]
StateKey = Callable[[Any], Tensor]  # embedding of M rows -> int64 [M], equal iff the same state


@dataclass(frozen=True)
class ValuePrefix:
    """The model predicts sums of rewards that restart every `horizon` steps (EfficientZero).

    A node at a depth that is a multiple of the horizon is a reset: the entries `reset_keys` of its
    embedding are zeroed, and its children's predictions count from 0.

    Source: Ye et al. (2021), section 4.2 and appendix A.

    >>> ValuePrefix(horizon=5).reset_keys
    ('reward_hidden_state',)
    """

    horizon: int = 5  # the LSTM's, in steps
    reset_keys: Sequence[NestedKey] = ("reward_hidden_state",)

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise ValueError(
                f"horizon={self.horizon} must be at least 1; without value prefixes pass "
                "value_prefix=None"
            )


@dataclass(frozen=True)
class SearchSettings:
    """The checked options of one search."""

    value_prefix: ValuePrefix | None
    root_value: RootValue
    max_depth: int
    transpositions: StateKey | None

    def __post_init__(self) -> None:
        if not isinstance(self.value_prefix, ValuePrefix | None):
            raise TypeError(
                f"value_prefix={self.value_prefix!r}: pass ValuePrefix(horizon=...) or None"
            )
        if self.root_value not in ("exclude", "include", "zero"):
            raise ValueError(
                f"root_value={self.root_value!r} is none of 'exclude' (the mean of what was "
                "found), 'include' (the model's value counts as one visit), 'zero' (a visit of "
                "value 0)"
            )
        if self.max_depth < 1:
            raise ValueError(f"max_depth={self.max_depth} must be at least 1, or None for no limit")
        if self.transpositions is not None and self.value_prefix is not None:
            raise ValueError(
                "transpositions and value_prefix exclude each other: a value prefix belongs to a "
                "path, not to a state; pass transpositions=None"
            )
