"""Planning with a snapshot of the networks: for acting, for evaluating and for reanalysing."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from raffia.algorithms.efficientzero.config import EfficientZeroConfig
from raffia.algorithms.efficientzero.inference import fold
from raffia.algorithms.efficientzero.latent_model import LatentModel
from raffia.algorithms.efficientzero.observations import as_input, merge_frames
from raffia.envs.env import Box, EnvSpec
from raffia.search.outputs import RecurrentFn, RootOutput
from raffia.search.policies import PolicyOutput, gumbel_policy, muzero_policy
from raffia.search.sampled import sampled_policy
from raffia.search.samplers import GaussianSampler
from raffia.search.settings import ValuePrefix
from raffia.tensordict.keys import dotted
from raffia.tensordict.tensordict import TensorDict


class Planner:
    """Searches from states of a world with a snapshot of the networks, which `refresh` renews.

    model: the networks, whose weights do not matter: they are those of the last `refresh`.
    frame_stack: S, how many observations are seen together.
    num_threads: of a search; the roots are divided among them.

    A state is a TensorDict [B] with "observation" [B, *O], or [B, S, *O] if S > 1, and with
    "action_mask" and "to_play" as the world has them. Rows are searched together in one call; a
    row's result does not depend on the others.

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
    ) -> None:
        self.spec, self.config = spec, config
        self.frame_stack, self.num_threads = frame_stack, num_threads
        self.num_simulations = 0  # that were searched so far, of all roots together
        self.num_refreshed = 0
        self._model = model
        self._folded = fold(model)

    def refresh(self, weights: TensorDict) -> None:
        """Take over "params" and "buffers" of a state, or of its "target"."""
        names = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        with torch.no_grad():
            for part in ("params", "buffers"):
                for key, value in weights[part].items(True, True):
                    names[dotted(key)].copy_(value)
        self._folded.refresh(self._model)
        self.num_refreshed += 1

    def root(self, state: TensorDict) -> RootOutput:
        """What the networks say of states [B]."""
        mask = state["action_mask"] if self.spec.masked else None
        to_play = state["to_play"] if self.spec.num_players == 2 else None
        root = self._folded.root(self._input(state["observation"]), mask, to_play)
        # The trees are searched on the CPU wherever the networks and their latent states are.
        return root._replace(prior_logits=root.prior_logits.cpu(), value=root.value.cpu())

    def values(self, observation: Tensor) -> Tensor:
        """The networks' values [B] of observations [B, *O] or [B, S, *O]."""
        return self._folded.root(self._input(observation)).value.cpu()

    def _input(self, observation: Tensor) -> Tensor:
        device = next(self._model.parameters()).device
        return as_input(self.merged(observation).to(device))

    def merged(self, observation: Tensor) -> Tensor:
        """Observations [*, O], or [*, S, O], as the networks take them but for their dtype."""
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
        generator: torch.Generator | None = None,  # of noise and action
    ) -> PolicyOutput:
        """Search from states [B]."""
        search, root = self.config.search, self.root(state)
        if not noise and temperature == 0 and generator is None:
            generator = torch.Generator()  # sampled actions are drawn even then
            generator.manual_seed(0)
        budget = search.num_simulations if num_simulations is None else num_simulations
        self.num_simulations += budget * len(root.value)
        policy = functools.partial(
            self._gumbel if search.policy == "gumbel" else self._muzero,
            num_simulations=budget,
            noise=noise,
            temperature=temperature,
            generator=generator,
        )
        if not isinstance(self.spec.action, Box):
            return policy(root, self._folded.recurrent_fn)
        return sampled_policy(
            root,
            self._folded.recurrent_fn,
            sampler=action_sampler(self.spec.action, search.num_sampled_actions),
            policy=policy,
            generator=generator,
        )

    def _muzero(
        self,
        root: RootOutput,
        recurrent_fn: RecurrentFn,
        *,
        num_simulations: int,
        noise: bool,
        temperature: float,
        generator: torch.Generator | None,
    ) -> PolicyOutput:
        search = self.config.search
        return muzero_policy(
            root,
            recurrent_fn,
            num_simulations,
            discount=self.config.targets.discount,
            value_prefix=ValuePrefix(self.config.loss.lstm_horizon),
            dirichlet_fraction=search.dirichlet_fraction if noise else 0.0,
            dirichlet_alpha=search.dirichlet_alpha,
            temperature=temperature,
            generator=generator,
            num_threads=self._threads(root),
        )

    def _gumbel(
        self,
        root: RootOutput,
        recurrent_fn: RecurrentFn,
        *,
        num_simulations: int,
        noise: bool,
        temperature: float,
        generator: torch.Generator | None,
    ) -> PolicyOutput:
        # the search's own choice is the action: it is drawn by the Gumbel noise, at no temperature
        return gumbel_policy(
            root,
            recurrent_fn,
            num_simulations,
            discount=self.config.targets.discount,
            value_prefix=ValuePrefix(self.config.loss.lstm_horizon),
            max_considered=self.config.search.max_considered,
            gumbel_scale=1.0 if noise or temperature > 0 else 0.0,
            generator=generator,
            num_threads=self._threads(root),
        )

    def _threads(self, root: RootOutput) -> int:
        # Below some 64 roots a second thread costs more than it brings (docs/benchmarks.md).
        return self.num_threads if len(root.value) >= 64 else 1


def action_sampler(action: Box, num_samples: int) -> GaussianSampler:
    """Draws actions within their bounds from the policy's means and deviations.

    >>> from raffia.envs.env import Box
    >>> action_sampler(Box((-2.0,), (2.0,)), 20).num_samples
    20
    """
    return GaussianSampler(
        num_samples, low=torch.tensor(action.low), high=torch.tensor(action.high)
    )
