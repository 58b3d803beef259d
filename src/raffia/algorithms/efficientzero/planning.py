"""Planning with a snapshot of the networks: for acting, for evaluating and for reanalyzing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from raffia.algorithms.efficientzero.config import EfficientZeroConfig, acting_numbers
from raffia.algorithms.efficientzero.inference import fold
from raffia.algorithms.efficientzero.latent_model import LatentModel
from raffia.algorithms.efficientzero.observations import as_input, merge_frames
from raffia.envs.env import Box, EnvSpec
from raffia.functional.draws import child_seed, draw_seeds
from raffia.search.base import RootOutput, ValuePrefix
from raffia.search.check import check_seed
from raffia.search.mcts import Workspace
from raffia.search.policies import (
    PolicyOutput,
    gumbel_policy,
    muzero_policy,
    root_dirichlet,
    root_gumbel,
)
from raffia.search.sampled import GaussianSampler, sampled_policy
from raffia.tensordict.keys import dotted
from raffia.tensordict.tensordict import TensorDict

# What of a row's seed is drawn: noise at the root, the action, the actions to choose from.
NOISE, CHOICE, ACTIONS = range(3)


class Snapshot(Protocol):
    """The networks as a search calls them, which only `load` changes."""

    recurrent_fn: Any  # a `raffia.search.RecurrentFn`

    def load(self, weights: TensorDict) -> None:
        """Load "params" and "buffers"."""

    def root(
        self,
        observation: Tensor,
        mask: Tensor | None,
        to_play: Tensor | None,
        member: Tensor | None,  # whose each row is, where there are several networks
    ) -> RootOutput:
        """The networks' outputs for observations."""


class _Copy:
    """A model, folded."""

    def __init__(self, model: LatentModel, *, cudagraphs: bool, dtype: torch.dtype | None) -> None:
        self._folded = fold(model, cudagraphs=cudagraphs, dtype=dtype)
        self.recurrent_fn = self._folded.recurrent_fn
        self._tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        self._refresh = self._folded.source(model)

    @torch.no_grad()
    def load(self, weights: TensorDict) -> None:
        given = weights_by_name(weights)
        torch._foreach_copy_([self._tensors[name] for name in given], list(given.values()))
        self._refresh()

    def root(
        self,
        observation: Tensor,
        mask: Tensor | None,
        to_play: Tensor | None,
        member: Tensor | None,
    ) -> RootOutput:
        return self._folded.root(observation, mask, to_play)


