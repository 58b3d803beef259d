"""A model's snapshot for planning: decoded values, and the search's memory read and written.

`fold` copies a model once; `FoldedModel.refresh` takes new weights over into the copy. Between them
the copy stays as it is, so a search never sees half of an update.

A search calls its networks once for each simulation, with as many rows as it has roots. On a GPU
starting the kernels takes longer than the kernels do; a graph starts all of them in one call:
`RowGraphs`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from raffia.algorithms.efficientzero.folding import Folding
from raffia.algorithms.efficientzero.latent_model import LatentModel
from raffia.algorithms.efficientzero.row_invariant import BLOCK, filled_up
from raffia.functional.transforms import precise
from raffia.nn.cudagraphs import Card, copy_each
from raffia.search.base import RecurrentOutput, RootOutput, SearchMemory
from raffia.tensordict.access import unchecked
from raffia.tensordict.tensordict import TensorDict

if TYPE_CHECKING:
    from raffia.algorithms.efficientzero.compiled_mlp import CompiledRecurrent, CompiledRoot

Rows = tuple[Tensor, ...]  # what the networks give for B rows, each [B, ...]


def fold(
    model: LatentModel, *, cudagraphs: bool = False, dtype: torch.dtype | None = None
) -> FoldedModel:
    """A copy of the model for planning, of its present weights and in eval mode.

    BatchNorm lies within the weights before it, which changes outputs by rounding only. The copy is
    no `nn.Module`: as a part of one it stays on the device and in the dtype that the model had,
    whatever `.to(...)` sets; `folded.refresh(model)` copies the model's present weights.

    cudagraphs: of a model on a GPU: record what a simulation computes as CUDA graphs.
    dtype: of the copy, in which it computes and keeps states, as torch.bfloat16; None for the
        model's. Values and logits come in float32 at least.

    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> model = EfficientZeroModelMLP(4, 2, latent_state_dim=8, lstm_hidden_size=6)
    >>> folded = fold(model)
    >>> root = folded.root(torch.zeros(3, 4))
    >>> output, embedding = folded.recurrent_fn(root.embedding, torch.tensor([0, 1, 1]))
    >>> output.value.shape, embedding["latent_state"].shape
    (torch.Size([3]), torch.Size([3, 8]))
    >>> before = folded.root(torch.ones(1, 4)).embedding["latent_state"]
    >>> with torch.no_grad():  # an update of the weights
    ...     for parameter in model.parameters():
    ...         _ = parameter.add_(0.1)
    >>> folded.root(torch.ones(1, 4)).embedding["latent_state"].equal(before)
    True
    >>> folded.refresh(model)
    >>> folded.root(torch.ones(1, 4)).embedding["latent_state"].equal(before)
    False
    """
    return FoldedModel(model, cudagraphs=cudagraphs, dtype=dtype)


class FoldedModel:
    """A model as a search calls it: `root`, and `recurrent_fn`; see `fold`.

    For continuous actions `prior_logits` are the policy's means and deviations, from which
    `raffia.search.sampled_policy` draws actions.

    An embedding is a TensorDict with "latent_state" [B, ...] and ("reward_hidden_state", "h") and
    (..., "c"), each [B, L].

    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> folded = FoldedModel(EfficientZeroModelMLP(4, 2))
    >>> folded.root(torch.zeros(1, 4)).value
    tensor([0.])
    """

    def __init__(
        self, model: LatentModel, *, cudagraphs: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        if not isinstance(model, LatentModel):
            kind = type(model).__name__
            what = f"the class {model.__name__}" if isinstance(model, type) else f"a {kind}"
            raise TypeError(
                f"fold accepts an EfficientZeroModel or an EfficientZeroModelMLP; got {what}: "
                "pass for example fold(EfficientZeroModelMLP(4, 2))"
            )
        self._folding = Folding(model, dtype)
        self._dtype = dtype
        self.recurrent_fn = FoldedRecurrentFn(self._folding.model, cudagraphs=cudagraphs)

    def __getstate__(self) -> dict[str, Any]:
        return without_compiled(self)

    @torch.no_grad()
    def root(
        self,
        observation: Tensor,  # [B, *observation_shape]
        mask: Tensor | None = None,  # [B, A] bool, True where the action is legal
        to_play: Tensor | None = None,  # [B] int
    ) -> RootOutput:
        """The model's output for observations, with h and c of zeros."""
        value, logits, *state = self.root_rows(observation)
        return RootOutput(logits, value, as_embedding(*state), mask, to_play)

    def root_rows(self, observation: Tensor) -> Rows:
        """The outputs of the function `root_rows`, compiled if the model has a compiled form."""
        model = self._folding.model
        found = None if self.compiled is None else self.compiled(observation)
        if found is None:
            if self._dtype is not None:
                observation = observation.to(self._dtype)
            # On a GPU as many as a graph has, so that convolutions are planned for few numbers.
            return _in_blocks(root_rows, model, observation, on_gpu=room_for(len(observation)))
        latent, value, logits = found
        zeros = latent.new_zeros(latent.size(0), model.lstm_hidden_size)
        return value, logits, latent, zeros, zeros.clone()

    def refresh(self, model: LatentModel) -> None:
        """Copy the present weights and statistics of a model with the same layers into this one."""
        self.source(model)()

    def source(self, model: LatentModel) -> Callable[[], None]:
        """The call that does `refresh(model)`, for a model that keeps its layers: checked once."""
        return partial(self._copy, self._folding.source(model))

    def _copy(self, modules: dict[str, nn.Module]) -> None:
        self._folding.copy(modules)
        self.recurrent_fn.refresh()
        _reload(self)

    @cached_property
    def compiled(self) -> CompiledRoot | None:
        """The compiled form of `root`; None if the model has none."""
        from raffia.algorithms.efficientzero.compiled_mlp import compiled_root

        return compiled_root(self._folding.model)


