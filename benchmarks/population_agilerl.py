"""The worker of `benchmarks.population` that does AgileRL's part, in its own environment.

Its members learn one after the other, as its training functions have them do. Its DQN's network is
the nearest that it makes to 4-64-64-2: 4-64-32-64-2, 4,642 parameters. Of ILQL there is one model,
and the time is multiplied: P of them would be the same work with more memory.
"""

from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from agilerl.algorithms.dqn import DQN
from gymnasium import spaces
from tensordict import TensorDict

from benchmarks.ilql_agilerl import Update
from benchmarks.ilql_cases import training
from benchmarks.population_cases import ACTIONS, BATCH, GAMMA, LEARNING_RATE, OBSERVATION, TAU
from benchmarks.search_worker import Case, serve


def member(index: int) -> DQN:
    return DQN(
        spaces.Box(-1, 1, (OBSERVATION,), np.float32),
        spaces.Discrete(ACTIONS),
        index=index,
        net_config={
            "latent_dim": 32,
            "encoder_config": {"hidden_size": [64], "layer_norm": False},
            "head_config": {"hidden_size": [64], "layer_norm": False},
        },
        batch_size=BATCH,
        lr=LEARNING_RATE,
        gamma=GAMMA,
        tau=TAU,
        double=True,
    )


class Generation:
    """case: its "batch" members, on one batch."""

    def __init__(self, case: Case):
        self.members = [member(index) for index in range(case.batch)]
        self.batch = TensorDict(
            {
                "obs": torch.rand(BATCH, OBSERVATION),
                "next_obs": torch.rand(BATCH, OBSERVATION),
                "action": torch.randint(ACTIONS, (BATCH, 1)),
                "reward": torch.rand(BATCH, 1),
                "done": torch.zeros(BATCH, 1),
            },
            batch_size=[BATCH],
        )

    def __call__(self) -> Any:
        return [agent.learn(self.batch) for agent in self.members]

    def shares(self) -> dict[str, float]:
        """All of it is the model."""
        return {"model": 1.0}


def prepare(case: Case) -> Any:
    return Generation(case) if case.model == "dqn" else Update(training("small", "three trunks"))


def versions() -> dict[str, str]:
    """Versions of the timed packages."""
    return {name: version(name) for name in ("agilerl", "torch")}


def threads(num: int) -> None:
    """Torch's, from now on."""
    torch.set_num_threads(num)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(prepare, versions, threads=threads)
