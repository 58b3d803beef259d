"""Targets, against the peers' and against a slower form in plain Python."""

import json
from pathlib import Path

import pytest
import torch

from raffia.algorithms.efficientzero import EfficientZeroConfig, Planner
from raffia.algorithms.efficientzero.config import LossConfig, TargetConfig
from raffia.algorithms.efficientzero.observations import draw_augmentation, with_observations
from raffia.algorithms.efficientzero.targets import make_batch, n_step_of_age
from raffia.data import SegmentReplayBuffer, TensorStorage
from raffia.envs import Box, Discrete, EnvSpec
from raffia.tensordict import TensorDict

PEERS = json.loads((Path(__file__).parent / "targets.json").read_text())
CORRIDOR = EnvSpec(observation_shape=(1,), action=Discrete(3))


class Table(Planner):
    """A planner for observations that are state numbers, with known values."""

    def __init__(self, values, config, spec=CORRIDOR, frame_stack=1):
        self.spec, self.config, self.frame_stack = spec, config, frame_stack
        self.table, self.requested = torch.as_tensor(values), []
        self._own, self.device = {}, torch.device("cpu")

    def values(self, observation):
        self.requested.append(observation.clone())
        return self.table[observation.flatten(1)[:, -1].long()]


def configured(num_unrolled, n_step, horizon=5, *, absorb=("terminated",), **targets):
    loss = LossConfig(
        unroll_steps=num_unrolled, lstm_horizon=horizon, absorb=absorb, augmentation=("shift",)
    )
    targets = TargetConfig(n_step=n_step, **({"reanalyze_ratio": 0.0} | targets))
    return EfficientZeroConfig(loss=loss, targets=targets)


def replay_of(episodes, config, **options):
    """Each episode: rewards, the number of its first state, how it ends, and further entries."""
    options |= dict(unroll_steps=config.loss.unroll_steps, n_step=config.targets.n_step)
    options = {"observation_keys": ["observation"], "absorb": config.loss.absorb, **options}
    replay = SegmentReplayBuffer(TensorStorage(1000), **options)
    for rewards, first, end, more in episodes:
        size = len(rewards)
        states = torch.arange(first, first + size + 1, dtype=torch.float32).unsqueeze(1)
        last = torch.arange(size) == size - 1
        steps = TensorDict(
            observation=states[:-1],
            action=torch.full((size,), 2),
            reward=torch.as_tensor(rewards),
            policy=torch.eye(3)[torch.arange(size) % 3],
            value=100 + states[:-1, 0],
            terminated=last & (end == "terminated"),
            truncated=last & (end == "truncated"),
            next=dict(observation=states[1:]),
            batch_size=[size],
        )
        replay.extend(steps.update(more))
    return replay


def batch_of(replay, planner, index, **options):
    options = {"generator": torch.Generator().manual_seed(0)} | options
    return make_batch(replay.read(torch.as_tensor(index)), planner, **options)[0]


@pytest.mark.parametrize("case", PEERS["cases"], ids=lambda case: f"td_{case['td_steps']}")
@pytest.mark.parametrize("which", ["expected_paper", "expected_lightzero_single"])
def test_targets_are_those_of_the_peers(case, which):
    sizes = (case[name] for name in ("num_unroll_steps", "td_steps", "lstm_horizon_len"))
    config = configured(*sizes, discount=case["discount"])
    segments = case["segments"]
    replay = replay_of([(s["rewards"], s["first_obs"], "terminated", {}) for s in segments], config)
    starts, row = [], 0
    for segment in segments:
        starts.append(row + segment["position"])
        row += segment["length"] + 1  # and its closing row
    planner = Table(case["value_table"], config)
    batch = batch_of(replay, planner, starts)
    expected = {name: torch.tensor(rows) for name, rows in case[which].items()}
    torch.testing.assert_close(batch["target_value"], expected["value"], atol=2e-5, rtol=1e-5)
    prefix = expected["value_prefix"][:, :-1]  # their last column is not used
    torch.testing.assert_close(batch["target_value_prefix"], prefix)


