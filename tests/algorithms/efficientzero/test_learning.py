"""Learning end to end: overfitting a batch, continuous policies, stacked members as each alone."""

import pytest
import torch

from raffia.algorithms.efficientzero import Planner
from raffia.algorithms.efficientzero.observations import with_observations
from raffia.envs import Box, EnvSpec

from .small import assert_close
from .test_learner import batch_of, learner_of, update

pytestmark = pytest.mark.slow


ADAM = {"name": "adamw", "weight_decay": 0.0}


def test_a_small_batch_is_overfitted():
    learner = learner_of(
        model={"norm_type": "BN", "head_hidden_channels": (32,)},
        loss={"consistency_weight": 0.5, "value_weight": 1.0},
        optimizer=ADAM | {"learning_rate": 0.01, "decay_updates": 110},
    )
    batch = batch_of(size=12)
    batch["weight"] = torch.ones(12)
    batch["target_policy"] = torch.eye(3)[batch["target_policy"].argmax(-1)]
    on_support = torch.tensor([-2.0, 0.0, 1.0, 3.0])
    steps = on_support.sign() * ((on_support.abs() + 1) ** 2 - 1)  # h of these is near a number
    batch["target_value"] = steps[torch.randint(4, (12, 4))]
    batch["target_value_prefix"] = steps[torch.randint(4, (12, 3))]
    state = learner.init(0)
    first = learner.grads(state, batch)[1]
    for _ in range(160):
        found, metrics = learner.grads(state, batch)
        state = learner.apply(state, found)
    for name in ("policy_loss", "value_loss", "value_prefix_loss"):
        assert metrics[name] < 0.1 * first[name], name
    assert metrics["consistency_loss"] < -2  # of -3
    assert metrics["priority"].mean() < 0.05 * first["priority"].mean()


def test_continuous_policies_are_learnt_from_sampled_actions():
    spec = EnvSpec(observation_shape=(4,), action=Box((-1.0, -1.0), (1.0, 2.0)))
    optimizer = {"name": "adamw", "learning_rate": 0.02}
    parts = dict(model={"norm_type": "LN"}, loss={"entropy_weight": 0.005}, optimizer=optimizer)
    learner = learner_of(spec, **parts)
    batch, best = batch_of(spec=spec, size=12), torch.tensor([0.5, -0.5])
    batch["sampled_actions"] = best + 0.1 * torch.randn(12, 4, 5, 2)
    state = learner.init(0)
    for _ in range(150):
        state = update(learner, state, batch)
    planner = Planner(learner.make_model(0), spec, learner.config)
    planner.refresh(state)
    policy = planner.root(with_observations(batch, spec)).prior_logits
    low, high = torch.tensor(spec.action.low), torch.tensor(spec.action.high)
    middle = low + (high - low) * (policy[:, :2].tanh() + 1) / 2
    assert (middle.mean(0) - best).abs().max() < 0.1


def two_members(learner):
    states = [learner.init(0), learner.init(1)]
    other = {"learning_rate": 0.02, "value_weight": 1.5, "weight_decay": 0.1, "entropy_weight": 0.1}
    for name, number in other.items():
        states[1]["hyper"][name] = torch.tensor(number)
    return [in_float64(state) for state in states]


def in_float64(tree):
    return tree.apply(lambda x: x.double() if x.is_floating_point() else x)


@pytest.mark.parametrize(
    ("norm_type", "optimizer", "shared"), [("BN", "sgd", False), ("LN", "adamw", True)]
)
def test_stacked_states_learn_as_each_does_by_itself(norm_type, optimizer, shared):
    """From one batch each, or from one that they share."""
    # in float64: Adam makes steps of rounding errors where a gradient is zero, as before BatchNorm
    learner = learner_of(model={"norm_type": norm_type}, optimizer={"name": optimizer})
    alone, stacked = two_members(learner), torch.stack(two_members(learner))
    for step in range(4):
        seeds = (step, step) if shared else (2 * step, 2 * step + 1)
        batches = [in_float64(batch_of(seed=seed)) for seed in seeds]
        found = [learner.grads(state, batch) for state, batch in zip(alone, batches, strict=True)]
        alone = [learner.apply(state, one[0]) for state, one in zip(alone, found, strict=True)]
        input, dims = (batches[0], (0, None)) if shared else (torch.stack(batches), 0)
        grads, metrics = torch.vmap(learner.grads, in_dims=dims, randomness="error")(stacked, input)
        stacked = torch.vmap(learner.apply, randomness="error")(stacked, grads)
        assert_close(stacked, torch.stack(alone), atol=2e-6, rtol=1e-5)
        assert_close(metrics, torch.stack([one[1] for one in found]), atol=1e-5, rtol=1e-5)
    assert stacked["step"].tolist() == [4, 4]
