"""The planner: the parts of an environment's state and the settings that a search gets."""

from dataclasses import replace

import pytest
import torch

from raffia.algorithms.efficientzero import EfficientZeroConfig
from raffia.algorithms.efficientzero.actor import act, act_at_random
from raffia.algorithms.efficientzero.config import (
    LossConfig,
    ModelConfig,
    SearchConfig,
    TargetConfig,
)
from raffia.envs import Box, Discrete, EnvSpec
from raffia.tensordict import TensorDict

from . import small

BOARD = EnvSpec(observation_shape=(4,), action=Discrete(3), masked=True, num_players=2)
CONFIG = EfficientZeroConfig(
    model=ModelConfig(**small.SIZES),
    loss=LossConfig(lstm_horizon=3),
    targets=TargetConfig(discount=0.9),
    search=SearchConfig(num_simulations=6, dirichlet_alpha=0.7, dirichlet_fraction=0.4),
)


def planner_of(spec=BOARD, config=CONFIG, **options):
    return small.planner_of(spec, config, **options)


def state_of(num=5):
    observation = torch.arange(4.0 * num).view(num, 4) / 9
    mask = torch.tensor([True, True, False]).expand(num, 3)
    state = {"observation": observation, "action_mask": mask, "to_play": torch.arange(num) % 2}
    return TensorDict(state, batch_size=[num])


def test_the_player_to_move_and_the_legal_actions_go_into_the_search():
    state = state_of()
    root = planner_of().root(state)
    assert torch.equal(root.to_play, state["to_play"])
    assert torch.equal(root.mask, state["action_mask"])
    alone = planner_of(replace(BOARD, num_players=1, masked=False)).root(state)
    assert alone.to_play is None and alone.mask is None
    quiet = {"noise": False, "temperature": 0.0}
    two = planner_of().plan(state, **quiet)
    one = planner_of(replace(BOARD, num_players=1)).plan(state, **quiet)
    assert not torch.allclose(two.root_value, one.root_value)  # the other's gain is a loss
    assert bool((two.action_weights[:, 2] == 0).all())


@pytest.mark.parametrize("kind", ["muzero", "gumbel", "continuous"])
def test_a_row_draws_by_its_seed_whatever_the_other_rows_are(kind):
    """So results do not depend on which process plays which rows."""
    spec = BOARD
    if kind == "continuous":
        spec = replace(BOARD, action=Box((-1.0,), (1.0,)), masked=False)
    policy = "gumbel" if kind == "gumbel" else "muzero"
    config = small.configured(CONFIG, search={"policy": policy, "num_sampled_actions": 5})
    planner, state = planner_of(spec, config=config), state_of(6)
    seed, rows = torch.arange(6) * 1_000_003, torch.tensor([4, 1])
    together = act(planner, state, temperature=1.0, noise=True, seed=seed)
    for chosen in (rows, rows[:1]):
        some = act(planner, state[chosen], temperature=1.0, noise=True, seed=seed[chosen])
        for key, value in some.items():
            torch.testing.assert_close(value, together[key][chosen])
    other = act(planner, state, temperature=1.0, noise=True, seed=seed + 1)
    assert not all(other[key].equal(together[key]) for key in other.keys())
    first = act_at_random(spec, state, num_sampled_actions=5, seed=seed)
    some = act_at_random(spec, state[rows], num_sampled_actions=5, seed=seed[rows])
    assert all(some[key].equal(first[key][rows]) for key in first.keys())


@pytest.mark.parametrize("policy", ["muzero", "gumbel"])
def test_a_search_for_acting_works_without_noise_at_the_root(policy):
    search = replace(CONFIG.search, dirichlet_fraction=0.0, policy=policy)
    plan = planner_of(config=replace(CONFIG, search=search)).plan
    seed = torch.arange(5)
    acting, quiet = (plan(state_of(), seed=seed, noise=noise) for noise in (True, False))
    if policy == "muzero":  # otherwise noise is what chooses the action
        assert torch.equal(acting.action_weights, quiet.action_weights)
    assert torch.equal(acting.action, quiet.action)


def test_a_tensor_in_place_of_a_state_is_refused():
    message = r"pass TensorDict\(observation=observation, batch_size=\[3\]"
    with pytest.raises(TypeError, match=message):
        act(planner_of(), torch.zeros(3, 4), temperature=0.0, noise=False)


def test_one_state_alone_is_refused_with_its_shape():
    message = r"\['B', 4\]; got \[1\]. One state alone is state.unsqueeze\(0\)"
    with pytest.raises(ValueError, match=message):
        planner_of().values(torch.zeros(1))


@pytest.mark.parametrize("seed", [torch.arange(5, dtype=torch.int32), torch.arange(4)])
def test_seeds_that_are_not_one_int64_for_each_row_are_refused(seed):
    with pytest.raises(ValueError, match=r"seed is torch.int.*; it must be int64 \[5\]"):
        planner_of().plan(state_of(5), seed=seed)
