"""The worker of `benchmarks.efficientzero` that does LightZero's part, in its own environment.

Its policy class needs packages that its model and tree do without, so both parts of training are
put together here, in the steps of `_forward_learn` and `_forward_collect`. What is left out of them
stands at each class, and all of it makes LightZero faster.
"""

from importlib.metadata import distributions
from typing import Any

import numpy as np
import torch
from lzero.model.efficientzero_model import EfficientZeroModel
from lzero.policy import (
    DiscreteSupport,
    cross_entropy_loss,
    negative_cosine_similarity,
    phi_transform,
    scalar_transform,
)
from torch import Tensor, nn

from benchmarks.efficientzero import (
    IMAGE,
    IMAGE_SUPPORT,
    MAX_EPISODE_STEPS,
    NUM_IMAGE_PARAMETERS,
    TEMPERATURE,
)
from benchmarks.search_lightzero import LightZeroSearch, mlp_model
from benchmarks.search_models import HORIZON, MLP, NUM_PARAMETERS, OBSERVATION, SUPPORT
from benchmarks.search_worker import Case, serve


def mlp(actions: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """As its CartPole configuration has it."""
    model = mlp_model(**MLP, action_space_size=actions)
    return model, torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)


def conv(actions: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """As in its Atari configuration; the rate is smaller, since noise is learnt."""
    sizes = {"reward_support_size": IMAGE_SUPPORT, "value_support_size": IMAGE_SUPPORT}
    model = EfficientZeroModel(**IMAGE, **sizes, action_space_size=actions)
    sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    return model, sgd


class LightZeroUpdate:
    """case: "batch" windows, and as "simulations" the steps that are unrolled.

    Each next observation goes through the whole initial inference, one after the other, and one
    optimiser's step follows. Left out: taking the batch from numpy, augmentation, priorities,
    copies into the target model, and all that is computed to be logged.
    """

    def __init__(self, case: Case):
        torch.manual_seed(0)
        self.batch, self.steps = case.batch, case.simulations
        vectors = case.model == "mlp"
        self.model, self.optimizer = (mlp if vectors else conv)(case.actions)
        self.model.train()
        wanted = NUM_PARAMETERS["mlp"] if vectors else NUM_IMAGE_PARAMETERS
        num_parameters = sum(p.numel() for p in self.model.parameters())
        if num_parameters != wanted:
            raise ValueError(f"{num_parameters} parameters, not {wanted}")
        half = (SUPPORT if vectors else IMAGE_SUPPORT) // 2
        self.support = DiscreteSupport(-half, half, 1)
        shape = (OBSERVATION,) if vectors else IMAGE["observation_shape"]
        lead = self.batch, self.steps
        self.observation = torch.rand(self.batch, self.steps + 1, *shape)
        self.action = torch.randint(case.actions, (*lead, 1))
        self.policy = torch.rand(self.batch, self.steps + 1, case.actions).softmax(-1)
        self.value = 20 * torch.rand(self.batch, self.steps + 1)
        self.prefix = torch.arange(1.0, self.steps + 1).expand(lead)

    def __call__(self) -> Any:
        value_target = phi_transform(self.support, scalar_transform(self.value))
        prefix_target = phi_transform(self.support, scalar_transform(self.prefix))
        start = self.model.initial_inference(self.observation[:, 0])
        latent, memory = start.latent_state, start.reward_hidden_state
        policy = cross_entropy_loss(start.policy_logits, self.policy[:, 0])
        value = cross_entropy_loss(start.value, value_target[:, 0])
        prefix = consistency = torch.zeros(self.batch)
        for k in range(self.steps):
            step = self.model.recurrent_inference(latent, memory, self.action[:, k])
            latent, memory = step.latent_state, step.reward_hidden_state
            encoded = self.model.initial_inference(self.observation[:, k + 1]).latent_state
            imagined = self.model.project(latent, with_grad=True)
            target = self.model.project(encoded, with_grad=False)
            consistency = consistency + negative_cosine_similarity(imagined, target)
            policy = policy + cross_entropy_loss(step.policy_logits, self.policy[:, k + 1])
            value = value + cross_entropy_loss(step.value, value_target[:, k + 1])
            prefix = prefix + cross_entropy_loss(step.value_prefix, prefix_target[:, k])
            latent.register_hook(lambda gradient: gradient * 0.5)
            if (k + 1) % HORIZON == 0:
                memory = tuple(torch.zeros_like(x) for x in memory)
        loss = (policy + 0.25 * value + prefix + 2 * consistency).mean() / self.steps
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)
        self.optimizer.step()
        return loss

    def shares(self) -> dict[str, float]:
        """All of it is the model."""
        return {"model": 1.0}


class LightZeroActing(LightZeroSearch):
    """case: as "batch" the environments. A call searches for all of them and steps each.

    Left out: the processes that its environments live in, the checks that Gymnasium's environments
    make unless they are asked not to, its own way of choosing actions, whose entropies take longer
    than the tree, its game segments, and that environments wait for the last of eight episodes to
    end.
    """

    def __init__(self, case: Case):
        try:
            import gymnasium  # here, so that updates are timed where it is not installed
        except ImportError as error:
            raise ImportError("gymnasium is not installed: see README.md, EfficientZero") from error
        super().__init__(case)
        self.envs = [
            gymnasium.make(
                "CartPole-v1", max_episode_steps=MAX_EPISODE_STEPS, disable_env_checker=True
            )
            for _ in range(case.batch)
        ]
        self.draws = np.random.default_rng(0)
        first = [env.reset(seed=row)[0] for row, env in enumerate(self.envs)]
        self.obs = self.shown(first)

    def __call__(self) -> Any:
        visits, _, _ = super().__call__()
        chosen = self.choose(np.asarray(visits, np.float64))
        observations = [self.step(*pair) for pair in zip(self.envs, chosen.tolist(), strict=True)]
        self.obs = self.shown(observations)

    def choose(self, visits: np.ndarray) -> np.ndarray:
        """Actions sampled with probabilities proportional to visits^(1/T)."""
        sums = np.cumsum(visits ** (1 / TEMPERATURE), -1)
        return (sums < self.draws.random((len(sums), 1)) * sums[:, -1:]).sum(-1)

    def step(self, env: Any, action: int) -> np.ndarray:
        observation, _, terminated, truncated, _ = env.step(action)
        return env.reset()[0] if terminated or truncated else observation

    def shown(self, observations: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(observations))


KINDS = {"update": LightZeroUpdate, "act": LightZeroActing}


def prepare(case: Case) -> Any:
    return KINDS[case.policy](case)


def versions() -> dict[str, str]:
    """Versions of the timed packages, if installed."""
    wanted = ("LightZero", "torch", "gymnasium")
    found = {installed.name: installed.version for installed in distributions()}
    return {name: found[name] for name in wanted if name in found}


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(prepare, versions)
