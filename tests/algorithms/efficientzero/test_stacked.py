"""One search for all members of a population against a search for each."""

from dataclasses import replace

import pytest
import torch

from raffia.algorithms.efficientzero import EfficientZeroConfig, EfficientZeroLearner, Planner
from raffia.algorithms.efficientzero.config import ModelConfig, SearchConfig
from raffia.algorithms.efficientzero.stacked import StackedModel, StackedPlanner
from raffia.envs import Discrete, EnvSpec
from raffia.tensordict import TensorDict

from .small import SIZES, draws

SPEC = EnvSpec(observation_shape=(4,), action=Discrete(3), name="small")

CONFIG = EfficientZeroConfig(
    model=ModelConfig(norm_type="BN", **SIZES), search=SearchConfig(num_simulations=12)
)


def members(spec=SPEC, config=CONFIG, size=3):
    """States of members with outputs that differ, and BatchNorm's statistics, too."""
    learner = EfficientZeroLearner(spec, config, num_updates=10)
    states = torch.stack([learner.init(seed) for seed in range(size)])
    generator = draws(0)
    for part in ("params", "buffers"):
        for value in states[part].values(True, True):
            if value.is_floating_point():
                value.add_(0.2 * torch.rand(value.shape, generator=generator))
    return learner, states


def stacked_and_alone(spec=SPEC, config=CONFIG, size=3, mode="each"):
    learner, states = members(spec, config, size)
    stacked = StackedPlanner(learner.make_model(0), spec, config, size=size)
    stacked._snapshot = StackedModel(learner.make_model(0), size, mode)
    stacked.refresh(states)
    alone = []
    for state in states.unbind(0):
        planner = Planner(learner.make_model(0), spec, config)
        planner.refresh(state)
        alone.append(planner)
    return stacked, alone


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("simulations", [1, 12])
def test_compiled_rows_equal_their_member_s_bit_for_bit(num_threads, simulations):
    pytest.importorskip("numba")
    stacked, alone = stacked_and_alone()
    stacked.num_threads = num_threads
    rows = 32  # per member: enough for a second thread
    state = TensorDict(observation=torch.rand(3 * rows, 4), batch_size=[3 * rows])
    order = torch.randperm(3 * rows, generator=draws(1))
    mixed = state[order].set("member", torch.arange(3).repeat_interleave(rows)[order])
    settings = {"noise": False, "temperature": 0.0, "num_simulations": simulations}
    found, shuffled = stacked.plan(state, **settings), stacked.plan(mixed, **settings)
    assert found.root_value.unique().numel() > 2 * rows
    for index, planner in enumerate(alone):
        rows_of_member = slice(rows * index, rows * (index + 1))
        expected = planner.plan(state[rows_of_member], **settings)
        for name in ("action", "action_weights", "root_value"):
            assert torch.equal(getattr(found, name)[rows_of_member], getattr(expected, name))
    for name in ("action", "action_weights", "root_value"):
        assert torch.equal(getattr(found, name)[order], getattr(shuffled, name))


@pytest.mark.parametrize("mode", ["each", "vmap"])
@pytest.mark.parametrize("member", [None, [2, 0, 2, 2, 1], [1, 1]])
def test_rows_in_any_order_and_number(member, mode):
    stacked, alone = stacked_and_alone(mode=mode)
    members = member or [0, 0, 1, 1, 2, 2]
    obs, action = torch.rand(len(members), 4), torch.arange(len(members)) % 3
    found = stacked._snapshot.root(obs, None, None, member and torch.tensor(member))
    step, after = stacked._snapshot.recurrent_fn(found.embedding, action)
    assert found.value.unique().numel() > 1  # the members differ
    for row, index in enumerate(members):
        this = slice(row, row + 1)
        expected = alone[index].root(TensorDict(observation=obs[this], batch_size=[1]))
        expected_step, expected_state = alone[index]._snapshot.recurrent_fn(
            expected.embedding, action[this]
        )
        torch.testing.assert_close(found.value[this], expected.value, rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(step[:3], expected_step[:3], strict=True):
            torch.testing.assert_close(ours[this], theirs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(after["latent_state"][this], expected_state["latent_state"])


def test_members_with_nan_weights_or_later_updates():
    """A member with NaN plays as a finite one; later updates do not change the snapshot."""
    learner, states = members()
    next(iter(states["params"].values(True, True)))[0] = torch.nan
    planner = StackedPlanner(learner.make_model(0), SPEC, CONFIG, size=3)
    planner.refresh(states)
    state = TensorDict(observation=torch.ones(4, 4), batch_size=[4])
    value = planner.root(state[:3]).value
    assert value.isfinite().all() and value[0] == value[1] and value[1] != value[2]
    for leaf in states["params"].values(True, True):
        leaf.add_(1.0)
    assert torch.equal(planner.root(state[:3]).value, value)
    with pytest.raises(ValueError, match="4 rows cannot be divided equally among 3 members"):
        planner.root(state)


def planners_with(**numbers):
    """A planner of members with their own hyperparameters, and planners for each of them alone."""
    learner, states = members()
    for name, values in numbers.items():
        states["hyper", name] = torch.tensor(values)
    stacked = StackedPlanner(learner.make_model(0), SPEC, CONFIG, size=3)
    stacked.refresh(states)
    alone = []
    for index, state in enumerate(states.unbind(0)):
        config = CONFIG
        for name, values in numbers.items():
            section = {"discount": "targets", "dirichlet_fraction": "search"}.get(name)
            if section is not None:
                changed = replace(getattr(config, section), **{name: values[index]})
                config = replace(config, **{section: changed})
        by_config, by_state = (Planner(learner.make_model(0), SPEC, c) for c in (config, CONFIG))
        by_config.refresh(state.exclude("hyper"))
        by_state.refresh(state)
        alone.append((by_config, by_state))
    return stacked, alone


def test_each_member_has_its_own_discount():
    stacked, alone = planners_with(discount=[0.5, 0.9, 0.997])
    state = TensorDict(observation=torch.rand(6, 4), batch_size=[6])
    found = stacked.plan(state, noise=False, temperature=0.0)
    for index, planners in enumerate(alone):
        rows = slice(2 * index, 2 * index + 2)
        for planner in planners:
            expected = planner.plan(state[rows], noise=False, temperature=0.0)
            torch.testing.assert_close(found.root_value[rows], expected.root_value)
    assert stacked.number("dirichlet_fraction", 6) == CONFIG.search.dirichlet_fraction
    first = alone[0][0].plan(state[2:4], noise=False, temperature=0.0)
    assert not torch.equal(first.root_value, found.root_value[2:4])