class FoldedRecurrentFn:
    """A folded model's recurrent function, also for the memory of a search.

    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> folded = fold(EfficientZeroModelMLP(4, 2))
    >>> type(folded.recurrent_fn).__name__
    'FoldedRecurrentFn'
    """

    predicts_prefixes = True  # `reward` is a value prefix: a search needs `value_prefix=...`

    def __init__(self, model: LatentModel, *, cudagraphs: bool = False) -> None:
        self._model, self.cudagraphs = model, cudagraphs

    def __getstate__(self) -> dict[str, Any]:
        return without_compiled(self)

    @torch.no_grad()
    def __call__(
        self,
        embedding: TensorDict,  # see `FoldedModel`
        action: Tensor,  # int64 [B]
    ) -> tuple[RecurrentOutput, TensorDict]:
        """The model's output for the states that actions lead to, and their embeddings."""
        reward, value, logits, *state = self.step_rows(*state_rows(embedding), action)
        return RecurrentOutput(reward, value, logits), as_embedding(*state)

    def step_rows(self, *rows: Tensor) -> Rows:
        """The outputs of the function `step_rows`."""
        if self.cudagraphs:
            return self.graphs(*rows)
        return _in_blocks(step_rows, self._model, *rows)

    def bind(self, memory: SearchMemory) -> Callable[[int], None] | None:
        """Bind one compiled call for each simulation; None if this model has no compiled form.

        There is one for `EfficientZeroModelMLP` in float32 on the CPU, with "BN" or "LN", ReLU, and
        no `state_norm`; continuous actions are float32 [B, D] in `memory.action`. Its results are
        those of the ordinary call but for rounding; a row's are the same to the bit in any batch.
        Rows of `node_row` must not be among `parent_row`.
        """
        return None if self.compiled is None else self.compiled.bind(memory)

    def refresh(self) -> None:
        """Pack the changed weights of the model."""
        _reload(self)

    @cached_property
    def graphs(self) -> RowGraphs:
        """`step_rows` as CUDA graphs; they read the weights where `refresh` writes them."""
        return RowGraphs(partial(step_rows, self._model))

    @cached_property
    def compiled(self) -> CompiledRecurrent | None:
        """The compiled form that `bind` binds; None if the model has none."""
        from raffia.algorithms.efficientzero.compiled_mlp import compiled_recurrent

        return compiled_recurrent(self._model)


def _reload(owner: FoldedModel | FoldedRecurrentFn) -> None:
    """Pack the weights again, if they were packed before."""
    compiled = vars(owner).get("compiled")
    if compiled is not None:
        compiled.load()


def _in_blocks(
    function: Callable[..., Rows], model: LatentModel, *rows: Tensor, on_gpu: int = 1
) -> Rows:
    """Apply a function to rows that are padded to whole blocks; see `row_invariant`.

    on_gpu: rows of a block there. On the CPU images are not filled up: it would cost too much, and
        their networks fill up what needs it.
    """
    num, size = len(rows[0]), on_gpu
    if rows[0].device.type == "cpu":
        size = BLOCK if len(model.latent_shape) == 1 else 1
    if size == 1:
        return function(model, *rows)
    rows = tuple([filled_up(x, size) for x in rows])
    found = function(model, *rows)
    return found if len(rows[0]) == num else tuple(part[:num] for part in found)