class Planner:
    """Searches from states of an environment with a snapshot of the networks; `refresh` renews it.

    model: the networks, whose weights do not matter: they are those of the last `refresh`.
    frame_stack: S, how many observations are stacked.
    num_threads: of a search on the CPU; the roots are divided among them.
    cudagraphs: record what the networks compute in a simulation as CUDA graphs; the model is on a
        GPU then.

    A state is a TensorDict [B] with "observation" [B, *O], or [B, S, *O] if S > 1, and with
    "action_mask" and "to_play" where the environment gives them. Rows are searched together in one
    call; a row's result does not depend on the others.

    >>> from raffia.algorithms.efficientzero.config import EfficientZeroConfig
    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> from raffia.envs.env import Discrete, EnvSpec
    >>> spec = EnvSpec(observation_shape=(4,), action=Discrete(2))
    >>> planner = Planner(EfficientZeroModelMLP(4, 2), spec, EfficientZeroConfig())
    >>> state = TensorDict(observation=torch.zeros(3, 4), batch_size=[3])
    >>> planner.plan(state, num_simulations=8, noise=False).action_weights.sum(-1)
    tensor([1., 1., 1.])
    """

    def __init__(
        self,
        model: LatentModel,
        spec: EnvSpec,
        config: EfficientZeroConfig,
        *,
        frame_stack: int = 1,
        num_threads: int = 1,
        cudagraphs: bool = False,
    ) -> None:
        self.spec, self.config, self.cudagraphs = spec, config, cudagraphs
        self.frame_stack, self.num_threads = frame_stack, num_threads
        self.num_simulations = 0  # that were searched so far, of all roots together
        self.device = next(model.parameters()).device
        self._own: dict[str, Tensor] = {}  # numbers that are not the config's, [] or [P]
        self._snapshot = self._snapshot_of(model)
        self._workspace = Workspace()
        self._sampler: GaussianSampler | None = None  # of continuous actions
        if isinstance(spec.action, Box):
            self._sampler = action_sampler(spec.action, config.search.num_sampled_actions)

    def _snapshot_of(self, model: LatentModel) -> Snapshot:
        is_half = self.config.precision == "bfloat16" and self.device.type != "cpu"
        dtype = torch.bfloat16 if is_half else None
        return _Copy(model, cudagraphs=self.cudagraphs, dtype=dtype)

    def refresh(self, weights: TensorDict) -> None:
        """Load "params" and "buffers" of a state, or of its "target"; and of "hyper", where
        it is there, what `acting_numbers` names."""
        self._snapshot.load(weights)
        if "hyper" in weights.keys():
            self._own = {}
            for name, number in acting_numbers(self.config).items():
                given = weights["hyper", name].cpu()
                if bool((given != torch.tensor(number, dtype=given.dtype)).any()):
                    self._own[name] = given

    def number(self, name: str, num: int, member: Tensor | None = None) -> float | Tensor:
        """A number of `acting_numbers`, one for all rows or one for each, [num].

        member: whose each row is, in a population; None: the first member's first, as many of each.
        """
        own = self._own.get(name)
        if own is None:
            return acting_numbers(self.config)[name]
        if own.dim() == 0:
            return own.item()
        if member is None:
            return own.repeat_interleave(num // len(own))
        return own[member.to(own.device)]

    def root(self, state: TensorDict) -> RootOutput:
        """The networks' outputs for states [B]."""
        if isinstance(state, Tensor):
            raise TypeError(
                "a state must be a container as an environment returns it, not a tensor: pass "
                f"TensorDict(observation=observation, batch_size=[{len(state)}])"
            )
        mask = state["action_mask"] if self.spec.masked else None
        to_play = state["to_play"] if self.spec.num_players == 2 else None
        member = state.get("member", None)
        root = self._snapshot.root(self._input(state["observation"]), mask, to_play, member)
        # The trees are searched on the CPU wherever the networks and their latent states are.
        return root._replace(prior_logits=root.prior_logits.cpu(), value=root.value.cpu())

    def values(self, observation: Tensor, member: Tensor | None = None) -> Tensor:
        """The networks' values [B] of observations [B, *O] or [B, S, *O]."""
        return self._snapshot.root(self._input(observation), None, None, member).value.cpu()

    def _input(self, observation: Tensor) -> Tensor:
        stack = [] if self.frame_stack == 1 else [self.frame_stack]
        if observation.ndim != 1 + len(stack) + len(self.spec.observation_shape):
            raise ValueError(
                f"observations of B states must have shape "
                f"{['B', *stack, *self.spec.observation_shape]}; got {list(observation.shape)}. "
                "One state alone is state.unsqueeze(0)"
            )
        return as_input(self.merged(observation).to(self.device))

    def merged(self, observation: Tensor) -> Tensor:
        """Observations [*, O], or [*, S, O], in the shape that the networks take."""
        return merge_frames(
            observation, self.spec, self.frame_stack, flatten=self.config.model.flatten
        )

    def plan(
        self,
        state: TensorDict,
        *,
        num_simulations: int | None = None,  # None: as configured
        noise: bool = True,  # at the root
        temperature: float = 1.0,  # of the action; 0: the most visited
        seed: Tensor | None = None,  # int64 [B], of noise and action
        generator: torch.Generator | None = None,  # of the seeds, where none are given
    ) -> PolicyOutput:
        """Search from states [B]. A row's draws are of its seed, whatever the other rows are."""
        search, root = self.config.search, self.root(state)
        member, num = state.get("member", None), len(root.value)
        draws = noise or temperature > 0
        if seed is None:
            if not draws and generator is None:
                generator = torch.Generator().manual_seed(0)  # sampled actions are drawn even then
            seed = draw_seeds(num, generator).cpu()
        check_seed(seed, num)
        budget = search.num_simulations if num_simulations is None else num_simulations
        self.num_simulations += budget * num
        settings: dict[str, Any] = {
            "num_simulations": budget,
            "discount": self.number("discount", num, member),
            "value_prefix": ValuePrefix(self.config.loss.lstm_horizon),
            "num_threads": self._threads(root),
            "workspace": self._workspace,
        }
        sampler = self._sampler
        num_choices = root.prior_logits.shape[-1] if sampler is None else sampler.num_samples
        policy: Callable[..., PolicyOutput]
        if search.policy == "gumbel":
            # the search's own choice is the action: it is drawn by the Gumbel noise, at no
            # temperature
            policy = functools.partial(
                gumbel_policy,
                max_considered=search.max_considered,
                root_gumbel=root_gumbel(seed, num_choices, CHOICE) * float(draws),
                **settings,
            )
        else:
            fraction = self.number("dirichlet_fraction", num, member) if noise else 0.0
            factor = self.number("temperature", num, member) if temperature > 0 else 0.0
            if noise and bool(torch.as_tensor(fraction).any()):
                alpha = search.dirichlet_alpha
                settings["dirichlet"] = root_dirichlet(seed, num_choices, alpha, root.mask, NOISE)
            if temperature > 0:
                settings["action_gumbel"] = root_gumbel(seed, num_choices, CHOICE)
            policy = functools.partial(
                muzero_policy,
                dirichlet_fraction=fraction,
                temperature=factor * temperature,
                **settings,
            )
        if sampler is None:
            return policy(root, self._snapshot.recurrent_fn)
        return sampled_policy(
            root,
            self._snapshot.recurrent_fn,
            sampler=sampler,
            policy=policy,
            seed=child_seed(seed, seed.new_tensor(ACTIONS)),
        )

    def _threads(self, root: RootOutput) -> int:
        # Below some 64 roots a second thread costs more than it brings (docs/benchmarks.md), and on
        # a GPU in any case: threads take turns at starting what it computes.
        pays = len(root.value) >= 64 and self.device.type == "cpu"
        return self.num_threads if pays else 1


def weights_by_name(weights: TensorDict) -> dict[str, Tensor]:
    """ "params" and "buffers" by the names that a module has for them.

    >>> weights = TensorDict(params=dict(fc=dict(bias=torch.ones(1))), buffers=TensorDict())
    >>> weights_by_name(weights)
    {'fc.bias': tensor([1.])}
    """
    return {
        dotted(key): value
        for part in ("params", "buffers")
        for key, value in weights[part].items(True, True)
    }


def action_sampler(action: Box, num_samples: int) -> GaussianSampler:
    """Draws actions within their bounds from the policy's means and deviations.

    >>> from raffia.envs.env import Box
    >>> action_sampler(Box((-2.0,), (2.0,)), 20).num_samples
    20
    """
    return GaussianSampler(
        num_samples, low=torch.tensor(action.low), high=torch.tensor(action.high)
    )
