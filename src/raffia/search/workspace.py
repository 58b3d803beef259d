"""Workspace: the searches of a planner that are prepared, cached by their shapes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from raffia.search.base import Backend, RecurrentFn, RecurrentOutput, RootOutput, TreeRules
from raffia.search.compiled import CompiledSteps
from raffia.search.embeddings import Embeddings
from raffia.search.memory import LARGE
from raffia.search.reference import ReferenceSteps
from raffia.search.state import SearchState

SearchSteps = CompiledSteps | ReferenceSteps  # the same methods, with the same results

NUM_SHAPES = 4  # in the cache: those of acting, of evaluating, and of what is searched again
MOST_BYTES = LARGE  # of embeddings in the cache; those of larger searches share a thread's arena


@dataclass
class Prepared:
    """A search ready to start: its arrays, its steps, the embeddings, and the model bound to them.

    Only the loop (mcts.py) and the workspace touch it.
    """

    state: SearchState
    steps: SearchSteps
    embeddings: Embeddings
    recurrent_fn: RecurrentFn
    bound: tuple[Any, RecurrentOutput] | None = None  # a model's step in this memory, its output

    @property
    def is_native(self) -> bool:
        """Whether all simulations are one compiled call."""
        bound = self.bound
        is_compiled = isinstance(self.steps, CompiledSteps)
        return is_compiled and bound is not None and hasattr(bound[0], "native")

    def renew(self, root: RootOutput, select: Any, gamma: Tensor) -> bool:
        """Start another search of the same shapes; False if its embedding has another structure."""
        if not self.embeddings.refill(root.embedding):
            return False
        self.state.renew(root, select, gamma)
        assert isinstance(self.steps, CompiledSteps)  # others are not cached
        self.steps.renew()
        return True


class Workspace:
    """A cache of prepared searches by their shapes: memory for embeddings, rows and paths, and the
    model bound to it.

    A planner passes its own to each of its searches; the trees that they give do not share it. A
    search that is in use is not in the cache: one in another thread, or within the model, prepares
    another. A search that raises gives nothing back.

    >>> import copy
    >>> workspace = Workspace()
    >>> workspace.take("shapes") is None and copy.deepcopy(workspace) is not workspace
    True
    """

    def __init__(self) -> None:
        self._cached: dict[Hashable, Prepared] = {}

    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:
        return Workspace, ()  # memory and addresses are of this process; a copy makes its own

    def take(self, shapes: Hashable) -> Prepared | None:
        """Take the search prepared for these shapes out of the cache: it is the caller's until
        `keep`.
        """
        return self._cached.pop(shapes, None)

    def keep(self, shapes: Hashable, prepared: Prepared) -> bool:
        """Put a prepared search back into the cache if it is small and its next run needs no Python
        calls; returns whether it did.
        """
        if not prepared.is_native or prepared.embeddings.nbytes >= MOST_BYTES:
            return False
        while len(self._cached) >= NUM_SHAPES:
            self._cached.pop(next(iter(self._cached)), None)
        self._cached[shapes] = prepared
        return True


def shapes_of(
    root: RootOutput,
    budget: list[int],  # of each root
    recurrent_fn: RecurrentFn,
    select: Any,
    backend: Backend,
    num_threads: int,
    rules: TreeRules,
) -> Hashable:
    """The cache key of a search: equal for two searches that can use the same prepared one.

    >>> root = RootOutput(torch.zeros(2, 3), torch.zeros(2), torch.zeros(2))
    >>> options = id, None, "auto", 1, TreeRules()
    >>> shapes_of(root, [4, 4], *options) == shapes_of(root, [4, 5], *options)
    False
    """
    prefix = rules.value_prefix and (rules.value_prefix.horizon, *rules.value_prefix.reset_keys)
    optional = root.mask, root.to_play, root.actions, rules.transpositions
    has = tuple([part is None for part in optional])
    settings = type(select), backend, num_threads, prefix, rules.root_value, rules.max_depth
    shape = root.prior_logits.device, root.prior_logits.shape, *budget
    # the model is the same while it is cached
    model = getattr(recurrent_fn, "workspace_key", id(recurrent_fn))
    return model, settings, has, shape
