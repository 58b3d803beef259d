"""The worker of `benchmarks.efficientzero` that makes our update at LightZero's sizes."""

from importlib.metadata import version
from typing import Any

import torch

from benchmarks.search_models import HEAD, HORIZON, LATENT, LSTM, NUM_PARAMETERS, OBSERVATION
from benchmarks.search_worker import Case, serve
from raffia.algorithms.efficientzero.config import (
    EfficientZeroConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
)
from raffia.algorithms.efficientzero.learner import EfficientZeroLearner
from raffia.envs.env import Discrete, EnvSpec
from raffia.tensordict.tensordict import TensorDict

CONFIG = EfficientZeroConfig(  # supports, projection and norms are the published ones by default
    model=ModelConfig(latent_state_dim=LATENT, lstm_hidden_size=LSTM, head_hidden_channels=(HEAD,)),
    loss=LossConfig(lstm_horizon=HORIZON),
    optimizer=OptimizerConfig(name="adamw", learning_rate=3e-3, max_grad_norm=10.0),
)


def random_batch(batch: int, steps: int, actions: int) -> TensorDict:
    """Windows of noise, all of whose steps count."""
    ones = torch.ones(batch, steps + 1)
    return TensorDict(
        observation=torch.rand(batch, OBSERVATION),
        next_observation=torch.rand(batch, steps, OBSERVATION),
        action=torch.randint(actions, (batch, steps)),
        target_policy=torch.rand(batch, steps + 1, actions).softmax(-1),
        target_value=20 * torch.rand(batch, steps + 1),
        target_value_prefix=torch.arange(1.0, steps + 1).repeat(batch, 1),
        policy_mask=ones,
        value_mask=ones,
        value_prefix_mask=ones[:, 1:],
        consistency_mask=ones[:, 1:],
        weight=torch.ones(batch),
        index=torch.arange(batch),
        batch_size=[batch],
    )


class OurUpdate:
    """case: "batch" windows, and as "simulations" the steps that are unrolled."""

    def __init__(self, case: Case):
        torch.manual_seed(0)
        spec = EnvSpec(observation_shape=(OBSERVATION,), action=Discrete(case.actions))
        self.learner = EfficientZeroLearner(spec, CONFIG, num_updates=10**6)
        self.state = self.learner.init(0)
        num_parameters = sum(p.numel() for p in self.state["params"].values(True, True))
        if num_parameters != NUM_PARAMETERS["mlp"]:
            raise ValueError(f"{num_parameters} parameters, not {NUM_PARAMETERS['mlp']}")
        self.batch = random_batch(case.batch, case.simulations, case.actions)

    def __call__(self) -> Any:
        update, metrics = self.learner.grads(self.state, self.batch)
        self.state = self.learner.apply(self.state, update)
        return metrics

    def shares(self) -> dict[str, float]:
        """All of it is the model."""
        return {"model": 1.0}


def versions() -> dict[str, str]:
    """Of what is timed."""
    return {name: version(name) for name in ("torch",)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(OurUpdate, versions)
