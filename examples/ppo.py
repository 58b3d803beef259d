"""PPO with keyed modules: python examples/ppo.py

CartPole is at 475 of 500 in half a minute. Actor and critic read and write named entries; a
`Collector` plays; what it has played is one container, which is split into minibatches.
"""

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from raffia import TensorDict
from raffia.envs import EnvConfig, make_env
from raffia.functional import lambda_return
from raffia.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    set_interaction_type,
)
from raffia.train import Collector, play_episodes

ENV, ROLLOUT, EPOCHS, MINIBATCH = EnvConfig(id="CartPole-v1", num_envs=8), 128, 6, 256
GAMMA, LAMBDA, CLIP, ENTROPY, MAX_NORM = 0.99, 0.95, 0.2, 0.01, 0.5


def mlp(num_outputs: int) -> nn.Sequential:
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_outputs)]
    return nn.Sequential(*layers)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = ProbabilisticTensorDictSequential(
            TensorDictModule(mlp(2), ["observation"], ["logits"]),
            ProbabilisticTensorDictModule(
                ["logits"], ["action"], distribution_class=Categorical,
                default_interaction_type="random", return_log_prob=True,
            ),
        )  # fmt: skip
        self.critic = TensorDictModule(
            nn.Sequential(mlp(1), nn.Flatten(-2)), ["observation"], ["value"]
        )

    @torch.no_grad()
    def add_advantages(self, steps: TensorDict) -> TensorDict:
        """Generalised advantage estimation: the lambda-return minus the value.  steps: [E, T]

        Source: Schulman, Moritz, Levine, Jordan & Abbeel (2016), section 3.
        """
        self.critic(steps)
        following = self.critic(steps["next"])["value"]
        discount = GAMMA * (~steps["terminated"]).float()
        steps["return"] = lambda_return(
            steps["reward"], discount, following, LAMBDA, ends=steps["truncated"]
        )
        steps["advantage"] = steps["return"] - steps["value"]
        return steps.exclude("next", "value", "logits")

    def loss(self, batch: TensorDict) -> Tensor:
        """The clipped objective of PPO (Schulman et al. 2017, equation 9)."""
        policy = self.actor.get_dist(batch)
        ratio = (policy.log_prob(batch["action"]) - batch["action_log_prob"]).exp()
        advantage = batch["advantage"] - batch["advantage"].mean()
        advantage = advantage / (advantage.std() + 1e-8)
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        error = self.critic(batch)["value"] - batch["return"]
        return (0.5 * error.square() - gain - ENTROPY * policy.entropy()).mean()


def main(num_rollouts: int = 100, seed: int = 0) -> ActorCritic:
    torch.manual_seed(seed)
    agent, collector, others = ActorCritic(), Collector(make_env(ENV), seed=seed), make_env(ENV)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
    annealing = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, num_rollouts)
    for rollout in range(1, num_rollouts + 1):
        with torch.no_grad():
            steps = collector.collect(agent.actor, ROLLOUT).transpose(0, 1)
        steps = agent.add_advantages(steps).reshape(-1)
        for _ in range(EPOCHS):
            for batch in steps[torch.randperm(len(steps))].split(MINIBATCH):
                optimizer.zero_grad()
                agent.loss(batch).backward()
                nn.utils.clip_grad_norm_(agent.parameters(), MAX_NORM)
                optimizer.step()
        annealing.step()
        if rollout % 10 == 0:
            with torch.no_grad(), set_interaction_type("deterministic"):
                found = play_episodes(others, agent.actor, num_episodes=20, seed=rollout)
            print(f"{collector.num_env_steps:7,d} steps   mean return {found.mean_return:5.1f}")
            if found.mean_return >= 475:
                break
    return agent


if __name__ == "__main__":
    print(main().actor)
