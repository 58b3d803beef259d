"""The worker of `benchmarks.efficientzero` that makes LightZero's update, in its own environment.

Its policy class needs packages that its model and tree do without, so the update is put together
here of its model, its transforms and its losses, in the steps of `_forward_learn`: each next
observation goes through the whole initial inference, one after the other, and one optimiser's step
follows. Left out is what it does besides: taking the batch from numpy, logging, priorities.
"""

from importlib.metadata import version
from typing import Any

import torch
from lzero.policy import (
    DiscreteSupport,
    cross_entropy_loss,
    negative_cosine_similarity,
    phi_transform,
    scalar_transform,
)

from benchmarks.search_lightzero import mlp_model
from benchmarks.search_models import HORIZON, MLP, NUM_ACTIONS, NUM_PARAMETERS, OBSERVATION, SUPPORT
from benchmarks.search_worker import Case, serve


class LightZeroUpdate:
    """case: "batch" windows, and as "simulations" the steps that are unrolled."""

    def __init__(self, case: Case):
        torch.manual_seed(0)
        self.batch, self.steps = case.batch, case.simulations
        self.model = mlp_model(**MLP, action_space_size=case.actions).train()
        num_parameters = sum(p.numel() for p in self.model.parameters())
        if num_parameters != NUM_PARAMETERS["mlp"]:
            raise ValueError(f"{num_parameters} parameters, not {NUM_PARAMETERS['mlp']}")
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3, weight_decay=1e-4)
        half = SUPPORT // 2
        self.support = DiscreteSupport(-half, half, 1)
        shape = self.batch, self.steps
        self.observation = torch.rand(self.batch, self.steps + 1, OBSERVATION)
        self.action = torch.randint(NUM_ACTIONS["mlp"], (*shape, 1))
        self.policy = torch.rand(self.batch, self.steps + 1, case.actions).softmax(-1)
        self.value = 20 * torch.rand(self.batch, self.steps + 1)
        self.prefix = torch.arange(1.0, self.steps + 1).expand(shape)

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
            seen = self.model.initial_inference(self.observation[:, k + 1]).latent_state
            imagined = self.model.project(latent, with_grad=True)
            target = self.model.project(seen, with_grad=False)
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


def versions() -> dict[str, str]:
    """Of what is timed."""
    return {name: version(name) for name in ("LightZero", "torch")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(LightZeroUpdate, versions)
