"""The schedule of a run: its recorded events against those of a plain loop."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raffia.algorithms.efficientzero.config import OptimizerConfig, SearchConfig, TargetConfig
from raffia.recipes.efficientzero import EfficientZeroRun
from raffia.recipes.efficientzero.actors import make_planner
from raffia.recipes.efficientzero.presets import gumbel, muzero
from raffia.recipes.population_config import PopulationConfig
from raffia.tensordict import TensorDict
from tests.marks import slow_among
from tests.recipes.diary import Diary, assert_same, expected, plain_weights
from tests.recipes.runs import tiny, with_all

GRADIENT_DESCENT = OptimizerConfig(
    learning_rate=0.2, momentum=0.0, weight_decay=0.0, max_grad_norm=1e9, warmup_fraction=0.0
)


def config_with(**changes) -> EfficientZeroRun:
    """Plain gradient descent, whose rate shows in its steps, with early and frequent events."""
    base = tiny(
        optimizer=GRADIENT_DESCENT,
        targets=TargetConfig(n_step=3, target_interval=3, reanalyze_ratio=0.25),
        search=SearchConfig(num_simulations=2),
        collect={"num_env_steps": 84, "updates_per_env_step": 0.25, "extra_updates": 2},
        replay={"capacity": 300, "batch_size": 9},
        evaluate={"every_env_steps": 20, "num_episodes": 2, "max_steps": 6},
        checkpoint__every_updates=4,
    )
    return with_all(base, **changes)


def write(config, folder):
    diary = Diary(config, folder)
    returns = [row["mean_return"] for row in diary.rows("evaluate")]
    return diary, expected(config, returns)


@pytest.mark.slow
def test_a_run_collects_until_a_segment_can_be_drawn(tmp_path):
    """By the ratio one step precedes the first update, but a segment needs more."""
    collect = {"random_env_steps": 0, "num_env_steps": 24, "updates_per_env_step": 1.0}
    diary = Diary(config_with(collect=collect), tmp_path / "run")
    kinds = [event[0] for event in diary.events]
    before = kinds[: kinds.index("batch")]
    assert set(before) == {"act"} and len(before) > 1


CASES = {
    "unchanged": {},
    "temperatures and rates change": {
        "search": {"temperatures": (1.0, 0.5, 0.0), "temperature_from": (0.0, 0.6, 0.8)},
        "optimizer": {"warmup_fraction": 0.5, "decay_updates": 3, "decay_rate": 0.5},
    },
    "more updates than steps": {
        "collect": {"updates_per_env_step": 1.5, "num_env_steps": 56, "extra_updates": 0},
        "targets": {"target_interval": 5, "correct_horizon": False},
        "replay": {"beta": 0.0},
    },
    "rollouts of three steps": {
        "collect": {"rollout_length": 3, "extra_updates": 13, "random_env_steps": 30},
        "evaluate": {"num_simulations": 5, "every_env_steps": 7},
        "targets": {"target_interval": 1, "horizon_fraction": 0.1},
    },
    "no priorities, and nothing in between": {
        "replay__alpha": 0.0,
        **dict.fromkeys(("evaluate__every_env_steps", "checkpoint__every_updates"), 10**6),
        "targets__target_interval": 10**6,
    },
}


@pytest.mark.parametrize(
    "case",
    slow_among(CASES, "unchanged", "more updates than steps", "rollouts of three steps"),
)
def test_a_run_does_what_a_plain_loop_does(case, tmp_path):
    diary, wanted_events = write(config_with(**CASES[case]), tmp_path / "run")
    assert_same(diary.events, wanted_events)


def test_weights_and_priorities_are_those_of_a_plain_dict(tmp_path):
    """Weights of a batch depend on the priorities of its rows alone."""
    config = config_with(collect={"extra_updates": 12}, replay={"alpha": 0.8, "beta": 0.5})
    diary = Diary(config, tmp_path / "run")
    wanted_events = torch.tensor(plain_weights(diary))
    found = torch.stack([batch["weight"] for batch in diary.batches])
    torch.testing.assert_close(found, wanted_events, rtol=1e-4, atol=1e-6)
    assert bool((found.amax(1) == 1).all())  # in each batch, whatever else is in the replay
    assert found.min() < 0.9  # weights differ
    drawn = torch.stack([batch["index"] for batch in diary.batches])
    assert all(len(row.unique()) == len(row) for row in drawn)  # without replacement


def test_priorities_are_the_distance_of_values_and_targets(tmp_path):
    diary = Diary(config_with(), tmp_path / "run")
    planner = make_planner(diary.run.networks, diary.run.config, diary.run.env.spec)
    for state, batch, metrics in zip(diary.states, diary.batches, diary.metrics, strict=True):
        planner.refresh(state)
        model = planner._snapshot
        value = model.root(batch["frames"][:, 0], None, None, None).value
        distance = (value - batch["target_value"][:, 0]).abs()
        torch.testing.assert_close(metrics["priority"], distance, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_members_with_other_batch_sizes_normalize_weights_by_their_own_maximum(tmp_path):
    members = {"size": 3, "ranges": ("batch_size=4..14",), "spread": 3.0, "hyper": 0.0}
    config = config_with(env={"num_envs": 3}, population=PopulationConfig(**members))
    diary = Diary(config, tmp_path / "run")
    sizes = [state["hyper", "batch_size"].tolist() for state in diary.states]
    assert len(set(sizes[0])) > 1
    shorter = 0
    for sizes_of_update, batch in zip(sizes, diary.batches, strict=True):
        for size, weight in zip(sizes_of_update, batch["weight"], strict=True):
            assert weight[:size].max() == 1
            shorter += bool(weight.max() > 1)
    assert shorter  # some rows beyond a member's size have larger weights


@st.composite
def plans(draw):
    """Independent settings of the schedule."""
    num_envs, rollout_length = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    first = draw(st.integers(30, 50))
    starts = sorted(draw(st.lists(st.floats(0, 1), max_size=2)))
    temperatures = tuple(draw(st.floats(0, 2)) for _ in range(len(starts) + 1))
    num_env_steps = first + draw(st.integers(10, 40))
    return {
        "env__num_envs": num_envs,
        "search": {"temperature_from": (0.0, *starts), "temperatures": temperatures},
        "collect": {"random_env_steps": first, "num_env_steps": num_env_steps},
        "collect__updates_per_env_step": draw(st.floats(0.1, 0.6)),
        "collect__extra_updates": draw(st.integers(0, 12)),
        "collect__rollout_length": rollout_length,
        "replay": {"alpha": draw(st.sampled_from([0.0, 0.6])), "beta": draw(st.floats(0, 1))},
        "optimizer__warmup_fraction": draw(st.floats(0, 1)),
        "optimizer__decay_updates": draw(st.integers(1, 9)),
        "optimizer__decay_rate": draw(st.floats(0.5, 1)),
        "targets__target_interval": draw(st.integers(1, 7)),
        "targets__correct_horizon": draw(st.booleans()),
        "targets__horizon_fraction": draw(st.floats(0, 1)),
        "evaluate__every_env_steps": draw(st.integers(8, 60)),
        "evaluate__num_simulations": draw(st.integers(0, 3)),
        "checkpoint__every_updates": draw(st.integers(1, 9)),
    }


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(plans())
def test_any_run_does_what_a_plain_loop_does(plan):
    with tempfile.TemporaryDirectory() as folder:
        diary, wanted_events = write(config_with(**plan), Path(folder) / "run")
    assert_same(diary.events, wanted_events)


@pytest.fixture(scope="module")
def decaying(tmp_path_factory):
    config = config_with(optimizer={"decay_updates": 11, "decay_rate": 0.5})
    diary, wanted_events = write(config, tmp_path_factory.mktemp("runs") / "decaying")
    assert_same(diary.events, wanted_events)
    return config, diary, [row["mean_return"] for row in diary.rows("evaluate")]


NOTICED = [
    {"collect": {"rollout_length": 2}},
    {"replay": {"beta": 0.41}},
    {"targets": {"horizon_fraction": 0.4}},
    {"optimizer": {"decay_updates": 12}},
    {"search": {"temperature_from": (0.0, 0.7, 0.75)}},
    {"evaluate": {"every_env_steps": 19}},
]


@pytest.mark.parametrize("change", NOTICED)
def test_the_plain_loop_notices_changed_settings(change, decaying):
    config, diary, returns = decaying
    with pytest.raises((AssertionError, RuntimeError, StopIteration)):
        assert_same(diary.events, expected(with_all(config, **change), [*returns, 0.0, 0.0]))


# ------------------------------------------------------------------- chosen settings


@pytest.mark.slow
def test_muzero_predicts_each_reward_and_has_neither_projection_nor_reanalyze(tmp_path):
    efficient = Diary(tiny(), tmp_path / "efficient")
    plain = Diary(muzero(tiny()), tmp_path / "muzero")
    assert "projection" in efficient.last["params"].keys()
    assert not any("project" in str(key) for key in plain.last["params"].keys(True))
    assert efficient.run.reanalyze_planner.num_simulations > 0
    assert plain.run.reanalyze_planner.num_simulations == 0 < plain.run.actor.num_simulations
    rewards, prefixes = (diary.batches[0]["target_value_prefix"] for diary in (plain, efficient))
    assert set(rewards.unique().tolist()) <= {0.0, 1.0}  # CartPole gives 1 at each step
    assert prefixes.max() == 5 and rewards[:, 0].equal(prefixes[:, 0])
    assert plain.batches[0]["frames"].shape[1] == 1 < efficient.batches[0]["frames"].shape[1]
    assert "consistency_loss" not in plain.metrics[0].keys()


def test_gumbel_searches_give_completed_policies(tmp_path):
    segments = Diary(gumbel(muzero(tiny())), tmp_path / "run").run.replay.sample(64)
    policy = segments["policy"][segments["valid_step"]]
    searched = policy[policy[:, 0] != 0.5]  # the first steps were random ones
    torch.testing.assert_close(searched.sum(-1), torch.ones(len(searched)))
    counts = searched * 4  # visit counts would be whole numbers
    assert (counts - counts.round()).abs().max() > 0.01


def test_priorities_change_what_is_drawn(tmp_path):
    diary = Diary(tiny(), tmp_path / "run")
    weights = torch.cat([batch["weight"] for batch in diary.batches[1:]])
    assert weights.unique().numel() > 4 and weights.max() <= 1 + 1e-6
    index = diary.run.replay.sample(8)["index"].unique()
    priority = torch.full((len(index),), 1e-6)
    priority[0] = 1e6
    metrics = TensorDict(priority=priority)
    diary.run.prioritize(TensorDict(index=index, batch_size=[len(index)]), metrics)
    assert (diary.run.replay.sample(64)["index"] == index[0]).float().mean() > 0.8
