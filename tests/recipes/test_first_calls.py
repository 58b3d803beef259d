"""First calls from Python: what is nearly right gets the call that works, and leaves nothing."""

from dataclasses import replace

import gymnasium
import pytest

from raffia.envs.batch import SerialBatch
from raffia.envs.config import EnvConfig
from raffia.envs.env import Discrete, EnvSpec
from raffia.envs.make import env_factory, make_env
from raffia.envs.probe import ValueProbe
from raffia.recipes import ILQL_PRESETS, PRESETS, ilql
from raffia.recipes.efficientzero import train
from raffia.recipes.efficientzero.experiment import wants_a_gpu
from tests.recipes.runs import Quiet, short


def cartpole():
    return gymnasium.make("CartPole-v1")


class TestTrain:
    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ("cartpole", r"'cartpole' is a name: pass PRESETS\['cartpole'\]"),
            (ILQL_PRESETS["ilql-smoke"], "settings of ilql: train them by raffia.recipes.ilql"),
            ({"seed": 1}, "config is a dict; it must be a raffia.recipes.EfficientZeroRun"),
            (None, "config is a NoneType"),
        ],
    )
    def test_what_is_no_config_is_refused_and_no_folder_is_left(self, tmp_path, config, message):
        with pytest.raises(TypeError, match=message):
            train(config, tmp_path / "run")
        assert not (tmp_path / "run").exists()

    def test_of_ilql_too(self, tmp_path):
        with pytest.raises(TypeError, match=r"pass ILQL_PRESETS\['wordle'\]"):
            ilql.train("wordle", tmp_path / "run")
        with pytest.raises(TypeError, match="settings of efficientzero"):
            ilql.train(PRESETS["smoke"], tmp_path / "run")
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("envs", "message"),
        [
            (cartpole(), r"make_env is one environment, a .*: pass make_env=env_factory\(make\)"),
            (
                ValueProbe,
                r"make_env is the class ValueProbe: pass make_env=env_factory\(ValueProbe\)",
            ),
            (lambda config, **_: cartpole(), r"make_env\(config\) gave a .*, which is no batch"),
            (
                lambda config, **_: ValueProbe(),
                r"make_env\(config\) gave a ValueProbe, which is no",
            ),
        ],
    )
    def test_an_environment_in_place_of_what_makes_them(self, tmp_path, envs, message):
        with pytest.raises(TypeError, match=message):
            train(short(), tmp_path / "run", make_env=envs, view=Quiet())
        assert not (tmp_path / "run").exists()

    def test_environments_of_gymnasium_can_be_trained_on_as_they_are(self, tmp_path):
        result = train(short(48), tmp_path / "run", make_env=env_factory(cartpole), view=Quiet())
        assert result.reason == "finished"


class TestMakeEnv:
    def test_a_name_gets_the_call(self):
        with pytest.raises(TypeError, match=r"make_env\(EnvConfig\(id='CartPole-v1'\)\)"):
            make_env("CartPole-v1")

    def test_an_environment_gets_the_call(self):
        with pytest.raises(TypeError, match=r"takes an EnvConfig.*env_factory"):
            make_env(cartpole())

    def test_a_raw_one_is_no_row_of_a_batch(self):
        with pytest.raises(TypeError, match=r"becomes one by raffia.envs.GymEnv\(env\)"):
            SerialBatch([cartpole()])

    @pytest.mark.slow
    def test_workers_take_those_of_gymnasium_too(self):
        batch = env_factory(cartpole)(EnvConfig(id="mine", num_envs=2, num_workers=2))
        assert batch.num_envs == 2
        batch.close()


class TestPicturesOnACPU:
    def spec(self, *shape):
        return EnvSpec(observation_shape=shape, action=Discrete(3), name="pictures")

    def test_are_told_to_want_a_gpu(self):
        atari = PRESETS["atari-pong"]
        said = wants_a_gpu(atari, self.spec(1, 64, 64))
        assert "64x64 on a CPU" in said and f"{atari.num_updates:,}" in said
        assert "--device cuda" in said

    def test_but_not_boards_vectors_or_where_there_is_one(self):
        atari = PRESETS["atari-pong"]
        assert not wants_a_gpu(atari, self.spec(4, 10, 10))
        assert not wants_a_gpu(atari, self.spec(4))
        assert not wants_a_gpu(replace(atari, device="cuda"), self.spec(1, 64, 64))
