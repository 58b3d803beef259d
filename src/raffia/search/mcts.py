"""`search`: plan from many roots together with a model, whatever model, selection and device.

`Workspace` caches what its searches have prepared.
"""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from raffia.hints import check_choice
from raffia.search import compiled
from raffia.search.base import (
    Backend,
    RecurrentFn,
    RecurrentOutput,
    RootOutput,
    RootValue,
    StateKey,
    TreeRules,
    ValuePrefix,
)
from raffia.search.check import check_budget, check_discount, check_options, check_root
from raffia.search.embeddings import Embeddings
from raffia.search.memory import LARGE
from raffia.search.models import bound_model, called_model, fitting_key, in_memory
from raffia.search.reference import ReferenceSteps
from raffia.search.selection import SelectFn, Selection, as_selection
from raffia.search.state import SearchState, make_state
from raffia.search.tree import Tree

SearchSteps = compiled.CompiledSteps | ReferenceSteps  # the same methods, with the same results

NUM_SHAPES = 4  # in the cache: those of acting, of evaluating, and of what is searched again
MOST_BYTES = LARGE  # of embeddings in the cache; those of larger searches share a thread's arena


@dataclass
class Prepared:
    """A search ready to start: its arrays, its steps, the embeddings, and the model bound to them.

    Only the loop and the workspace touch it.
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
        is_compiled = isinstance(self.steps, compiled.CompiledSteps)
        return is_compiled and bound is not None and hasattr(bound[0], "native")

    def renew(self, root: RootOutput, select: Any, gamma: Tensor) -> bool:
        """Start another search of the same shapes; False if its embedding has another structure."""
        if not self.embeddings.refill(root.embedding):
            return False
        self.state.renew(root, select, gamma)
        assert isinstance(self.steps, compiled.CompiledSteps)  # others are not cached
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
    inference = torch.is_inference_mode_enabled()  # its memory is not written to outside of it
    shape = root.prior_logits.device, root.prior_logits.shape, *budget
    # the model is the same while it is cached
    model = getattr(recurrent_fn, "workspace_key", id(recurrent_fn))
    return model, settings, inference, has, shape


@torch.no_grad()
def search(
    root: RootOutput,
    recurrent_fn: RecurrentFn,  # (embedding, action) -> (RecurrentOutput, embedding)
    *,
    num_simulations: int | Tensor,  # for all roots, or int64 [B]
    select: Selection | SelectFn | None = None,  # PUCT(), Gumbel(...), or a function
    discount: float | Tensor = 0.997,  # for all roots, or [B]; the model may give its own
    value_prefix: ValuePrefix | None = None,  # the model's reward is a prefix
    root_value: RootValue = "exclude",  # what the model's value counts in the root's
    max_depth: int | None = None,  # actions of a descent at most
    transpositions: StateKey | None = None,  # embedding [M] -> int64 [M]: share statistics
    keep_embeddings: bool = False,  # tree.embeddings: the container with batch [B, N]
    num_threads: int = 1,  # the roots are divided among them; pays where the model is compiled
    backend: Backend = "auto",  # "compiled" kernels on the CPU, "reference" in tensor operations
    workspace: Workspace | None = None,  # keeps what depends on shapes alone between searches
) -> Tree:
    """Plan from each root with a model: descend to a leaf, ask the model, back up its answer.

    In a game of two players (`root.to_play`) values are from the view of the player to move, and
    change their sign where the player changes; players take turns unless the model returns
    `to_play`. A node without legal actions ends the game: further simulations that reach it back
    up its value again. The same arguments give the same tree, whatever the other roots of the
    batch, if the model's rows do not depend on each other.

    Raises:
        ValueError: what does not fit, the shape given and the shape needed; a root without a legal
            action; NaN from the model, with the root and the simulation.

    >>> from raffia.search import RecurrentOutput, RootOutput, search
    >>> def bandit(embedding, action):  # the last of three arms pays 1
    ...     rows = len(action)
    ...     return RecurrentOutput(reward=(action == 2).float(), value=torch.zeros(rows),
    ...                            prior_logits=torch.zeros(rows, 3)), embedding
    >>> root = RootOutput(torch.zeros(1, 3), torch.zeros(1), embedding=torch.zeros(1, 1))
    >>> search(root, bandit, num_simulations=30, discount=0.0).visits_of_root()
    tensor([[ 2,  2, 26]], dtype=torch.int32)
    """
    check_root(root)
    rules = TreeRules(value_prefix, root_value, max_depth, transpositions)
    check_options(rules, num_threads, recurrent_fn)
    batch, selection = root.value.size(0), as_selection(select)
    budget = check_budget(num_simulations, batch)
    gamma = check_discount(discount, batch, root.prior_logits.device)
    prepared, shapes = None, None
    if workspace is not None:
        shapes = shapes_of(root, budget, recurrent_fn, selection, backend, num_threads, rules)
        prepared = workspace.take(shapes)
    if prepared is None or not prepared.renew(root, selection, gamma):
        state = make_state(root, budget, gamma, selection, rules)
        steps = make_steps(state, backend)
        embeddings = Embeddings(
            *(root.embedding, *state.shape[:2], value_prefix),
            compiled=isinstance(steps, compiled.CompiledSteps),
        )
        prepared = Prepared(state, steps, embeddings, recurrent_fn)
    state, steps, embeddings = prepared.state, prepared.steps, prepared.embeddings
    steps.instantiate(root)
    if transpositions is not None:
        key = fitting_key(transpositions(root.embedding), batch, gamma.device)
        state.entries["key"][:, 0] = key
    if root.actions is not None:
        state.set_root_actions(root.actions)
    if num_threads == 1:
        run_simulations(prepared, root)
    else:
        run_in_threads(num_threads, prepared, backend, root)
    steps.clear_unused()
    tree = state.tree()
    if keep_embeddings:
        unused = tree.data["parent"] < 0
        unused[:, 0] = False
        embeddings.clear(unused)
        tree.embeddings = embeddings.by_node()
    if workspace is None or not workspace.keep(shapes, prepared):
        embeddings.release()
    return tree


def run_simulations(prepared: Prepared, root: RootOutput) -> None:
    """Run all simulations of the state's roots: simulate, expand, backward."""
    state, steps, embeddings = prepared.state, prepared.steps, prepared.embeddings
    searched = state.num_searched()
    if prepared.bound is None:
        prepared.bound = bound_model(state, embeddings, root, prepared.recurrent_fn)
    bound = prepared.bound
    if bound is None:
        expand = called_model(state, embeddings, root, prepared.recurrent_fn)
    else:
        expand = in_memory(*bound)
    if bound is not None and isinstance(steps, compiled.CompiledSteps) and prepared.is_native:
        steps.run(searched, bound[0].native(), bound[1])  # the loop below, compiled
    else:
        for simulation, num_roots in enumerate(searched):
            resets = steps.simulate(simulation, num_roots)
            output, key = expand(num_roots, resets)
            steps.backward(simulation, num_roots, output, key)
    if bound is not None and root.actions is not None:
        state.take_actions(bound[0].actions)


def run_in_threads(
    num_threads: int, prepared: Prepared, backend: Backend, root: RootOutput
) -> None:
    """Run all simulations with the roots divided among threads, which share the arrays."""

    @torch.no_grad()  # a setting of each thread
    def run(part: SearchState) -> None:
        steps, embeddings = make_steps(part, backend), prepared.embeddings.for_thread()
        run_simulations(Prepared(part, steps, embeddings, prepared.recurrent_fn), root)

    parts = prepared.state.divided(num_threads)
    with ThreadPoolExecutor(len(parts)) as pool:
        for done in [pool.submit(run, part) for part in parts]:
            done.result()


def make_steps(state: SearchState, backend: Backend) -> SearchSteps:
    """The steps of a search: kernels where they are possible, else tensor operations."""
    check_choice("backend", backend, get_args(Backend))
    device = state.gamma.device
    possible = compiled.possible(state.select, device)
    if backend == "compiled" and not possible:
        raise ValueError(
            f"backend='compiled' needs tensors on the CPU (here {device}) and "
            "select=PUCT() or Gumbel(...); backend='auto' uses the reference implementation where "
            "there are no kernels"
        )
    if possible and backend != "reference":
        return compiled.CompiledSteps(state)
    return ReferenceSteps(state)