def root_rows(model: LatentModel, observation: Tensor) -> Rows:
    """Value, policy logits, latent state, h and c [B, L] of observations [B, *O].

    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> [tuple(part.shape) for part in root_rows(EfficientZeroModelMLP(4, 2), torch.zeros(3, 4))]
    [(3,), (3, 2), (3, 256), (3, 512), (3, 512)]
    """
    output = model.initial_inference(observation)
    h, c = output.reward_hidden_state
    value, logits = model.decode_value(output.value), precise(output.policy_logits)
    return value, logits, output.latent_state, h[0], c[0]


def step_rows(model: LatentModel, latent: Tensor, h: Tensor, c: Tensor, action: Tensor) -> Rows:
    """Value prefix and the outputs of `root_rows` for the states that actions lead to."""
    output = model.recurrent_inference(latent, (h.unsqueeze(0), c.unsqueeze(0)), action)
    h, c = output.reward_hidden_state
    reward, value = model.decode_reward(output.value_prefix), model.decode_value(output.value)
    return reward, value, precise(output.policy_logits), output.latent_state, h[0], c[0]


def state_rows(embedding: TensorDict) -> tuple[Tensor, Tensor, Tensor]:
    """Latent state, h and c of an embedding."""
    memory = embedding["reward_hidden_state"]
    return embedding["latent_state"], memory["h"], memory["c"]


def as_embedding(
    latent_state: Tensor,
    h: Tensor,  # [B, L]
    c: Tensor,
) -> TensorDict:
    """The embedding of `FoldedModel`."""
    size = latent_state.shape[:1]
    state = unchecked({"h": h, "c": c}, size)
    return unchecked({"latent_state": latent_state, "reward_hidden_state": state}, size)


def without_compiled(model: object) -> dict[str, Any]:
    """The state of a copy: compiled code and graphs refer to this process's memory, a copy makes
    its own."""
    own = ("compiled", "graphs")
    return {name: value for name, value in vars(model).items() if name not in own}


class _Graph(NamedTuple):
    given: Rows  # what it reads, [size, ...] each
    output: Rows  # what it writes
    replay: Callable[[], None]


class RowGraphs:
    """Records a function of rows as CUDA graphs, one for each number of rows that there is room
    for.

    A call copies its rows into the smallest graph that holds them, replays it, and gives copies of
    as many rows. What the function reads besides, such as weights, stays where it is in memory.

    function: rows [B, ...] to rows [B, ...], none of which depends on the others.
    Raises ValueError where there is no GPU, and at a call for rows that are not on the current one.
    """

    def __init__(self, function: Callable[..., Rows]) -> None:
        if not torch.cuda.is_available():
            raise ValueError("cudagraphs=True needs a GPU, but torch sees none on this machine")
        self.function = function
        self._card: Card | None = None
        self._graphs: dict[int, _Graph] = {}
        # What lies in a graph's memory is one call's until it is copied from there.
        self._lock = threading.Lock()

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows for which graphs exist."""
        return sorted(self._graphs)

    @torch.no_grad()
    def __call__(self, *rows: Tensor) -> Rows:  # [B, ...] each
        """The function's outputs [B, ...]."""
        num = len(rows[0])
        size = room_for(num)
        with self._lock:
            graph = self._graphs.get(size)
            if graph is None:
                graph = self._graphs[size] = self._recorded(size, rows)
            copy_each([own[:num] for own in graph.given], rows)
            graph.replay()
            return tuple([part[:num].clone() for part in graph.output])

    def _recorded(self, size: int, rows: Rows) -> _Graph:
        if self._card is None:
            self._card = Card(rows[0].device if rows[0].is_cuda else None)
        if not self._card.holds(rows[0]):
            raise ValueError(
                f"cudagraphs=True needs a model on a GPU, but these rows are on {rows[0].device}: "
                'use model.to("cuda"), or leave cudagraphs out'
            )
        given = tuple([row.new_zeros(size, *row.shape[1:]) for row in rows])

        def run() -> Rows:
            return self.function(*given)

        self._card.warm(run)
        output, replay = self._card.record(run)
        return _Graph(given, output, replay)


def room_for(num: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, 24 ... that is at least `num`.

    >>> [room_for(num) for num in (1, 5, 9, 16, 17, 1000)]
    [1, 6, 12, 16, 24, 1024]
    """
    power = 1 << max(0, num - 1).bit_length()  # the least power of two
    return power * 3 // 4 if power >= 4 and num <= power * 3 // 4 else power