@pytest.mark.parametrize("case", PEERS["dynamic_horizon"], ids=lambda case: str(case["index"]))
def test_the_horizon_of_old_data_is_that_of_the_paper(case):
    age = torch.tensor([case["total_transitions"] - case["index"]])
    found = n_step_of_age(age, case["td_steps"], case["auto_td_steps"])
    assert found.tolist() == [case["expected"]]


def slow_value(case, config, t, n):
    """z_t of one episode, as a sum over its steps."""
    rewards, players, end, values = case
    size, total, factor = len(rewards), 0.0, 1.0
    if t >= size:
        return 0.0
    for i in range(n):
        if t + i >= size:
            break
        mine = players[t + i] == players[t]
        total += factor * (rewards[t + i] if mine else -rewards[t + i])
        factor *= config.targets.discount
    last = min(t + n, size)
    if last == size and end in config.loss.absorb or last == size and end == "terminated":
        return total
    return total + factor * (values[last] if players[last] == players[t] else -values[last])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("absorb", [(), ("terminated",), ("terminated", "truncated")])
def test_value_targets_of_two_player_games_with_horizons_by_age(seed, end, absorb):
    generator = torch.Generator().manual_seed(seed)
    config = configured(3, 4, absorb=absorb, discount=0.9)
    size = 1 + seed * 2
    rewards = torch.randn(size, generator=generator)
    players = torch.randint(2, (size + 1,), generator=generator)  # not only alternating
    values = torch.randn(size + 1, generator=generator)
    more = {"to_play": players[:-1], "next": {"to_play": players[1:]}}
    keys = dict(observation_keys=["observation", "to_play"])
    replay = replay_of([(rewards, 0, end, more)], config, **keys)
    spec = EnvSpec(observation_shape=(1,), action=Discrete(3), num_players=2)
    planner = Table(values, config, spec)
    index = torch.arange(size)
    n = n_step_of_age(size + 1 - index, 4, 2)
    batch = batch_of(replay, planner, index, total=size + 1, correction_interval=2)
    case = rewards.tolist(), players.tolist(), end, values.tolist()
    expected = [[slow_value(case, config, t + k, int(n[t])) for k in range(4)] for t in range(size)]
    torch.testing.assert_close(batch["target_value"], torch.tensor(expected))
    inside = index.unsqueeze(1) + torch.arange(4) < size
    counts = torch.ones_like(inside) if end in absorb else inside
    assert batch["policy_mask"].equal(inside.float())
    assert batch["value_mask"].equal(counts.float())
    assert batch["value_prefix_mask"].equal(counts[:, :-1].float())
    assert batch["consistency_mask"].equal(inside[:, :-1].float())  # the last observation is used
    assert batch["target_policy"][~inside].eq(0).all()
    assert batch["target_policy"][inside].sum(-1).eq(1).all()


def test_no_value_is_requested_after_a_termination():
    config = configured(3, 2)
    replay = replay_of([(torch.ones(3), 0, "terminated", {})], config)
    planner = Table(torch.full((4,), torch.nan), config)
    assert batch_of(replay, planner, [1, 2])["target_value"].isfinite().all()
    assert not planner.requested
    replay = replay_of([(torch.ones(9), 0, "truncated", {})], config)
    planner = Table(torch.arange(10.0), config)
    batch_of(replay, planner, [2, 3, 3, 7])
    [requested] = planner.requested  # each value once
    assert requested.flatten().tolist() == [4, 5, 6, 7, 8, 9]
    with pytest.raises(ValueError, match=r"n_step \+ 1 = 5 rows; got 6"):
        batch_of(replay, Table(torch.zeros(10), configured(2, 2)), [0])


def test_continuous_actions_come_with_the_sampled_actions():
    config = configured(3, 1)
    spec = EnvSpec(observation_shape=(1,), action=Box((-1.0, 2.0), (1.0, 6.0)))
    sampled = torch.rand(2, 3, 2)
    more = {"action": torch.full((2, 2), 0.5), "sampled_actions": sampled}
    replay = replay_of([(torch.ones(2), 0, "terminated", more)], config)
    batch = batch_of(replay, Table(torch.zeros(3), config, spec), [0] * 100)
    assert batch["action"][:, :2].eq(0.5).all()
    drawn = batch["action"][:, 2]
    assert drawn.amin(0).sub(torch.tensor([-1.0, 2.0])).abs().max() < 0.3
    assert drawn.amax(0).sub(torch.tensor([1.0, 6.0])).abs().max() < 0.3
    assert batch["sampled_actions"].shape == (100, 4, 3, 2)
    assert batch["sampled_actions"][0, :2].equal(sampled)


