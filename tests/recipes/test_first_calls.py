"""First calls from Python: errors for common mistakes name the call that works."""

from contextlib import closing
from dataclasses import replace

import gymnasium
import pytest

from raffia.envs import (
    Discrete,
    EnvConfig,
    EnvSpec,
    GymEnv,
    SerialBatch,
    check_env,
    env_factory,
    make_env,
)
from raffia.envs.probe import ValueProbe
from raffia.recipes import ILQL_PRESETS, PRESETS, train
from raffia.recipes.efficientzero.experiment import wants_a_gpu
from tests.recipes.runs import Quiet, short


def cartpole():
    return gymnasium.make("CartPole-v1")


def train_in(envs):
    return lambda folder: train(short(), folder, make_env=envs, view=Quiet())


CALLS = [
    (lambda run: train("cartpole", run), r"is a name: pass PRESETS\['cartpole'\]"),
    (lambda run: train(ILQL_PRESETS["ilql-smoke"], run, networks=print), "ILQL takes make_env"),
    (lambda run: train({"seed": 1}, run), "config is a dict, but must be a .*EfficientZeroRun"),
    (lambda run: train("wordle", run), r"pass ILQL_PRESETS\['wordle'\]"),
    (train_in(cartpole()), r"one environment, a .*: pass make_env=env_factory\(make\)"),
    (train_in(ValueProbe), r"the class ValueProbe: pass make_env=env_factory\(ValueProbe\)"),
    (train_in(lambda config, **_: cartpole()), r"\(config\) returned a .*, which is not a bat"),
    (lambda _: make_env("CartPole-v1"), r"make_env\(EnvConfig\(id='CartPole-v1'\)\)"),
    (lambda _: make_env(cartpole()), r"needs an EnvConfig.*env_factory"),
    (lambda _: env_factory(cartpole()), "a function that makes an environment, not a TimeLimit"),
    (lambda _: check_env("CartPole-v1"), "not 'CartPole-v1': such as lambda: GymEnv"),
    (lambda _: GymEnv(type(cartpole().unwrapped)), "needs one environment .*CartPoleEnv"),
    (lambda _: GymEnv(gymnasium.make_vec("CartPole-v1", 2)), "one environment .*CartPoleVectorE"),
    (lambda _: SerialBatch([cartpole()]), r"raffia.envs.GymEnv\(env\) makes one"),
]


def test_errors_of_common_mistakes_name_the_call_and_leave_no_folder(tmp_path):
    for call, message in CALLS:
        with pytest.raises(TypeError, match=message):
            call(tmp_path / "run")
        assert not (tmp_path / "run").exists(), message


def test_a_gymnasium_environment_can_be_trained_on(tmp_path):
    result = train(short(48), tmp_path / "run", make_env=env_factory(cartpole), view=Quiet())
    assert result.reason == "finished"


@pytest.mark.slow
def test_workers_take_gymnasium_environments():
    with closing(env_factory(cartpole)(EnvConfig(id="mine", num_envs=2, num_workers=2))) as batch:
        assert batch.num_envs == 2


def test_images_on_a_cpu_get_a_hint_to_use_a_gpu():
    """Boards, vectors and runs on a GPU get no hint."""
    atari = PRESETS["atari-pong"]
    pictures, board, vector = (
        EnvSpec(observation_shape=shape, action=Discrete(3), name="pictures")
        for shape in ((1, 64, 64), (4, 10, 10), (4,))
    )
    message = wants_a_gpu(atari, pictures)
    assert "64x64 on a CPU" in message and f"{atari.num_updates:,}" in message
    assert "--device cuda" in message
    assert not wants_a_gpu(atari, board) and not wants_a_gpu(atari, vector)
    assert not wants_a_gpu(replace(atari, device="cuda"), pictures)
