"""Planning for many members of a population in one search: their rows lie in one batch.

Legend: P members, N rows of all of them together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from raffia.algorithms.efficientzero.config import EfficientZeroConfig
from raffia.algorithms.efficientzero.inference import (
    FoldedModel,
    RowGraphs,
    Rows,
    as_embedding,
    fold,
    root_rows,
    state_rows,
    step_rows,
    without_compiled,
)
from raffia.algorithms.efficientzero.latent_model import LatentModel
from raffia.algorithms.efficientzero.planning import Planner, weights_by_name
from raffia.envs.env import EnvSpec
from raffia.search.base import RecurrentOutput, RootOutput, SearchMemory
from raffia.tensordict.tensordict import TensorDict


class StackedPlanner(Planner):
    """A `Planner` with the networks of P members: one search for the rows of all members.

    size: P. States [N] are those of the first member, then those of the second ...: as many of
        each; or whose each is stands in "member" int64 [N]. A row's result is that of its member's
        own planner; up to rounding, where it is not on the CPU.

    A member whose weights are not finite plays with those of the first whose are.

    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> from raffia.algorithms.efficientzero.learner import EfficientZeroLearner
    >>> from raffia.envs.env import Discrete, EnvSpec
    >>> spec = EnvSpec(observation_shape=(4,), action=Discrete(2))
    >>> config = EfficientZeroConfig()
    >>> learner = EfficientZeroLearner(spec, config, num_updates=10)
    >>> planner = StackedPlanner(learner.make_model(0), spec, config, size=3)
    >>> planner.refresh(torch.stack([learner.init(seed) for seed in range(3)]))
    >>> state = TensorDict(observation=torch.rand(6, 4), batch_size=[6])  # two of each member
    >>> planner.plan(state, num_simulations=4, noise=False).action.shape
    torch.Size([6])
    """

    def __init__(
        self,
        model: LatentModel,
        spec: EnvSpec,
        config: EfficientZeroConfig,
        *,
        size: int,
        frame_stack: int = 1,
        num_threads: int = 1,
        cudagraphs: bool = False,
    ) -> None:
        self.size = size
        super().__init__(
            *(model, spec, config),
            frame_stack=frame_stack,
            num_threads=num_threads,
            cudagraphs=cudagraphs,
        )

    def _snapshot_of(self, model: LatentModel) -> StackedModel:
        return StackedModel(model, self.size, cudagraphs=self.cudagraphs)


class StackedModel:
    """P models of the same form as a search calls them: `root` and `recurrent_fn`.

    how: "each" member's rows by its own folded model, compiled where there is a compiled form; or
        all by one "vmap". None: each on a CPU, else vmap.
    cudagraphs: of models on a GPU: record what a simulation computes by vmap as CUDA graphs.

    An embedding is that of a folded model, with a further entry "member" int64 [N].

    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> StackedModel(EfficientZeroModelMLP(4, 2), size=2).root(torch.zeros(4, 4)).value.shape
    torch.Size([4])
    """

    def __init__(
        self,
        model: LatentModel,
        size: int,
        how: Literal["each", "vmap"] | None = None,
        *,
        cudagraphs: bool = False,
    ) -> None:
        on_cpu = next(model.parameters()).device.type == "cpu"
        self.size, self.how = size, how or ("each" if on_cpu else "vmap")
        made = (
            _Each(model, size)
            if self.how == "each"
            else _Vmapped(model, size, cudagraphs=cudagraphs)
        )
        self._models = made
        self.recurrent_fn = _StackedRecurrentFn(made)

    def load(self, weights: TensorDict) -> None:
        """Load the weights [P] of these members.

        >>> from raffia.algorithms.efficientzero.learner import EfficientZeroLearner
        >>> from raffia.envs.env import Discrete, EnvSpec
        >>> spec = EnvSpec(observation_shape=(4,), action=Discrete(2))
        >>> learner = EfficientZeroLearner(spec, EfficientZeroConfig(), num_updates=10)
        >>> model = StackedModel(learner.make_model(0), size=2)
        >>> model.load(torch.stack([learner.init(seed) for seed in (1, 2)]))
        """
        found = {name: value.detach() for name, value in weights_by_name(weights).items()}
        fine = torch.stack(
            [value.reshape(self.size, -1).isfinite().all(1) for value in found.values()]
        ).all(0)
        index = torch.arange(self.size, device=fine.device)
        if not bool(fine.all()):
            index = torch.where(fine, index, fine.int().argmax())
        self._models.load(found, index)

    @torch.no_grad()
    def root(
        self,
        observation: Tensor,  # [N, *observation_shape]
        mask: Tensor | None = None,  # [N, A] bool, True where the action is legal
        to_play: Tensor | None = None,  # [N] int
        member: Tensor | None = None,  # int64 [N], whose each row is; None: as many of each
    ) -> RootOutput:
        """The members' outputs for their rows."""
        if member is None:
            if len(observation) % self.size:
                raise ValueError(
                    f"{len(observation)} rows cannot be divided equally among {self.size} "
                    f"members: pass a multiple of {self.size} rows, those of the first member "
                    "first, or name the member of each row with member=..."
                )
            member = _in_order(self.size, len(observation))
        value, logits, *embedding = _of_members(self._models, "root", member, observation)
        return RootOutput(logits, value, _embedding(member, *embedding), mask, to_play)


What = Literal["root", "recurrent"]


