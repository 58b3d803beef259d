"""Planning for many members of a population in one search: their rows lie in one batch.

Legend: P members, N rows of all of them together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from raffia.algorithms.efficientzero.config import EfficientZeroConfig
from raffia.algorithms.efficientzero.latent_model import LatentModel
from raffia.algorithms.efficientzero.planning import Planner
from raffia.envs.env import EnvSpec
from raffia.search.outputs import RecurrentOutput, RootOutput
from raffia.tensordict.keys import dotted
from raffia.tensordict.tensordict import TensorDict

__all__ = ["StackedModel", "StackedPlanner"]


class StackedPlanner(Planner):
    """A `Planner` with the networks of P members: one search for the rows of all.

    size: P. States [N] are those of the first member, then those of the second ...: as many of
        each. A row's result is that of its member's own planner up to rounding.

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
    ) -> None:
        super().__init__(model, spec, config, frame_stack=frame_stack, num_threads=num_threads)
        self._stacked = StackedModel(model, size)
        self._folded = self._stacked  # type: ignore[assignment]  # the same face

    def refresh(self, weights: TensorDict) -> None:
        """Take over "params" and "buffers" of a population's state [P], or of its "target"."""
        self._stacked.load(weights)
        self.num_refreshed += 1


class StackedModel:
    """What a search asks of P models of the same form: `root` and `recurrent_fn`.

    An embedding is that of a folded model with "member" [N] beside it.

    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> StackedModel(EfficientZeroModelMLP(4, 2), size=2).root(torch.zeros(4, 4)).value.shape
    torch.Size([4])
    """

    def __init__(self, model: LatentModel, size: int) -> None:
        self.size, self._form = size, _Decoded(model).eval()
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._weights = {
            f"model.{name}": torch.stack([tensor.detach()] * size) for name, tensor in named.items()
        }
        self.recurrent_fn = _StackedRecurrentFn(self)

    def load(self, weights: TensorDict) -> None:
        """The weights [P] of these members from now on.

        >>> from raffia.algorithms.efficientzero.learner import EfficientZeroLearner
        >>> from raffia.envs.env import Discrete, EnvSpec
        >>> spec = EnvSpec(observation_shape=(4,), action=Discrete(2))
        >>> learner = EfficientZeroLearner(spec, EfficientZeroConfig(), num_updates=10)
        >>> model = StackedModel(learner.make_model(0), size=2)
        >>> model.load(torch.stack([learner.init(seed) for seed in (1, 2)]))
        """
        found = {}
        for part in ("params", "buffers"):
            for key, value in weights[part].items(True, True):
                found[f"model.{dotted(key)}"] = value
        fine = torch.stack(
            [value.reshape(self.size, -1).isfinite().all(1) for value in found.values()]
        ).all(0)
        place = torch.arange(self.size, device=fine.device)
        if not bool(fine.all()):
            place = torch.where(fine, place, fine.int().argmax())
        # copies, as a learner writes to its weights while a search may go on with these
        self._weights = {name: value.detach()[place] for name, value in found.items()}

    @torch.no_grad()
    def root(
        self,
        obs: Tensor,  # [N, *observation_shape]
        mask: Tensor | None = None,  # [N, A] bool, True where the action is legal
        to_play: Tensor | None = None,  # [N] int
    ) -> RootOutput:
        """What the members say of their rows, which are as many of each."""
        if len(obs) % self.size:
            raise ValueError(
                f"{len(obs)} rows are not as many of each of {self.size} members: give a multiple "
                f"of {self.size}, the first member's first"
            )
        member = torch.arange(self.size).repeat_interleave(len(obs) // self.size)
        value, logits, *embedding = self.of_members("root", member, obs)
        return RootOutput(logits, value, _embedding(member, *embedding), mask, to_play)

    def of_members(self, what: str, member: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        """One program for all rows [N], each by its member's weights.

        >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
        >>> model = StackedModel(EfficientZeroModelMLP(4, 2), size=2)
        >>> model.of_members("root", torch.tensor([1, 0, 1]), torch.zeros(3, 4))[0].shape
        torch.Size([3])
        """
        counts = torch.bincount(member, minlength=self.size)
        order, most = member.argsort(stable=True), int(counts.max())
        start = counts.cumsum(0) - counts
        column = torch.arange(most).expand(self.size, most)
        there = column < counts.unsqueeze(1)
        place = order[
            (start.unsqueeze(1) + torch.where(there, column, 0)).clamp_max(len(order) - 1)
        ]
        device = rows[0].device

        def run(weights: dict[str, Tensor], *parts: Tensor) -> Any:
            return functional_call(self._form, weights, (what, *parts))

        found = torch.vmap(run)(self._weights, *(x[place.to(device)] for x in rows))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        there = there.flatten().to(device)
        return tuple(x.flatten(0, 1)[there][back.to(device)] for x in found)


class _Decoded(nn.Module):
    """A model's two functions with decoded values, as flat tuples of rows."""

    def __init__(self, model: LatentModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, what: str, *rows: Tensor) -> tuple[Tensor, ...]:
        if what == "root":
            return self._root(*rows)
        return self._recurrent(*rows)

    def _root(self, obs: Tensor) -> tuple[Tensor, ...]:
        output = self.model.initial_inference(obs)
        h, c = output.reward_hidden_state
        value = self.model.decode_value(output.value)
        return value, output.policy_logits, output.latent_state, h.squeeze(0), c.squeeze(0)

    def _recurrent(
        self, latent: Tensor, h: Tensor, c: Tensor, action: Tensor
    ) -> tuple[Tensor, ...]:
        state = h.unsqueeze(0), c.unsqueeze(0)
        output = self.model.recurrent_inference(latent, state, action)
        h, c = output.reward_hidden_state
        return (
            self.model.decode_reward(output.value_prefix),
            self.model.decode_value(output.value),
            output.policy_logits,
            output.latent_state,
            h.squeeze(0),
            c.squeeze(0),
        )


class _StackedRecurrentFn:
    """The recurrent function of P models."""

    predicts_prefixes = True  # `reward` is a value prefix, as of a folded model

    def __init__(self, models: StackedModel) -> None:
        self._models = models

    @torch.no_grad()
    def __call__(self, embedding: Any, action: Tensor) -> tuple[RecurrentOutput, TensorDict]:
        member, memory = embedding["member"], embedding["reward_hidden_state"]
        rows = embedding["latent_state"], memory["h"], memory["c"], action
        reward, value, logits, *after = self._models.of_members("recurrent", member, *rows)
        return RecurrentOutput(reward, value, logits), _embedding(member, *after)

    def bind(self, memory: object) -> Callable[[int], None] | None:
        """It works on copies of rows."""
        return None


def _embedding(member: Tensor, latent_state: Tensor, h: Tensor, c: Tensor) -> TensorDict:
    size = [len(member)]
    state = TensorDict({"h": h, "c": c}, size)
    return TensorDict(
        {"latent_state": latent_state, "reward_hidden_state": state, "member": member}, size
    )
