"""A world and networks of one's own, trained by EfficientZero: python examples/own_environment.py

Half a minute at most. The run's folder, runs/corridor (or the first argument), is one like any
other: `raffia report runs/corridor` shows it, and `resume` of `raffia.recipes` goes on with it.
"""

import sys
from dataclasses import replace

import torch
from torch import nn

from raffia import TensorDict
from raffia.algorithms.efficientzero import make_model
from raffia.algorithms.efficientzero.config import OptimizerConfig, SearchConfig, TargetConfig
from raffia.envs import BatchEnv, Discrete, EnvConfig, EnvSpec, SerialBatch, check_env
from raffia.recipes import PRESETS, EfficientZeroRun, train
from raffia.recipes.config import CheckpointConfig, CollectConfig, EvaluateConfig, ReplayConfig


class Corridor:
    """Seven tiles: at the right end lie 1, at the left end, which is as near, 0.2; a step costs."""

    spec = EnvSpec(observation_shape=(7,), action=Discrete(2), name="corridor")

    def reset(self, seed: int) -> TensorDict:
        self.place, self.time = 2 + seed % 3, 0
        return TensorDict(observation=nn.functional.one_hot(torch.tensor(self.place), 7).float())

    def step(self, action: torch.Tensor) -> TensorDict:
        self.place, self.time = self.place + (1 if int(action) else -1), self.time + 1
        at_end = self.place in (0, 6)
        return TensorDict(
            observation=nn.functional.one_hot(torch.tensor(self.place), 7).float(),
            reward=torch.tensor({0: 0.2, 6: 1.0}.get(self.place, -0.02)),
            terminated=torch.tensor(at_end),  # the task is over
            truncated=torch.tensor(self.time == 20 and not at_end),  # we stop looking
        )

    def render(self) -> None:
        """No picture."""

    def close(self) -> None:
        """Nothing to give back."""


def worlds(
    config: EnvConfig,
    *,
    evaluation: bool = False,
    render: bool = False,
    num_envs: int | None = None,
) -> BatchEnv:
    return SerialBatch([Corridor() for _ in range(num_envs or config.num_envs)])


def networks() -> nn.Module:
    model = make_model(Corridor.spec, run.model)  # then any part of it in another way:
    model.representation_network = nn.Sequential(  # from [B, 7] to [B, latent_state_dim]
        nn.Linear(7, 64), nn.SiLU(), nn.Linear(64, run.model.latent_state_dim), nn.LayerNorm(32)
    )
    return model


run = EfficientZeroRun(  # small, to take seconds; what is not named has the paper's value
    env=EnvConfig(id="corridor", num_envs=8),
    model=replace(PRESETS["smoke"].model, norm_type="BN"),
    targets=TargetConfig(target_interval=20, reanalyse_ratio=0.25),
    optimizer=OptimizerConfig(name="adamw", learning_rate=3e-3, max_grad_norm=10.0),
    search=SearchConfig(num_simulations=8),
    replay=ReplayConfig(capacity=50_000, batch_size=32),
    collect=CollectConfig(num_env_steps=800, random_env_steps=80, updates_per_env_step=0.3),
    evaluate=EvaluateConfig(every_env_steps=300, num_episodes=4),
    checkpoint=CheckpointConfig(every_updates=50),
)

if __name__ == "__main__":
    print(check_env(Corridor()))
    folder = sys.argv[1] if len(sys.argv) > 1 else "runs/corridor"
    result = train(run, folder, worlds=worlds, networks=networks)
    print(f"mean return {result.mean_return:.2f} after {result.env_step} steps")
    print("of one who walks to the left: 0.16; the best there is: 0.96")
