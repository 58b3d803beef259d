"""Reanalysis: policies and values that are searched again."""

import pytest
import torch

from raffia.algorithms.efficientzero import EfficientZeroConfig, EfficientZeroLearner, Planner
from raffia.algorithms.efficientzero.config import (
    LossConfig,
    ModelConfig,
    SearchConfig,
    TargetConfig,
)
from raffia.algorithms.efficientzero.reanalyze import reanalyze
from raffia.algorithms.efficientzero.stacked import StackedPlanner
from raffia.algorithms.efficientzero.targets import make_batch
from raffia.data import SegmentReplayBuffer, TensorStorage
from raffia.envs import Box, Discrete, EnvSpec
from raffia.search import RootOutput
from raffia.tensordict import TensorDict

from . import small
from .small import draws

CONFIG = EfficientZeroConfig(
    model=ModelConfig(**small.SIZES),
    loss=LossConfig(unroll_steps=2, consistency_weight=0.0),
    targets=TargetConfig(n_step=2, reanalyze_ratio=1.0),
    search=SearchConfig(num_simulations=6, num_sampled_actions=5),
)
LINE = EnvSpec(observation_shape=(3,), action=Discrete(4))


def configured(**parts):
    return small.configured(CONFIG, **parts)


def planner_of(spec=LINE, config=CONFIG, **options):
    return small.planner_of(spec, config, scale=0.2, consistency=False, **options)


def replay_of(spec=LINE, size=12, end="terminated", num_sampled=5):
    torch.manual_seed(1)
    continuous = isinstance(spec.action, Box)
    num_choices = num_sampled if continuous else spec.action.n
    last = torch.arange(size) == size - 1
    states = {"observation": torch.randn(size + 1, *spec.observation_shape)}
    if spec.masked:
        states["action_mask"] = torch.rand(size + 1, spec.action.n) < 0.5
        states["action_mask"][:, 1] = True
    if spec.num_players == 2:
        states["to_play"] = torch.arange(size + 1) % 2
    steps = TensorDict({name: state[:-1] for name, state in states.items()}, [size])
    steps["next"] = TensorDict({name: state[1:] for name, state in states.items()}, [size])
    steps["action"] = torch.zeros(size, *spec.action.shape, dtype=spec.action.dtype)
    steps["reward"] = torch.randn(size)
    steps["policy"] = torch.full((size, num_choices), 7.0)  # never the result of a search
    steps["value"] = torch.full((size,), 50.0)
    if continuous:
        steps["sampled_actions"] = torch.zeros(size, num_sampled, *spec.action.shape)
    steps["terminated"] = last & (end == "terminated")
    steps["truncated"] = last & (end == "truncated")
    replay = SegmentReplayBuffer(
        TensorStorage(100), unroll_steps=2, n_step=2, observation_keys=list(spec.state_keys)
    )
    replay.extend(steps)
    return replay


def segments_of(replay, index):
    return replay.read(torch.tensor(index))


def test_steps_that_are_not_searched_again_stay_as_stored():
    planner = planner_of(config=configured(targets={"reanalyze_ratio": 0.5}))
    segments = segments_of(replay_of(), [3, 8, 1, 6])  # the last row of 1..3, the last of 6..8
    batch, reanalyzed = make_batch(segments, planner, generator=draws())
    assert reanalyzed["step_index"].tolist() == [3, 4, 5, 8, 9, 10]
    stored = batch["target_policy"].eq(7).all(-1)
    assert stored.tolist() == [[False] * 3, [False] * 3, [True, True, False], [True, True, False]]
    for ratio in (0.0, 0.1):  # of 4 segments
        planner = planner_of(config=configured(targets={"reanalyze_ratio": ratio}))
        assert make_batch(segments, planner, generator=draws())[1] is None


