"""Each built-in environment keeps the contract, alone, in a batch, and made by name."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from raffia.envs.batch import SerialBatch, TimeLimit
from raffia.envs.board import Connect4, TicTacToe
from raffia.envs.check import check_env
from raffia.envs.check_play import moments
from raffia.envs.config import EnvConfig
from raffia.envs.env import BatchEnv, Box
from raffia.envs.gym import GymEnv, gym_names
from raffia.envs.make import env_factory, env_names, make_env, unknown
from raffia.envs.minatar import GAMES
from raffia.envs.opponents import RandomOpponent
from raffia.envs.probe import PROBES, ValueProbe
from raffia.envs.workers import WorkerBatch
from raffia.tensordict import TensorDict

GYMNASIUM = [  # of each kind of space one
    "Acrobot-v1",
    "Blackjack-v1",
    "FrozenLake-v1",
    "LunarLander-v3",
    "LunarLanderContinuous-v3",
    "MountainCarContinuous-v0",
    "Pendulum-v1",
]
NAMED = ["tictactoe", "connect4", "CartPole-v1", *PROBES, *(f"minatar/{name}" for name in GAMES)]
MAKES = {
    **{name: partial(make_env, EnvConfig(id=name, num_envs=3)) for name in NAMED},
    **{name: partial(GymEnv, name) for name in GYMNASIUM},
    "openings of TicTacToe": partial(TicTacToe, 3, random_openings=2),
    "openings of Connect4": partial(Connect4, 3, random_openings=2),
}


@pytest.mark.parametrize("name", MAKES)
def test_environments_keep_the_contract(name):
    if name.startswith("Lunar"):
        pytest.importorskip("Box2D")
    env = MAKES[name]()
    if name in NAMED:
        assert isinstance(env, BatchEnv) and env.num_envs == 3 and env.spec.name == name
        assert name in env_names()
    elif name in GYMNASIUM:
        assert name in gym_names()
    check_env(MAKES[name], num_steps=40).require()


@pytest.mark.parametrize("name", ["probe/delay", "tictactoe", "connect4", "atari/pong"])
def test_the_default_dtype_of_torch_changes_no_output(name):
    make = partial(make_env, EnvConfig(id=name, num_envs=2))
    expected = [moment.outputs for moment in moments(make(), seed=0, num_steps=4)]
    torch.set_default_dtype(torch.float64)
    try:
        found = [moment.outputs for moment in moments(make(), seed=0, num_steps=4)]
        opponent = RandomOpponent(Box((-1.0,), (1.0,))).act(TensorDict(batch_size=[2]))
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert {k: v.dtype for k, v in one.items()} == {k: v.dtype for k, v in other.items()}
        assert (one == other).all()
    assert opponent.dtype == torch.float32


def test_names_are_listed_once_and_the_nearest_is_named():
    assert len(set(env_names())) == len(env_names())
    assert "CartPole-v1" in env_names() and "CartPole-v0" not in env_names()
    for wrong, near in (
        ("cartpole-v1", "CartPole-v1"),
        ("CartPole", "CartPole-v1"),
        ("pendulum-v7", "Pendulum-v1"),
        ("tic-tac-toe", "tictactoe"),
        ("minatar/brekout", "minatar/breakout"),
        ("probe/policies", "probe/policy"),
    ):
        with pytest.raises(ValueError, match=rf"environment '{wrong}'\. Did you mean '{near}'\?"):
            make_env(EnvConfig(id=wrong))
    assert "Did you mean" not in str(unknown("Nope-v0"))  # only its version is like that of others
    for config, message in (
        (EnvConfig(id="qqqq"), "no environment 'qqqq'. All names"),
        (EnvConfig(id="tictactoe", num_workers=2), "steps all its env.* together.*num_workers=0"),
    ):
        with pytest.raises(ValueError, match=message):
            make_env(config)


@pytest.mark.parametrize("name", ["CartPole-v1", "tictactoe", "probe/delay"])
def test_episode_limits_and_num_envs_apply_to_all_kinds(name):
    config = EnvConfig(id=name, num_envs=2, max_episode_steps=1)
    batch = make_env(config)
    batch.reset(torch.arange(2))
    assert batch.step(torch.tensor([0, 0]))["truncated"].all()
    assert make_env(config, num_envs=5).num_envs == 5
    with pytest.raises(ValueError, match="num_envs=0 must be at least 1"):
        make_env(config, num_envs=0)
    raised = make_env(EnvConfig(id="CartPole-v1", num_envs=1, max_episode_steps=700))
    assert isinstance(raised, SerialBatch) and raised.envs[0].gym.spec.max_episode_steps == 700


def test_atari_shows_whole_games_when_evaluated():
    pytest.importorskip("ale_py")
    config = EnvConfig(id="atari/breakout", num_envs=1)
    config = replace(config, atari=replace(config.atari, size=64, colour=False))
    training, evaluation = make_env(config), make_env(config, evaluation=True)
    assert training.spec.observation_shape == (1, 64, 64)
    assert (training.spec.continues, evaluation.spec.continues) == (True, False)
    assert isinstance(make_env(replace(config, max_episode_steps=3)), TimeLimit)
    training.reset(torch.tensor([0]))
    lost = next(i for i in range(200) if training.step(torch.tensor([1]))["terminated"].any())
    after = training.step(torch.tensor([1]))  # the game goes on
    assert lost > 10 and not after["terminated"].any()


@pytest.mark.slow
def test_custom_envs_follow_the_config():
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
