"""First calls from Python: what is nearly right gets the call that works, and leaves nothing."""

from dataclasses import fields, is_dataclass, replace

import gymnasium
import numpy as np
import pytest

from raffia.envs.batch import SerialBatch
from raffia.envs.config import EnvConfig
from raffia.envs.env import Discrete, EnvSpec
from raffia.envs.make import env_factory, make_env
from raffia.envs.probe import ValueProbe
from raffia.recipes import ILQL_PRESETS, PRESETS, EfficientZeroRun, ILQLRun, ilql
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


class TestPresets:
    @pytest.mark.parametrize("presets", [PRESETS, ILQL_PRESETS])
    def test_the_nearest_name_is_told(self, presets):
        name = list(presets)[1]
        with pytest.raises(KeyError, match=f"did you mean '{name}'"):
            presets[name[:-1]]
        assert presets.get(name[:-1]) is None and name[:-1] not in presets

    def test_a_name_that_is_like_none(self):
        with pytest.raises(KeyError, match="there are smoke, cartpole, "):
            PRESETS["?"]


class TestTypes:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"seed": "a"}, "seed='a' must be a whole number"),
            ({"seed": True}, "seed=True must be a whole number"),
            ({"seed": np.int64(3)}, r"seed=np.int64\(3\) must be a whole number; write 3"),
            ({"num_threads": "2"}, "num_threads='2' must be a whole number"),
            ({"device": 3}, "device=3 must be a text"),
            ({"compile": 1}, "compile=1 must be True or False"),
            ({"env": "CartPole-v1"}, "env='CartPole-v1' must be a EnvConfig"),
        ],
    )
    def test_a_value_of_another_type_is_refused(self, change, message):
        with pytest.raises(ValueError, match=message):
            replace(PRESETS["smoke"], **change)

    def test_also_deep_inside_and_where_a_bound_is_asked_for(self):
        smoke = PRESETS["smoke"]
        with pytest.raises(ValueError, match="num_envs='4' must be a whole number"):
            EnvConfig(num_envs="4")
        model = replace(smoke.model)
        object.__setattr__(model, "norm_type", 3)
        with pytest.raises(ValueError, match="temperatures=.* must be a tuple, each a number;"):
            replace(smoke, search=replace(smoke.search, temperatures=[1.0], temperature_from=[0.0]))

    @pytest.mark.parametrize("kind", [EfficientZeroRun, ILQLRun])
    def test_every_field_refuses_what_no_setting_is(self, kind):
        """Of every config that a run holds, at any depth."""
        presets = PRESETS if kind is EfficientZeroRun else ILQL_PRESETS
        run = next(iter(presets.values()))
        seen = 0
        for rebuild, field in every_field(run):
            with pytest.raises((ValueError, TypeError)) as caught:
                rebuild(object())
            assert field in str(caught.value), field
            seen += 1
        assert seen > 50

    def test_all_presets_are_of_their_types(self):
        for run in (*PRESETS.values(), *ILQL_PRESETS.values()):
            assert replace(run) == run


def every_field(config, rebuild=lambda changed: changed):
    """A function for each field that makes the whole run again with another value of it."""
    for field in fields(config):

        def change(value, name=field.name):
            return rebuild(replace(config, **{name: value}))

        yield change, field.name
        inner = getattr(config, field.name)
        if is_dataclass(inner):
            yield from every_field(inner, change)


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
