"""`search`: plan from many roots at once with a model, whatever model, selection and device."""

import torch
from torch import Tensor

from raffia.search.answers import fitting_key
from raffia.search.check import check_budget, check_discount, check_root
from raffia.search.compiled import CompiledSteps
from raffia.search.embeddings import Embeddings
from raffia.search.outputs import RecurrentFn, RootOutput
from raffia.search.selection import SelectFn, Selection, as_selection
from raffia.search.settings import Backend, RootValue, SearchSettings, StateKey, ValuePrefix
from raffia.search.simulation_loop import make_steps, run_in_threads, run_simulations
from raffia.search.state import make_state
from raffia.search.tree import Tree


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
    max_depth: int | None = None,  # no node lies deeper
    transpositions: StateKey | None = None,  # embedding [M] -> int64 [M]: share statistics
    keep_embeddings: bool = False,  # tree.embeddings: the container with batch [B, N]
    num_threads: int = 1,  # the roots are divided among them; pays where the model is compiled
    backend: Backend = "auto",  # "compiled" kernels on the CPU, "reference" in tensor operations
) -> Tree:
    """Plan from each root with a model: descend to a leaf, ask the model, back up its answer.

    In a game of two players (`root.to_play`) values are from the view of who is to move, and change
    their sign where the player changes; players take turns unless the model says who moves. A node
    without legal actions ends the game: further simulations that come to it back up its value
    again. The same arguments give the same tree, whatever the batch a root stands in, if the
    model's rows do not depend on each other.

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
    batch, device = len(root.value), root.prior_logits.device
    budget = check_budget(num_simulations, batch)
    rows, selection = max(budget) + 1, as_selection(select)
    deepest = rows if max_depth is None else max_depth
    settings = SearchSettings(value_prefix, root_value, deepest, transpositions)
    gamma = check_discount(discount, batch)
    if value_prefix is None and getattr(recurrent_fn, "predicts_prefixes", False):
        raise ValueError(
            "this model predicts value prefixes, sums of rewards, instead of rewards: pass "
            "value_prefix=ValuePrefix(horizon=...), with the horizon that it was trained with"
        )
    state = make_state(root, budget, gamma, rows, settings, selection)
    steps = make_steps(state, backend, device)
    steps.instantiate(root)
    if transpositions is not None:
        state.entries["key"][:, 0] = fitting_key(transpositions(root.embedding), batch, device)
    if root.actions is not None:
        state.entries["actions"][:, 0] = root.actions
    embeddings = Embeddings(
        *(root.embedding, batch, rows, value_prefix),
        compiled=isinstance(steps, CompiledSteps),
    )
    if num_threads == 1:
        run_simulations(state, steps, embeddings, root, recurrent_fn)
    else:
        run_in_threads(num_threads, state, backend, embeddings, root, recurrent_fn)
    steps.clear_unused()
    tree = state.tree()
    if keep_embeddings:
        unused = tree.data["parent"] < 0
        unused[:, 0] = False
        embeddings.clear(unused)
        tree.embeddings = embeddings.by_node()
    embeddings.release()
    return tree
