"""The loop of a search: descend to a leaf, ask the model, back up its answer; again and again."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from raffia.search import compiled
from raffia.search.answers import Answers, fitting_key
from raffia.search.embeddings import Embeddings
from raffia.search.outputs import RecurrentFn, RecurrentOutput, RootOutput, SearchMemory
from raffia.search.reference import ReferenceSteps
from raffia.search.settings import Backend, ValuePrefix
from raffia.search.state import SearchState


class SearchSteps(Protocol):
    """The steps of a search, as compiled kernels or as tensor operations, with the same results."""

    def instantiate(self, root: RootOutput) -> None:
        """Set the values of trees with roots only."""

    def simulate(self, simulation: int, num_roots: int) -> int | None:
        """Descend from each root to an untried action or to a node that ends the simulation.

        Returns how many of the new nodes are resets; None: unknown.
        """

    def backup(
        self, simulation: int, num_roots: int, output: RecurrentOutput, key: Tensor | None
    ) -> None:
        """Write the new nodes and add their values along the paths."""

    def clear_unused(self) -> None:
        """Clear the rows that never became nodes."""


def make_steps(state: SearchState, backend: Backend, device: torch.device) -> SearchSteps:
    """The steps of a search: kernels where they are possible, else tensor operations."""
    if backend not in ("auto", "compiled", "reference"):
        raise ValueError(f"backend={backend!r} is none of 'auto', 'compiled', 'reference'")
    if backend == "reference":
        return ReferenceSteps(state)
    if compiled.possible(state.select, device):
        return compiled.CompiledSteps(state)
    if backend == "compiled":
        raise ValueError(
            f"backend='compiled' needs numba, tensors on the CPU (here {device}) and select=PUCT() "
            "or Gumbel(...); backend='auto' takes the reference where there are no kernels"
        )
    return ReferenceSteps(state)


def run_simulations(
    state: SearchState,
    steps: SearchSteps,
    embeddings: Embeddings,
    root: RootOutput,
    recurrent_fn: RecurrentFn,
) -> None:
    """Run all simulations of the state's roots, with the model called or working in their
    memory."""
    searched = state.num_searched()
    bound = _bound(state, embeddings, root, recurrent_fn)
    if bound is None:
        run = _with_called_model(state, steps, embeddings, root, recurrent_fn)
    elif isinstance(steps, compiled.CompiledSteps) and hasattr(bound[0], "native"):
        return steps.run(searched, bound[0].native(), bound[1])
    else:
        run = _with_bound_model(steps, *bound)
    for simulation, num_roots in enumerate(searched):
        run(simulation, num_roots)


def run_in_threads(
    num_threads: int,
    state: SearchState,
    backend: Backend,
    embeddings: Embeddings,
    root: RootOutput,
    recurrent_fn: RecurrentFn,
) -> None:
    """Run all simulations with the roots divided among threads, which share the arrays."""
    if num_threads < 1:
        raise ValueError(f"num_threads={num_threads} must be at least 1")

    @torch.no_grad()  # a setting of each thread
    def run(part: SearchState) -> None:
        steps = make_steps(part, backend, state.gamma.device)
        run_simulations(part, steps, embeddings.beside(), root, recurrent_fn)

    parts = state.divided(num_threads)
    with ThreadPoolExecutor(len(parts)) as pool:
        for done in [pool.submit(run, part) for part in parts]:
            done.result()


def _with_called_model(
    state: SearchState,
    steps: SearchSteps,
    embeddings: Embeddings,
    root: RootOutput,
    recurrent_fn: RecurrentFn,
) -> Callable[[int, int], None]:
    """Make one simulation with a model that is called on embeddings."""
    state_key, answers = state.settings.transpositions, Answers(state, root)
    actions = None if root.actions is None else state.entries["actions"].transpose(0, 1)
    searched, batch = _SearchedViews(state), state.shape[0]
    elsewhere = None if embeddings.device == state.gamma.device else embeddings.device

    def run(simulation: int, num_roots: int) -> None:
        resets = steps.simulate(simulation, num_roots)
        parents, children, action, reset = searched(num_roots)
        rows, new_rows = parents, children
        if actions is not None:
            action = actions[parents // batch, parents % batch, action]
        if elsewhere is not None:  # the trees here, the model there
            rows, new_rows, action, reset = (
                x.to(elsewhere) for x in (rows, new_rows, action, reset)
            )
        answer, embedding = _pair(recurrent_fn(embeddings.gather(rows), action))
        output = answers.fitting(answer, num_roots)
        embeddings.store(new_rows, embedding, None if resets == 0 else reset)
        if actions is not None:
            assert output.actions is not None  # `fitting` saw to that
            actions[children // batch, children % batch] = output.actions.to(actions.device)
        key = (
            None
            if state_key is None
            else fitting_key(state_key(embedding), num_roots, state.gamma.device)
        )
        steps.backup(simulation, num_roots, output, key)

    return run


def _pair(answer: Any) -> tuple[Any, Any]:
    if not isinstance(answer, tuple) or isinstance(answer, RecurrentOutput) or len(answer) != 2:
        raise TypeError(
            f"recurrent_fn gave a {type(answer).__name__}; it must return two things: "
            "RecurrentOutput(reward, value, prior_logits, ...), embedding"
        )
    return answer


class _SearchedViews:
    """Views of the arrays of the roots still searched, made when their number m changes."""

    def __init__(self, state: SearchState) -> None:
        self._state, self._num = state, -1
        self._views: tuple[Tensor, Tensor, Tensor, Tensor]

    def __call__(self, num: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows of the parents and of the new nodes, the actions and the resets, each [m]."""
        if num != self._num:
            state, self._num = self._state, num
            self._views = (
                *(state.parent_row[:num], state.node_row[:num]),
                *(state.leaf_action[:num], state.reset[:num]),
            )
        return self._views


def _bound(
    state: SearchState,
    embeddings: Embeddings,
    root: RootOutput,
    recurrent_fn: Any,
) -> tuple[Any, RecurrentOutput] | None:
    """The model's step in the search's memory and its output; None if it cannot work there."""
    bind, prefix = getattr(recurrent_fn, "bind", None), state.settings.value_prefix
    if bind is None or root.actions is not None or state.stamp is not None:
        return None  # it writes neither sampled actions nor keys
    if prefix is not None and tuple(prefix.reset_keys) != ValuePrefix().reset_keys:
        return None  # it zeroes its own memory of rewards, not other entries
    batch, _, actions = state.shape
    device = state.gamma.device
    reward, value = torch.zeros(batch, device=device), torch.zeros(batch, device=device)
    logits = torch.zeros(batch, actions, device=device)
    memory = SearchMemory(
        embeddings=embeddings.all_rows(),
        parent_row=state.parent_row,
        node_row=state.node_row,
        action=state.leaf_action,
        reset=state.reset,
        reward=reward,
        value=value,
        prior_logits=logits,
    )
    step = bind(memory)
    return None if step is None else (step, RecurrentOutput(reward, value, logits))


def _with_bound_model(
    steps: SearchSteps, model: Callable[[int], None], output: RecurrentOutput
) -> Callable[[int, int], None]:
    """Make one simulation with a model that works in the search's memory."""
    reward, value, logits = output[:3]

    def run(simulation: int, num_roots: int) -> None:
        steps.simulate(simulation, num_roots)
        model(num_roots)
        found = RecurrentOutput(reward[:num_roots], value[:num_roots], logits[:num_roots])
        steps.backup(simulation, num_roots, found, None)

    return run