def test_stacks_of_frames_are_merged():
    config = configured(2, 1)
    spec = EnvSpec(observation_shape=(1,), action=Discrete(3))
    replay = replay_of([(torch.ones(5), 0, "truncated", {})], config, frame_stack=3)
    planner = Table(torch.arange(6.0), config, spec, frame_stack=3)
    batch = batch_of(replay, planner, [0, 3])
    assert batch["frames"].tolist() == [[[0], [0], [0], [1], [2]], [[1], [2], [3], [4], [5]]]
    del batch["augmentation"]  # of images
    batch = with_observations(batch, spec, frame_stack=3)
    assert batch["observation"].tolist() == [[0, 0, 0], [1, 2, 3]]
    assert batch["next_observation"].tolist() == [[[0, 0, 1], [0, 1, 2]], [[2, 3, 4], [3, 4, 5]]]
    loss = LossConfig(unroll_steps=2, consistency_weight=0.0)
    config = EfficientZeroConfig(loss=loss, targets=config.targets)
    batch = batch_of(replay, Table(torch.zeros(6), config, spec, frame_stack=3), [0])
    assert "consistency_mask" not in batch.keys() and batch["frames"].shape == (1, 3, 1)
    assert "next_observation" not in with_observations(batch, spec, frame_stack=3).keys()


def test_a_batch_shares_no_memory_with_its_segments():
    """So the segments' memory can be reused by the next sample."""
    config = configured(2, 1)
    spec = EnvSpec(observation_shape=(1,), action=Box((-1.0,), (1.0,)))
    for stack in (1, 3):
        more = {"action": torch.rand(9, 1), "sampled_actions": torch.rand(9, 3, 1)}
        episode = torch.ones(9), 0, "terminated", more
        replay = replay_of([episode], config, alpha=0.6, beta=0.4, frame_stack=stack)
        segments = replay.sample(5)
        planner = Table(torch.zeros(10), config, spec, frame_stack=stack)
        batch, reanalyzed = make_batch(segments, planner, generator=torch.Generator())
        assert reanalyzed is None and batch["index"].equal(segments["index"])
        assert batch["weight"].equal(segments["priority_weight"])
        assert batch["augmentation", "shift"].shape == (5, 2, 2)
        before = batch.clone()
        for value in segments.values(True, True):
            value.fill_(7)
        assert all(batch[key].equal(before[key]) for key in before.keys(True, True))


def images(kind):
    """An image whose pixels have distinct values, and the augmented observations of 40 samples."""
    spec = EnvSpec(observation_shape=(2, 9, 9), action=Discrete(3), observation_dtype=torch.uint8)
    image = torch.arange(81, dtype=torch.uint8).reshape(9, 9)
    frames = image.expand(40, 3, 2, 9, 9)  # bytes, as they were stored
    drawn = draw_augmentation(40, [kind], 2, torch.Generator().manual_seed(0))
    batch = TensorDict(frames=frames, augmentation=drawn, batch_size=[40])
    return image, with_observations(batch, spec)


def test_shifts_are_drawn_for_each_sample_and_shared_by_its_images():
    _, batch = images("shift")
    first, later = batch["observation"], batch["next_observation"]
    assert first.dtype == torch.uint8
    assert first[:, 0].equal(first[:, 1])  # planes of an image
    assert later[:, 0].equal(later[:, 1])  # steps of the target stack
    centres = first[:, 0, 4, 4]
    assert len(centres.unique()) > 15
    assert (centres != later[:, 0, 0, 4, 4]).float().mean() > 0.8  # drawn apart


def test_intensity_is_drawn_for_each_sample():
    image, batch = images("intensity")
    ratio = batch["observation"] / (image / 255)
    factors = ratio[:, :, 1:].flatten(1)
    torch.testing.assert_close(factors, factors[:, :1].expand_as(factors))
    assert len(factors[:, 0].unique()) > 30
    assert 0.899 < factors.min() < 0.95 and 1.05 < factors.max() < 1.101
