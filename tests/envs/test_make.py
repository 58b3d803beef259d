from dataclasses import replace

import pytest
import torch

from raffia.envs.batch import SerialBatch
from raffia.envs.check import check_env
from raffia.envs.config import EnvConfig
from raffia.envs.env import BatchEnv
from raffia.envs.make import env_factory, env_names, make_env
from raffia.envs.probe import ValueProbe
from raffia.envs.timelimit import TimeLimit
from raffia.envs.workers import WorkerBatch


def names(prefix):
    return [name for name in env_names() if name.startswith(prefix)]


@pytest.mark.parametrize("name", ["tictactoe", "connect4", "CartPole-v1", *names("probe/")])
def test_names_become_batches_that_keep_the_contract(name):
    batch = make_env(EnvConfig(id=name, num_envs=3))
    assert isinstance(batch, BatchEnv) and batch.num_envs == 3 and batch.spec.name == name
    check_env(batch, num_steps=20).require()
    assert name in env_names()


def test_minatar_by_name():
    assert len(names("minatar/")) >= 4
    batch = make_env(EnvConfig(id="minatar/breakout", num_envs=2))
    assert batch.reset(torch.arange(2))["observation"].shape[2:] == (10, 10)


def test_names_are_listed_once():
    assert len(set(env_names())) == len(env_names())
    assert "CartPole-v1" in env_names() and "CartPole-v0" not in env_names()


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("cartpole-v1", "CartPole-v1"),
        ("CartPole", "CartPole-v1"),
        ("tic-tac-toe", "tictactoe"),
        ("minatar/brekout", "minatar/breakout"),
        ("probe/policies", "probe/policy"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(wrong, near):
    with pytest.raises(ValueError, match=rf"no environment '{wrong}'\. Did you mean '{near}'\?"):
        make_env(EnvConfig(id=wrong))
    with pytest.raises(ValueError, match="no environment 'qqqq'. All names"):
        make_env(EnvConfig(id="qqqq"))


def test_the_number_of_envs_can_be_set_beside_the_config():
    config = EnvConfig(id="probe/value", num_envs=5)
    assert make_env(config, num_envs=2).num_envs == 2
    with pytest.raises(ValueError, match="num_envs=0 must be at least 1"):
        make_env(config, num_envs=0)


@pytest.mark.parametrize("name", ["CartPole-v1", "tictactoe", "probe/delay"])
def test_limits_of_time_hold_for_all(name):
    batch = make_env(EnvConfig(id=name, num_envs=2, max_episode_steps=1))
    batch.reset(torch.arange(2))
    assert batch.step(torch.tensor([0, 0]))["truncated"].all()


def test_a_limit_of_gymnasium_can_be_raised_too():
    batch = make_env(EnvConfig(id="CartPole-v1", num_envs=1, max_episode_steps=700))
    assert isinstance(batch, SerialBatch) and batch.envs[0].gym.spec.max_episode_steps == 700


def test_envs_that_are_stepped_at_once_take_no_workers():
    with pytest.raises(ValueError, match="tictactoe steps all its env.* at once.*num_workers=0"):
        make_env(EnvConfig(id="tictactoe", num_workers=2))


def test_pictures_are_made_where_they_are_asked_for():
    pytest.importorskip("pygame")
    config = EnvConfig(id="CartPole-v1", num_envs=1)
    for render in (True, False):
        batch = make_env(config, render=render)
        batch.reset(torch.tensor([0]))
        assert (batch.render(0) is not None) == render


def test_atari_shows_true_rewards_and_whole_games_when_evaluated():
    pytest.importorskip("ale_py")
    config = EnvConfig(id="atari/breakout", num_envs=1)
    config = replace(config, atari=replace(config.atari, size=64, colour=False))
    training, evaluation = make_env(config), make_env(config, evaluation=True)
    assert training.spec.observation_shape == (1, 64, 64)
    assert (training.spec.continues, evaluation.spec.continues) == (True, False)
    limited = make_env(replace(config, max_episode_steps=3))
    assert isinstance(limited, TimeLimit)
    training.reset(torch.tensor([0]))
    lost = next(i for i in range(200) if training.step(torch.tensor([1]))["terminated"].any())
    after = training.step(torch.tensor([1]))  # the game goes on
    assert lost > 10 and not after["terminated"].any()


@pytest.mark.slow
def test_envs_of_ones_own_come_as_the_config_says():
    envs = env_factory(ValueProbe)
    batch = envs(EnvConfig(id="mine", num_envs=3, max_episode_steps=7), evaluation=True)
    assert batch.num_envs == 3 and isinstance(batch, TimeLimit)
    assert envs(EnvConfig(id="mine", num_envs=3), num_envs=2, render=True).num_envs == 2
    spread = envs(EnvConfig(id="mine", num_envs=2, num_workers=5))
    try:
        assert isinstance(spread, WorkerBatch)
        assert spread.reset(torch.arange(2))["observation"].shape == (2, 1)
    finally:
        spread.close()