@pytest.mark.parametrize("bootstrap", ["search", "network"])
def test_reanalyzed_values_bootstrap_where_values_are_searched(bootstrap):
    config = configured(targets={"bootstrap": bootstrap, "discount": 1.0})
    planner, replay = planner_of(config=config), replay_of(end="truncated")
    segments = segments_of(replay, [0, 2])
    batch, reanalyzed = make_batch(segments, planner, generator=draws())
    sums = segments["reward"][0, 0:2].sum(), segments["reward"][0, 1:3].sum()
    closing = batch["target_value"][0, :2] - torch.stack(sums)
    if bootstrap == "search":  # rows 2 and 3, which were searched for the second segment
        torch.testing.assert_close(closing, reanalyzed["value"][2:4])
        stored = segments["reward"][1, 2:4].sum() + 50  # of row 6, which was not searched
        torch.testing.assert_close(batch["target_value"][1, 2], stored)
    else:
        torch.testing.assert_close(closing, planner.values(segments["observation"][0, 2:4]))


def test_only_legal_actions_of_games_of_two_get_visits():
    spec = EnvSpec(observation_shape=(3, 2, 2), action=Discrete(4), num_players=2, masked=True)
    planner, replay = planner_of(spec), replay_of(spec)
    segments = segments_of(replay, list(range(12)))
    batch, reanalyzed = make_batch(segments, planner, generator=draws())
    assert len(reanalyzed) == 12
    legal = segments["action_mask"][:, 0]
    assert not reanalyzed["policy"][~legal].any()
    keys = ("observation", "action_mask", "to_play")
    state = TensorDict({key: segments[key][:, 0] for key in keys}, [12])
    plan = planner.plan(state, temperature=0.0, generator=draws())
    torch.testing.assert_close(reanalyzed["value"], plan.root_value)
    torch.testing.assert_close(reanalyzed["policy"], plan.action_weights)
    threaded = reanalyze(segments, planner_of(spec, num_threads=2), generator=draws())
    assert all(threaded[key].equal(reanalyzed[key]) for key in ("policy", "value"))
    assert not legal.all() and batch["target_policy"].shape == (12, 3, 4)


@pytest.mark.parametrize(
    ("device", "num_roots", "num_threads"), [("cpu", 64, 2), ("cpu", 63, 1), ("cuda", 64, 1)]
)
def test_searches_take_several_threads_where_they_pay(device, num_roots, num_threads):
    planner = planner_of(num_threads=2)
    planner.device = torch.device(device)
    root = RootOutput(torch.zeros(num_roots, 2), torch.zeros(num_roots), None)
    assert planner._threads(root) == num_threads


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ratio", "bootstrap"), [(0.0, "network"), (0.5, "network"), (1.0, "search")]
)
def test_targets_of_all_members_are_those_of_each(ratio, bootstrap):
    config = configured(
        targets={"reanalyze_ratio": ratio, "bootstrap": bootstrap, "reanalyze_noise": False}
    )
    learner = EfficientZeroLearner(LINE, config, num_updates=10)
    states = torch.stack([learner.init(seed) for seed in range(3)])
    states["hyper", "discount"] = torch.tensor([0.9, 0.997, 0.5])
    for value in states["params"].values(True, True):
        value.add_(0.2 * torch.rand(value.shape, generator=draws(1)))
    stacked_planner = StackedPlanner(learner.make_model(0), LINE, config, size=3)
    stacked_planner.refresh(states)
    replay = replay_of(end="truncated")
    segments = segments_of(replay, [3, 4, 9, 11])
    inputs = [segments, segments_of(replay, [0, 1, 2, 8]), segments]  # one has other segments
    flat = torch.cat(inputs).set("member", torch.arange(3).repeat_interleave(4))
    batch, reanalyzed = make_batch(flat, stacked_planner, generator=draws(), total=20)
    assert (reanalyzed is None) == (ratio == 0)
    for member in range(3):
        alone = Planner(learner.make_model(0), LINE, config)
        alone.refresh(states[member])
        expected, found = make_batch(inputs[member], alone, generator=draws(), total=20)
        rows = slice(4 * member, 4 * member + 4)
        for name in expected.keys():
            if name != "action":  # after an end they are drawn
                torch.testing.assert_close(batch[name][rows], expected[name], rtol=1e-4, atol=1e-5)
        if reanalyzed is not None:
            of_member = reanalyzed[reanalyzed["member"] == member]
            assert of_member["step_index"].tolist() == found["step_index"].tolist()
            torch.testing.assert_close(of_member["policy"], found["policy"], rtol=1e-4, atol=1e-5)