class _Each:
    """Applies each member's own folded model to its rows."""

    def __init__(self, model: LatentModel, size: int) -> None:
        self.size, self._model = size, model
        self._folded: list[FoldedModel] = [fold(model) for _ in range(size)]

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor], index: Tensor) -> None:
        """Load member i's weights from row index[i]."""
        named = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        targets = [named[name] for name in weights]
        for folded, row in zip(self._folded, index.tolist(), strict=True):
            torch._foreach_copy_(targets, [value[row] for value in weights.values()])
            folded.refresh(self._model)

    def run(self, what: What, counts: list[int], *rows: Tensor) -> Rows:
        """Outputs for rows of the first member, then of the second ..., as many as the counts."""
        parts = zip(*(x.split(counts) for x in rows), strict=True)
        outputs = [
            folded.root_rows(*part) if what == "root" else folded.recurrent_fn.step_rows(*part)
            for folded, part in zip(self._folded, parts, strict=True)
            if len(part[0])
        ]
        return tuple(torch.cat(found) for found in zip(*outputs, strict=True))

    def bind(self, memory: SearchMemory) -> Callable[[int], None] | None:
        compiled = [folded.recurrent_fn.compiled for folded in self._folded]
        there = [step for step in compiled if step is not None]
        if len(there) < self.size:
            return None
        from raffia.algorithms.efficientzero.compiled_mlp import bind_members

        return bind_members(there, memory)


class _Vmapped:
    """Applies one vmapped program to the rows of all members."""

    def __init__(self, model: LatentModel, size: int, *, cudagraphs: bool = False) -> None:
        self.size, self._form = size, _Decoded(model).eval()
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._weights = {
            f"model.{name}": torch.stack([tensor.detach()] * size) for name, tensor in named.items()
        }
        self.cudagraphs = cudagraphs

    def __getstate__(self) -> dict[str, Any]:
        return without_compiled(self)

    @cached_property
    def graphs(self) -> RowGraphs:
        """A simulation's step as CUDA graphs; they read the weights where `load` writes them."""
        return RowGraphs(partial(self._apply, "recurrent"))

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor], index: Tensor) -> None:
        # Copies, as a learner writes to its weights while a search may still read these; where
        # they were, for graphs read them there.
        given = {f"model.{name}": value[index] for name, value in weights.items()}
        torch._foreach_copy_([self._weights[name] for name in given], list(given.values()))

    def run(self, what: What, counts: list[int], *rows: Tensor) -> Rows:
        most = max(counts)
        if min(counts) == most:
            return self._run(what, *(x.unflatten(0, (self.size, most)) for x in rows), there=None)
        device = rows[0].device
        count = torch.tensor(counts, device=device)
        column = torch.arange(most, device=device)
        there = column < count.unsqueeze(1)
        index = (count.cumsum(0) - count).unsqueeze(1) + torch.where(there, column, 0)
        index = index.clamp_max(len(rows[0]) - 1)
        return self._run(what, *(x[index] for x in rows), there=there)

    def _run(self, what: What, *rows: Tensor, there: Tensor | None) -> Rows:  # [P, N / P, ...]
        columns = [x.transpose(0, 1) for x in rows]
        is_recorded = self.cudagraphs and what == "recurrent"
        found = self.graphs(*columns) if is_recorded else self._apply(what, *columns)
        parts = [x.transpose(0, 1) for x in found]
        return tuple([x.flatten(0, 1) if there is None else x[there] for x in parts])

    def _apply(self, what: What, *columns: Tensor) -> Rows:  # [N / P, P, ...]
        def run(weights: dict[str, Tensor], *parts: Tensor) -> Rows:
            return functional_call(self._form, weights, (what, *parts))

        dims = (0, *[1] * len(columns))
        found: Rows = torch.vmap(run, in_dims=dims, out_dims=1)(self._weights, *columns)
        return found

    def bind(self, memory: SearchMemory) -> Callable[[int], None] | None:
        return None  # it works on copies of rows


_Models = _Each | _Vmapped


class _Decoded(nn.Module):
    """A model's two functions with decoded values, as flat tuples of rows."""

    def __init__(self, model: LatentModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, what: What, *rows: Tensor) -> Rows:
        return (root_rows if what == "root" else step_rows)(self.model, *rows)


class _StackedRecurrentFn:
    """The recurrent function of P models."""

    predicts_prefixes = True  # `reward` is a value prefix, as of a folded model

    def __init__(self, models: _Models) -> None:
        self._models = models
        self.bind = models.bind  # one compiled call for each simulation, where all members have one

    @torch.no_grad()
    def __call__(self, embedding: TensorDict, action: Tensor) -> tuple[RecurrentOutput, TensorDict]:
        member = embedding["member"]
        rows = *state_rows(embedding), action
        reward, value, logits, *after = _of_members(self._models, "recurrent", member, *rows)
        return RecurrentOutput(reward, value, logits), _embedding(member, *after)


def _of_members(models: _Models, what: What, member: Tensor, *rows: Tensor) -> Rows:
    """The models' outputs for rows in any order."""
    num = len(member)
    if num % models.size == 0 and torch.equal(member, _in_order(models.size, num).to(member)):
        return models.run(what, [num // models.size] * models.size, *rows)
    counts, order = torch.bincount(member, minlength=models.size), member.argsort(stable=True)
    at = order.to(rows[0].device)
    found = models.run(what, counts.tolist(), *(x[at] for x in rows))
    back = torch.empty_like(at)
    back[at] = torch.arange(num, device=at.device)
    return tuple(x[back] for x in found)


def _in_order(size: int, num: int) -> Tensor:
    return torch.arange(size).repeat_interleave(num // size)


def _embedding(member: Tensor, latent_state: Tensor, h: Tensor, c: Tensor) -> TensorDict:
    # on the device of the latent states, as the rows of all are chosen together
    return as_embedding(latent_state, h, c).set("member", member.to(latent_state.device))
