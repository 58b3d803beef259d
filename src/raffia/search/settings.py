"""Options of a search besides its model, and their types."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

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


class SearchOptions(TypedDict, total=False):
    """What `search` takes besides the model, the simulations and the selection; see there.

    >>> options: SearchOptions = {"discount": 0.99, "max_depth": 5}
    """

    discount: float | Tensor
    value_prefix: ValuePrefix | None
    root_value: RootValue
    max_depth: int | None
    transpositions: StateKey | None
    keep_embeddings: bool
    num_threads: int
    backend: Backend
