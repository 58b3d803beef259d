"""One search for the members of a population against a search of each."""

from dataclasses import replace

import pytest
import torch

from raffia.algorithms.efficientzero.config import EfficientZeroConfig, ModelConfig, SearchConfig
from raffia.algorithms.efficientzero.learner import EfficientZeroLearner
from raffia.algorithms.efficientzero.planning import Planner
from raffia.algorithms.efficientzero.stacked import StackedModel, StackedPlanner
from raffia.envs.env import Box, Discrete, EnvSpec
from raffia.tensordict.tensordict import TensorDict

SPEC = EnvSpec(observation_shape=(4,), action=Discrete(3), name="small")
MODEL = ModelConfig(
    latent_state_dim=8, lstm_hidden_size=6, head_hidden_channels=(5,), norm_type="BN",
    reward_support_range=(-3.0, 4.0, 1.0), value_support_range=(-3.0, 4.0, 1.0),
)  # fmt: skip
CONFIG = EfficientZeroConfig(model=MODEL, search=SearchConfig(num_simulations=12))


def members(spec=SPEC, config=CONFIG, size=3):
    """States of members with outputs that differ, and BatchNorm's statistics, too."""
    learner = EfficientZeroLearner(spec, config, num_updates=10)
    states = torch.stack([learner.init(seed) for seed in range(size)])
    draws = torch.Generator().manual_seed(0)
    for part in ("params", "buffers"):
        for value in states[part].values(True, True):
            if value.is_floating_point():
                noise = torch.rand(value.shape, generator=draws)
                value.add_(noise * 0.2)
    return learner, states


def both(spec=SPEC, config=CONFIG, size=3):
    learner, states = members(spec, config, size)
    stacked = StackedPlanner(learner.make_model(0), spec, config, size=size)
    stacked.refresh(states)
    alone = []
    for state in states.unbind(0):
        planner = Planner(learner.make_model(0), spec, config)
        planner.refresh(state)
        alone.append(planner)
    return stacked, alone


def test_roots_and_steps_of_all_members_are_those_of_each():
    stacked, alone = both()
    state = TensorDict(observation=torch.rand(6, 4), batch_size=[6])
    found = stacked.root(state)
    action = torch.tensor([0, 2, 1, 1, 0, 2])
    step, after = stacked._folded.recurrent_fn(found.embedding, action)
    assert found.value.unique().numel() > 3  # they do differ
    for place, planner in enumerate(alone):
        rows = slice(2 * place, 2 * place + 2)
        wanted = planner.root(state[rows])
        torch.testing.assert_close(found.value[rows], wanted.value, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.prior_logits[rows], wanted.prior_logits)
        own, then = planner._folded.recurrent_fn(wanted.embedding, action[rows])
        for ours, theirs in zip(step[:3], own[:3], strict=True):
            torch.testing.assert_close(ours[rows], theirs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(after["latent_state"][rows], then["latent_state"])


@pytest.mark.parametrize("policy", ["muzero", "gumbel"])
def test_a_search_for_all_members_is_that_of_each(policy):
    config = replace(CONFIG, search=replace(CONFIG.search, policy=policy))
    stacked, alone = both(config=config)
    state = TensorDict(observation=torch.rand(9, 4), batch_size=[9])
    found = stacked.plan(state, noise=False, temperature=0.0)
    assert stacked.num_simulations == 9 * 12
    for place, planner in enumerate(alone):
        rows = slice(3 * place, 3 * place + 3)
        wanted = planner.plan(state[rows], noise=False, temperature=0.0)
        torch.testing.assert_close(
            found.action_weights[rows], wanted.action_weights, rtol=1e-3, atol=1e-4
        )
        assert found.action[rows].tolist() == wanted.action.tolist()
        torch.testing.assert_close(found.root_value[rows], wanted.root_value, rtol=1e-3, atol=1e-4)


def test_continuous_actions():
    spec = EnvSpec(observation_shape=(4,), action=Box((-1.0,), (1.0,)), name="box")
    config = replace(CONFIG, search=replace(CONFIG.search, num_sampled_actions=5))
    stacked, _ = both(spec, config)
    state = TensorDict(observation=torch.rand(3, 4), batch_size=[3])
    draws = torch.Generator().manual_seed(0)
    assert stacked.plan(state, generator=draws).action.shape == (3, 1)


def test_rows_in_any_order_and_number():
    """As a search asks where some roots have ended."""
    learner, states = members()
    model = StackedModel(learner.make_model(0), 3)
    model.load(states)
    obs = torch.rand(5, 4)
    member = torch.tensor([2, 0, 2, 2, 1])
    found = model.of_members("root", member, obs)
    for row, place in enumerate(member.tolist()):
        planner = Planner(learner.make_model(0), SPEC, CONFIG)
        planner.refresh(states[place])
        wanted = planner.root(TensorDict(observation=obs[row : row + 1], batch_size=[1]))
        torch.testing.assert_close(found[0][row], wanted.value[0], rtol=1e-4, atol=1e-5)


def test_a_member_that_came_to_grief_plays_as_the_first_that_did_not():
    learner, states = members()
    next(iter(states["params"].values(True, True)))[0] = torch.nan
    planner = StackedPlanner(learner.make_model(0), SPEC, CONFIG, size=3)
    planner.refresh(states)
    state = TensorDict(observation=torch.ones(3, 4), batch_size=[3])
    value = planner.root(state).value
    assert value.isfinite().all() and value[0] == value[1] and value[1] != value[2]


def test_learning_on_does_not_change_what_a_search_sees():
    learner, states = members()
    planner = StackedPlanner(learner.make_model(0), SPEC, CONFIG, size=3)
    planner.refresh(states)
    state = TensorDict(observation=torch.ones(3, 4), batch_size=[3])
    before = planner.root(state).value
    for value in states["params"].values(True, True):
        value.add_(1.0)
    assert torch.equal(planner.root(state).value, before)


def test_rows_that_are_not_as_many_of_each():
    learner, states = members()
    planner = StackedPlanner(learner.make_model(0), SPEC, CONFIG, size=3)
    planner.refresh(states)
    with pytest.raises(ValueError, match="4 rows are not as many of each of 3 members"):
        planner.root(TensorDict(observation=torch.ones(4, 4), batch_size=[4]))
