"""An environment and networks of your own, trained by EfficientZero: python
examples/own_environment.py

A minute at most. The run's folder, runs/corridor, is one like any other: `raffia report
runs/corridor` shows it, and `resume` of `raffia.recipes` continues it.
"""

from dataclasses import replace

import torch
from torch import nn

from raffia import TensorDict
from raffia.algorithms.efficientzero import LatentModel, SearchConfig, make_model
from raffia.envs import Discrete, Env, EnvSpec, check_env, env_factory
from raffia.recipes import PRESETS, train


class Corridor(Env):  # which has a `render` without a picture, and a `close`
    """Seven tiles: at the right end lie 1, at the left end, which is as near, 0.2; a step costs."""

    spec = EnvSpec(observation_shape=(7,), action=Discrete(2), name="corridor")

    def reset(self, seed: int) -> TensorDict:
        self.position, self.time = 2 + seed % 3, 0
        return TensorDict(observation=torch.eye(7)[self.position])

    def step(self, action: torch.Tensor) -> TensorDict:
        self.position, self.time = self.position + 2 * int(action) - 1, self.time + 1
        at_end = self.position in (0, 6)
        return TensorDict(
            observation=torch.eye(7)[self.position],
            reward=torch.tensor({0: 0.2, 6: 1.0}.get(self.position, -0.02)),
            terminated=torch.tensor(at_end),  # the task is over
            truncated=torch.tensor(self.time == 20 and not at_end),  # we stop looking
        )


def networks() -> LatentModel:
    model = make_model(Corridor.spec, run.model)  # then any part in another way: here the first,
    model.representation_network = nn.Sequential(  # from [B, 7] to [B, latent_state_dim]
        nn.Linear(7, 64), nn.SiLU(), nn.Linear(64, run.model.latent_state_dim), nn.LayerNorm(32)
    )
    return model


smoke = PRESETS["smoke"]  # small, to take seconds
run = replace(
    smoke,
    env=replace(smoke.env, id="corridor", num_envs=8),
    model=replace(smoke.model, norm_type="BN"),
    targets=replace(smoke.targets, discount=0.997),
    optimizer=replace(smoke.optimizer, learning_rate=3e-3),
    search=SearchConfig(num_simulations=8),  # and it explores much at first
    collect=replace(smoke.collect, num_env_steps=800, updates_per_env_step=0.3),
)

if __name__ == "__main__":
    print(check_env(Corridor()))
    result = train(run, "runs/corridor", make_env=env_factory(Corridor), networks=networks)
    print(f"mean return {result.mean_return:.2f}; by where it begins the best is 0.94 to 0.98")
