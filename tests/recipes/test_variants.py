"""What can be chosen of a run: each choice runs, and does what it says."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from raffia.algorithms.efficientzero.config import OptimizerConfig
from raffia.algorithms.efficientzero.observations import with_observations
from raffia.envs.config import EnvConfig
from raffia.envs.make import make_env
from raffia.learner import Accumulate
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.efficientzero.presets import PRESETS, gumbel, muzero
from raffia.tensordict.tensordict import TensorDict
from raffia.train.session import TrainingSession
from tests.recipes.runs import Quiet, short

TINY = {
    "latent_state_dim": 16,
    "lstm_hidden_size": 16,
    "num_channels": 4,
    "proj_hid": 8,
    "proj_out": 8,
    "pred_hid": 8,
    "pred_out": 8,
}


def config_of(preset="smoke", **changes):
    """Ten updates with tiny networks, in four environments; `changes` are those of each section."""
    base = PRESETS[preset]
    small = short(
        80,
        env=replace(base.env, num_envs=4, num_workers=0),
        model=replace(base.model, **TINY),
        loss=base.loss,
        targets=replace(base.targets, n_step=5, discount=0.997, target_interval=5),
        optimizer=OptimizerConfig(name="adamw", learning_rate=3e-3),
        search=replace(base.search, num_simulations=4),
        evaluate=replace(base.evaluate, every_env_steps=10**9, num_episodes=1, max_steps=9),
    )
    return with_changes(small, changes)


def with_changes(config, changes):
    sections = {
        name: replace(getattr(config, name), **change) if isinstance(change, dict) else change
        for name, change in changes.items()
    }
    return replace(config, **sections)


class Watched:
    """A learner that keeps the batches it is given."""

    def __init__(self, learner):
        self.learner, self.init, self.apply = learner, learner.init, learner.apply
        self.batches, self.metrics = [], []

    def grads(self, state, batch):
        update, metrics = self.learner.grads(state, batch)
        self.batches.append(batch)
        self.metrics.append(metrics)
        self.state = state
        return update, metrics


class Played:
    """A run that has ended, its parts, and what it has learnt from."""

    def __init__(self, config, folder, wrap=lambda learner: learner):
        folder.mkdir()
        self.run = run = EfficientZeroExperiment(config, folder, Quiet(), make_env, None)
        run.learner = self.watched = Watched(wrap(run.learner))
        with closing(run), closing(TrainingSession(run)) as session:
            assert session.run().reason == "finished"
        self.batches, self.metrics = self.watched.batches, self.watched.metrics
        assert len(self.batches) == config.num_updates > 0
        assert all(bool(m["loss"].isfinite()) for m in self.metrics)
        found = session.checkpoints.newest()
        self.state = found.tensors("state")

    def windows(self, num=64):
        return self.run.replay.sample(num)


@pytest.mark.slow
def test_muzero_predicts_each_reward_and_has_neither_projection_nor_reanalyze(tmp_path):
    efficient = Played(config_of(), tmp_path / "efficient")
    plain = Played(muzero(config_of()), tmp_path / "muzero")
    assert "projection" in efficient.state["params"].keys()
    assert not any("project" in str(key) for key in plain.state["params"].keys(True))
    assert efficient.run.reanalyze_planner.num_simulations > 0
    assert plain.run.reanalyze_planner.num_simulations == 0 < plain.run.actor.num_simulations
    rewards, prefixes = (played.batches[0]["target_value_prefix"] for played in (plain, efficient))
    assert set(rewards.unique().tolist()) <= {0.0, 1.0}  # CartPole gives 1 at each step
    assert prefixes.max() == 5 and rewards[:, 0].equal(prefixes[:, 0])
    assert plain.batches[0]["frames"].shape[1] == 1 < efficient.batches[0]["frames"].shape[1]
    assert "consistency_loss" not in plain.metrics[0].keys()


@pytest.mark.parametrize("base", [lambda run: run, muzero])
def test_gumbel_searches_give_completed_policies(base, tmp_path):
    played = Played(gumbel(base(config_of())), tmp_path / "run")
    windows = played.windows()
    policy = windows["policy"][windows["valid_step"]]
    searched = policy[policy[:, 0] != 0.5]  # the first steps were random ones
    assert len(searched)
    torch.testing.assert_close(searched.sum(-1), torch.ones(len(searched)))
    shares = searched * 4  # of visits there would be whole numbers
    assert (shares - shares.round()).abs().max() > 0.01


def test_visits_of_muzero_s_searches_are_whole_numbers(tmp_path):
    played = Played(config_of(), tmp_path / "run")
    shares = played.windows()["policy"] * 4
    torch.testing.assert_close(shares, shares.round())


def test_continuous_actions_are_sampled_within_their_bounds(tmp_path):
    config = config_of(
        "pendulum",
        search={"num_sampled_actions": 5},
        targets={"reanalyze_ratio": 0.0},  # it draws others than those that were taken
    )
    played = Played(config, tmp_path / "run")
    batch, windows = played.batches[-1], played.windows()
    size = config.replay.batch_size
    assert batch["sampled_actions"].shape == (size, 6, 5, 1)
    assert batch["target_policy"].shape == (size, 6, 5)
    for actions in (batch["action"], batch["sampled_actions"], windows["action"]):
        assert actions.abs().max() <= 2
    taken = windows["action"].unsqueeze(-2) == windows["sampled_actions"]
    assert taken.all(-1).any(-1)[windows["valid_step"]].all()


def test_two_players_never_move_where_they_may_not(tmp_path):
    played = Played(config_of("tictactoe"), tmp_path / "run")
    windows = played.windows()
    acted = windows["valid_step"]
    mask, action = windows["action_mask"][acted], windows["action"][acted]
    assert mask.gather(-1, action.unsqueeze(-1)).all()
    assert bool((windows["policy"][acted][~mask] == 0).all()) and not bool(mask.all())
    assert windows["to_play"].unique().tolist() == [0, 1]
    batch = played.batches[-1]
    assert set(batch["target_value"].sign().unique().tolist()) >= {-1.0, 1.0}


@pytest.mark.parametrize("kinds", [(), ("shift",), ("shift", "intensity")])
def test_images_are_shifted_and_brightened(kinds, tmp_path):
    config = config_of(
        "minatar-breakout",
        env=EnvConfig(id="minatar/breakout", num_envs=2, frame_stack=2),
        model={"flatten": False, "downsample": False, "num_channels": 4},
        loss={"augmentation": kinds, "unroll_steps": 2},
        collect={"num_env_steps": 48},
        replay={"batch_size": 4},
    )
    played = Played(config, tmp_path / "run")
    spec = played.run.env.spec
    assert played.batches[-1]["frames"].dtype is spec.observation_dtype
    batch = with_observations(played.batches[-1], spec, frame_stack=2)
    channels = 2 * played.run.env.spec.observation_shape[0]
    for name, lead in (("observation", (4,)), ("next_observation", (4, 2))):
        assert batch[name].shape == (*lead, channels, 10, 10)
        kept = played.run.env.spec.observation_dtype
        assert batch[name].dtype == (torch.float32 if "intensity" in kinds else kept)
    windows = played.windows(4)
    state = played.watched.state
    twice = [
        with_observations(played.run._make_batch(state, windows), spec, 2)["observation"]
        for _ in range(2)
    ]
    assert twice[0].equal(twice[1])  # the same update, the same draws
    plain = windows["observation"][:, 0].flatten(1, 2)
    assert twice[0].equal(plain) == (not kinds)


def test_frames_are_stacked_and_the_newest_is_the_last(tmp_path):
    played = Played(config_of(env={"frame_stack": 3}), tmp_path / "run")
    windows = played.windows()
    seen = windows["observation"]
    assert seen.shape[2:] == (3, 4)
    both = windows["valid_step"][:, 1]
    assert seen[both, 1, :2].equal(seen[both, 0, 1:])
    frames = played.batches[0]["frames"]
    assert frames.shape[1:] == (3 + 5, 4)
    found = with_observations(played.batches[0], played.run.env.spec, 3)
    assert found["observation"].equal(frames[:, :3].flatten(1))


def test_priorities_change_what_is_drawn(tmp_path):
    played = Played(config_of(), tmp_path / "run")
    weights = torch.cat([batch["weight"] for batch in played.batches[1:]])
    assert weights.unique().numel() > 4 and weights.max() <= 1 + 1e-6
    index = played.windows(8)["index"].unique()
    priority = torch.full((len(index),), 1e-6)
    priority[0] = 1e6
    told = TensorDict(priority=priority)
    played.run.prioritize(TensorDict(index=index, batch_size=[len(index)]), told)
    assert (played.windows(64)["index"] == index[0]).float().mean() > 0.8


def test_without_priorities_all_steps_count_alike(tmp_path):
    played = Played(config_of(replay={"alpha": 0.0}), tmp_path / "run")
    assert all(bool((batch["weight"] == 1).all()) for batch in played.batches)
    assert played.run.replay.beta is None


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_reanalyze_renews_what_was_stored(ratio, tmp_path):
    played = Played(config_of(targets={"reanalyze_ratio": ratio}), tmp_path / "run")
    run, windows = played.run, played.windows()
    searched = run.reanalyze_planner.num_simulations
    run._make_batch(played.state, windows)
    again = run.replay.read(windows["index"])
    rows = windows["valid_step"] & (torch.arange(windows["reward"].shape[1]) <= 5)
    steps = windows["step_index"][rows].unique()
    if ratio:
        assert not again["policy"].equal(windows["policy"])
        assert run.reanalyze_planner.num_simulations - searched == 4 * len(steps)  # each step once
    else:
        assert (
            again["policy"].equal(windows["policy"]) and run.reanalyze_planner.num_simulations == 0
        )


@pytest.mark.parametrize("bootstrap", ["network", "search"])
def test_sums_end_in_the_network_s_value_or_in_the_search_s(bootstrap, tmp_path):
    targets = {"bootstrap": bootstrap, "reanalyze_ratio": 0.0, "correct_horizon": False}
    played = Played(config_of(targets=targets), tmp_path / "run")
    run, windows = played.run, played.windows()
    going_on = windows["valid_step"][:, 5]
    assert going_on.any()
    windows["value"] = torch.full_like(windows["value"], 7.0)
    batch = run._make_batch(played.state, windows)
    gamma = run.config.targets.discount
    value = {"search": torch.tensor(7.0)}.get(bootstrap)
    if value is None:
        value = run.reanalyze_planner.values(windows["observation"][:, 5])[going_on]
    expected = sum(gamma**i for i in range(5)) + gamma**5 * value
    found = batch["target_value"][going_on, 0]
    torch.testing.assert_close(found, expected.expand_as(found))


@pytest.mark.parametrize("corrected", [False, True])
def test_old_steps_get_a_shorter_horizon(corrected, tmp_path):
    targets = {
        "correct_horizon": corrected,
        "horizon_fraction": 1 / 80,  # of 80 steps: a step less for each row that came since
        "target_interval": 10**6,  # the target network says 0, as at its start
        "reanalyze_ratio": 0.0,
        "discount": 1.0,
    }
    played = Played(config_of(targets=targets), tmp_path / "run")
    windows = played.windows()
    old = windows["valid_step"][:, 5] & (windows["index"] < 60)
    batch = played.run._make_batch(played.state, windows)
    found = batch["target_value"][old, 0]
    torch.testing.assert_close(found, torch.full_like(found, 1.0 if corrected else 5.0))


@pytest.mark.parametrize("norm_type", ["BN", "LN"])
def test_both_kinds_of_normalisation(norm_type, tmp_path):
    model = {"norm_type": norm_type, "projection_norm_type": norm_type}
    played = Played(config_of(model=model), tmp_path / "run")
    buffers = played.state["buffers"]
    means = [buffers[key] for key in buffers.keys(True, True) if key[-1] == "running_mean"]
    assert bool(means) == (norm_type == "BN")
    assert all(bool((mean != 0).any()) for mean in means)


def test_accumulated_gradients_learn_the_same(tmp_path):
    model = {"norm_type": "LN", "projection_norm_type": "LN"}  # BN: a half's means are its own
    config = config_of(model=model, replay={"alpha": 0.0})
    whole = Played(config, tmp_path / "whole")
    halves = Played(config, tmp_path / "halves", lambda learner: Accumulate(learner, 2))
    for one, other in zip(whole.metrics[:3], halves.metrics[:3], strict=True):
        torch.testing.assert_close(one["loss"], other["loss"], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(one["priority"], other["priority"], atol=1e-3, rtol=1e-3)
