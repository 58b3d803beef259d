"""Types of a search: its inputs and outputs, its options, and the error of a model that gives NaN.

Shapes: B roots, A actions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypedDict

from torch import Tensor

from raffia.hints import check_count
from raffia.tensordict.keys import NestedKey


class RootOutput(NamedTuple):
    """The model's output for the states to plan from.

    >>> root = RootOutput(prior_logits=torch.zeros(2, 3), value=torch.zeros(2),
    ...                   embedding=torch.zeros(2, 8))
    >>> root.mask is None
    True
    """

    prior_logits: Tensor  # [B, A], need not be normalised; -inf: no prior, yet legal (see mask)
    value: Tensor  # [B], from the view of the player to move
    embedding: Any  # any container with batch B: TensorDict, tensorclass, tensor, dict, tuple ...
    mask: Tensor | None = None  # [B, A] bool: the action is legal; None: all are
    to_play: Tensor | None = None  # [B] int, 1 or 2 (or 0 or 1): to move next; None: one player
    actions: Tensor | None = None  # [B, A, ...]: what the A choices stand for (sampled actions)


class RecurrentOutput(NamedTuple):
    """The model's output for the states that actions lead to.

    `recurrent_fn(embedding, action) -> (RecurrentOutput, embedding)` gives it for M <= B rows;
    action is int64 [M], or [M, ...] where the root gave `actions`. The search writes over
    both in its next simulation: clone what must outlive it.

    >>> def stand_still(embedding, action):
    ...     rows = embedding.shape[0]
    ...     output = RecurrentOutput(reward=torch.zeros(rows), value=torch.zeros(rows),
    ...                              prior_logits=torch.zeros(rows, 3))
    ...     return output, embedding
    """

    reward: Tensor  # [M]; in a search over value prefixes the sum since the last reset
    value: Tensor  # [M], from the view of the player to move in the new state
    prior_logits: Tensor  # [M, A]
    discount: Tensor | None = None  # [M], replaces the search's own; not negative
    mask: Tensor | None = None  # [M, A] bool; no legal action at all: the game has ended here
    to_play: Tensor | None = None  # [M] int; None where the root gave it: players take turns
    actions: Tensor | None = None  # [M, A, ...]; given if and only if the root gave it


RecurrentFn = Callable[[Any, Tensor], tuple[RecurrentOutput, Any]]


@dataclass(frozen=True)
class SearchMemory:
    """The memory that a search shares with a model that reads and writes it.

    In a simulation the model reads embedding row `parent_row[i]` and `action[i]`, and writes
    embedding row `node_row[i]`, `reward[i]`, `value[i]` and `prior_logits[i]`, for i < m.

    >>> memory = SearchMemory(
    ...     embeddings=torch.zeros(6, 8), parent_row=torch.tensor([0, 3]),
    ...     node_row=torch.tensor([1, 4]), action=torch.tensor([1, 0]),
    ...     reset=torch.tensor([False, False]), reward=torch.zeros(2), value=torch.zeros(2),
    ...     prior_logits=torch.zeros(2, 2))
    >>> memory.embeddings[memory.node_row] = memory.embeddings[memory.parent_row] + 1  # a model
    """

    embeddings: Any  # the root's container with batch [R]: one row for each node of each root
    parent_row: Tensor  # int64 [B]
    node_row: Tensor  # int64 [B]
    action: Tensor  # int64 [B]
    reset: Tensor  # bool [B]: zero what the value prefix restarts from
    reward: Tensor  # float32 [B]
    value: Tensor  # float32 [B]
    prior_logits: Tensor  # float32 [B, A]


class BoundModel(Protocol):
    """A recurrent function that can also work in the search's memory, without copies.

    `bind` is called once for each search and answers with what does m rows of a simulation, or
    with None where it cannot (other device or dtype): then the search calls the model as usual.
    If the answer has a method `native() -> (address, context)`, a compiled step of
    `raffia.jit.kernel` that does the same, the whole search runs without Python; and searches that
    share a workspace share the answer, where their shapes are the same.

    Where the root has `actions`, it is bound only if it has an attribute `writes_actions = True`;
    its answer then has the `actions` [R, A, ...] of all rows.

    >>> class Counter:  # embeddings count the steps; the first of two actions pays 1
    ...     def __call__(self, embedding, action):
    ...         rows = len(action)
    ...         return RecurrentOutput(1.0 - action.float(), torch.zeros(rows),
    ...                                torch.zeros(rows, 2)), embedding + 1
    ...
    ...     def bind(self, memory):
    ...         def step(m):
    ...             parents, rows = memory.parent_row[:m], memory.node_row[:m]
    ...             memory.embeddings[rows] = memory.embeddings[parents] + 1
    ...             memory.reward[:m] = 1.0 - memory.action[:m].float()
    ...         return step
    >>> from raffia.search import RootOutput, search
    >>> root = RootOutput(torch.zeros(2, 2), torch.zeros(2), torch.zeros(2, 1))
    >>> tree = search(root, Counter(), num_simulations=9, keep_embeddings=True)
    >>> tree.embeddings.squeeze(-1).equal(tree.data["depth"].float())
    True
    """

    def __call__(self, embedding: Any, action: Tensor) -> tuple[RecurrentOutput, Any]: ...

    def bind(self, memory: SearchMemory) -> Callable[[int], None] | None: ...


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
        check_count("horizon", self.horizon, 1)
        if isinstance(self.reset_keys, str):
            raise TypeError(
                f"reset_keys={self.reset_keys!r} is one key; pass a sequence of keys: "
                f"reset_keys=({self.reset_keys!r},)"
            )


class TreeRules(NamedTuple):
    """The options of `search` that the steps of its simulations depend on, documented there.

    >>> TreeRules(max_depth=5).root_value
    'exclude'
    """

    value_prefix: ValuePrefix | None = None
    root_value: RootValue = "exclude"
    max_depth: int | None = None
    transpositions: StateKey | None = None


class SearchOptions(TypedDict, total=False):
    """Options of `search` other than the model, simulations and selection, documented there.

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
    workspace: Any  # a `Workspace`


# What of a model's output may hold NaN, as the steps of a search report it; and what is wrong then.
REWARD, VALUE, PRIOR_LOGITS, DISCOUNT = range(4)
_FIELDS = (
    ("reward", "NaN or infinite"),
    ("value", "NaN or infinite"),
    ("prior_logits", "NaN, inf or -inf for all legal actions"),
    ("discount", "NaN, infinite or negative (for two players: to_play, not a negative discount)"),
)


class UnfitOutputError(ValueError):
    """The model gave NaN or infinity.

    >>> from raffia.search import RootOutput, search
    >>> search(RootOutput(torch.zeros(1, 2), torch.tensor([torch.nan]), torch.zeros(1)), None,
    ...        num_simulations=1)
    Traceback (most recent call last):
    ...
    raffia.search.base.UnfitOutputError: root.value is NaN or infinite for root 0 (counted from 0)
    """


def unfit(field: int, root: int, simulation: int) -> UnfitOutputError:
    """The error that names where a model gave NaN or infinity."""
    name, wrong = _FIELDS[field]
    return UnfitOutputError(
        f"the model's {name} is {wrong} for root {root} in simulation {simulation} "
        "(both counted from 0): look at recurrent_fn's inputs there, or at its weights"
    )


def unfit_root(field: int, root: int) -> UnfitOutputError:
    """The error that names a root with NaN or infinity."""
    name, wrong = _FIELDS[field]
    return UnfitOutputError(f"root.{name} is {wrong} for root {root} (counted from 0)")
