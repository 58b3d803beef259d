"""Keyed modules on one screen: a stochastic actor is a sequence, and learns by policy gradient.

    python examples/keyed_actor.py

The task has one step: the best action is the mean of the observation, and the reward is what it
misses by. The actor is built from named pieces; whoever reads `print(actor)` reads the program.
"""

import torch
from torch import nn
from torch.distributions import Normal

from raffia import TensorDict
from raffia.nn import (
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    set_interaction_type,
)

OBS, HIDDEN, BATCH, STEPS = 4, 32, 256, 200


def build_actor() -> ProbabilisticTensorDictSequential:
    net = nn.Sequential(nn.Linear(OBS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 2))
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, in_keys=["obs"], out_keys=["params"]),
        TensorDictModule(NormalParamExtractor(), in_keys=["params"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=Normal,
            default_interaction_type=InteractionType.RANDOM,
            return_log_prob=True,
        ),
        expect_in_keys=["obs"],
    )


def reward(step: TensorDict) -> torch.Tensor:
    return -(step["action"] - step["obs"].mean(-1, keepdim=True)).square()


def main() -> None:
    torch.manual_seed(0)
    actor = build_actor()
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
    for i in range(STEPS + 1):
        step = actor(TensorDict(obs=torch.randn(BATCH, OBS), batch_size=[BATCH]))
        with torch.no_grad():
            advantage = reward(step) - reward(step).mean()
        loss = -(advantage * actor.log_prob(step.detach().select("obs", "action"))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 50 == 0:
            print(f"update {i:3d}   reward {reward(step).mean().item():7.3f}")

    with set_interaction_type("deterministic"), torch.no_grad():
        step = actor(TensorDict(obs=torch.randn(BATCH, OBS), batch_size=[BATCH]))
    print(f"without noise   reward {reward(step).mean().item():.3f}\n")
    print(actor)
    print(actor.graph().mermaid())


if __name__ == "__main__":
    main()
